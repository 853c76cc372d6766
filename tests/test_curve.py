"""The LRU curve: reuse distances by hand, and equality with replays at every budget, to the lookup and byte."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import ReferenceCell, reference_replay
from route_files import route_lines, shared, write_lines
from synthetic import Synthetic, from_batches, generate, make_header, without_scores

from simlab import lru_curve
from simlab.cells import MIB, parse_route
from simlab.cli.main import main
from simlab.errors import InputError, SimlabWarning
from simlab.replay.columns import TraceColumns
from simlab.replay.curve import at_budget, cliff_foot, curve_to_json, landmarks
from simlab.replay.lookups import NEVER, find_lookups, original_ids, reuse_bytes
from simlab.replay.run import sweep
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, TraceWriter, open_trace
from simlab.types import Budget, Cell, Scope, TraceHeader

ROOT = Path(__file__).resolve().parent.parent
SCOPES: tuple[Scope, ...] = ("global", "per_layer")


def rows_of(*graphs: tuple[int, int, list[list[int]]], phase: int = 1) -> list[dict[str, Any]]:
    """Routing rows from (graph, layer, ids of each row); graphs of several rows are wide batches."""
    return [
        {
            "turn": 0, "graph": graph, "phase": phase, "step": graph, "layer": layer, "pos_in_graph": pos,
            "router_experts": ids,
        }
        for graph, layer, batch in graphs
        for pos, ids in enumerate(batch)
    ]  # fmt: skip


def distances(trace: Trace, scope: Scope = "global") -> dict[tuple[int, int, int], int | None]:
    """Reuse distance by (batch, layer, expert), None for first lookups."""
    columns = TraceColumns(trace)
    found = find_lookups(columns, original_ids(columns))
    reuse = reuse_bytes(columns, found, scope)
    return {
        (int(b), int(layer), int(e)): None if r == NEVER else int(r)
        for b, layer, e, r in zip(found.batch, found.layer, found.expert, reuse, strict=True)
    }


# ---------------------------------------------------------------------------------------------------------
# By hand


def test_two_layers_of_unequal_entries_by_hand(tmp_path: Path) -> None:
    """k = 1; entries of 10 bytes in layer 0 and 3 bytes in layer 1; both layers pick 0, 1, 0, 0."""
    header = make_header(n_layer=2, n_expert=4, k=1, sizes=(10, 3))
    trace = from_batches(header, [[0], [1], [0], [0]]).write(tmp_path / "t")
    # Batches 0 to 7, layers alternating: L0:0 L1:0 | L0:1 L1:1 | L0:0 L1:0 | L0:0 L1:0.
    assert distances(trace) == {
        (0, 0, 0): None,
        (1, 1, 0): None,
        (2, 0, 1): None,
        (3, 1, 1): None,
        # Since batch 0: itself 10, L1:0 3, L0:1 10, L1:1 3.
        (4, 0, 0): 26,
        # Since batch 1: itself 3, L0:1 10, L1:1 3, L0:0 10.
        (5, 1, 0): 26,
        # Since batch 4: itself 10 and L1:0 3.
        (6, 0, 0): 13,
        # Since batch 5: itself 3 and L0:0 10.
        (7, 1, 0): 13,
    }
    # A cache per layer: batch 2 lies between 0 and 4, itself 10 and L0:1 10; nothing between 4 and 6.
    later = {k: v for k, v in distances(trace, "per_layer").items() if v is not None}
    assert later == {(4, 0, 0): 20, (5, 1, 0): 6, (6, 0, 0): 0, (7, 1, 0): 0}


def test_the_curve_of_that_by_hand(tmp_path: Path) -> None:
    header = make_header(n_layer=2, n_expert=4, k=1, sizes=(10, 3))
    trace = from_batches(header, [[0], [1], [0], [0]]).write(tmp_path / "t")
    curve = lru_curve(trace)
    assert curve["budget_bytes"].to_list() == [1, 13, 26]
    assert curve["decode_hits"].to_list() == [0, 2, 4]
    # All 8 lookups read 4 * 13 bytes; each pair of hits saves 13.
    assert curve["decode_read_bytes"].to_list() == [52, 39, 26]
    assert curve["decode_cold_misses"].to_list() == [4, 4, 4]
    assert curve["budget_cycles"].to_list() == [1 / 13, 1.0, 2.0]
    # Layer 1 needs 6 bytes for its long reuse, layer 0 needs 20; half the budget each, so 12 and 40 in all.
    apart = lru_curve(trace, "per_layer")
    assert apart["budget_bytes"].to_list() == [1, 12, 40]
    assert apart["decode_hits"].to_list() == [2, 3, 4]
    assert at_budget(apart, 39)["decode_hits"] == 3
    assert at_budget(apart, 40)["decode_hits"] == 4


def test_the_order_within_a_batch_counts(tmp_path: Path) -> None:
    """One layer, 1-byte entries: of {0, 1}, expert 1 is the newer one when {2, 3} comes."""
    trace = from_batches(
        make_header(n_layer=1, n_expert=8, k=2, sizes=(1,)), [[0, 1], [2, 3], [0, 1], [1, 4]]
    )
    found = distances(trace.write(tmp_path / "t"))
    assert (found[2, 0, 0], found[2, 0, 1]) == (4, 3)
    # The batch before last used 1: nothing lies between, so no cache is too small for it.
    assert found[3, 0, 1] == 0


def test_a_wide_batch_counts_last_occurrences(tmp_path: Path) -> None:
    """A prefill of [0, 1] and [2, 0] leaves 1, 2, 0 behind, newest last."""
    header = make_header(n_layer=1, n_expert=8, k=2, sizes=(1,))
    rows = rows_of((0, 0, [[0, 1], [2, 0]]), phase=0) + rows_of((1, 0, [[3, 4]]), (2, 0, [[0, 1]]))
    found = distances(Synthetic(header, rows, 2).write(tmp_path / "t"))
    assert found[2, 0, 0] == 3  # 0, 3, 4
    assert found[2, 0, 1] == 5  # 1, 2, 0, 3, 4


def test_a_batch_without_slots_lies_between(tmp_path: Path) -> None:
    """{0, 1}, a row of holes, {0, 1}: the holes look nothing up, but their batch evicts the overshoot."""
    header = make_header(n_layer=1, n_expert=8, k=2, sizes=(1,))
    trace = Synthetic(header, rows_of((0, 0, [[0, 1]]), (1, 0, [[-1, -1]]), (2, 0, [[0, 1]])), 2)
    found = distances(trace.write(tmp_path / "t"))
    assert (found[2, 0, 0], found[2, 0, 1]) == (2, 1)
    assert reference_replay(trace, ReferenceCell(k=2, total_bytes=1)).decode.hits == 1


def test_a_batch_above_the_budget_pushes_out_all_others(tmp_path: Path) -> None:
    """Two layers, 2-byte entries: a wide batch of 4 entries lies between two uses of (0, 0)."""
    header = make_header(n_layer=2, n_expert=8, k=1, sizes=(2,))
    trace = Synthetic(
        header, rows_of((0, 0, [[0]]), (0, 1, [[0], [1], [2], [3]]), (1, 0, [[0]]), (1, 1, [[0]])), 1
    )
    found = distances(trace.write(tmp_path / "t"))
    assert found[2, 0, 0] == 10  # itself and the four
    assert found[3, 1, 0] == 10  # (1, 0) itself, 1, 2, 3 of its own batch, (0, 0)
    for budget, hits in ((9, 0), (10, 2)):
        assert reference_replay(trace, ReferenceCell(k=1, total_bytes=budget)).decode.hits == hits


# ---------------------------------------------------------------------------------------------------------
# Against replays


def assert_equals_reference(trace: Synthetic, curve: pl.DataFrame, scope: Scope, budgets: list[int]) -> None:
    n = len(trace.header.entry_bytes)
    for budget in budgets:
        layers = (budget // n,) * n if scope == "per_layer" else None
        cell = ReferenceCell(k=trace.header.n_expert_used, total_bytes=budget, layer_bytes=layers)
        whole = reference_replay(trace, cell)
        step = at_budget(curve, budget)
        both = [whole.decode, whole.prefill]
        for phase, parts in (("decode", both[:1]), ("all", both)):
            for name in ("hits", "misses", "cold_misses", "read_bytes"):
                assert step[f"{phase}_{name}"] == sum(getattr(p, name) for p in parts), (budget, phase, name)


def edges(curve: pl.DataFrame, n: int) -> list[int]:
    """Budgets at and one byte below some steps, where an error of one byte would show."""
    steps = curve["budget_bytes"].to_list()
    some = steps[:: max(1, len(steps) // n)]
    return sorted({b for step in some for b in (step, step - 1) if b > 0} | {steps[-1] + 1000})


HEADERS = (
    make_header(n_layer=3, n_expert=6, k=2, sizes=(1000, 1, 37)),
    make_header(n_layer=1, n_expert=5, k=1, sizes=(7,)),
    make_header(n_layer=2, n_expert=8, k=3, sizes=(5, 900)),
)


@st.composite
def traces(draw: st.DrawFn) -> Synthetic:
    trace = generate(
        draw(st.sampled_from(HEADERS)),
        seed=draw(st.integers(0, 2**32 - 1)),
        n_prefill=draw(st.integers(0, 7)),
        n_decode=draw(st.integers(0, 15)),
        n_turns=draw(st.integers(1, 2)),
        tokens_per_decode_graph=draw(st.integers(1, 3)),
        throw_away=draw(st.booleans()),
        last_layer_one_row=draw(st.booleans()),
    )
    for row in trace.rows:
        for slot in range(trace.width):
            if draw(st.integers(0, 9)) == 0:
                row["router_experts"][slot] = -1
            elif slot and draw(st.integers(0, 9)) == 0:
                row["router_experts"][slot] = row["router_experts"][0]
    return trace


@pytest.mark.slow
@given(traces(), st.sampled_from(SCOPES))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_the_curve_is_the_plain_replay_at_its_edges(trace: Synthetic, scope: Scope) -> None:
    with tempfile.TemporaryDirectory() as folder:
        curve = lru_curve(trace.write(Path(folder) / "t"), scope)
    assert_equals_reference(trace, curve, scope, edges(curve, 6))
    hits = curve["all_hits"].to_list()
    assert hits == sorted(hits), "LRU is monotone in the budget, also with unequal entries"


def assert_equals_replays(trace: Trace, scope: Scope, n_budgets: int = 20) -> None:
    curve = lru_curve(trace, scope)
    steps = curve["budget_bytes"].to_numpy()
    at = sorted(
        {int(b) for b in np.quantile(steps, np.linspace(0, 1, n_budgets + 2), method="nearest")}
        | {int(steps[len(steps) // 2]) - 1, int(steps[-1]) - 1, int(steps[-1]) * 2}
    )
    route = parse_route("original")
    cells = [Cell(route, Budget("bytes", b, f"{b} bytes"), scope=scope) for b in at if b > 0]
    assert len(cells) >= n_budgets
    for numbers in sweep(trace, cells):
        step = at_budget(curve, int(numbers.cell.budget.amount))
        for phase in ("decode", "all"):
            part = getattr(numbers, phase)
            for name in ("hits", "misses", "cold_misses", "hit_rate", "read_mib", "read_mib_per_token"):
                assert step[f"{phase}_{name}"] == getattr(part, name), (step["budget_bytes"], phase, name)


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["original", "margin-0.15", "drop-0.75"])
def test_shipped_traces_at_20_budgets(name: str, scope: Scope) -> None:
    assert_equals_replays(open_trace(ROOT / "traces" / f"{name}.trace"), scope)


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
def test_wide_prefill_turns_and_unequal_entries_at_20_budgets(scope: Scope, tmp_path: Path) -> None:
    header = make_header(n_layer=3, n_expert=16, k=4, sizes=(1000, 3, 70), first_layer=1)
    trace = generate(header, n_prefill=12, n_decode=20, n_turns=2, throw_away=True, last_layer_one_row=True)
    for row in trace.rows[::7]:
        row["router_experts"][2:] = [-1, -1]
    assert_equals_replays(trace.write(tmp_path / "t"), scope)


@pytest.mark.slow
def test_longer_lists_than_recorded_come_from_the_scores(tmp_path: Path) -> None:
    """A trace with 2 recorded ids where the model runs 3: the third is ranked, as a replay ranks it."""
    header = make_header(n_layer=2, n_expert=8, k=3)
    trace = generate(header, width=2, n_prefill=3, n_decode=12)
    assert_equals_replays(trace.write(tmp_path / "t"), "global", 8)
    with pytest.raises(InputError, match="3 experts per token, above the recorded 2"):
        lru_curve(without_scores(trace).write(tmp_path / "u"))


def test_the_recorded_qwen_decode(tmp_path: Path) -> None:
    """The hit rates the engine's authors computed with a script of their own, and the cliff, hit for hit."""
    path = import_files([str(shared("bmoe/qwen.route.csv"))], str(tmp_path / "q.trace"), False)
    trace = open_trace(path)
    curve = lru_curve(trace)
    for line in shared("bmoe/qwen-curve.csv").read_text().split()[1:]:
        budget, policy, hit_all, hit_decode, read = line.split(",")
        if policy != "lru":
            continue
        step = at_budget(curve, int(budget) * MIB)
        assert 100 * step["all_hit_rate"] == pytest.approx(float(hit_all), abs=6e-4)
        assert 100 * step["decode_hit_rate"] == pytest.approx(float(hit_decode), abs=6e-4)
        assert step["all_read_mib"] == pytest.approx(float(read), abs=0.06)
    cycle, largest = trace.header.cycle_bytes(), max(trace.header.entry_bytes.values())
    hits = [at_budget(curve, cycle - n * largest)["decode_hits"] for n in range(1, 7)]
    assert hits == [9455, 7070, 4758, 2640, 781, 0]
    assert cliff_foot(trace.header) == cycle - 6 * largest


# ---------------------------------------------------------------------------------------------------------
# Hazards and the command


def empty(header: TraceHeader, folder: Path) -> Trace:
    with TraceWriter(folder, header, header.n_expert_used):
        pass
    return open_trace(folder)


def test_nothing_to_look_up(tmp_path: Path) -> None:
    for scope in SCOPES:
        curve = lru_curve(empty(make_header(), tmp_path / f"e-{scope}"), scope)
        assert curve["budget_bytes"].to_list() == [1]
        assert curve["decode_hit_rate"].to_list() == [None]
        assert curve["all_read_mib_per_token"].to_list() == [None]
        assert all(mark.what in ("", "one token cycle", "one cycle minus k entries")
                   for mark in landmarks(curve, make_header(), scope))  # fmt: skip


def test_a_prefill_alone(tmp_path: Path) -> None:
    trace = generate(make_header(n_layer=2, n_expert=8, k=2), n_prefill=4, n_decode=0, n_turns=3)
    curve = lru_curve(trace.write(tmp_path / "t"))
    assert set(curve["decode_hits"]) == {0}
    assert curve["decode_hit_rate"].to_list() == [None] * curve.height
    assert_equals_reference(trace, curve, "global", edges(curve, 10))


def test_a_budget_of_nothing_is_no_budget(tmp_path: Path) -> None:
    curve = lru_curve(empty(make_header(), tmp_path / "t"))
    with pytest.raises(ValueError, match="0 bytes"):
        at_budget(curve, 0)


def test_look_ahead_is_left_out_and_said_so(tmp_path: Path) -> None:
    header = make_header(n_layer=2, n_expert=8, k=2)
    trace = generate(header, n_prefill=0, n_decode=6)
    with TraceWriter(tmp_path / "t", header, 2) as writer:
        names = ("turn", "graph", "phase", "step", "layer", "pos_in_graph", "router_experts")
        columns: dict[str, Any] = {n: [row[n] for row in trace.rows] for n in names}
        columns["router_experts"] = np.array(columns["router_experts"], np.int32)
        writer.add("routing", columns)
        writer.add("reads", {"turn": [0], "graph": [3], "phase": [1], "step": [3], "layer": [1],
                             "expert": [7], "speculative": [True]})  # fmt: skip
    with pytest.warns(SimlabWarning, match="recorded with look-ahead"):
        curve = lru_curve(tmp_path / "t")
    assert_equals_reference(trace, curve, "global", edges(curve, 5))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "toy.csv", route_lines(decode=20))
    trace = str(tmp_path / "toy.trace")
    assert main(["import", str(source), "--out", trace]) == 0
    capsys.readouterr()
    out, chart = tmp_path / "c.parquet", tmp_path / "c.html"
    for scope in SCOPES:
        curve = lru_curve(trace, scope)
        assert main(["curve", trace, "--json", "--scope", scope]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found == json.loads(json.dumps(curve_to_json(curve, open_trace(trace), scope)))
        assert found["steps"]["budget_bytes"] == curve["budget_bytes"].to_list()
        assert found["steps"]["decode_hits"] == curve["decode_hits"].to_list()
        assert found["decode"]["lookups"] == 20 * 3 * 2
        assert (found["source"], found["evict"], found["scope"]) == ("replay", "lru", scope)
    assert main(["curve", trace, "--out", str(out), "--chart", str(chart)]) == 0
    shown = capsys.readouterr()
    assert "replay (simulated)" in shown.out
    assert "one token cycle" in shown.out
    assert pl.read_parquet(out).equals(lru_curve(trace))
    page = chart.read_text("utf-8")
    assert "replay (simulated)" in page
    assert "<script>" in page
    assert main(["curve", trace, "--out", str(out)]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["curve", str(tmp_path / "none.trace")]) == 2
    assert main(["curve", trace, "--scope", "half"]) == 2


def test_many_lookups_are_quick(tmp_path: Path) -> None:
    """144,000 lookups; they take some 0.2 s of an idle core, the bound is for a busy one."""
    header = make_header(n_layer=24, n_expert=64, k=6, sizes=(1000, 1200))
    rng = np.random.default_rng(0)
    n_tokens, layers = 1000, np.array(header.moe_layers)
    graph = np.repeat(np.arange(n_tokens), len(layers))
    ids = np.argsort(rng.random((len(graph), 64)) ** 0.5, axis=1)[:, :6].astype(np.int32)
    zeros = np.zeros(len(graph), np.int64)
    with TraceWriter(tmp_path / "t", header, 6) as writer:
        writer.add("routing", {
            "turn": zeros.astype(np.int32), "graph": graph, "phase": (zeros + 1).astype(np.int8), "step": graph,
            "layer": np.tile(layers, n_tokens).astype(np.int32), "pos_in_graph": zeros.astype(np.int32),
            "router_experts": ids,
        })  # fmt: skip
    trace = open_trace(tmp_path / "t")
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curve = lru_curve(trace)
    assert time.process_time() - start < 5
    assert curve["decode_hits"][0] == 0
    assert curve["decode_hits"][-1] + curve["decode_cold_misses"][-1] == 1000 * 24 * 6
