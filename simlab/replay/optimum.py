"""Belady's choice on a finished run: which lookups would have hit, had eviction known the future.

For the anatomy of misses only. It works on the lookups of whatever ran, also of a lossy cell, whose routing
is in no trace; as an eviction policy that a replay can run, Belady lives in `policies/`.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from simlab.replay.columns import TraceColumns
from simlab.replay.lookups import NEVER, Lookups
from simlab.types import ResolvedBudget


def optimal_hits(columns: TraceColumns, lookups: Lookups, budget: ResolvedBudget) -> NDArray[np.bool_]:
    """bool `[n]`: which lookups hit if the entry used again last is evicted first; the event rules are LRU's.

    A batch is looked up as a whole, all its entries are inserted (forced admission), then others leave until
    the budget holds; equal next uses: least recent occurrence first. With entries of one size no eviction
    has fewer misses: keeping an entry from a use to the next occupies an interval of batch edges, every edge
    has room for what the batch itself leaves, and dropping the interval that ends last keeps the most of
    them (Belady 1966; Carlisle and Lloyd 1995 for edges of unequal room). With unequal sizes it is a very
    good policy and no bound.
    """
    hit = np.zeros(len(lookups.row), bool)
    if budget.off or not len(hit):
        return hit
    n_expert, batch = columns.trace.header.n_expert, lookups.batch
    next_batch = np.full(len(hit), NEVER, np.int64)
    again = ~lookups.cold
    next_batch[lookups.previous[again]] = batch[again]

    layer_of_batch = columns.layer[columns.batch_start]
    edges = np.searchsorted(batch, np.arange(len(layer_of_batch) + 1)).tolist()
    entry = (lookups.layer * n_expert + lookups.expert).tolist()
    size, ahead = lookups.size.tolist(), next_batch.tolist()
    n_caches = len(budget.layer_bytes) if budget.per_layer else 1
    limits = budget.layer_bytes if budget.per_layer else (budget.total_bytes,)
    heaps: list[list[tuple[int, int]]] = [[] for _ in range(n_caches)]
    used = [0] * n_caches
    kept: dict[int, int] = {}
    """Resident entries and their last lookup; a place in a heap is out of date if it names another one."""
    for number, layer in enumerate(layer_of_batch.tolist()):
        cache = layer if budget.per_layer else 0
        heap = heaps[cache]
        mine = range(edges[number], edges[number + 1])
        for i in mine:
            hit[i] = entry[i] in kept
            if not hit[i]:
                used[cache] += size[i]
            kept[entry[i]] = i
        while used[cache] > limits[cache] and heap:
            _, i = heappop(heap)
            if kept.get(entry[i]) == i:
                del kept[entry[i]]
                used[cache] -= size[i]
        # Pushed only now: a batch evicts none of its own.
        for i in mine:
            heappush(heap, (-ahead[i], i))
    return hit
