"""The walk of `keyed.py` as a loop: keys move from batch to batch, and what leaves are the least of those in RAM.

A lane looks for what leaves among what it has in RAM. Most of that is passed over by words of 64: which entries of a
batch have a key among the least 1/4, 1/16 and so on is found once for all lanes, and a lane looks at those only,
or at four times as many where that does not suffice.

Shapes: as in `shared_loop.py`; `N` entries of a cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simlab.replay.shared_loop import EVICTIONS, HITS, READ_BYTES, Batches, Caches, lowest

_LEVELS = 5
"""Of them the first has all entries, and each one after about a quarter of the one before."""
_SAMPLE = 512
"""Keys that say, about, where a level ends."""
_PLENTY = 8
"""Times as many as leave, of which a quarter will mostly do too."""
_LARGEST_KEY = np.uint64(2**64 - 1)


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
    """What is in RAM, and what a search goes by; brought up to date."""

    words: NDArray[np.uint64]
    """`[W, C, words]`: a bit for each of a cache's entries."""
    n: NDArray[np.int64]
    """`[W, C]`: bits that are set."""
    level: NDArray[np.int64]
    """`[W, C]`: at which a search begins."""
    ends: NDArray[np.uint64]
    """`[C, levels]`: the largest key of each level; of any keys, exact counts do not rest on it."""


class _Batch(NamedTuple):
    """One batch, of one cache."""

    key: NDArray[np.uint64]
    """`[N]`."""
    last: NDArray[np.int64]
    """`[N]`."""
    units: NDArray[np.int32]
    """Units of an entry of each of the cache's layers."""
    least_units: int
    n_expert: int


def held(resident: NDArray[np.bool_], n_caches: int) -> Held:
    """What is in RAM, of `Caches.resident`."""
    of_lanes = (resident.shape[1], n_caches)
    n_words = -(-len(resident) // n_caches // 64)
    found = Held(
        words=np.zeros((*of_lanes, n_words), np.uint64),
        n=np.zeros(of_lanes, np.int64),
        level=np.zeros(of_lanes, np.int64),
        ends=np.zeros((n_caches, _LEVELS), np.uint64),
    )
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
    levels = np.empty((_LEVELS, held.words.shape[2]), np.uint64)
    levels[0] = ~np.uint64(0)
    for i in range(keys.n):
        number = keys.first + i
        cache = batches.cache[number]
        for use in range(batches.begins[number], batches.begins[number + 1]):
            keys.last[keys.entry[use]] = keys.position[use]
        units = caches.units[cache * n_layers : (cache + 1) * n_layers]
        batch = _Batch(
            keys.key[i], keys.last[cache * n : (cache + 1) * n], units, units.min(), n // n_layers
        )
        n_levels = 1
        counts = caches.counts[batches.phase[number]]
        for lane in range(held.n.shape[0]):
            _look_up(batches, number, keys.entry, caches, held, lane, n)
            over = np.int64(caches.used[cache, lane]) - caches.budget[cache, lane]
            if over > 0:
                n_levels = max(n_levels, _find_levels(batch, held, lane, cache, n_levels, levels))
                left, gone = _evict(batch, held, lane, cache, over, levels)
                caches.used[cache, lane] += left - over
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


@njit(nogil=True, cache=True)
def _evict(batch: _Batch, held: Held, lane: int, cache: int, over: int, levels: Any) -> tuple[int, int]:
    """Take out the least of what is in RAM until nothing is over; what still is, and how many left."""
    words, n_held, level = held.words[lane, cache], held.n[lane, cache], held.level[lane, cache]
    most = min(-(-over // batch.least_units), n_held)
    entry = np.empty(most, np.int64)
    n, n_seen = _least(batch, words, levels[level], entry)
    while n < most:
        # All that has a key of this level would not do.
        level -= 1
        n, n_seen = _least(batch, words, levels[level], entry)
    held.level[lane, cache] = min(level + (n_seen >= _PLENTY * most), _LEVELS - 1)
    gone = 0
    while over > 0 and gone < n:
        at = entry[gone]
        words[at >> 6] ^= np.uint64(1) << np.uint64(at & 63)
        over -= batch.units[at // batch.n_expert]
        gone += 1
    held.n[lane, cache] -= gone
    return over, gone


@njit(nogil=True, cache=True)
def _least(batch: _Batch, words: Any, level: Any, entry: Any) -> tuple[int, int]:
    """Fill `entry` with those in RAM and of a level that leave first, in order; how many, and how many there are.

    Args:
        words, level: uint64 `[words]`.
    """
    most = entry.shape[0]
    n, n_seen, worst = 0, 0, _LARGEST_KEY
    for number in range(words.shape[0]):
        word = words[number] & level[number]
        first = np.uint64(number << 6)
        while word:
            # Unsigned, since numba asks of a signed place whether it counts from the end.
            at = first + lowest(word)
            word &= word - np.uint64(1)
            n_seen += 1
            mine = batch.key[at]
            if mine > worst:
                continue
            used = batch.last[at]
            if n == most and mine == worst and used > batch.last[entry[n - 1]]:
                continue
            place = n if n < most else most - 1
            while place > 0:
                other = entry[place - 1]
                if mine > batch.key[other] or (mine == batch.key[other] and used > batch.last[other]):
                    break
                entry[place] = other
                place -= 1
            entry[place] = np.int64(at)
            n = min(n + 1, most)
            if n == most:
                worst = batch.key[entry[n - 1]]
    return n, n_seen


# -- levels ----------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _find_levels(batch: _Batch, held: Held, lane: int, cache: int, n_levels: int, levels: Any) -> int:
    """Fill `levels`, of which `n_levels` are known, up to the one at which a lane's search begins; how many are then."""
    n = batch.key.shape[0]
    for level in range(n_levels, held.level[lane, cache] + 1):
        about = n >> (2 * level)
        found = _level(batch.key, held.ends[cache, level], levels[level])
        if found < about // 2 or found > about * 2:
            _find_ends(batch.key, held.ends[cache])
            _level(batch.key, held.ends[cache, level], levels[level])
    return held.level[lane, cache] + 1


@njit(nogil=True, cache=True)
def _level(key: Any, end: Any, words: Any) -> int:
    """Set the bits of keys up to an end; how many they are."""
    found = 0
    for number in range(words.shape[0]):
        word = np.uint64(0)
        first = number << 6
        for bit in range(min(64, key.shape[0] - first)):
            is_in = np.uint64(key[np.uint64(first + bit)] <= end)
            word |= is_in << np.uint64(bit)
            found += np.int64(is_in)
        words[number] = word
    return found


@njit(nogil=True, cache=True)
def _find_ends(key: Any, ends: Any) -> None:
    """The largest key of each level, by some keys' order."""
    step = max(key.shape[0] // _SAMPLE, 1)
    some = np.sort(key[::step])
    for level in range(1, ends.shape[0]):
        ends[level] = some[some.shape[0] >> (2 * level)]
