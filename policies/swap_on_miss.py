"""Swap on a miss: a missing expert of little weight gives its slot to the best resident one not yet used.

Slot by slot, in the router's order: where the expert is not resident and its weight is below `tau`, the slot
goes to the best-scored resident expert outside the router's picks that no earlier slot has taken; if there is
none it stays. Slots that hit, and heavy ones, are never touched, and unlike a margin it does not ask how far
below the replacement scores. `tau` is compared with the weight the expert matmul would apply under the
router's own routing; the replacement then runs with the weight of its own score.

Inputs: scores, weights. Source: asked for by practitioners; there is no paper.
"""

from simlab.policy import routing
from simlab.types import Knob, Swap


@routing(
    "swap",
    knobs={"tau": Knob(0.1, 0.0, 10.0, help="weight below which a missing expert is replaced")},
    needs={"scores", "weights"},
    ordered=True,
    source="policies.md: swap_on_miss",
)
def swap_on_miss(candidate, row, state, knobs):
    """Replace missing experts of weight < tau, strictly, best score first."""
    light = ~candidate.resident & (candidate.weight < knobs.tau)
    return Swap(light, candidate.value, knobs.tau > 0)
