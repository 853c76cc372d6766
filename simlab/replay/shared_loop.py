"""The walks of `ranked.py` and `keyed.py` as loops compiled by numba, for where JAX's device is the CPU itself.

XLA's programs for a CPU spend most of their time on handing out small pieces of work, of which a walk has many; a
loop has none. What comes out is the same, to the entry. A cache is a bit per place, in words of 64.

By ranks, an order of eviction stands beforehand, and what leaves are a cache's lowest bits; a second level of bits
says which words hold any, so that the lowest is found in a few instructions.

By keys that move from batch to batch, what leaves are the least of those in RAM, which a lane looks for. Most of them
are passed over by words: which entries of a batch have a key among the least 1/4, 1/16 and so on is found once
for all lanes, and a lane looks at those only, or at four times as many where that does not suffice.

Shapes: `B` MoE layers, `E` experts per layer, `C` caches, `N` entries of a cache, `W` lanes, `P` batches, `U` uses in
the order of the walk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.replay.loops import loop, lowest_bit

WORD_64 = 64
"""Places of a word."""
PHASES = 3
"""Prefill, decode, and what is not counted."""
HITS, EVICTIONS, READ_BYTES = range(3)
N_COUNTS = 3
_LANES = 64
"""Lanes side by side: of some thousand batches their bits fit a processor's cache."""
LEVELS = 5
"""Of them the first has all entries, and each one after about a quarter of the one before."""
_SAMPLE = 512
"""Keys that say, about, where a level ends."""
_DENSE = 2
"""The last level that is found by going over all keys, and not over those of the one before."""
_PLENTY = 8
"""Times as many as leave, of which a quarter will mostly do too."""
_LARGEST_KEY = np.uint64(2**64 - 1)


class Batches(NamedTuple):
    """What is walked."""

    begins: NDArray[np.int64]
    """`[P + 1]`: where the uses of each begin, and where the last ones end."""
    number: NDArray[np.int64]
    """`[P]`: of each since the start of the run."""
    layer: NDArray[np.int64]
    """`[P]`."""
    cache: NDArray[np.int64]
    """`[P]`: which of the caches it goes to."""
    phase: NDArray[np.int64]
    """`[P]`: of `PHASES`."""


class Caches(NamedTuple):
    """What lanes walk with, and what they come to."""

    units: NDArray[np.int32]
    """`[B * E]`: units of each entry."""
    least_units: NDArray[np.int32]
    """`[C]`: units of the smallest entry of each cache."""
    entry_bytes: NDArray[np.int64]
    """`[B]`."""
    budget: NDArray[np.int32]
    """`[C, W]`: units a cache may hold."""
    off: NDArray[np.bool_]
    """`[W]`: lanes without a cache."""
    bypass: bool
    """Whether what a batch uses may leave at its end."""
    resident: NDArray[np.bool_]
    """`[B * E, W]`: what is in RAM; brought up to date."""
    used: NDArray[np.int32]
    """`[C, W]`: units in use; brought up to date."""
    counts: NDArray[np.int64]
    """`[PHASES, N_COUNTS, W]`: `HITS`, `EVICTIONS` and `READ_BYTES`; added to."""


# -- by ranks ------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """An order of eviction. Ranks count within a cache, and each cache's begin with a word: all are places in a row."""

    words: NDArray[np.int64]
    """`[C + 1]`: the first word of each cache, and how many there are."""
    groups: NDArray[np.int64]
    """`[C + 1]`: the same of groups of 64 words."""
    old: NDArray[np.int64]
    """`[U]`: where a used entry lies, -1 where it is nowhere."""
    new: NDArray[np.int64]
    """`[U]`: where it comes in."""
    units: NDArray[np.int32]
    """By place, units of its entry."""
    before: NDArray[np.int64]
    """`[B * E]`: where entries lie before the first batch, -1 for nowhere."""
    after: NDArray[np.int64]
    """`[B * E]`: where they lie after the last."""


def walk_ranked(batches: Batches, ranks: Ranks, caches: Caches) -> None:
    """Walk all lanes where an order of eviction stands, some of them side by side."""
    n_lanes = len(caches.off)
    for first in range(0, n_lanes, _LANES):
        n = min(_LANES, n_lanes - first)
        # Lanes last, so that what they do alike is done by vector instructions.
        words, groups = (np.zeros((of_caches[-1], n), np.uint64) for of_caches in (ranks.words, ranks.groups))
        _walk_some(batches, ranks, caches, first, words, groups)


@loop
def _walk_some(batches: Batches, ranks: Ranks, caches: Caches, first: int, words: Any, groups: Any) -> None:
    """Walk lanes from the `first` on.

    Args:
        words, groups: uint64 `[words, lanes]` and `[groups, lanes]`, zeros: a bit for each place, and one for each word
            that may hold any.
    """
    n_lanes = words.shape[1]
    n_expert = caches.units.shape[0] // caches.entry_bytes.shape[0]
    of_cache = caches.units.shape[0] // caches.budget.shape[0]
    on, whole = np.empty(n_lanes, np.uint64), ~np.uint64(0)
    for lane in range(n_lanes):
        on[lane] = np.uint64(0) if caches.off[first + lane] else whole
    there, missed = np.empty(n_lanes, np.uint64), np.empty(n_lanes, np.int64)
    for entry in range(caches.units.shape[0]):
        if ranks.before[entry] >= 0:
            for lane in range(n_lanes):
                there[lane] = whole if caches.resident[entry, first + lane] else np.uint64(0)
            cache = entry // of_cache
            _put(words, groups, ranks.words[cache], ranks.groups[cache], ranks.before[entry], there)
    for batch in range(batches.layer.shape[0]):
        start, stop = batches.begins[batch], batches.begins[batch + 1]
        layer, cache = batches.layer[batch], batches.cache[batch]
        first_word, first_group = ranks.words[cache], ranks.groups[cache]
        missed[:] = stop - start
        for use in range(start, stop):
            place = ranks.old[use]
            if place >= 0:
                word, bit = place >> 6, np.uint64(place & 63)
                for lane in range(n_lanes):
                    here = words[word, lane]
                    missed[lane] -= np.int64((here >> bit) & np.uint64(1))
                    words[word, lane] = here & ~(np.uint64(1) << bit)
        if caches.bypass:
            for use in range(start, stop):
                _put(words, groups, first_word, first_group, ranks.new[use], on)
        counts = caches.counts[batches.phase[batch]]
        units, entry_bytes = caches.units[layer * n_expert], caches.entry_bytes[layer]
        for lane in range(n_lanes):
            counts[HITS, first + lane] += stop - start - missed[lane]
            counts[READ_BYTES, first + lane] += missed[lane] * entry_bytes
            if not on[lane]:
                continue
            used = np.int64(caches.used[cache, first + lane]) + missed[lane] * units
            over = used - caches.budget[cache, first + lane]
            if over > 0:
                left, gone = _leave(
                    words, groups, first_word, first_group, ranks.groups[cache + 1], ranks.units, over, lane
                )
                counts[EVICTIONS, first + lane] += gone
                used += left - over
            caches.used[cache, first + lane] = used
        if not caches.bypass:
            for use in range(start, stop):
                _put(words, groups, first_word, first_group, ranks.new[use], on)
    for entry in range(caches.units.shape[0]):
        place = ranks.after[entry]
        for lane in range(n_lanes):
            is_there = place >= 0 and (words[place >> 6, lane] >> np.uint64(place & 63)) & np.uint64(1)
            caches.resident[entry, first + lane] = bool(is_there)


@loop
def _put(words: Any, groups: Any, first_word: Any, first_group: Any, place: Any, lanes: Any) -> None:
    """An entry comes in, in the lanes that have all bits set."""
    word = place >> 6
    bit = np.uint64(1) << np.uint64(place & 63)
    group = first_group + ((word - first_word) >> 6)
    bit_of_word = np.uint64(1) << np.uint64((word - first_word) & 63)
    for lane in range(lanes.shape[0]):
        words[word, lane] |= lanes[lane] & bit
        groups[group, lane] |= lanes[lane] & bit_of_word


@loop
def _leave(
    words: Any,
    groups: Any,
    first_word: Any,
    first_group: Any,
    last_group: Any,
    units: Any,
    over: Any,
    lane: int,
) -> Any:
    """A lane's lowest bits of a cache are cleared until nothing is over; what still is, and how many they were."""
    gone, group = 0, first_group
    while over > 0 and group < last_group:
        if not groups[group, lane]:
            group += 1
            continue
        word = first_word + ((group - first_group) << 6) + lowest_bit(groups[group, lane])
        here = words[word, lane]
        while here and over > 0:
            over -= units[(word << 6) + lowest_bit(here)]
            here &= here - np.uint64(1)
            gone += 1
        words[word, lane] = here
        if not here:
            groups[group, lane] &= groups[group, lane] - np.uint64(1)
    return over, gone


# -- by keys -------------------------------------------------------------------------------------------------


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
    """`[N]`: units of each entry."""
    least_units: Any
    """Of the smallest."""


@loop
def at_batches(batches: Batches, first: int, entry: Any, now: Any, value: Any, found: Any) -> None:
    """What stands for each entry of a batch's cache at its end, for the batches from `first` on.

    Args:
        entry: `[U]`. now: int64 `[B * E]`, before the first of them; brought up to date. value: int64 `[U]`, what
            stands after each use. found: int64 `[batches, N]`, filled as far as there are batches.
    """
    for i in range(min(found.shape[0], batches.layer.shape[0] - first)):
        batch = first + i
        for use in range(batches.begins[batch], batches.begins[batch + 1]):
            now[entry[use]] = value[use]
        start = batches.cache[batch] * found.shape[1]
        for at in range(found.shape[1]):
            found[i, at] = now[start + at]


@loop
def walk_keyed(batches: Batches, keys: Keys, caches: Caches, held: Held) -> None:
    """Walk all lanes through the batches that have keys, batch by batch."""
    n = keys.key.shape[1]
    n_expert = caches.units.shape[0] // caches.entry_bytes.shape[0]
    levels = np.empty((LEVELS, held.words.shape[2]), np.uint64)
    levels[0] = ~np.uint64(0)
    # Words and bits of what a batch uses.
    word, bit = np.empty(n, np.uint64), np.empty(n, np.uint64)
    for i in range(keys.n):
        number = keys.first + i
        start, n_uses = batches.begins[number], batches.begins[number + 1] - batches.begins[number]
        layer, cache = batches.layer[number], batches.cache[number]
        for use in range(n_uses):
            entry = keys.entry[start + use]
            keys.last[entry] = keys.position[start + use]
            at = entry - cache * n
            word[use], bit[use] = at >> 6, np.uint64(1) << np.uint64(at & 63)
        first = cache * n
        batch = _Batch(
            keys.key[i],
            keys.last[first : first + n],
            caches.units[first : first + n],
            caches.least_units[cache],
        )
        n_levels = np.int64(1)
        counts = caches.counts[batches.phase[number]]
        for lane in range(held.n.shape[0]):
            words = held.words[lane, cache]
            hits = 0
            for use in range(n_uses):
                there = words[word[use]] & bit[use]
                words[word[use]] ^= there
                hits += there != 0
            counts[HITS, lane] += hits
            counts[READ_BYTES, lane] += (n_uses - hits) * caches.entry_bytes[layer]
            if caches.off[lane]:
                continue
            held.n[lane, cache] -= hits
            if caches.bypass:
                _put_uses(words, word, bit, n_uses)
                held.n[lane, cache] += n_uses
            used = np.int64(caches.used[cache, lane]) + (n_uses - hits) * caches.units[layer * n_expert]
            over = used - caches.budget[cache, lane]
            if over > 0:
                if held.level[lane, cache] >= n_levels:
                    _find_levels(batch.key, held.ends[cache], n_levels, held.level[lane, cache], levels)
                    n_levels = held.level[lane, cache] + 1
                left, gone = _evict(batch, held, lane, cache, over, levels)
                used += left - over
                counts[EVICTIONS, lane] += gone
            caches.used[cache, lane] = used
            if not caches.bypass:
                _put_uses(words, word, bit, n_uses)
                held.n[lane, cache] += n_uses


@loop
def _put_uses(words: Any, word: Any, bit: Any, n_uses: int) -> None:
    """What a batch uses comes in."""
    for use in range(n_uses):
        words[word[use]] |= bit[use]


@loop
def _evict(batch: _Batch, held: Held, lane: int, cache: Any, over: Any, levels: Any) -> Any:
    """Take out the least of what is in RAM until nothing is over; what still is, and how many left."""
    words, n_held, level = held.words[lane, cache], held.n[lane, cache], held.level[lane, cache]
    most = min(-(-over // batch.least_units), n_held)
    entry = np.empty(most, np.int64)
    while True:
        n, n_seen = _least(batch, words, levels[level], entry)
        if n == most:
            break
        # All that has a key of this level will not do.
        level -= 1
    held.level[lane, cache] = min(level + (n_seen >= _PLENTY * most), LEVELS - 1)
    gone = 0
    while over > 0 and gone < n:
        at = entry[gone]
        words[at >> 6] ^= np.uint64(1) << np.uint64(at & 63)
        over -= batch.units[at]
        gone += 1
    held.n[lane, cache] -= gone
    return over, gone


@loop
def _least(batch: _Batch, words: Any, level: Any, entry: Any) -> Any:
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
            at = first + np.uint64(lowest_bit(word))
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


@loop
def _find_levels(key: Any, ends: Any, n_known: Any, last: Any, levels: Any) -> None:
    """Fill `levels`, of which some are known, up to a last one."""
    level, is_new = n_known, False
    while level <= last:
        about = key.shape[0] >> (2 * level)
        found = _level(key, ends[level], levels, level)
        if is_new or about // 2 <= found <= about * 2:
            level, is_new = level + 1, False
        else:
            _find_ends(key, ends)
            is_new = True


@loop
def _level(key: Any, end: Any, levels: Any, level: int) -> Any:
    """Set the bits of keys up to an end; how many they are."""
    words, n = levels[level], 0
    for number in range(words.shape[0]):
        first, found = np.uint64(number << 6), np.uint64(0)
        if level <= _DENSE:
            for bit in range(min(64, key.shape[0] - (number << 6))):
                is_in = np.uint64(key[first + np.uint64(bit)] <= end)
                found |= is_in << np.uint64(bit)
                n += np.int64(is_in)
        else:
            # Ends ascend, so that few are left to look at.
            left = levels[level - 1, number]
            while left:
                bit = np.uint64(lowest_bit(left))
                left &= left - np.uint64(1)
                is_in = np.uint64(key[first + bit] <= end)
                found |= is_in << bit
                n += np.int64(is_in)
        words[number] = found
    return n


@loop
def _find_ends(key: Any, ends: Any) -> None:
    """The largest key of each level, by some keys' order."""
    some = key[:: max(key.shape[0] // _SAMPLE, 1)].copy()
    # Shell's: a few lines, where numba takes seconds to compile a sort of NumPy's.
    gap = some.shape[0] // 2
    while gap:
        for i in range(gap, some.shape[0]):
            mine, place = some[i], i
            while place >= gap and some[place - gap] > mine:
                some[place] = some[place - gap]
                place -= gap
            some[place] = mine
        gap //= 2
    for level in range(1, ends.shape[0]):
        ends[level] = some[some.shape[0] >> (2 * level)]
