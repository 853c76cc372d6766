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
to. The batch's own entries are passed over, a list without others yields to the other one, and what look-ahead
read and nobody asked for yet leaves T1 first.
"""

from simlab.policy import rounded, whole_cache
from simlab.whole_cache import evict_in_order, evict_one_by_one, held, join, lowest

_NOWHERE, _B1, _B2, _T1, _T2 = 0, 1, 2, 3, 4


@whole_cache(
    state={"list": 0, "place": 0},
    scalars={"end": 1, "p": 0.0},
    source="Megiddo and Modha, FAST 2003, figure 4",
)
def arc(xp, cache, state, knobs):
    """ARC: evict the least recent of the entries used once, or of the others, as misses of the evicted teach."""
    before, touched, mine = state["list"], cache.touched, cache.bytes > 0
    place, end = join(xp, cache, touched, state["place"], state["end"])

    def bytes_in(among):
        return held(xp, among & mine, cache.bytes)

    b1, b2 = bytes_in(before == _B1), bytes_in(before == _B2)
    missed_1, missed_2 = bytes_in(touched & (before == _B1)), bytes_in(touched & (before == _B2))
    up = rounded(xp, missed_1 * xp.maximum(b2 / xp.maximum(b1, 1), 1.0))
    down = rounded(xp, missed_2 * xp.maximum(b1 / xp.maximum(b2, 1), 1.0))
    p = xp.clip(state["p"] + up - down, 0.0, 1.0 * cache.capacity)
    listed = xp.where(touched, xp.where(before == _NOWHERE, _T1, _T2), before)

    def step(others, c):
        in_1, in_2 = others & (c["list"] != _T2), others & (c["list"] == _T2)
        # All of T1 but the batch's own misses, which the paper inserts after this.
        t1 = held(xp, in_1, cache.bytes)
        too_many = (t1 > p) | ((t1 == p) & (missed_2 > 0))
        from_1 = in_1.any(axis=0) & (too_many | ~in_2.any(axis=0))
        # An entry in RAM that is in neither list was read ahead.
        line = xp.where(c["list"] < _T1, 0, c["place"])
        victim = lowest(xp, xp.where(from_1, in_1, in_2), line)
        return victim, {
            "list": xp.where(victim, xp.where(from_1, _B1, _B2), c["list"]),
            "place": xp.where(victim, c["end"], c["place"]),
            "end": c["end"] + 1,
        }

    leaving, c = evict_one_by_one(xp, cache, step, list=listed, place=place, end=end)
    listed, place, stay = c["list"], c["place"], cache.resident & ~leaving

    def forget(listed, which, over):
        ghost = mine & ~stay & (listed == which)
        return xp.where(evict_in_order(xp, ghost, place, cache.bytes, over), _NOWHERE, listed)

    in_2 = stay & (listed == _T2)
    recent = bytes_in(stay & ~in_2) + bytes_in(~stay & (listed == _B1))
    listed = forget(listed, _B1, recent - cache.capacity)
    recent = bytes_in(stay & ~in_2) + bytes_in(~stay & (listed == _B1))
    frequent = bytes_in(in_2) + bytes_in(~stay & (listed == _B2))
    listed = forget(listed, _B2, recent + frequent - 2 * cache.capacity)
    return leaving, {"list": listed, "place": place, "end": c["end"], "p": p}
