"""Settings as lanes of the compiled loop: their state as arrays, and rows as the loop reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.learning import LearnedArrays
from simlab.policy_check import policy_error
from simlab.queues import CHAINS, LINES, NONE
from simlab.replay import compiled
from simlab.replay.cache_loop import COLDEST, DYNAMIC, N_NUMBERS, NAN_ROW, QUEUE, STATIC, WRONG_AT, WRONG_ROW
from simlab.replay.choose import (
    ALL,
    BY_RANKING,
    BY_VALUE,
    FROM_SCORES,
    NO_REROUTE,
    NO_WEIGHTS,
    RECORDED,
    RERANK,
    SWAP,
)  # fmt: skip
from simlab.replay.loop import Detail, Functions, Lane, Rows, Setting
from simlab.types import EvictionPolicy, Knob, ResolvedBudget, Route, RoutingPolicy, Step, WeightRule

NO_ROW = np.iinfo(np.int64).max
"""In `NAN_ROW`: no row so far."""
KEPT = (
    "numbers", "stamp", "resident", "marks", "any_marks", "missed", "used", "n_in_layer", "n_held", "members",
    "spot", "keys", "places", "entries", "heads", "counts", "is_heap", "older", "newer", "line", "held", "lengths",
    "route_state", "drop_state", "entry_state", "cache_state",
    "last_run", "under_way", "counters", "sums", "read_ahead",
)  # fmt: skip
"""What of a lane changes as it walks, between batches."""

_KINDS = {"static": STATIC, "dynamic": DYNAMIC, "queue": QUEUE}
_PER = {"layer": 0, "expert": 1, "pair": 2}


def setting_of(
    steps: Sequence[Step],
    eviction: EvictionPolicy,
    budget: ResolvedBudget,
    *,
    n_expert: int,
    k: int,
    n_used: int,
    scores: bool,
    weights: str | None,
    weight_rule: WeightRule | None,
    sequential: bool = False,
    given: bool = False,
    detail: bool = False,
    ahead: int = 0,
) -> Setting:
    """A setting as the numbers the loop branches on."""
    of = {step.policy.stage: step.policy for step in steps}
    reroute, drop = of.get("rerank") or of.get("swap"), of.get("drop")
    needs = reroute.needs if reroute else frozenset[str]()
    drop_needs = drop.needs if drop else frozenset[str]()
    rule = weight_rule or WeightRule()
    order = ALL
    if reroute is not None and reroute.ordered:
        order = BY_RANKING if needs & {"rank", "mass"} and reroute.stage == "rerank" else BY_VALUE
    drop_knobs = next((s.knobs for s in steps if s.policy.stage == "drop"), {})
    return Setting(
        n_expert=n_expert, n_slots=k, k=k, n_used=n_used,
        off=budget.off, per_layer=budget.per_layer, scores=scores, sequential=sequential, given=given, detail=detail,
        reroute=NO_REROUTE if reroute is None else RERANK if reroute.stage == "rerank" else SWAP,
        order=order,
        route_scores="scores" in needs, route_rank="rank" in needs, route_weights="weights" in needs,
        route_mass="mass" in needs, route_cache=reroute is not None and reroute.uses_cache,
        route_update=reroute is not None and reroute.update is not None,
        drops=drop is not None, drop_scores="scores" in drop_needs, drop_weights="weights" in drop_needs,
        drop_lighter="lighter" in drop_needs, drop_cache=drop is not None and drop.uses_cache,
        drop_update=drop is not None and drop.update is not None,
        drop_prefill=drop_knobs.get("prefill", 0) > 0, renorm=drop_knobs.get("renorm", 1) > 0,
        weights={None: NO_WEIGHTS, "scores": FROM_SCORES, "recorded": RECORDED}[weights],
        shares=rule.normalise or rule.softmax_over_selected,
        clamp=np.float32(rule.clamp_min), scale=np.float32(rule.scale),
        kind=_KINDS[eviction.kind], bypass=eviction.bypass, touches=eviction.touch is not None, ahead=ahead,
    )  # fmt: skip


def functions_of(steps: Sequence[Step], eviction: EvictionPolicy) -> Functions:
    """A setting's policies, compiled.

    Raises:
        InputError: one of them cannot be.
    """
    of = {step.policy.stage: step.policy for step in steps}
    reroute, drop = of.get("rerank") or of.get("swap"), of.get("drop")
    choose, update = _routing(reroute)
    dropping, drop_update = _routing(drop)
    try:
        decide, touch = compiled.eviction_pointers(eviction)
    except InputError:
        raise
    except BaseException as error:
        raise policy_error(eviction, error) from error
    is_queue = eviction.kind == "queue"
    return Functions(
        choose, update, dropping, drop_update,
        touch or compiled.no_touch,
        compiled.no_key if is_queue else decide,
        decide if is_queue else compiled.no_close,
    )  # fmt: skip


def _routing(policy: RoutingPolicy | None) -> tuple[Any, Any]:
    if policy is None:
        return compiled.no_choice, compiled.no_update
    try:
        choose, update = compiled.routing_pointers(policy)
    except InputError:
        raise
    except BaseException as error:
        raise policy_error(policy, error) from error
    return choose, update or compiled.no_update


def make_lane(
    setting: Setting,
    steps: Sequence[Step],
    eviction: EvictionPolicy,
    evict_knobs: Mapping[str, float],
    budget: ResolvedBudget,
    layer_bytes: NDArray[np.int64],
    learned: LearnedArrays,
    prepared: Mapping[str, NDArray[Any]] | None = None,
) -> Lane:
    """An empty cache under a setting, and zero counters.

    Args:
        learned: as `simlab.learning.learn` gives it.
        prepared: first state of an eviction policy that learns, arrays `[B, E]` by name.
    """
    n_layers, n_expert, k = len(layer_bytes), setting.n_expert, setting.n_slots
    n = n_layers * n_expert
    n_caches = n_layers if budget.per_layer else 1
    of_cache = n // n_caches
    is_queue, is_static = setting.kind == QUEUE, setting.kind == STATIC
    n_orders = n_caches if is_static else 1
    room = of_cache + of_cache // 2 + 2 * n_expert if is_static else (n if setting.kind == DYNAMIC else 1)
    links = n + n_caches * LINES if is_queue else 1
    n_links = n if is_queue else 1
    of = {step.policy.stage: step for step in steps}
    reroute, drop = of.get("rerank") or of.get("swap"), of.get("drop")
    numbers = np.zeros(N_NUMBERS, np.int64)
    numbers[COLDEST], numbers[NAN_ROW], numbers[WRONG_AT] = -1, NO_ROW, -1
    state = np.empty((n, len(eviction.state)))
    for i, (name, first) in enumerate(eviction.state.items()):
        state[:, i] = first if prepared is None else np.ravel(prepared[name])
    older = np.zeros((CHAINS, links), np.int64)
    if is_queue:
        older[:, n:] = np.arange(n, links)
    n_ahead = k if setting.ahead else 0
    return Lane(
        numbers=numbers,
        stamp=np.full(n, -1, np.int64),
        resident=np.zeros(n, bool),
        marks=np.zeros(n, bool),
        any_marks=np.zeros(1, np.int64),
        missed=np.zeros(n, bool),
        used=np.zeros(n_caches, np.int64),
        limit=np.array(budget.layer_bytes if budget.per_layer else [budget.total_bytes], np.int64),
        largest=layer_bytes.copy() if budget.per_layer else layer_bytes.max(keepdims=True),
        layer_bytes=np.array(layer_bytes, np.int64),
        layer_of=np.repeat(np.arange(n_layers, dtype=np.int32), n_expert),
        n_in_layer=np.zeros(n_layers, np.int64),
        n_held=np.zeros(n_caches, np.int64),
        members=np.zeros(n, np.int64),
        spot=np.zeros(n, np.int64),
        keys=np.empty((n_orders, room)),
        places=np.empty((n_orders, room), np.int64),
        entries=np.empty((n_orders, room), np.int32),
        heads=np.zeros(n_orders, np.int64),
        counts=np.zeros(n_orders, np.int64),
        is_heap=np.zeros(n_orders, bool),
        older=older,
        newer=older.copy(),
        line=np.full((CHAINS, n_links), NONE, np.int64),
        held=np.zeros((n_caches, LINES), np.int64),
        lengths=np.zeros((n_caches, LINES), np.int64),
        going=np.zeros(n, np.int64),
        queue_numbers=np.zeros(9, np.int64),
        victims=np.zeros(n, np.int64),
        route_state=_first(reroute, n_layers),
        drop_state=_first(drop, n_layers),
        entry_state=state,
        cache_state=np.tile(np.array(list(eviction.scalars.values()), np.float64), (n_caches, 1)),
        route_knobs=_knobs(reroute.policy.knobs, reroute.knobs) if reroute else np.zeros(1),
        drop_knobs=_knobs(drop.policy.knobs, drop.knobs) if drop else np.zeros(1),
        evict_knobs=_knobs(eviction.knobs, evict_knobs),
        route_learned=_values(learned, reroute),
        route_learned_at=_places(learned, reroute),
        drop_learned=_values(learned, drop),
        drop_learned_at=_places(learned, drop),
        frozen=np.zeros(n_expert, bool),
        last_run=np.full((n_layers, n_ahead), -1, np.int32),
        under_way=np.full((n_layers, n_ahead), -1, np.int32),
        counters=np.zeros((2, 11), np.int64),
        sums=np.zeros((2, 3)),
        read_ahead=np.zeros(4, np.int64),
    )


def _first(step: Step | None, n_layers: int) -> NDArray[np.float32]:
    values = list(step.policy.state.values()) if step is not None else []
    return np.tile(np.array(values, np.float32), (n_layers, 1))


def _knobs(knobs: Mapping[str, Knob], values: Mapping[str, float]) -> NDArray[np.float64]:
    """Knobs in float64, which holds an int32 and a float32 as they are; the adapter casts them."""
    return np.array([values.get(name, knob.default) for name, knob in knobs.items()] or [0], np.float64)


def _values(learned: LearnedArrays, step: Step | None) -> NDArray[np.float32]:
    """What a policy learned, one array after the other."""
    arrays = list(learned[step.policy.stage].values()) if step is not None else []
    return (
        np.concatenate([np.ravel(a) for a in arrays]).astype(np.float32)
        if arrays
        else np.zeros(1, np.float32)
    )


def _places(learned: LearnedArrays, step: Step | None) -> NDArray[np.int64]:
    """int64 `[n, 2]`: of each thing learned what it is per, and where it begins in `_values`."""
    if step is None or not step.policy.learns:
        return np.zeros((0, 2), np.int64)
    arrays: Mapping[str, NDArray[np.float32]] = learned[step.policy.stage]
    begins = np.cumsum([0, *(a.size for a in arrays.values())])
    return np.array(
        [[_PER[step.policy.learns[name].per], begin] for name, begin in zip(arrays, begins, strict=False)],
        np.int64,
    )


# -- rows ----------------------------------------------------------------------------------------------------

_TYPES: dict[str, tuple[Any, int]] = {
    "layer": (np.int32, 1), "decode": (np.bool_, 1), "counted": (np.bool_, 1), "batch": (np.int64, 1),
    "batch_start": (np.bool_, 1), "batch_end": (np.bool_, 1), "pass_start": (np.bool_, 1), "router": (np.int32, 2),
    "router_k": (np.int32, 1), "value": (np.float32, 2), "finite": (np.bool_, 1), "top": (np.float32, 1),
    "range": (np.float32, 1), "order": (np.uint16, 2), "ranking": (np.uint16, 2), "rank": (np.int32, 2),
    "mass": (np.float64, 2), "regret": (np.float64, 2), "mass_before": (np.float32, 2), "numerator": (np.float32, 2),
    "weight": (np.float32, 2), "speculative": (np.int32, 2), "next_position": (np.int64, 2),
    "next_batch": (np.int64, 2), "given_router": (np.int32, 2), "given_expert": (np.int32, 2),
    "given_walk": (np.int32, 2), "given_dropped": (np.bool_, 2), "given_weight": (np.float32, 2),
    "given_counts": (np.int32, 2),
}  # fmt: skip


def as_column(name: str, values: Any) -> NDArray[Any]:
    """A column as the loop takes it: of its one type, contiguous, and of memory that may be written."""
    return np.require(values, _TYPES[name][0], ["C", "W"])


_NOTHING = {name: np.zeros((0,) * n, kind) for name, (kind, n) in _TYPES.items()}


def as_rows(columns: Mapping[str, Any]) -> Rows:
    """Rows from the columns there are."""
    return Rows(
        **{name: as_column(name, columns[name]) if name in columns else _NOTHING[name] for name in _TYPES}
    )


def with_columns(rows: Rows, columns: Mapping[str, Any]) -> Rows:
    """Rows with some columns in place of what they have."""
    return rows._replace(**{name: as_column(name, values) for name, values in columns.items()})


def make_detail(n_rows: int, n_slots: int) -> Detail:
    """Room for what happens in rows."""
    shape = n_rows, n_slots
    return Detail(
        np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32),
        np.zeros(shape, bool), np.zeros(shape, np.int8), np.zeros(shape, np.int64), np.zeros((n_rows, 11), np.int64),
        np.zeros((n_rows, 3)),
    )  # fmt: skip


class Wrong(NamedTuple):
    """A policy's value that is none: NaN, or +inf made from finite input."""

    policy: RoutingPolicy | EvictionPolicy
    of: str
    row: int
    """Of the trace."""


def wrong_of(
    numbers: NDArray[np.int64], route: Route, eviction: EvictionPolicy, n_expert: int
) -> Wrong | None:
    """The first such value of a lane, by its `numbers`."""
    row, at = int(numbers[WRONG_ROW]), int(numbers[WRONG_AT])
    if at == -1:
        return None
    if at >= 0:
        assert route.reroute is not None
        return Wrong(route.reroute.policy, f"expert {at}", row)
    layer, expert = divmod(-2 - at, n_expert)
    return Wrong(eviction, f"expert {expert} of MoE layer {layer}", row)
