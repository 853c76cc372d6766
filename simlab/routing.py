"""Running a route's policies on rows: the driver shared by the live engine (NumPy) and the replayer (JAX).

Policies say what they want element by element; what needs a whole row happens here, once for both worlds:
taking the k best, comparing sets, finding the top slot, repointing dropped slots.
Rules: engine-semantics, sections 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from simlab.policy_check import attribute, policy_error
from simlab.types import Access, Array, Candidate, Entry, EvictionPolicy, Knob, Policy, Row, Step

_EXPERT_BITS = 16
_LAST_ID = (1 << _EXPERT_BITS) - 1
_NO_SLOT = -1
NO_EXPERT = 1 << _EXPERT_BITS


class Rerouted(NamedTuple):
    """What a rerank or swap step made of rows. `experts` int32 `[K, ...]`, -1 in slots that do not exist."""

    experts: Array
    reranked: Array
    """int32 `[...]`: slots of rows the policy examined."""
    substituted: Array
    """int32 `[...]`: executed experts that were not in the router's set."""
    state: Any
    wrong: Array = NO_EXPERT
    """int32 `[...]`: the first candidate whose value is none (`is_wrong`), else `NO_EXPERT`."""


class Dropped(NamedTuple):
    """What a drop step made of rows."""

    dropped: Array
    """bool `[K, ...]`."""
    walk: Array
    """int32 `[K, ...]`: expert of each slot after repointing dropped slots to the top slot's expert."""
    top_slot: Array
    """int `[...]`: the first slot of the largest weight."""
    state: Any


def knob_values(knobs: Mapping[str, Knob], values: Mapping[str, float]) -> SimpleNamespace:
    """A policy's knobs as NumPy float32 or int32 scalars, by its declarations; those not given at their defaults."""
    return SimpleNamespace(
        **{
            attribute(name): (np.int32 if knob.integer else np.float32)(values.get(name, knob.default))
            for name, knob in knobs.items()
        }
    )


def width(step: Step, k: int) -> int:
    """The k' of a width step where the model's own is `k`."""
    policy = step.policy
    try:
        return int(policy.function(np.int32(k), knob_values(policy.knobs, step.knobs)))
    except BaseException as error:
        raise policy_error(policy, error) from error


def is_wrong(xp: Any, value: Array, *given: Array) -> Array:
    """bool: where a policy's value is NaN, or +inf though nothing it was given is. -inf is legal: it masks."""
    made = value == xp.inf
    for one in given:
        made = made & ~(one == xp.inf)
    return made | (value != value)


def _first_wrong(xp: Any, choice: Any, candidate: Candidate, active: Array, n_expert: int) -> Array:
    """`Rerouted.wrong` of a choice, in rows that are `active`; ids from `n_expert` on are none."""
    wrong = is_wrong(xp, choice.value, candidate.value) & active & (candidate.expert < n_expert)
    expert = xp.where(wrong, candidate.expert, NO_EXPERT)
    return expert.min(axis=tuple(range(expert.ndim - candidate.expert.ndim + 1))).astype(xp.int32)


def decide(
    xp: Any, step: Step, candidate: Candidate, row: Row, state: dict[str, Array], knobs: SimpleNamespace
) -> tuple[Any, dict[str, Array]]:
    """What a policy makes of rows: a `Rerank` or `Swap` of the candidates' shape, or bool flags; and its new state.

    A `swap` policy's values keep a leading slot axis where what it learned has one.

    Raises:
        InputError: the policy failed, in one line that names it.
    """
    policy, shape = step.policy, candidate.value.shape
    try:
        if policy.update is not None:
            new = policy.update(row, _in_order(policy, state), knobs)
            state = {name: xp.asarray(x, dtype=xp.float32) for name, x in zip(policy.state, new, strict=True)}
        found = policy.function(candidate, row, _in_order(policy, state), knobs)
        if policy.stage == "drop":
            return xp.broadcast_to(xp.asarray(found, dtype=bool), shape), state
        value = xp.asarray(found.value, dtype=xp.float32)
        if policy.stage == "rerank":
            return found._replace(value=xp.broadcast_to(value, shape)), state
        by_slot = value.shape[:1] if value.ndim > len(shape) else ()
        replaced = xp.broadcast_to(xp.asarray(found.replace, dtype=bool), shape)
        return found._replace(value=xp.broadcast_to(value, by_slot + shape), replace=replaced), state
    except BaseException as error:
        raise policy_error(policy, error) from error


def first_state(state: Mapping[str, float], shape: tuple[int, ...]) -> dict[str, Array]:
    """Eviction state before a run: int64 where the first value is an int, else float64."""
    return {
        name: np.full(shape, value, np.int64 if isinstance(value, int) else np.float64)
        for name, value in state.items()
    }


def _in_order(policy: Policy, state: Mapping[str, Array]) -> tuple[Array, ...]:
    """State as a policy takes it; JAX gives back mappings in another order."""
    return tuple(state[name] for name in policy.state)


def eviction_key(
    xp: Any, policy: EvictionPolicy, state: dict[str, Array], entry: Entry, knobs: SimpleNamespace
) -> tuple[Array, Array]:
    """A policy's key for every entry, float64; and which are none (`is_wrong`).

    Raises:
        InputError: the policy failed, in one line that names it.
    """
    try:
        key = xp.asarray(policy.function(entry, _in_order(policy, state), knobs)).astype(xp.float64)
        key = xp.broadcast_to(key, entry.position.shape)
    except BaseException as error:
        raise policy_error(policy, error) from error
    wrong = is_wrong(xp, key, *(x for x in state.values() if xp.issubdtype(x.dtype, xp.floating)))
    return xp.where(wrong, -xp.inf, key), wrong


def touch_state(
    xp: Any, policy: EvictionPolicy, state: dict[str, Array], access: Access, knobs: SimpleNamespace
) -> dict[str, Array]:
    """The state a policy's `touch` leaves behind.

    Raises:
        InputError: the policy failed, in one line that names it.
    """
    assert policy.touch is not None
    shape = access.expert.shape
    try:
        new = policy.touch(_in_order(policy, state), access, knobs)
        return {n: xp.broadcast_to(xp.asarray(x), shape) for n, x in zip(policy.state, new, strict=True)}
    except BaseException as error:
        raise policy_error(policy, error) from error


def _sortable(xp: Any, value: Array) -> Array:
    """int64 with the order of float32 `value`: NaN and -inf lowest, both zeros equal."""
    value = xp.where(value != value, xp.float32("-inf"), value)
    value = xp.where(value == 0, xp.float32(0), value).astype(xp.float32)
    bits = value.view(xp.int32)
    return xp.where(bits < 0, bits ^ xp.int32(0x7FFFFFFF), bits).astype(xp.int64)


def selection_key(xp: Any, value: Array, tier: Array, expert: Array) -> Array:
    """Unique int64 keys whose descending order is (tier, value) descending, then expert id ascending."""
    tier_bits = (xp.zeros_like(expert) + tier).astype(xp.int64) << 32
    id_bits = _LAST_ID - expert.astype(xp.int64)
    return ((tier_bits + _sortable(xp, value)) << _EXPERT_BITS) + id_bits


def expert_of(key: Array) -> Array:
    """The expert a `selection_key` is of."""
    return _LAST_ID - (key & _LAST_ID)


def take_top(xp: Any, value: Array, tier: Array, expert: Array, n: int) -> Array:
    """The `n` candidates of largest (tier, value), descending, ties to the lower expert: int32 `[n, ...]`."""
    if isinstance(value, np.ndarray):
        ranked = np.where(value != value, np.float32("-inf"), value)
        # A tier may be bool, which has no negative.
        keys = (expert, -ranked) if isinstance(tier, int) else (expert, -ranked, np.zeros_like(expert) - tier)
        order = np.lexsort(keys, axis=0)[:n]
        return np.take_along_axis(expert, order, axis=0)
    key = selection_key(xp, value, tier, expert)
    picks = []
    for _ in range(n):
        best = xp.max(key, axis=0)
        picks.append(expert_of(best))
        key = xp.where(key == best, xp.iinfo(xp.int64).min, key)
    return xp.stack(picks).astype(xp.int32)


def members(xp: Any, experts: Array, of: Array) -> Array:
    """bool `[K, ...]`: which of `experts` are among `of`; slots holding -1 are nowhere."""
    return (experts[:, None] == of[None, :]).any(axis=1) & (experts != _NO_SLOT)


def rerank(
    xp: Any,
    step: Step,
    knobs: SimpleNamespace,
    candidates: Candidate,
    row: Row,
    router: Array,
    armed: Array,
    state: Any,
    n_expert: int,
    top: Callable[..., Array] = take_top,
) -> Rerouted:
    """Run a rerank policy on rows.

    Args:
        candidates: those of the layer's `n_expert` experts that can be chosen, `[C, ...]`.
        router: int32 `[K, ...]`, the router's ids, -1 where a slot does not exist.
        armed: bool `[...]`: rows of decode graphs; elsewhere the router's ids and the state stand.
        top: what takes the best candidates, with the arguments of `take_top`.
    """
    exists = router != _NO_SLOT
    n_slots = exists.sum(axis=0).astype(xp.int32)
    choice, new_state = decide(xp, step, candidates, row, state, knobs)
    n = min(router.shape[0], candidates.value.shape[0])
    picked = top(xp, choice.value, choice.tier, candidates.expert, n)
    if n < router.shape[0]:
        picked = xp.concatenate([picked, xp.full_like(router[n:], _NO_SLOT)])
    if not (isinstance(exists, np.ndarray) and exists.all()):
        # The n-th slot that exists gets the n-th pick, wherever the holes are.
        nth = xp.maximum(xp.cumsum(exists, axis=0, dtype=xp.int32) - 1, 0)
        picked = xp.where(exists, sum(xp.where(nth == i, picked[i], 0) for i in range(len(picked))), _NO_SLOT)
    # With no expert outside the routing there is nothing to choose: declined, not counted (E <= k).
    active = armed & choice.active & (n_slots > 0) & (row.k < n_expert)
    is_new = exists & ~members(xp, picked, router)
    substituted = xp.where(active, is_new.sum(axis=0), 0).astype(xp.int32)
    experts = xp.where(substituted > 0, picked, router)
    state = {name: xp.where(armed, new_state[name], state[name]) for name in state}
    wrong = _first_wrong(xp, choice, candidates, active, n_expert)
    return Rerouted(experts, xp.where(active, n_slots, 0).astype(xp.int32), substituted, state, wrong)


def swap(
    xp: Any,
    step: Step,
    knobs: SimpleNamespace,
    candidates: Candidate,
    row: Row,
    router: Array,
    usable: Array,
    armed: Array,
    state: Any,
) -> Rerouted:
    """Run a swap policy on rows: slots in order, a flagged one goes to the best candidate left.

    Ties go to the lower expert id. A slot for which no candidate is left stays with the router's expert.

    Args:
        candidates: all experts of the layer by id, `[E, ...]`. router, armed, state: as for `rerank`.
        usable: bool `[E, ...]`: experts that may be run, those of a finite ranking value.
    """
    exists = router != _NO_SLOT
    n_slots = exists.sum(axis=0).astype(xp.int32)
    choice, new_state = decide(xp, step, candidates, row, state, knobs)
    expert, n_expert = candidates.expert, candidates.value.shape[0]
    active = armed & choice.active & (n_slots > 0) & (row.k < n_expert)
    flagged = xp.take_along_axis(choice.replace, xp.maximum(router, 0), axis=0) & exists & active
    left = candidates.resident & usable & ~(router[:, None] == expert[None]).any(axis=0)
    experts, n_swapped = [], xp.zeros_like(n_slots)
    for slot in range(router.shape[0]):
        value = choice.value[slot] if choice.value.ndim > expert.ndim else choice.value
        able = left & (value > xp.float32("-inf"))
        best = xp.where(able, value, xp.float32("-inf")).max(axis=0)
        pick = xp.where(able & (value == best), expert, n_expert).min(axis=0)
        swapped = flagged[slot] & (pick < n_expert)
        experts.append(xp.where(swapped, pick, router[slot]))
        left = left & ~(swapped & (expert == pick))
        n_swapped = n_swapped + swapped
    state = {name: xp.where(armed, new_state[name], state[name]) for name in state}
    return Rerouted(
        xp.stack(experts).astype(xp.int32),
        xp.where(active, n_slots, 0).astype(xp.int32),
        n_swapped.astype(xp.int32),
        state,
        _first_wrong(xp, choice, candidates, active, n_expert),
    )


def lighter_sums(xp: Any, weight: Array) -> Array:
    """float32 `[K, ...]`: each slot's weight and all lighter ones', of equal ones the later is lighter.

    Summed in float64 in slot order and rounded once. Slots that do not exist weigh -inf or 0 and add nothing.
    """
    finite = xp.where(weight > 0, weight, xp.float32(0)).astype(xp.float64)
    slot = xp.arange(weight.shape[0]).reshape((-1,) + (1,) * (weight.ndim - 1))
    total = xp.zeros_like(finite)
    for other in range(weight.shape[0]):
        is_lighter = (weight[other] < weight) | ((weight[other] == weight) & (slot <= other))
        total = total + xp.where(is_lighter, finite[other], 0.0)
    return total.astype(xp.float32)


def drop(
    xp: Any,
    step: Step,
    knobs: SimpleNamespace,
    slots: Candidate,
    row: Row,
    armed: Array,
    state: Any,
) -> Dropped:
    """Run a drop policy on the slots of rows; the first slot of the largest weight is never dropped.

    `slots` has shape `[K, ...]`, expert -1 where a slot does not exist; weights of such slots are ignored.
    """
    exists = slots.expert != _NO_SLOT
    weight = xp.where(exists, slots.weight, xp.float32("-inf"))
    top_slot = xp.argmax(weight, axis=0)
    slot = xp.arange(weight.shape[0]).reshape((-1,) + (1,) * (weight.ndim - 1))
    if "weights" in step.policy.needs:
        row = row._replace(heaviest=xp.take_along_axis(weight, top_slot[None], axis=0)[0])
    if "lighter" in step.policy.needs:
        slots = slots._replace(lighter=lighter_sums(xp, weight))
    choice, new_state = decide(xp, step, slots, row, state, knobs)
    dropped = choice & exists & armed & (slot != top_slot)
    top_expert = xp.take_along_axis(slots.expert, top_slot[None], axis=0)[0]
    walk = xp.where(dropped, top_expert, slots.expert)
    state = {name: xp.where(armed, new_state[name], state[name]) for name in state}
    return Dropped(dropped, walk, top_slot, state)


def drop_armed(xp: Any, step: Step, knobs: SimpleNamespace, decode: Array) -> Array:
    """Rows a drop step acts on: decode graphs, and prefill ones where its `prefill` knob asks for it."""
    if "prefill" not in step.policy.knobs:
        return decode
    return decode | (knobs.prefill > 0)
