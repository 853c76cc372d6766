"""The router's own top k, untouched: the baseline every other policy is measured against."""

from simlab.policy import routing
from simlab.types import Rerank


@routing(
    "rerank", source="engine-semantics, section 1: with the original routing the recorded router ids stand"
)
def original(candidate, row, state, knobs):
    """Leave every row to the router; nothing is reranked or counted."""
    return Rerank(candidate.value, 0, row.k < 0)
