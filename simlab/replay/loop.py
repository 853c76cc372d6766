"""The replay loop: one compiled function walks one setting through rows, as an engine would run them.

It routes a row (`choose.py`), looks its experts up, and at a batch's end inserts and evicts (`cache_loop.py`). Policies
come as function pointers (`compiled.py`), so that it is compiled once for all of them. A lane is one setting's state;
lanes never need each other, so threads over lanes are all the parallelism. Residency is frozen from the first row of a
batch to its last. Rules: engine-semantics, sections 1 to 3; `scan.py` spells out the same ones as arrays.

Shapes: `R` rows, `B` MoE layers, `E` experts per layer, `N` entries, `K` slots, `C` caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simlab.replay.cache_loop import (
    BATCH_POSITION,
    NAN_ROW,
    PASS_POSITION,
    POSITION,
    ROW,
    bring_in,
    close_batch,
)
from simlab.replay.choose import against_router, apply_weights, drop_slots, kept_weights, reroute
from simlab.replay.compiled import loop, pointer, ref


class Functions(NamedTuple):
    """A setting's policies as pointers (`compiled.py`)."""

    choose: Any
    update: Any
    drop: Any
    drop_update: Any
    touch: Any
    key: Any
    close: Any


class Setting(NamedTuple):
    """What a setting is, as numbers that the loop branches on."""

    n_expert: int
    n_slots: int
    k: int
    n_used: int
    off: bool
    per_layer: bool
    scores: bool
    sequential: bool
    given: bool
    """Whether rows carry the routing, which then stands."""
    detail: bool
    reroute: int
    order: int
    route_scores: bool
    route_rank: bool
    route_weights: bool
    route_mass: bool
    route_cache: bool
    route_update: bool
    drops: bool
    drop_scores: bool
    drop_weights: bool
    drop_lighter: bool
    drop_cache: bool
    drop_update: bool
    drop_prefill: bool
    renorm: bool
    weights: int
    shares: bool
    clamp: Any
    scale: Any
    kind: int
    bypass: bool
    touches: bool
    ahead: int


class Rows(NamedTuple):
    """Columns of rows; those that no setting asks for have no rows."""

    layer: Any
    decode: Any
    counted: Any
    batch: Any
    batch_start: Any
    batch_end: Any
    pass_start: Any
    router: Any
    router_k: Any
    value: Any
    finite: Any
    top: Any
    range: Any
    order: Any
    ranking: Any
    rank: Any
    mass: Any
    regret: Any
    mass_before: Any
    numerator: Any
    weight: Any
    speculative: Any
    next_position: Any
    next_batch: Any
    given_router: Any
    given_expert: Any
    given_walk: Any
    given_dropped: Any
    given_weight: Any
    given_counts: Any
    """int32 `[R, 2]`: slots reranked, substituted."""


class Lane(NamedTuple):
    """One setting's state, and the arrays that it alone reads."""

    numbers: Any
    stamp: Any
    """int64 `[N]`: place in the walk of an entry's last occurrence, -1 before the first, below if read ahead."""
    resident: Any
    marks: Any
    """bool `[N]`: resident by speculation, and not looked up since."""
    any_marks: Any
    missed: Any
    used: Any
    limit: Any
    largest: Any
    layer_bytes: Any
    layer_of: Any
    n_in_layer: Any
    n_held: Any
    members: Any
    spot: Any
    keys: Any
    places: Any
    entries: Any
    heads: Any
    counts: Any
    is_heap: Any
    older: Any
    newer: Any
    line: Any
    held: Any
    lengths: Any
    going: Any
    queue_numbers: Any
    victims: Any
    route_state: Any
    drop_state: Any
    entry_state: Any
    cache_state: Any
    route_knobs: Any
    drop_knobs: Any
    evict_knobs: Any
    route_learned: Any
    route_learned_at: Any
    drop_learned: Any
    drop_learned_at: Any
    frozen: Any
    last_run: Any
    under_way: Any
    counters: Any
    sums: Any
    read_ahead: Any


class Room(NamedTuple):
    """Work space of one call."""

    router: Any
    experts: Any
    walk: Any
    dropped: Any
    weights: Any
    kept: Any
    first: Any
    tiers: Any
    values: Any
    best: Any
    own: Any
    learned: Any
    batch: Any
    hits: Any
    row: Any
    sums: Any


class Detail(NamedTuple):
    """What happened row by row; no rows where nobody asks."""

    router_expert: Any
    expert: Any
    walk: Any
    weight: Any
    dropped: Any
    residency: Any
    read_bytes: Any
    counters: Any
    sums: Any


LOOKUPS, HITS, MISSES, COLD, READ, SLOTS, RERANKED, SUBSTITUTED, DROPPED, EVICTIONS, REREADS = range(11)
_DONE_AT_ONCE = 64


def make_room(s: Setting) -> Room:
    """Work space for rows of a setting."""
    k, e = s.n_slots, s.n_expert
    return Room(
        np.empty(k, np.int32), np.empty(k, np.int32), np.empty(k, np.int32), np.zeros(k, np.bool_),
        np.zeros(k, np.float32), np.zeros(k, np.float32), np.zeros(k, np.bool_),
        np.empty(k, np.int64), np.empty(k, np.float32), np.empty(k, np.int64), np.zeros(e, np.float32),
        np.zeros(16, np.float32), np.empty(e, np.int64), np.empty(e, np.bool_), np.zeros(11, np.int64), np.zeros(3),
    )  # fmt: skip


@loop
def walk(functions, setting, all_rows, its_lane, work, told, start, stop, first_row):
    """Walk a lane through rows `start` to `stop`, which hold whole batches.

    Args:
        work: `make_room` of the setting. told: room for what happens, without rows where nobody asks.
        first_row: number in the trace of row 0 of `all_rows`.
    """
    s, rows, lane, room, detail = ref(setting), ref(all_rows), ref(its_lane), ref(work), ref(told)
    n_expert, numbers = s.n_expert, lane.numbers
    n_batch = 0
    for r in range(start, stop):
        layer = np.int64(rows.layer[r])
        base = layer * n_expert
        numbers[ROW] = first_row + r
        if rows.batch_start[r]:
            n_batch = 0
            numbers[BATCH_POSITION] = numbers[POSITION]
            if rows.pass_start[r]:
                numbers[PASS_POSITION] = numbers[POSITION]
            if s.ahead > 0 or rows.speculative.shape[1] > 0:
                read_ahead(functions.key, s, rows, r, lane, layer)
            if s.sequential:
                for expert in range(n_expert):
                    lane.frozen[expert] = lane.resident[base + expert]
        resident = lane.frozen if s.sequential else lane.resident[base : base + n_expert]
        count = room.row
        for i in range(count.shape[0]):
            count[i] = 0
        if s.given:
            for slot in range(s.n_slots):
                room.router[slot] = rows.given_router[r, slot]
                room.experts[slot] = rows.given_expert[r, slot]
                room.walk[slot] = rows.given_walk[r, slot]
                room.dropped[slot] = rows.given_dropped[r, slot]
                room.weights[slot] = rows.given_weight[r, slot]
                count[DROPPED] += room.dropped[slot]
            count[RERANKED], count[SUBSTITUTED] = rows.given_counts[r, 0], rows.given_counts[r, 1]
        else:
            for slot in range(s.n_slots):
                inside = slot < s.k and slot < rows.router.shape[1]
                room.router[slot] = rows.router[r, slot] if inside else -1
            count[RERANKED], count[SUBSTITUTED] = reroute(
                functions.choose,
                functions.update,
                s,
                rows,
                r,
                lane,
                resident,
                room.router,
                room.experts,
                room,
            )
            if s.weights > 0 or s.drops or s.detail:
                apply_weights(s, rows, r, room.experts, room.weights)
            count[DROPPED] = drop_slots(
                functions.drop, functions.drop_update, s, rows, r, lane, resident, room.experts, room.weights,
                room.dropped, room.walk, room,
            )  # fmt: skip
            if s.drops:
                for slot in range(s.n_slots):
                    if room.experts[slot] >= 0 and np.isnan(room.weights[slot]):
                        numbers[NAN_ROW] = min(numbers[NAN_ROW], first_row + r)
        if s.touches:
            kept_weights(s, room.experts, room.weights, room.dropped, room.kept)
        if s.detail:
            tell_slots(s, lane, detail, r, base, room)
        if s.sequential:
            for slot in range(s.n_slots):
                if room.walk[slot] < 0:
                    continue
                numbers[BATCH_POSITION] = numbers[POSITION]
                if s.detail:
                    expert = room.experts[slot]
                    detail.residency[r, slot] = lane.resident[base + expert]
                    missing = not lane.resident[base + room.walk[slot]]
                    detail.read_bytes[r, slot] = lane.layer_bytes[layer] if missing else 0
                look_up(functions.touch, s, rows, r, lane, base, slot, slot + 1, 0, room)
                count[EVICTIONS] += close_batch(
                    functions.key,
                    functions.close,
                    s,
                    lane,
                    layer,
                    room.batch[:1],
                    room.hits[:1],
                    rows.batch[r],
                )
        else:
            n_batch = look_up(functions.touch, s, rows, r, lane, base, 0, s.n_slots, n_batch, room)
            if rows.batch_end[r]:
                count[EVICTIONS] = close_batch(
                    functions.key, functions.close, s, lane, layer, room.batch[:n_batch], room.hits[:n_batch],
                    rows.batch[r],
                )  # fmt: skip
        if s.ahead > 0 and rows.decode[r] and rows.batch_end[r]:
            issue(s, lane, layer, room.walk)
        for slot in range(s.n_slots):
            count[SLOTS] += room.walk[slot] >= 0
        count[MISSES] = count[LOOKUPS] - count[HITS]
        count[READ] = count[MISSES] * lane.layer_bytes[layer]
        count[REREADS] = 0 if s.off else count[MISSES] - count[COLD]
        if rows.counted[r] or s.detail:
            against_router(s, rows, r, room.router, room.experts, room.dropped, room.sums)
        if rows.counted[r]:
            phase = np.int64(rows.decode[r])
            for i in range(11):
                lane.counters[phase, i] += count[i]
            for i in range(3):
                lane.sums[phase, i] += room.sums[i]
        if s.detail:
            for i in range(11):
                detail.counters[r, i] = count[i]
            for i in range(3):
                detail.sums[r, i] = room.sums[i]


@loop
def look_up(touch, s, rows, r, lane, base, begin, end, n_batch, room):
    """Look the slots `begin` to `end` of a row up; entries of the batch so far, those of `room.batch`."""
    stamp, count, walked, at = lane.stamp, room.row, room.walk, lane.numbers[POSITION]
    own, before, again = lane.numbers[BATCH_POSITION], at, False
    for slot in range(begin, end):
        if walked[slot] < 0:
            continue
        entry = base + walked[slot]
        room.first[slot] = stamp[entry] < own
        again |= stamp[entry] >= before
        if room.first[slot]:
            count[LOOKUPS] += 1
            hit = lane.resident[entry]
            room.batch[n_batch], room.hits[n_batch] = entry, hit
            n_batch += 1
            if hit:
                count[HITS] += 1
                if lane.marks[entry]:
                    lane.marks[entry] = False
                    lane.any_marks[0] -= 1
                    if rows.counted[r] and rows.decode[r]:
                        lane.read_ahead[1] += 1
                        lane.read_ahead[3] += lane.layer_bytes[base // s.n_expert]
            else:
                count[COLD] += not lane.missed[entry]
                lane.missed[entry] = True
        stamp[entry] = at
        at += 1
    lane.numbers[POSITION] = at
    if not s.touches:
        return n_batch
    place = before
    for slot in range(begin, end):
        if walked[slot] < 0:
            continue
        entry = base + walked[slot]
        if stamp[entry] == place:
            first, weight = room.first[slot], np.float32(0)
            following = rows.next_position[r, slot] if rows.next_position.shape[0] else 0
            its_batch = rows.next_batch[r, slot] if rows.next_batch.shape[0] else 0
            for other in range(begin, end):
                if walked[other] == walked[slot]:
                    first |= room.first[other]
                if room.experts[other] == walked[slot] and not room.dropped[other]:
                    weight += room.kept[other]
            touch(
                pointer(lane.entry_state, entry * lane.entry_state.shape[1]),
                place, first, first and lane.resident[entry], weight, rows.batch[r],
                base // s.n_expert, np.int64(walked[slot]), following, its_batch,
                pointer(lane.evict_knobs, 0),
            )  # fmt: skip
        place += 1
    return n_batch


@loop
def tell_slots(s, lane, detail, r, base, room):
    """Write a row's slots down, before they are looked up."""
    own = lane.numbers[BATCH_POSITION]
    for slot in range(s.n_slots):
        expert = room.experts[slot]
        detail.router_expert[r, slot] = room.router[slot]
        detail.expert[r, slot] = expert
        detail.walk[r, slot] = room.walk[slot]
        detail.weight[r, slot] = room.weights[slot]
        detail.dropped[r, slot] = room.dropped[slot]
        detail.residency[r, slot] = 0
        detail.read_bytes[r, slot] = 0
        if expert < 0:
            continue
        entry = base + expert
        detail.residency[r, slot] = np.int64(lane.resident[entry]) + np.int64(lane.marks[entry])
        if room.dropped[slot] or lane.resident[entry] or lane.stamp[entry] >= own:
            continue
        again = False
        for other in range(slot):
            again |= room.experts[other] == expert and not room.dropped[other]
        if not again:
            detail.read_bytes[r, slot] = lane.layer_bytes[base // s.n_expert]


@loop
def read_ahead(key, s, rows, r, lane, layer):
    """Bring in what look-ahead has read before a batch."""
    n = 0
    if s.ahead > 0:
        for slot in range(s.n_slots):
            if rows.decode[r] and lane.under_way[layer, slot] >= 0:
                n += bring_in(key, s, lane, layer, np.int64(lane.under_way[layer, slot]), rows.batch[r])
            lane.under_way[layer, slot] = -1
    else:
        for i in range(rows.speculative.shape[1]):
            if rows.speculative[r, i] >= 0:
                n += bring_in(key, s, lane, layer, np.int64(rows.speculative[r, i]), rows.batch[r])
    lane.any_marks[0] += n
    if rows.counted[r] and rows.decode[r]:
        lane.read_ahead[0] += n
        lane.read_ahead[2] += n * lane.layer_bytes[layer]


@loop
def issue(s, lane, layer, walked):
    """After a batch: remember what it ran, and issue the reads of the layers that come into reach.

    The first layer starts the whole reach, every later one adds the layer `s.ahead` further on. Of a batch of several
    tokens the last one counts as the previous token.
    """
    n_layers = lane.last_run.shape[0]
    for slot in range(s.n_slots):
        again = False
        for other in range(slot):
            again |= walked[other] == walked[slot]
        lane.last_run[layer, slot] = -1 if again else walked[slot]
    begin, end = layer + s.ahead, layer + s.ahead + 1
    if layer == 0:
        for at in range(n_layers):
            for slot in range(s.n_slots):
                lane.under_way[at, slot] = -1
        begin = 1
    for at in range(begin, min(end, n_layers)):
        for slot in range(s.n_slots):
            expert = lane.last_run[at, slot]
            missing = expert >= 0 and not lane.resident[at * s.n_expert + expert]
            lane.under_way[at, slot] = expert if missing else -1
