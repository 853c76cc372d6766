"""The routing policies in the replayer, slot for slot against plain Python, and what holds for every trace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import ReferenceCell, reference_replay
from synthetic import (
    Synthetic,
    biased_sigmoid,
    from_batches,
    generate,
    make_header,
    raw_logits,
    without_scores,
)

from simlab.cells import build_cells, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.learning import learn
from simlab.policy import find_routing
from simlab.replay.run import Replayer, replay
from simlab.replay.slots import slot_table
from simlab.replay.training import load_training
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, WeightRule

TRACES = Path(__file__).parent.parent / "traces"

VALUES = {
    "cache_prior": ("lambda=0.1,J=0", "lambda=0.3,J=1", "lambda=1,J=2"),
    "max_rank": ("M=6,J=0", "M=10,J=2", "M=512,J=1"),
    "cum_prob": ("p=0.5,J=0", "p=0.9,J=2", "p=1,J=1"),
    "resident_only": ("",),
    "swap_on_miss": ("tau=0.1", "tau=0.25", "tau=10"),
    "buddy": ("n=1", "n=4", "n=512"),
    "adaptive_k": ("t=0.1", "t=0.4,sensitivity=0.7", "t=10,renorm=0"),
    "skip_ratio": ("beta=0.3", "beta=0.7", "beta=1,renorm=0"),
}
"""Knobs to try of every policy: a careful, a usual and an extreme setting."""
LEARNS = ("buddy",)


def spec(name: str, knobs: str) -> str:
    return f"{name}:{knobs}" if knobs else name


def as_reference(cell: Cell, trace: Trace, training: Any = None) -> ReferenceCell:
    header = trace.header
    k = effective_k(cell.route, header)
    budget = resolve_budget(cell.budget, cell.scope, header, k)
    learned = {}
    if training is not None:
        learned["buddy"] = training.coactivation.tolist()
    return ReferenceCell(
        k=k,
        total_bytes=budget.total_bytes,
        layer_bytes=budget.layer_bytes if budget.per_layer else None,
        off=budget.off,
        drop=cell.drop,
        evict=cell.evict,
        routes={s.policy.name: dict(s.knobs) for s in cell.route.steps},
        learned=learned,
    )


def assert_like_the_reference(rows: Synthetic, trace: Trace, cells: list[Cell], train: str | None = None):
    """Every slot and the counters of routing; returns what the cells came to."""
    replayer = Replayer(trace, cells, detail=True, train=train)
    while replayer.advance():
        pass
    for index, (cell, numbers) in enumerate(zip(cells, replayer.numbers(), strict=True)):
        golden = reference_replay(rows, as_reference(cell, trace, replayer.training))
        table = slot_table(replayer, index)
        for column in ("router_expert", "expert", "residency", "dropped", "read_bytes"):
            found, want = table[column].to_list(), [slot[column] for slot in golden.slots]
            assert found == want, (cell.route.name, dict(cell.route.knobs), cell.budget.text, column)
        if train is None:
            for name in ("reranked", "substituted", "dropped", "lookups", "hits"):
                assert getattr(numbers.decode, name) == getattr(golden.decode, name), name
    return replayer.numbers()


def cells_of(name: str, budgets: tuple[str, ...], before: str = "", after: str = "") -> list[Cell]:
    return build_cells(budgets=budgets, routes=[before + spec(name, knobs) + after for knobs in VALUES[name]])


def shipped(n_graphs: int) -> tuple[Synthetic, Trace]:
    """The first graphs of a recording of the embedded model, as rows and as a trace."""
    whole = open_trace(TRACES / "original.trace")
    wanted = ("turn", "graph", "phase", "step", "layer", "pos_in_graph", "scores", "router_experts")
    routing = whole.routing.select(wanted).collect()
    rows = routing.filter(routing["graph"] < n_graphs).to_dicts()
    return Synthetic(whole.header, rows, whole.width), whole


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_slot_for_slot_on_a_shipped_trace(name, tmp_path):
    rows, _ = shipped(60)
    trace = rows.write(tmp_path / "t")
    budgets = ("1.5cycles", "12/layer")
    numbers = assert_like_the_reference(
        rows, trace, cells_of(name, budgets), "same" if name in LEARNS else None
    )
    done = "dropped" if find_routing(name).stage == "drop" else "substituted"
    assert any(getattr(n.decode, done) > 0 for n in numbers)


KINDS = {
    "ties in wide graphs": {"grain": 0.7, "tokens_per_decode_graph": 3, "n_turns": 2, "throw_away": True},
    "one of eight": {"n_expert": 8, "k": 1, "n_layer": 1},
    "all but one": {"n_expert": 5, "k": 4},
    "bias": {"scorer": biased_sigmoid, "gating": "sigmoid", "space": "raw"},
    "logits": {
        "scorer": raw_logits,
        "gating": "logits",
        "space": "raw",
        "rule": WeightRule(softmax_over_selected=True, normalise=False),
    },
}


def made(kind: str) -> Synthetic:
    options = dict(KINDS[kind])
    sizes = {n: options.pop(n) for n in tuple(options) if n in ("n_expert", "k", "n_layer")}
    of_header = {n: options.pop(n) for n in tuple(options) if n in ("gating", "space", "rule")}
    header = make_header(
        **({"n_layer": 2, "n_expert": 12, "k": 3, "sizes": (1000, 1300)} | sizes | of_header)
    )
    return generate(header, seed=11, n_decode=20, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VALUES)
def test_slot_for_slot_on_made_up_traces(name, kind, tmp_path):
    rows = made(kind)
    trace = rows.write(tmp_path / "t")
    cells = cells_of(name, ("40%", "2%", "100%"))
    assert_like_the_reference(rows, trace, cells, "same" if name in LEARNS else None)


def with_holes_and_odd_scores() -> Synthetic:
    """NaN, infinities of both signs, rows all equal, fewer finite scores than k, slots missing."""
    header = make_header(
        n_layer=2, n_expert=9, k=3, gating="logits", space="raw", rule=WeightRule(softmax_over_selected=True)
    )
    trace = generate(header, seed=5, n_decode=40, scorer=raw_logits)
    rng = np.random.default_rng(0)
    for row in trace.rows:
        scores, odd = row["scores"], rng.integers(6)
        if odd == 0:
            scores[rng.integers(9, size=3)] = -np.inf
        elif odd == 1:
            scores[:] = 0.5
        elif odd == 2:
            scores[rng.integers(9, size=7)] = -np.inf
        elif odd == 3:
            scores[rng.integers(9)] = np.nan
        elif odd == 4:
            scores[rng.integers(9)] = np.inf
        value = np.where(np.isnan(scores), -np.inf, scores)
        row["router_experts"] = [int(e) for e in np.lexsort((rng.random(9), -value))[:3]]
        if rng.integers(5) == 0:
            row["router_experts"][int(rng.integers(3))] = -1
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in VALUES if n not in ("adaptive_k", "skip_ratio")])
def test_slot_for_slot_where_scores_are_odd(name, tmp_path):
    rows = with_holes_and_odd_scores()
    cells = cells_of(name, ("50%",))
    replayer = Replayer(
        rows.write(tmp_path / "t"), cells, detail=True, train="same" if name in LEARNS else None
    )
    while replayer.advance():
        pass
    for index, cell in enumerate(cells):
        golden = reference_replay(rows, as_reference(cell, replayer.trace, replayer.training))
        assert slot_table(replayer, index)["expert"].to_list() == [s["expert"] for s in golden.slots]


@pytest.mark.slow
def test_policies_compose_with_width_and_drop(tmp_path):
    rows = made("ties in wide graphs")
    trace = rows.write(tmp_path / "t")
    for route in ("max_rank:M=6,J=1+drop_cold:F=1", "swap_on_miss:tau=0.5+skip_ratio:beta=0.6"):
        cells = build_cells(budgets=["40%", "15%"], routes=[f"top_k:k=2+{route}"])
        assert_like_the_reference(rows, trace, cells)


# -- learning ------------------------------------------------------------------------------------------------


def test_a_buddy_by_hand(tmp_path):
    """One layer, k = 2, room for three, two buddies each: ties, and those never seen together, by id."""
    header = make_header(n_layer=1, n_expert=6, k=2)
    from_batches(header, [[0, 1], [0, 1], [0, 3], [4, 2]]).write(tmp_path / "taught")
    # 0: 1, 3.  1: 0, 2.  2: 4, 0.  3: 0, 1.  4: 2, 0.  5: 0, 1.
    batches = {
        (1, 5): [1, 5],  # nothing at hand
        (3, 4): [1, 4],  # 3: 0 is not at hand, 1 is; 4: neither 2 nor 0 is
        (0, 4): [1, 4],
        (0, 1): [0, 1],  # 1 is the router's own pick, 3 is not at hand: 0 is read, 5 leaves
        (3, 0): [1, 0],  # 0 is the router's own pick
        (2, 3): [4, 0],
        (3, 5): [0, 1],  # both want 0, the earlier slot has it
    }
    trace = from_batches(header, [list(b) for b in batches]).write(tmp_path / "t")
    cell = build_cells(budgets=["3/layer"], routes=["buddy:n=2"])[0]
    replayer = Replayer(trace, [cell], detail=True, train=str(tmp_path / "taught"))
    while replayer.advance():
        pass
    assert slot_table(replayer, 0)["expert"].to_list() == [e for run in batches.values() for e in run]
    numbers = replayer.numbers()[0]
    assert numbers.note == f"trained on {tmp_path / 'taught'}"
    assert (numbers.decode.substituted, numbers.decode.reranked) == (7, 14)


def test_a_buddy_wants_training(tmp_path):
    trace = generate(make_header(), n_decode=2).write(tmp_path / "t")
    cell = build_cells(budgets=["40%"], routes=["buddy"])[0]
    with pytest.raises(
        InputError, match="buddy learns 'place' from a part of a trace; give one with --train"
    ):
        replay(trace, cell)


def test_a_training_part_runs_and_is_not_counted(tmp_path):
    rows = generate(make_header(n_layer=2, n_expert=12, k=3), seed=2, n_decode=20)
    trace = rows.write(tmp_path / "t")
    cell = build_cells(budgets=["40%"], routes=["buddy:n=4"])[0]
    part, same = replay(trace, cell, train="25%"), replay(trace, cell, train="same")
    assert (part.decode.tokens, same.decode.tokens) == (15, 20)
    assert part.note == "trained on 25% of decode, not counted"
    assert same.note is not None
    assert same.note.startswith("diagnostic")
    assert (part.decode.substituted or 0) > 0


def test_buddies_replay_a_trace_without_scores(tmp_path):
    rows = without_scores(generate(make_header(n_layer=2, n_expert=12, k=3), seed=2, n_decode=20))
    trace = rows.write(tmp_path / "t")
    cells = cells_of("buddy", ("40%",))
    assert_like_the_reference(rows, trace, cells, "same")
    both = build_cells(budgets=["40%"], routes=["buddy+drop_cold:F=1"])[0]
    with pytest.raises(InputError, match="drop_cold needs the weights of the experts buddy picks"):
        replay(trace, both, train="same")


def test_sensitivities_are_entropies_over_their_mean(tmp_path):
    """By hand: a layer that is certain, one that wavers between two, one between four, one never seen."""
    header = make_header(n_layer=3, n_expert=4, k=2, gating="softmax", space="prob")
    shares = {0: [1, 0, 0, 0], 1: [0.5, 0.5, 0, 0], 2: [0.25] * 4}
    rows = [
        {"turn": 0, "graph": g, "phase": 1, "step": g, "layer": layer, "pos_in_graph": 0,
         "scores": np.array(p, np.float32), "router_experts": [0, 1]}
        for g in range(2) for layer, p in shares.items()
    ]  # fmt: skip
    trace = Synthetic(header, rows, 2).write(tmp_path / "t")
    training = load_training(str(tmp_path / "t"), trace.header)
    steps = build_cells(budgets=["off"], routes=["adaptive_k"])[0].route.steps
    found = learn(steps, training, 3, 4)["drop"]["sensitivity"]
    assert found.tolist() == [0, 1, 2]
    assert learn(steps, None, 3, 4)["drop"]["sensitivity"].tolist() == [1, 1, 1]


def test_policies_that_ignore_the_cache_run_without_one(tmp_path):
    rows = generate(make_header(n_layer=2, n_expert=12, k=3), seed=2, n_decode=10)
    trace = rows.write(tmp_path / "t")
    for name in ("adaptive_k", "skip_ratio"):
        cells = cells_of(name, ("off",))
        numbers = assert_like_the_reference(rows, trace, cells)
        assert numbers[1].decode.dropped > 0
        assert numbers[1].decode.hits == 0
    for name in ("buddy", "max_rank"):
        with pytest.raises(InputError, match=f"--budget off: {name} needs a cache"):
            build_cells(budgets=["off"], routes=[name])


def test_two_policies_that_choose_experts_do_not_compose():
    with pytest.raises(InputError, match=r"buddy \(swap\) both decide which experts run; give one"):
        build_cells(budgets=["40%"], routes=["substitute:L=.1+buddy"])
    with pytest.raises(InputError, match=r"--route buddy: substitute decides the swap too"):
        build_cells(budgets=["40%"], routes=["buddy"], margins=[".1"])


# -- what holds for every trace ------------------------------------------------------------------------------

HEADER = make_header(n_layer=2, n_expert=8, k=2)
IDLE = {
    "cache_prior": ("lambda=0,J=1", "lambda=1,J=2"),
    "max_rank": ("M=0,J=0", "M=512,J=2"),
    "cum_prob": ("p=0,J=0", "p=1,J=2"),
    "swap_on_miss": ("tau=0", "tau=0"),
    "buddy": ("n=0", "n=0"),
    "adaptive_k": ("t=0", "t=0"),
    "skip_ratio": ("beta=0", "beta=0"),
}

traces = st.builds(
    lambda **options: generate(HEADER, **options),
    seed=st.integers(0, 2**32 - 1),
    n_decode=st.integers(1, 20),
    tokens_per_decode_graph=st.integers(1, 2),
    grain=st.sampled_from([0.0, 0.7]),
)
few = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def run(trace: Synthetic, cells: list[Cell], name: str) -> Replayer:
    with tempfile.TemporaryDirectory() as folder:
        replayer = Replayer(
            trace.write(Path(folder) / "t"), cells, detail=True, train="same" if name in LEARNS else None
        )
        while replayer.advance():
            pass
    return replayer


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
@given(trace=traces)
@few
def test_what_holds_for_every_row(name, trace):
    cells = cells_of(name, ("20%", "60%"))
    replayer = run(trace, cells, name)
    stage = find_routing(name).stage
    for index, numbers in enumerate(replayer.numbers()):
        table = slot_table(replayer, index)
        experts = table["expert"].to_numpy().reshape(-1, 2)
        assert ((experts >= 0) & (experts < 8)).all()
        assert (experts[:, 0] != experts[:, 1]).all()
        router = table["router_expert"].to_numpy().reshape(-1, 2)
        prefill = table["phase"].to_numpy().reshape(-1, 2)[:, 0] == 0
        assert (experts[prefill] == router[prefill]).all()
        assert not table.filter(table["phase"] == 0)["dropped"].any()
        dropped = table["dropped"].to_numpy().reshape(-1, 2)
        assert not dropped.all(axis=1).any()
        for part in (numbers.decode, numbers.all):
            assert part.hits + part.misses == part.lookups
            assert (part.substituted or 0) <= part.reranked <= part.slots
            assert (part.dropped if stage != "drop" else part.substituted) == 0
        if stage == "swap":
            changed = table.filter(table["expert"] != table["router_expert"])
            assert (changed["residency"] == 1).all()
            assert changed.height == numbers.all.substituted


@pytest.mark.slow
@pytest.mark.parametrize("name", IDLE)
@given(trace=traces)
@few
def test_knobs_of_nothing_change_nothing(name, trace):
    cells = [c for k in IDLE[name] for c in build_cells(budgets=["30%"], routes=[spec(name, k)])]
    replayer = run(trace, cells, name)
    plain = run(trace, build_cells(budgets=["30%"]), "original")
    want = slot_table(plain, 0)["expert"].to_list()
    for index, numbers in enumerate(replayer.numbers()):
        table = slot_table(replayer, index)
        assert table["expert"].to_list() == want
        assert not table["dropped"].any()
        assert numbers.decode.misses == plain.numbers()[0].decode.misses
        assert numbers.all.reranked == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in VALUES if find_routing(n).stage != "drop"])
def test_a_full_cache_leaves_swaps_alone_and_reranks_the_router(name, tmp_path):
    """Everything resident: nothing is missing, and every window and mask holds the router's own best."""
    rows = generate(make_header(n_layer=1, n_expert=6, k=2), seed=8, n_prefill=60, n_decode=20)
    cells = cells_of(name, ("100%",))
    replayer = Replayer(
        rows.write(tmp_path / "t"), cells, detail=True, train="same" if name in LEARNS else None
    )
    while replayer.advance():
        pass
    for index, numbers in enumerate(replayer.numbers()):
        table = slot_table(replayer, index)
        assert numbers.decode.misses == 0
        assert table["expert"].to_list() == table["router_expert"].to_list()
