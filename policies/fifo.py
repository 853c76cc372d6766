"""First in, first out: evict the entry that was read longest ago, however often it was used since.

An entry enters where the batch's first row to pick it stands in the walk. What look-ahead read and nothing has
missed yet never entered, and goes first. Source: policies.md; the order within a batch is this project's.
"""

from simlab.policy import eviction


def enter(xp, state, access, knobs):
    """Remember where a missed entry was read."""
    came_in = access.first & ~access.hit
    return {"entered": xp.where(came_in, access.position, state["entered"])}


@eviction(touch=enter, state={"entered": -1}, source="policies.md")
def fifo(xp, state, last_position, batch, knobs):
    """First in, first out. Key: the position at which the entry was last read."""
    return state["entered"]
