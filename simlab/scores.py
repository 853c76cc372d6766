"""From the scores a graph sorted to what policies rank by, weigh by and are judged by. NumPy, at load.

Logarithms and exponentials are not portable between XLA and NumPy, so every one of them is taken here, once,
and both the live engine and the replayer read the result (engine-semantics, section 1).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.routing import selection_key
from simlab.types import Gating, ScoreSpace, WeightRule
from simlab.xp import quotient

Float32 = NDArray[np.float32]


_QUIET = np.errstate(invalid="ignore")
"""A signalling NaN, which damaged and foreign files hold, is a NaN like any other and no warning."""


class RowStatistics(NamedTuple):
    """Per row, over its finite ranking values."""

    top: Float32
    range: Float32
    bottom: Float32


@_QUIET
def ranking_values(scores: Float32, space: ScoreSpace) -> Float32:
    """What the margin acts on: ln p of probabilities (-inf for p <= 0), other scores as they are; NaN ranks as -inf."""
    if space == "prob":
        value = scores.astype(np.float64)
        some = scores > 0
        if some.all():
            np.log(value, out=value)
        else:
            # NaN and p <= 0 become -inf.
            np.log(value, out=value, where=some)
            value[~some] = -np.inf
        value = value.astype(np.float32)
    else:
        value = np.where(np.isnan(scores), np.float32("-inf"), scores).astype(np.float32, copy=False)
    # Adding zero turns -0.0 into 0.0, so that equal scores compare equal bit for bit.
    return value + np.float32(0)


def row_statistics(values: Float32) -> RowStatistics:
    """Largest, range and smallest of the finite values along the last axis; zeros for a row without any."""
    finite = np.isfinite(values)
    if finite.all() and values.shape[-1]:
        top, bottom = values.max(axis=-1), values.min(axis=-1)
        return RowStatistics(top, top - bottom, bottom)
    some = finite.any(axis=-1)
    top = np.where(some, np.where(finite, values, np.float32("-inf")).max(axis=-1), np.float32(0))
    bottom = np.where(some, np.where(finite, values, np.float32("inf")).min(axis=-1), np.float32(0))
    return RowStatistics(top.astype(np.float32), (top - bottom).astype(np.float32), bottom.astype(np.float32))


@_QUIET
def router_mass(scores: Float32, gating: Gating) -> NDArray[np.float64]:
    """Share of the router's probability each expert holds, rows sum to 1: softmax, or for sigmoid score / sum."""
    finite = np.isfinite(scores)
    s = scores.astype(np.float64)
    if not finite.all():
        s[~finite] = 0.0
    if gating == "logits":
        top = np.where(finite, s, -np.inf).max(axis=-1, keepdims=True)
        s = np.where(finite, np.exp(s - np.where(np.isfinite(top), top, 0)), 0.0)
    total = s.sum(axis=-1, keepdims=True)
    if (total > 0).all():
        s /= total
        return s
    return np.divide(s, total, out=np.zeros_like(s), where=total > 0)


def sorted_scores(values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Experts of each row by value, best first, ties by id, and their values, `[rows, E]`.

    Values are not NaN, and zero has no sign.
    """
    # As `selection_key` has it, in halves of 32 bits: sorting one number of both is several times faster than a
    # stable argsort.
    halves = np.empty((*values.shape, 2), np.int32)
    halves[..., _LOW] = np.arange(values.shape[1], dtype=np.int32)
    halves[..., 1 - _LOW] = ~_turned(values.view(np.int32))
    halves.view(np.int64)[..., 0].sort(axis=1)
    order = np.ascontiguousarray(halves[..., _LOW])
    return order, _turned(~halves[..., 1 - _LOW]).view(np.float32)


_LOW = 0 if sys.byteorder == "little" else 1
"""Which half of an int64 is the lower."""


def _turned(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Bits of float32 made int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def router_ranking(values: Float32, picks: NDArray[np.int32]) -> NDArray[np.int64]:
    """Experts `[rows, n_expert]` as the router ranks them: its picks `[rows, k]` first, the rest by value, then id."""
    n_rows, n_expert = values.shape
    key = selection_key(
        np, values, 0, np.broadcast_to(np.arange(n_expert, dtype=np.int32), (n_rows, n_expert))
    )
    first = np.iinfo(np.int64).max
    for slot in reversed(range(picks.shape[1])):
        rows = np.flatnonzero(picks[:, slot] >= 0)
        key[rows, picks[rows, slot]] = first - slot
    return np.argsort(-key, axis=1)


def ranks_of(order: NDArray[np.int64]) -> NDArray[np.int32]:
    """Place of every expert, `[rows, n_expert]`, in a ranking as `router_ranking` gives it."""
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(order.shape[1])[None], axis=1)
    return ranks.astype(np.int32)


def mass_before(mass: NDArray[np.float64], order: NDArray[np.int64]) -> Float32:
    """Per expert, the mass of all experts ranked before it; both `[rows, n_expert]`, `order` a ranking.

    Summed from the first expert on in float64, rounded once.
    """
    summed = np.add.accumulate(np.take_along_axis(mass, order, axis=1), axis=1)
    before = np.zeros_like(summed)
    np.put_along_axis(before, order[:, 1:], summed[:, :-1], axis=1)
    return before.astype(np.float32)


@_QUIET
def gate_numerators(gate: Float32, rule: WeightRule) -> Float32:
    """Per expert, the number its weight is a share of: the gate probability, or exp(logit - row maximum)."""
    if not rule.softmax_over_selected:
        return gate.astype(np.float32)
    finite = np.isfinite(gate)
    top = np.where(finite, gate, np.float32("-inf")).max(axis=-1, keepdims=True)
    shifted = np.where(finite, gate - np.where(np.isfinite(top), top, 0), np.float32("-inf"))
    numerators = np.exp(shifted.astype(np.float64)).astype(np.float32)
    # NaN stays NaN, as in the graph, so that a drop policy can refuse it.
    return np.where(np.isnan(gate), np.float32("nan"), numerators)


def applied_weights(xp, numerators, exists, rule: WeightRule):
    """The weights the expert matmuls apply to a selection, rebuilt by the trace's rule.

    Args:
        numerators: float32 `[K, ...]`, `gate_numerators` of the selected experts in slot order.
        exists: bool `[K, ...]`.

    The sum runs in slot order in float64 and is rounded once, the division is float32, as in ggml.
    """
    numerators = xp.where(exists, numerators, xp.float32(0))
    weights = numerators
    if rule.normalise or rule.softmax_over_selected:
        total = xp.zeros_like(numerators[0], dtype=xp.float64)
        for slot in range(numerators.shape[0]):
            total = total + numerators[slot].astype(xp.float64)
        total = xp.maximum(total.astype(xp.float32), xp.float32(rule.clamp_min))
        weights = quotient(weights, total[None])
    if rule.scale != 1.0:
        weights = weights * xp.float32(rule.scale)
    return xp.where(exists, weights, xp.float32(0))
