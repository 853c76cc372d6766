"""Cells foretold from a trace: costs by hand, a recorded trace foretold from itself, and policies rehearsed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.judge.measure import measure
from simlab.judge.quality.law import recorded_cell
from simlab.judge.speed.trace_time import timings_of_trace
from simlab.judge.speed.trace_time_cells import (
    DOUBTS,
    Costs,
    TokenWork,
    _drift,
    by_costs,
    fit_costs,
    replay_work,
)
from simlab.judge.speed.trace_time_policy import rehearsal
from simlab.judge.speed.trace_time_reads import Latencies, ReadModel, Slices
from simlab.trace.store import open_trace

ORIGINAL = Path(__file__).resolve().parent.parent / "traces" / "original.trace"


def costs(**other) -> Costs:
    """Four tokens of two layers with 10 ms compute, 2 ms management and 1 ms of wait per miss; pauses add a tenth."""
    misses = np.array([[1, 1], [2, 0], [0, 0], [3, 1]])
    reads = ReadModel(Latencies({4096: {1: 1000.0}}), 1, (Slices(1, 0, 4096.0),) * 2, 0.0, 1.0, 0.0)
    given = {
        "work": TokenWork(np.array([3, 4, 5, 6]), misses, np.array([2, 2, 0, 4])),
        "wall": 1.1 * (12 + misses.sum(axis=1)), "wait": misses.sum(axis=1).astype(float),
        "management": np.full(4, 2.0), "compute": np.full(4, 10.0),
        "reads": reads, "management_per_move": 0.5, "compute_per_miss": 0.25, "drift": 0.05,
    }  # fmt: skip
    return Costs(**{**given, **other})


def test_parts_by_hand():
    """Token 4 misses once more and evicts once less; token 6 misses and evicts nothing."""
    work = TokenWork(np.array([4, 6]), np.array([[2, 1], [0, 0]]), np.array([1, 0]))
    compute, management, wait = costs().parts(work, policy_ms=0.3)
    np.testing.assert_allclose(compute, 1.1 * np.array([10.25, 9.0]))
    # Moves: (3 + 1) / 2 for (2 + 2) / 2, and none for four.
    np.testing.assert_allclose(management, 1.1 * np.array([2.3, 0.3]))
    np.testing.assert_allclose(wait, 1.1 * np.array([3.0, 0.0]))


def test_the_spread_by_hand():
    """Nothing is doubted of the recorded cell; another is doubted by its share of what it changes."""
    own = costs()
    same = own.spread(own.work, 0.0)
    assert (same.drift, same.doubt) == (0.05, 0.0)
    assert same.total() == pytest.approx(math.hypot(same.chance, 0.05))
    none = TokenWork(own.work.graph, np.zeros((4, 2), dtype=int), np.zeros(4, dtype=int))
    wall = 10 - 0.25 * 2 + 2 - 0.5 * 2 + 0.4
    expected = math.hypot(
        DOUBTS["reads"] * 2 / wall, DOUBTS["moves"] * 0.5 * 2 / wall, DOUBTS["policy"] * 0.4 / wall
    )
    assert own.spread(none, 0.4).doubt == pytest.approx(expected)


def test_a_cell_by_hand():
    trace = open_trace(ORIGINAL)
    numbers = measure(trace, recorded_cell(trace.header))
    found = by_costs(costs(), numbers, costs().work, 0.7)
    assert (found.compute_ms, found.management_ms, found.read_wait_ms) == pytest.approx((11, 2.97, 2.2))
    assert found.policy_ms == pytest.approx(0.77)
    assert found.tok_s == pytest.approx(1e3 / (11 + 2.97 + 2.2))
    assert found.bound == "compute"
    low, high = found.tok_s_interval
    assert low * high == pytest.approx(found.tok_s**2)
    assert low < found.tok_s < high
    slow_reads = dataclasses.replace(costs().reads, share=20.0)
    assert by_costs(costs(reads=slow_reads), numbers, costs().work, None).bound == "reads"
    slow_moves = costs(management=np.full(4, 30.0), wall=np.full(4, 42.0))
    assert by_costs(slow_moves, numbers, costs().work, None).bound == "management"


def test_a_short_recording_has_no_drift_to_show():
    trace = open_trace(ORIGINAL)
    numbers = measure(trace, recorded_cell(trace.header))
    found = by_costs(costs(drift=float("nan")), numbers, costs().work, None)
    assert math.isfinite(found.tok_s_interval.low)
    assert found.policy_ms is None


def test_the_drift_by_hand():
    """Levels 0.9, 1.1, 1.1, 0.9 over four stretches, and attention that grows: the line is taken out first."""
    n = 4 * 64
    level = np.repeat([0.9, 1.1, 1.1, 0.9], 64)
    still = TokenWork(np.arange(n), np.zeros((n, 1), dtype=int), np.zeros(n, dtype=int))
    made = costs(work=still, compute=8.0 * level, management=2.0 * level)
    assert _drift(made) == pytest.approx(np.std(level[::64], ddof=2), rel=0.01)
    growing = costs(work=still, compute=8.0 * np.linspace(1, 2, n), management=2.0 * np.linspace(1, 2, n))
    assert _drift(growing) == pytest.approx(0, abs=1e-9)
    few = TokenWork(np.arange(31), still.misses[:31], still.evictions[:31])
    assert math.isnan(_drift(costs(work=few, compute=np.ones(31), management=np.ones(31))))


@pytest.mark.slow
def test_a_trace_foretells_itself(capsys):
    """The work of its replay is the recorded work, the speed its own; fewer misses wait less."""
    trace = open_trace(ORIGINAL)
    timings = timings_of_trace(trace)
    found = fit_costs(trace, timings)
    assert found is not None
    cells = build_cells(budgets=["2cycles"], margins=["0", "0.15"])
    (first, same, tokens, _), (second, less, _, described) = replay_work(trace, cells, features=True)
    for name in ("graph", "misses", "evictions"):
        np.testing.assert_array_equal(getattr(same, name), getattr(found.work, name))
    assert tokens["read_bytes"].sum() == trace.tokens.filter(phase=1).collect()["read_bytes"].sum()
    assert described is not None
    assert described["mass"].item() == pytest.approx(second.decode.mass_displaced)
    assert less.misses.sum() == second.decode.misses < first.decode.misses
    itself, faster = by_costs(found, first, same, 0.0), by_costs(found, second, less, 0.0)
    assert itself.wall_ms == pytest.approx(timings.wall_ms.mean(), rel=0.02)
    assert itself.read_wait_ms == pytest.approx(timings.exposed_ms.mean(), rel=0.05)
    assert faster.read_wait_ms < 0.8 * itself.read_wait_ms
    assert 0.005 < found.drift < 0.5
    # The command says the same, but for the policy's own time.
    assert main(["time", str(ORIGINAL), "--budget", "2cycles", "--margin", "0,0.15", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["read_wait_ms"] for cell in shown] == pytest.approx(
        [itself.read_wait_ms, faster.read_wait_ms]
    )
    assert shown[1]["policy_ms"] > 0
    assert shown[1]["wall_ms"] - shown[1]["policy_ms"] == pytest.approx(faster.wall_ms, rel=0.01)


SLOW_POLICY = """
from simlab.policy import routing
from simlab.types import Rerank
from simlab.xp import f4

@routing("rerank", needs={"scores"})
def busy(candidate, row, state, knobs):
    value = candidate.value
    for _ in range(4000):
        value = value + f4(0.0)
    return Rerank(value, 0, True)
"""


def test_a_policys_own_time(tmp_path):
    """Nothing for the recorded cell and for another budget; a busy policy takes more than a plain one."""
    trace = open_trace(ORIGINAL)
    recorded = recorded_cell(trace.header)
    rehearsed = rehearsal(trace, recorded)
    assert rehearsed is not None
    assert rehearsed.extra_ms(recorded) == 0
    (larger,) = build_cells(budgets=["4cycles"])
    assert rehearsed.extra_ms(larger) == 0
    file = tmp_path / "busy.py"
    file.write_text(SLOW_POLICY)
    busy, plain = (build_cells(budgets=["2cycles"], routes=[r])[0] for r in (str(file), "substitute:L=.15"))
    # 4,000 additions of some 1 ns each, for 64 experts at eight layers.
    assert rehearsed.extra_ms(busy) > max(0.5, 1.5 * rehearsed.extra_ms(plain))
    (frequency,) = build_cells(budgets=["2cycles"], evicts=["lfu"])
    assert rehearsed.extra_ms(frequency) > 0.1
    # Fewer and more experts than recorded.
    for k in ("2", "12"):
        (cell,) = build_cells(budgets=["2cycles"], top_ks=[k])
        assert abs(rehearsed.extra_ms(cell)) < 5


def test_what_is_not_rehearsed():
    trace = open_trace(ORIGINAL)
    recorded = recorded_cell(trace.header)
    foreign = dataclasses.replace(trace, header=dataclasses.replace(trace.header, engine="other"))
    assert rehearsal(foreign, recorded) is None
