"""Resident experts of a window of probability: the router's first `J` stay, the rest comes from its top `p`.

As `max_rank`, but the window is the smallest set of the router's best experts whose probability reaches `p`:
wide where the router is undecided, narrow where it knows what it wants. The probability is the softmax over
all experts; for a sigmoid router each score's share of their sum.

Inputs: scores (only to leave out experts of score -inf), ranks, mass. Source: arXiv:2412.00099.

Uncertain: rebuilt from the first author's published code and independent re-implementations, because the
paper's own algorithm text could not be read; in particular that the expert with which `p` is reached is
inside the window.
"""

from simlab.policy import routing
from simlab.types import Knob, Rerank
from simlab.xp import MINUS_INFINITY, where


@routing(
    "rerank",
    knobs={
        "p": Knob(0.7, 0.0, 1.0, help="probability that the window must reach"),
        "J": Knob(1, 0, 512, integer=True, help="the router's first J picks always stay"),
    },
    needs={"scores", "rank", "mass"},
    ordered=True,
    source="arXiv:2412.00099, rebuilt from code; policies.md: cum_prob",
)
def cum_prob(candidate, row, state, knobs):
    """First the top J, then the window's resident experts, then all others, each in the router's order."""
    first = candidate.rank < knobs.J
    window = candidate.resident & (candidate.mass < knobs.p) & (candidate.value > MINUS_INFINITY)
    tier = where(first, 2, where(window, 1, 0))
    active = (knobs.p > 0) & (row.k > knobs.J)
    return Rerank(-candidate.rank, tier, active)
