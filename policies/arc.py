"""Adaptive replacement: recency against frequency, the balance set by what is missed.

Two LRU lists in RAM, T1 of entries used in one batch since they came and T2 of those used again, and for each
a list of ghosts, B1 and B2, of what left it (ids, no data). A miss that B1 remembers says that T1 was too
small, one that B2 remembers that it was too large: the target `p` of T1's size moves that way, by the sizes of
the entries missed times the other ghost list's size over its own, at least 1. T1 and B1 together are bounded by
the budget, all four by twice the budget.

What this project decided, since the paper handles one access at a time in a cache of equal pages: sizes and `p`
are bytes; a batch's hits and remembered misses all become most recent in T2 and move `p` once, by the ghost
lists' sizes at its start; then entries leave by the paper's REPLACE, then its other misses count as in T1, then
the oldest ghosts are dropped until the bounds hold, which for single accesses is what the paper's case IV comes
to. The batch's own entries are passed over, and a list without others yields to the other one.
"""

from simlab.policy import queue
from simlab.queues import (
    NONE,
    append,
    capacity,
    evict,
    held,
    line_of,
    oldest,
    oldest_other,
    over,
    remove,
    scalar,
    set_scalar,
    size,
)  # fmt: skip

_T1, _T2, _B1, _B2 = 0, 1, 2, 3


@queue(scalars={"p": 0.0}, source="Megiddo and Modha, FAST 2003, figure 4")
def arc(cache, knobs):
    """ARC: evict the least recent of the entries used once, or of the others, as misses of the evicted teach."""
    b1, b2 = held(cache, _B1), held(cache, _B2)
    missed_1, missed_2, new = 0, 0, 0
    for entry in cache.batch:
        line = line_of(cache, entry)
        if line == _B1:
            missed_1 += size(cache, entry)
        elif line == _B2:
            missed_2 += size(cache, entry)
        elif line == NONE:
            new += size(cache, entry)
        append(cache, _T1 if line == NONE else _T2, entry)
    up = missed_1 * max(b2 / max(b1, 1), 1.0)
    down = missed_2 * max(b1 / max(b2, 1), 1.0)
    p = min(max(scalar(cache, 0) + up - down, 0.0), 1.0 * capacity(cache))
    set_scalar(cache, 0, p)
    while over(cache) > 0:
        first, second = oldest_other(cache, _T1), oldest_other(cache, _T2)
        # All of T1 but the batch's own misses, which the paper inserts after this.
        t1 = held(cache, _T1) - new
        if first != NONE and (t1 > p or (t1 == p and missed_2 > 0) or second == NONE):
            append(cache, _B1, first)
            evict(cache, first)
        elif second != NONE:
            append(cache, _B2, second)
            evict(cache, second)
        else:
            break
    while held(cache, _B1) > 0 and held(cache, _T1) + held(cache, _B1) > capacity(cache):
        remove(cache, oldest(cache, _B1))
    recent = held(cache, _T1) + held(cache, _B1)
    while held(cache, _B2) > 0 and recent + held(cache, _T2) + held(cache, _B2) > 2 * capacity(cache):
        remove(cache, oldest(cache, _B2))
