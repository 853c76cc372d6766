"""Least stale: evict first what the current pass over the layers has not touched.

A decode goes through the layers again and again; an entry that this pass has used, or that look-ahead has read
for it, is needed later than one that has been lying since the pass before. Victims are entries neither looked
up in this pass nor read ahead and still unused, by recency; then the others, by recency. Without look-ahead
that is LRU's own order, since whatever this pass touched is more recent than the rest (a test). A pass begins
with a batch whose layer is no later than that of the batch before.

Source: SpecMD, arXiv:2602.03921, as policies.md states it. Uncertain: whether what is read ahead counts as
touched by the pass; here it does, or the policy could not differ from LRU.
"""

from simlab.policy import eviction
from simlab.xp import where

_LATER = 2**51
"""Beyond every place in the walk, and exact with one added in float64."""


@eviction("dynamic", needs={"pass"}, source="SpecMD, arXiv:2602.03921; policies.md")
def least_stale(entry, state, knobs):
    """What this pass over the layers has not touched, by recency; then the rest."""
    return where(entry.in_pass | entry.speculative, entry.position + _LATER, entry.position)
