"""Which experts run: the routing policies on one row, in the compiled loop. Rules: engine-semantics, sections 1 and 2.

Shapes: `E` experts per layer, `K` slots. A slot that does not exist holds -1.
"""

from __future__ import annotations

import numpy as np

from simlab.replay.cache_loop import note_wrong
from simlab.replay.compiled import loop, pointer

ALL, BY_VALUE, BY_RANKING = range(3)
"""The order in which candidates are looked at: any, of falling value, of the router's ranking."""
NO_REROUTE, RERANK, SWAP = range(3)
NO_WEIGHTS, FROM_SCORES, RECORDED = range(3)
_EVERY = 8
"""Ranks after which it is asked whether any resident further down could still be taken."""


@loop
def apply_weights(s, rows, r, experts, weights):
    """The weights the matmuls would apply to `experts`, before dropping, into `weights` `[K]`; NaN if unknown.

    The sum runs in slot order in float64 and is rounded once, the division is float32, as in ggml.
    """
    n = experts.shape[0]
    if s.weights == RECORDED:
        for slot in range(n):
            weights[slot] = rows.weight[r, slot] if experts[slot] >= 0 else np.float32(0)
    elif s.weights == FROM_SCORES:
        total = 0.0
        for slot in range(n):
            weights[slot] = rows.numerator[r, experts[slot]] if experts[slot] >= 0 else np.float32(0)
            total += np.float64(weights[slot])
        if s.shares:
            whole = max(np.float32(total), s.clamp)
            for slot in range(n):
                weights[slot] = np.float32(np.float64(weights[slot]) / np.float64(whole))
        if s.scale != np.float32(1):
            for slot in range(n):
                weights[slot] = weights[slot] * s.scale
        for slot in range(n):
            if experts[slot] < 0:
                weights[slot] = np.float32(0)
    else:
        for slot in range(n):
            weights[slot] = np.float32(np.nan)


@loop
def look_up_learned(at, values, layer, n_expert, of, expert, found):
    """What a policy learned about one expert, in the place of another, into `found`."""
    for i in range(found.shape[0]):
        kind, first = at[i, 0], at[i, 1]
        if kind == 0:
            found[i] = values[first + layer]
        elif kind == 1:
            found[i] = values[first + layer * n_expert + expert]
        else:
            found[i] = values[first + (layer * n_expert + of) * n_expert + expert]


@loop
def is_in(experts, expert):
    """Whether a list of experts has one."""
    for i in range(experts.shape[0]):  # noqa: SIM110 - numba compiles no generator expressions
        if experts[i] == expert:
            return True
    return False


@loop
def _insert(best, n, size, tier, value, expert):
    """`n` candidates, best first, at most `size`, with one more among them; how many there are then."""
    tiers, values, experts = best
    if n == size:
        n -= 1
        if not (
            tier > tiers[n]
            or (tier == tiers[n] and (value > values[n] or (value == values[n] and expert < experts[n])))
        ):
            return size
    i = n
    while i > 0 and (
        tier > tiers[i - 1]
        or (
            tier == tiers[i - 1]
            and (value > values[i - 1] or (value == values[i - 1] and expert < experts[i - 1]))
        )
    ):
        tiers[i], values[i], experts[i] = tiers[i - 1], values[i - 1], experts[i - 1]
        i -= 1
    tiers[i], values[i], experts[i] = tier, value, expert
    return n + 1


@loop
def _ask(choose, s, rows, r, layer, of, expert, resident, own, facts, lane, state, learned):
    """What the rerank or swap policy says of one expert, in the place of another: value, tier or flag, active."""
    if learned.shape[0]:
        look_up_learned(lane.route_learned_at, lane.route_learned, layer, s.n_expert, of, expert, learned)
    top, span, n_resident = facts
    value, tier, active = choose(
        rows.value[r, expert] if s.route_scores else np.float32(0),
        expert,
        np.int64(rows.rank[r, expert]) if s.route_rank else 0,
        resident and s.route_cache,
        own[expert] if s.route_weights else np.float32(0),
        rows.mass_before[r, expert] if s.route_mass else np.float32(0),
        np.float32(0),
        s.k, layer, top, span, n_resident, np.float32(0),
        state, pointer(learned, 0), pointer(lane.route_knobs, 0),
    )  # fmt: skip
    if value != value or (value == np.inf and not (s.route_scores and rows.value[r, expert] == np.inf)):
        if active:
            note_wrong(lane.numbers, expert)
        value = np.float32(-np.inf)
    return value, tier, active


@loop
def reroute(choose, update, s, rows, r, lane, resident, router, experts, room):
    """Run the rerank or swap policy on a row: `experts` `[K]` from `router` `[K]`.

    Returns:
        Slots of the row if the policy examined it, and how many experts are not the router's.
    """
    layer, n_expert, n_slots = np.int64(rows.layer[r]), s.n_expert, router.shape[0]
    for slot in range(n_slots):
        experts[slot] = router[slot]
    if s.reroute == NO_REROUTE or not rows.decode[r]:
        return 0, 0
    n = 0
    for slot in range(n_slots):
        n += router[slot] >= 0
    n_resident = 0
    if s.route_cache:
        if s.sequential or (s.route_scores and not rows.finite[r]):
            for expert in range(n_expert):
                n_resident += resident[expert] and (not s.route_scores or np.isfinite(rows.value[r, expert]))
        else:
            n_resident = lane.n_in_layer[layer]
    top = rows.top[r] if s.route_scores else np.float32(0)
    span = rows.range[r] if s.route_scores else np.float32(0)
    facts = (top, span, n_resident)
    state = pointer(lane.route_state, layer * lane.route_state.shape[1])
    if s.route_update:
        update(s.k, layer, top, span, n_resident, np.float32(0), state, pointer(lane.route_knobs, 0))
    if n == 0 or s.k >= n_expert:
        return 0, 0
    own, learned = room.own, room.learned[: lane.route_learned_at.shape[0]]
    if s.route_weights:
        apply_weights(s, rows, r, router, room.weights)
        for slot in range(n_slots):
            if router[slot] >= 0:
                own[router[slot]] += room.weights[slot]
    if s.reroute == SWAP:
        found = _swap(
            choose, s, rows, r, layer, resident, router, experts, own, facts, lane, state, learned, n, room
        )
    else:
        found = _rerank(
            choose, s, rows, r, layer, resident, router, experts, own, facts, lane, state, learned, n, room
        )
    if s.route_weights:
        for slot in range(n_slots):
            if router[slot] >= 0:
                own[router[slot]] = 0
    return found


@loop
def _rerank(choose, s, rows, r, layer, resident, router, experts, own, facts, lane, state, learned, n, room):
    n_expert, best = s.n_expert, (room.tiers, room.values, room.best)
    size, n_best = min(n, n_expert), 0
    first = 0
    while router[first] < 0:
        first += 1
    e = np.int64(router[first])
    value, tier, active = _ask(choose, s, rows, r, layer, e, e, resident[e], own, facts, lane, state, learned)
    if not active:
        return 0, 0
    if s.order == ALL:
        for e in range(n_expert):
            value, tier, _ = _ask(
                choose, s, rows, r, layer, e, e, resident[e], own, facts, lane, state, learned
            )
            n_best = _insert(best, n_best, size, tier, value, e)
    else:
        seeded = s.route_rank or s.route_mass or s.route_weights
        if seeded:
            # The policy may put the router's picks anywhere.
            for slot in range(router.shape[0]):
                e = np.int64(router[slot])
                if e >= 0 and not is_in(router[:slot], e):
                    value, tier, _ = _ask(
                        choose, s, rows, r, layer, e, e, resident[e], own, facts, lane, state, learned
                    )
                    n_best = _insert(best, n_best, size, tier, value, e)
        order = rows.ranking if s.order == BY_RANKING else rows.order
        inside, outside, seen = False, False, 0
        for rank in range(n_expert):
            e = np.int64(order[r, rank])
            if resident[e]:
                seen += 1
            if (inside if resident[e] else outside) or (seeded and is_in(router, e)):
                if inside and outside:
                    break
                # With the others settled, the residents end where none of them is left, or could be taken.
                if outside and not resident[e]:
                    if seen == lane.n_in_layer[layer] and not s.sequential:
                        break
                    if rank % _EVERY == 0 and not (seeded and is_in(router, e)):
                        value, tier, _ = _ask(
                            choose, s, rows, r, layer, e, e, True, own, facts, lane, state, learned
                        )
                        if tier < room.tiers[size - 1] or (
                            tier == room.tiers[size - 1] and value < room.values[size - 1]
                        ):
                            break
                continue
            value, tier, _ = _ask(
                choose, s, rows, r, layer, e, e, resident[e], own, facts, lane, state, learned
            )
            if n_best == size and (
                tier < room.tiers[size - 1]
                or (tier == room.tiers[size - 1] and value < room.values[size - 1])
            ):
                # All further ones of its kind rank no higher.
                if resident[e]:
                    inside = True
                else:
                    outside = True
                continue
            n_best = _insert(best, n_best, size, tier, value, e)
    n_new = 0
    for i in range(n_best):
        n_new += not is_in(router, room.best[i])
    if n_new:
        at = 0
        for slot in range(router.shape[0]):
            if router[slot] >= 0:
                experts[slot] = room.best[at]
                at += 1
    return n, n_new


@loop
def _swap(choose, s, rows, r, layer, resident, router, experts, own, facts, lane, state, learned, n, room):
    n_expert, n_swapped = s.n_expert, 0
    for slot in range(router.shape[0]):
        of = np.int64(router[slot])
        if of < 0:
            continue
        _, flag, active = _ask(
            choose, s, rows, r, layer, of, of, resident[of], own, facts, lane, state, learned
        )
        if not active:
            return 0, 0
        if not flag:
            continue
        best, pick = np.float32(-np.inf), -1
        for rank in range(n_expert):
            e = np.int64(rows.order[r, rank]) if s.order == BY_VALUE else rank
            if not resident[e] or is_in(router, e) or is_in(experts[:slot], e):
                continue
            if s.scores and not np.isfinite(rows.value[r, e]):
                continue
            value, _, _ = _ask(choose, s, rows, r, layer, of, e, True, own, facts, lane, state, learned)
            if s.order == BY_VALUE and value < best:
                break
            if value > best or (value == best and pick >= 0 and e < pick):
                best, pick = value, e
        if pick >= 0:
            experts[slot] = pick
            n_swapped += 1
    return n, n_swapped


@loop
def drop_slots(choose, update, s, rows, r, lane, resident, experts, weights, dropped, walk, room):
    """Run the drop policy on a row's slots: `dropped` and `walk` `[K]`; how many were dropped.

    The first slot of the largest weight is never dropped; dropped slots are repointed to its expert.
    """
    n_slots, layer = experts.shape[0], np.int64(rows.layer[r])
    for slot in range(n_slots):
        walk[slot], dropped[slot] = experts[slot], False
    if not s.drops or not (rows.decode[r] or s.drop_prefill):
        return 0
    top, heaviest, n_resident = -1, np.float32(-np.inf), 0
    for slot in range(n_slots):
        if experts[slot] >= 0 and (top < 0 or weights[slot] > heaviest):
            top, heaviest = slot, weights[slot]
    if s.drop_cache:
        for expert in range(s.n_expert):
            n_resident += resident[expert] and (not s.drop_scores or np.isfinite(rows.value[r, expert]))
    best = rows.top[r] if s.drop_scores else np.float32(0)
    span = rows.range[r] if s.drop_scores else np.float32(0)
    given = heaviest if s.drop_weights else np.float32(0)
    state = pointer(lane.drop_state, layer * lane.drop_state.shape[1])
    learned, knobs = room.learned[: lane.drop_learned_at.shape[0]], pointer(lane.drop_knobs, 0)
    if s.drop_update:
        update(s.k, layer, best, span, n_resident, given, state, knobs)
    if top < 0:
        return 0
    n = 0
    for slot in range(n_slots):
        e = np.int64(experts[slot])
        if e < 0 or slot == top:
            continue
        if learned.shape[0]:
            look_up_learned(lane.drop_learned_at, lane.drop_learned, layer, s.n_expert, e, e, learned)
        lighter = np.float32(0)
        if s.drop_lighter:
            total = 0.0
            for other in range(n_slots):
                is_lighter = weights[other] < weights[slot] or (
                    weights[other] == weights[slot] and slot <= other
                )
                if experts[other] >= 0 and is_lighter and weights[other] > 0:
                    total += np.float64(weights[other])
            lighter = np.float32(total)
        _, flag, _ = choose(
            rows.value[r, e] if s.drop_scores and s.scores else np.float32(0),
            e, slot, resident[e] and s.drop_cache,
            weights[slot] if s.drop_weights else np.float32(0), np.float32(0), lighter,
            s.k, layer, best, span, n_resident, given,
            state, pointer(learned, 0), knobs,
        )  # fmt: skip
        if flag:
            dropped[slot] = True
            walk[slot] = experts[top]
            n += 1
    return n


@loop
def kept_weights(s, experts, weights, dropped, kept):
    """Weights applied in a row after dropping and renormalising, into `kept` `[K]`; sums in float32, in slot order."""
    total, left, any_dropped = np.float32(0), np.float32(0), False
    for slot in range(experts.shape[0]):
        weight = weights[slot] if experts[slot] >= 0 else np.float32(0)
        kept[slot] = np.float32(0) if dropped[slot] else weight
        total += weight
        left += kept[slot]
        any_dropped |= dropped[slot]
    if s.drops and s.renorm and any_dropped and left > 0:
        factor = total / left
        for slot in range(experts.shape[0]):
            kept[slot] = kept[slot] * factor


@loop
def against_router(s, rows, r, router, experts, dropped, sums):
    """Mass displaced, score regret and agreement of a row into `sums` `[3]`; exactly 0, 0, 1 if unchanged."""
    n_slots, n_router = experts.shape[0], min(s.n_used, rows.router.shape[1])
    same, changed = 0, n_slots != n_router
    for slot in range(min(n_slots, n_router)):
        changed |= dropped[slot] or experts[slot] != rows.router[r, slot]
        same += experts[slot] >= 0
    if not changed:
        sums[0], sums[1], sums[2] = 0.0, 0.0, same / max(rows.router_k[r], 1)
        return
    same = 0
    for slot in range(n_slots):
        if experts[slot] >= 0 and not dropped[slot]:
            same += is_in(rows.router[r, :n_router], experts[slot])
    sums[0], sums[1] = 0.0, 0.0
    sums[2] = same / max(rows.router_k[r], 1)
    if not s.scores:
        return
    for slot in range(max(n_router, n_slots)):
        mass, regret = 0.0, 0.0
        if slot < n_router and rows.router[r, slot] >= 0:
            mass, regret = rows.mass[r, rows.router[r, slot]], rows.regret[r, rows.router[r, slot]]
        if slot < n_slots and experts[slot] >= 0 and not dropped[slot]:
            mass -= rows.mass[r, experts[slot]]
            regret -= rows.regret[r, experts[slot]]
        sums[0] += mass
        sums[1] += regret
