"""Every routing policy on the embedded model: the recording replays slot for slot from scores and ids alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from live import TEXT, THREADS, blanked, cell_of, record

from simlab.cli.main import main
from simlab.judge.measure import measure
from simlab.policy import find_routing
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.replay.slots import replay_slots
from simlab.trace.store import open_trace

TAUGHT = str(Path(__file__).parent.parent / "traces" / "original.trace")
ROUTES = (
    "cache_prior:lambda=0.15,J=2",
    "max_rank:M=16,J=2",
    "cum_prob:p=0.8,J=1",
    "resident_only",
    "swap_on_miss:tau=0.12",
    "buddy:n=16",
    "adaptive_k:t=0.15",
    "skip_ratio:beta=0.4,renorm=0",
    "swap_on_miss:tau=0.1+drop_cold:F=0.75",
)


@pytest.fixture(scope="module")
def engine():
    with Engine(n_threads=THREADS, train=TAUGHT) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_live_run_is_its_own_replay(engine, tmp_path, route):
    cell = cell_of("2cycles", route)
    trace = record(engine, engine.tokenize(TEXT)[:40], cell, tmp_path / "live.trace")
    found = replay_slots(blanked(trace, tmp_path / "blank.trace"), cell, train=TAUGHT)
    recorded = trace.routing.collect()
    for replayed, column in {
        "expert": "experts",
        "residency": "residency",
        "dropped": "dropped",
        "read_bytes": "read_bytes",
        "weight": "weights",
    }.items():
        was = recorded[column].to_numpy().reshape(-1)
        np.testing.assert_array_equal(found.slots[replayed].to_numpy(), was, err_msg=column)
    live = measure(trace, cell)
    for counter in ("reranked", "substituted", "dropped", "misses", "evictions"):
        assert getattr(found.numbers.decode, counter) == getattr(live.decode, counter), counter
    for step in cell.route.steps:
        done = "dropped" if find_routing(step.policy.name).stage == "drop" else "substituted"
        assert getattr(live.decode, done) > 0


@pytest.mark.slow
def test_a_buddy_is_recorded_from_the_command_line(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "b.trace"
    text.write_bytes(TEXT[:80])
    words = ["record", EMBEDDED_MODEL, "--out", str(out), "--text", str(text), "--budget", "2cycles"]
    words += ["--threads", "1", "--route", "buddy"]
    assert main([*map(str, words), "--train", TAUGHT]) == 0
    assert open_trace(out).header.route == "buddy"
    out.rename(tmp_path / "first.trace")
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    assert "buddy learns 'place' from a part of a trace; give one with --train" in capsys.readouterr().err
    assert not out.exists()
