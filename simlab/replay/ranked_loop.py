"""The walk of `ranked.py` as a loop: an order of eviction stands beforehand, and what leaves are a cache's lowest bits.

A second level of bits says which words hold any, so that the lowest is found in a few instructions.

Shapes: as in `shared_loop.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simlab.replay.shared_loop import EVICTIONS, HITS, READ_BYTES, Batches, Caches, lowest


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


@njit(nogil=True, cache=True)
def walk_ranked(batches: Batches, ranks: Ranks, caches: Caches) -> None:
    """Walk all lanes, one after the other, where an order of eviction stands."""
    words = np.empty(ranks.words[-1], np.uint64)
    # A bit for each word that is not zero.
    groups = np.empty(ranks.groups[-1], np.uint64)
    n_caches = caches.budget.shape[0]
    n_entries = ranks.before.shape[0]
    n_expert = n_entries // caches.entry_bytes.shape[0]
    for lane in range(caches.off.shape[0]):
        words[:] = 0
        groups[:] = 0
        for cache in range(n_caches):
            for entry in range(cache * (n_entries // n_caches), (cache + 1) * (n_entries // n_caches)):
                if caches.resident[entry, lane]:
                    _put(words, groups, ranks.words[cache], ranks.groups[cache], ranks.before[entry])
        for batch in range(batches.layer.shape[0]):
            start, stop = batches.begins[batch], batches.begins[batch + 1]
            layer, cache = batches.layer[batch], batches.cache[batch]
            first_word, first_group = ranks.words[cache], ranks.groups[cache]
            counts = caches.counts[batches.phase[batch]]
            n_missed = stop - start
            for use in range(start, stop):
                place = ranks.old[use]
                if place >= 0 and _take(words, groups, first_word, first_group, place):
                    n_missed -= 1
            counts[HITS, lane] += stop - start - n_missed
            counts[READ_BYTES, lane] += n_missed * caches.entry_bytes[layer]
            if caches.off[lane]:
                continue
            if caches.bypass:
                for use in range(start, stop):
                    _put(words, groups, first_word, first_group, ranks.new[use])
            used = np.int64(caches.used[cache, lane]) + n_missed * caches.units[layer * n_expert]
            group = first_group
            while used > caches.budget[cache, lane]:
                while group < ranks.groups[cache + 1] and not groups[group]:
                    group += 1
                if group == ranks.groups[cache + 1]:
                    break
                word = first_word + ((group - first_group) << 6) + np.int64(lowest(groups[group]))
                place = (word << 6) + np.int64(lowest(words[word]))
                _take(words, groups, first_word, first_group, place)
                used -= ranks.units[place]
                counts[EVICTIONS, lane] += 1
            caches.used[cache, lane] = used
            if not caches.bypass:
                for use in range(start, stop):
                    _put(words, groups, first_word, first_group, ranks.new[use])
        for entry in range(n_entries):
            place = ranks.after[entry]
            there = place >= 0 and (words[place >> 6] >> np.uint64(place & 63)) & np.uint64(1)
            caches.resident[entry, lane] = bool(there)


@njit(nogil=True, cache=True)
def _put(words: Any, groups: Any, first_word: Any, first_group: Any, place: Any) -> None:
    """An entry comes in."""
    word = place >> 6
    words[word] |= np.uint64(1) << np.uint64(place & 63)
    of_cache = word - first_word
    groups[first_group + (of_cache >> 6)] |= np.uint64(1) << np.uint64(of_cache & 63)


@njit(nogil=True, cache=True)
def _take(words: Any, groups: Any, first_word: Any, first_group: Any, place: Any) -> bool:
    """An entry is taken out; whether it was there."""
    word, bit = place >> 6, np.uint64(1) << np.uint64(place & 63)
    if not words[word] & bit:
        return False
    words[word] ^= bit
    if not words[word]:
        of_cache = word - first_word
        groups[first_group + (of_cache >> 6)] ^= np.uint64(1) << np.uint64(of_cache & 63)
    return True
