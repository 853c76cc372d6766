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
from typing import NamedTuple

import numpy as np
import polars as pl

from simlab.errors import InputError
from simlab.judge.quality.law import FORMS, LEVEL, Calibration, QualityModel
from simlab.judge.stats import BLOCK_TOKENS, Coverage, Interval, coverage, percentiles, resampled_means
from simlab.types import Cell

N_DRAWS = 50
"""Of live differences, to say what a perfect law would get."""


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


class Perfect(NamedTuple):
    """What a law that is true would get, over draws of what chance does to the live runs: means and 95 % intervals."""

    median: float
    median_interval: Interval
    percentile_90: float
    percentile_90_interval: Interval


def perfect(
    runs: Sequence[LiveRun],
    calibrates: Callable[[Cell], bool],
    form: str,
    *,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> Perfect:
    """How `leave_texts_out` would judge a form if the law that is fitted on all runs were the truth.

    Live differences are drawn about that law: blocks of a text's tokens, the same in all its runs, which share their
    tokens' luck. Laws are then fitted and judged as they are on what was measured.

    Args:
        runs: each with its `differences`.
    """
    model = QualityModel.fit([live.run for live in runs if calibrates(live.cell)], form)
    of_text: dict[str, list[LiveRun]] = {}
    for live in runs:
        of_text.setdefault(live.run.text, []).append(live)
    drawn: list[list[LiveRun]] = [[] for _ in range(n_draws)]
    for place, some in enumerate(of_text.values()):
        truth = model.predict(pl.DataFrame([dict(live.run.features) for live in some]))
        values = np.stack([live.run.differences for live in some], axis=1)
        chance = resampled_means([values], BLOCK_TOKENS, n_draws, seed + place) - values.mean(axis=0)
        for draw, off in zip(drawn, chance, strict=True):
            draw += [
                LiveRun(live.cell, live.run._replace(delta_nll=true.delta_nll + float(by)))
                for live, true, by in zip(some, truth, off, strict=True)
            ]
    found = [verdict(leave_texts_out(draw, calibrates, (form,))) for draw in drawn]
    medians, tails = (np.array([getattr(v, name) for v in found]) for name in ("median", "percentile_90"))
    return Perfect(float(medians.mean()), percentiles(medians), float(tails.mean()), percentiles(tails))


def level(judged: Sequence[JudgedRun]) -> float:
    """Live rises as a share of what was foretold of them, each weighed by how well it is known."""
    foretold, live, error = (
        np.array([getattr(run, name) for run in judged])
        for name in ("predicted", "delta_nll", "standard_error")
    )
    return float((foretold * live / error**2).sum() / (foretold**2 / error**2).sum())
