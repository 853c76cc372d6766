"""What the engine did, the replayer does again from scores and router ids alone: slot for slot.

Each recording is replayed under the policy and budget it ran with, from a copy in which everything that
says what was executed is blanked.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import polars as pl
import pytest
from live import TEXT, THREADS, blanked, cell_of, record, with_interval

from simlab.cells import build_cells
from simlab.judge.measure import measure
from simlab.judge.validate import planned_graphs, validate
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.replay.slots import replay_slots
from simlab.trace.store import open_trace
from simlab.types import DECODE, PREFILL

N_TOKENS = 64
ROUTES = (
    "original",
    "substitute:L=0.15",
    "substitute:L=1",
    "drop_cold:F=0.75",
    "drop_cold:F=1",
    "substitute:L=0.15+drop_cold:F=0.75",
)
BUDGETS = ("1.2cycles", "2cycles", "4cycles")
EXTRA = (
    ("0.6cycles", "substitute:L=0.15+drop_cold:F=0.75", {}),
    ("0.03cycles", "drop_cold:F=1,renorm=0,prefill=1", {}),
    ("off", "original", {}),
    ("2cycles", "substitute:L=0.15", {"scope": "per_layer"}),
    ("12/layer", "substitute:L=0.3", {}),
    ("25%", "drop_cold:F=0.75,prefill=1", {}),
)
CASES = [(b, r, {}) for b, r in itertools.product(BUDGETS, ROUTES)] + list(EXTRA)


@pytest.fixture(scope="module")
def engine():
    with Engine(n_threads=THREADS) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens(engine):
    return engine.tokenize(TEXT)[:N_TOKENS]


def assert_same_slots(trace, cell, tmp_path):
    """The replay of a blanked copy equals the recording in every slot and every counter."""
    found = replay_slots(blanked(trace, tmp_path / "blank.trace"), cell)
    recorded = trace.routing.collect()
    pairs = {
        "expert": "experts",
        "residency": "residency",
        "dropped": "dropped",
        "read_bytes": "read_bytes",
        "weight": "weights",
    }
    for replayed, column in pairs.items():
        was = recorded[column].to_numpy().reshape(-1)
        np.testing.assert_array_equal(found.slots[replayed].to_numpy(), was, err_msg=column)
    live = measure(trace, cell)
    for phase in ("decode", "all"):
        ours, theirs = (dataclasses.asdict(getattr(n, phase)) for n in (found.numbers, live))
        means = {
            name: (ours.pop(name), theirs.pop(name))
            for name in ("mass_displaced", "score_regret", "agreement")
        }
        assert ours == theirs
        for name, (a, b) in means.items():
            assert a == pytest.approx(b, abs=1e-12), name
    return found.numbers


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "route", "options"), CASES)
def test_a_recording_replays_slot_for_slot(engine, tokens, tmp_path, budget, route, options):
    cell = cell_of(budget, route, **options)
    trace = record(engine, tokens, cell, tmp_path / "live.trace")
    numbers = assert_same_slots(trace, cell, tmp_path)
    first = trace.routing.filter(phase=PREFILL).select("pos_in_graph").collect()
    assert first["pos_in_graph"].n_unique() == 8
    if budget in BUDGETS:
        for knob, counter in (("substitute", "substituted"), ("drop_cold", "dropped")):
            assert (getattr(numbers.decode, counter) > 0) == (knob in route)


def test_rebuilt_weights_are_the_recorded_ones(engine, tokens, tmp_path):
    trace = record(engine, tokens[:24], cell_of("2cycles", "substitute:L=1"), tmp_path / "w.trace")
    found = replay_slots(blanked(trace, tmp_path / "b.trace"), cell_of("2cycles", "substitute:L=1"))
    recorded = trace.routing.collect()["weights"].to_numpy().reshape(-1)
    np.testing.assert_array_equal(found.slots["weight"].to_numpy(), recorded)


def test_a_prompt_in_chunks_replays_too(tokens, tmp_path):
    cell = cell_of("1.2cycles", "substitute:L=0.15+drop_cold:F=0.75,prefill=1")
    with Engine(n_threads=THREADS, n_ubatch=3) as engine:
        trace = record(engine, tokens[:24], cell, tmp_path / "c.trace")
    assert trace.tokens.filter(phase=PREFILL).collect().height == 3
    last = max(trace.header.moe_layers)
    chunks = trace.routing.filter(phase=PREFILL, layer=last).collect()
    assert chunks["pos_in_graph"].to_list() == [1], (
        "the last layer routes only the token whose output was asked for"
    )
    assert_same_slots(trace, cell, tmp_path)


def test_a_generation_replays_too(engine, tmp_path):
    cell = cell_of("1.2cycles", "substitute:L=0.15")
    engine.record_generation([engine.tokenize("The class defines")], 20, cell, tmp_path / "g.trace")
    assert_same_slots(open_trace(tmp_path / "g.trace"), cell, tmp_path)


def test_a_conversation_replays_and_runs_again_live(engine, tmp_path):
    cell = cell_of("1.2cycles", "substitute:L=0.15")
    prompts = [engine.tokenize(text) for text in ("The class defines", " and a method")]
    out = tmp_path / "s.trace"
    engine.record_generation(prompts, 8, cell, out, keep_context=True)
    trace = open_trace(out)
    assert_same_slots(trace, cell, tmp_path)
    (pair,) = validate(trace, [cell], n_threads=THREADS)
    assert pair.live.decode == measure(trace, cell).decode


def test_a_narrower_top_k_replays_from_either_recording(tokens, tmp_path):
    cell = cell_of("2cycles", "top_k:k=4+substitute:L=0.15")
    with Engine(n_threads=THREADS, top_k=4) as narrow:
        trace = record(narrow, tokens[:24], cell, tmp_path / "k4.trace")
    assert_same_slots(trace, cell, tmp_path)


USER_POLICIES = '''
from simlab.policy import eviction, routing
from simlab.types import Knob, Rerank
from simlab.xp import f4, where

@routing("rerank", knobs={"bonus": Knob(0.5, 0, 9)}, needs={"scores"})
def flat_bonus(candidate, row, state, knobs):
    """Raise every resident expert by the same amount, whatever the token's range."""
    raised = candidate.value + where(candidate.resident, knobs.bonus, f4(0))
    return Rerank(raised, 0, row.range > 0)

def count(state, access, knobs):
    return (state[0] + access.first,)

@eviction("static", touch=count, state={"uses": 0})
def least_used(entry, state, knobs):
    """Evict the entry with the fewest lookups so far."""
    return state[0]
'''


def test_a_users_file_runs_live_and_in_replay(engine, tokens, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_POLICIES)
    cell = build_cells(
        budgets=["2cycles"], routes=[f"{path}:bonus=0.75+drop_cold:F=0.75"], evicts=[str(path)]
    )[0]
    trace = record(engine, tokens[:32], cell, tmp_path / "u.trace")
    numbers = assert_same_slots(trace, cell, tmp_path)
    assert (numbers.decode.substituted or 0) > 0


def test_validate_runs_the_same_graphs_and_agrees_where_nothing_drifts(engine, tokens, tmp_path):
    trace = record(engine, tokens, cell_of("2cycles"), tmp_path / "v.trace")
    graphs = planned_graphs(trace)
    assert [t for _, ids, _ in graphs for t in ids] == tokens[:-1]
    assert [following for plan, _, following in graphs if plan.phase == DECODE] == tokens[9:]
    cells = build_cells(budgets=["1.2cycles", "2cycles"], margins=["0", "0.3"])
    compared = validate(trace, cells, n_threads=THREADS)
    for cell, pair in zip(cells, compared, strict=True):
        assert pair.live.source == "live"
        assert pair.replay.source == "replay"
        if cell.margin == 0:
            # With the router's own ids the replay is exact; only a substituted expert makes scores drift.
            assert pair.live.decode.misses == pair.replay.decode.misses
            assert pair.live.decode.lookups == pair.replay.decode.lookups
        speed, ppl, ratio = (with_interval(pair.live, name) for name in ("tok_s", "ppl", "ppl_ratio"))
        assert 0 < speed[0] < speed[1] < speed[2]
        assert ppl[0] < ppl[1] < ppl[2]
        assert ratio[1] == pytest.approx(ppl[1] / with_interval(compared[0].live, "ppl")[1])
        assert ratio[0] <= ratio[1] <= ratio[2]
    baseline, margin = compared[0].live, compared[1].live
    assert baseline.intervals["ppl_ratio"] == (1, 1)
    assert (margin.decode.substituted or 0) > 0
    assert baseline.nll == compared[2].live.nll, "the budget alone changes no logit"


def test_reads_and_times_add_up(engine, tokens, tmp_path):
    trace = record(engine, tokens, cell_of("1.2cycles", "substitute:L=0.15"), tmp_path / "r.trace")
    reads, per_graph = trace.reads.collect(), trace.tokens.collect()
    assert reads.height > 0
    assert (reads["latency_ns"] > 0).all()
    if trace.header.io_mode == "direct":
        inside = reads.filter(pl.col("offset") + pl.col("window_bytes") != EMBEDDED_MODEL.stat().st_size)
        assert (inside["window_bytes"] % 4096 == 0).all()
        assert (reads["offset"] % 4096 == 0).all()
    summed = reads.group_by("graph").agg(pl.col("window_bytes").sum()).sort("graph")
    assert (
        summed["window_bytes"].to_list()
        == per_graph.filter(pl.col("window_bytes") > 0)["window_bytes"].to_list()
    )
    for _, lane in reads.group_by("lane"):
        lane = lane.sort("start_ns")
        ends = (lane["start_ns"] + lane["latency_ns"]).to_numpy()[:-1]
        assert (ends <= lane["start_ns"].to_numpy()[1:]).all()
    slots = trace.routing.select(pl.col("read_bytes").arr.sum()).collect()["read_bytes"].sum()
    assert slots == per_graph["read_bytes"].sum() == reads["req_bytes"].sum()
    decode = per_graph.filter(phase=DECODE)
    parts = decode["compute_ns"] + decode["read_wait_ns"] + decode["management_ns"]
    share = (parts / decode["wall_ns"]).median()
    assert isinstance(share, float)
    assert 0.95 <= share <= 1.05
    windows = trace.header.window_bytes
    assert windows is not None
    by_entry = reads.group_by("graph", "layer", "expert").agg(pl.col("window_bytes").sum())
    for layer, expert, total in by_entry.select("layer", "expert", "window_bytes").iter_rows():
        assert total == windows[layer][expert]


@pytest.mark.parametrize("budget", ["1.2cycles", "2cycles", "off"])
def test_resident_memory_is_the_cached_entries_pages(engine, tokens, budget):
    engine.start(cell_of(budget))
    memory, cache = engine.experts, engine.cache
    layers = engine.header().moe_layers
    widest = max(memory.page_bytes(*entry) for entry in memory.slices)
    cached: list[tuple[int, int]] = []
    one_batch = 8 * widest  # the k experts of one token at one layer
    for at in range(0, 24, 8):
        engine.forget_context()
        engine.score(tokens[at : at + 10])
        cached = [divmod(int(e), cache.n_expert) for e in np.flatnonzero(cache.resident)]
        pages = sum(memory.page_bytes(layers[i], expert) for i, expert in cached)
        assert memory.resident_bytes() <= pages + one_batch
        assert memory.resident_bytes() >= 0.9 * pages
    assert (budget == "off") == (not cached)
