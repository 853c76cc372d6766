"""The router's own top k, untouched: the baseline every other policy is measured against."""

from simlab.policy import routing
from simlab.types import Choice


@routing(
    "rerank", source="engine-semantics, section 1: with the original routing the recorded router ids stand"
)
def original(xp, candidates, row, state, knobs):
    """Leave every row to the router; nothing is reranked or counted."""
    return Choice(value=candidates.value, active=row.k < 0), state
