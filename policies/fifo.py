"""First in, first out: evict the entry that was read longest ago, however often it was used since.

An entry enters where the batch's first row to pick it stands in the walk. What look-ahead read and nothing has
missed yet never entered, and goes first. Source: policies.md; the order within a batch is this project's.
"""

from simlab.policy import eviction
from simlab.xp import where


def enter(state, access, knobs):
    """Remember where a missed entry was read."""
    (entered,) = state
    return (where(access.first & ~access.hit, access.position, entered),)


@eviction("static", touch=enter, state={"entered": -1}, source="policies.md")
def fifo(entry, state, knobs):
    """First in, first out. Key: the position at which the entry was last read."""
    (entered,) = state
    return entered
