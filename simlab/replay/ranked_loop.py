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
    words = np.zeros(ranks.words[-1], np.uint64)
    # A bit for each word that is not zero.
    groups = np.zeros(ranks.groups[-1], np.uint64)
    for lane in range(caches.off.shape[0]):
        _walk_lane(batches, ranks, caches, lane, words, groups)
        words[:] = 0
        groups[:] = 0


@njit(nogil=True, cache=True)
def _set(words: Any, groups: Any, first_word: int, first_group: int, place: int) -> None:
    at = place >> 6
    words[at] |= np.uint64(1) << np.uint64(place & 63)
    of_cache = at - first_word
    groups[first_group + (of_cache >> 6)] |= np.uint64(1) << np.uint64(of_cache & 63)


@njit(nogil=True, cache=True)
def _walk_lane(batches: Batches, ranks: Ranks, caches: Caches, lane: int, words: Any, groups: Any) -> None:
    n_layers, n_caches = caches.units.shape[0], caches.budget.shape[0]
    n_entries = ranks.before.shape[0]
    n_expert = n_entries // n_layers
    for entry in range(n_entries):
        if caches.resident[entry, lane]:
            cache = entry // n_expert if n_caches > 1 else 0
            _set(words, groups, ranks.words[cache], ranks.groups[cache], ranks.before[entry])
    on = not caches.off[lane]
    for batch in range(batches.layer.shape[0]):
        start, stop = batches.begins[batch], batches.begins[batch + 1]
        layer, cache = batches.layer[batch], batches.cache[batch]
        first_word, first_group = ranks.words[cache], ranks.groups[cache]
        counts = caches.counts[batches.phase[batch]]
        hits = 0
        if on:
            for use in range(start, stop):
                place = ranks.old[use]
                if place < 0:
                    continue
                at, bit = place >> 6, np.uint64(1) << np.uint64(place & 63)
                if words[at] & bit:
                    hits += 1
                    words[at] ^= bit
                    if not words[at]:
                        of_cache = at - first_word
                        groups[first_group + (of_cache >> 6)] ^= np.uint64(1) << np.uint64(of_cache & 63)
        counts[HITS, lane] += hits
        counts[READ_BYTES, lane] += (stop - start - hits) * caches.entry_bytes[layer]
        if not on:
            continue
        if caches.bypass:
            for use in range(start, stop):
                _set(words, groups, first_word, first_group, ranks.new[use])
        held = np.int64(caches.used[cache, lane]) + (stop - start - hits) * caches.units[layer]
        budget, group = caches.budget[cache, lane], first_group
        while held > budget:
            while group < ranks.groups[cache + 1] and not groups[group]:
                group += 1
            if group == ranks.groups[cache + 1]:
                break
            at = first_word + ((group - first_group) << 6) + np.int64(lowest(groups[group]))
            held -= ranks.units[(at << 6) + np.int64(lowest(words[at]))]
            counts[EVICTIONS, lane] += 1
            words[at] &= words[at] - np.uint64(1)
            if not words[at]:
                groups[group] &= groups[group] - np.uint64(1)
        caches.used[cache, lane] = held
        if not caches.bypass:
            for use in range(start, stop):
                _set(words, groups, first_word, first_group, ranks.new[use])
    for entry in range(n_entries):
        place = ranks.after[entry]
        there = place >= 0 and (words[place >> 6] >> np.uint64(place & 63)) & np.uint64(1)
        caches.resident[entry, lane] = bool(there)
