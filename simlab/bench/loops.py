"""The loop an engineer would write by hand for LRU with substitution, compiled by numba: what the replayer is
compared with.

It follows the rules of engine-semantics, sections 1 and 3, for one global cache with the policies `lru` and
`substitute`, and is written for speed where that costs no cleverness: one pass over a row's experts keeps the
best k in a short sorted list, a cell's state is contiguous and walks the trace before the next cell's, and
cells are spread over the cores. The victim of an eviction is found in one of two ways: by going through the
stamps of all entries, as the rule reads, or by a linked list in order of use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from simlab.types import Array

LOOKUPS, HITS, COLD, BYTES, RERANKED, SUBSTITUTED, EVICTIONS = range(7)
PHASES = ("prefill", "decode", "not counted")
COUNTS = ("lookups", "hits", "cold_misses", "read_bytes", "reranked", "substituted", "evictions")


class Rows(NamedTuple):
    """Rows of a trace in execution order, as the loop reads them."""

    values: Array
    """float32 `[rows, experts]`: ranking values."""
    range: Array
    """float32 `[rows]`: of the finite ones."""
    router: Array
    """int32 `[rows, k]`."""
    layer: Array
    decode: Array
    phase: Array
    """int8 `[rows]`: whose counts a row adds to, `PHASES`."""
    batch_start: Array
    batch_end: Array


class State(NamedTuple):
    """What a cell's cache is between two rows; the first axis is the cell, N = layers x experts."""

    stamp: Array
    """int64 `[cells, N]`: place in the walk of an entry's last occurrence, -1 before the first."""
    resident: Array
    """bool `[cells, N]`."""
    older: Array
    """int32 `[cells, N + 1]`: the resident entry used before this one; place N is both ends of the list."""
    newer: Array
    """int32 `[cells, N + 1]`: the one used after it."""
    scalars: Array
    """int64 `[cells, 3]`: position in the walk, that at the batch's start, bytes held."""
    counts: Array
    """int64 `[cells, 3, 7]`: `COUNTS` of each of `PHASES`."""


def first_state(n_cells: int, n_layers: int, n_expert: int) -> State:
    """Empty caches."""
    n = n_layers * n_expert
    ends = np.full((n_cells, n + 1), n, np.int32)
    return State(
        np.full((n_cells, n), -1, np.int64),
        np.zeros((n_cells, n), np.bool_),
        ends,
        ends.copy(),
        np.zeros((n_cells, 3), np.int64),
        np.zeros((n_cells, len(PHASES), len(COUNTS)), np.int64),
    )


@njit(cache=True)
def _best(
    values: Array, resident: Array, base: int, boost: Any, router: Array, best: Array, ids: Array
) -> int:
    """The k best experts of a row into `ids`, residents boosted; how many are not among the router's."""
    k = router.shape[0]
    n = 0
    for expert in range(values.shape[0]):
        value = values[expert]
        if resident[base + expert] and np.isfinite(value):
            value += boost
        if n == k and value <= best[k - 1]:
            continue
        # Equal values keep the lower id, which came first.
        place = n if n < k else k - 1
        while place > 0 and value > best[place - 1]:
            best[place] = best[place - 1]
            ids[place] = ids[place - 1]
            place -= 1
        best[place] = value
        ids[place] = expert
        n = min(n + 1, k)
    new = 0
    for slot in range(k):
        among = False
        for other in range(k):
            among |= ids[slot] == router[other]
        new += not among
    return new


@njit(cache=True)
def _oldest(stamp: Array, resident: Array) -> int:
    """The resident entry of the smallest stamp."""
    found = -1
    least = np.int64(0x7FFFFFFFFFFFFFFF)
    for entry in range(stamp.shape[0]):
        if resident[entry] and stamp[entry] < least:
            least = stamp[entry]
            found = entry
    return found


@njit(cache=True)
def _walk(
    rows: Rows,
    entry_bytes: Array,
    margin: Any,
    budget: int,
    linked: bool,
    stamp: Array,
    resident: Array,
    older: Array,
    newer: Array,
    scalars: Array,
    counts: Array,
    slots: Array,
) -> None:
    """One cell over the rows; `slots` `[rows, k, 2]` takes expert and residency where it has rows at all."""
    n_expert, k = rows.values.shape[1], rows.router.shape[1]
    end = older.shape[0] - 1
    best = np.empty(k, np.float32)
    ids = np.empty(k, np.int32)
    arrived = np.empty(n_expert, np.int64)
    n_arrived = 0
    position, batch_position, used = scalars
    for row in range(rows.layer.shape[0]):
        layer = rows.layer[row]
        base = layer * n_expert
        phase = rows.phase[row]
        if rows.batch_start[row]:
            batch_position = position
            n_arrived = 0
        # Two roundings, as the engine's: the product is a float32 before it is added.
        boost = margin * rows.range[row]
        chosen = rows.router[row]
        if rows.decode[row] and boost > 0 and n_expert > k:
            counts[phase, RERANKED] += k
            new = _best(rows.values[row], resident, base, boost, rows.router[row], best, ids)
            counts[phase, SUBSTITUTED] += new
            if new:
                chosen = ids
        for slot in range(k):
            expert = chosen[slot]
            entry = base + expert
            if slots.shape[0]:
                slots[row, slot, 0] = expert
                slots[row, slot, 1] = resident[entry]
            if stamp[entry] < batch_position:
                counts[phase, LOOKUPS] += 1
                if resident[entry]:
                    counts[phase, HITS] += 1
                else:
                    counts[phase, COLD] += stamp[entry] < 0
                    counts[phase, BYTES] += entry_bytes[layer]
                    arrived[n_arrived] = entry
                    n_arrived += 1
                    # Into the list at once, where it is the newest; it is resident only at the batch's end.
                    if linked:
                        older[entry] = newer[entry] = entry
            stamp[entry] = position
            position += 1
            if linked:
                newer[older[entry]] = newer[entry]
                older[newer[entry]] = older[entry]
                last = older[end]
                older[entry], newer[entry] = last, end
                newer[last] = older[end] = entry
        if rows.batch_end[row]:
            for i in range(n_arrived):
                resident[arrived[i]] = True
                used += entry_bytes[layer]
            while used > budget:
                victim = newer[end] if linked else _oldest(stamp, resident)
                if stamp[victim] >= batch_position:
                    break
                resident[victim] = False
                if linked:
                    newer[end] = newer[victim]
                    older[newer[victim]] = end
                used -= entry_bytes[victim // n_expert]
                counts[phase, EVICTIONS] += 1
    scalars[0], scalars[1], scalars[2] = position, batch_position, used


@njit(cache=True)
def one_core(
    rows: Rows, entry_bytes: Array, margins: Array, budgets: Array, linked: bool, state: State, slots: Array
) -> None:
    """All cells, one after the other."""
    for cell in range(margins.shape[0]):
        _walk(
            rows, entry_bytes, margins[cell], budgets[cell], linked, state.stamp[cell], state.resident[cell],
            state.older[cell], state.newer[cell], state.scalars[cell], state.counts[cell], slots[cell],
        )  # fmt: skip


@njit(cache=True, parallel=True)
def parallel(
    rows: Rows, entry_bytes: Array, margins: Array, budgets: Array, linked: bool, state: State, slots: Array
) -> None:
    """All cells, spread over the cores."""
    for cell in prange(margins.shape[0]):
        _walk(
            rows, entry_bytes, margins[cell], budgets[cell], linked, state.stamp[cell], state.resident[cell],
            state.older[cell], state.newer[cell], state.scalars[cell], state.counts[cell], slots[cell],
        )  # fmt: skip
