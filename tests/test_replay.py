"""The replayer against an independent plain-Python replay, slot for slot, and against hand-worked cases.

Compiling takes most of the time, so tests share trace shapes and lane counts where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import synthetic
from reference import Counters, ReferenceCell, reference_replay
from synthetic import (
    Synthetic,
    biased_sigmoid,
    from_batches,
    generate,
    make_header,
    raw_logits,
    without_scores,
)

import simlab.policy
from simlab.cells import build_cells, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.policy import eviction
from simlab.replay.run import Replayer, replay, sweep
from simlab.replay.slots import SlotReplay, by_layer, by_token, replay_slots, row_table, slot_table
from simlab.types import Cell, CellNumbers, PhaseNumbers, Scope, TraceHeader, WeightRule

f32 = np.float32
ROUTES = (
    "original",
    "substitute:L=0",
    "substitute:L=.15",
    "substitute:L=1",
    "drop_cold:F=.75",
    "drop_cold:F=1",
    "drop_cold:F=1,renorm=0,prefill=1",
    "substitute:L=.15+drop_cold:F=.75",
)
BUDGETS = ("5/layer", "40%", "1.5cycles", "2%")
"""Own entries per layer, a usual size, about one token cycle, and less than one batch needs."""


def as_reference(cell: Cell, header: TraceHeader) -> ReferenceCell:
    k = effective_k(cell.route, header)
    budget = resolve_budget(cell.budget, cell.scope, header, k)
    knobs = cell.route.knobs
    return ReferenceCell(
        k=k,
        total_bytes=budget.total_bytes,
        layer_bytes=budget.layer_bytes if budget.per_layer else None,
        off=budget.off,
        margin=cell.margin,
        drop=cell.drop,
        drop_in_prefill=bool(knobs.get("prefill", 0)),
        evict=cell.evict,
    )


def assert_counters(found: PhaseNumbers, parts: Sequence[Counters], has_scores: bool) -> None:
    for name in ("lookups", "hits", "misses", "cold_misses", "slots", "reranked", "substituted", "dropped"):
        assert getattr(found, name) == sum(getattr(p, name) for p in parts), name
    for name in ("evictions", "rereads"):
        assert getattr(found, name) == sum(getattr(p, name) for p in parts), name
    assert found.hits + found.misses == found.lookups
    assert found.cold_misses + found.capacity_misses == found.misses
    assert found.read_mib == sum(p.read_bytes for p in parts) / 2**20
    assert found.tokens == sum(len(p.tokens) for p in parts)
    events = sum(p.events for p in parts)
    means = {"mass_displaced": "mass", "score_regret": "regret", "agreement": "agreement"}
    for name, reference_name in means.items():
        value = getattr(found, name)
        if not events or (name != "agreement" and not has_scores):
            assert value is None
        else:
            assert value == pytest.approx(sum(getattr(p, reference_name) for p in parts) / events, abs=1e-9)


def assert_as_reference(
    trace: Synthetic, cells: Sequence[Cell], folder: Path
) -> tuple[list[pl.DataFrame], list[CellNumbers]]:
    """Every slot and every counter of every cell equals the reference's; returns both."""
    opened = trace.write(folder)
    replayer = Replayer(opened, cells, detail=True)
    while replayer.advance():
        pass
    tables = []
    for index, (cell, numbers) in enumerate(zip(cells, replayer.numbers(), strict=True)):
        golden = reference_replay(trace, as_reference(cell, trace.header))
        table = slot_table(replayer, index)
        tables.append(table)
        where = f"{cell.route.name} {cell.route.knobs} {cell.budget.text} {cell.scope}"
        assert table.height == len(golden.slots), where
        if golden.slots:
            for name in golden.slots[0]:
                want = [s[name] for s in golden.slots]
                have = table[name].to_list()
                if name == "weight":
                    want = [None if w is None else float(w) for w in want]
                wrong = [i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
                assert not wrong, (
                    f"{where}: {name}[{wrong[0]}] = {have[wrong[0]]}, reference {golden.slots[wrong[0]]}"
                )
        assert_counters(numbers.decode, [golden.decode], replayer.has_scores)
        assert_counters(numbers.all, [golden.decode, golden.prefill], replayer.has_scores)
    return tables, replayer.numbers()


COMBINED = tuple(f"substitute:L={L}+drop_cold:F={F}" for L, F in ((0, 0.75), (0.15, 0), (0.15, 1), (1, 1)))
"""Margins and thresholds that switch each half off, as lanes of one program."""


def grid(routes: Sequence[str] = ROUTES, budgets: Sequence[str] = BUDGETS) -> list[Cell]:
    """Every route at every budget, at one per-layer byte budget and, where the routing allows it, without cache."""
    cells = build_cells(budgets=budgets, routes=routes)
    cells += build_cells(budgets=["45%"], routes=routes, scope="per_layer")
    return cells + (build_cells(budgets=["off"]) if "original" in routes else [])


# -- families of traces, all of 3 layers x 16 experts, so that their programs are compiled once -------------


def usual() -> Synthetic:
    return generate(make_header(), seed=1)


def ties() -> Synthetic:
    return generate(make_header(), seed=2, grain=1.0)


def all_equal() -> Synthetic:
    trace = generate(make_header(), seed=3, n_decode=6)
    for row in trace.rows[::2]:
        row["scores"] = np.full(16, 1 / 16, f32)
    return trace


def several_turns() -> Synthetic:
    return generate(make_header(), seed=4, n_turns=3, n_decode=8, throw_away=True, last_layer_one_row=True)


def wide_decode() -> Synthetic:
    return generate(make_header(), seed=5, tokens_per_decode_graph=4, n_decode=10)


def no_decode() -> Synthetic:
    return generate(make_header(), seed=6, n_decode=0)


def no_rows() -> Synthetic:
    return Synthetic(make_header(), [], 4)


def unequal_sizes() -> Synthetic:
    return generate(make_header(sizes=(1000, 1700, 333), first_layer=2), seed=7)


def beyond_int32() -> Synthetic:
    """Entries of more than 2^31 bytes; the totals pass 2^36."""
    return generate(make_header(sizes=(2**31 + 5, 2**32 - 1, 2**31 + 7)), seed=8)


def holes_and_repeats() -> Synthetic:
    trace = generate(make_header(), seed=9, tokens_per_decode_graph=2, n_decode=15)
    rng = np.random.default_rng(9)
    for row in trace.rows:
        ids = row["router_experts"]
        case = rng.integers(6)
        if case == 0:
            ids[3] = -1
        elif case == 1:
            ids[1] = -1
        elif case == 2:
            ids[:] = [-1] * 4
        elif case == 3:
            ids[2] = ids[0]
    return trace


def zero_and_nan_probabilities() -> Synthetic:
    """Scores of 0 (ranking value -inf) and NaN, none of them picked by the router."""
    trace = generate(make_header(), seed=10)
    rng = np.random.default_rng(10)
    for row in trace.rows:
        outside = [e for e in range(16) if e not in row["router_experts"]]
        row["scores"][rng.choice(outside, 3)] = 0
        row["scores"][rng.choice(outside, 2)] = np.nan
    return trace


def two_finite() -> Synthetic:
    """Fewer finite scores than slots: experts of ranking value -inf fill up, lowest id first."""
    trace = generate(make_header(), seed=11, n_decode=8)
    for row in trace.rows:
        keep = row["router_experts"][:2]
        row["scores"] = np.where(np.isin(np.arange(16), keep), row["scores"], f32(0))
        row["router_experts"] = keep + [e for e in range(16) if e not in keep][:2]
    return trace


SOFTMAX_FAMILIES = [
    pytest.param(usual, marks=pytest.mark.slow),  # the first, and so the one that compiles
    ties, all_equal, several_turns, wide_decode, no_decode, no_rows, unequal_sizes, beyond_int32,
    holes_and_repeats, zero_and_nan_probabilities, two_finite,
]  # fmt: skip


@pytest.mark.parametrize("family", SOFTMAX_FAMILIES)
def test_softmax_router_as_reference(family, tmp_path):
    assert_as_reference(family(), grid(), tmp_path / "t")


def test_biased_sigmoid_router_as_reference(tmp_path):
    """Selection by biased, masked scores with infinities, weights from the gate, clamped and scaled."""
    rule = WeightRule(clamp_min=0.8, scale=2.5)
    trace = generate(make_header(gating="sigmoid", space="raw", rule=rule), seed=12, scorer=biased_sigmoid)
    rng = np.random.default_rng(12)
    for row in trace.rows:
        row["scores"][rng.choice(16, 4, replace=False)] = -np.inf
        if rng.random() < 0.3:
            row["scores"][rng.integers(16)] = np.inf
        if rng.random() < 0.3:
            row["scores"][rng.integers(16)] = np.nan
        row["router_experts"] = synthetic.route(rng, row["scores"], 4)
    assert_as_reference(trace, grid(COMBINED), tmp_path / "t")


def test_softmax_after_top_k_as_reference(tmp_path):
    rule = WeightRule(softmax_over_selected=True, normalise=False)
    trace = generate(make_header(gating="logits", space="raw", rule=rule), seed=13, scorer=raw_logits)
    assert_as_reference(trace, grid(COMBINED), tmp_path / "t")


@pytest.mark.parametrize("recorded_width", [4, 3, 6])
def test_widths_below_and_above_the_recorded_one(recorded_width, tmp_path):
    trace = generate(make_header(), seed=14, width=recorded_width, grain=0.5)
    routes = [
        f"top_k:k={k}+substitute:L={L}+drop_cold:F={F}" for L, F in ((0, 0), (0.2, 1)) for k in (1, 3, 4, 7)
    ]
    tables, _ = assert_as_reference(trace, grid(routes, ["40%", "2%"]), tmp_path / "t")
    assert pl.concat(tables)["slot"].max() == 6


def test_no_expert_is_left_to_choose_when_all_run(tmp_path):
    trace = generate(make_header(n_expert=4), seed=15)
    _, numbers = assert_as_reference(trace, grid(COMBINED, ["40%"]), tmp_path / "t")
    assert [n.decode.reranked for n in numbers] == [0] * len(numbers)
    assert max(n.decode.dropped for n in numbers) > 0


def test_one_expert_per_token(tmp_path):
    trace = generate(make_header(k=1), seed=16)
    _, numbers = assert_as_reference(trace, grid(COMBINED, ["40%"]), tmp_path / "t")
    assert [n.all.dropped for n in numbers] == [0] * len(numbers)
    assert max((n.all.substituted or 0) for n in numbers) > 0


def test_one_layer(tmp_path):
    assert_as_reference(
        generate(make_header(n_layer=1), seed=17), grid(COMBINED, ["40%", "2%"]), tmp_path / "t"
    )


def test_cache_off(tmp_path):
    cells = grid(["original"])
    _, numbers = assert_as_reference(several_turns(), cells, tmp_path / "t")
    off = numbers[-1].all
    assert numbers[-1].cell.budget.kind == "off"
    assert (numbers[-1].budget_mib, off.hits, off.evictions, off.rereads) == (0, 0, 0, 0)
    assert off.capacity_misses > 0


def test_without_scores(tmp_path):
    """Imported traces: original routing and drops of recorded weights work, what needs scores is refused."""
    trace = without_scores(generate(make_header(), seed=19))
    cells = build_cells(budgets=["40%", "2%"], routes=["original", "drop_cold:F=1"])
    _, numbers = assert_as_reference(trace, cells, tmp_path / "t")
    assert numbers[0].all.mass_displaced is None
    for route in ("substitute:L=.1", "substitute:L=.1+drop_cold:F=1", "top_k:k=5"):
        with pytest.raises(
            InputError, match=r"/t: .*needs the router's scores.*record it with simlab record"
        ):
            sweep(tmp_path / "t", build_cells(budgets=["40%"], routes=[route]))
    with pytest.raises(InputError, match=r"drop_cold needs the weights of a narrower routing"):
        sweep(tmp_path / "t", build_cells(budgets=["40%"], routes=["top_k:k=2+drop_cold:F=1"]))


def test_without_scores_or_weights(tmp_path):
    without_scores(generate(make_header(), seed=19), weights=False).write(tmp_path / "t")
    with pytest.raises(InputError, match=r"drop_cold needs the experts' weights"):
        sweep(tmp_path / "t", build_cells(budgets=["40%"], drops=["1"]))


def test_nan_weight_is_refused(tmp_path):
    trace = without_scores(generate(make_header(), seed=19))
    row = trace.rows[20]
    row["weights"][1] = np.nan
    opened = trace.write(tmp_path / "t")
    drops = Replayer(opened, build_cells(budgets=["40%", "2%"], routes=["drop_cold:F=1"]), detail=True)
    with pytest.raises(InputError, match=f"NaN at layer {row['layer']}, step {row['step']} .row 20."):
        drops.advance()
    original = Replayer(opened, build_cells(budgets=["40%", "2%"]), detail=True)
    assert original.advance()
    assert slot_table(original, 0)["weight"].null_count() == 1


def test_nan_gate_in_scores_is_refused_by_drops(tmp_path):
    trace = generate(make_header(), seed=19)
    trace.rows[30]["scores"][trace.rows[30]["router_experts"][2]] = np.nan
    replayer = Replayer(trace.write(tmp_path / "t"), grid(ROUTES[4:7]), detail=True)
    with pytest.raises(InputError, match="a weight is NaN"):
        replayer.advance()


def test_ids_out_of_range_are_refused(tmp_path):
    trace = generate(make_header(), seed=19)
    trace.rows[5]["router_experts"][0] = 16
    trace.write(tmp_path / "t")
    with pytest.raises(InputError, match=r"ids run from 0 to 15"):
        replay(tmp_path / "t", build_cells(budgets=["40%"])[0])


def test_more_experts_than_the_model_has(tmp_path):
    usual().write(tmp_path / "t")
    with pytest.raises(InputError, match="17 experts per token"):
        replay(tmp_path / "t", build_cells(budgets=["40%"], top_ks=["17"])[0])


# -- hand-worked ---------------------------------------------------------------------------------------------


def test_conformance_case_of_the_policies(tmp_path):
    """policies.md: per-layer scope, capacity 2, batches {0,1} {0,2} {0,1} {0,3} {0,1} at each of 3 layers.

    Per layer: 0 and 1 miss, then 0 hits and the other of each batch misses and evicts its predecessor.
    """
    header = make_header(n_expert=4, k=2, gating=None, space=None, rule=None)
    from_batches(header, [(0, 1), (0, 2), (0, 1), (0, 3), (0, 1)]).write(tmp_path / "t")
    scopes: tuple[Scope, ...] = ("global", "per_layer")
    for scope in scopes:
        numbers = replay(tmp_path / "t", build_cells(budgets=["2/layer"], scope=scope)[0]).decode
        assert (numbers.lookups, numbers.hits, numbers.misses, numbers.evictions) == (30, 12, 18, 12)
        assert (numbers.cold_misses, numbers.capacity_misses, numbers.rereads) == (12, 6, 6)


def test_substitution_by_hand(tmp_path):
    """One layer, four experts, top 2, raw scores, room for two entries.

    token 0: scores  4  3  1  0  router 0 1; nothing resident: reads 0 and 1.
    token 1: scores  4  1  3  0  router 0 2; 0, 1 resident, range 4. At L = 0.5 the boost is 2: 6, 3, 3, 0;
             1 ties with 2 and wins by its lower id: runs 0 1, both resident. One slot substituted.
    token 2: scores  0  1  3  4  router 3 2; boost 2: 2, 3, 3, 4 -> 3, then 1 by the tie: reads 3; 1 resident.
             The cache holds 0, 1, 3: 0 is least recent and leaves.
    At L = 0.25 the boost is 1: token 1 keeps 0 2 and reads 2, evicting 1. Token 2, with 0 and 2 resident:
             1, 1, 4, 4 -> the router's set {2, 3}: its order 3 2 stands, 2 hits, 3 is read, 0 leaves.
    """
    header = make_header(n_layer=1, n_expert=4, k=2, gating="logits", space="raw", sizes=(10,))
    scores = [(4, 3, 1, 0), (4, 1, 3, 0), (0, 1, 3, 4)]
    routed = [(0, 1), (0, 2), (3, 2)]
    rows = [
        {"turn": 0, "graph": g, "phase": 1, "step": g, "layer": 0, "pos_in_graph": 0,
         "scores": np.array(s, f32), "router_experts": list(r)}
        for g, (s, r) in enumerate(zip(scores, routed, strict=True))
    ]  # fmt: skip
    trace = Synthetic(header, rows, 2).write(tmp_path / "t")
    half, quarter = build_cells(budgets=["2/layer"], margins=["0.5", "0.25"])

    found = replay_slots(trace, half)
    assert found.slots.columns == [
        "turn", "graph", "phase", "step", "layer", "slot", "router_expert", "expert", "weight", "residency",
        "dropped", "read_bytes",
    ]  # fmt: skip
    assert found.slots["expert"].to_list() == [0, 1, 0, 1, 3, 1]
    assert found.slots["residency"].to_list() == [0, 0, 1, 1, 0, 1]
    assert found.slots["read_bytes"].to_list() == [10, 10, 0, 0, 10, 0]
    d = found.numbers.decode
    assert (d.reranked, d.substituted, d.hits, d.misses, d.evictions) == (6, 2, 3, 3, 1)
    # Ranking values lost in ranges of 3, 4, 4 wide: nothing; 2 -> 1 loses (3 - 1) / 4; the same again.
    assert d.score_regret == pytest.approx((0 + 0.5 + 0.5) / 3)
    assert d.agreement == pytest.approx((1 + 0.5 + 0.5) / 3)

    found = replay_slots(trace, quarter)
    assert found.slots["expert"].to_list() == [0, 1, 0, 2, 3, 2]
    assert found.slots["residency"].to_list() == [0, 0, 1, 0, 0, 1]
    d = found.numbers.decode
    assert (d.reranked, d.substituted, d.hits, d.misses, d.evictions) == (6, 0, 2, 4, 2)
    assert d.mass_displaced == 0.0
    assert d.agreement == 1.0


def test_global_lru_cliff(tmp_path):
    """Section 3: a global LRU hits nothing in decode at a token cycle minus k entries; at a cycle it does."""
    trace = generate(make_header(), seed=20, n_prefill=0, n_decode=40).write(tmp_path / "t")
    cycle, k = 12, 4
    budgets = [f"{n * 1000 / 2**20}MiB" for n in (cycle - k, cycle, 2 * cycle, 4 * cycle)]
    hits = [n.decode.hits for n in sweep(trace, build_cells(budgets=budgets))]
    assert hits[0] == 0 < hits[1] < hits[2] < hits[3]


def test_eviction_state_reaches_the_key(tmp_path, monkeypatch):
    """A least-frequently-used policy of two functions, counts surviving eviction, against the reference."""

    def count(state, access, knobs):
        return (state[0] + access.first,)

    @eviction("static", touch=count, state={"uses": 0})
    def lfu(entry, state, knobs):
        return state[0]

    known = simlab.policy.builtin_policies()
    monkeypatch.setattr(simlab.policy, "builtin_policies", lambda: {**known, "lfu": lfu})
    cells = build_cells(budgets=BUDGETS, routes=["drop_cold:F=0", "drop_cold:F=1"], evicts=["lfu"])
    assert_as_reference(holes_and_repeats(), cells, tmp_path / "t")


# -- views, order, resuming ----------------------------------------------------------------------------------


def test_by_layer_and_by_token_add_up(tmp_path):
    trace = several_turns().write(tmp_path / "t")
    replayer = Replayer(trace, grid(ROUTES[-1:]), detail=True)
    replayer.advance(trace.n_rows)
    found = SlotReplay(replayer.numbers()[1], slot_table(replayer, 1), row_table(replayer, 1))
    d = found.numbers.decode
    assert min((d.substituted or 0), d.dropped, d.evictions) > 0
    for table, n in ((by_layer(found), 3), (by_token(found), d.tokens)):
        assert table.height == n
        for name in ("lookups", "hits", "misses", "cold_misses", "capacity_misses", "slots", "reranked",
                     "substituted", "dropped", "evictions", "rereads"):  # fmt: skip
            assert table[name].sum() == getattr(d, name), name
        assert table["read_mib"].sum() == pytest.approx(d.read_mib)
        for name in ("mass_displaced", "score_regret", "agreement"):
            weighted = np.average(table[name].to_numpy(), weights=table["events"].to_numpy())
            assert weighted == pytest.approx(getattr(d, name)), name
    decode = found.slots.filter(pl.col("phase") == 1)
    assert decode["read_bytes"].sum() / 2**20 == d.read_mib
    assert decode["dropped"].sum() == d.dropped
    assert by_layer(found)["layer"].to_list() == [0, 1, 2]


def turns() -> list[Cell]:
    """Two groups that take turns."""
    return build_cells(budgets=["40%", "5/layer", "50%"], routes=["substitute:L=.15"])


def test_sweep_keeps_the_order_and_equals_single_replays(tmp_path):
    trace = usual().write(tmp_path / "t")
    cells = turns()
    shares: list[float] = []
    together = sweep(trace, cells, progress=shares.append)
    assert shares[-1] == 1.0
    assert [n.cell for n in together] == cells
    for cell, numbers in zip(cells[:2], together[:2], strict=True):
        assert replay(trace, cell) == numbers
    assert together[0].budget_mib == pytest.approx(0.4 * 48 * 1000 / 2**20, rel=1e-3)
    assert together[0].budget_cycles == pytest.approx(0.4 * 48 / 12)
    assert together[0].top_k == 4


@pytest.mark.parametrize("stop", [1, 24, 25, 60])
def test_resuming_gives_the_same(stop, tmp_path):
    trace = several_turns().write(tmp_path / "t")
    cells = grid(ROUTES[-1:])
    whole = Replayer(trace, cells, detail=True)
    whole.advance(trace.n_rows)
    first = Replayer(trace, cells, detail=True)
    first.advance(stop)
    np.savez(tmp_path / "state.npz", allow_pickle=False, **first.state())
    with np.load(tmp_path / "state.npz") as saved:
        second = Replayer.from_state(trace, cells, dict(saved), detail=True)
    while second.advance(37):
        pass
    assert second.numbers() == whole.numbers()
    for index in range(len(cells)):
        for table in (row_table, slot_table):
            parts = pl.concat([table(first, index), table(second, index)])
            assert parts.equals(table(whole, index))


def test_a_state_of_other_cells_is_refused(tmp_path):
    trace = usual().write(tmp_path / "t")
    state = Replayer(trace, build_cells(budgets=["40%", "2%"])).state()
    with pytest.raises(InputError, match="other cells"):
        Replayer.from_state(trace, build_cells(budgets=["40%"]), state)


def test_recorded_decisions_are_not_read(tmp_path):
    """Garbage in the columns of what was executed, beside scores also in `weights`, changes nothing."""
    trace = usual()
    cells = turns()
    clean = sweep(trace.write(tmp_path / "clean"), cells)
    for row in trace.rows:
        row |= {"experts": [7] * 4, "residency": [1] * 4, "dropped": [True] * 4, "read_bytes": [1000] * 4}
        row["weights"] = np.full(4, np.nan, f32)
    assert sweep(trace.write(tmp_path / "dirty"), cells) == clean
