"""Dynamic skipping: leave out experts that weigh little beside the token's heaviest.

A slot is dropped when its weight is below `beta` times the largest weight of the token. Residency plays no
part, so it also runs without a cache. Survivors are scaled back to the full weight unless `renorm` is 0.

Inputs: weights. Source: dynamic skipping, arXiv:2402.14800, there for top-2 routing, where the second expert
is skipped, and with one `beta` per layer, the median of the ratio on calibration text; here `beta` is a knob.
"""

from simlab.policy import routing
from simlab.types import Knob


@routing(
    "drop",
    knobs={
        "beta": Knob(0.3, 0.0, 1.0, help="threshold, as a share of the token's largest weight"),
        "renorm": Knob(1, 0, 1, integer=True, help="1 scales the surviving weights back to their old total"),
    },
    needs={"weights"},
    uses_cache=False,
    source="arXiv:2402.14800; policies.md: skip_ratio",
)
def skip_ratio(candidate, row, state, knobs):
    """Drop slots of weight < beta * largest weight, strictly."""
    return candidate.weight < knobs.beta * row.heaviest
