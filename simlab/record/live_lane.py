"""What the live engine calls at each stop: the replay loop's own code, one batch at a time, split where reads happen.

Arrays lie in memory that stays, and calls take its addresses: numba would else unpack all of them at every call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simlab.policy import find_eviction
from simlab.policy_check import wrong_value
from simlab.replay.cache_loop import BATCH_POSITION, PASS_POSITION, POSITION, WRONG_AT, close_batch
from simlab.replay.choose import drop_slots, kept_weights, reroute
from simlab.replay.compiled import Pinned, loop, no_choice, no_close, no_key, no_touch, no_update, ref_at
from simlab.replay.lanes import as_rows, make_lane, setting_of
from simlab.replay.loop import Functions, Lane, Room, Rows, Setting, look_up, make_room
from simlab.types import EvictionPolicy, ResolvedBudget, RoutingPolicy


def empty_rows(n_expert: int, k: int) -> Rows:
    """One row's columns, to be filled in."""
    one = np.zeros(1)
    experts = np.zeros((1, n_expert))
    columns = {
        "layer": one, "decode": one + 1, "counted": one + 1, "batch": one, "router": np.zeros((1, k)),
        "value": experts, "finite": one, "top": one, "range": one, "rank": experts, "mass_before": experts,
        "numerator": experts,
    }  # fmt: skip
    return as_rows({name: values.copy() for name, values in columns.items()})


def _example() -> tuple[Functions, Setting, Rows, Lane, Room]:
    budget, lru, sizes = ResolvedBudget(1, (1,), per_layer=False), find_eviction("lru"), np.ones(1, np.int64)
    setting = setting_of(
        (),
        lru,
        budget,
        n_expert=1,
        k=1,
        n_used=1,
        scores=True,
        weights=None,
        weight_rule=None,
        sequential=True,
    )
    functions = Functions(no_choice, no_update, no_choice, no_update, no_touch, no_key, no_close)
    return (
        functions,
        setting,
        empty_rows(1, 1),
        make_lane(setting, (), lru, {}, budget, sizes, {}),
        make_room(setting),
    )


_FUNCTIONS, _SETTING, _ROWS, _LANE, _ROOM = map(ref_at, _example())


class Stage:
    """A setting's parts at addresses that stay."""

    def __init__(self, functions: Functions, setting: Setting, rows: Rows, lane: Lane) -> None:
        self.rows, self.lane, self.room, self.setting = rows, lane, make_room(setting), setting
        self._pinned = [Pinned(part) for part in (functions, setting, rows, lane, self.room)]
        self.addresses = tuple(pinned.address for pinned in self._pinned)


def check_lane(stage: Stage, layer: int, policy: RoutingPolicy | EvictionPolicy) -> None:
    """Refuse a value of the lane's policy that is none.

    Raises:
        WrongValueError: there was one in this batch.
    """
    if (at := int(stage.lane.numbers[WRONG_AT])) == -1:
        return
    of_layer, expert = divmod(-2 - at, stage.setting.n_expert)
    of = f"expert {at}" if at >= 0 else f"expert {expert} of MoE layer {of_layer}"
    raise wrong_value(policy, of, f"MoE layer {layer}")


@loop
def fill_row(rows_at: int, scores: Any, wide: Any, is_log: bool) -> None:
    """A row's ranking values and what is known of them; `wide` float64 holds their logarithms, if they are some.

    The same numbers as `simlab.scores` gives.
    """
    rows = _ROWS(rows_at)
    top, low, finite = np.float32(-np.inf), np.float32(np.inf), True
    for i in range(scores.shape[0]):
        value = np.float32(wide[i]) if is_log else scores[i]
        # Adding zero turns -0.0 into 0.0.
        value = np.float32(-np.inf) if value != value else value + np.float32(0)
        rows.value[0, i] = value
        if np.isfinite(value):
            top, low = max(top, value), min(low, value)
        else:
            finite = False
    rows.finite[0] = finite
    rows.top[0] = top if top >= low else np.float32(0)
    rows.range[0] = top - low if top >= low else np.float32(0)


@loop
def reroute_row(addresses: Any, layer: int, resident: Any, router: Any, experts: Any) -> Any:
    """`choose.reroute` of the filled row."""
    functions, s, rows = _FUNCTIONS(addresses[0]), _SETTING(addresses[1]), _ROWS(addresses[2])
    rows.layer[0] = layer
    return reroute(
        functions.choose, functions.update, s, rows, 0, _LANE(addresses[3]), resident, router, experts,
        _ROOM(addresses[4]),
    )  # fmt: skip


@loop
def drop_row(
    addresses: Any,
    layer: int,
    decode: bool,
    resident: Any,
    experts: Any,
    weights: Any,
    dropped: Any,
    walk: Any,
    applied: Any,
) -> int:
    """`choose.drop_slots` of the filled row: `dropped`, `walk`, `applied` `[K]`; how many, -1 where a weight is NaN."""
    functions, s, rows = _FUNCTIONS(addresses[0]), _SETTING(addresses[1]), _ROWS(addresses[2])
    for slot in range(weights.shape[0]):
        if np.isnan(weights[slot]):
            return -1
    rows.layer[0], rows.decode[0] = layer, decode
    n = drop_slots(
        functions.drop, functions.drop_update, s, rows, 0, _LANE(addresses[3]), resident, experts, weights, dropped,
        walk, _ROOM(addresses[4]),
    )  # fmt: skip
    kept_weights(s, experts, weights, dropped, applied)
    return n


@loop
def run_batch(
    addresses: Any,
    layer: int,
    begins: bool,
    number: int,
    walk: Any,
    dropped: Any,
    weights: Any,
    misses: Any,
    charged: Any,
) -> Any:
    """Look a batch up, insert and evict.

    Args:
        begins: whether a pass over the layers begins. walk, dropped, weights: `[rows, k]`.
        misses: room for experts. charged: room for the (row, slot) of every read.

    Returns:
        Lookups, misses, reads, evictions.
    """
    functions, s, rows = _FUNCTIONS(addresses[0]), _SETTING(addresses[1]), _ROWS(addresses[2])
    lane, room = _LANE(addresses[3]), _ROOM(addresses[4])
    base, numbers, n, n_misses, n_charged = layer * s.n_expert, lane.numbers, 0, 0, 0
    if begins:
        numbers[PASS_POSITION] = numbers[POSITION]
    numbers[BATCH_POSITION] = numbers[POSITION]
    rows.batch[0] = number
    for r in range(walk.shape[0]):
        for slot in range(walk.shape[1]):
            room.walk[slot] = room.experts[slot] = walk[r, slot]
            room.dropped[slot], room.kept[slot] = dropped[r, slot], weights[r, slot]
            room.first[slot] = False
        before = n
        n = look_up(functions.touch, s, rows, 0, lane, base, 0, walk.shape[1], n, room)
        for i in range(before, n):
            if not room.hits[i]:
                misses[n_misses] = room.batch[i] - base
                n_misses += 1
        for slot in range(walk.shape[1]):
            if walk[r, slot] < 0 or dropped[r, slot]:
                continue
            for i in range(n):
                if room.batch[i] == base + walk[r, slot] and not room.hits[i]:
                    known = False
                    for j in range(n_charged):
                        known |= walk[charged[j, 0], charged[j, 1]] == walk[r, slot]
                    if not known:
                        charged[n_charged, 0], charged[n_charged, 1] = r, slot
                        n_charged += 1
    n_evicted = close_batch(
        functions.key, functions.close, s, lane, layer, room.batch[:n], room.hits[:n], number
    )
    return n, n_misses, n_charged, n_evicted
