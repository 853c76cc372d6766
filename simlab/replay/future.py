"""What policies that know the future are told: each slot's next use, on the routing the cell executes.

With the router's own routing that is read off the trace. A routing that follows the cache has no future to
know, so such a cell is run twice: with `lru` first, for its routing, then with the policy on that very walk
(policies.md, "Eviction policies"); its note says so.

Shapes: `R` rows, `K` slots, `W` lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.types import NEVER, Route

NOTE = "knows the future of the routing that lru ran"


def follows_router(route: Route) -> bool:
    """Whether a route runs the router's own experts, as many as it likes."""
    return all(s.policy.stage == "width" or s.policy.is_builtin("original") for s in route.steps)


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
    walks: NDArray[np.int32], layer: NDArray[np.int32], batch: NDArray[np.int64], sequential: bool
) -> dict[str, NDArray[np.int64]]:
    """`next_position` and `next_batch`, int64 `[R, K, W]`, of walks `[R, K, W]` with -1 where no slot is."""
    found = {name: np.zeros(walks.shape, np.int64) for name in ("next_position", "next_batch")}
    n_expert = int(walks.max(initial=0)) + 1
    done: dict[bytes, int] = {}
    for lane in range(walks.shape[2]):
        walk = np.ascontiguousarray(walks[:, :, lane])
        twin = done.setdefault(walk.tobytes(), lane)
        if twin != lane:
            for column in found.values():
                column[:, :, lane] = column[:, :, twin]
            continue
        row, slot = np.nonzero(walk >= 0)
        entries = layer[row].astype(np.int64) * n_expert + walk[row, slot]
        # One expert at a time, every slot is a batch; what is told stays in the trace's batches.
        own = np.arange(len(row)) if sequential else batch[row]
        position, later = next_uses(entries, own)
        if sequential:
            later = np.where(later < NEVER, batch[row][np.minimum(later, len(row) - 1)], NEVER)
        found["next_position"][row, slot, lane] = position
        found["next_batch"][row, slot, lane] = later
    return found


def router_walks(columns: TraceColumns, widths: NDArray[np.int32], has_scores: bool) -> NDArray[np.int32]:
    """int32 `[R, K, W]`: the router's own first k experts of every row, for each lane's k."""
    n_slots = int(widths.max())
    if n_slots <= columns.trace.width:
        listed = columns.recorded[:, :n_slots]
    else:
        needs = ColumnNeeds(n_slots=n_slots, scores=has_scores, rank=False, weights=frozenset())
        listed = columns.chunk(0, columns.n_rows, columns.n_rows, needs)["router"]
    within = np.arange(listed.shape[1])[:, None] < widths
    return np.where(within, listed[:, :, None], -1).astype(np.int32)


def executed_columns(
    detail: Mapping[str, NDArray[Any]], counters: tuple[str, ...]
) -> dict[str, NDArray[Any]]:
    """A first pass's routing, every row in full `[R, ...]`, as the columns a second pass stands on."""
    names = {
        "router_expert": "router",
        "expert": "expert",
        "walk": "walk",
        "dropped": "dropped",
        "weight": "weight",
    }
    columns = {f"executed_{short}": detail[name] for name, short in names.items()}
    for name in ("reranked", "substituted"):
        columns[f"executed_{name}"] = detail["counters"][:, counters.index(name)].astype(np.int32)
    return columns


def cut(columns: Mapping[str, NDArray[Any]], start: int, stop: int, size: int) -> dict[str, NDArray[Any]]:
    """Rows `start` to `stop`, padded to `size` with rows in which no slot is."""
    found = {}
    for name, column in columns.items():
        nothing = -1 if name in ("executed_router", "executed_expert", "executed_walk") else 0
        filler = np.full((size - (stop - start), *column.shape[1:]), nothing, column.dtype)
        found[name] = np.concatenate([column[start:stop], filler])
    return found
