"""Queues with a second chance, and two segments: CLOCK, SIEVE, segmented LRU.

All keep a place in a line per entry. A batch's misses join its end in the order of their last occurrence; its
hits set a mark. The batch's own entries are passed over, mark and all. Sources below each; the rules for
batches are this project's, since the originals handle one access at a time.
"""

from simlab.policy import whole_cache
from simlab.whole_cache import evict_in_order, lowest, of, repeat

_LAST = 2**62


def join(xp, cache, place, end):
    """Places in line after a batch's misses joined at its end, and the new end."""
    missed = cache.touched & ~cache.hit
    start = xp.where(missed, cache.position, _LAST).min(axis=0)
    newest = xp.where(missed, cache.position, -1).max(axis=0)
    n = xp.where(missed.any(axis=0), newest - start + 1, 0)
    return xp.where(missed, end + cache.position - start, place), end + n


@whole_cache(
    state={"place": 0, "used": 0},
    scalars={"end": 1},
    source="Corbato 1968, as the second-chance FIFO it equals; policies.md",
)
def clock(xp, cache, state, knobs):
    """CLOCK: first in first out, but an entry used since it was last looked at goes once more around."""
    place, end = join(xp, cache, state["place"], state["end"])
    used = xp.where(cache.touched, 1 * cache.hit, state["used"])

    def going(c):
        others = cache.resident & ~cache.touched & ~c["leaving"]
        return (c["over"] > 0) & others.any(axis=0)

    def step(c):
        hand = lowest(xp, cache.resident & ~c["leaving"], c["place"])
        own = (hand & cache.touched).any(axis=0)
        spared = own | (of(xp, hand, c["used"]) > 0)
        return {
            "leaving": c["leaving"] | (hand & ~spared),
            "over": c["over"] - xp.where(spared, 0, of(xp, hand, cache.bytes)),
            "place": xp.where(hand & spared, c["end"], c["place"]),
            "used": xp.where(hand & ~own, 0, c["used"]),
            "end": c["end"] + 1,
        }

    start = {"leaving": cache.resident & False, "over": cache.over, "place": place, "used": used, "end": end}
    c = repeat(xp, going, step, start)
    return c["leaving"], {"place": c["place"], "used": c["used"], "end": c["end"]}


@whole_cache(
    state={"place": 0, "used": 0},
    scalars={"end": 1, "hand": 0},
    source="Zhang and others, NSDI 2024, SIEVE is simpler than LRU",
)
def sieve(xp, cache, state, knobs):
    """SIEVE: a hand goes from old to new, takes marks off and evicts the first entry without one; nothing moves."""
    place, end = join(xp, cache, state["place"], state["end"])
    used = xp.where(cache.touched, 1 * cache.hit, state["used"])

    def going(c):
        others = cache.resident & ~cache.touched & ~c["leaving"]
        return (c["over"] > 0) & others.any(axis=0)

    def step(c):
        left = cache.resident & ~c["leaving"]
        ahead = left & (place >= c["hand"])
        # At the newest entry the hand starts over from the oldest.
        at = lowest(xp, xp.where(ahead.any(axis=0), ahead, left), place)
        own = (at & cache.touched).any(axis=0)
        spared = own | (of(xp, at, c["used"]) > 0)
        return {
            "leaving": c["leaving"] | (at & ~spared),
            "over": c["over"] - xp.where(spared, 0, of(xp, at, cache.bytes)),
            "used": xp.where(at & ~own, 0, c["used"]),
            "hand": of(xp, at, place) + 1,
        }

    start = {"leaving": cache.resident & False, "over": cache.over, "used": used, "hand": state["hand"]}
    c = repeat(xp, going, step, start)
    return c["leaving"], {"place": place, "used": c["used"], "end": end, "hand": c["hand"]}


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
    start = xp.where(cache.touched, cache.position, _LAST).min(axis=0)
    newest = xp.where(cache.touched, cache.position, -1).max(axis=0)
    place = xp.where(cache.touched, state["end"] + cache.position - start, state["place"])
    end = state["end"] + xp.where(cache.touched.any(axis=0), newest - start + 1, 0)
    protected = xp.where(cache.touched, 1 * cache.hit, state["protected"] * cache.resident)

    def going(c):
        held = xp.where(c["protected"] > 0, cache.bytes, 0).sum(axis=0)
        return 10 * held > _PROTECTED_TENTHS * cache.capacity

    def step(c):
        oldest = lowest(xp, c["protected"] > 0, c["place"])
        return {
            "protected": xp.where(oldest, 0, c["protected"]),
            "place": xp.where(oldest, c["end"], c["place"]),
            "end": c["end"] + 1,
        }

    c = repeat(xp, going, step, {"protected": protected, "place": place, "end": end})
    key = c["protected"] * _LAST + c["place"]
    leaving = evict_in_order(xp, cache.resident & ~cache.touched, key, cache.bytes, cache.over)
    protected = xp.where(leaving, 0, c["protected"])
    return leaving, {"protected": protected, "place": c["place"], "end": c["end"]}
