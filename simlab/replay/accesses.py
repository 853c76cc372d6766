"""What rows of a trace use, put in order by a compiled loop: what all lanes share whose routing no lane changes.

An *access* is all of a row's slots that run one entry; it stands where the last of them does in the walk. A *use* is
all of a batch's accesses to one entry; its last access closes it.

Shapes: `R` rows, `K` slots, `A` accesses, `U` uses, `P` batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray


class Accesses(NamedTuple):
    """Accesses and uses, both in the order of the walk."""

    entry: NDArray[np.int64]
    """`[A]`: place in `[layers, experts]`."""
    row: NDArray[np.int64]
    """`[A]`."""
    slot: NDArray[np.int64]
    """`[A]`: the last of the access's."""
    place: NDArray[np.int64]
    """`[A]`: of that slot in the walk, from the first row's first slot on."""
    first: NDArray[np.bool_]
    """`[A]`: whether the batch has not accessed the entry before."""
    of_slot: NDArray[np.int64]
    """`[R, K]`: the access of each slot, -1 where no slot is."""
    by_turn: NDArray[np.int64]
    """`[A]`: accesses, first those that are their entry's first, then those that are its second, and so on."""
    turn_ends: NDArray[np.int64]
    """Where each turn ends in `by_turn`."""
    closing: NDArray[np.int64]
    """`[U]`: the accesses that close uses."""
    before: NDArray[np.int64]
    """`[U]`: the use of the same entry before each, -1 where there is none."""
    begins: NDArray[np.int64]
    """`[P + 1]`: where each batch's uses begin, and where the last ones end."""
    n_slots: int
    """Slots that exist."""


def find_accesses(
    ids: NDArray[np.int32], layer: NDArray[np.int32], batch_start: NDArray[np.bool_], n_layers: int, n_expert: int
) -> Accesses:
    """The accesses of whole batches.

    Args:
        ids: `[R, K]`, -1 where no slot is. layer: `[R]`. batch_start: `[R]`.
    """
    n, n_batches = int((ids >= 0).sum()), int(batch_start.sum())
    found = np.empty((5, n), np.int64)
    first = np.empty(n, np.bool_)
    uses = np.empty((2, n), np.int64)
    of_slot = np.full(ids.shape, -1, np.int64)
    begins = np.zeros(n_batches + 1, np.int64)
    of_entry = np.full((4, n_layers * n_expert), -1, np.int64)
    n_accesses = _find(ids, layer, batch_start, n_expert, of_entry, found, first, of_slot, uses, begins)
    entry, row, slot, place, turn = found[:, :n_accesses]
    per_turn = np.bincount(turn)
    by_turn = np.empty(n_accesses, np.int64)
    _sort_by_turn(turn, np.cumsum(per_turn) - per_turn, by_turn)
    closing, before = uses[:, : begins[-1]]
    return Accesses(
        entry, row, slot, place, first[:n_accesses], of_slot, by_turn, np.cumsum(per_turn), closing, before,
        begins, n,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _find(
    ids: Any,
    layer: Any,
    batch_start: Any,
    n_expert: int,
    of_entry: Any,
    found: Any,
    first: Any,
    of_slot: Any,
    uses: Any,
    begins: Any,
) -> int:
    """Fill `found` (entry, row, slot, place, turn), `first`, `of_slot`, `uses` (closing, before) and `begins`; how many
    accesses there are.

    Args:
        of_entry: int64 `[4, entries]`, -1 throughout: last place, last batch, last turn and last use of each.
    """
    last_place, last_batch, last_turn, last_use = of_entry[0], of_entry[1], of_entry[2], of_entry[3]
    n_rows, width = ids.shape
    n_accesses, n_places, n_uses, batch, of_batch = 0, 0, 0, -1, 0
    for row in range(n_rows):
        if batch_start[row]:
            batch += 1
            of_batch = n_accesses
        base = np.int64(layer[row]) * n_expert
        place = n_places
        for slot in range(width):
            if ids[row, slot] >= 0:
                last_place[base + ids[row, slot]] = place
                place += 1
        before_row = n_accesses
        for slot in range(width):
            if ids[row, slot] < 0:
                continue
            entry = base + ids[row, slot]
            if last_place[entry] == n_places:
                found[0, n_accesses], found[1, n_accesses], found[2, n_accesses] = entry, row, slot
                found[3, n_accesses] = n_places
                first[n_accesses] = last_batch[entry] != batch
                last_batch[entry] = batch
                last_turn[entry] += 1
                found[4, n_accesses] = last_turn[entry]
                n_accesses += 1
            n_places += 1
        for slot in range(width):
            if ids[row, slot] >= 0:
                entry = base + ids[row, slot]
                for access in range(before_row, n_accesses):
                    if found[0, access] == entry:
                        of_slot[row, slot] = access
        if row + 1 == n_rows or batch_start[row + 1]:
            for access in range(of_batch, n_accesses):
                entry = found[0, access]
                if found[3, access] == last_place[entry]:
                    uses[0, n_uses], uses[1, n_uses] = access, last_use[entry]
                    last_use[entry] = n_uses
                    n_uses += 1
            begins[batch + 1] = n_uses
    return n_accesses


@njit(nogil=True, cache=True)
def _sort_by_turn(turn: Any, next_of_turn: Any, by_turn: Any) -> None:
    """Accesses by turn, stable; `next_of_turn` is where each turn begins, and is used up."""
    for access in range(turn.shape[0]):
        by_turn[next_of_turn[turn[access]]] = access
        next_of_turn[turn[access]] += 1
