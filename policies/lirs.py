"""Low inter-reference recency: what came back soon is kept, however long ago that was.

An entry's inter-reference recency (IRR) is how many others were used between its last two uses. Entries of low
IRR (LIR) have nearly all of the budget; the rest (HIR) pass through a small queue Q, whose oldest leaves. The
stack S orders by recency all LIR entries and whatever else, in RAM or not, was used since the least recent LIR
entry: a HIR entry used again while it is in S has a lower IRR than that one, and they change places.

What this project decided, since the paper handles one access at a time in a cache of equal pages: sizes are
bytes; Q has the share `hir` of the budget, at least room for the largest entry; a batch's entries go to the top
of S in the order of their last occurrence, and those that S held become LIR together; the least recent LIR
entries beyond the LIR share go to the end of Q, behind the batch's own HIR entries, and out of S; as long as the
LIR share is not full, new entries that fit it become LIR. The batch's own entries are passed over, and when Q
has no others the least recent LIR entry leaves. What look-ahead read and nobody asked for yet is at the front
of Q. The paper does not bound S; here what it remembers of entries that left is bounded by `ghosts`, the least
recent forgotten first.
"""

from simlab.policy import whole_cache
from simlab.types import Knob
from simlab.whole_cache import evict_in_order, held, join, move_in_order, share

_FAR = 2**62


@whole_cache(
    state={"lir": 0, "stack": 0, "queue": 0},
    scalars={"end": 1},
    knobs={
        "hir": Knob(0.01, 0, 1, help="share of the budget for entries of high inter-reference recency"),
        "ghosts": Knob(2, 0, 100, help="bytes of entries remembered, in budgets"),
    },
    source="Jiang and Zhang, SIGMETRICS 2002, LIRS",
)
def lirs(xp, cache, state, knobs):
    """LIRS: evict from a short queue of what was not used twice within the reach of the entries worth keeping.

    State: `stack` is the place in S and `queue` that in Q, 0 outside.
    """
    touched, sizes = cache.touched, cache.bytes
    room_for_hir = xp.maximum(share(xp, knobs.hir, cache.capacity), sizes.max(axis=0))
    limit = cache.capacity - room_for_hir
    lir = cache.resident & ((state["lir"] > 0) | (touched & (state["stack"] > 0)))
    stack, end = join(xp, cache, touched, state["stack"], state["end"])
    # Entries of a batch are of one layer and so of one size: the first ones fit for which there is room.
    size = xp.where(touched, sizes, 0).max(axis=0)
    room = limit - held(xp, lir, sizes)
    lir |= evict_in_order(xp, touched & ~lir, cache.position, sizes, room - size + 1)
    queue, end = join(xp, cache, touched & ~lir, state["queue"], end)

    over = held(xp, lir, sizes) - limit
    demoted, queue, end = move_in_order(xp, lir, stack, sizes, over, queue, end)
    lir &= ~demoted
    stack = xp.where(demoted, 0, stack)

    key = xp.where(lir, _FAR + stack, queue)
    leaving = evict_in_order(xp, cache.resident & ~touched, key, sizes, cache.over)
    lir &= ~leaving
    stack = xp.where(stack < xp.where(lir, stack, _FAR).min(axis=0), 0, stack)
    ghost = (sizes > 0) & ~(cache.resident & ~leaving) & (stack > 0)
    over = held(xp, ghost, sizes) - share(xp, knobs.ghosts, cache.capacity)
    forgotten = evict_in_order(xp, ghost, stack, sizes, over)
    return leaving, {
        "lir": 1 * lir,
        "stack": xp.where(forgotten, 0, stack),
        "queue": xp.where(lir | leaving, 0, queue),
        "end": end,
    }
