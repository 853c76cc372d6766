"""The quality law: what a cell costs in nll, foretold from what a replay knows of it, with an interval.

The rise in nll over the original routing on the same tokens is a sum of a few features of the cell
(`quality/features.py`) with coefficients of at least zero, so that it is zero where nothing strays from the router
and never falls where more does. Terms are weighed by how undecided the model was, p (1 - p) of the probability p that
it gave the token that came: shifted logits cost where the model wavers, not where it is sure. The coefficients are
fitted on a few live margins, each weighed by how well its difference is known. The interval holds three things:
chance in a live difference of as many tokens, how far the law was off at its own calibration runs, and how loosely
these fix the coefficients.

Limits: a law holds for the model it was fitted on, and for policies like those it was fitted on; how far it carries
beyond is measured in `quality/check.py` and written in docs/quality.md. Everything it says is simulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import optimize, stats

from simlab.cells import build_cells, recorded_budget
from simlab.cli.options import recorded_evict, recorded_route
from simlab.errors import InputError
from simlab.judge.measure import decode_losses
from simlab.judge.quality.features import UNDECIDED, features_of
from simlab.judge.stats import standard_error
from simlab.trace.json_text import read_json
from simlab.trace.provenance import read_provenance
from simlab.trace.store import Trace
from simlab.types import Cell, Provenance, TraceHeader, known_fields

LEVEL = 0.90
"""Of the prediction intervals."""
_FLOOR_NATS = 1e-4
"""A rise below this is taken for this when the spread of a difference is read off it."""

Floats = NDArray[np.float64]
Terms = Callable[[pl.DataFrame], dict[str, Floats]]
"""Features, one row per cell, to the terms of a law, each at least zero and zero where nothing strays."""


class Calibration(NamedTuple):
    """One live run under one cell, paired with the original routing on the same tokens."""

    features: Mapping[str, Any]
    """A row of `features_of`."""
    delta_nll: float
    """Mean difference in nats per token."""
    standard_error: float
    """Of that mean, over blocks of tokens."""
    text: str = ""
    differences: Floats = np.zeros(0)
    """`[tokens]`: what `delta_nll` is the mean of."""


def calibrate(
    original: Trace,
    recordings: Sequence[Trace],
    text: str = "",
    *,
    cells: Sequence[Cell] | None = None,
    train: str | None = None,
) -> list[Calibration]:
    """Calibration runs from recordings of the same tokens: one at L = 0 and others under the cells to learn from.

    Features are those of a replay of `original`, as a prediction has no others.

    Args:
        cells: what each recording ran under; None: what its header says, which names no user's file.
        train: as `--train` takes it.

    Raises:
        InputError: recordings of other tokens, without losses, or what `features_of` and a recorded policy refuse.
    """
    cells = cells or [recorded_cell(recording.header) for recording in recordings]
    features = features_of(original, cells, train=train)
    losses = losses_of(original)
    found = []
    for row, recording in zip(features.iter_rows(named=True), recordings, strict=True):
        both = losses.join(losses_of(recording), on=["turn", "step"], how="inner", suffix="_live")
        if both.height != losses.height or not both["next_token"].equals(both["next_token_live"]):
            raise InputError(f"{recording.path}: is not of the same tokens as {original.path}")
        # Turns are windows of one text: its tokens in order.
        difference = both["nll_live"].to_numpy() - both["nll"].to_numpy()
        found.append(
            Calibration(row, float(difference.mean()), standard_error([difference]), text, difference)
        )
    return found


def losses_of(trace: Trace) -> pl.DataFrame:
    """turn, step, next_token and nll (nats) of every scored decode token of a recording, in order.

    Raises:
        InputError: no token has a loss.
    """
    frame = decode_losses(trace)
    if not frame.height:
        raise InputError(f"{trace.path}/tokens: no token has an nll; record a text with simlab record --text")
    return frame


def recorded_cell(header: TraceHeader) -> Cell:
    """The cell a trace was recorded under.

    Raises:
        InputError: its budget is not known, or its policy was a user's file.
    """
    budget = recorded_budget(header)
    if budget is None:
        raise InputError(f"the trace of {header.model} does not say which budget it was recorded at")
    (cell,) = build_cells(
        budgets=[budget],
        routes=[recorded_route(header)],
        evicts=[recorded_evict(header)],
        scope=header.scope or "global",
    )
    return cell


class Predicted(NamedTuple):
    """The rise in nll of one cell in nats per token, simulated, with its 90 % interval for a live run."""

    delta_nll: float
    low: float
    high: float


def _column(features: pl.DataFrame, name: str) -> Floats:
    return np.maximum(features[name].to_numpy().astype(np.float64), 0.0)


def _powers(name: str, *powers: float) -> Terms:
    """A feature raised to powers."""
    return lambda f: {f"{name}^{p:g}": _column(f, name) ** p for p in powers}


def _distance_and_top1(f: pl.DataFrame) -> dict[str, Floats]:
    return {"distance": _column(f, "distance"), "top1": _column(f, "top1")}


def _mass_and_how(f: pl.DataFrame) -> dict[str, Floats]:
    mass = _column(f, "mass")
    return {
        "mass x new": mass * (1 - _column(f, "kept")),
        "mass^2": mass**2,
        "mass x top1": mass * _column(f, "top1"),
    }


def _distance_by_half(f: pl.DataFrame) -> dict[str, Floats]:
    """The first half of the layers and the second apart."""
    layers = np.array(f["distance_by_layer"].to_list())
    half = layers.shape[1] // 2
    return {
        "early distance": layers[:, :half].sum(axis=1) / layers.shape[1],
        "late distance": layers[:, half:].sum(axis=1) / layers.shape[1],
        "distance^2": _column(f, "distance") ** 2,
    }


_SHAPES: dict[str, Terms] = {
    "mass^2": _powers("mass", 2),
    "mass^2.6": _powers("mass", 2.6),
    "mass^2 + mass^4": _powers("mass", 2, 4),
    "changed^2 + changed^4": _powers("changed", 2, 4),
    "energy + energy^2": _powers("energy", 1, 2),
    "distance + distance^2": _powers("distance", 1, 2),
    "distance + top1": _distance_and_top1,
    "mass x new + mass^2 + mass x top1": _mass_and_how,
    "distance by half + distance^2": _distance_by_half,
}


def _undecided(shape: Terms) -> Terms:
    """A law whose every term is scaled by how undecided the model was on the text."""

    def terms(f: pl.DataFrame) -> dict[str, Floats]:
        _want_losses(f)
        return {name: _column(f, "undecided") * values for name, values in shape(f).items()}

    return terms


def _token_by_token(f: pl.DataFrame) -> dict[str, Floats]:
    """The same with each token's distance weighed by how undecided the model was at it."""
    _want_losses(f)
    return {name: _column(f, name) for name in UNDECIDED[1:]}


def _want_losses(f: pl.DataFrame) -> None:
    if f["undecided"].null_count():
        raise InputError(
            "the trace carries no losses, so it is not known how undecided the model was; "
            "record a text with simlab record --text"
        )


DEFAULT_FORM = "undecided distance + undecided distance^2"
FORMS: dict[str, Terms] = {
    **_SHAPES,
    **{f"undecided x ({name})": _undecided(shape) for name, shape in _SHAPES.items()},
    DEFAULT_FORM: _token_by_token,
}
"""The forms that can be fitted, by name."""


@dataclass(frozen=True)
class QualityModel:
    """A fitted law. Make one with `fit`, keep it with `save`, and ask it with `predict`."""

    form: str
    coefficients: dict[str, float]
    """Nats per unit of each term, at least zero."""
    covariance: list[list[float]]
    """Of the coefficients, in their order."""
    relative_spread: float
    """Standard deviation of the law's own error, as a share of the rise; of several texts, on texts left out."""
    noise: tuple[float, float, float]
    """`a, b, least`: a live difference of n tokens and rise d has standard error exp(a) max(d, least)^b / sqrt(n)."""
    calibrated_on: int
    """Calibration runs."""
    provenance: Provenance | None = None
    """Model and texts of those runs; None in a file of a version that did not write it."""

    @classmethod
    def fit(
        cls, runs: Sequence[Calibration], form: str = DEFAULT_FORM, provenance: Provenance | None = None
    ) -> Self:
        """Fit a law on live runs.

        Raises:
            InputError: an unknown form, fewer than two runs, or runs that no error is known of.
        """
        if form not in FORMS:
            raise InputError(f"form {form}: not a quality law; there are {', '.join(FORMS)}")
        if len(runs) < 2:
            raise InputError(
                f"a quality law wants at least two live runs to be fitted on, here are {len(runs)}"
            )
        delta = np.array([run.delta_nll for run in runs])
        error = np.array([run.standard_error for run in runs])
        if not (np.isfinite(delta).all() and np.isfinite(error).all() and (error > 0).all()):
            raise InputError(
                "a quality law wants live runs whose difference in nll has a standard error above zero"
            )
        frame = pl.DataFrame([dict(run.features) for run in runs])
        terms = FORMS[form](frame)
        matrix = np.stack(list(terms.values()), axis=1)
        spread, weights, coefficients = 0.0, 1 / error, np.zeros(matrix.shape[1])
        for _ in range(20):
            coefficients, _ = optimize.nnls(matrix * weights[:, None], delta * weights)
            fitted = matrix @ coefficients
            spread = _relative_spread(delta - fitted, fitted, error, int((coefficients > 0).sum()))
            weights = 1 / np.sqrt(error**2 + (spread * fitted) ** 2)
        texts = np.array([run.text for run in runs])
        if len(np.unique(texts)) > 1:
            spread = _spread_on_texts_left_out(matrix, delta, error, weights, texts)
        covariance = _covariance(matrix * weights[:, None], coefficients > 0)
        return cls(
            form=form,
            coefficients=dict(zip(terms, coefficients.tolist(), strict=True)),
            covariance=covariance.tolist(),
            relative_spread=spread,
            noise=_noise(matrix @ coefficients, error, frame["tokens"].to_numpy()),
            calibrated_on=len(runs),
            provenance=provenance,
        )

    def predict(self, features: pl.DataFrame) -> list[Predicted]:
        """The rise in nll of each row of `features_of`, with the interval for a live run of as many tokens."""
        if not features.height:
            return []
        terms = FORMS[self.form](features)
        matrix = np.stack([terms[name] for name in self.coefficients], axis=1)
        rise = matrix @ np.array(list(self.coefficients.values()))
        loose = np.einsum("ij,jk,ik->i", matrix, np.array(self.covariance), matrix)
        chance = self.standard_error(rise, features["tokens"].to_numpy())
        half = float(stats.norm.ppf(0.5 + LEVEL / 2)) * np.sqrt(
            (self.relative_spread * rise) ** 2 + loose + chance**2
        )
        return [Predicted(float(d), float(d - h), float(d + h)) for d, h in zip(rise, half, strict=True)]

    def standard_error(self, rise: Floats, tokens: NDArray[np.int64]) -> Floats:
        """What chance does to a live difference of so many tokens, in nats."""
        level, power, least = self.noise
        return np.exp(level) * np.maximum(rise, least) ** power / np.sqrt(np.maximum(tokens, 1))

    def save(self, path: Path) -> None:
        """Write the law as JSON."""
        of = None if self.provenance is None else known_fields(self.provenance)
        path.write_text(json.dumps({"quality_law": 1, **asdict(self), "provenance": of}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a law that `save` wrote.

        Raises:
            InputError: no such file, not a law of this version, or numbers that no fit gives.
        """
        found = read_json(path, nan=False)
        try:
            if found.pop("quality_law") != 1 or found["form"] not in FORMS:
                raise ValueError
            of = found.pop("provenance", None)
            provenance = None if of is None else read_provenance(of, f"{path}, field 'provenance'")
            made = cls(**found | {"noise": tuple(found["noise"])}, provenance=provenance)
            n, covariance = len(made.coefficients) or -1, np.array(made.covariance, dtype=np.float64)
            level, power, least = (float(x) for x in made.noise)
            if covariance.shape != (n, n):
                raise ValueError
            coefficients = np.array([*made.coefficients.values()], dtype=np.float64)
            held = {
                "coefficients": bool((np.isfinite(coefficients) & (coefficients >= 0)).all()),
                "covariance": bool((np.linalg.eigvalsh(covariance) >= -1e-9 * abs(covariance).max()).all()),
                "relative_spread": 0 <= made.relative_spread < math.inf,
                "noise": math.isfinite(level) and 0 <= power <= 1 and 0 < least < math.inf,
                "calibrated_on": int(made.calibrated_on) >= 2,
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{path}: is not a quality law that this version of simlab wrote") from None
        for name, holds in held.items():
            if not holds:
                raise InputError(f"{path}, field '{name}': holds what no fit gives; calibrate again")
        return made


def _relative_spread(residual: Floats, fitted: Floats, error: Floats, used: int) -> float:
    """The spread, as a share of the rise, that brings the squared errors of the fit to what is expected of them."""
    free = max(len(residual) - used, 1)

    def excess(spread: float) -> float:
        return float((residual**2 / (error**2 + (spread * fitted) ** 2)).sum()) - free

    if excess(0.0) <= 0:
        return 0.0
    high = 1e-3
    while excess(high) > 0 and high < 1e3:
        high *= 2
    return float(optimize.root_scalar(excess, bracket=(0.0, high)).root) if excess(high) <= 0 else high


def _spread_on_texts_left_out(
    matrix: Floats, delta: Floats, error: Floats, weights: Floats, texts: NDArray[Any]
) -> float:
    """The spread at runs of texts that the coefficients were not fitted on, each text left out in turn.

    What a law gets wrong of a text it gets wrong of all its runs, so runs of the same texts would say too little.
    """
    fitted = np.zeros_like(delta)
    for text in np.unique(texts):
        others = texts != text
        coefficients, _ = optimize.nnls(
            matrix[others] * weights[others, None], delta[others] * weights[others]
        )
        fitted[~others] = matrix[~others] @ coefficients
    return _relative_spread(delta - fitted, fitted, error, 0)


def _covariance(weighted: Floats, used: NDArray[np.bool_]) -> Floats:
    """Of weighted least squares over the coefficients that are not held at zero."""
    covariance = np.zeros((weighted.shape[1],) * 2)
    some = np.flatnonzero(used)
    if len(some):
        covariance[np.ix_(some, some)] = np.linalg.pinv(weighted[:, some].T @ weighted[:, some])
    return covariance


def _noise(rise: Floats, error: Floats, tokens: NDArray[np.int64]) -> tuple[float, float, float]:
    """A power law of the standard error in the rise, for one token; flat where the runs do not tell.

    Below the smallest rise it was fitted on it is flat too: the chance in a difference that small is not known.
    """
    least = max(float(rise.min()), _FLOOR_NATS)
    x = np.log(np.maximum(rise, least))
    y = np.log(error * np.sqrt(np.maximum(tokens, 1)))
    if np.ptp(x) < math.log(2):
        return float(y.mean()), 0.0, least
    power = float(np.clip(np.polyfit(x, y, 1)[0], 0.0, 1.0))
    return float((y - power * x).mean()), power, least
