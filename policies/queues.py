"""Two queues and a memory of what left the first: 2Q and S3-FIFO.

New entries wait in a small queue. Those that prove themselves get into the main queue; those that leave the
small queue unproven are remembered for a while (a ghost: the entry's id, no data), and one that is asked for
while it is remembered goes straight to the main queue.

What this project decided, since the papers handle one access at a time in a cache of equal pages: sizes are
bytes; a batch is looked up first, then its misses join the end of their queue in the order of their last
occurrence, then entries leave until the budget holds. A queue's size does not count the batch's misses, since
the papers make room before they insert. The batch's own entries are passed over; a queue in which nothing else
is left yields to the other.
"""

from simlab.policy import queue
from simlab.queues import (
    NONE,
    append,
    evict,
    held,
    line_of,
    oldest,
    oldest_other,
    over,
    remove,
    share,
    size,
)  # fmt: skip
from simlab.types import Knob

_FIRST, _MAIN, _GHOST = 0, 1, 2
_MOST_USES = 3


@queue(
    knobs={
        "first": Knob(0.25, 0, 1, help="share of the budget that the first queue may keep (Kin)"),
        "ghosts": Knob(0.5, 0, 100, help="bytes of entries remembered, in budgets (Kout)"),
    },
    source="Johnson and Shasha, VLDB 1994, 2Q, the full version",
)
def two_q(cache, knobs):
    """2Q: a first-in first-out queue for new entries, LRU for those asked for again after they left it.

    A use in the first queue changes nothing. While that queue holds more than its share its oldest entry
    leaves and is remembered; else the least recent of the main queue leaves, and is not.
    """
    new = 0
    for entry in cache.batch:
        line = line_of(cache, entry)
        if line == NONE:
            new += size(cache, entry)
            append(cache, _FIRST, entry)
        elif line != _FIRST:
            append(cache, _MAIN, entry)
    limit = share(cache, knobs.first)
    while over(cache) > 0:
        first, main = oldest_other(cache, _FIRST), oldest_other(cache, _MAIN)
        if first != NONE and (held(cache, _FIRST) - new > limit or main == NONE):
            append(cache, _GHOST, first)
            evict(cache, first)
        elif main != NONE:
            remove(cache, main)
            evict(cache, main)
        else:
            break
    remembered = share(cache, knobs.ghosts)
    while held(cache, _GHOST) > remembered:
        remove(cache, oldest(cache, _GHOST))


@queue(
    state={"uses": 0},
    knobs={
        "first": Knob(0.1, 0, 1, help="share of the budget that the small queue keeps"),
        "ghosts": Knob(0.9, 0, 100, help="bytes of entries remembered, in budgets"),
    },
    source="Yang and others, SOSP 2023, FIFO queues are all you need for cache eviction, algorithm 1",
)
def s3fifo(cache, knobs):
    """S3-FIFO: a small queue sorts out what is used once; the main queue gives used entries another round.

    A use is counted, up to 3, and moves nothing. While the small queue holds its share or more its oldest
    entry moves to the main queue if it was used twice since it came, its count taken off, and else leaves and
    is remembered. Below that the main queue's oldest entry loses one use and goes to its end, or leaves if it
    has none. Which queue's turn it is is asked anew for each entry looked at; the paper stays with the small
    one until something left it, and may then free more than it has to.
    """
    new = 0
    for entry in cache.batch:
        line = line_of(cache, entry)
        if line in (_FIRST, _MAIN):
            cache.state[entry, 0] = min(cache.state[entry, 0] + 1, _MOST_USES)
            continue
        cache.state[entry, 0] = 0
        if line == NONE:
            new += size(cache, entry)
        append(cache, _FIRST if line == NONE else _MAIN, entry)
    limit = share(cache, knobs.first)
    while over(cache) > 0:
        first, main = oldest_other(cache, _FIRST), oldest_other(cache, _MAIN)
        if first != NONE and (held(cache, _FIRST) - new >= limit or main == NONE):
            if cache.state[first, 0] > 1:
                append(cache, _MAIN, first)
            else:
                append(cache, _GHOST, first)
                evict(cache, first)
            cache.state[first, 0] = 0
        elif main != NONE:
            if cache.state[main, 0] > 0:
                cache.state[main, 0] -= 1
                append(cache, _MAIN, main)
            else:
                remove(cache, main)
                evict(cache, main)
        else:
            break
    remembered = share(cache, knobs.ghosts)
    while held(cache, _GHOST) > remembered:
        remove(cache, oldest(cache, _GHOST))
