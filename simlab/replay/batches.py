"""Batches as the scan of `recency.py` takes them: what each looks up, and where it lies in the walk.

A batch whose routing does not depend on the lane (prefill, or decode without a policy) comes as the list of its
experts in the order of their last occurrence: that order is all LRU keeps of a batch. A row that lanes route by
themselves comes with its experts in score order.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.replay.columns import TraceColumns

WORD = 32


@dataclass(frozen=True)
class Stretch:
    """Consecutive batches that one program walks."""

    kind: str
    """"routed": single rows that lanes route; "narrow": lists of k experts; "wide": lists of any length."""
    rows: slice
    """Routing rows of the trace."""


def stretches(columns: TraceColumns, k: int, routed: bool, start: int, stop: int) -> list[Stretch]:
    """Cut rows `start` to `stop`, which hold whole batches, into stretches.

    Args:
        k: slots of a row that count. routed: whether a policy routes the rows of decode graphs.
    """
    # Beside routed rows, few batches are as narrow as k: they do not earn a program of their own.
    listed = np.ones(stop - start, int) if routed else np.where(columns.plain_rows(k)[start:stop], 0, 1)
    kinds = np.where(columns.decode[start:stop] & routed, 2, listed)
    edges = np.flatnonzero(np.diff(kinds)) + 1
    found = []
    for a, b in zip([0, *edges], [*edges, stop - start], strict=True):
        if b > a:
            found.append(
                Stretch(("narrow", "wide", "routed")[kinds[a]], slice(start + int(a), start + int(b)))
            )
    return found


def walked(ids: NDArray[np.int32], starts: NDArray[np.int64], width: int) -> NDArray[np.int32]:
    """int32 `[batches, width]`: each batch's experts in the order of their last occurrence, then -1.

    Args:
        ids: int32 `[rows, k]`. starts: first row of each batch.
    """
    found = np.full((len(starts), width), -1, np.int32)
    for number, (a, b) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        backwards = ids[a:b].ravel()[::-1]
        experts, at = np.unique(backwards[backwards >= 0], return_index=True)
        found[number, : len(experts)] = experts[np.argsort(-at)]
    return found


def score_order(values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Experts of each row by value, best first, ties by id: int32 `[rows, n]`; and int64 `[rows, n + 1]`, by rank the
    bits of the value above those of the id.

    n is a multiple of 32. Above the experts there is padding: in the first experts that count for nothing, in the
    second the value -inf of expert E, which loses to all others. Values are not NaN, and zero has no sign.
    """
    n_rows, n_expert = values.shape
    n = -(-n_expert // WORD) * WORD
    order = np.zeros((n_rows, n), np.int32)
    ranked = np.empty((n_rows, n + 1, 2), np.int32)
    order[:, :n_expert], by_rank = sorted_scores(values)
    ranked[:, :n_expert, _LOW] = order[:, :n_expert]
    ranked[:, :n_expert, 1 - _LOW] = by_rank.view(np.int32)
    ranked[:, n_expert:, _LOW] = n_expert
    ranked[:, n_expert:, 1 - _LOW] = np.float32("-inf").view(np.int32)
    return order, ranked.view(np.int64)[..., 0]


def sorted_scores(values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Experts of each row by value, best first, ties by id, and their values, `[rows, E]`; as for `score_order`."""
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


def finite_words(ranked: NDArray[np.int64]) -> NDArray[np.uint32]:
    """uint32 `[rows, n / 32]`: the bits of the ranks whose value is finite."""
    values = (ranked[:, :-1] >> 32).astype(np.int32).view(np.float32)
    return np.packbits(np.isfinite(values), axis=1, bitorder="little").view("<u4").astype(np.uint32)


def padded(columns: dict[str, NDArray[Any]], size: int) -> dict[str, NDArray[Any]]:
    """Columns filled up with zeros to `size` rows, which are never walked."""
    n = len(next(iter(columns.values())))
    return {
        name: np.concatenate([x, np.zeros((size - n, *x.shape[1:]), x.dtype)]) if n < size else x
        for name, x in columns.items()
    }
