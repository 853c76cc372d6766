"""Queues with a second chance, and two segments: CLOCK, SIEVE, segmented LRU.

All keep a place in a line per entry. A batch's hits set a mark; then entries leave until the budget holds; then
its misses join the line's end in the order of their last occurrence, as the originals make room before they
insert. The batch's hits are passed over, mark and all. Sources below each; the rules for batches are this
project's, since the originals handle one access at a time.
"""

from simlab.policy import whole_cache
from simlab.whole_cache import evict_in_order, evict_one_by_one, held, join, lowest, move_in_order, of

_LAST = 2**62


def marked(xp, cache, state):
    """1 for entries used since they came or were last looked at, else 0."""
    return xp.where(cache.touched, 1 * cache.hit, state["used"])


def in_line(cache, c):
    """bool `[N, ...]`: entries that are in line: those in RAM but the batch's misses."""
    return cache.resident & ~c["leaving"] & ~(cache.touched & ~cache.hit)


@whole_cache(
    state={"place": 0, "used": 0},
    scalars={"end": 1},
    source="Corbato 1968, as the second-chance FIFO it equals; policies.md",
)
def clock(xp, cache, state, knobs):
    """CLOCK: first in first out, but an entry used since it was last looked at goes once more around."""

    def step(others, c):
        hand = lowest(xp, in_line(cache, c), c["place"])
        own = (hand & cache.touched).any(axis=0)
        spared = own | (of(xp, hand, c["used"]) > 0)
        return hand & ~spared, {
            "place": xp.where(hand & spared, c["end"], c["place"]),
            "used": xp.where(hand & ~own, 0, c["used"]),
            "end": c["end"] + 1,
        }

    carry = {"place": state["place"], "used": marked(xp, cache, state), "end": state["end"]}
    leaving, c = evict_one_by_one(xp, cache, step, **carry)
    place, end = join(xp, cache, cache.touched & ~cache.hit, c["place"], c["end"])
    return leaving, {"place": place, "used": c["used"], "end": end}


@whole_cache(
    state={"place": 0, "used": 0},
    scalars={"end": 1, "hand": 0},
    source="Zhang and others, NSDI 2024, SIEVE is simpler than LRU",
)
def sieve(xp, cache, state, knobs):
    """SIEVE: a hand goes from old to new, takes marks off and evicts the first entry without one; nothing moves."""
    place = state["place"]

    def step(others, c):
        line = in_line(cache, c)
        ahead = line & (place >= c["hand"])
        # From the newest entry the hand goes on to the oldest.
        at = lowest(xp, xp.where(ahead.any(axis=0), ahead, line), place)
        own = (at & cache.touched).any(axis=0)
        spared = own | (of(xp, at, c["used"]) > 0)
        return at & ~spared, {
            "used": xp.where(at & ~own, 0, c["used"]),
            "hand": of(xp, at, place) + 1,
        }

    leaving, c = evict_one_by_one(xp, cache, step, used=marked(xp, cache, state), hand=state["hand"])
    # It goes on from there before this batch's misses join, which it would take for the next.
    ahead = in_line(cache, c) & (place >= c["hand"])
    hand = xp.where(ahead.any(axis=0), c["hand"], 0)
    place, end = join(xp, cache, cache.touched & ~cache.hit, place, state["end"])
    return leaving, {"place": place, "used": c["used"], "end": end, "hand": hand}


_PROTECTED_TENTHS = 8


@whole_cache(
    state={"protected": 0, "place": 0},
    scalars={"end": 1},
    source="Karedla, Love and Wherry 1994; policies.md",
)
def slru(xp, cache, state, knobs):
    """Segmented LRU: a second use protects, up to 80 % of the bytes; the least recent unprotected entry goes first.

    At a batch's end its entries become the most recent of their segments, its hits protected. What is then
    protected beyond 80 % of the budget loses that, least recent first, and becomes the most recent of the
    unprotected. Once nothing unprotected is left to evict, the least recent protected entry goes.
    """
    place, end = join(xp, cache, cache.touched, state["place"], state["end"])
    protected = xp.where(cache.touched, cache.hit, cache.resident & (state["protected"] > 0))
    over = held(xp, protected, cache.bytes) - cache.capacity * _PROTECTED_TENTHS // 10
    demoted, place, end = move_in_order(xp, protected, place, cache.bytes, over, place, end)
    protected &= ~demoted
    key = protected * _LAST + place
    leaving = evict_in_order(xp, cache.resident & ~cache.touched, key, cache.bytes, cache.over)
    return leaving, {"protected": 1 * (protected & ~leaving), "place": place, "end": end}
