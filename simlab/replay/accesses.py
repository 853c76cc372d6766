"""What rows of a trace use, put in order by a compiled loop: what all lanes share whose routing no lane changes.

An *access* is all of a row's slots that run one entry; it stands where the last of them does in the walk. A *use* is
all of a batch's accesses to one entry; its last access closes it.

Shapes: `R` rows, `K` slots, `A` accesses, `U` uses, `P` batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.replay.loops import loop


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
    turn: NDArray[np.int64]
    """`[A]`: how many accesses to the entry came before."""
    closing: NDArray[np.int64]
    """`[U]`: the accesses that close uses."""
    before: NDArray[np.int64]
    """`[U]`: the use of the same entry before each, -1 where there is none."""
    begins: NDArray[np.int64]
    """`[P + 1]`: where each batch's uses begin, and where the last ones end."""
    n_slots: int
    """Slots that exist."""


def find_accesses(
    ids: NDArray[np.int32],
    layer: NDArray[np.int32],
    batch_start: NDArray[np.bool_],
    n_layers: int,
    n_expert: int,
) -> Accesses:
    """The accesses of whole batches.

    Args:
        ids: `[R, K]`, -1 where no slot is. layer: `[R]`. batch_start: `[R]`.
    """
    n, n_batches = int((ids >= 0).sum()), int(batch_start.sum())
    entry, row, slot, place, turn, closing, before = np.empty((7, n), np.int64)
    first, begins = np.empty(n, np.bool_), np.zeros(n_batches + 1, np.int64)
    room = Accesses(entry, row, slot, place, first, turn, closing, before, begins, n)
    last = np.full((4, n_layers * n_expert), -1, np.int64)
    a = slice(_find(ids, layer, batch_start, n_expert, last, room))
    u = slice(begins[-1])
    return Accesses(
        entry[a], row[a], slot[a], place[a], first[a], turn[a], closing[u], before[u], begins, n
    )  # fmt: skip


@loop
def _find(ids: Any, layer: Any, batch_start: Any, n_expert: int, last: Any, found: Accesses) -> int:
    """Fill `found`, which has room for more; how many accesses there are.

    Args:
        last: int64 `[4, entries]` of -1: work space.
    """
    last_place, last_batch, last_turn, last_use = last[0], last[1], last[2], last[3]
    n, n_places, n_uses, batch, of_batch = 0, 0, 0, -1, 0
    for r in range(ids.shape[0]):
        if batch_start[r]:
            batch += 1
            of_batch = n
        base = layer[r] * n_expert
        at = n_places
        for s in range(ids.shape[1]):
            if ids[r, s] >= 0:
                last_place[base + ids[r, s]] = at
                at += 1
        for s in range(ids.shape[1]):
            if ids[r, s] < 0:
                continue
            e = base + ids[r, s]
            if last_place[e] == n_places:
                last_turn[e] += 1
                found.entry[n], found.row[n], found.slot[n] = e, r, s
                found.place[n], found.turn[n] = n_places, last_turn[e]
                found.first[n] = last_batch[e] != batch
                last_batch[e] = batch
                n += 1
            n_places += 1
        if r + 1 == ids.shape[0] or batch_start[r + 1]:
            for access in range(of_batch, n):
                e = found.entry[access]
                if found.place[access] == last_place[e]:
                    found.closing[n_uses], found.before[n_uses] = access, last_use[e]
                    last_use[e] = n_uses
                    n_uses += 1
            found.begins[batch + 1] = n_uses
    return n
