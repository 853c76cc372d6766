"""Policies that know the future: what could be reached at best. Replay only.

The future is that of the routing the cell executes (`simlab.replay.future`). Ties are rare, since next uses
are places in the walk; entries never used again go first, the least recent of them foremost.

`belady` admits whatever a batch reads, as every causal policy here does; with entries of one size it then has
the fewest misses. `belady_bypass` may let go of what the batch has just run, even if it was read for it.
`lookahead` sees the next `m` batches only (a decoded token is as many batches as the model has MoE layers):
what is used within them stays longest in order of that use, the rest goes by recency; m = 0 is LRU.

Source: Belady 1966; policies.md. With entries of several sizes none of them is the optimum, which is
NP-hard; they then order by next use all the same.
"""

from simlab.policy import eviction
from simlab.types import NEVER, Knob
from simlab.xp import where

_FAR = 2**51
"""Beyond every place in the walk, and exact with one added in float64."""


def foresee(state, access, knobs):
    """Remember the entry's next use."""
    return (access.next_position,)


@eviction("static", touch=foresee, state={"next": NEVER}, needs={"future"}, source="Belady 1966; policies.md")
def belady(entry, state, knobs):
    """Evict what is used again last: the optimum with forced admission, of entries of one size. Key: minus next use."""
    (following,) = state
    return -following


@eviction(
    "static",
    touch=foresee,
    state={"next": NEVER},
    needs={"future"},
    bypass=True,
    source="Belady 1966; policies.md",
)
def belady_bypass(entry, state, knobs):
    """`belady` where the batch's own entries may leave too: the optimum then, of entries of one size. Key: as there."""
    (following,) = state
    return -following


def foresee_both(state, access, knobs):
    """Remember the entry's next use and the batch it is in."""
    return access.next_position, access.next_batch


@eviction(
    "dynamic",
    touch=foresee_both,
    state={"next": NEVER, "next_batch": NEVER},
    knobs={"m": Knob(64, 0, 2**31 - 1, integer=True, help="batches it sees ahead")},
    needs={"future"},
    source="policies.md",
)
def lookahead(entry, state, knobs):
    """Belady within the next m batches, LRU beyond. Key: minus the next use's position if seen, else recency."""
    following, its_batch = state
    return where(its_batch - entry.batch <= knobs.m, -following, entry.position - _FAR)
