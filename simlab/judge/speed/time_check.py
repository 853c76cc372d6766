"""How far the time model of a run can be trusted: fitted on one half of the tokens, judged on the other.

Beside it stand what it has to beat, a constant and a straight line in the bytes alone, fitted on the same
tokens in the same way: by least squares where the mean and the root mean square error are judged, and by least
absolute errors where the mean absolute error is. Halves are alternate blocks of consecutive tokens, each left
out once, which says how well the model describes this run, and the second half of the run, which says how well
it foretells. Halves are never pooled: over both, errors of the mean cancel for any predictor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simlab.judge.speed.token_time import Aim, Floats, Parts, TimeModel, Timings, fit, solve
from simlab.judge.stats import BLOCK_TOKENS, UNKNOWN, Interval, block_bootstrap_mean, paired_difference

LEAST_TOKENS = 16
"""Fewer are not divided: a half would have no blocks to tell its spread by."""
GOING = "model, going run"
PREDICTORS = ("constant", "bytes alone", "model", GOING)


@dataclass(frozen=True)
class Score:
    """Errors of one predictor on the tokens left out, each with a 95 % block-bootstrap interval. Times in ms."""

    predictor: str
    mean_ms: float
    """Mean token time it predicts for them."""
    mean_error: float
    """That over the measured mean, less one."""
    mean_error_interval: Interval
    rmse_ms: float
    rmse_interval: Interval
    mae_ms: float
    """Mean absolute error when fitted by least squares."""
    mae_interval: Interval
    typical_mae_ms: float
    """Mean absolute error when fitted by least absolute errors."""
    typical_mae_interval: Interval
    model_saves_mse: float
    """Share of its mean squared error that the plain model saves."""
    model_saves_mse_interval: Interval
    model_saves_mae: float
    """The same of the mean absolute error, both fitted by least absolute errors."""
    model_saves_mae_interval: Interval


@dataclass(frozen=True)
class PartScore:
    """One part of the plain model's token time on the tokens left out, in ms."""

    part: str
    measured_ms: float
    predicted_ms: float
    mae_ms: float


@dataclass(frozen=True)
class Judged:
    """One half left out."""

    left_out: str
    tokens: int
    mean_ms: float
    """Their measured mean token time."""
    scores: tuple[Score, ...]
    parts: tuple[PartScore, ...]


@dataclass(frozen=True)
class TimeCheck:
    """The model of a whole run, what it makes of its tokens, and how it did on halves left out."""

    model: TimeModel
    mean_ms: float
    mean_parts: dict[str, float]
    """Predicted ms per token of each part, means over the run."""
    without_reads_ms: float
    """Predicted mean token time if no token read anything."""
    bound: str
    """"compute" or "reads": the larger of the two in the mean token."""
    block: int
    """Tokens in a block of the alternate halves."""
    judged: tuple[Judged, ...]
    """Empty for fewer than `LEAST_TOKENS` tokens."""


def check_time(timings: Timings) -> TimeCheck:
    """Fit the time model on a run, and judge it on halves left out."""
    model = fit(timings)
    parts = model.parts(timings.read_mib, timings.age)
    means = {name: float(np.mean(values)) for name, values in parts._asdict().items()}
    unread = model.predict(np.zeros(timings.n), timings.age)
    block = min(BLOCK_TOKENS, timings.n // 8)
    judged: list[Judged] = []
    if timings.n >= LEAST_TOKENS:
        at = np.arange(timings.n)
        odd = (at // block) % 2 == 1
        judged += [
            _judge(timings, odd, "odd blocks"),
            _judge(timings, ~odd, "even blocks"),
            _judge(timings, at >= timings.n // 2, "second half"),
        ]
    return TimeCheck(
        model=model,
        mean_ms=float(timings.wall_ms.mean()),
        mean_parts=means,
        without_reads_ms=float(unread.mean()),
        bound="compute" if means["compute"] + means["page_faults"] >= means["exposed_read"] else "reads",
        block=block,
        judged=tuple(judged),
    )


def _judge(timings: Timings, left_out: NDArray[np.bool_], name: str) -> Judged:
    wall = timings.wall_ms[left_out]
    models: dict[Aim, TimeModel] = {aim: fit(timings, ~left_out, aim=aim) for aim in ("mean", "median")}
    predicted = {
        aim: {key: values[left_out] for key, values in _predictions(timings, ~left_out, model).items()}
        for aim, model in models.items()
    }
    return Judged(
        left_out=name,
        tokens=len(wall),
        mean_ms=float(wall.mean()),
        scores=tuple(_score(key, wall, predicted["mean"], predicted["median"]) for key in PREDICTORS),
        parts=_part_scores(timings, left_out, models["mean"]),
    )


def _predictions(timings: Timings, fitted: NDArray[np.bool_], model: TimeModel) -> dict[str, Floats]:
    """ms of every token of the run by every predictor, `[n]` each."""
    wall, mib, age = timings.wall_ms, timings.read_mib, timings.age
    one = np.ones_like(wall)
    (constant,), _ = solve([one[fitted]], wall[fitted], model.aim)
    (offset, slope), _ = solve([one[fitted], mib[fitted]], wall[fitted], model.aim)
    plain, going = model.predict(mib, age), model.predict_going(mib, age, wall)
    return dict(zip(PREDICTORS, (constant * one, offset + slope * mib, plain, going), strict=True))


def _score(name: str, wall: Floats, by_mean: dict[str, Floats], by_median: dict[str, Floats]) -> Score:
    mean = float(wall.mean())
    difference, interval = paired_difference([wall], [by_mean[name]])
    squared, absolute = (by_mean[name] - wall) ** 2, np.abs(by_mean[name] - wall)
    typical = np.abs(by_median[name] - wall)
    saves_mse, mse_interval = _saved(squared, (by_mean["model"] - wall) ** 2)
    saves_mae, mae_interval = _saved(typical, np.abs(by_median["model"] - wall))
    low, high = block_bootstrap_mean([squared])
    return Score(
        predictor=name,
        mean_ms=mean + difference,
        mean_error=difference / mean,
        mean_error_interval=Interval(*(end / mean for end in interval)),
        rmse_ms=math.sqrt(squared.mean()),
        rmse_interval=Interval(math.sqrt(low), math.sqrt(high)),
        mae_ms=float(absolute.mean()),
        mae_interval=block_bootstrap_mean([absolute]),
        typical_mae_ms=float(typical.mean()),
        typical_mae_interval=block_bootstrap_mean([typical]),
        model_saves_mse=saves_mse,
        model_saves_mse_interval=mse_interval,
        model_saves_mae=saves_mae,
        model_saves_mae_interval=mae_interval,
    )


def _saved(errors: Floats, of_model: Floats) -> tuple[float, Interval]:
    """The share of the mean error that the model saves, by pairs of the same token."""
    mean = float(errors.mean())
    if mean == 0:
        return math.nan, UNKNOWN
    saved, interval = paired_difference([of_model], [errors])
    return saved / mean, Interval(*(end / mean for end in interval))


def _part_scores(timings: Timings, left_out: NDArray[np.bool_], model: TimeModel) -> tuple[PartScore, ...]:
    """Compute has its page faults in it here, as the measured one has."""
    parts: Parts = model.parts(timings.read_mib[left_out], timings.age[left_out])
    pairs = {"compute": (timings.compute_ms, parts.compute + parts.page_faults)}
    if timings.management_ms is not None:
        pairs["management"] = (timings.management_ms, parts.management)
    pairs["exposed_read"] = (timings.exposed_ms, parts.exposed_read)
    return tuple(
        PartScore(
            name,
            float(measured[left_out].mean()),
            float(predicted.mean()),
            float(np.abs(predicted - measured[left_out]).mean()),
        )
        for name, (measured, predicted) in pairs.items()
    )
