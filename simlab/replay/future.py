"""What policies that know the future are shown: each slot's next use, on the routing the cell executes.

With the router's own routing that is read off the trace. A routing that follows the cache has no future to
know, so such a cell is run twice: with `lru` first, for its routing, then with the policy on that very walk
(policies.md, "Eviction policies"); its note says so.

Shapes: `R` rows, `K` slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.replay.tally import COUNTERS
from simlab.types import NEVER

NOTE = "knows the future of the routing that lru ran"


def next_uses(
    entries: NDArray[np.int64], batch: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position and batch of each slot's entry's first occurrence in a later batch, `NEVER` if there is none.

    Args:
        entries: int64 `[n]`: the walk, one entry per slot. batch: int64 `[n]`, ascending.
    """
    order = np.argsort(entries, kind="stable")
    entry, number = entries[order], batch[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (entry[1:] != entry[:-1]) | (number[1:] != number[:-1])
    # Of each place in this order, the next place at which an entry's batch begins.
    places = np.where(begins, np.arange(len(order)), len(order))
    following = np.append(np.minimum.accumulate(places[::-1])[::-1][1:], len(order)).astype(np.int64)
    at = np.minimum(following, max(len(order) - 1, 0))
    same = (following < len(order)) & (entry[at] == entry)
    position, later = np.empty_like(entries), np.empty_like(entries)
    position[order] = np.where(same, order[at], NEVER)
    later[order] = np.where(same, number[at], NEVER)
    return position, later


def next_use_columns(
    walk: NDArray[np.int32], layer: NDArray[np.int32], batch: NDArray[np.int64], sequential: bool
) -> dict[str, NDArray[np.int64]]:
    """`next_position` and `next_batch`, int64 `[R, K]`, of a walk `[R, K]` with -1 where no slot is."""
    found = {name: np.zeros(walk.shape, np.int64) for name in ("next_position", "next_batch")}
    n_expert = int(walk.max(initial=0)) + 1
    row, slot = np.nonzero(walk >= 0)
    entries = layer[row].astype(np.int64) * n_expert + walk[row, slot]
    # One expert at a time, every slot is a batch; what is shown stays in the trace's batches.
    own = np.arange(len(row)) if sequential else batch[row]
    position, later = next_uses(entries, own)
    if sequential:
        later = np.where(later < NEVER, batch[row][np.minimum(later, len(row) - 1)], NEVER)
    found["next_position"][row, slot] = position
    found["next_batch"][row, slot] = later
    return found


def router_walk(columns: TraceColumns, k: int, has_scores: bool) -> NDArray[np.int32]:
    """int32 `[R, k]`: the router's own first k experts of every row."""
    if k <= columns.trace.width:
        return columns.recorded[:, :k]
    needs = ColumnNeeds(n_slots=k, scores=has_scores, rank=False, weights=frozenset())
    return columns.chunk(0, columns.n_rows, columns.n_rows, needs)["router"]


def given_columns(detail: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A first pass's routing, every row in full, as the columns a second pass stands on."""
    names = {
        "router_expert": "router",
        "expert": "expert",
        "walk": "walk",
        "dropped": "dropped",
        "weight": "weight",
    }
    columns = {f"given_{short}": detail[name] for name, short in names.items()}
    places = [COUNTERS.index("reranked"), COUNTERS.index("substituted")]
    return columns | {"given_counts": detail["counters"][:, places].astype(np.int32)}
