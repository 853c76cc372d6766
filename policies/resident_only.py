"""Only what is in RAM: the hard limit of substitution.

Scores of experts that are not resident are masked out, so that the top k is taken among the resident ones. A
layer with fewer than k resident experts of finite score leaves the row to the router, which reads what is
missing and so fills the cache. Once a layer holds k experts it never reads again.

Inputs: scores. Source: SwapMoE, arXiv:2308.15030, whose "virtual experts" change more slowly than here, where
the cache's own residency is the mask.
"""

from simlab.policy import routing
from simlab.types import Rerank
from simlab.xp import MINUS_INFINITY, where


@routing(
    "rerank", needs={"scores"}, ordered=True, source="SwapMoE, arXiv:2308.15030; policies.md: resident_only"
)
def resident_only(candidate, row, state, knobs):
    """Top k of the resident experts' values, if there are k of them."""
    value = where(candidate.resident, candidate.value, MINUS_INFINITY)
    return Rerank(value, 0, row.n_resident >= row.k)
