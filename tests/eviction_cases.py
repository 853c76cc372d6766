"""What the tests of eviction policies share: their references, and traces run through one or the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import reference_eviction as ref
import reference_ghosts as ghosts
from reference import ReferenceCell, reference_replay
from synthetic import Synthetic, generate, make_header, without_scores

from simlab.cells import build_cells, effective_k, parse_evict, resolve_budget
from simlab.policy import find_eviction
from simlab.record.cache import LiveCache
from simlab.replay.run import Replayer
from simlab.replay.slots import slot_table
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, EvictionPolicy

SHIPPED = Path(__file__).parent.parent / "traces" / "original.trace"
ENTRIES: dict[str, Callable[..., ref.Evicter]] = {
    "lru": ref.Evicter,
    "layer_lru": ref.Evicter,
    "least_stale": ref.Evicter,
    "fifo": ref.Fifo,
    "random": ref.Random,
    "lfu": ref.Lfu,
    "layer_lfu": ref.Lfu,
    "lfu_decay": ref.LfuDecay,
    "lfru": ref.Lfru,
    "weighted_lfu": ref.WeightedLfu,
}
"""References of policies that rank entries, by name; they take the knobs."""
CACHES: dict[str, Callable[..., ref.Evicter]] = {
    "clock": ref.SecondChance,
    "sieve": ref.Sieve,
    "slru": ref.Slru,
    "two_q": ghosts.TwoQ,
    "s3fifo": ghosts.S3Fifo,
    "arc": ghosts.Arc,
    "lirs": ghosts.Lirs,
    "wtinylfu": ghosts.WTinyLfu,
    "gdsf": ghosts.Gdsf,
}
"""The same of policies that look at a whole cache."""
SEERS: dict[str, Callable[..., ref.Evicter]] = {
    "belady": ref.Foresight,
    "belady_bypass": ref.ForesightBypass,
    "lookahead": ref.LookAhead,
}
"""The same of those that know the future; they take the walk first."""
WITH_KNOBS = (
    "random:seed=7",
    "lfu_decay:half_life=48",
    "two_q:first=0.5,ghosts=0.9",
    "s3fifo:first=0.3,ghosts=3",
    "lirs:hir=0.4,ghosts=0.3",
    "wtinylfu:window=0.3,sample=2",
)
CAUSAL = (*(name for name in {**ENTRIES, **CACHES} if name != "lfu_decay"), *WITH_KNOBS)
FUTURE = ("belady", "belady_bypass", "lookahead:m=9", "lookahead:m=0")


def of_name(name: str) -> EvictionPolicy:
    """The policy of a SPEC."""
    return find_eviction(name.partition(":")[0])


def evicter_of(evict: str, trace: Synthetic, k: int) -> ref.Evicter:
    """A fresh reference of a policy; one that knows the future knows the router's own."""
    name, knobs = parse_evict(evict)
    if name in SEERS:
        return SEERS[name](walk_of(trace, k), **knobs)
    if name in CACHES:
        return ref.PerCache(functools.partial(CACHES[name], **knobs))
    return ENTRIES[name](**knobs)


def walk_of(trace: Synthetic, k: int) -> list[tuple[ref.Entry, int]]:
    """Each slot's entry and the number of its batch, in execution order."""
    layers = sorted(trace.header.entry_bytes)
    walk: list[tuple[ref.Entry, int]] = []
    batch, here = -1, None
    for row in trace.rows:
        if (row["graph"], row["layer"]) != here:
            batch, here = batch + 1, (row["graph"], row["layer"])
        at = layers.index(row["layer"])
        walk += [((at, e), batch) for e in row["router_experts"][:k] if e >= 0]
    return walk


def as_reference(cell: Cell, trace: Synthetic, evict: str) -> ReferenceCell:
    """A cell as the reference takes it."""
    k = effective_k(cell.route, trace.header)
    budget = resolve_budget(cell.budget, cell.scope, trace.header, k)
    return ReferenceCell(
        k=k,
        total_bytes=budget.total_bytes,
        layer_bytes=budget.layer_bytes if budget.per_layer else None,
        off=budget.off,
        margin=cell.margin,
        evicter=evicter_of(evict, trace, k),
        sequential=cell.sequential,
    )


def assert_evicts_as_reference(
    trace: Synthetic, evicts: Sequence[str], budgets: list[str], folder: Path, **options: Any
) -> None:
    """Every slot's residency and read, and every count, as the reference has them, by the loop and by the scan."""
    routes = [options.pop("route", "original")]
    cells, specs = [], []
    for evict in evicts:
        cells += build_cells(budgets=budgets, evicts=[evict], routes=routes, **options)
        specs += [evict] * len(budgets)
    written, some = trace.write(folder), 0
    for backend in ("loop",) if of_name(evicts[0]).kind == "queue" else ("loop", "jax"):
        some += _compared(written, trace, cells, specs, backend)
    assert some > 0


def _compared(
    written: Trace, trace: Synthetic, cells: Sequence[Cell], specs: Sequence[str], backend: Any
) -> int:
    """Evictions of all cells, once everything was found equal."""
    replayer = Replayer(written, cells, detail=True, backend=backend)
    while replayer.advance():
        pass
    some = 0
    for index, (cell, evict, numbers) in enumerate(zip(cells, specs, replayer.numbers(), strict=True)):
        golden = reference_replay(trace, as_reference(cell, trace, evict))
        table = slot_table(replayer, index)
        what = f"{backend} {evict} {cell.budget.text}"
        for name in ("expert", "residency", "read_bytes"):
            want, have = [s[name] for s in golden.slots], table[name].to_list()
            wrong = [i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
            assert not wrong, (
                f"{what}: {name} of slot {wrong[0]} is {have[wrong[0]]}, {golden.slots[wrong[0]]}"
            )
        for name in ("lookups", "hits", "misses", "cold_misses", "evictions", "rereads"):
            want = getattr(golden.decode, name) + getattr(golden.prefill, name)
            assert getattr(numbers.all, name) == want, f"{what}: {name}"
            assert getattr(numbers.decode, name) == getattr(golden.decode, name), f"{what}: {name}"
        some += numbers.all.evictions
    return some


def hits_of(trace: Synthetic, budget: str, evict: str) -> list[bool]:
    """Per slot, whether it was resident; by the reference."""
    cell = build_cells(budgets=[budget], evicts=[evict])[0]
    return [bool(s["residency"]) for s in reference_replay(trace, as_reference(cell, trace, evict)).slots]


def lookup_hits(trace: Synthetic, budget: str, evict: str) -> int:
    """Lookups that hit, once per entry and batch; by the reference."""
    cell = build_cells(budgets=[budget], evicts=[evict])[0]
    golden = reference_replay(trace, as_reference(cell, trace, evict))
    return golden.decode.hits + golden.prefill.hits


def live_hits(trace: Synthetic, budget: str, evict: str) -> list[bool]:
    """Per slot, whether it was resident; by the live cache, whose promises are checked on the way."""
    cell = build_cells(budgets=[budget], evicts=[evict])[0]
    header, policy = trace.header, of_name(evict)
    k = effective_k(cell.route, header)
    sizes = np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64)
    resolved = resolve_budget(cell.budget, cell.scope, header, k)
    cache = LiveCache(sizes, header.n_expert, k, resolved, policy, parse_evict(evict)[1])
    found: list[bool] = []
    start = 0
    while start < len(trace.rows):
        here = (trace.rows[start]["graph"], trace.rows[start]["layer"])
        rows = []
        while start < len(trace.rows) and (trace.rows[start]["graph"], trace.rows[start]["layer"]) == here:
            rows.append(trace.rows[start])
            start += 1
        at = header.moe_layers.index(here[1])
        walk = np.array([row["router_experts"] for row in rows], np.int32)
        before = cache.residency(at).copy()
        found += before[walk[walk >= 0]].tolist()
        out = cache.run_batch(at, walk, None, weights_of(trace, rows, walk))
        own = set(walk[walk >= 0].tolist())
        assert out.lookups == len(own) == out.hits + len(out.misses)
        if not resolved.off:
            assert all(cache.residency(at)[list(own)])
            assert not any(layer == at and expert in own for layer, expert in out.evicted)
            assert out.bypassed == []
            used = (cache.resident.reshape(len(sizes), -1) * sizes[:, None]).sum(axis=1)
            batch_bytes = len(own) * int(sizes[at])
            if resolved.per_layer:
                assert used[at] <= max(resolved.layer_bytes[at], batch_bytes)
            else:
                assert used.sum() <= max(resolved.total_bytes, batch_bytes)
    return found


def weights_of(trace: Synthetic, rows: list[dict[str, Any]], walk: np.ndarray) -> np.ndarray:
    """float32 `[rows, k]`: the weights the router's own experts are applied with."""
    from reference import weights_of as reference_weights

    weights = np.zeros(walk.shape, np.float32)
    for at, row in enumerate(rows):
        ids = [e for e in row["router_experts"] if e >= 0]
        if row.get("scores") is not None and trace.header.weight_rule is not None:
            gates = row.get("gate_probs")
            gates = row["scores"] if gates is None else gates
            weights[at, walk[at] >= 0] = reference_weights(ids, gates, trace.header.weight_rule)
    return weights


def unequal(n_expert: int = 10, k: int = 3, n_decode: int = 30, scores: bool = True) -> Synthetic:
    """Entries of three sizes, prompts in chunks, several turns, the throw-away turn, slots that do not exist."""
    header = make_header(n_layer=3, n_expert=n_expert, k=k, sizes=(1000, 700, 1300))
    trace = generate(header, seed=5, n_decode=n_decode, n_turns=2, tokens_per_decode_graph=2, throw_away=True)
    for row in trace.rows[7::11]:
        row["router_experts"] = [*row["router_experts"][:-1], -1]
    return trace if scores else without_scores(trace, weights=False)


def shipped(n_layer: int, n_graphs: int, scores: bool = False) -> Synthetic:
    """The first layers and graphs of a trace from disk as rows in memory; without scores unless asked.

    The router's own ids do not need them.
    """
    trace = open_trace(SHIPPED)
    wanted = ["turn", "graph", "phase", "step", "layer", "pos_in_graph", "router_experts"]
    layers = trace.header.moe_layers[:n_layer]
    kept = (pl.col("graph") < n_graphs) & pl.col("layer").is_in(layers)
    rows = trace.routing.filter(kept).select(wanted + (["scores"] if scores else [])).collect().to_dicts()
    for row in rows:
        if scores:
            row["scores"] = np.array(row["scores"], np.float32)
    header = dataclasses.replace(
        trace.header,
        n_layer=n_layer,
        entry_bytes={layer: trace.header.entry_bytes[layer] for layer in layers},
        window_bytes=None,
        dense_bytes=None,
        budget=None,  # that of all layers
        budget_bytes=None,
    )
    if not scores:
        header = dataclasses.replace(header, gating=None, score_space=None, weight_rule=None)
    return Synthetic(header, rows, trace.width)
