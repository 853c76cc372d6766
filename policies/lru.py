"""Least recently used: evict the entry whose last occurrence in the walk lies furthest back."""

from simlab.policy import eviction


@eviction(source="engine-semantics, section 3")
def lru(xp, state, last_position, batch, knobs):
    """Least recently used. Key: the position of the last occurrence; smallest goes first."""
    return last_position


@eviction(scope="per_layer", source="engine-semantics, section 3; policies.md")
def layer_lru(xp, state, last_position, batch, knobs):
    """Least recently used, each layer a cache of its own: `lru` with scope per_layer, whatever --scope says."""
    return last_position
