"""Least frequently used, and its kin: evict the entry with the lowest count of past uses.

Counts rise once per entry and batch, are kept when an entry is evicted, and equal ones go by recency
(policies.md). `lfu_decay` halves what a use is worth every `half_life` batches (a decoded token is as many
batches as the model has MoE layers); `weighted_lfu` adds up the weights the router applied, over all rows of
a batch, instead of counting; `lfru` divides the count by the age in batches plus one. What practice calls
LFRU is not one rule; this is the one of policies.md.
"""

from simlab.policy import eviction
from simlab.types import Knob
from simlab.xp import f8, floor, helper, i8, ldexp, maximum, rounded, where

_TERMS = 20
"""Of the exponential series below 2: the next is under 2^-70."""


def count(state, access, knobs):
    """One more use per batch."""
    (uses,) = state
    return (uses + access.first,)


@eviction("static", touch=count, state={"uses": 0}, source="policies.md")
def lfu(entry, state, knobs):
    """Least frequently used. Key: batches that used the entry."""
    (uses,) = state
    return uses


@eviction("static", touch=count, state={"uses": 0}, scope="per_layer", source="policies.md")
def layer_lfu(entry, state, knobs):
    """Least frequently used, each layer a cache of its own: `lfu` with scope per_layer, whatever --scope says."""
    (uses,) = state
    return uses


@helper
def halved(value, age, half_life):
    """`value` after `age` batches, float64: value * 2^(-age / half_life), alike in NumPy, XLA and numba.

    Powers differ in their last bit, so this one is made of products and sums that all round alike: a whole power of
    two, which is exact, and a series for what is left, in [0, 1).
    """
    # A division by a broadcast number is another product in XLA: all multiply by the reciprocal.
    x = -(age * (1.0 / f8(half_life)))
    whole = floor(x)
    y = rounded((x - whole) * 0.6931471805599453)
    series = 1.0 + rounded(y * (1.0 / _TERMS))
    for n in range(_TERMS - 1, 0, -1):
        # The factor 1/n is a constant to all, so that the division cannot become two different products.
        series = 1.0 + rounded(rounded(series * y) * (1.0 / n))
    return where(whole < -1022, 0.0, ldexp(value * series, i8(maximum(whole, -1022.0))))


def add_decayed(state, access, knobs):
    """Decay to this batch, then add one."""
    worth, batch = state
    decayed = rounded(halved(worth, access.batch - batch, knobs.half_life))
    return where(access.first, decayed + 1.0, worth), where(access.first, access.batch, batch)


@eviction(
    "dynamic",
    touch=add_decayed,
    state={"worth": 0.0, "batch": 0},
    knobs={"half_life": Knob(512, 1e-3, 1e9, help="batches after which a use counts half")},
    source="policies.md",
)
def lfu_decay(entry, state, knobs):
    """Least frequently used, old uses fading. Key: uses, each halved per `half_life` batches since."""
    worth, batch = state
    return halved(worth, entry.batch - batch, knobs.half_life)


def count_and_date(state, access, knobs):
    """One more use, and when."""
    uses, batch = state
    return uses + access.first, where(access.first, access.batch, batch)


@eviction("dynamic", touch=count_and_date, state={"uses": 0, "batch": 0}, source="policies.md")
def lfru(entry, state, knobs):
    """Least frequently and recently used. Key: uses / (age + 1), the age in batches since the last use."""
    uses, batch = state
    return uses / (entry.batch - batch + 1)


def add_weight(state, access, knobs):
    """Add the weight this row applies."""
    (weight,) = state
    return (weight + access.weight,)


@eviction("static", touch=add_weight, state={"weight": 0.0}, source="policies.md")
def weighted_lfu(entry, state, knobs):
    """Least weight so far. Key: the applied weights of all past uses, dropped slots at zero."""
    (weight,) = state
    return weight
