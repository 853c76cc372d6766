"""Least frequently used, and its kin: evict the entry with the lowest count of past uses.

Counts rise once per entry and batch, are kept when an entry is evicted, and equal ones go by recency
(policies.md). `lfu_decay` halves what a use is worth every `half_life` batches (a decoded token is as many
batches as the model has MoE layers); `weighted_lfu` adds up the weights the router applied, over all rows of
a batch, instead of counting; `lfru` divides the count by the age in batches plus one. What practice calls
LFRU is not one rule; this is the one of policies.md.
"""

from simlab.policy import eviction, rounded
from simlab.types import Knob

_TERMS = 20
"""Of the exponential series below 2: the next is under 2^-70."""


def count(xp, state, access, knobs):
    """One more use per batch."""
    return {"uses": state["uses"] + access.first}


@eviction(touch=count, state={"uses": 0}, source="policies.md")
def lfu(xp, state, last_position, batch, knobs):
    """Least frequently used. Key: batches that used the entry."""
    return state["uses"]


@eviction(touch=count, state={"uses": 0}, scope="per_layer", source="policies.md")
def layer_lfu(xp, state, last_position, batch, knobs):
    """Least frequently used, each layer a cache of its own: `lfu` with scope per_layer, whatever --scope says."""
    return state["uses"]


def halved(xp, value, age, half_life):
    """`value` after `age` batches, float64: value * 2^(-age / half_life), alike in NumPy and XLA.

    Powers differ between the two in their last bit, so this one is made of products and sums that both round
    alike: a whole power of two, which is exact, and a series for what is left, in [0, 1).
    """
    # A division by a broadcast number is another product in XLA: both multiply by the reciprocal.
    x = -(age * (1.0 / xp.asarray(half_life).astype(xp.float64)))
    whole = xp.floor(x)
    y = rounded(xp, (x - whole) * 0.6931471805599453)
    series = xp.ones_like(y)
    for n in range(_TERMS, 0, -1):
        # The factor 1/n is a constant to both, so that the division cannot become two different products.
        series = 1.0 + rounded(xp, rounded(xp, series * y) * (1.0 / n))
    scale = (xp.clip(whole, -1022, 0).astype(xp.int64) + 1023 << 52).view(xp.float64)
    return xp.where(whole < -1022, 0.0, value * series * scale)


def add_decayed(xp, state, access, knobs):
    """Decay to this batch, then add one."""
    decayed = rounded(xp, halved(xp, state["worth"], access.batch - state["batch"], knobs.half_life))
    return {
        "worth": xp.where(access.first, decayed + 1.0, state["worth"]),
        "batch": xp.where(access.first, access.batch, state["batch"]),
    }


@eviction(
    touch=add_decayed,
    state={"worth": 0.0, "batch": 0},
    knobs={"half_life": Knob(512, 1e-3, 1e9, help="batches after which a use counts half")},
    source="policies.md",
)
def lfu_decay(xp, state, last_position, batch, knobs):
    """Least frequently used, old uses fading. Key: uses, each halved per `half_life` batches since."""
    return halved(xp, state["worth"], batch - state["batch"], knobs.half_life)


def count_and_date(xp, state, access, knobs):
    """One more use, and when."""
    return {
        "uses": state["uses"] + access.first,
        "batch": xp.where(access.first, access.batch, state["batch"]),
    }


@eviction(touch=count_and_date, state={"uses": 0, "batch": 0}, source="policies.md")
def lfru(xp, state, last_position, batch, knobs):
    """Least frequently and recently used. Key: uses / (age + 1), the age in batches since the last use."""
    return state["uses"] / (batch - state["batch"] + 1)


def add_weight(xp, state, access, knobs):
    """Add the weight this row applies."""
    return {"weight": state["weight"] + access.weight}


@eviction(touch=add_weight, state={"weight": 0.0}, source="policies.md")
def weighted_lfu(xp, state, last_position, batch, knobs):
    """Least weight so far. Key: the applied weights of all past uses, dropped slots at zero."""
    return state["weight"]
