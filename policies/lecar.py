"""Learning from regret whether to evict by recency or by frequency.

Each eviction draws whether LRU or LFU chooses the victim, with weights that add up to 1, and remembers which of
them did. A miss that LRU's history remembers lowers LRU's weight, one of LFU's history LFU's: times
e^(-rate r), r = 0.005^(t / N) for a miss t accesses after the eviction in a cache of N pages.

What this project decided, since the paper handles one access at a time in a cache of equal pages: t is the
bytes looked up since the eviction and N the budget; a batch's regrets add up and change the weights once,
before its evictions; each history is bounded in bytes (`ghosts` budgets), the oldest forgotten first, of one
batch the lower (layer, expert). Weights are kept between 0.01 and 0.99, so that neither is ruled out for good.
LFU is this project's, with counts that survive eviction (policies.md) and ties by recency. Draws are hashes of
(seed, batch, number of the eviction in its cache), as in `random`; powers are products and series that NumPy and
XLA round alike, and regrets are added up in units of 2^-40.
"""

from simlab.policy import rounded, whole_cache
from simlab.types import Knob
from simlab.whole_cache import evict_in_order, evict_one_by_one, held, lowest, share

from .lfu import halved
from .random import mixed

_LRU, _LFU = 1, 2
_HALVINGS = 7.643856189774724
"""log2(1 / 0.005): how often a regret halves while one budget is looked up."""
_LN_2 = 0.6931471805599453
_UNIT = 2.0**-40


def drawn(xp, seed, batch, number):
    """int64 `[...]`, 0 to 2^32 - 1."""
    # Arrays throughout: NumPy warns of scalars that wrap.
    h = mixed(xp, xp.asarray(number)[None].astype(xp.uint32) * 0 + xp.asarray(seed).astype(xp.uint32))
    h = mixed(xp, h ^ xp.asarray(batch).astype(xp.uint32))
    return mixed(xp, h ^ xp.asarray(number)[None].astype(xp.uint32))[0].astype(xp.int64)


@whole_cache(
    state={"uses": 0, "evicted_by": 0, "date": 0},
    scalars={"weight": 0.5, "clock": 0, "number": 0},
    knobs={
        "rate": Knob(0.45, 0, 10, help="learning rate"),
        "ghosts": Knob(1, 0, 100, help="bytes of entries each history remembers, in budgets"),
        "seed": Knob(0, 0, 2**31 - 1, integer=True, help="another seed, other draws"),
    },
    source="Vietri and others, HotStorage 2018, Driving cache replacement with ML-based LeCaR",
)
def lecar(xp, cache, state, knobs):
    """LeCaR: LRU or LFU by a weighted draw, the weights learned from misses of what either evicted.

    State: `weight` is LRU's, `date` the clock of bytes looked up at the entry's last eviction.
    """
    touched, sizes = cache.touched, cache.bytes
    by = state["evicted_by"]
    half_life = xp.maximum(cache.capacity, 1) * (1 / _HALVINGS)
    regret = halved(xp, 1.0, state["clock"] - state["date"], half_life)
    regret = xp.floor(regret * (1 / _UNIT)).astype(xp.int64)
    rate = xp.asarray(knobs.rate).astype(xp.float64) * _UNIT

    def punished(weight, which):
        total = held(xp, touched & (by == which), regret)
        return rounded(xp, weight * halved(xp, 1.0, total * rate, _LN_2))

    lru, lfu = punished(state["weight"], _LRU), punished(1.0 - state["weight"], _LFU)
    weight = xp.clip(lru / (lru + lfu), 0.01, 0.99)
    clock = state["clock"] + held(xp, touched, sizes)
    uses = state["uses"] + touched

    def step(others, c):
        by_lru = drawn(xp, knobs.seed, cache.batch, c["number"]) < weight * 2.0**32
        oldest = lowest(xp, others, cache.position)
        rarest = lowest(xp, others, uses, then=cache.position)
        victim = xp.where(by_lru, oldest, rarest)
        return victim, {
            "by": xp.where(victim, xp.where(by_lru, _LRU, _LFU), c["by"]),
            "number": c["number"] + 1,
        }

    by = xp.where(touched, 0, by)
    leaving, c = evict_one_by_one(xp, cache, step, by=by, number=state["number"])
    by, date = c["by"], xp.where(leaving, clock, state["date"])
    for which in (_LRU, _LFU):
        ghost = (sizes > 0) & ~(cache.resident & ~leaving) & (by == which)
        over = held(xp, ghost, sizes) - share(xp, knobs.ghosts, cache.capacity)
        by = xp.where(evict_in_order(xp, ghost, date, sizes, over), 0, by)
    return leaving, {
        "uses": uses, "evicted_by": by, "date": date, "weight": weight, "clock": clock, "number": c["number"],
    }  # fmt: skip
