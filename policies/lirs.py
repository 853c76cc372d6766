"""Low inter-reference recency: what came back soon is kept, however long ago that was.

An entry's inter-reference recency (IRR) is how many others were used between its last two uses. Entries of low
IRR (LIR) have nearly all of the budget; the rest (HIR) pass through a small queue Q, whose oldest leaves. The
stack S orders by recency all LIR entries and whatever else, in RAM or not, was used since the least recent LIR
entry: a HIR entry used again while it is in S has a lower IRR than that one, and they change places.

What this project decided, since the paper handles one access at a time in a cache of equal pages: sizes are
bytes; Q has the share `hir` of the budget, at least room for the largest entry; a batch's entries go to the top
of S in the order of their last occurrence, and those that S held become LIR together; the least recent LIR
entries beyond the LIR share go to the end of Q, behind the batch's own HIR entries, and out of S; as long as the
LIR share is not full, new entries that fit it become LIR. The batch's own entries are passed over, and when Q has
no others the least recent LIR entry leaves. The paper does not bound S; here what it remembers of entries that left
is bounded by `ghosts`, the least recent forgotten first.
"""

from simlab.policy import queue
from simlab.queues import (
    NONE,
    after,
    append,
    capacity,
    evict,
    is_own,
    largest,
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

_STACK, _QUEUE = 0, 8
_IN_QUEUE = 1
"""The chain of Q."""


@queue(
    state={"lir": 0},
    scalars={"lir_bytes": 0, "ghost_bytes": 0},
    knobs={
        "hir": Knob(0.01, 0, 1, help="share of the budget for entries of high inter-reference recency"),
        "ghosts": Knob(2, 0, 100, help="bytes of entries remembered, in budgets"),
    },
    source="Jiang and Zhang, SIGMETRICS 2002, LIRS",
)
def lirs(cache, knobs):
    """LIRS: evict from a short queue of what was not used twice within the reach of the entries worth keeping."""
    limit = capacity(cache) - max(share(cache, knobs.hir), largest(cache))
    lir, ghosts = scalar(cache, 0), scalar(cache, 1)
    for i in range(len(cache.batch)):
        entry = cache.batch[i]
        known = line_of(cache, entry) == _STACK
        if known and not cache.hits[i]:
            ghosts -= size(cache, entry)
        if known and cache.state[entry, 0] == 0:
            cache.state[entry, 0] = 1
            lir += size(cache, entry)
            remove(cache, entry, _IN_QUEUE)
        append(cache, _STACK, entry)
    for entry in cache.batch:
        if cache.state[entry, 0] == 0:
            if lir + size(cache, entry) <= limit:
                cache.state[entry, 0] = 1
                lir += size(cache, entry)
                remove(cache, entry, _IN_QUEUE)
            else:
                append(cache, _QUEUE, entry)
    at = oldest(cache, _STACK)
    while lir > limit and at != NONE:
        following = after(cache, at)
        if cache.state[at, 0] > 0:
            cache.state[at, 0] = 0
            lir -= size(cache, at)
            remove(cache, at)
            append(cache, _QUEUE, at)
        at = following

    while over(cache) > 0:
        victim = oldest_other(cache, _QUEUE)
        if victim != NONE:
            remove(cache, victim, _IN_QUEUE)
        else:
            victim = oldest(cache, _STACK)
            while victim != NONE and (cache.state[victim, 0] == 0 or is_own(cache, victim)):
                victim = after(cache, victim)
            if victim == NONE:
                break
            cache.state[victim, 0] = 0
            lir -= size(cache, victim)
        if line_of(cache, victim) == _STACK:
            ghosts += size(cache, victim)
        evict(cache, victim)

    bottom = oldest(cache, _STACK)
    while bottom != NONE and cache.state[bottom, 0] == 0:
        if not cache.resident[bottom]:
            ghosts -= size(cache, bottom)
        remove(cache, bottom)
        bottom = oldest(cache, _STACK)
    remembered = share(cache, knobs.ghosts)
    at = bottom
    while ghosts > remembered and at != NONE:
        following = after(cache, at)
        if not cache.resident[at]:
            ghosts -= size(cache, at)
            remove(cache, at)
        at = following
    set_scalar(cache, 0, lir)
    set_scalar(cache, 1, ghosts)
