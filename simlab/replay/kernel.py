"""The replay scan: one step is one token at one MoE layer, for all cells of a program at once.

Cells that share their policies' code are lanes of one JAX program; knobs, budgets, scopes and widths are
arrays along the lanes, which always come last. Each lane's cache decides its own routing, so the cache is
part of the scan's carry. Residency is frozen from the first row of a batch to its last: misses become
resident, and the overshoot is evicted, only where `batch_end` is set, so a wide prefill costs no more state
than a decode step. Bytes, positions and counters are int64; NumPy makes every logarithm (`columns.py`).
Rules: engine-semantics, sections 1 to 3.

Shapes: `B` MoE layers, `E` experts per layer, `K` slots, `W` lanes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.replay.eviction import Batch, Cache, close_batch
from simlab.replay.programs import compiled
from simlab.replay.routes import Routed, against_router, fault_of, first_routing_state, gather, given, route
from simlab.replay.shape import (
    NO_ROW,
    ProgramShape,
    Tree,
    at_layer,
    fault,
    first_counts,
    in_phase,
    put,
)
from simlab.replay.speculation import count_useful, first_look_ahead, issue, read_ahead
from simlab.replay.tally import COUNTERS
from simlab.routing import first_state, touch_state
from simlab.types import Access, Array
from simlab.xp import rounded


def program(shape: ProgramShape, n_lanes: int) -> Any:
    """The jitted `(carry, rows, lanes) -> (carry, detail)` of a shape."""

    def scan(carry: Tree, rows: Tree, lanes: Tree) -> tuple[Tree, Tree]:
        return lax.scan(lambda c, r: _step(shape, lanes, c, r), carry, rows)

    return compiled((shape.key, n_lanes), scan)


def first_carry(shape: ProgramShape, n_lanes: int) -> Tree:
    """An empty cache and zero counters."""
    entries = (shape.n_layers, shape.n_expert, n_lanes)
    return {
        # Position in the walk of an entry's last occurrence, -1 before the first.
        "stamp": np.full(entries, -1, np.int64),
        "resident": np.zeros(entries, bool),
        "used": np.zeros((shape.n_layers, n_lanes), np.int64),
        "position": np.zeros(n_lanes, np.int64),
        "batch_position": np.zeros(n_lanes, np.int64),
        "routing_state": first_routing_state(shape, n_lanes),
        "eviction_state": first_state(shape.eviction.state, entries),
        **first_counts(n_lanes),
        **(first_look_ahead(shape, n_lanes) if shape.looks_ahead else {}),
        # Where in the walk the current pass over the layers began.
        **({"pass_position": np.zeros(n_lanes, np.int64)} if "pass" in shape.eviction.needs else {}),
        # Residency at the start of the batch, which one expert at a time does not keep.
        **({"frozen": np.zeros(entries[1:], bool)} if shape.sequential else {}),
    }


_CACHE = (
    "stamp", "resident", "used", "position", "batch_position", "eviction_state",
    "pass_position", "marks", "missed", "coldest", "read_ahead", "last_run", "under_way", "fault",
)  # fmt: skip
"""What of the carry a walk through the cache reads and writes."""


class _Slots(NamedTuple):
    """Slots to be looked up together, `[K, W]`, ids -1 where there is none."""

    walk: Array
    experts: Array
    """Before dropped slots are repointed: whose residency is told."""
    charged: Array
    """The experts whose reads are charged to these slots."""
    weights: Array
    """Applied weights; zeros where nothing wants them."""
    next_position: Array
    next_batch: Array


def _step(shape: ProgramShape, lanes: Tree, carry: Tree, row: Tree) -> tuple[Tree, Tree]:
    """One token at one MoE layer: route it, walk its slots through the cache, close the batch if it ends."""
    layer = row["layer"]
    cache = {name: carry[name] for name in _CACHE if name in carry}
    if shape.looks_ahead:
        cache = read_ahead(shape, lanes, cache, row)
    if "pass_position" in cache:
        begins = row["pass_start"]
        cache["pass_position"] = jnp.where(begins, cache["position"], cache["pass_position"])
    resident = at_layer(cache["resident"], layer)
    if shape.sequential:
        # Policies decide on the residency at the batch's start, one expert at a time or not.
        resident = jnp.where(row["batch_start"], resident, carry["frozen"])
    state = {
        stage: {name: at_layer(v, layer) for name, v in s.items()}
        for stage, s in carry["routing_state"].items()
    }
    if shape.given:
        routed = given(row, resident)
    else:
        routed, state = route(shape, lanes, row, resident, state)

    nothing = jnp.zeros(routed.walk.shape, jnp.int64)
    slots = _Slots(
        walk=routed.walk,
        experts=routed.experts,
        charged=jnp.where(routed.dropped, -1, routed.experts),
        weights=_kept_weights(shape, lanes, routed)
        if shape.eviction.touch is not None
        else jnp.zeros(routed.walk.shape, jnp.float32),
        next_position=row.get("next_position", nothing),
        next_batch=row.get("next_batch", nothing),
    )
    if shape.sequential:
        cache, counts, told = _one_by_one(shape, lanes, cache, row, slots)
    else:
        cache, counts, told = _look_up(shape, lanes, cache, row, slots, row["batch_start"], row["batch_end"])
    if shape.ahead:
        cache |= issue(shape, cache, row, routed.walk)

    counts |= {
        "slots": (routed.walk >= 0).sum(axis=0),
        "reranked": routed.reranked,
        "substituted": routed.substituted,
        "dropped": routed.dropped.sum(axis=0),
    }
    counters = jnp.stack([counts[name].astype(jnp.int64) for name in COUNTERS])
    sums = jnp.stack(against_router(shape, row, jnp.where(routed.dropped, -1, routed.experts)))
    phase = in_phase(row)
    new_carry = cache | {
        "routing_state": {
            stage: {name: put(v, state[stage][name], layer) for name, v in s.items()}
            for stage, s in carry["routing_state"].items()
        },
        "counters": carry["counters"] + jnp.where(phase, counters, 0),
        "sums": carry["sums"] + jnp.where(phase, sums, 0.0),
        "nan_row": carry["nan_row"],
        "fault": jnp.minimum(cache["fault"], fault_of(row, routed)),
    }
    if shape.sequential:
        new_carry["frozen"] = resident
    if shape.step("drop") is not None:
        is_nan = ((routed.walk >= 0) & jnp.isnan(routed.weights)).any(axis=0)
        new_carry["nan_row"] = jnp.minimum(carry["nan_row"], jnp.where(is_nan, row["row"], NO_ROW))
    if not shape.detail:
        return new_carry, {}
    return new_carry, {
        "router_expert": routed.router,
        "expert": routed.experts,
        "walk": routed.walk,
        "weight": routed.weights,
        "dropped": routed.dropped,
        "counters": counters,
        "sums": sums,
        **told,
    }


def _one_by_one(
    shape: ProgramShape, lanes: Tree, cache: Tree, row: Tree, slots: _Slots
) -> tuple[Tree, Tree, Tree]:
    """Each slot as a batch of its own, its read charged to it: `_look_up` slot after slot."""

    def step(cache: Tree, slot: _Slots) -> tuple[Tree, tuple[Tree, Tree]]:
        one = _Slots._make(x[None] for x in slot)
        exists = (slot.walk >= 0).any()
        cache, counts, told = _look_up(shape, lanes, cache, row, one, jnp.bool_(True), exists)
        return cache, (counts, {name: x[0] for name, x in told.items()})

    cache, (counts, told) = lax.scan(step, cache, slots._replace(charged=slots.walk))
    return cache, {name: x.sum(axis=0) for name, x in counts.items()}, told


def _look_up(
    shape: ProgramShape, lanes: Tree, cache: Tree, row: Tree, slots: _Slots, starts: Array, ends: Array
) -> tuple[Tree, Tree, Tree]:
    """Walk slots of one row through the caches; where the batch `ends`, insert its misses and evict.

    Returns:
        The caches, the row's counts `[W]` by name, and by slot `[K, W]` residency and bytes read.
    """
    layer = row["layer"]
    stamps, resident = at_layer(cache["stamp"], layer), at_layer(cache["resident"], layer)
    entry_bytes = lanes["entry_bytes"][layer]
    batch_position = jnp.where(starts, cache["position"], cache["batch_position"])
    exists = slots.walk >= 0
    position = cache["position"] + jnp.cumsum(exists, axis=0) - 1
    at = slots.walk[:, None] == jnp.arange(shape.n_expert, dtype=jnp.int32)[None, :, None]  # [K, E, W]
    last = jnp.where(at, position[:, None], -1).max(axis=0)
    unseen = stamps < batch_position
    first = (last >= 0) & unseen
    miss = first & ~resident
    n_misses = miss.sum(axis=0)
    missed = at_layer(cache["missed"], layer) if "missed" in cache else stamps >= 0
    n_cold = (miss & ~missed).sum(axis=0)
    told: Tree = {}
    if shape.detail:
        told = {
            "residency": gather(resident, slots.experts) & (slots.experts >= 0),
            "read_bytes": jnp.where(_reading_slots(slots.charged, resident, unseen), entry_bytes, 0),
        }
        if "marks" in cache:
            told["residency"] = told["residency"] + gather(at_layer(cache["marks"], layer), slots.experts) * 1

    eviction_state = cache["eviction_state"]
    if shape.eviction.touch is not None:
        access = Access(
            position=last,
            first=first,
            hit=first & resident,
            weight=_entry_weights(slots.weights, at),
            batch=row["batch"],
            layer=layer.astype(jnp.int64),
            expert=jnp.broadcast_to(jnp.arange(shape.n_expert, dtype=jnp.int32)[:, None], last.shape),
            next_position=jnp.where(at, slots.next_position[:, None], -1).max(axis=0),
            next_batch=jnp.where(at, slots.next_batch[:, None], -1).max(axis=0),
        )
        before = {name: at_layer(v, layer) for name, v in eviction_state.items()}
        after = touch_state(jnp, shape.eviction, before, access, SimpleNamespace(**lanes["eviction_knobs"]))
        eviction_state = {
            name: put(v, jnp.where(last >= 0, after[name], before[name]).astype(v.dtype), layer)
            for name, v in eviction_state.items()
        }

    stamps = jnp.where(last >= 0, last, stamps)
    touched = stamps >= batch_position
    arrived = touched & ~resident & ends & ~lanes["off"]
    used = at_layer(cache["used"], layer) + arrived.sum(axis=0) * entry_bytes
    marks = None
    if "marks" in cache:
        early = (first & resident & at_layer(cache["marks"], layer)).sum(axis=0)
        cache = cache | {"read_ahead": count_useful(cache["read_ahead"], row, early, entry_bytes)}
        marks = put(cache["marks"], at_layer(cache["marks"], layer) & (last < 0), layer)
    closed, n_evicted, wrong = close_batch(
        shape,
        lanes,
        Cache(
            stamp=put(cache["stamp"], stamps, layer),
            resident=put(cache["resident"], resident | arrived, layer),
            used=put(cache["used"], used, layer),
            state=eviction_state,
        ),
        Batch(
            layer=layer,
            number=row["batch"],
            position=batch_position,
            pass_position=cache.get("pass_position", batch_position),
            speculative=marks,
        ),
        ends,
    )
    wrong = jnp.where(wrong < NO_ROW, fault(True, row["row"], 0, 0) | wrong, NO_ROW)
    new_cache = cache | {
        "fault": jnp.minimum(cache["fault"], wrong),
        "stamp": closed.stamp,
        "resident": closed.resident,
        "used": closed.used,
        "position": cache["position"] + exists.sum(axis=0),
        "batch_position": batch_position,
        "eviction_state": dict(closed.state),
    }
    if marks is not None:
        new_cache |= {
            "marks": marks & closed.resident,
            "missed": put(cache["missed"], missed | miss, layer),
        }
    counts = {
        "lookups": first.sum(axis=0),
        "hits": (first & resident).sum(axis=0),
        "misses": n_misses,
        "cold_misses": n_cold,
        "read_bytes": n_misses * entry_bytes,
        "evictions": n_evicted,
        # An entry missed before and missing now was evicted in between; without a cache nothing is.
        "rereads": jnp.where(lanes["off"], 0, n_misses - n_cold),
    }
    return new_cache, counts, told


def _kept_weights(shape: ProgramShape, lanes: Tree, routed: Routed) -> Array:
    """float32 `[K, W]`: weights applied in this row, after dropping and renormalising."""
    exists = routed.experts >= 0
    kept = jnp.where(exists & ~routed.dropped, routed.weights, jnp.float32(0))
    if shape.step("drop") is None:
        return kept
    # A drop policy without the knob renormalises, as it does live.
    renorm = lanes["knobs"]["drop"].get("renorm", jnp.int32(1))
    total, left = jnp.zeros_like(kept[0]), jnp.zeros_like(kept[0])
    for slot in range(shape.n_slots):
        total = total + jnp.where(exists[slot], routed.weights[slot], jnp.float32(0))
        left = left + kept[slot]
    scaled = (renorm > 0) & routed.dropped.any(axis=0) & (left > 0)
    scale = jnp.where(scaled, total / left, jnp.float32(1))
    return rounded(kept * scale)


def _entry_weights(weights: Array, at: Array) -> Array:
    """float32 `[E, W]`: the weights of slots added up, slot by slot, at the entries they run (`at` `[K, E, W]`)."""
    weight = jnp.zeros(at.shape[1:], jnp.float32)
    for slot in range(at.shape[0]):
        weight = weight + jnp.where(at[slot], weights[slot], jnp.float32(0))
    return weight


def _reading_slots(charged: Array, resident: Array, unseen: Array) -> Array:
    """bool `[K, W]`: slots a read is charged to, the first of its expert where that is missing."""
    slot = jnp.arange(charged.shape[0])
    earlier = (slot[None] < slot[:, None])[..., None]
    again = ((charged[:, None] == charged[None]) & earlier).any(axis=1)
    return (charged >= 0) & ~gather(resident, charged) & gather(unseen, charged) & ~again
