"""Two queues and a memory of what left the first: 2Q and S3-FIFO.

New entries wait in a small queue. Those that prove themselves get into the main queue; those that leave the
small queue unproven are remembered for a while (a ghost: the entry's id, no data), and one that is asked for
while it is remembered goes straight to the main queue.

What this project decided, since the papers handle one access at a time in a cache of equal pages: sizes are
bytes; a batch is looked up first, then its misses join the end of their queue in the order of their last
occurrence, then entries leave until the budget holds. A queue's size does not count the batch's misses, since
the papers make room before they insert. The batch's own entries are passed over; a queue in which nothing else
is left yields to the other. What look-ahead read and nobody asked for yet leaves first.
"""

from simlab.policy import whole_cache
from simlab.types import Knob
from simlab.whole_cache import evict_in_order, evict_one_by_one, held, join, lowest, of, share

_NOWHERE, _GHOST, _FIRST, _MAIN = 0, 1, 2, 3


def enter(xp, cache, queue):
    """Which entries are new to the queues, and the queues with them in: remembered ones in the main queue."""
    new = cache.touched & (queue < _FIRST)
    return new, xp.where(new, xp.where(queue == _GHOST, _MAIN, _FIRST), queue)


def tail(xp, others, queue, place, wants_first):
    """The oldest entry of the first queue in lanes that want it and have one, else of the main queue."""
    first, main = others & (queue != _MAIN), others & (queue == _MAIN)
    from_first = first.any(axis=0) & (wants_first | ~main.any(axis=0))
    # An entry in RAM that is in no queue was read ahead.
    line = xp.where(queue < _FIRST, 0, place)
    return lowest(xp, xp.where(from_first, first, main), line), from_first


def forget(xp, cache, leaving, queue, place, limit):
    """The queues after the oldest ghosts beyond `limit` bytes were forgotten."""
    ghost = (cache.bytes > 0) & ~(cache.resident & ~leaving) & (queue == _GHOST)
    over = held(xp, ghost, cache.bytes) - limit
    return xp.where(evict_in_order(xp, ghost, place, cache.bytes, over), _NOWHERE, queue)


@whole_cache(
    state={"queue": 0, "place": 0},
    scalars={"end": 1},
    knobs={
        "first": Knob(0.25, 0, 1, help="share of the budget that the first queue may keep (Kin)"),
        "ghosts": Knob(0.5, 0, 100, help="bytes of entries remembered, in budgets (Kout)"),
    },
    source="Johnson and Shasha, VLDB 1994, 2Q, the full version",
)
def two_q(xp, cache, state, knobs):
    """2Q: a first-in first-out queue for new entries, LRU for those asked for again after they left it.

    A use in the first queue changes nothing. While that queue holds more than its share its oldest entry
    leaves and is remembered; else the least recent of the main queue leaves, and is not.
    """
    new, queue = enter(xp, cache, state["queue"])
    moved = new | (cache.touched & (queue == _MAIN))
    place, end = join(xp, cache, moved, state["place"], state["end"])
    limit = share(xp, knobs.first, cache.capacity)

    def step(others, c):
        waiting = cache.resident & ~new & ~c["leaving"] & (c["queue"] != _MAIN)
        victim, from_first = tail(xp, others, c["queue"], c["place"], held(xp, waiting, cache.bytes) > limit)
        return victim, {
            "queue": xp.where(victim, xp.where(from_first, _GHOST, _NOWHERE), c["queue"]),
            "place": xp.where(victim, c["end"], c["place"]),
            "end": c["end"] + 1,
        }

    leaving, c = evict_one_by_one(xp, cache, step, queue=queue, place=place, end=end)
    remembered = share(xp, knobs.ghosts, cache.capacity)
    queue = forget(xp, cache, leaving, c["queue"], c["place"], remembered)
    return leaving, {"queue": queue, "place": c["place"], "end": c["end"]}


_MOST_USES = 3


@whole_cache(
    state={"queue": 0, "place": 0, "uses": 0},
    scalars={"end": 1},
    knobs={
        "first": Knob(0.1, 0, 1, help="share of the budget that the small queue keeps"),
        "ghosts": Knob(0.9, 0, 100, help="bytes of entries remembered, in budgets"),
    },
    source="Yang and others, SOSP 2023, FIFO queues are all you need for cache eviction, algorithm 1",
)
def s3fifo(xp, cache, state, knobs):
    """S3-FIFO: a small queue sorts out what is used once; the main queue gives used entries another round.

    A use is counted, up to 3, and moves nothing. While the small queue holds its share or more its oldest
    entry moves to the main queue if it was used twice since it came, its count taken off, and else leaves and
    is remembered. Below that the main queue's oldest entry loses one use and goes to its end, or leaves if it
    has none. Which queue's turn it is is asked anew for each entry looked at; the paper stays with the small
    one until something left it, and may then free more than it has to.
    """
    new, queue = enter(xp, cache, state["queue"])
    uses = xp.where(new, 0, xp.minimum(state["uses"] + cache.touched, _MOST_USES))
    place, end = join(xp, cache, new, state["place"], state["end"])
    limit = share(xp, knobs.first, cache.capacity)

    def step(others, c):
        small = cache.resident & ~new & ~c["leaving"] & (c["queue"] != _MAIN)
        at, from_small = tail(xp, others, c["queue"], c["place"], held(xp, small, cache.bytes) >= limit)
        stays = of(xp, at, c["uses"]) > xp.where(from_small, 1, 0)
        new_queue = xp.where(stays, _MAIN, xp.where(from_small, _GHOST, _NOWHERE))
        left = xp.where(from_small, 0, xp.maximum(c["uses"] - 1, 0))
        return at & ~stays, {
            "queue": xp.where(at, new_queue, c["queue"]),
            "place": xp.where(at, c["end"], c["place"]),
            "uses": xp.where(at, left, c["uses"]),
            "end": c["end"] + 1,
        }

    leaving, c = evict_one_by_one(xp, cache, step, queue=queue, place=place, uses=uses, end=end)
    remembered = share(xp, knobs.ghosts, cache.capacity)
    queue = forget(xp, cache, leaving, c["queue"], c["place"], remembered)
    return leaving, {"queue": queue, "place": c["place"], "uses": c["uses"], "end": c["end"]}
