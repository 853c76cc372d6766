"""Least recently used: evict the entry whose last occurrence in the walk lies furthest back."""

from simlab.policy import eviction


@eviction(source="engine-semantics, section 3")
def lru(xp, state, last_position, batch, knobs):
    """Key: the position of the last occurrence; smallest goes first."""
    return last_position
