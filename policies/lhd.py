"""Least hit density, simplified: hits to be expected per byte and time the entry will take up.

An entry's age is what was looked up since its last use. Of each class of ages it is counted how many entries
were hit and how many evicted at it. The hit density of an age is the hits counted at that age or later, over
the time that all entries which got that old went on to stay; divided by the size it ranks the entries, and the
least leaves.

What this project decided, beside batches and bytes. Ages are bytes looked up, in 12 classes that double: the
first up to a sixteenth of the budget, the last from 64 budgets on. Counts lose a tenth each time a budget's
worth of bytes was looked up, and densities follow at once (the paper: every 2^20 accesses). All entries are
ranked, where the paper ranks a random sample, so that nothing is drawn; equal densities, such as before the
first hit, go by recency. Left out are the paper's classes by application and by the age at the last hit, and
the few entries it keeps to explore. All is whole numbers, so that NumPy and XLA agree: an event counts 2^10, a
density of one hit per sixteenth of the budget and largest entry 2^30.
"""

from simlab.policy import whole_cache
from simlab.whole_cache import evict_in_order, held

_CLASSES = 12
_PER_BUDGET = 16
_WIDTHS = [1, *(2**a for a in range(_CLASSES - 1))]
_EVENT = 1 << 10
_DENSITY_BITS = 20
_SIZE_BITS = 10


def age_class(xp, age, capacity):
    """int64 `[N, ...]`: 0 below a sixteenth of the budget, then one more whenever the age doubles."""
    units = age * _PER_BUDGET // xp.maximum(capacity, 1)
    exponent = (units.astype(xp.float64).view(xp.int64) >> 52) - 1023
    return xp.clip(xp.where(units > 0, exponent + 1, 0), 0, _CLASSES - 1)


def counted(xp, classes, among):
    """A list of int64 `[...]`: the entries of `among` in each class."""
    return [(among & (classes == a)).sum(axis=0) for a in range(_CLASSES)]


@whole_cache(
    state={"date": 0},
    scalars={
        "clock": 0, "since": 0,
        **{f"{kind}_{a}": 0 for kind in ("hit", "evicted") for a in range(_CLASSES)},
    },
    source="Beckmann, Chen and Cidon, NSDI 2018, LHD: improving cache hit rate by maximizing hit density",
)  # fmt: skip
def lhd(xp, cache, state, knobs):
    """LHD: evict what earns the fewest hits for the room it takes up, by its age and size.

    State: `date` is the clock of bytes looked up at the entry's last use, `since` the clock since counts aged.
    """
    touched, sizes, capacity = cache.touched, cache.bytes, cache.capacity
    looked_up = held(xp, touched, sizes)
    clock, since = state["clock"] + looked_up, state["since"] + looked_up
    aged = since >= capacity

    def faded(count):
        return xp.where(aged, count * 9 // 10, count)

    new_hits = counted(xp, age_class(xp, state["clock"] - state["date"], capacity), cache.hit)
    hit = [faded(state[f"hit_{a}"] + n * _EVENT) for a, n in enumerate(new_hits)]
    evicted = [faded(state[f"evicted_{a}"]) for a in range(_CLASSES)]
    density = []
    hits = events = stays = xp.zeros_like(capacity)
    for a in reversed(range(_CLASSES)):
        hits, events = hits + hit[a], events + hit[a] + evicted[a]
        stays = stays + events * _WIDTHS[a]
        density.insert(0, (hits << _DENSITY_BITS) // xp.maximum(stays, 1))

    date = xp.where(touched, clock, state["date"])
    classes = age_class(xp, clock - date, capacity)
    per_byte = (sizes.max(axis=0) << _SIZE_BITS) // xp.maximum(sizes, 1)
    key = xp.take_along_axis(xp.stack(density), classes, axis=0) * per_byte
    others = cache.resident & ~touched
    leaving = evict_in_order(xp, others, key, sizes, cache.over, then=cache.position)
    new_evicted = counted(xp, classes, leaving)
    return leaving, {
        "date": date,
        "clock": clock,
        "since": xp.where(aged, 0, since),
        **{f"hit_{a}": n for a, n in enumerate(hit)},
        **{f"evicted_{a}": n + new_evicted[a] * _EVENT for a, n in enumerate(evicted)},
    }
