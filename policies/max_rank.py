"""Resident experts of a fixed window: the router's first `J` stay, the rest comes from its first `M`.

The remaining k - J slots go to resident experts that the router ranks inside its top `M`, best first. Where
the window does not hold enough of them, the router's own ranking fills up in order. `M` bounds how far from
its choice the router can be led, whatever the scores.

Inputs: scores (only to leave out experts of score -inf), ranks. Source: arXiv:2412.00099.

Uncertain: rebuilt from the first author's published code and independent re-implementations, because the
paper's own algorithm text could not be read; in particular that `M` counts from the first pick on, so that
`M <= J` changes nothing.
"""

from simlab.policy import routing
from simlab.types import Knob, Rerank
from simlab.xp import MINUS_INFINITY, where


@routing(
    "rerank",
    knobs={
        "M": Knob(16, 0, 512, integer=True, help="window: the router's first M experts"),
        "J": Knob(1, 0, 512, integer=True, help="the router's first J picks always stay"),
    },
    needs={"scores", "rank"},
    ordered=True,
    source="arXiv:2412.00099, rebuilt from code; policies.md: max_rank",
)
def max_rank(candidate, row, state, knobs):
    """First the top J, then the window's resident experts, then all others, each in the router's order."""
    first = candidate.rank < knobs.J
    window = candidate.resident & (candidate.rank < knobs.M) & (candidate.value > MINUS_INFINITY)
    tier = where(first, 2, where(window, 1, 0))
    active = (knobs.M > knobs.J) & (row.k > knobs.J)
    return Rerank(-candidate.rank, tier, active)
