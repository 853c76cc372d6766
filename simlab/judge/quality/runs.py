"""From a grid of live runs to calibration runs, and to a law with its verdicts: what `simlab quality` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simlab.errors import InputError
from simlab.judge.fidelity.grid import original_cell
from simlab.judge.fidelity.runs import RunStore
from simlab.judge.quality.check import JudgedRun, LiveRun, Perfect, leave_texts_out, perfect
from simlab.judge.quality.law import FORMS, QualityModel, calibrate
from simlab.judge.scores.ppl import Text
from simlab.judge.scores.scoring import Tick
from simlab.types import Cell, Provenance


@dataclass(frozen=True)
class Quality:
    """A law, and how every form did on texts left out."""

    model: QualityModel
    """Fitted on the calibration runs of all texts."""
    runs: list[LiveRun]
    judged: list[JudgedRun]
    """Empty with a single text, which leaves nothing to fit on."""
    perfect: Perfect | None
    """What the form would get on the margins if it were true; None with a single text."""


def live_runs(
    texts: Sequence[Text],
    cells: Sequence[Cell],
    store: RunStore,
    progress: Tick | None = None,
    *,
    train: str | None = None,
) -> list[LiveRun]:
    """Run every text under every cell and under the original routing, and pair them token by token.

    Cells that leave every expert where it is are left out: nothing is to be foretold of them.
    """
    bases = store.record(texts, [original_cell(cells[0])])[0]
    recorded = store.record(texts, cells, progress)
    found = []
    for i, (text, base) in enumerate(zip(texts, bases, strict=True)):
        runs = calibrate(base, [of[i] for of in recorded], text.name, cells=cells, train=train)
        for cell, run in zip(cells, runs, strict=True):
            if run.standard_error > 0:
                found.append(LiveRun(cell, run))
    return found


def is_margin(cell: Cell) -> bool:
    """Whether a cell substitutes by a margin and does nothing else."""
    return cell.margin is not None and len(cell.route.steps) == 1


def calibrates(cell: Cell, margins: Sequence[float], budgets: Sequence[str]) -> bool:
    """Whether a cell is one that laws are fitted on: substitution alone, at these margins and budgets."""
    return is_margin(cell) and cell.margin in margins and cell.budget.text in budgets


def judge(
    runs: Sequence[LiveRun],
    margins: Sequence[float],
    budgets: Sequence[str],
    form: str,
    provenance: Provenance | None = None,
) -> Quality:
    """Fit a form on the calibration runs of all texts, and every form with each text left out.

    Args:
        provenance: model and texts of the runs.

    Raises:
        InputError: no run is under a cell to fit on.
    """

    def fits(cell: Cell) -> bool:
        return calibrates(cell, margins, budgets)

    chosen = [live.run for live in runs if fits(live.cell)]
    if not chosen:
        said = ", ".join(f"{m:g}" for m in margins)
        raise InputError(f"--calibrate {said}: no live run has such a margin at {', '.join(budgets)}")
    several = len({live.run.text for live in runs}) > 1
    judged = leave_texts_out(runs, fits, tuple(FORMS)) if several else []
    best = perfect([live for live in runs if is_margin(live.cell)], fits, form) if several else None
    return Quality(QualityModel.fit(chosen, form, provenance), list(runs), judged, best)


def without_budget(
    runs: Sequence[LiveRun], margins: Sequence[float], budgets: Sequence[str]
) -> list[JudgedRun]:
    """Every run foretold by laws that saw neither its text nor its budget; needs two budgets."""
    judged = []
    for budget in budgets:
        others = [b for b in budgets if b != budget]
        found = leave_texts_out(runs, lambda cell, others=others: calibrates(cell, margins, others))
        judged += [replace(run, calibrated=False) for run in found if run.cell.budget.text == budget]
    return judged
