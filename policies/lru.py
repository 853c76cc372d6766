"""Least recently used: evict the entry whose last occurrence in the walk lies furthest back."""

from simlab.policy import eviction


@eviction("static", source="engine-semantics, section 3")
def lru(entry, state, knobs):
    """Least recently used. Key: the position of the last occurrence; smallest goes first."""
    return entry.position


@eviction("static", scope="per_layer", source="engine-semantics, section 3; policies.md")
def layer_lru(entry, state, knobs):
    """Least recently used, each layer a cache of its own: `lru` with scope per_layer, whatever --scope says."""
    return entry.position
