"""Foretold beside live: scores by hand, and a short check whose interleaved runs are those of lone runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from test_trace_time_cells import costs

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.judge.measure import measure
from simlab.judge.quality.law import recorded_cell
from simlab.judge.speed.moments import LEAST_TOKENS, moments_of
from simlab.judge.speed.time_check_live import CheckedRun, LiveCheck, _with_constant, at_speed
from simlab.judge.speed.time_live import counted_tokens, machine_state, run_interleaved
from simlab.judge.speed.token_time import Timings
from simlab.judge.speed.trace_time_cells import Foretold, TokenWork, by_costs
from simlab.judge.stats import Interval
from simlab.judge.validate import planned_graphs, run_live
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.plan import PlannedGraph
from simlab.trace.store import open_trace
from simlab.types import DECODE, PREFILL

ORIGINAL = Path(__file__).resolve().parent.parent / "traces" / "original.trace"
TEXT = EMBEDDED_MODEL.with_name("text-b.txt")


@pytest.fixture(scope="module")
def numbers():
    trace = open_trace(ORIGINAL)
    return measure(trace, recorded_cell(trace.header))


def foretold(numbers, tok_s: float, low: float, high: float) -> Foretold:
    nothing = Interval(math.nan, math.nan)
    return Foretold(numbers, tok_s, Interval(low, high), 1e3 / tok_s, 0, nothing, 0, 0, 0, "compute", None)


def run(numbers, cell: int, live: float, told: float, half: float) -> CheckedRun:
    today = foretold(numbers, told, told - half, told + half)
    nowhere = Interval(math.nan, math.nan)
    return CheckedRun(
        cell,
        0,
        live,
        foretold(numbers, told + 50, told, told + 100),
        today,
        (nowhere, nowhere),
        {},
        numbers,
        None,
        {},
    )


def test_at_speed_by_hand(numbers):
    """Compute doubled, management as it was, reads halved, and no pauses; the policy's own time is today's."""
    own = costs()
    misses = own.work.misses.sum(axis=1).astype(float)
    twenty, two = np.full(4, 20.0), np.full(4, 2.0)
    live = Timings("serial", np.arange(4.0), misses, 22 + misses / 2, misses / 2, two, twenty, None, 0)
    today = at_speed(own, live)
    assert today.pauses == pytest.approx(1, rel=0.01)
    found = by_costs(today, numbers, own.work, 0.4)
    assert (found.compute_ms, found.management_ms, found.read_wait_ms) == pytest.approx(
        (20, 2.4, 1), rel=0.05
    )
    # Two misses fewer in the mean: two times 0.25 ms of compute, doubled, and one move less.
    work = TokenWork(own.work.graph, own.work.misses * 0, own.work.evictions)
    none = by_costs(today, numbers, work, None)
    assert (none.compute_ms, none.management_ms, none.read_wait_ms) == pytest.approx((19, 1.5, 0), rel=0.05)
    # The spread is that of the live run: one token far off makes all of it wider.
    shaken = Timings(
        "serial",
        np.arange(4.0),
        misses,
        live.wall_ms + np.array([0, 0, 30, 0]),
        misses / 2,
        two,
        twenty,
        None,
        0,
    )
    assert at_speed(own, shaken).spread(own.work, 0.0).chance > 3 * today.spread(own.work, 0.0).chance


def test_scores_by_hand(numbers):
    cells = build_cells(budgets=["2cycles"], margins=["0", "0.1", "0.2", "0.3"])
    runs = [run(numbers, 1, 100, 110, 20), run(numbers, 2, 200, 190, 5), run(numbers, 3, 300, 303, 10)]
    runs.append(run(numbers, 0, 500, 5, 1))
    inert = ["inert: as recorded", None, None, None]
    check = LiveCheck(
        cells, [numbers] * 4, inert, _with_constant(runs, inert), 16, [99.0], 101.0, moments_of([]), False
    )
    assert [r.cell for r in check.scored] == [1, 2, 3]
    np.testing.assert_allclose(check.errors(today=True), [0.1, -0.05, 0.01])
    assert check.median_error(today=True) == pytest.approx(0.05)
    assert check.median_error(today=False) == pytest.approx(0.2)
    held = check.cover(1)
    # Widths 40, 10 and 20; the second misses by 5, which costs 5 x 40.
    assert (held.held, held.n) == (2, 3)
    assert held.mean_score == pytest.approx((40 + (10 + 5 * 2 / 0.05) + 20) / 3)
    # The others were off by 10 and 3, by 10 and 3, by 10 and 10.
    assert [r.interval(3) for r in check.scored] == [(100, 120), (180, 200), (293, 313)]
    assert check.cover(3).held == 3
    assert [check.scored[1].inside(i) for i in range(4)] == [True, False, True, True]


def test_one_cell_has_no_others_to_go_by(numbers):
    (alone,) = _with_constant([run(numbers, 0, 100, 110, 20)], [None])
    assert math.isnan(alone.interval(2).low)
    assert not alone.inside(2)


def test_the_machine_says_how_it_is():
    state = machine_state()
    assert state["load"] is not None
    assert state["load"] >= 0
    assert state["available_mib"] is not None
    assert state["available_mib"] > 0


@pytest.mark.slow
def test_interleaved_runs_are_those_of_lone_runs(tmp_path):
    """Turns change no id, no residency and no loss; the reference runs in every group."""
    (tmp_path / "runs").mkdir()
    with Engine(n_threads=1) as engine:
        cells = build_cells(budgets=["2cycles"], margins=["0", "0.2"])
        engine.record_text(engine.tokenize(TEXT.read_bytes())[:48], cells[0], tmp_path / "base.trace")
        trace = open_trace(tmp_path / "base.trace")
        alone = run_live(engine, planned_graphs(trace), cells[1], tmp_path / "alone.trace")
    found = list(
        run_interleaved(trace, cells[0], [cells[1]], None, tmp_path / "runs", repeats=2, n_threads=1)
    )
    assert [(live.cell, live.group) for live in found] == [(-1, 0), (0, 0), (-1, 1), (0, 1)]
    # The prefill is the first of the first turn; of the second, graphs 32 to 35 are decode tokens 31 to 34.
    counted = [*range(3, 31), *range(35, 39)]
    assert all(np.flatnonzero(live.counted).tolist() == counted for live in found)
    for live in found:
        expected = trace if live.cell < 0 else alone
        for table, names in (
            ("routing", ("experts", "residency", "read_bytes")),
            ("tokens", ("nll", "evictions")),
        ):
            ours, theirs = (getattr(t, table).select(names).collect() for t in (live.trace, expected))
            assert ours.equals(theirs)


def test_which_tokens_count():
    """A prompt in two graphs, then forty tokens: graphs 4 to 31 and 36 to 41 count, from the fifth decoded one on."""
    prompt = [PlannedGraph(0, PREFILL, i, i + 1, i, i == 1, None) for i in range(2)]
    decoded = [PlannedGraph(0, DECODE, i, i + 1, i, True, None) for i in range(2, 42)]
    graphs = [(plan, [1], None) for plan in (*prompt, *decoded)]
    assert np.flatnonzero(counted_tokens(graphs, 4, True)).tolist() == [*range(4, 30), *range(34, 40)]
    assert np.flatnonzero(counted_tokens(graphs, 4, False)).tolist() == [*range(4, 40)]


@pytest.mark.slow
def test_a_short_check(tmp_path, capsys, monkeypatch):
    """The table has a line per run, each scored with a yes or no, and the recorded cell is not scored."""
    with Engine(n_threads=1) as engine:
        (cell,) = build_cells(budgets=["2cycles"])
        engine.record_text(engine.tokenize(TEXT.read_bytes())[:56], cell, tmp_path / "base.trace")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["time", str(tmp_path / "base.trace"), "--check", "--repeats", "1", "--threads", "1"]
    words += ["--budget", "2cycles", "--margin", "0,0.2,0.6"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["check"]
    assert found["inert"] == ["inert: as recorded", None, None]
    assert (len(found["runs"]), found["scored_runs"], len(found["reference_tok_s"])) == (3, 2, 1)
    for one in found["runs"]:
        low, high = one["today"]["tok_s_interval"].values()
        assert low < one["today"]["tok_s"] < high
        assert one["inside"]["at today's speed"] == (low <= one["live_tok_s"] <= high)
        assert sum(one["live_parts_ms"].values()) == pytest.approx(1e3 / one["live_tok_s"], rel=1e-6)
    assert found["coverage"]["at today's speed"]["n"] == 2
    # Too short a run to say how far moments are apart.
    assert found["counted_tokens"] < LEAST_TOKENS
    assert not found["kept"]
    assert found["moments"]["looks"] == 0
