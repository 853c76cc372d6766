"""Greedy dual size frequency: what was used often for its size stays, and age lowers what was used long ago.

An entry's worth is L + uses / size, set at each use with the L of that moment; the entry of least worth leaves,
and L rises to it. So an entry not used again falls behind those that are, whatever its count.

What this project decided: uses are counted from when the entry came into RAM, as in the paper, and so unlike
those of `lfu` do not survive eviction; every read costs the same, the paper's GDSF(1); with entries of one size
it is LFU with dynamic ageing. A batch's hits get their worth before its evictions, its misses after them, with
the L they left, since the paper makes room before it inserts. Worths are whole numbers, so that NumPy and XLA
agree: one use of the largest entry counts 2^20. Equal worths go by recency.
"""

from simlab.policy import whole_cache
from simlab.whole_cache import evict_in_order

_UNIT_BITS = 20


@whole_cache(
    state={"worth": 0, "uses": 0},
    scalars={"inflation": 0},
    source="Cherkasova, HP Labs 1998, HPL-98-69",
)
def gdsf(xp, cache, state, knobs):
    """GDSF: evict the least uses per byte, plus the worth of what had left when the entry was used last."""
    sizes = cache.bytes
    per_use = (sizes.max(axis=0) << _UNIT_BITS) // xp.maximum(sizes, 1)
    uses = state["uses"] + cache.touched
    worth = xp.where(cache.hit, state["inflation"] + uses * per_use, state["worth"])
    others = cache.resident & ~cache.touched
    leaving = evict_in_order(xp, others, worth, sizes, cache.over, then=cache.position)
    inflation = xp.maximum(state["inflation"], xp.where(leaving, worth, 0).max(axis=0))
    worth = xp.where(cache.touched & ~cache.hit, inflation + uses * per_use, worth)
    return leaving, {
        "worth": xp.where(leaving, 0, worth),
        "uses": xp.where(leaving, 0, uses),
        "inflation": inflation,
    }
