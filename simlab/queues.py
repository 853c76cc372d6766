"""Tools for eviction policies that keep entries in queues, compiled by numba (`simlab.policy.queue`).

A policy's function runs at every batch's end, when the batch's misses are in RAM, and says with `evict` who leaves
until nothing is `over`. Entries stand in *lines*, from the oldest to the newest; an entry can be in one line of each
chain, of which there are two. Lines are numbered 0 to 7 in the first chain and 8 to 15 in the second. An entry that is
not in RAM can be in a line too, as a ghost.

What look-ahead read and no batch has used yet is in no line; it leaves before a policy is asked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit as _njit

_HOW: Any = {"error_model": "numpy", "_nrt": False}
_tool = _njit(**_HOW)

CHAINS, LINES = 2, 16
_LINES_OF_CHAIN = LINES // CHAINS
NONE = -1
"""No entry; no line."""
OVER, CAPACITY, LARGEST, CACHE, N_VICTIMS, BATCH_POSITION, N_EXPERT, FIRST, END = range(9)


class Cache(NamedTuple):
    """One cache at the end of a batch, as a queue policy sees it. `N` entries in all, of every layer."""

    batch: Any
    """int64 `[n]`: the batch's entries, in the order of their last occurrence."""
    hits: Any
    """bool `[n]`: which of them were in RAM before it."""
    state: Any
    """float64 `[N, s]`: the policy's state per entry, in the order it declared."""
    scalars: Any
    """float64 `[caches, t]`: its state per cache."""
    resident: Any
    """bool `[N]`: in RAM."""
    numbers: Any
    """int64: what `over`, `capacity` and the others below read."""
    stamp: Any
    """int64 `[N]`: place of an entry's last occurrence in the walk."""
    layer_bytes: Any
    """int64 `[B]`: bytes of an entry of each layer."""
    older: Any
    newer: Any
    line: Any
    held: Any
    count: Any
    victims: Any


@_tool
def over(cache):
    """Bytes held above the budget; zero or less: nothing has to leave."""
    return cache.numbers[OVER]


@_tool
def capacity(cache):
    """The cache's budget in bytes."""
    return cache.numbers[CAPACITY]


@_tool
def largest(cache):
    """Bytes of the cache's largest entry."""
    return cache.numbers[LARGEST]


@_tool
def entries(cache):
    """First entry of the cache, and the one after its last."""
    return cache.numbers[FIRST], cache.numbers[END]


@_tool
def scalar(cache, i):
    """One number of the policy's state of this cache, float64, in the order it declared."""
    return cache.scalars[cache.numbers[CACHE], i]


@_tool
def set_scalar(cache, i, value):
    """Change one."""
    cache.scalars[cache.numbers[CACHE], i] = value


@_tool
def size(cache, entry):
    """Bytes of an entry."""
    return cache.layer_bytes[entry // cache.numbers[N_EXPERT]]


@_tool
def share(cache, fraction):
    """That part of the cache's budget in bytes, rounded down; a fraction counts to the millionth.

    Knobs are float32, whose 0.9 is a little less than nine tenths.
    """
    return cache.numbers[CAPACITY] * round(fraction * 1_000_000.0) // 1_000_000


@_tool
def is_own(cache, entry):
    """Whether the batch used the entry."""
    return cache.stamp[entry] >= cache.numbers[BATCH_POSITION]


@_tool
def line_of(cache, entry, chain=0):
    """The line of a chain an entry is in, or NONE."""
    return cache.line[chain, entry]


@_tool
def held(cache, line):
    """Bytes of the entries in a line."""
    return cache.held[cache.numbers[CACHE], line]


@_tool
def count(cache, line):
    """Entries in a line."""
    return cache.count[cache.numbers[CACHE], line]


@_tool
def _end(cache, line):
    """Place of a line's two ends among the links, those of its oldest and newest entry."""
    return cache.line.shape[1] + cache.numbers[CACHE] * LINES + line


@_tool
def remove(cache, entry, chain=0):
    """Take an entry out of its line of a chain, if it is in one."""
    line = cache.line[chain, entry]
    if line == NONE:
        return
    older, newer = cache.older[chain, entry], cache.newer[chain, entry]
    cache.newer[chain, older] = newer
    cache.older[chain, newer] = older
    cache.line[chain, entry] = NONE
    cache.held[cache.numbers[CACHE], line] -= size(cache, entry)
    cache.count[cache.numbers[CACHE], line] -= 1


@_tool
def append(cache, line, entry):
    """Make an entry the newest of a line, out of whatever line of that chain it was in."""
    chain = line // _LINES_OF_CHAIN
    remove(cache, entry, chain)
    end = _end(cache, line)
    newest = cache.older[chain, end]
    cache.older[chain, entry], cache.newer[chain, entry] = newest, end
    cache.newer[chain, newest] = entry
    cache.older[chain, end] = entry
    cache.line[chain, entry] = line
    cache.held[cache.numbers[CACHE], line] += size(cache, entry)
    cache.count[cache.numbers[CACHE], line] += 1


@_tool
def _entry_at(cache, place):
    return place if place < cache.line.shape[1] else NONE


@_tool
def oldest(cache, line):
    """The oldest entry of a line, or NONE."""
    return _entry_at(cache, cache.newer[line // _LINES_OF_CHAIN, _end(cache, line)])


@_tool
def after(cache, entry, chain=0):
    """The next newer entry in the same line, or NONE."""
    return _entry_at(cache, cache.newer[chain, entry])


@_tool
def oldest_other(cache, line):
    """The oldest entry of a line that the batch did not use, or NONE."""
    entry = oldest(cache, line)
    while entry != NONE and is_own(cache, entry):
        entry = after(cache, entry, line // _LINES_OF_CHAIN)
    return entry


@_tool
def evict(cache, entry):
    """Let an entry leave RAM; lines are the policy's own business."""
    cache.resident[entry] = False
    cache.numbers[OVER] -= size(cache, entry)
    cache.victims[cache.numbers[N_VICTIMS]] = entry
    cache.numbers[N_VICTIMS] += 1
