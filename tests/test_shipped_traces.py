"""The traces of this repository open, say what they are, and replay slot for slot, with no engine installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from simlab.cells import build_cells
from simlab.judge.measure import measure
from simlab.replay.run import sweep
from simlab.replay.slots import replay_slots
from simlab.trace.store import open_trace
from simlab.types import Cell

ROOT = Path(__file__).resolve().parent.parent
TRACES = {"original": "original", "margin-0.15": "substitute:L=0.15", "drop-0.75": "drop_cold:F=0.75"}


def cell_of(name: str) -> Cell:
    return build_cells(budgets=["2cycles"], routes=[TRACES[name]])[0]


@pytest.mark.parametrize("name", TRACES)
def test_a_shipped_trace_replays_slot_for_slot(name):
    trace, cell = open_trace(ROOT / "traces" / f"{name}.trace"), cell_of(name)
    assert (trace.header.route, trace.header.knobs) == (cell.route.name, cell.route.knobs)
    found, recorded = replay_slots(trace, cell), trace.routing.collect()
    for replayed, column in (
        ("expert", "experts"),
        ("residency",) * 2,
        ("dropped",) * 2,
        ("read_bytes",) * 2,
    ):
        was = recorded[column].to_numpy().reshape(-1)
        np.testing.assert_array_equal(found.slots[replayed].to_numpy(), was, err_msg=column)
    live = measure(trace, cell)
    assert live.decode.misses == found.numbers.decode.misses
    assert live.decode.tokens == 247
    wall_s = trace.tokens.filter(pl.col("phase") == 1).collect()["wall_ns"].to_numpy() / 1e9
    tok_s, (low, high) = live.tok_s, live.intervals["tok_s"]
    assert tok_s is not None
    assert tok_s == pytest.approx(247 / wall_s.sum())
    # Rough: tokens resampled one by one, where neighbours are alike, spread less than blocks of them do.
    error = wall_s.std() / 247**0.5 / wall_s.mean()
    assert low < tok_s * (1 - error)
    assert high > tok_s * (1 + error)


def test_measured_numbers_by_hand_from_the_tables():
    trace = open_trace(ROOT / "traces" / "margin-0.15.trace")
    numbers = measure(trace, cell_of("margin-0.15")).decode
    rows = trace.routing.filter(pl.col("phase") == 1).collect()
    tokens = trace.tokens.filter(pl.col("phase") == 1).collect()
    assert numbers.slots == rows.height * 8
    assert numbers.read_mib == rows["read_bytes"].arr.sum().sum() / 2**20
    assert numbers.lookups == tokens["lookups"].sum()
    displaced, agreed = [], []
    for row in rows.iter_rows(named=True):
        p = np.array(row["scores"], dtype=np.float64)
        p /= p.sum()
        displaced.append(p[row["router_experts"]].sum() - p[row["experts"]].sum())
        agreed.append(len(set(row["router_experts"]) & set(row["experts"])) / 8)
    assert numbers.mass_displaced == pytest.approx(np.mean(displaced), abs=1e-12)
    assert numbers.agreement == pytest.approx(np.mean(agreed), abs=1e-12)
    changed = sum(8 - round(8 * a) for a in agreed)
    assert numbers.substituted == changed > 0


def test_a_wider_margin_reads_less_and_displaces_more():
    trace = open_trace(ROOT / "traces" / "original.trace")
    cells = build_cells(budgets=["2cycles"], margins=["0", "0.1", "0.2", "0.4"])
    found = [n.decode for n in sweep(trace, cells)]
    misses, mass = [n.misses for n in found], [n.mass_displaced or 0.0 for n in found]
    assert misses == sorted(set(misses), reverse=True)
    assert mass[0] == 0
    assert mass == sorted(set(mass))


WITHOUT_ENGINE = """
import sys
sys.modules["llama_cpp"] = None  # as if the extra were not installed
import simlab
from simlab.cells import build_cells
numbers = simlab.replay(sys.argv[1], build_cells(budgets=["2cycles"], margins=["0.15"])[0])
assert numbers.decode.substituted > 0
assert "policies" not in sys.modules
try:
    simlab.Engine()
except Exception as error:
    print(error)
"""


def test_replaying_needs_no_engine():
    command = [sys.executable, "-c", WITHOUT_ENGINE, str(ROOT / "traces" / "original.trace")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'simlab[engine]'" in done.stdout


def test_ci_runs_the_readmes_two_commands():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in readme.splitlines() if ".venv/bin/pip install -e '.[all]'" in line]
    assert len(commands) == 2
    for command in commands:
        assert command in ci
    assert ci[-1] == commands[-1]


def test_nothing_imports_a_top_level_policies():
    for path in [*ROOT.glob("simlab/**/*.py"), *ROOT.glob("policies/*.py")]:
        for line in path.read_text().splitlines():
            assert not line.strip().startswith(("import policies", "from policies")), path


def test_picks_spread_along_the_front():
    from simlab.judge.pick import pick_along, trade_off_front

    trace = open_trace(ROOT / "traces" / "original.trace")
    numbers = sweep(
        trace, build_cells(budgets=["2cycles"], margins=["0", ".05", ".1", ".15", ".2", ".3", ".6"])
    )
    front = trade_off_front(numbers)
    misses = [numbers[i].decode.misses for i in front]
    assert misses == sorted(misses, reverse=True)
    picks = pick_along(numbers, 4)
    assert picks[0] == front[0]
    assert picks[-1] == front[-1]
    assert len(picks) == 4
    # A cell that is worse in both is never picked.
    assert trade_off_front([numbers[3], numbers[3], numbers[0]]) == [2, 0]
    assert pick_along([], 4) == []
