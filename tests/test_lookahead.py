"""Overlapped reads and look-ahead: no logit changes, and a replay knows what speculation brought in."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from live import TEXT, THREADS, cell_of, plain_logits, record, streamed_logits
from test_live_replay import assert_same_slots

from simlab.errors import InputError, SimlabWarning
from simlab.record.engine import Engine
from simlab.record.lookahead import parse_prefetch
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
    per_graph = reads.group_by("graph").agg(pl.col("window_bytes").sum()).sort("graph")
    tokens = trace.tokens.filter(pl.col("window_bytes") > 0).collect()
    assert per_graph["window_bytes"].to_list() == tokens["window_bytes"].to_list()
    for _, lane in reads.group_by("lane"):
        lane = lane.sort("start_ns")
        ends = (lane["start_ns"] + lane["latency_ns"]).to_numpy()[:-1]
        assert (ends <= lane["start_ns"].to_numpy()[1:]).all()


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
