"""Speeds foretold from a replay beside live ones, for the cells of a fidelity grid.

The first tokens of every text are recorded under the original routing and every cell is run live in turns with that
recording's cell (A B B A), its first tokens left out (`time_check_live.py`, where prediction and runs come from).
The machine's load, free memory and clock are kept with each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simlab.judge.fidelity.grid import original_cell
from simlab.judge.fidelity.runs import RunStore
from simlab.judge.scores.ppl import Text
from simlab.judge.scores.scoring import Tick
from simlab.judge.speed.time_check_live import CheckedRun, check_cells
from simlab.judge.stats import Interval, block_bootstrap_mean
from simlab.types import Cell

SPEED_TOKENS = 256
"""Of each text: speeds settle within some tens of tokens, and turns are many."""


@dataclass(frozen=True)
class SpeedRow:
    """One cell's speed over all texts and repeats. Errors are foretold over live, less 1, in %."""

    cell: Cell
    live_tok_s: float
    """Median over the runs."""
    foretold_tok_s: float
    """Median of what the recording foretells, simulated."""
    error: float
    """Mean over the runs, of what the recording foretells at the speed that the machine had in the same turns."""
    interval: Interval
    """95 % of that mean, over runs."""
    error_from_trace: float
    """The same without regard to how fast the machine was."""
    runs: Sequence[CheckedRun]


def speeds(
    texts: Sequence[Text],
    cells: Sequence[Cell],
    store: RunStore,
    repeats: int,
    model: str | Path | None,
    progress: Tick | None = None,
    **options: Any,
) -> list[SpeedRow]:
    """Record, foretell and run the beginning of every text, `repeats` times under each cell.

    Args:
        options: of `Engine`.

    Raises:
        InputError: as `check_cells`.
    """
    original = original_cell(cells[0])
    short = [Text(f"{text.name}-{SPEED_TOKENS}", text.tokens[:SPEED_TOKENS]) for text in texts]
    bases = store.record(short, [original])[0]
    # An engine of the store would compete with those of the check for memory and threads.
    store.engines.close()
    runs: list[CheckedRun] = []
    for i, base in enumerate(bases):

        def tick(share: float, i: int = i) -> None:
            if progress is not None:
                progress((i + share) / len(bases))

        runs += check_cells(base, original, cells, model, repeats=repeats, progress=tick, **options).runs
    return [_row(cell, [run for run in runs if run.cell == i]) for i, cell in enumerate(cells)]


def _row(cell: Cell, runs: Sequence[CheckedRun]) -> SpeedRow:
    live = np.array([run.live_tok_s for run in runs])
    today = 100 * (np.array([run.today.tok_s for run in runs]) / live - 1)
    from_trace = np.array([run.from_trace.tok_s for run in runs])
    return SpeedRow(
        cell,
        float(np.median(live)),
        float(np.median(from_trace)),
        float(today.mean()),
        block_bootstrap_mean([today], block=1),
        float((100 * (from_trace / live - 1)).mean()),
        runs,
    )
