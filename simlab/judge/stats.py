"""Statistics of scores: intervals for means and shares, and paired comparisons of two cells.

Every cell is scored on the same tokens and items, so cells are compared pairwise, item by item: the spread
between tokens, which is far larger than what a policy costs, cancels. Losses of neighbouring tokens are
correlated, which an ordinary bootstrap ignores; resampling blocks of consecutive tokens keeps it.

Predictions that carry an interval are judged by how often the interval holds the truth and by how wide it had to be.

Sources: Politis and Romano 1992 (circular block bootstrap), McNemar 1947 (exact form), Wilson 1927, Gneiting and
Raftery 2007 (interval score).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

BLOCK_TOKENS = 32
N_RESAMPLES = 10_000
LEVEL = 0.95
_LEAST_BLOCKS = 8
"""A series shorter than this many blocks gets shorter blocks: with one block there is nothing to resample."""
_AT_ONCE = 1 << 20
"""Block starts drawn at once, to bound memory."""


class Interval(NamedTuple):
    """A 95 % interval; NaN where there is too little to tell."""

    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan)


class PairedOutcome(NamedTuple):
    """Right and wrong answers of two cells on the same items."""

    to_wrong: int
    """Items the first cell got right and the other wrong."""
    to_right: int
    p_value: float
    """Exact two-sided McNemar p."""


def block_bootstrap_mean(
    series: Sequence[np.ndarray],
    *,
    block: int = BLOCK_TOKENS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile interval for the mean over all values of one or more series.

    Blocks are circular and drawn within each series (a text), so none joins two texts. A series of n values
    has ceil(n / block) of them, the last cut so that n values are drawn.

    Args:
        series: float `[n]` arrays in token order, together at least two values.
        block: consecutive values in a block; at most n / 8, so that short series have several.
        seed: of a NumPy generator of its own; equal arguments give equal intervals.
    """
    if sum(len(values) for values in series) < 2:
        return UNKNOWN
    return percentiles(resampled_means(series, block, n_resamples, seed))


def standard_error(
    series: Sequence[np.ndarray],
    *,
    block: int = BLOCK_TOKENS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> float:
    """Standard error of the mean over all values, from the blocks of `block_bootstrap_mean`; NaN below two values."""
    if sum(len(values) for values in series) < 2:
        return math.nan
    return float(resampled_means(series, block, n_resamples, seed).std())


def block_bootstrap_of(
    quantities: Sequence[Sequence[np.ndarray]],
    statistic: Callable[..., np.ndarray],
    *,
    drawn: Sequence[int] | None = None,
    block: int = BLOCK_TOKENS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> list[Interval]:
    """Percentile intervals for statistics of the means of several quantities, such as ratios, from the same draws.

    Args:
        quantities: of each, series as `block_bootstrap_mean` takes them.
        statistic: the resampled means of each quantity, float64 `[n_resamples]`, to statistics, `[n, n_resamples]`.
        drawn: a number for each quantity; those of equal number are of the same tokens, and drawn in the same
            blocks. None: all of them.
    """
    drawn = drawn or [0] * len(quantities)
    means: list[np.ndarray] = [np.empty(0)] * len(quantities)
    for group in set(drawn):
        chosen = [i for i, of in enumerate(drawn) if of == group]
        series = [np.stack(texts, axis=1) for texts in zip(*(quantities[i] for i in chosen), strict=True)]
        if sum(len(values) for values in series) < 2:
            found = np.full((n_resamples, len(chosen)), math.nan)
        else:
            found = resampled_means(series, block, n_resamples, seed + group)
        for place, i in enumerate(chosen):
            means[i] = found[:, place]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.asarray(statistic(*means))
    return [percentiles(of[np.isfinite(of)]) for of in values]


def percentiles(values: np.ndarray) -> Interval:
    """The interval that holds the middle 95 % of draws `[n]`."""
    if not len(values):
        return UNKNOWN
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))


def resampled_means(series: Sequence[np.ndarray], block: int, n_resamples: int, seed: int) -> np.ndarray:
    """float64 `[n_resamples, ...]`: means over all values of resampled series `[n, ...]`; equal seeds draw alike.

    What the further axes hold is drawn in the same blocks, so that it stays as alike as it is.
    """
    generator = np.random.default_rng(seed)
    totals = np.zeros((n_resamples, *np.shape(series[0])[1:]))
    for values in series:
        totals += _resampled_sums(np.asarray(values, dtype=np.float64), block, n_resamples, generator)
    return totals / sum(len(values) for values in series)


def _resampled_sums(
    values: np.ndarray, block: int, n_resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """float64 `[n_resamples, ...]`: sums of n values of `[n, ...]` drawn in circular blocks."""
    n = len(values)
    sums = np.zeros((n_resamples, *values.shape[1:]))
    if n == 0:
        return sums
    length = max(1, min(block, n // _LEAST_BLOCKS))
    n_blocks = math.ceil(n / length)
    running = np.concatenate(
        [np.zeros((1, *values.shape[1:])), np.cumsum(np.concatenate([values, values[:length]]), axis=0)]
    )
    starts_at = np.arange(n)
    whole = running[starts_at + length] - running[starts_at]
    last = running[starts_at + n - length * (n_blocks - 1)] - running[starts_at]
    step = max(1, _AT_ONCE // (n_blocks * max(1, values[0].size)))
    for at in range(0, n_resamples, step):
        starts = generator.integers(0, n, size=(min(step, n_resamples - at), n_blocks))
        sums[at : at + step] = whole[starts[:, :-1]].sum(axis=1) + last[starts[:, -1]]
    return sums


def paired_difference(
    first: Sequence[np.ndarray], other: Sequence[np.ndarray], **options: int
) -> tuple[float, Interval]:
    """Mean of `other - first` over all values, with its block-bootstrap interval.

    Args:
        first, other: the same series, value by value, under two cells.
        options: as `block_bootstrap_mean` takes them.
    """
    differences = [np.asarray(b) - np.asarray(a) for a, b in zip(first, other, strict=True)]
    n_values = sum(len(d) for d in differences)
    mean = float(sum(d.sum() for d in differences) / n_values) if n_values else math.nan
    return mean, block_bootstrap_mean(differences, **options)


def mcnemar_p(to_wrong: int, to_right: int) -> float:
    """Exact two-sided p of McNemar's test: under no difference each flip goes either way like a fair coin."""
    flips = to_wrong + to_right
    return min(1.0, 2 * float(stats.binom.cdf(min(to_wrong, to_right), flips, 0.5))) if flips else 1.0


def paired_outcome(first: Sequence[bool], other: Sequence[bool]) -> PairedOutcome:
    """Flips each way between two cells' right (True) and wrong answers, and McNemar's exact p."""
    pairs = list(zip(first, other, strict=True))
    to_wrong = sum(a and not b for a, b in pairs)
    to_right = sum(b and not a for a, b in pairs)
    return PairedOutcome(to_wrong, to_right, mcnemar_p(to_wrong, to_right))


def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval for a share."""
    if n == 0:
        return UNKNOWN
    z = float(stats.norm.ppf(0.5 + LEVEL / 2))
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


class Coverage(NamedTuple):
    """How a set of interval predictions fared."""

    held: int
    """Intervals that held the truth, their ends included."""
    n: int
    share: Interval
    """Wilson's interval for the share held."""
    mean_score: float
    """Mean interval score: width, and 2 / (1 - level) of the distance for a truth outside. Smaller is better."""
    mean_width: float


def coverage(low: np.ndarray, high: np.ndarray, truth: np.ndarray, level: float) -> Coverage:
    """How often intervals held what they foretold, and their mean interval score; all arrays `[n]`.

    Args:
        level: the intervals' nominal level, above 0 and below 1.
    """
    low, high, truth = (np.asarray(x, dtype=np.float64) for x in (low, high, truth))
    if not low.shape == high.shape == truth.shape:
        raise ValueError(f"intervals and truths differ in shape: {low.shape}, {high.shape}, {truth.shape}")
    if not 0 < level < 1:
        raise ValueError(f"level {level} must lie between 0 and 1")
    if not len(truth):
        return Coverage(0, 0, UNKNOWN, math.nan, math.nan)
    held = int(((low <= truth) & (truth <= high)).sum())
    outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
    score = (high - low) + 2 / (1 - level) * outside
    return Coverage(
        held, len(truth), wilson(held, len(truth)), float(score.mean()), float((high - low).mean())
    )
