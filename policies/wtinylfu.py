"""Window TinyLFU: who leaves is settled between the newest and the oldest, by how often each was used.

New entries wait in a small LRU window. What the window no longer holds is a candidate for the main cache, a
segmented LRU: while the budget is kept it gets in; else it stands against the entry the main cache would evict,
and the one used less often leaves, on a tie the candidate. Uses are counted, up to 15, whether an entry is in
RAM or not, and all counts are halved each time `sample` budgets' worth of bytes has been looked up.

What this project decided: the paper counts in a sketch, approximately; here every entry is known and has a
counter of its own, so there is no sketch and no doorkeeper. Sizes are bytes. A batch's uses are counted first;
its misses become the most recent of the window, its hits those of their segment, protected where they were in
the main cache; protected entries beyond 80 % of the main cache lose that, least recent first. The batch's own
entries are no candidates and no victims.
"""

from simlab.policy import queue
from simlab.queues import (
    NONE,
    append,
    capacity,
    entries,
    evict,
    held,
    line_of,
    oldest,
    oldest_other,
    over,
    remove,
    scalar,
    set_scalar,
    share,
    size,
)  # fmt: skip
from simlab.types import Knob

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_MOST_USES = 15


@queue(
    state={"uses": 0},
    scalars={"seen": 0},
    knobs={
        "window": Knob(0.01, 0, 1, help="share of the budget that the window keeps"),
        "sample": Knob(10, 0.1, 1000, help="budgets' worth of lookups after which counts are halved"),
    },
    source="Einziger, Friedman and Manes, ACM TOS 2017, TinyLFU",
)
def wtinylfu(cache, knobs):
    """W-TinyLFU: a new entry displaces an old one only if it was used more often of late."""
    seen = scalar(cache, 0)
    for entry in cache.batch:
        cache.state[entry, 0] = min(cache.state[entry, 0] + 1, _MOST_USES)
        seen += size(cache, entry)
    if seen >= share(cache, knobs.sample):
        seen = 0.0
        begin, end = entries(cache)
        for entry in range(begin, end):
            cache.state[entry, 0] = cache.state[entry, 0] // 2
    set_scalar(cache, 0, seen)
    for entry in cache.batch:
        append(cache, _PROTECTED if line_of(cache, entry) > _WINDOW else _WINDOW, entry)
    window = share(cache, knobs.window)
    while held(cache, _PROTECTED) > (capacity(cache) - window) * 8 // 10:
        append(cache, _PROBATION, oldest(cache, _PROTECTED))

    while True:
        new, main = oldest_other(cache, _WINDOW), oldest_other(cache, _PROBATION)
        if main == NONE:
            main = oldest_other(cache, _PROTECTED)
        too_many = new != NONE and held(cache, _WINDOW) > window
        if over(cache) <= 0:
            if not too_many:
                break
            append(cache, _PROBATION, new)
            continue
        if new == NONE and main == NONE:
            break
        if too_many and main != NONE and cache.state[new, 0] > cache.state[main, 0]:
            append(cache, _PROBATION, new)
            loser = main
        elif too_many or main == NONE:
            loser = new
        else:
            loser = main
        remove(cache, loser)
        evict(cache, loser)
