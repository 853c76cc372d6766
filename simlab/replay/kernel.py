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

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.policy import rounded
from simlab.replay.shape import ProgramShape
from simlab.replay.speculation import insert
from simlab.routing import drop, drop_armed, eviction_key, members, rerank, touch_state
from simlab.scores import applied_weights
from simlab.types import (
    Access,
    Array,
    Candidates,
    Row,
    Stage,
    Step,
)

# Byte counts pass 2^31 at 2 GiB, where int32 would wrap without a word.
jax.config.update("jax_enable_x64", True)

COUNTERS = (
    "lookups", "hits", "misses", "cold_misses", "read_bytes", "slots", "reranked", "substituted", "dropped",
    "evictions", "rereads",
)  # fmt: skip
SUMS = ("mass_displaced", "score_regret", "agreement")
NO_ROW = jnp.iinfo(jnp.int64).max
_LAST = jnp.iinfo(jnp.int64).max

Tree = dict[str, Any]


_PROGRAMS: dict[tuple[Any, ...], Any] = {}


def program(shape: ProgramShape) -> Any:
    """The jitted `(carry, rows, lanes) -> (carry, detail)` of a shape; made once per process."""
    if shape.key not in _PROGRAMS:

        def scan(carry: Tree, rows: Tree, lanes: Tree) -> tuple[Tree, Tree]:
            return lax.scan(lambda c, r: _step(shape, lanes, c, r), carry, rows)

        _PROGRAMS[shape.key] = jax.jit(scan)
    return _PROGRAMS[shape.key]


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
        "routing_state": {
            s.policy.stage: {
                name: np.full((shape.n_layers, n_lanes), v, np.float32) for name, v in s.policy.state.items()
            }
            for s in shape.steps
        },
        "eviction_state": {
            name: np.full(entries, v, np.int64 if isinstance(v, int) else np.float64)
            for name, v in shape.eviction.state.items()
        },
        "counters": np.zeros((2, len(COUNTERS), n_lanes), np.int64),
        "sums": np.zeros((2, len(SUMS), n_lanes), np.float64),
        # First row in which an existing slot's weight is NaN.
        "nan_row": np.full(n_lanes, NO_ROW, np.int64),
    } | (_first_speculation(entries) if shape.n_speculative else {})


def _first_speculation(entries: tuple[int, int, int]) -> Tree:
    return {
        "marks": np.zeros(entries, bool),
        # A stamp no longer tells whether an entry was ever missed: speculation sets it too.
        "missed": np.zeros(entries, bool),
        "coldest": np.full(entries[2], -1, np.int64),
    }


class _Routed(NamedTuple):
    """What a row's routing came to in each lane: `[K, W]`, ids -1 where no slot is."""

    router: Array
    experts: Array
    """After substitution, before dropped slots are repointed."""
    walk: Array
    """The ids the cache sees, dropped slots repointed at the top slot's expert."""
    dropped: Array
    weights: Array
    """Applied weights of `experts` before dropping; NaN where the trace does not tell."""
    resident: Array
    reranked: Array
    """int32 `[W]`."""
    substituted: Array
    """int32 `[W]`."""


def _step(shape: ProgramShape, lanes: Tree, carry: Tree, row: Tree) -> tuple[Tree, Tree]:
    """One token at one MoE layer: route it, walk its slots through the cache, close the batch if it ends."""
    layer = row["layer"]
    stamps = _at(carry["stamp"], layer)
    resident = _at(carry["resident"], layer)
    entry_bytes = lanes["entry_bytes"][layer]
    used_before, marks, coldest = _at(carry["used"], layer), None, None
    if shape.n_speculative:
        stamps, resident, marks, coldest = insert(
            row["speculative"], stamps, resident, _at(carry["marks"], layer), carry["coldest"], lanes["off"]
        )
        used_before += (carry["coldest"] - coldest) * entry_bytes
    state = {
        stage: {name: _at(v, layer) for name, v in s.items()} for stage, s in carry["routing_state"].items()
    }
    routed, state = _route(shape, lanes, row, resident, state)
    batch_position = jnp.where(row["batch_start"], carry["position"], carry["batch_position"])

    exists = routed.walk >= 0
    position = carry["position"] + jnp.cumsum(exists, axis=0) - 1
    at = routed.walk[:, None] == jnp.arange(shape.n_expert, dtype=jnp.int32)[None, :, None]  # [K, E, W]
    last = jnp.where(at, position[:, None], -1).max(axis=0)
    unseen = stamps < batch_position
    first = (last >= 0) & unseen
    miss = first & ~resident
    n_misses = miss.sum(axis=0)
    missed = stamps >= 0 if marks is None else _at(carry["missed"], layer)
    n_cold = (miss & ~missed).sum(axis=0)

    eviction_state = carry["eviction_state"]
    if shape.eviction.touch is not None:
        access = Access(
            position=last,
            first=first,
            hit=first & resident,
            weight=_entry_weights(shape, lanes, routed, at),
            batch=row["batch"],
            layer=layer,
            expert=jnp.broadcast_to(jnp.arange(shape.n_expert, dtype=jnp.int32)[:, None], last.shape),
        )
        before = {name: _at(v, layer) for name, v in eviction_state.items()}
        after = touch_state(jnp, shape.eviction, before, access, SimpleNamespace(**lanes["eviction_knobs"]))
        eviction_state = {
            name: _put(v, jnp.where(last >= 0, after[name], before[name]).astype(v.dtype), layer)
            for name, v in eviction_state.items()
        }

    stamps = jnp.where(last >= 0, last, stamps)
    stamp = _put(carry["stamp"], stamps, layer)
    arrived = (stamps >= batch_position) & ~resident & row["batch_end"] & ~lanes["off"]
    all_resident = _put(carry["resident"], resident | arrived, layer)
    used = _put(carry["used"], used_before + arrived.sum(axis=0) * entry_bytes, layer)
    all_resident, used, n_evicted = lax.cond(
        row["batch_end"] & _over_budget(lanes, used, layer).any(),
        lambda r, u: _evict(shape, lanes, eviction_state, stamp, r, u, layer, row["batch"], batch_position),
        lambda r, u: (r, u, jnp.zeros_like(batch_position)),
        all_resident,
        used,
    )

    counts = {
        "lookups": first.sum(axis=0),
        "hits": (first & resident).sum(axis=0),
        "misses": n_misses,
        "cold_misses": n_cold,
        "read_bytes": n_misses * entry_bytes,
        "slots": exists.sum(axis=0),
        "reranked": routed.reranked,
        "substituted": routed.substituted,
        "dropped": routed.dropped.sum(axis=0),
        "evictions": n_evicted,
        # An entry missed before and missing now was evicted in between; without a cache nothing is.
        "rereads": jnp.where(lanes["off"], 0, n_misses - n_cold),
    }
    counters = jnp.stack([counts[name].astype(jnp.int64) for name in COUNTERS])
    sums = _against_router(shape, row, routed)
    in_phase = row["counted"] & (jnp.arange(2) == row["decode"])[:, None, None]
    new_carry = {
        "stamp": stamp,
        "resident": all_resident,
        "used": used,
        "position": carry["position"] + exists.sum(axis=0),
        "batch_position": batch_position,
        "routing_state": {
            stage: {name: _put(v, state[stage][name], layer) for name, v in s.items()}
            for stage, s in carry["routing_state"].items()
        },
        "eviction_state": eviction_state,
        "counters": carry["counters"] + jnp.where(in_phase, counters, 0),
        "sums": carry["sums"] + jnp.where(in_phase, sums, 0.0),
        "nan_row": carry["nan_row"],
    }
    if marks is not None:
        left = _put(carry["marks"], marks & (last < 0), layer)
        new_carry |= {
            "marks": left & all_resident,
            "missed": _put(carry["missed"], missed | miss, layer),
            "coldest": coldest,
        }
    if shape.step("drop") is not None:
        is_nan = (exists & jnp.isnan(routed.weights)).any(axis=0)
        new_carry["nan_row"] = jnp.minimum(carry["nan_row"], jnp.where(is_nan, row["row"], NO_ROW))
    if not shape.detail:
        return new_carry, {}
    return new_carry, {
        "router_expert": routed.router,
        "expert": routed.experts,
        "weight": routed.weights,
        "residency": routed.resident
        if marks is None
        else routed.resident + _gather(marks, routed.experts) * 1,
        "dropped": routed.dropped,
        "read_bytes": jnp.where(_reading_slots(shape, routed, unseen), entry_bytes, 0),
        "counters": counters,
        "sums": sums,
    }


def _route(shape: ProgramShape, lanes: Tree, row: Tree, resident: Array, state: Tree) -> tuple[_Routed, Tree]:
    """Run the policies on one row: rerank, then drop; residency `[E, W]` is the batch's.

    They act in decode graphs. A width, which is the lanes' `k`, acts in every graph, as llama.cpp's
    `expert_used_count` does.
    """
    n_lanes = resident.shape[1]

    def along(x: Array) -> Array:
        return jnp.broadcast_to(x[..., None], (*x.shape, n_lanes))

    expert = along(jnp.arange(shape.n_expert, dtype=jnp.int32))
    value = along(row["value"]) if shape.scores else jnp.zeros(resident.shape, jnp.float32)
    candidates = Candidates(
        value=value,
        expert=expert,
        rank=along(row["rank"]) if "rank" in row else jnp.zeros_like(expert),
        resident=resident,
        weight=jnp.zeros(resident.shape, jnp.float32),
    )
    facts = Row(
        k=lanes["k"],
        layer=along(row["layer"]),
        top=along(row["top"]) if shape.scores else jnp.zeros(n_lanes, jnp.float32),
        range=along(row["range"]) if shape.scores else jnp.zeros(n_lanes, jnp.float32),
        n_resident=(resident & jnp.isfinite(value)).sum(axis=0).astype(jnp.int32),
    )
    armed = along(row["decode"])

    router = row["router"][: shape.n_slots, None]
    router = jnp.where((jnp.arange(shape.n_slots)[:, None] < facts.k) & (router >= 0), router, -1)

    experts, reranked, substituted = router, jnp.zeros_like(facts.k), jnp.zeros_like(facts.k)
    step = shape.step("rerank")
    if step is not None:
        if "weights" in step.policy.needs:
            routed = jnp.where(router[:, None] == expert, _weights(shape, row, router)[:, None], 0)
            candidates = candidates._replace(weight=routed.sum(axis=0, dtype=jnp.float32))
        result = rerank(
            jnp,
            step,
            _knobs(lanes, "rerank"),
            _declared(step, candidates),
            facts,
            router,
            armed,
            state["rerank"],
        )
        experts, reranked, substituted, state["rerank"] = result

    weights = _weights(shape, row, experts)
    slot_resident = _gather(resident, experts) & (experts >= 0)
    step = shape.step("drop")
    if step is None:
        dropped, walk = jnp.zeros(experts.shape, bool), experts
    else:
        slot = jnp.arange(shape.n_slots, dtype=jnp.int32)
        slots = Candidates(_gather(value, experts), experts, along(slot), slot_resident, weights)
        # The driver itself needs the weights, to find the slot that is never dropped.
        slots = _declared(step, slots)._replace(rank=slots.rank, weight=weights)
        knobs = _knobs(lanes, "drop")
        armed = drop_armed(jnp, step, knobs, armed) & row["valid"]
        dropped, walk, _, state["drop"] = drop(jnp, step, knobs, slots, facts, armed, state["drop"])
    return _Routed(router, experts, walk, dropped, weights, slot_resident, reranked, substituted), state


def _declared(step: Step, candidates: Candidates) -> Candidates:
    """Zeros in the fields a policy did not say it needs."""
    fields = {"scores": "value", "rank": "rank", "weights": "weight"}
    hidden = [field for need, field in fields.items() if need not in step.policy.needs]
    return candidates._replace(**{name: jnp.zeros_like(getattr(candidates, name)) for name in hidden})


def _knobs(lanes: Tree, stage: Stage) -> SimpleNamespace:
    return SimpleNamespace(**lanes["knobs"][stage])


def _weights(shape: ProgramShape, row: Tree, experts: Array) -> Array:
    """float32 `[K, W]`: the weights the matmuls would apply to `experts`, before dropping."""
    if shape.weights == "recorded":
        return jnp.where(experts >= 0, row["weight"][: shape.n_slots, None], jnp.float32(0))
    if shape.weights == "scores":
        assert shape.weight_rule is not None
        numerators = row["numerator"][jnp.maximum(experts, 0)]
        return applied_weights(jnp, numerators, experts >= 0, shape.weight_rule)
    return jnp.full(experts.shape, jnp.nan, jnp.float32)


def _entry_weights(shape: ProgramShape, lanes: Tree, routed: _Routed, at: Array) -> Array:
    """float32 `[E, W]`: weight applied in this row to each expert, after dropping and renormalising."""
    exists = routed.experts >= 0
    kept = jnp.where(exists & ~routed.dropped, routed.weights, jnp.float32(0))
    if shape.step("drop") is not None:
        # A drop policy without the knob renormalises, as it does live.
        renorm = lanes["knobs"]["drop"].get("renorm", jnp.int32(1))
        total, left = jnp.zeros_like(kept[0]), jnp.zeros_like(kept[0])
        for slot in range(shape.n_slots):
            total = total + jnp.where(exists[slot], routed.weights[slot], jnp.float32(0))
            left = left + kept[slot]
        scaled = (renorm > 0) & routed.dropped.any(axis=0) & (left > 0)
        scale = jnp.where(scaled, total / left, jnp.float32(1))
        kept = rounded(jnp, kept * scale)
    weight = jnp.zeros(at.shape[1:], jnp.float32)
    for slot in range(shape.n_slots):
        weight = weight + jnp.where(at[slot], kept[slot], jnp.float32(0))
    return weight


def _against_router(shape: ProgramShape, row: Tree, routed: _Routed) -> Array:
    """float64 `[3, W]`: mass displaced, score regret, agreement of one row; exactly 0, 0, 1 if unchanged."""
    router = row["router"][: shape.n_expert_used]
    runs = (routed.experts >= 0) & ~routed.dropped
    same = (members(jnp, routed.experts, router[:, None]) & runs).sum(axis=0)
    agreement = same / jnp.maximum(row["router_k"], 1)
    if not shape.scores:
        return jnp.stack([jnp.zeros_like(agreement), jnp.zeros_like(agreement), agreement])
    n = max(router.shape[0], shape.n_slots)

    def lost(share: Array) -> Array:
        # Slot by slot, so that an untouched row gives 0 whatever the order of the sum.
        of_router = jnp.where(router >= 0, share[jnp.maximum(router, 0)], 0.0)[:, None]
        of_run = jnp.where(runs, share[jnp.maximum(routed.experts, 0)], 0.0)
        return (_longer(of_router, n) - _longer(of_run, n)).sum(axis=0)

    return jnp.stack([lost(row["mass"]), lost(row["regret"]), agreement])


def _longer(x: Array, n: int) -> Array:
    return jnp.pad(x, ((0, n - x.shape[0]), (0, 0)))


def _reading_slots(shape: ProgramShape, routed: _Routed, unseen: Array) -> Array:
    """bool `[K, W]`: slots a read is charged to, the first missing one of its expert that is not dropped."""
    runs = (routed.experts >= 0) & ~routed.dropped
    slot = jnp.arange(shape.n_slots)
    earlier = (slot[None] < slot[:, None])[..., None]
    again = ((routed.experts[:, None] == routed.experts[None]) & runs[None] & earlier).any(axis=1)
    return runs & ~routed.resident & _gather(unseen, routed.experts) & ~again


def _over_budget(lanes: Tree, used: Array, layer: Array) -> Array:
    """bool `[W]`: does the layer, or with global scope the whole cache, hold more bytes than it may."""
    over_layer = _at(used, layer) > _at(lanes["layer_budget"], layer)
    return jnp.where(lanes["per_layer"], over_layer, used.sum(axis=0) > lanes["total_budget"]) & ~lanes["off"]


def _evict(
    shape: ProgramShape,
    lanes: Tree,
    state: Mapping[str, Array],
    stamp: Array,
    resident: Array,
    used: Array,
    layer: Array,
    batch: Array,
    batch_position: Array,
) -> tuple[Array, Array, Array]:
    """Evict down to the budgets, never an entry the batch touched: residency, bytes used, evictions `[W]`.

    Victims leave in ascending (key, position of last occurrence), so the loop only moves a threshold up: it
    keeps each layer's next victim and looks again into the one layer that lost it.
    """
    layers = jnp.arange(shape.n_layers)
    evictable = resident & (stamp < batch_position)
    evictable &= ~lanes["per_layer"] | (layers == layer)[:, None, None]
    knobs = SimpleNamespace(**lanes["eviction_knobs"])
    key = eviction_key(jnp, shape.eviction, dict(state), stamp, batch, knobs)
    floating = jnp.issubdtype(key.dtype, jnp.floating)
    low, high = (-jnp.inf, jnp.inf) if floating else (jnp.iinfo(key.dtype).min, jnp.iinfo(key.dtype).max)

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
        "used": used,
        "evicted": jnp.zeros_like(batch_position),
        "last_key": jnp.full(batch_position.shape, low, key.dtype),
        "last_stamp": jnp.full_like(batch_position, jnp.iinfo(jnp.int64).min),
    }
    loop = lax.while_loop(lambda x: pending(x)[0].any(), evict_one, loop)
    gone = (key < loop["last_key"]) | ((key == loop["last_key"]) & (stamp <= loop["last_stamp"]))
    return resident & ~(evictable & gone), loop["used"], loop["evicted"]


def _at(x: Array, layer: Array) -> Array:
    return lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)


def _put(x: Array, of_layer: Array, layer: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, of_layer, layer, 0)


def _gather(of_expert: Array, experts: Array) -> Array:
    """`[E, W]` at ids `[K, W]`; slots that do not exist give expert 0's."""
    return jnp.take_along_axis(of_expert, jnp.maximum(experts, 0), axis=0)
