"""Overlapped reads and look-ahead: no logit changes, and a replay knows what speculation brought in."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from live import TEXT, THREADS, cell_of, plain_logits, record, streamed_logits
from synthetic import generate, make_header
from test_live_replay import assert_same_slots

from simlab.cells import build_cells, resolve_budget
from simlab.errors import InputError, SimlabWarning
from simlab.judge.measure import measure
from simlab.judge.validate import validate
from simlab.policy import find_eviction
from simlab.prefetch import parse_prefetch
from simlab.record.cache import LiveCache
from simlab.record.engine import Engine
from simlab.record.lookahead import LookAhead
from simlab.replay.run import replay, sweep
from simlab.types import DECODE

N_TOKENS = 40
MODES = {
    "overlap": {"overlap": True},
    "previous token": {"prefetch": "previous_token:K=2"},
    "next gate": {"prefetch": "next_gate:K=6"},
    "all": {"overlap": True, "prefetch": "next_gate:K=8", "lanes": 3},
}


@pytest.fixture(scope="module")
def plain():
    with Engine(n_threads=THREADS) as engine:
        tokens = engine.tokenize(TEXT)[:N_TOKENS]
    return tokens, plain_logits(tokens)


@pytest.fixture(scope="module", params=MODES)
def engine(request):
    with Engine(n_threads=THREADS, **MODES[request.param]) as opened:
        yield opened


@pytest.mark.parametrize("budget", ["0.5cycles", "1.2cycles", "100%"])
def test_reading_early_changes_no_logit(engine, plain, budget):
    tokens, expected = plain
    engine.start(cell_of(budget))
    logits, counts = streamed_logits(engine, tokens)
    assert np.array_equal(logits, expected)
    assert counts["lookups"] > 0
    if engine.prefetch is not None and budget == "0.5cycles":
        assert engine.cache.speculative_hits > 0
    assert engine.experts.resident_bytes() <= sum(
        engine.experts.page_bytes(*divmod(int(e), engine.cache.n_expert))
        for e in np.flatnonzero(engine.cache.resident)
    )


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["0.5cycles", "1.2cycles"])
@pytest.mark.parametrize("route", ["original", "substitute:L=0.15+drop_cold:F=0.75"])
def test_a_recording_with_look_ahead_replays_slot_for_slot(engine, plain, tmp_path, route, budget):
    cell = cell_of(budget, route)
    trace = record(engine, plain[0], cell, tmp_path / "t.trace")
    assert_same_slots(trace, cell, tmp_path)
    reads, routing = trace.reads.collect(), trace.routing.collect()
    early = reads.filter("speculative")
    useful = routing["residency"].explode().eq(2).sum()
    if engine.prefetch is None:
        assert early.is_empty()
        assert useful == 0
    elif budget == "0.5cycles" or engine.prefetch.kind == "next_gate":
        issued = early.select("graph", "layer", "expert").n_unique()
        assert 0 < useful <= issued
        # What the previous token ran is still in RAM from one cycle up, so only then is there nothing to read.
        assert early["phase" if "phase" in early.columns else "graph"].eq(DECODE).all()
    if engine.prefetch is not None and route != "original":
        # By the rule itself, not by what was read.
        own = dataclasses.replace(cell, prefetch=engine.prefetch.text)
        (tmp_path / "own").mkdir()
        assert_same_slots(trace, own, tmp_path / "own")
        assert replay(trace, own).read_ahead == measure(trace, cell).read_ahead
    per_graph = reads.group_by("graph").agg(pl.col("window_bytes").sum()).sort("graph")
    tokens = trace.tokens.filter(pl.col("window_bytes") > 0).collect()
    assert per_graph["window_bytes"].to_list() == tokens["window_bytes"].to_list()
    for _, lane in reads.group_by("lane"):
        lane = lane.sort("start_ns")
        ends = (lane["start_ns"] + lane["latency_ns"]).to_numpy()[:-1]
        assert (ends <= lane["start_ns"].to_numpy()[1:]).all()


def looked_ahead(trace, cell) -> dict[str, int]:
    """A trace's decode under LRU with the live engine's own look-ahead and cache; its reads do nothing."""
    header = trace.header
    layers = list(header.moe_layers)
    budget = resolve_budget(cell.budget, cell.scope, header, header.n_expert_used)
    sizes = np.array([header.entry_bytes[layer] for layer in layers])
    cache = LiveCache(sizes, header.n_expert, header.n_expert_used, budget, find_eviction("lru"), {})
    experts: Any = SimpleNamespace(
        slices={(layer, e): [] for layer in layers for e in range(header.n_expert)},
        release=lambda *_: None,
    )
    lanes: Any = SimpleNamespace(submit=lambda _: None, collect=lambda _: [])
    ahead = LookAhead(parse_prefetch(cell.prefetch), layers, lanes, experts, cache, {})
    found: dict[str, int] = dict.fromkeys(("lookups", "hits", "evictions", "useful"), 0)
    graph = None
    batches = trace.routing.collect().group_by("graph", "layer", maintain_order=True)
    for (now, layer), rows in batches:
        if graph is not None and now != graph:
            ahead.abandon()
        graph, at, decode = now, layers.index(layer), rows["phase"][0] == DECODE
        ahead.settle(at)
        walk = rows["router_experts"].to_numpy().reshape(rows.height, -1)
        before = cache.speculative_hits
        ran = cache.run_batch(at, walk, None, np.zeros(walk.shape, np.float32))
        if decode:
            ahead.see_run(at, walk.ravel().tolist())
            counts = (ran.lookups, ran.hits, len(ran.evicted), cache.speculative_hits - before)
            found = {name: found[name] + n for name, n in zip(found, counts, strict=True)}
    return found


@pytest.mark.parametrize("depth", [1, 9])
def test_a_replay_looks_ahead_as_the_engine_does(tmp_path, depth):
    """Over a trace that was recorded without, of several turns and entry sizes, at small and large budgets."""
    header = make_header(n_layer=3, n_expert=16, k=3, sizes=(1000, 7, 400))
    trace = generate(header, seed=5, n_decode=40, n_prefill=3, n_turns=2).write(tmp_path / "t")
    prefetch = f"previous_token:K={depth}"
    cells = build_cells(budgets=["0.4cycles", "1.2cycles", "2cycles", "70%"], prefetch=prefetch)
    for cell, numbers in zip(cells, sweep(trace, cells), strict=True):
        expected, decode = looked_ahead(trace, cell), numbers.decode
        assert numbers.read_ahead is not None
        found = (decode.lookups, decode.hits, decode.evictions, numbers.read_ahead["useful"])
        assert dict(zip(expected, found, strict=True)) == expected
        assert (expected["useful"] > 0) >= (cell is cells[0])


def test_live_runs_that_look_ahead_stand_beside_replays_that_do(plain, tmp_path):
    cells = build_cells(budgets=["0.5cycles"], margins=["0"])
    with Engine(n_threads=THREADS) as engine:
        trace = record(engine, plain[0], cell_of("2cycles"), tmp_path / "t.trace")
    (pair,) = validate(trace, cells, prefetch="previous_token:K=2", n_threads=THREADS)
    assert pair.live.cell == pair.replay.cell == dataclasses.replace(cells[0], prefetch="previous_token:K=2")
    # The router's own routing: nothing drifts.
    assert pair.live.decode.hits == pair.replay.decode.hits > 0
    assert pair.live.read_ahead == pair.replay.read_ahead
    (pair,) = validate(trace, cells, prefetch="next_gate:K=4", n_threads=THREADS)
    assert pair.live.read_ahead is not None
    assert pair.replay.read_ahead is None
    assert "without the look-ahead of the live run" in (pair.replay.note or "")


def test_what_a_replay_cannot_look_ahead_to_is_refused(tmp_path):
    trace = generate(make_header(), n_decode=4).write(tmp_path / "t")
    with pytest.raises(InputError, match="carries no predictions of the next gate"):
        replay(trace, build_cells(budgets=["2cycles"], prefetch="next_gate:K=8")[0])
    with pytest.raises(InputError, match="--budget off has none"):
        build_cells(budgets=["off"], prefetch="previous_token:K=1")


@pytest.mark.parametrize(
    "text", ["soon:K=1", "next_gate:K=0", "next_gate:n=3", "next_gate:K=x", "previous_token:K=-1"]
)
def test_a_prefetch_is_refused_in_one_line(text):
    with pytest.raises(InputError, match="--prefetch"):
        parse_prefetch(text)


def test_look_ahead_needs_a_cache():
    with (
        Engine(n_threads=THREADS, prefetch="next_gate:K=4") as engine,
        pytest.raises(InputError, match="needs a cache"),
    ):
        engine.start(cell_of("off"))


def test_a_model_without_a_place_to_wait_reads_serially_and_says_so(monkeypatch):
    from simlab.record import engine as module

    monkeypatch.setattr(module, "NODE_PREFIX", b"no_such_")
    with pytest.warns(SimlabWarning, match="reading serially"):
        Engine(n_threads=THREADS, overlap=True).close()
