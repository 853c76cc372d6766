"""Eviction in the replay scan: down to the budgets at a batch's end, by a policy's key.

Shapes: `B` MoE layers, `E` experts per layer, `W` lanes. Rules: engine-semantics, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from simlab.replay.shape import NO_ROW, ProgramShape, Tree, at_layer
from simlab.routing import eviction_key
from simlab.types import Array, Entry

_LAST = jnp.iinfo(jnp.int64).max


class Cache(NamedTuple):
    """The caches of all lanes at a batch's end, its misses included."""

    stamp: Array
    """int64 `[B, E, W]`: place of an entry's last occurrence."""
    resident: Array
    """bool `[B, E, W]`."""
    used: Array
    """int64 `[B, W]`: bytes in RAM."""
    state: Mapping[str, Array]
    """Per-entry state of the eviction policy, `[B, E, W]`."""


class Batch(NamedTuple):
    """The batch that ends."""

    layer: Array
    """int32: MoE layer index."""
    number: Array
    """int64."""
    position: Array
    """int64 `[W]`: place in the walk at which it began; what is stamped later was touched by it."""
    pass_position: Array
    """int64 `[W]`: place at which the current pass over the layers began."""
    speculative: Array | None
    """bool `[B, E, W]`: read ahead and not looked up yet; None without look-ahead."""


def close_batch(
    shape: ProgramShape, lanes: Tree, cache: Cache, batch: Batch, ends: Array
) -> tuple[Cache, Array, Array]:
    """Evict where the batch `ends`: the caches after it, and the entries evicted, int64 `[W]`.

    Last, of the first entry whose key is none (`simlab.routing.is_wrong`) layer << 16 | expert, else `NO_ROW`.
    """
    none, no_fault = jnp.zeros_like(batch.position), jnp.full_like(batch.position, NO_ROW)
    resident, used, n_evicted, wrong = lax.cond(
        ends & _over_budget(lanes, cache.used, batch.layer).any(),
        lambda r, u: _evict(shape, lanes, cache._replace(resident=r, used=u), batch),
        lambda r, u: (r, u, none, no_fault),
        cache.resident,
        cache.used,
    )
    return cache._replace(resident=resident, used=used), n_evicted, wrong


def _over_budget(lanes: Tree, used: Array, layer: Array) -> Array:
    """bool `[W]`: does the layer, or with global scope the whole cache, hold more bytes than it may."""
    over_layer = at_layer(used, layer) > at_layer(lanes["layer_budget"], layer)
    return jnp.where(lanes["per_layer"], over_layer, used.sum(axis=0) > lanes["total_budget"]) & ~lanes["off"]


def _evict(shape: ProgramShape, lanes: Tree, cache: Cache, batch: Batch) -> tuple[Array, Array, Array, Array]:
    """Evict down to the budgets by a policy's key: residency, bytes used, evictions `[W]`, and the first wrong key.

    Victims leave in ascending (key, position of last occurrence), so the loop only moves a threshold up: it
    keeps each layer's next victim and looks again into the one layer that lost it.
    """
    stamp, resident, layer = cache.stamp, cache.resident, batch.layer
    layers = jnp.arange(shape.n_layers)
    evictable = resident & (shape.eviction.bypass | (stamp < batch.position))
    evictable &= ~lanes["per_layer"] | (layers == layer)[:, None, None]
    knobs = SimpleNamespace(**lanes["eviction_knobs"])
    key, wrong = eviction_key(jnp, shape.eviction, dict(cache.state), _entries(cache, batch), knobs)
    at = (layers.astype(jnp.int64)[:, None] << 16) + jnp.arange(shape.n_expert)
    asked = wrong & evictable & _over_budget(lanes, cache.used, layer)
    first = jnp.where(asked, at[..., None], NO_ROW).min(axis=(0, 1))
    low, high = -jnp.inf, jnp.inf

    def lowest(allowed: Array, keys: Array, stamps: Array, axis: int) -> tuple[Array, Array]:
        least = jnp.where(allowed, keys, high).min(axis=axis, keepdims=True)
        oldest = jnp.where(allowed & (keys == least), stamps, _LAST).min(axis=axis)
        return least.squeeze(axis), oldest

    def pending(loop: Tree) -> tuple[Array, Array, Array]:
        least, oldest = lowest(loop["stamp"] < _LAST, loop["key"], loop["stamp"], 0)
        return _over_budget(lanes, loop["used"], layer) & (oldest < _LAST), least, oldest

    def evict_one(loop: Tree) -> Tree:
        active, least, oldest = pending(loop)
        victim_layer = jnp.argmax((loop["key"] == least) & (loop["stamp"] == oldest), axis=0)

        def of_victim_layer(x: Array) -> Array:
            return jnp.take_along_axis(x, victim_layer[None, None], axis=0)[0]

        keys, stamps = of_victim_layer(key), of_victim_layer(stamp)
        later = (keys > least) | ((keys == least) & (stamps > oldest))
        next_key, next_stamp = lowest(of_victim_layer(evictable) & later, keys, stamps, 0)
        hit = (layers[:, None] == victim_layer) & active
        return {
            "key": jnp.where(hit, next_key, loop["key"]),
            "stamp": jnp.where(hit, next_stamp, loop["stamp"]),
            "used": loop["used"] - jnp.where(hit, lanes["entry_bytes"][:, None], 0),
            "evicted": loop["evicted"] + active,
            "last_key": jnp.where(active, least, loop["last_key"]),
            "last_stamp": jnp.where(active, oldest, loop["last_stamp"]),
        }

    first_key, first_stamp = lowest(evictable, key, stamp, 1)
    loop = {
        "key": first_key,
        "stamp": first_stamp,
        "used": cache.used,
        "evicted": jnp.zeros_like(batch.position),
        "last_key": jnp.full(batch.position.shape, low, key.dtype),
        "last_stamp": jnp.full_like(batch.position, jnp.iinfo(jnp.int64).min),
    }
    loop = lax.while_loop(lambda x: pending(x)[0].any(), evict_one, loop)
    gone = (key < loop["last_key"]) | ((key == loop["last_key"]) & (stamp <= loop["last_stamp"]))
    return resident & ~(evictable & gone), loop["used"], loop["evicted"], first


def _entries(cache: Cache, batch: Batch) -> Entry:
    """What a key is given, `[B, E, W]`."""
    sizes = cache.stamp.shape
    return Entry(
        position=cache.stamp,
        layer=jnp.broadcast_to(jnp.arange(sizes[0])[:, None, None], sizes),
        expert=jnp.broadcast_to(jnp.arange(sizes[1])[None, :, None], sizes),
        in_pass=cache.stamp >= batch.pass_position,
        speculative=jnp.zeros(sizes, bool) if batch.speculative is None else batch.speculative,
        batch=batch.number,
    )
