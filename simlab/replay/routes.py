"""One row's routing in every lane of a replay: the replayer's side of `simlab.routing`.

The scan (`kernel.py`) hands in the batch's residency and walks the slots that come out. What policies are
shown is laid along the lanes here, and what they did not declare is hidden, as live.

Shapes: `E` experts per layer, `K` slots, `W` lanes.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from simlab.replay.shape import NO_ROW, ProgramShape, Tree, fault
from simlab.routing import NO_EXPERT, Rerouted, drop, drop_armed, rerank, swap
from simlab.scores import applied_weights
from simlab.types import Array, Candidate, LearnedValues, Row, Stage, Step


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
    wrong: Array = NO_EXPERT
    """As `Rerouted` has it."""


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

    found = Rerouted(router, jnp.zeros_like(k), jnp.zeros_like(k), None)
    step = shape.step("rerank") or shape.step("swap")
    if step is not None:
        stage, needs = step.policy.stage, step.policy.needs
        candidates = Candidate(
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
        candidates = declared(step, candidates)
        facts = facts_of(step, row, k, _n_resident(step, resident, usable))
        knobs = _knobs(lanes, stage)
        if stage == "rerank":
            found = rerank(jnp, step, knobs, candidates, facts, router, armed, state[stage], shape.n_expert)
        else:
            # The cache may hold experts that the policy does not ask about.
            candidates = candidates._replace(resident=resident)
            found = swap(jnp, step, knobs, candidates, facts, router, usable, armed, state[stage])
        state[stage] = found.state
    slot_resident = gather(resident, found.experts) & (found.experts >= 0)
    step = shape.step("drop")
    n_resident = _n_resident(step, resident, usable) if step is not None else None
    return drop_slots(shape, lanes, row, router, found, slot_resident, n_resident, state)


def drop_slots(
    shape: ProgramShape,
    lanes: Tree,
    row: Tree,
    router: Array,
    found: Rerouted,
    resident: Array,
    n_resident: Array | None,
    state: Tree,
) -> tuple[Routed, Tree]:
    """What a row's routing comes to after the drop policy, if there is one.

    Args:
        found: what the rerank or swap policy made of the `router`'s ids. resident: bool `[K, W]`, of its experts.
        n_resident: `Row.n_resident` of the drop policy, None without one.
    """
    experts, n_lanes = found.experts, resident.shape[1]
    weights = _weights(shape, row, experts)
    step = shape.step("drop")
    if step is None:
        dropped, walk = jnp.zeros(experts.shape, bool), experts
    else:
        slot = _along(jnp.arange(shape.n_slots, dtype=jnp.int32), n_lanes)
        learned = _learned(lanes, step, row["layer"], experts, n_lanes)
        value = (
            row["value"][jnp.maximum(experts, 0)] if shape.scores else jnp.zeros(experts.shape, jnp.float32)
        )
        slots = Candidate(value, experts, slot, resident, weights, learned=learned)
        # The driver itself needs the weights, to find the slot that is never dropped.
        slots = declared(step, slots)._replace(rank=slots.rank, weight=weights)
        knobs = _knobs(lanes, "drop")
        armed = drop_armed(jnp, step, knobs, _along(row["decode"], n_lanes)) & row["valid"]
        facts = facts_of(step, row, lanes["k"], n_resident)
        dropped, walk, _, state["drop"] = drop(jnp, step, knobs, slots, facts, armed, state["drop"])
    counts = found.reranked, found.substituted
    return Routed(router, experts, walk, dropped, weights, resident, *counts, found.wrong), state


def fault_of(row: Tree, routed: Routed) -> Array:
    """The fault of a routed row's values, `NO_ROW` where there is none."""
    return jnp.where(routed.wrong < NO_EXPERT, fault(False, row["row"], row["layer"], routed.wrong), NO_ROW)


def given(row: Tree, resident: Array) -> Routed:
    """The routing a first pass recorded in the row (`future.py`), each lane's own."""
    experts = row["given_expert"]
    return Routed(
        router=row["given_router"],
        experts=experts,
        walk=row["given_walk"],
        dropped=row["given_dropped"],
        weights=row["given_weight"],
        resident=gather(resident, experts) & (experts >= 0),
        reranked=row["given_counts"][0],
        substituted=row["given_counts"][1],
    )


def against_router(shape: ProgramShape, rows: Tree, ran: Array) -> tuple[Array, Array, Array]:
    """float64 `[..., W]`: mass displaced, score regret, agreement of rows; exactly 0, 0, 1 if unchanged.

    Args:
        rows: `router` `[..., K]`, `router_k` `[...]`, and with scores `mass` and `regret` `[..., E]`.
        ran: int32 `[..., K, W]`: the experts that ran, -1 where a slot does not exist or was dropped.
    """
    router = rows["router"][..., : shape.n_expert_used]
    same: Array = jnp.int32(0)
    for slot in range(ran.shape[-2]):
        one = ran[..., slot, :]
        # A router may name an expert twice.
        found = reduce(or_, (one == router[..., other, None] for other in range(router.shape[-1])))
        same = same + (found & (one >= 0)).astype(jnp.int32)
    agreement = same.astype(jnp.float64) / jnp.maximum(rows["router_k"], 1)[..., None]
    if not shape.scores:
        return jnp.zeros_like(agreement), jnp.zeros_like(agreement), agreement
    n_expert = rows["mass"].shape[-1]
    first = (jnp.arange(router.size // router.shape[-1], dtype=jnp.int32) * n_expert).reshape(
        router.shape[:-1]
    )

    def share_of(flat: Array, ids: Array, first: Array) -> Array:
        at = first + jnp.maximum(ids, 0).astype(jnp.int32)
        of = flat.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return jnp.where(ids >= 0, of, 0.0)

    def lost(share: Array) -> Array:
        # Slot by slot, so that an untouched row gives 0 whatever the order of the sum.
        flat, total = share.reshape(-1), 0.0
        for slot in range(max(router.shape[-1], ran.shape[-2])):
            part = 0.0
            if slot < router.shape[-1]:
                part = share_of(flat, router[..., slot], first)[..., None]
            if slot < ran.shape[-2]:
                part = part - share_of(flat, ran[..., slot, :], first[..., None])
            total = total + part
        return total

    return lost(rows["mass"]), lost(rows["regret"]), agreement


def first_routing_state(shape: ProgramShape, n_lanes: int) -> Tree:
    """Per stage, the per-layer state of its policy before the first row, `[B, W]`."""
    return {
        step.policy.stage: {
            name: np.full((shape.n_layers, n_lanes), first, np.float32)
            for name, first in step.policy.state.items()
        }
        for step in shape.steps
    }


def gather(of_expert: Array, experts: Array) -> Array:
    """`[E, W]` at ids `[K, W]`; slots that do not exist give expert 0's."""
    return jnp.take_along_axis(of_expert, jnp.maximum(experts, 0), axis=0)


def _along(x: Array, n_lanes: int) -> Array:
    return jnp.broadcast_to(x[..., None], (*x.shape, n_lanes))


def declared(step: Step, candidates: Candidate) -> Candidate:
    """Zeros in the fields a policy did not say it needs."""
    fields = {"scores": "value", "rank": "rank", "weights": "weight"}
    hidden = [field for need, field in fields.items() if need not in step.policy.needs]
    if not step.policy.uses_cache:
        hidden.append("resident")
    return candidates._replace(**{name: jnp.zeros_like(getattr(candidates, name)) for name in hidden})


def facts_of(step: Step, row: Tree, k: Array, n_resident: Array) -> Row:
    """The row's facts for a policy: of the scores and of residency only what it declared."""
    n_lanes, scores = k.shape[0], "scores" in step.policy.needs
    nothing = jnp.zeros(n_lanes, jnp.float32)
    return Row(
        k=k,
        layer=_along(row["layer"], n_lanes),
        top=_along(row["top"], n_lanes) if scores else nothing,
        range=_along(row["range"], n_lanes) if scores else nothing,
        n_resident=n_resident if step.policy.uses_cache else jnp.zeros_like(n_resident),
    )


def _n_resident(step: Step, resident: Array, usable: Array) -> Array:
    """int32 `[W]`: experts in RAM, for a policy that reads scores only those of a finite one."""
    counted = resident & usable if "scores" in step.policy.needs else resident
    return counted.sum(axis=0).astype(jnp.int32)


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
