"""An independent replay in plain Python loops, the golden values of the JAX replayer.

Written from engine-semantics, sections 1 to 3, alone: one cell, one row, one slot at a time, a dict for the
cache, numpy.float32 scalars wherever the engine computes in float32. It shares no code with the replayer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reference_eviction import Close, Evicter, Lfu, Touch
from reference_routing import DROPS, REROUTES, ReferenceRow

f32 = np.float32


@dataclass(frozen=True)
class ReferenceCell:
    """One setting; None switches a policy off."""

    k: int
    total_bytes: int = 0
    layer_bytes: tuple[int, ...] | None = None
    """Budget of each MoE layer, or None for one global budget."""
    off: bool = False
    margin: float | None = None
    drop: float | None = None
    drop_in_prefill: bool = False
    evict: str = "lru"
    evicter: Evicter | None = None
    """A policy of `reference_eviction`, fresh; None for the two that `evict` can name."""
    sequential: bool = False
    """Every slot is a batch of its own to the cache; the routing keeps to the batch."""
    routes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Policies of `reference_routing` with their knobs."""
    learned: dict[str, Any] = field(default_factory=dict)
    """By policy, what it learned of each MoE layer."""


@dataclass
class Counters:
    tokens: set[tuple[int, int]] = field(default_factory=set)
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    cold_misses: int = 0
    read_bytes: int = 0
    slots: int = 0
    reranked: int = 0
    substituted: int = 0
    dropped: int = 0
    evictions: int = 0
    rereads: int = 0
    events: int = 0
    mass: float = 0.0
    regret: float = 0.0
    agreement: float = 0.0


@dataclass
class ReferenceReplay:
    slots: list[dict[str, Any]]
    decode: Counters
    prefill: Counters


def ranking_value(score: Any, space: str) -> Any:
    score = f32(score)
    if math.isnan(score):
        return f32(-math.inf)
    if space == "raw":
        return score
    if score <= 0:
        return f32(-math.inf)
    return f32(math.log(float(score))) if math.isfinite(score) else score


def weight_numerator(gate: Any, gates: list[Any], rule: Any) -> Any:
    if not rule.softmax_over_selected:
        return f32(gate)
    top = max((g for g in gates if math.isfinite(g)), default=f32(0))
    if math.isnan(gate):
        return f32(gate)
    if not math.isfinite(gate):
        return f32(0)
    return f32(np.exp(np.float64(f32(gate) - f32(top))))


def weights_of(experts: list[int], gates: list[Any], rule: Any) -> list[Any]:
    numerators = [weight_numerator(gates[e], gates, rule) for e in experts]
    weights = list(numerators)
    if rule.normalise or rule.softmax_over_selected:
        total = f32(sum((float(n) for n in numerators), 0.0))
        total = max(total, f32(rule.clamp_min))
        weights = [f32(w / total) for w in weights]
    if rule.scale != 1.0:
        weights = [f32(w * f32(rule.scale)) for w in weights]
    return weights


def masses(scores: list[Any], gating: str) -> list[float]:
    if gating == "logits":
        finite = [float(s) for s in scores if math.isfinite(s)]
        top = max(finite, default=0.0)
        parts = [math.exp(float(s) - top) if math.isfinite(s) else 0.0 for s in scores]
    else:
        parts = [float(s) if math.isfinite(s) else 0.0 for s in scores]
    total = sum(parts)
    return [p / total if total > 0 else 0.0 for p in parts]


def router_list(recorded: list[int], values: list[Any] | None, n: int) -> list[int]:
    """The router's first n: recorded ids, then, if no slot is missing, the rest by value, then lower id."""
    listed = recorded[:n]
    if n > len(recorded) and -1 not in recorded:
        assert values is not None
        others = [e for e in range(len(values)) if e not in recorded]
        others.sort(key=lambda e: (-values[e], e))
        listed = listed + others[: n - len(recorded)]
    return [e for e in listed if e >= 0]


def reference_replay(trace: Any, cell: ReferenceCell) -> ReferenceReplay:
    """Replay `trace` (tests/synthetic.py: header and rows) under one cell."""
    header, rows = trace.header, trace.rows
    layers = sorted(header.entry_bytes)
    out = ReferenceReplay([], Counters(), Counters())
    cache: dict[tuple[int, int], int] = {}  # entry -> position of its last occurrence
    evicter = cell.evicter or {"lru": Evicter, "lfu": Lfu}[cell.evict]()
    every = [(at, e) for at in range(len(layers)) for e in range(header.n_expert)]
    sizes = {entry: header.entry_bytes[layers[entry[0]]] for entry in every}
    batch = 0
    read_before: set[tuple[int, int]] = set()
    evicted_before: set[tuple[int, int]] = set()
    states: dict[tuple[str, int], dict[str, Any]] = {}

    def close_batch(
        touched: dict[tuple[int, int], int],
        before: set[tuple[int, int]],
        layer: int,
        batch: int,
        position: int,
    ) -> list[tuple[int, int]]:
        """Insert what was missed and evict; the victims."""
        if cell.off:
            return []
        cache.update(touched)
        whole = cell.layer_bytes is None
        held = {e: p for e, p in cache.items() if whole or e[0] == layer}
        limit = cell.total_bytes if cell.layer_bytes is None else cell.layer_bytes[layer]
        used = sum(sizes[entry] for entry in held)
        victims = evicter.close(
            Close(
                cache=0 if whole else layer,
                held=held,
                touched=touched,
                hits=set(touched) & before,
                sizes={e: size for e, size in sizes.items() if whole or e[0] == layer},
                over=used - limit,
                capacity=limit,
                batch=batch,
                position=position,
            )
        )
        for victim in victims:
            del cache[victim]
            evicted_before.add(victim)
        return victims

    position = 0
    start = 0
    while start < len(rows):
        stop = start
        here = (rows[start]["graph"], rows[start]["layer"])
        while stop < len(rows) and (rows[stop]["graph"], rows[stop]["layer"]) == here:
            stop += 1
        frozen = set(cache)
        size = header.entry_bytes[here[1]]
        layer = layers.index(here[1])
        touched: dict[tuple[int, int], int] = {}

        charged: set[tuple[int, int]] = set()
        for row in rows[start:stop]:
            counters = out.decode if row["phase"] == 1 else out.prefill
            if row["turn"] < 0:
                counters = Counters()
            counters.tokens.add((row["graph"], row["pos_in_graph"]))
            scores = row.get("scores")
            values = None if scores is None else [ranking_value(s, header.score_space) for s in scores]
            gates: Any = row.get("gate_probs")
            gates = scores if gates is None else gates
            finite = [] if values is None else [v for v in values if math.isfinite(v)]
            top, bottom = (max(finite), min(finite)) if finite else (f32(0), f32(0))
            span = f32(top - bottom)
            router = router_list(list(row["router_experts"]), values, cell.k)
            resident = {e for e in range(header.n_expert) if (layer, e) in frozen}

            experts = list(router)
            if cell.margin is not None and row["phase"] == 1 and router and header.n_expert > cell.k:
                boost = f32(f32(cell.margin) * span)
                if boost > 0:
                    assert values is not None
                    boosted = [
                        f32(v + boost) if e in resident and math.isfinite(v) else v
                        for e, v in enumerate(values)
                    ]
                    picked = []
                    for _ in router:
                        best = None
                        for e, value in enumerate(boosted):
                            if e not in picked and (best is None or value > boosted[best]):
                                best = e
                        picked.append(best)
                    n_new = sum(e not in router for e in picked)
                    counters.reranked += len(router)
                    counters.substituted += n_new
                    if n_new:
                        experts = picked

            for name, knobs in cell.routes.items():
                if name not in REROUTES or row["phase"] != 1:
                    continue
                given = ReferenceRow(
                    values=values if values is not None else [f32(0)] * header.n_expert,
                    mass=masses(scores, header.gating) if scores is not None else [],
                    recorded=list(row["router_experts"]),
                    router=router,
                    weights=weights_of(router, gates, header.weight_rule) if scores is not None else [],
                    resident=resident,
                    k=cell.k,
                    knobs=knobs,
                    learned=cell.learned[name][layer] if name in cell.learned else None,
                    state=states.setdefault((name, layer), {}),
                )
                picked = REROUTES[name](given)
                if picked is not None and router and header.n_expert > cell.k:
                    n_new = sum(e not in router for e in picked)
                    counters.reranked += len(router)
                    counters.substituted += n_new
                    if n_new:
                        experts = picked

            if scores is not None and header.weight_rule is not None:
                weights = weights_of(experts, gates, header.weight_rule)
            elif row.get("weights") is not None:
                recorded = zip(row["router_experts"], row["weights"], strict=True)
                weights = [f32(w) for e, w in list(recorded)[: cell.k] if e >= 0]
            else:
                weights = [f32(math.nan)] * len(experts)

            dropped = [False] * len(experts)
            top_slot = 0
            if cell.drop is not None and experts and (row["phase"] == 1 or cell.drop_in_prefill):
                for slot, weight in enumerate(weights):
                    if weight > weights[top_slot]:
                        top_slot = slot
                threshold = f32(f32(cell.drop) / f32(cell.k))
                for slot, weight in enumerate(weights):
                    dropped[slot] = (
                        slot != top_slot and experts[slot] not in resident and bool(weight < threshold)
                    )

            for name, knobs in cell.routes.items():
                if name not in DROPS or row["phase"] != 1 or not experts:
                    continue
                top_slot = max(range(len(weights)), key=lambda s: (weights[s], -s))
                dropped = DROPS[name](
                    weights, knobs, cell.learned[name][layer] if name in cell.learned else None
                )
                dropped[top_slot] = False

            seen_in_row: dict[tuple[int, int], bool] = {}
            reads_here, resident_here = [], []
            for slot, expert in enumerate(experts):
                walked = experts[top_slot] if dropped[slot] else expert
                entry = (layer, walked)
                present = set(cache) if cell.sequential else frozen
                resident_here.append((layer, expert) in present)
                if cell.sequential:
                    touched, seen_in_row = {}, {}
                seen_in_row.setdefault(entry, entry not in touched)
                reads_here.append(entry not in touched and entry not in present)
                if entry not in touched:
                    counters.lookups += 1
                    if entry in present:
                        counters.hits += 1
                    else:
                        counters.misses += 1
                        counters.read_bytes += size
                        counters.cold_misses += entry not in read_before
                        counters.rereads += entry in evicted_before
                        read_before.add(entry)
                touched[entry] = position
                position += 1
                if cell.sequential:
                    evicter.touch(Touch(entry, touched[entry], True, entry in cache, weights[slot], batch))
                    counters.evictions += len(close_batch(touched, present, layer, batch, position))
            if not cell.sequential:
                for entry, first in seen_in_row.items():
                    weight = f32(0)
                    for slot, expert in enumerate(experts):
                        if (layer, expert) == entry and not dropped[slot]:
                            weight = f32(weight + weights[slot])
                    hit = first and entry in frozen
                    evicter.touch(Touch(entry, touched[entry], first, hit, weight, batch))
            slot_numbers = [s for s, e in enumerate(row["router_experts"][: cell.k]) if e >= 0]
            slot_numbers += range(
                len(row["router_experts"]), len(row["router_experts"]) + len(router) - len(slot_numbers)
            )
            for slot, expert in enumerate(experts):
                reads = not dropped[slot] and expert not in resident and (layer, expert) not in charged
                if reads:
                    charged.add((layer, expert))
                if cell.sequential:
                    reads = reads_here[slot]
                out.slots.append(
                    {
                        **{name: row[name] for name in ("turn", "graph", "phase", "step", "layer")},
                        "slot": slot_numbers[slot],
                        "router_expert": router[slot],
                        "expert": expert,
                        "weight": None if math.isnan(weights[slot]) else weights[slot],
                        "residency": int(resident_here[slot]),
                        "dropped": dropped[slot],
                        "read_bytes": size if reads else 0,
                    }
                )

            counters.slots += len(experts)
            counters.dropped += sum(dropped)
            runs = [e for e, d in zip(experts, dropped, strict=True) if not d]
            width = len(row["router_experts"])
            k_router = [e for e in row["router_experts"][: header.n_expert_used] if e >= 0]
            k_of_row = len(k_router)
            if header.n_expert_used > width and -1 not in row["router_experts"]:
                k_of_row = header.n_expert_used
                if values is not None:
                    k_router = router_list(list(row["router_experts"]), values, header.n_expert_used)
            if k_of_row:
                counters.events += 1
                counters.agreement += sum(e in k_router for e in runs) / k_of_row
                if scores is not None and values is not None:
                    # Weights are shares of the gate where it is a tensor of its own, and so is the probability.
                    rule = header.weight_rule
                    of_gate = "logits" if rule is not None and rule.softmax_over_selected else "softmax"
                    mass = masses(gates, header.gating if row.get("gate_probs") is None else of_gate)
                    counters.mass += math.fsum(mass[e] for e in k_router) - math.fsum(mass[e] for e in runs)
                    if span > 0:
                        unit = [float(min(max(v, bottom), top)) / float(span) for v in values]
                        counters.regret += math.fsum(unit[e] for e in k_router) - math.fsum(
                            unit[e] for e in runs
                        )

        counters = out.decode if rows[stop - 1]["phase"] == 1 else out.prefill
        if rows[stop - 1]["turn"] < 0:
            counters = Counters()
        if not cell.sequential:
            counters.evictions += len(close_batch(touched, frozen, layer, batch, position))
        batch += 1
        start = stop
    return out
