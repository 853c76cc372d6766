"""Picks run live: a quality law calibrated on a few live margins, and each prediction beside its live figure."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simlab
from simlab.cells import build_cells, recorded_budget
from simlab.errors import InputError
from simlab.judge.pick_settings import Rise, Setting, rise_of
from simlab.judge.quality.law import QualityModel, calibrate
from simlab.judge.speed.time_check_live import CheckedRun, check_cells
from simlab.judge.validate import check_live, planned_graphs, run_live
from simlab.record.engine import Engine
from simlab.trace.provenance import trace_provenance
from simlab.trace.store import Trace
from simlab.types import Cell, Provenance

CALIBRATION_MARGINS = ("0.15", "0.3", "0.6")
"""Margins of the live runs a quality law is fitted on, at the recorded budget."""


def calibrate_law(
    trace: Trace,
    model: str | os.PathLike[str] | None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> QualityModel:
    """Fit a quality law on live runs of the trace's own tokens under `CALIBRATION_MARGINS`.

    Args:
        options: of `Engine`.

    Raises:
        InputError: the trace was not recorded under the original routing, or carries no losses, scores or token ids.
    """
    header = trace.header
    if not header.router_known or (header.route or "original") != "original":
        raise InputError(
            f"{trace.path}: was recorded under {header.route or 'an unknown routing'}, and a rise in perplexity is one "
            "over the original routing; calibrate on a trace of that, or give --calibration F.json"
        )
    cells = build_cells(
        budgets=[recorded_budget(header) or "off"],
        margins=CALIBRATION_MARGINS,
        scope=header.scope or "global",
    )
    check_live(trace, model)
    graphs = planned_graphs(trace)
    with tempfile.TemporaryDirectory(prefix="simlab-law-") as folder, Engine(model, **options) as engine:
        recordings = []
        for i, cell in enumerate(cells):
            recordings.append(run_live(engine, graphs, cell, Path(folder) / f"{i}.trace"))
            if progress is not None:
                progress((i + 1) / len(cells))
        of = trace_provenance(header)
        provenance = Provenance(engine.model.digest, of.text, simlab=simlab.__version__)
        return QualityModel.fit(calibrate(trace, recordings), provenance=provenance)


@dataclass(frozen=True)
class CheckedPick:
    """A pick, one live run of it, and whether each prediction held."""

    setting: Setting
    run: CheckedRun
    live_rise: float | None
    """Relative rise in perplexity over the recorded cell, live; null where no loss is known."""

    @property
    def speed_held(self) -> bool:
        """Whether the live tokens/s fell inside the interval at today's speed."""
        return self.run.inside(1)

    @property
    def bytes_held(self) -> bool:
        """Whether the live MiB per token fell inside the interval."""
        live = self.run.live.decode.read_mib_per_token
        low, high = self.setting.mib_interval
        return live is not None and low <= live <= high

    @property
    def rise_held(self) -> bool | None:
        """Whether the live rise in perplexity fell inside its interval; null where either is not known."""
        rise: Rise | None = self.setting.rise
        if rise is None or self.live_rise is None:
            return None
        return rise.low <= self.live_rise <= rise.high


def check_picks(
    trace: Trace,
    recorded: Cell,
    picks: Sequence[Setting],
    model: str | os.PathLike[str] | None,
    *,
    repeats: int,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> list[CheckedPick]:
    """Run picks live in turns with the recorded cell; one entry per run, in the order of the picks.

    Raises:
        InputError: as `check_cells`.
    """
    found = check_cells(
        trace, recorded, [p.cell for p in picks], model, repeats=repeats, progress=progress, **options
    )
    original = (trace.header.route or "original") == "original"

    def live_rise(run: CheckedRun) -> float | None:
        if run.delta_nll is None or not original:
            return None
        return rise_of(run.delta_nll, run.delta_nll, run.delta_nll).value

    runs = sorted(found.runs, key=lambda run: (run.cell, run.group))
    return [CheckedPick(picks[run.cell], run, live_rise(run)) for run in runs]
