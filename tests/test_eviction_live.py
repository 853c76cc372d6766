"""Eviction policies on the engine: a recording's replay agrees with it in every slot; what cannot run live says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from live import TEXT, THREADS, blanked, record

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.record.engine import Engine
from simlab.replay.slots import replay_slots
from simlab.trace.store import Trace

SHIPPED = Path(__file__).parent.parent / "traces" / "original.trace"
N_TOKENS = 40


@pytest.fixture(scope="module")
def engine():
    with Engine(n_threads=THREADS, train=str(SHIPPED)) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens(engine):
    return engine.tokenize(TEXT)[:N_TOKENS]


def assert_same(trace: Trace, cell, folder: Path, train: str | None = None) -> None:
    found, recorded = (
        replay_slots(blanked(trace, folder / "blank"), cell, train=train),
        trace.routing.collect(),
    )
    for name, column in (("expert", "experts"), ("residency", "residency"), ("read_bytes", "read_bytes")):
        np.testing.assert_array_equal(
            found.slots[name].to_numpy(), recorded[column].to_numpy().reshape(-1), err_msg=name
        )
    tally = trace.tokens.filter(pl.col("turn") >= 0).collect()
    assert found.numbers.all.evictions == tally["evictions"].sum() > 0
    assert found.numbers.all.hits == tally["hits"].sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evict", "route"),
    [
        ("fifo", "original"),
        ("random:seed=11", "original"),
        ("lfu", "substitute:L=0.15"),
        ("lfu_decay:half_life=100", "original"),
        ("lfru", "original"),
        ("weighted_lfu", "drop_cold:F=0.75"),
        ("layer_lfu", "original"),
        ("clock", "substitute:L=0.15"),
        ("sieve", "original"),
        ("slru", "original"),
        ("two_q", "original"),
        ("s3fifo", "substitute:L=0.15"),
        ("arc", "original"),
        ("lirs", "original"),
        ("wtinylfu", "original"),
        ("gdsf", "original"),
        ("least_stale", "original"),
        ("static_pin", "original"),
    ],
)
def test_a_recording_replays_slot_for_slot(engine, tokens, evict, route, tmp_path):
    cell = build_cells(budgets=["2cycles"], routes=[route], evicts=[evict])[0]
    trace = record(engine, tokens, cell, tmp_path / "t.trace")
    assert trace.header.evict == evict.partition(":")[0]
    assert_same(trace, cell, tmp_path, train=str(SHIPPED) if evict == "static_pin" else None)


@pytest.fixture(scope="module")
def reading_ahead():
    with Engine(n_threads=THREADS, prefetch="next_gate:K=8") as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("evict", ["least_stale", "s3fifo", "lirs"])
def test_what_was_read_ahead_replays_slot_for_slot(reading_ahead, tokens, evict, tmp_path):
    cell = build_cells(budgets=["1.2cycles"], evicts=[evict])[0]
    trace = record(reading_ahead, tokens, cell, tmp_path / "t.trace")
    assert trace.reads.filter("speculative").collect().height > 0
    assert_same(trace, cell, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--evict", "belady"], "--evict belady: knows the future, which a live run does not have"),
        (["--evict", "lookahead:m=3"], "--evict lookahead: knows the future"),
        (["--sequential"], "--sequential: measures what a replay makes of it"),
        (["--evict", "static_pin"], "--evict static_pin: learns from a training part; add --train 25%"),
        (["--evict", "lfu_decay:half_life=0"], "lfu_decay:half_life must lie between 0.001 and 1e+09"),
    ],
)
def test_what_only_a_replay_can_run_is_one_line(words, message, tmp_path, capsys):
    out = tmp_path / "no.trace"
    argv = ["record", "--out", str(out), "--prompt", "x", "-n", "2", "--budget", "25%", *words]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
