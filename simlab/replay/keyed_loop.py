"""The walk of `keyed.py` as a loop: keys move from batch to batch, and what leaves are the least of those in RAM.

A lane that needs a few looks for them among what it has in RAM. Where many lanes have many entries, a batch's entries
are put in order once, as far as lanes ask, and a lane takes those of them that it has.

Shapes: as in `shared_loop.py`; `N` entries of a cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simlab.replay.shared_loop import EVICTIONS, HITS, READ_BYTES, Batches, Caches, lowest

_WORTH_AN_ORDER = 6
"""Entries looked at, as a multiple of a cache's, that cost as much as putting the cache in order."""


class Keys(NamedTuple):
    """Keys at some batches in a row, and the uses of all batches."""

    first: int
    """The first of the batches that have keys."""
    n: int
    """How many have."""
    key: NDArray[np.uint64]
    """`[n or more, N]`: least leaves first, of equal ones the one used longest ago."""
    entry: NDArray[np.int64]
    """`[U]`: place in `[B, E]`."""
    position: NDArray[np.int64]
    """`[U]`: of the entry's last occurrence."""
    last: NDArray[np.int64]
    """`[B * E]`: the position of each entry's last use, -1 for none; brought up to date."""


class Held(NamedTuple):
    """What is in RAM; brought up to date."""

    words: NDArray[np.uint64]
    """`[W, C, words]`: a bit for each of a cache's entries."""
    n: NDArray[np.int64]
    """`[W, C]`: bits that are set."""


class _Batch(NamedTuple):
    """One batch, of one cache."""

    key: NDArray[np.uint64]
    """`[N]`."""
    last: NDArray[np.int64]
    """`[N]`."""
    units: NDArray[np.int32]
    """Units of an entry of each of the cache's layers."""
    n_expert: int


class _Room(NamedTuple):
    """Work space."""

    heap: NDArray[np.int64]
    """`[N]`."""
    order: NDArray[np.int64]
    """`[N]`."""


def held(resident: NDArray[np.bool_], n_caches: int) -> Held:
    """What is in RAM, of `Caches.resident`."""
    n_lanes = resident.shape[1]
    n = len(resident) // n_caches
    found = Held(np.zeros((n_lanes, n_caches, -(-n // 64)), np.uint64), np.zeros((n_lanes, n_caches), np.int64))
    _pack(resident, found)
    return found


@njit(nogil=True, cache=True)
def _pack(resident: Any, held: Held) -> None:
    n = resident.shape[0] // held.n.shape[1]
    for entry in range(resident.shape[0]):
        cache, at = entry // n, entry % n
        for lane in range(resident.shape[1]):
            if resident[entry, lane]:
                held.words[lane, cache, at >> 6] |= np.uint64(1) << np.uint64(at & 63)
                held.n[lane, cache] += 1


@njit(nogil=True, cache=True)
def unpack(held: Held, resident: Any) -> None:
    """Write what is in RAM to `Caches.resident`."""
    n = resident.shape[0] // held.n.shape[1]
    for entry in range(resident.shape[0]):
        cache, at = entry // n, entry % n
        for lane in range(resident.shape[1]):
            word = held.words[lane, cache, at >> 6]
            resident[entry, lane] = bool((word >> np.uint64(at & 63)) & np.uint64(1))


@njit(nogil=True, cache=True)
def at_batches(batches: Batches, first: int, n: int, now: Any, entry: Any, value: Any, found: Any) -> None:
    """What stands for each entry of a batch's cache at its end, for `n` batches from `first` on.

    Args:
        now: int64 `[B * E]`, brought up to date. entry, value: int64 `[U]`, what stands for which after each use.
        found: int64 `[n or more, N]`, filled.
    """
    for i in range(n):
        batch = first + i
        for use in range(batches.begins[batch], batches.begins[batch + 1]):
            now[entry[use]] = value[use]
        start = batches.cache[batch] * found.shape[1]
        for at in range(found.shape[1]):
            found[i, at] = now[start + at]


@njit(nogil=True, cache=True)
def walk_keyed(batches: Batches, keys: Keys, caches: Caches, held: Held) -> None:
    """Walk all lanes through the batches that have keys, batch by batch."""
    n, n_caches = keys.key.shape[1], held.n.shape[1]
    n_layers = caches.units.shape[0] // n_caches
    room = _Room(np.empty(n, np.int64), np.empty(n, np.int64))
    for i in range(keys.n):
        number = keys.first + i
        start, stop = batches.begins[number], batches.begins[number + 1]
        cache = batches.cache[number]
        for use in range(start, stop):
            keys.last[keys.entry[use]] = keys.position[use]
        batch = _Batch(
            keys.key[i],
            keys.last[cache * n : (cache + 1) * n],
            caches.units[cache * n_layers : (cache + 1) * n_layers],
            n // n_layers,
        )
        # An entry of the order is one that a lane has in RAM with the chance of any: a lane with few entries
        # would go over more of the order than it has entries.
        few = (stop - start) * n
        looked_at = 0
        for lane in range(held.n.shape[0]):
            _look_up(batches, number, keys.entry, caches, held, lane, n)
            mine = held.n[lane, cache]
            if caches.used[cache, lane] > caches.budget[cache, lane] and mine * mine > few:
                looked_at += mine
        in_order = looked_at > _WORTH_AN_ORDER * n
        n_heap, n_order = _heap_of(batch, room.heap) if in_order else 0, 0
        counts = caches.counts[batches.phase[number]]
        for lane in range(held.n.shape[0]):
            over = np.int64(caches.used[cache, lane]) - caches.budget[cache, lane]
            if over > 0:
                words, mine = held.words[lane, cache], held.n[lane, cache]
                if in_order and mine * mine > few:
                    left, gone, n_heap, n_order = _by_order(batch, words, over, mine, room, n_heap, n_order)
                else:
                    left, gone = _by_search(batch, words, over, mine)
                caches.used[cache, lane] += left - over
                held.n[lane, cache] -= gone
                counts[EVICTIONS, lane] += gone
            if not (caches.bypass or caches.off[lane]):
                _put(batches, number, keys.entry, held, lane, n)


@njit(nogil=True, cache=True)
def _put(batches: Batches, number: int, entry: Any, held: Held, lane: int, n: int) -> None:
    """What a batch uses comes in."""
    start, stop = batches.begins[number], batches.begins[number + 1]
    cache = batches.cache[number]
    for use in range(start, stop):
        at = entry[use] - cache * n
        held.words[lane, cache, at >> 6] |= np.uint64(1) << np.uint64(at & 63)
    held.n[lane, cache] += stop - start


@njit(nogil=True, cache=True)
def _look_up(batches: Batches, number: int, entry: Any, caches: Caches, held: Held, lane: int, n: int) -> None:
    """A batch is looked up, taken out so that it cannot leave, unless it may, and held."""
    start, stop = batches.begins[number], batches.begins[number + 1]
    layer, cache = batches.layer[number], batches.cache[number]
    counts = caches.counts[batches.phase[number]]
    words, hits = held.words[lane, cache], 0
    for use in range(start, stop):
        at = entry[use] - cache * n
        bit = np.uint64(1) << np.uint64(at & 63)
        if words[at >> 6] & bit:
            words[at >> 6] ^= bit
            hits += 1
    misses = stop - start - hits
    counts[HITS, lane] += hits
    counts[READ_BYTES, lane] += misses * caches.entry_bytes[layer]
    if caches.off[lane]:
        return
    held.n[lane, cache] -= hits
    caches.used[cache, lane] += misses * caches.units[layer]
    if caches.bypass:
        _put(batches, number, entry, held, lane, n)


# -- by search -------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _by_search(batch: _Batch, words: Any, over: int, n_held: int) -> tuple[int, int]:
    """Take out the least of what is in RAM until nothing is over; what still is, and how many left."""
    most = min(-(-over // batch.units.min()), n_held)
    key, last, entry = np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int64)
    n = 0
    for number in range(words.shape[0]):
        word = words[number]
        while word:
            at = (number << 6) + np.int64(lowest(word))
            word &= word - np.uint64(1)
            mine = batch.key[at]
            if n == most and mine > key[n - 1]:
                continue
            if n == most and mine == key[n - 1] and batch.last[at] > last[n - 1]:
                continue
            place = n if n < most else most - 1
            while place > 0 and (
                mine < key[place - 1] or (mine == key[place - 1] and batch.last[at] < last[place - 1])
            ):
                key[place], last[place], entry[place] = key[place - 1], last[place - 1], entry[place - 1]
                place -= 1
            key[place], last[place], entry[place] = mine, batch.last[at], at
            n = min(n + 1, most)
    gone = 0
    while over > 0 and gone < n:
        at = entry[gone]
        words[at >> 6] ^= np.uint64(1) << np.uint64(at & 63)
        over -= batch.units[at // batch.n_expert]
        gone += 1
    return over, gone


# -- by order --------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _by_order(
    batch: _Batch, words: Any, over: int, n_held: int, room: _Room, n_heap: int, n_order: int
) -> tuple[int, int, int, int]:
    """As `_by_search`, by the batch's order, which is `n_order` long so far; and what is in the heap and the order."""
    gone, i = 0, 0
    while over > 0 and gone < n_held:
        if i == n_order:
            room.order[n_order] = room.heap[0]
            n_heap -= 1
            n_order += 1
            room.heap[0] = room.heap[n_heap]
            _sift(batch, room.heap, n_heap, 0)
        at = room.order[i]
        i += 1
        bit = np.uint64(1) << np.uint64(at & 63)
        if words[at >> 6] & bit:
            words[at >> 6] ^= bit
            over -= batch.units[at // batch.n_expert]
            gone += 1
    return over, gone, n_heap, n_order


@njit(nogil=True, cache=True)
def _heap_of(batch: _Batch, heap: Any) -> int:
    """Make a heap of the entries that were ever used, the first to leave on top; how many they are."""
    n = 0
    for at in range(batch.last.shape[0]):
        if batch.last[at] >= 0:
            heap[n] = at
            n += 1
    for place in range(n // 2 - 1, -1, -1):
        _sift(batch, heap, n, place)
    return n


@njit(nogil=True, cache=True)
def _leaves_before(batch: _Batch, one: int, other: int) -> bool:
    if batch.key[one] != batch.key[other]:
        return batch.key[one] < batch.key[other]
    return batch.last[one] < batch.last[other]


@njit(nogil=True, cache=True)
def _sift(batch: _Batch, heap: Any, n: int, place: int) -> None:
    """Bring the entry at a place of the heap, where it may stand too high, to where it belongs."""
    one = heap[place]
    while 2 * place + 1 < n:
        below = 2 * place + 1
        if below + 1 < n and _leaves_before(batch, heap[below + 1], heap[below]):
            below += 1
        if not _leaves_before(batch, heap[below], one):
            break
        heap[place] = heap[below]
        place = below
    heap[place] = one
