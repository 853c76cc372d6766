"""The cache lookups of a routing, as arrays, and how far each lies from the one before it.

A batch looks up each of its entries once. Everything a miss can be blamed on (never seen before, pushed out
since, still there under another policy) is a property of a lookup, so analyses work on these arrays and not
on slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.errors import InputError
from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.types import Scope

NEVER = np.iinfo(np.int64).max
"""Reuse distance of an entry's first lookup: no budget makes it a hit."""

_STRETCH = 4096
_SLOT_BYTES = 220
"""Memory for each slot, to find its lookup and how far it is from the one before; measured."""


@dataclass(frozen=True)
class Lookups:
    """The lookups of a run, one per entry and batch, in the order in which the entries are left behind.

    That is: by batch, and within a batch by the last place at which the walk names the entry, which is the
    order LRU keeps them in. All arrays are int64 `[n]`.
    """

    row: NDArray[np.int64]
    """Routing row that names the entry first; the counters of a replay count the lookup there."""
    slot: NDArray[np.int64]
    """Slot of that row."""
    batch: NDArray[np.int64]
    layer: NDArray[np.int64]
    """Index among the MoE layers."""
    expert: NDArray[np.int64]
    size: NDArray[np.int64]
    """Entry bytes."""
    previous: NDArray[np.int64]
    """Index of the entry's lookup before this one, -1 for its first."""

    @property
    def cold(self) -> NDArray[np.bool_]:
        """Which are the first of their entry in the run."""
        return self.previous < 0


def original_ids(columns: TraceColumns) -> NDArray[np.int32]:
    """int32 `[rows, k]`: the ids the router picked, as a replay with the original routing walks them.

    Raises:
        InputError: the trace carries fewer ids per row than the model's k, and no scores to rank the rest.
    """
    trace, k = columns.trace, columns.trace.header.n_expert_used
    if k <= trace.width or not columns.n_rows:
        return columns.recorded[:, :k]
    header = trace.header
    if not trace.has_scores or None in (header.score_space, header.gating):
        raise InputError(
            f"{trace.path}: {k} experts per token, above the recorded {trace.width}, needs the router's "
            "scores, which this trace does not carry; record it with simlab record"
        )
    needs = ColumnNeeds(n_slots=k, scores=True, rank=False, weights=frozenset())
    stretches = [
        columns.chunk(start, stop, stop - start, needs)["router"]
        for start in range(0, columns.n_rows, _STRETCH)
        for stop in [min(start + _STRETCH, columns.n_rows)]
    ]
    return np.concatenate(stretches)


def find_lookups(columns: TraceColumns, ids: NDArray[np.int32]) -> Lookups:
    """The lookups of a walk.

    Args:
        ids: int32 `[rows, slots]`, the experts each row walks in slot order, -1 where a slot does not exist.
    """
    header = columns.trace.header
    require_memory(ids.size * _SLOT_BYTES, f"{columns.trace.path}/routing: lookups of {ids.size} slots")
    sizes = np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64)
    rows, slots = np.nonzero(ids >= 0)  # row by row and slot by slot: the order of the walk
    entry = columns.layer[rows].astype(np.int64) * header.n_expert + ids[rows, slots]
    in_batch = columns.batch[rows] * (len(sizes) * header.n_expert) + entry
    _, first = np.unique(in_batch, return_index=True)
    _, from_end = np.unique(in_batch[::-1], return_index=True)
    order = np.argsort(len(in_batch) - 1 - from_end)
    first = first[order]
    entry = entry[first]
    previous = np.full(len(entry), -1, np.int64)
    by_entry = np.argsort(entry, kind="stable")
    again = entry[by_entry][1:] == entry[by_entry][:-1]
    previous[by_entry[1:][again]] = by_entry[:-1][again]
    layer, expert = np.divmod(entry, header.n_expert)
    return Lookups(
        row=rows[first],
        slot=slots[first],
        batch=columns.batch[rows[first]],
        layer=layer,
        expert=expert,
        size=sizes[layer],
        previous=previous,
    )


def reuse_bytes(columns: TraceColumns, lookups: Lookups, scope: Scope) -> NDArray[np.int64]:
    """int64 `[n]`: the smallest cache, in bytes, in which LRU finds each looked-up entry; exact.

    A lookup of entry e in batch c, last used in batch a < c, hits at budget B if and only if
    `reuse_bytes <= B`. With scope "per_layer" the bytes are those of the entry's own layer. First lookups
    have `NEVER`.

    Definition. 0 if no batch of the cache lies between a and c. Otherwise the bytes of the distinct
    entries whose last occurrence, when batch c begins, is at e's or after it, e counted, c's own not:
    the classic byte stack distance (Mattson et al. 1970), taken at the edge of the batch.

    Proof. Order entries by last occurrence, newest first. *The cache is always a prefix of this order*: a
    batch puts its entries in front, all of them resident, and eviction takes resident entries from the far
    end, stopping at the batch's own. So when eviction after batch b considers e, everything newer is
    resident and everything older is gone: the cache holds exactly D_b(e), the bytes at or before e in the
    order. e is evicted iff D_b(e) > B, unless it is of batch b itself. Hence e survives from a to c iff
    D_b(e) <= B for every b strictly between. While e is not used, D_b(e) never falls: what is newer than e
    stays newer, whatever is used joins it. So the last batch before c decides: D_(c-1)(e) <= B. If there is
    no batch between, nothing could evict e, at any budget.

    Consequences. Overshoot needs no case of its own: a batch larger than B has D_b(e) > B for all others.
    The condition is one threshold per lookup, so hits never fall as the budget grows, and the cache at a
    smaller budget is a subset of that at a larger one, also with entries of unequal sizes. That holds
    because an insertion is never refused and the victim is always the oldest; a cache that skipped a victim
    too large or too small to help would not be monotone.
    """
    n_batches = int(columns.batch[-1]) + 1 if columns.n_rows else 0
    order, turn = np.arange(len(lookups.row)), np.arange(n_batches)
    if scope == "per_layer":
        # Layer after layer, each a cache of its own, whose batches are counted apart.
        order = np.argsort(lookups.layer, kind="stable")
        of_batch = columns.layer[columns.batch_start]
        for layer in range(len(columns.trace.header.moe_layers)):
            own = of_batch == layer
            turn[own] = np.arange(own.sum())
    n = len(order)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    again = ~lookups.cold[order]
    before = place[lookups.previous[order][again]]
    following = np.full(n, n, np.int64)  # place of the entry's next lookup, n if there is none
    following[before] = np.flatnonzero(again)

    batch = lookups.batch[order]
    start = _starts(batch)[again]
    size = lookups.size[order]
    sums = _sums_where_later(following, size, before, start, start)
    # Empty batches, of rows without slots, evict too: they count as lying between.
    sums[turn[batch[again]] - turn[batch[before]] == 1] = 0
    found = np.full(n, NEVER, np.int64)
    found[order[again]] = sums
    return found


def _starts(batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each item, where its run of equal batches begins."""
    edge = np.ones(len(batch), bool)
    edge[1:] = batch[1:] != batch[:-1]
    return np.flatnonzero(edge)[np.cumsum(edge) - 1]


def _sums_where_later(
    value: NDArray[np.int64],
    weight: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    least: NDArray[np.int64],
) -> NDArray[np.int64]:
    """For each query, the sum of `weight[j]` over `low <= j < high` with `value[j] >= least`.

    A wavelet matrix (Claude, Navarro and Ordonez 2015): the values are split bit by bit from the highest,
    and every query follows its bound through all splits at once. O((n + queries) log n), in whole arrays.

    Args:
        value, weight: `[n]`, values between 0 and n. low, high, least: `[queries]`.
    """
    total = np.zeros(len(low), np.int64)
    low, high = low.copy(), high.copy()
    for bit in reversed(range(max(len(value), 1).bit_length())):
        one = (value >> bit) & 1 == 1
        zeros = _running(~one)
        weights_of_ones = _running(np.where(one, weight, 0))
        asks_one = (least >> bit) & 1 == 1
        # A bound with 0 here is passed by every value with 1 here; with 1, those with 0 fall short.
        total += np.where(asks_one, 0, weights_of_ones[high] - weights_of_ones[low])
        low, high = (np.where(asks_one, zeros[-1] + edge - zeros[edge], zeros[edge]) for edge in (low, high))
        value, weight = (np.concatenate([x[~one], x[one]]) for x in (value, weight))
    running = _running(weight)
    return total + running[high] - running[low]


def _running(x: NDArray) -> NDArray[np.int64]:
    """`[n + 1]`: sums of the first 0 to n items."""
    return np.concatenate([[0], np.cumsum(x, dtype=np.int64)])
