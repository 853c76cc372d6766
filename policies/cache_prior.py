"""The cache prior: resident experts get a bonus in units of the layer's usual score range.

As `substitute`, but the bonus is `lambda` times a running mean of the range instead of the token's own: a
token whose scores lie unusually close together is steered harder, one with a clear favourite less. The mean
is per layer, takes in the current token before it is routed, and knows nothing of the cache, so that a cache
reset does not touch it. The router's first `J` picks get the same bonus whether they are resident or not, so
they always stay.

Inputs: scores, ranks. Source: arXiv:2412.00099 (the published policy `substitute` is a variant of).

Uncertain: rebuilt from the first author's published code and independent re-implementations, because the
paper's own algorithm text could not be read. Not certain are the kind of running mean (here the plain mean
over all decode rows of the layer so far, in float32 steps) and that no weight is recomputed. Where equal
scores meet at the edge of the top `J`, the router's own pick stays, whichever id is lower.
"""

from simlab.policy import routing
from simlab.types import Knob, Rerank
from simlab.xp import isfinite, quotient, rounded, where


def take_in(row, state, knobs):
    """The mean range of the layer and its rows, this one included."""
    mean, rows = state
    rows = rows + 1
    return mean + quotient(row.range - mean, rows), rows


@routing(
    "rerank",
    knobs={
        "lambda": Knob(0.2, 0.0, 2.0, help="bonus of resident experts, as a share of the mean score range"),
        "J": Knob(1, 0, 512, integer=True, help="the router's first J picks always stay"),
    },
    needs={"scores", "rank"},
    state={"mean": 0.0, "rows": 0.0},
    update=take_in,
    ordered=True,
    source="arXiv:2412.00099, rebuilt from code; policies.md: cache_prior",
)
def cache_prior(candidate, row, state, knobs):
    """Top k of `value + lambda * mean range` for resident experts and the router's top J."""
    mean, _ = state
    boost = rounded(knobs.lambda_ * mean)
    first = candidate.rank < knobs.J
    raised = (candidate.resident | first) & isfinite(candidate.value)
    value = where(raised, candidate.value + boost, candidate.value)
    return Rerank(value, first * 1, (boost > 0) & (row.k > knobs.J))
