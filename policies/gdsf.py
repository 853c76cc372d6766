"""Greedy dual size frequency: what was used often for its size stays, and age lowers what was used long ago.

An entry's worth is L + uses / size, set at each use with the L of that moment; the entry of least worth leaves,
and L rises to it. So an entry not used again falls behind those that are, whatever its count.

What this project decided: uses are counted from when the entry came into RAM, as in the paper, and so unlike
those of `lfu` do not survive eviction; every read costs the same, the paper's GDSF(1); with entries of one size
it is LFU with dynamic ageing. A batch's hits get their worth before its evictions, its misses after them, with
the L they left, since the paper makes room before it inserts. Worths are whole numbers, so that NumPy and XLA
agree: one use of the largest entry counts 2^20. Equal worths go by recency.
"""

from simlab.policy import queue
from simlab.queues import (
    NONE,
    after,
    append,
    evict,
    is_own,
    largest,
    oldest,
    over,
    remove,
    scalar,
    set_scalar,
    size,
)
from simlab.xp import helper

_LINE = 0
_UNIT_BITS = 20


@helper
def _per_use(cache, entry):
    """The worth of one use, in units of which the largest entry's is 2^20."""
    return (largest(cache) << _UNIT_BITS) // size(cache, entry)


@queue(state={"worth": 0, "uses": 0}, scalars={"inflation": 0}, source="Cherkasova, HP Labs 1998, HPL-98-69")
def gdsf(cache, knobs):
    """GDSF: evict the least uses per byte, plus the worth of what had left when the entry was used last."""
    for i in range(len(cache.batch)):
        entry = cache.batch[i]
        cache.state[entry, 1] += 1
        if cache.hits[i]:
            cache.state[entry, 0] = scalar(cache, 0) + cache.state[entry, 1] * _per_use(cache, entry)
        append(cache, _LINE, entry)
    while over(cache) > 0:
        # The line is in the order of use, so that of equal worths the first is the least recent.
        victim, least = NONE, 0.0
        at = oldest(cache, _LINE)
        while at != NONE:
            if (victim == NONE or cache.state[at, 0] < least) and not is_own(cache, at):
                victim, least = at, cache.state[at, 0]
            at = after(cache, at)
        if victim == NONE:
            break
        set_scalar(cache, 0, max(scalar(cache, 0), least))
        cache.state[victim, 0], cache.state[victim, 1] = 0, 0
        remove(cache, victim)
        evict(cache, victim)
    for i in range(len(cache.batch)):
        if not cache.hits[i]:
            entry = cache.batch[i]
            cache.state[entry, 0] = scalar(cache, 0) + cache.state[entry, 1] * _per_use(cache, entry)
