"""Foretold speeds beside live ones: `simlab time T.trace --check`.

Every cell runs live on the trace's own tokens, in turns with the recorded cell (`time_live`), and two predictions
are set beside each run:

- *from the trace*: as `simlab time` gives it, for this machine at some other moment;
- *at today's speed*: the same, its parts scaled by what those of the recorded cell took in the same turns. It still
  comes from the trace: of the cell itself nothing live is looked at.

Both have intervals. Beside them stand intervals of one width for all cells, taken from calibration residuals: for
each cell the 95th percentile of what the predictions of the *other* cells were off. The first tokens of every run, and
of every turn, are left out on both sides. Cells that are inert by construction are run and shown but not scored. What
the recorded cell took is kept as a look at how far moments of this machine are apart (`moments`).
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from simlab.errors import InputError
from simlab.judge.measure import measure
from simlab.judge.speed.moments import Moments, keep_look
from simlab.judge.speed.time_live import run_interleaved
from simlab.judge.speed.token_time import Floats, Timings
from simlab.judge.speed.trace_time import timings_of_trace
from simlab.judge.speed.trace_time_cells import Costs, Foreteller, Foretold, TokenWork, by_costs, replay_work
from simlab.judge.speed.trace_time_reads import capped
from simlab.judge.stats import LEVEL, Coverage, Interval, coverage
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, CellNumbers

WARM_UP_TOKENS = 16
"""Decode tokens at the start of every run that are left out, at most a quarter of them."""
METHODS = ("from the trace", "at today's speed", "from the trace, one width", "at today's speed, one width")


@dataclass(frozen=True)
class CheckedRun:
    """One live run with what was foretold for it. Speeds in tokens/s of the tokens that count."""

    cell: int
    group: int
    live_tok_s: float
    from_trace: Foretold
    today: Foretold
    constant: tuple[Interval, Interval]
    """Of one width for all cells, about the first and the second prediction; NaN without other cells."""
    live_parts_ms: dict[str, float]
    live: CellNumbers
    """All of its decode tokens, the first ones too."""
    delta_nll: float | None
    """Mean loss less that of the recorded cell in the same group, nats per token; null where no loss is known."""
    machine: dict[str, float | None]

    def inside(self, method: int) -> bool:
        """Whether the live speed fell inside the interval of one of `METHODS`."""
        interval = self.interval(method)
        return interval.low <= self.live_tok_s <= interval.high

    def interval(self, method: int) -> Interval:
        """The interval of one of `METHODS`."""
        return (self.from_trace.tok_s_interval, self.today.tok_s_interval, *self.constant)[method]


@dataclass(frozen=True)
class LiveCheck:
    """All runs of a check, and what came of the two predictions."""

    cells: Sequence[Cell]
    numbers: Sequence[CellNumbers]
    """Of their replays."""
    inert: Sequence[str | None]
    """Why a cell is not scored, null for those that are."""
    runs: Sequence[CheckedRun]
    counted: int
    """Tokens of every run that count, after warm-up and turns' beginnings."""
    reference_tok_s: Sequence[float]
    """Of the recorded cell's live runs, one per group."""
    recorded_tok_s: float
    moments: Moments
    """What was known of the machine from one moment to another before this check."""
    kept: bool
    """Whether this check is kept as a look at that."""

    @property
    def scored(self) -> list[CheckedRun]:
        """Runs of cells that are not inert."""
        return [run for run in self.runs if self.inert[run.cell] is None]

    def errors(self, today: bool) -> np.ndarray:
        """Relative errors of the predicted speed, one per scored run."""
        return np.array(
            [(run.today if today else run.from_trace).tok_s / run.live_tok_s - 1 for run in self.scored]
        )

    def median_error(self, today: bool) -> float:
        """Median absolute relative error over the scored runs; NaN without any."""
        errors = np.abs(self.errors(today))
        return float(np.median(errors)) if len(errors) else math.nan

    def cover(self, method: int) -> Coverage:
        """Coverage and mean interval score, in tokens/s, of one of `METHODS` over the scored runs."""
        ends = np.array([run.interval(method) for run in self.scored]).reshape(-1, 2)
        return coverage(ends[:, 0], ends[:, 1], np.array([run.live_tok_s for run in self.scored]), LEVEL)


def check_cells(
    trace: Trace,
    recorded: Cell,
    cells: Sequence[Cell],
    model: str | os.PathLike[str] | None,
    *,
    repeats: int = 2,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> LiveCheck:
    """Foretell cells from a trace, run them live in turns with the recorded cell, and compare.

    Args:
        recorded: the cell the trace was recorded under.
        options: of `Engine`; as the trace was recorded, or the two are not of the same thing.

    Raises:
        InputError: the trace has no read timings or token ids, a training part in it, or what `foretell` and
            `run_interleaved` refuse.
    """
    say = progress or (lambda _share: None)
    train = options.get("train")
    teller = Foreteller(trace, recorded, train=train)
    costs, later = teller.costs, teller.later
    if costs is None or later is None:
        raise InputError(
            f"{trace.path}: has no time of every read, miss and eviction, so it cannot be checked live; record it with "
            "simlab record"
        )
    warm_up = min(WARM_UP_TOKENS, len(costs.work.graph) // 4)
    counted = np.ones(len(costs.work.graph), dtype=bool)
    replayed = [
        (r.numbers, r.work, teller.policy_ms(r.numbers.cell))
        for r in replay_work(trace, cells, train=train, progress=lambda s: say(0.3 * s))
    ]
    runs: list[CheckedRun] = []
    references: list[float] = []
    levels: list[float] = []
    with tempfile.TemporaryDirectory(prefix="simlab-live-") as folder:
        today, losses = costs, None
        for live in run_interleaved(
            trace, recorded, cells, model, Path(folder), repeats=repeats, warm_up=warm_up,
            progress=lambda s: say(0.3 + 0.7 * s), **options,
        ):  # fmt: skip
            found, counted = timings_of_trace(live.trace), live.counted
            tok_s = 1e3 / float(found.wall_ms[counted].mean())
            if live.cell < 0:
                references.append(tok_s)
                levels.append(float(capped(found.wall_ms[counted]).mean()))
                today, losses = at_speed(costs, found), _losses(live.trace)
                continue
            numbers, work, policy_ms = replayed[live.cell]
            from_trace, now = (by_costs(of, numbers, work.of(counted), policy_ms) for of in (later, today))
            runs.append(
                CheckedRun(
                    live.cell, live.group, tok_s, from_trace, now, (_NOWHERE, _NOWHERE),
                    _live_parts(found, counted), measure(live.trace, cells[live.cell]),
                    _difference(losses, _losses(live.trace)), live.machine,
                )
            )  # fmt: skip
    recorded_tok_s = 1e3 / float(costs.wall[counted].mean())
    header, level = trace.header, float(capped(costs.wall[counted]).mean())
    # Of levels, without pauses: those are chance, and one of seconds is nothing that a machine's speed does.
    ratios = [math.log(now / level) for now in levels]
    kept = keep_look(header.cpu, header.model, header.created, ratios, int(counted.sum()))
    past = costs.work.of(counted)
    inert = [_inert(past, work.of(counted), cell) for (_, work, _), cell in zip(replayed, cells, strict=True)]
    return LiveCheck(
        cells, [one[0] for one in replayed], inert, _with_constant(runs, inert), int(counted.sum()), references,
        recorded_tok_s, teller.moments, kept,
    )  # fmt: skip


_NOWHERE = Interval(math.nan, math.nan)


def _losses(trace: Trace) -> np.ndarray:
    """nll of every decoded token, in order, NaN where it is not known."""
    decode = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
    found = trace.collect("tokens", trace.tokens.filter(decode).sort("graph").select("nll"))
    return found["nll"].fill_null(math.nan).to_numpy()


def _difference(reference: np.ndarray | None, losses: np.ndarray) -> float | None:
    """Mean of the differences that are known; None without any."""
    if reference is None:
        return None
    both = losses - reference
    known = both[np.isfinite(both)]
    return float(known.mean()) if len(known) else None


def _live_parts(found: Timings, counted: np.ndarray) -> dict[str, float]:
    assert found.management_ms is not None
    parts = {"compute": found.compute_ms, "management": found.management_ms, "reads": found.exposed_ms}
    return {name: float(values[counted].mean()) for name, values in parts.items()}


def at_speed(costs: Costs, reference: Timings) -> Costs:
    """What a trace's tokens cost at the speed of a live run of the recorded cell, with that run's own chance.

    Args:
        reference: the recorded cell's live run; the changes that other cells make are scaled by what its compute,
            management and reads took of the recorded ones.
    """
    assert reference.management_ms is not None
    compute, management, wait = map(
        capped, (reference.compute_ms, reference.management_ms, reference.exposed_ms)
    )

    def ratio(now: Floats, then: Floats) -> float:
        mean = float(then.mean())
        return float(now.mean()) / mean if mean > 0 else 1.0

    slower = ratio(wait, costs.wait)
    return replace(
        costs,
        wall=reference.wall_ms,
        wait=wait,
        management=management,
        compute=compute,
        compute_per_miss=costs.compute_per_miss * ratio(compute, costs.compute),
        management_per_move=costs.management_per_move * ratio(management, costs.management),
        reads=costs.reads.slowed(slower),
    )


def _inert(recorded: TokenWork, work: TokenWork, cell: Cell) -> str | None:
    """Why a cell says nothing of a prediction, or None: it moves what the recorded one moves, and does no more."""
    own = [s for s in cell.route.steps if not s.policy.is_builtin("original") and any(s.knobs.values())]
    same = np.array_equal(recorded.misses, work.misses) and np.array_equal(recorded.evictions, work.evictions)
    return "inert: as recorded" if same and not own else None


def _with_constant(runs: Sequence[CheckedRun], inert: Sequence[str | None]) -> list[CheckedRun]:
    """The runs with intervals of one width, from what the predictions of other cells were off."""

    def around(run: CheckedRun, today: bool) -> Interval:
        def foretold(r: CheckedRun) -> float:
            return (r.today if today else r.from_trace).tok_s

        off = sorted(
            abs(r.live_tok_s - foretold(r)) for r in runs if r.cell != run.cell and inert[r.cell] is None
        )
        if not off:
            return _NOWHERE
        half = off[min(len(off), math.ceil((len(off) + 1) * LEVEL)) - 1]
        return Interval(foretold(run) - half, foretold(run) + half)

    return [replace(run, constant=(around(run, False), around(run, True))) for run in runs]
