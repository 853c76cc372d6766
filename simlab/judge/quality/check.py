"""How well quality laws foretell live runs they have not seen: texts, margins, budgets and policies left out.

Each text is left out in turn: a law is fitted on the other texts' runs under the calibration cells, and foretells all
runs of the text that was left out. Its errors are taken in standard errors of the live difference, which is known no
better than that itself; with a perfect law the median would be 0.67 and the 90th percentile 1.64, and a little more
where the law is fitted on few tokens. Cells of the calibration appear among the judged with other texts; margins,
budgets and policies that no calibration run had are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from simlab.errors import InputError
from simlab.judge.quality.law import FORMS, LEVEL, Calibration, QualityModel
from simlab.judge.stats import Coverage, coverage
from simlab.types import Cell


@dataclass(frozen=True)
class JudgedRun:
    """One live run beside what a law fitted on other texts foretold."""

    form: str
    text: str
    cell: Cell
    calibrated: bool
    """Whether other texts' runs under this cell were among those it was fitted on."""
    delta_nll: float
    standard_error: float
    predicted: float
    low: float
    high: float

    @property
    def errors(self) -> float:
        """How far off, in standard errors of the live difference."""
        return abs(self.predicted - self.delta_nll) / self.standard_error


@dataclass(frozen=True)
class Verdict:
    """How a form fared over a set of runs."""

    form: str
    runs: int
    median: float
    """Of the errors, in standard errors of the live difference."""
    percentile_90: float
    bias: float
    """Median of the signed errors, in the same unit: above zero where it foretells too much."""
    held: Coverage
    """Of the 90 % intervals."""


@dataclass(frozen=True)
class LiveRun:
    """A live run under a cell with the features of its replay."""

    cell: Cell
    run: Calibration


def leave_texts_out(
    runs: Sequence[LiveRun], calibrates: Callable[[Cell], bool], forms: Sequence[str] = tuple(FORMS)
) -> list[JudgedRun]:
    """Foretell every run of each text with laws fitted on the other texts.

    Args:
        calibrates: whether runs under a cell may be fitted on.

    Raises:
        InputError: fewer than two texts, or no run to fit on.
    """
    texts = sorted({live.run.text for live in runs})
    if len(texts) < 2:
        raise InputError(
            f"--text: {len(texts)} text leaves none to fit on when it is left out; give two or more"
        )
    judged = []
    for text in texts:
        fitted_on = [live.run for live in runs if live.run.text != text and calibrates(live.cell)]
        left_out = [live for live in runs if live.run.text == text]
        features = pl.DataFrame([dict(live.run.features) for live in left_out])
        for form in forms:
            for live, predicted in zip(
                left_out, QualityModel.fit(fitted_on, form).predict(features), strict=True
            ):
                judged.append(
                    JudgedRun(
                        form,
                        text,
                        live.cell,
                        calibrates(live.cell),
                        live.run.delta_nll,
                        live.run.standard_error,
                        *predicted,
                    )
                )
    return judged


def verdict(judged: Sequence[JudgedRun]) -> Verdict:
    """What became of one form's predictions."""
    errors = np.array([run.errors for run in judged])
    signed = np.array([(run.predicted - run.delta_nll) / run.standard_error for run in judged])
    low, high, truth = (np.array([getattr(run, n) for run in judged]) for n in ("low", "high", "delta_nll"))
    return Verdict(
        judged[0].form,
        len(judged),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        float(np.median(signed)),
        coverage(low, high, truth, LEVEL),
    )
