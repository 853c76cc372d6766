"""Cache-aware substitution: a near-tie goes to the expert already in RAM.

Every resident expert's ranking value is raised by `L` times this token's score range and the top k is taken
again, so a resident expert wins a slot only when it was within that margin of the one it displaces. The
range is the token's own, not a running average: one `L` means the same on a router whose logits span 2 and
on one whose logits span 20.
"""

from simlab.policy import routing
from simlab.types import Knob, Rerank
from simlab.xp import isfinite, rounded, where


@routing(
    "rerank",
    knobs={"L": Knob(0.15, 0.0, 1.0, help="margin, as a share of the token's score range")},
    needs={"scores"},
    ordered=True,
    source="cache-aware-substitution; engine-semantics, section 1; after arXiv:2412.00099",
)
def substitute(candidate, row, state, knobs):
    """Top k of `value + L * range` for resident experts; infinite values are never boosted."""
    boost = rounded(knobs.L * row.range)
    raised = candidate.resident & isfinite(candidate.value)
    value = where(raised, candidate.value + boost, candidate.value)
    return Rerank(value, 0, boost > 0)
