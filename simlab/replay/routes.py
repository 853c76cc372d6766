"""One row's routing in every lane of a replay: the replayer's side of `simlab.routing`.

The scan (`kernel.py`) hands in the batch's residency and walks the slots that come out. What policies are
shown is laid along the lanes here, and what they did not declare is hidden, as live.

Shapes: `E` experts per layer, `K` slots, `W` lanes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp

from simlab.replay.shape import ProgramShape
from simlab.routing import drop, drop_armed, rerank, swap
from simlab.scores import applied_weights
from simlab.types import Array, Candidates, LearnedValues, Row, Stage, Step

Tree = dict[str, Any]


class Routed(NamedTuple):
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


def route(shape: ProgramShape, lanes: Tree, row: Tree, resident: Array, state: Tree) -> tuple[Routed, Tree]:
    """Run the policies on one row: rerank or swap, then drop; residency `[E, W]` is the batch's.

    They act in decode graphs. A width, which is the lanes' `k`, acts in every graph, as llama.cpp's
    `expert_used_count` does.
    """
    n_lanes = resident.shape[1]
    expert = _along(jnp.arange(shape.n_expert, dtype=jnp.int32), n_lanes)
    value = _along(row["value"], n_lanes) if shape.scores else jnp.zeros(resident.shape, jnp.float32)
    usable = jnp.isfinite(value)
    armed = _along(row["decode"], n_lanes)
    k = lanes["k"]
    router = row["router"][: shape.n_slots, None]
    router = jnp.where((jnp.arange(shape.n_slots)[:, None] < k) & (router >= 0), router, -1)

    experts, reranked, substituted = router, jnp.zeros_like(k), jnp.zeros_like(k)
    step = shape.step("rerank") or shape.step("swap")
    if step is not None:
        stage, needs = step.policy.stage, step.policy.needs
        candidates = Candidates(
            value=value,
            expert=expert,
            rank=_along(row["rank"], n_lanes) if "rank" in needs else jnp.zeros_like(expert),
            resident=resident,
            weight=jnp.zeros(resident.shape, jnp.float32),
            mass=_along(row["mass_before"], n_lanes) if "mass" in needs else 0.0,
            learned=_learned(lanes, step, row["layer"], router, n_lanes),
        )
        if "weights" in needs:
            own = jnp.where(router[:, None] == expert, _weights(shape, row, router)[:, None], 0)
            candidates = candidates._replace(weight=own.sum(axis=0, dtype=jnp.float32))
        candidates = _declared(step, candidates)
        facts = _facts(step, row, k, resident, usable)
        knobs = _knobs(lanes, stage)
        if stage == "rerank":
            found = rerank(jnp, step, knobs, candidates, facts, router, armed, state[stage])
        else:
            # The cache may hold experts that the policy does not ask about.
            candidates = candidates._replace(resident=resident)
            found = swap(jnp, step, knobs, candidates, facts, router, usable, armed, state[stage])
        experts, reranked, substituted, state[stage] = found

    weights = _weights(shape, row, experts)
    slot_resident = gather(resident, experts) & (experts >= 0)
    step = shape.step("drop")
    if step is None:
        dropped, walk = jnp.zeros(experts.shape, bool), experts
    else:
        slot = _along(jnp.arange(shape.n_slots, dtype=jnp.int32), n_lanes)
        learned = _learned(lanes, step, row["layer"], experts, n_lanes)
        slots = Candidates(gather(value, experts), experts, slot, slot_resident, weights, learned=learned)
        # The driver itself needs the weights, to find the slot that is never dropped.
        slots = _declared(step, slots)._replace(rank=slots.rank, weight=weights)
        knobs = _knobs(lanes, "drop")
        armed = drop_armed(jnp, step, knobs, armed) & row["valid"]
        facts = _facts(step, row, k, resident, usable)
        dropped, walk, _, state["drop"] = drop(jnp, step, knobs, slots, facts, armed, state["drop"])
    return Routed(router, experts, walk, dropped, weights, slot_resident, reranked, substituted), state


def executed(row: Tree, resident: Array) -> Routed:
    """The routing a first pass recorded in the row (`future.py`), each lane's own."""
    experts = row["executed_expert"]
    return Routed(
        router=row["executed_router"],
        experts=experts,
        walk=row["executed_walk"],
        dropped=row["executed_dropped"],
        weights=row["executed_weight"],
        resident=gather(resident, experts) & (experts >= 0),
        reranked=row["executed_reranked"],
        substituted=row["executed_substituted"],
    )


def gather(of_expert: Array, experts: Array) -> Array:
    """`[E, W]` at ids `[K, W]`; slots that do not exist give expert 0's."""
    return jnp.take_along_axis(of_expert, jnp.maximum(experts, 0), axis=0)


def _along(x: Array, n_lanes: int) -> Array:
    return jnp.broadcast_to(x[..., None], (*x.shape, n_lanes))


def _declared(step: Step, candidates: Candidates) -> Candidates:
    """Zeros in the fields a policy did not say it needs."""
    fields = {"scores": "value", "rank": "rank", "weights": "weight"}
    hidden = [field for need, field in fields.items() if need not in step.policy.needs]
    if not step.policy.uses_cache:
        hidden.append("resident")
    return candidates._replace(**{name: jnp.zeros_like(getattr(candidates, name)) for name in hidden})


def _facts(step: Step, row: Tree, k: Array, resident: Array, usable: Array) -> Row:
    """The row's facts for a policy: of the scores and of residency only what it declared."""
    n_lanes, scores = resident.shape[1], "scores" in step.policy.needs
    counted = resident & usable if scores else resident
    nothing = jnp.zeros(n_lanes, jnp.float32)
    n_resident = counted.sum(axis=0).astype(jnp.int32)
    return Row(
        k=k,
        layer=_along(row["layer"], n_lanes),
        top=_along(row["top"], n_lanes) if scores else nothing,
        range=_along(row["range"], n_lanes) if scores else nothing,
        n_resident=n_resident if step.policy.uses_cache else jnp.zeros_like(n_resident),
    )


def _learned(lanes: Tree, step: Step, layer: Array, experts: Array, n_lanes: int) -> LearnedValues:
    """What a policy learned, for this layer: per expert of a rerank or swap `[E, W]`, of a drop's slots `[K, W]`."""
    found: Tree = {}
    for name, learned in step.policy.learns.items():
        values = lanes["learned"][step.policy.stage][name][layer]
        if learned.per == "pair":
            found[name] = jnp.moveaxis(values[jnp.maximum(experts, 0)], -1, 1)
        elif learned.per == "expert" and step.policy.stage == "drop":
            found[name] = values[jnp.maximum(experts, 0)]
        else:
            found[name] = _along(values, n_lanes)
    return LearnedValues(**found)


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
