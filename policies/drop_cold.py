"""Cache-aware dropping: skip a missing expert whose weight is light.

Where substitution decides whether to need an expert, dropping decides whether to pay for one that is
missing: a slot is dropped when its expert is not resident and its weight is below `F / k`. The top-weight
slot always runs. Survivors are scaled back to the full weight unless `renorm` is 0.
"""

from simlab.policy import routing
from simlab.types import Knob
from simlab.xp import quotient


@routing(
    "drop",
    knobs={
        "F": Knob(0.75, 0.0, 1.0, help="threshold, as a share of the mean weight 1/k"),
        "renorm": Knob(1, 0, 1, integer=True, help="1 scales the surviving weights back to their old total"),
        "prefill": Knob(0, 0, 1, integer=True, help="1 drops in prefill graphs too"),
    },
    needs={"weights"},
    source="engine-semantics, section 2",
)
def drop_cold(candidate, row, state, knobs):
    """Drop missing slots with weight < float32(F) / float32(k), strictly."""
    return ~candidate.resident & (candidate.weight < quotient(knobs.F, row.k))
