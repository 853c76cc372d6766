"""Explaining a cell: the fate of every lookup, and that its numbers are the replayer's."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from reference import ReferenceCell, reference_replay
from route_files import metrics_lines, route_lines, write_lines
from synthetic import Synthetic, from_batches, generate, make_header, without_scores

from simlab import explain
from simlab.cells import MIB, build_cells
from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.misses.anatomy import (
    KINDS,
    Anatomy,
    along_decode,
    anatomy,
    by_layer,
    counts,
    reuse_distribution,
    working_set,
)
from simlab.judge.misses.explain import Explanation, rate
from simlab.judge.misses.explain_text import explain_text, explain_to_json
from simlab.judge.stats import block_bootstrap_mean
from simlab.replay.run import replay
from simlab.replay.slots import by_layer as replay_by_layer
from simlab.replay.slots import replay_slots
from simlab.trace.store import Trace, TraceWriter, open_trace
from simlab.types import Budget, Cell, PhaseNumbers, Scope

ROOT = Path(__file__).resolve().parent.parent
ORIGINAL = ROOT / "traces" / "original.trace"
Captured = pytest.CaptureFixture[str]


def cell_of(budget: str, route: str = "original", scope: Scope = "global", evict: str = "lru") -> Cell:
    return build_cells(budgets=[budget], routes=[route], scope=scope, evicts=[evict])[0]


# ---------------------------------------------------------------------------------------------------------
# The fate of every lookup


def assert_counts(found: dict[str, int], part: PhaseNumbers) -> None:
    assert found["lookups"] == part.lookups
    assert found["hits"] == part.hits
    assert found["misses"] == part.misses
    assert found["cold"] == part.cold_misses
    assert found["policy"] + found["budget"] == part.capacity_misses
    assert found["read_bytes"] == part.read_mib * MIB


def assert_anatomy(found: Anatomy, numbers_of: Cell, trace: Trace) -> None:
    numbers = replay(trace, numbers_of)
    assert found.numbers == numbers
    assert_counts(counts(found.decode), numbers.decode)
    assert_counts(counts(found.lookups), numbers.all)
    layers = by_layer(found.decode)
    windows = along_decode(found.decode, found.n_tokens, 5)
    for name, total in counts(found.decode).items():
        assert layers[name].sum() == total, name
        assert windows[name].sum() == total, name
    assert windows["tokens"].sum() == numbers.decode.tokens


CELLS = {
    "lru": ("2cycles", "original", "global"),
    "own entries": ("12/layer", "original", "per_layer"),
    "off": ("off", "original", "global"),
    "lossy": ("1.5cycles", "substitute:L=.15+drop_cold:F=.75", "global"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_an_anatomy_adds_up_to_the_replay(name: str) -> None:
    trace = open_trace(ORIGINAL)
    budget, route, scope = CELLS[name]
    cell = cell_of(budget, route, "per_layer" if scope == "per_layer" else "global")
    found = anatomy(trace, cell)
    assert_anatomy(found, cell, trace)
    known = replay_by_layer(replay_slots(trace, cell))
    layers = by_layer(found.decode)
    for column in ("layer", "lookups", "hits", "misses", "read_bytes"):
        assert layers[column].to_list() == known[column].to_list(), column
    if name == "off":
        assert counts(found.lookups)["optimum_hits"] == 0
        return
    assert counts(found.decode)["optimum_misses"] < counts(found.decode)["misses"]
    if "substitute" not in route:
        # What LRU keeps Belady keeps: it would drop it only for a cache full of entries used sooner.
        assert found.lookups.filter(pl.col("hit") & ~pl.col("optimum_hit")).height == 0


def test_kinds_by_hand(tmp_path: Path) -> None:
    """Both layers pick 0 1 2 0 1 2 (the hits: `test_belady_by_hand`), 10 bytes an entry, room for two in each layer."""
    header = make_header(n_layer=2, n_expert=4, k=1, sizes=(10,))
    trace = from_batches(header, [[0], [1], [2], [0], [1], [2]]).write(tmp_path / "t")
    found = anatomy(trace, cell_of("2/layer"))
    kinds = ["cold", "cold", "cold", "policy", "budget", "policy"]
    assert found.lookups["kind"].to_list() == [kind for kind in kinds for _ in range(2)]
    assert found.lookups["token"].to_list() == [t for t in range(6) for _ in range(2)]
    assert found.lookups["reuse_bytes"].to_list() == [None] * 6 + [30] * 6
    assert by_layer(found.decode).select("layer", "policy", "budget").rows() == [(0, 2, 1), (1, 2, 1)]


def test_a_lossy_anatomy_is_of_what_ran() -> None:
    """Belady on the executed ids: its lookups are the cell's, and the cell's hits those of its own residency."""
    trace = open_trace(ORIGINAL)
    cell = cell_of("1.5cycles", "substitute:L=.15+drop_cold:F=.75")
    found, slots = anatomy(trace, cell), replay_slots(trace, cell).slots
    ran = (
        slots.filter(~pl.col("dropped")).group_by("graph", "layer", "expert").agg(pl.col("residency").first())
    )
    looked_up = found.lookups.select("graph", "layer", "expert", "hit")
    both = ran.join(looked_up, on=["graph", "layer", "expert"], how="full", coalesce=True)
    assert both.null_count().row(0) == (0,) * len(both.columns)
    assert both.height == found.lookups.height
    assert (both["residency"] == both["hit"].cast(pl.Int8)).all()


# ---------------------------------------------------------------------------------------------------------
# Working set, reuse, rates


@pytest.mark.parametrize("per_graph", [1, 3])
def test_working_sets_counted_one_by_one(per_graph: int, tmp_path: Path) -> None:
    header = make_header(n_layer=2, n_expert=8, k=2, sizes=(10, 3))
    synthetic = generate(header, n_decode=11, n_prefill=3, n_turns=2, tokens_per_decode_graph=per_graph)
    found = anatomy(synthetic.write(tmp_path / "t"), cell_of("2cycles"))
    tokens: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for row in synthetic.rows:
        if row["phase"] == 1:
            used = tokens.setdefault((row["graph"], row["pos_in_graph"]), set())
            used |= {(row["layer"], e) for e in row["router_experts"]}
    sets = list(tokens.values())
    assert len(sets) == 22 * per_graph
    got = working_set(found, 1000)
    assert got["tokens"].to_list() == [*(2**n for n in range(9) if 2**n < len(sets)), len(sets)]
    for row in got.iter_rows(named=True):
        width = row["tokens"]
        unions = [set().union(*sets[i : i + width]) for i in range(len(sets) - width + 1)]
        assert row["entries"] == pytest.approx(np.mean([len(u) for u in unions]), abs=1e-9)
        size = np.mean([sum(header.entry_bytes[layer] for layer, _ in u) for u in unions])
        assert row["mib"] * MIB == pytest.approx(size, abs=1e-6)
        assert row["of_budget"] == pytest.approx(size / 1000)


def test_a_reuse_distance_at_an_edge_is_within(tmp_path: Path) -> None:
    """Reuse of exactly one cycle: a cache of one cycle hits it, so it belongs to the row that ends there."""
    header = make_header(n_layer=2, n_expert=4, k=1, sizes=(10,))
    found = anatomy(from_batches(header, [[0], [0], [1], [0]]).write(tmp_path / "t"), cell_of("2cycles"))
    # Token 1: 20 bytes since token 0, one cycle. Token 3: both layers' 0 and 1, 40 bytes, two cycles.
    rows = reuse_distribution(found.decode, 20).filter(pl.col("lookups") > 0)
    assert rows.select("from_cycles", "to_cycles", "lookups").rows() == [(0.5, 1.0, 2), (1.5, 2.0, 2)]
    assert rows["share"].to_list() == [0.25, 0.25]


def test_a_ratio_and_its_interval() -> None:
    hits, lookups = np.array([1.0, 0, 3, 2] * 10), np.array([4.0, 2, 4, 2] * 10)
    turns = np.repeat([0, 1], 20)
    found = rate(hits, lookups, turns)
    assert found.value == 0.5
    assert found.interval.low < 0.5 < found.interval.high
    one = np.ones(40)
    assert rate(hits, one, turns).interval == pytest.approx(block_bootstrap_mean([hits[:20], hits[20:]]))
    assert math.isnan(rate(hits[:0], hits[:0], turns[:0]).value)


# ---------------------------------------------------------------------------------------------------------
# Explanations


@pytest.mark.slow
def test_an_explanation_of_a_shipped_trace() -> None:
    trace = open_trace(ORIGINAL)
    cell = cell_of("2cycles")
    found = explain(trace, cell)
    numbers = replay(trace, cell)
    assert found.decode.hit_rate.value == numbers.decode.hit_rate
    assert found.decode.mib_per_token.value == pytest.approx(numbers.decode.read_mib_per_token, rel=1e-12)
    assert found.prefill.counts["lookups"] == numbers.all.lookups - numbers.decode.lookups
    assert found.prefill.tokens == 8
    low, high = found.decode.hit_rate.interval
    assert low < found.decode.hit_rate.value < high
    assert found.decode.counts["optimum_hits"] > found.decode.counts["hits"]
    margins = [c for c in found.changes if c.what.startswith("substitution")]
    for change, margin in zip(margins, ("0.05", "0.1", "0.15"), strict=True):
        (lossy,) = build_cells(budgets=["2cycles"], margins=[margin])
        decode = replay(trace, lossy).decode
        expected = (decode.hit_rate, decode.read_mib_per_token, decode.mass_displaced)
        # A mean over slots is summed in another order where there are more lanes.
        assert change[1:] == pytest.approx(expected, rel=1e-12)
    for change in found.changes:
        if "one cache per layer" in change.what:
            assert change.hit_rate == replay(trace, cell_of("2cycles", scope="per_layer")).decode.hit_rate
        if "1.5 times" in change.what:
            assert change.hit_rate == replay(trace, cell_of("3cycles")).decode.hit_rate
    assert found.timing is not None
    assert found.timing.same_cache
    assert found.timing.tokens == 247
    tokens = trace.tokens.filter((pl.col("phase") == 1) & (pl.col("turn") >= 0)).collect()
    assert found.timing.wall_ms.value == pytest.approx(np.mean(tokens["wall_ns"].to_numpy()) / 1e6)
    assert found.timing.read_share == pytest.approx(
        tokens["read_wait_ns"].to_numpy().sum() / tokens["wall_ns"].to_numpy().sum()
    )
    text = explain_text(found)
    assert "Cache figures are replay (simulated)" in text
    assert "Measured when the trace was recorded, not simulated." in text
    assert f"{numbers.decode.misses:,} decode misses" in text
    json.dumps(explain_to_json(found)["verdict"], allow_nan=False)


def explained(trace: Synthetic, folder: Path, cell: Cell) -> Explanation:
    opened = trace.write(folder)
    found = explain(opened, cell)
    numbers = replay(opened, cell)
    assert_counts(found.decode.counts, numbers.decode)
    assert found.decode.tokens == numbers.decode.tokens
    # Everything is said, and as JSON, whatever is missing.
    assert explain_text(found)
    assert json.loads(json.dumps(explain_to_json(found)))["verdict"]["kind"] == found.verdict.kind
    return found


def loop(n_layer: int, k: int, n_tokens: int, n_groups: int, sizes: tuple[int, ...] = (10,)) -> Synthetic:
    """Tokens go round `n_groups` disjoint sets of k experts, the same in every layer; 10 bytes an entry."""
    header = make_header(n_layer=n_layer, n_expert=k * n_groups, k=k, sizes=sizes)
    header = dataclasses.replace(header, gating=None, score_space=None, weight_rule=None)
    groups = [[k * g + slot for slot in range(k)] for g in range(n_groups)]
    return from_batches(header, [groups[t % n_groups] for t in range(n_tokens)])


def test_verdict_policy(tmp_path: Path) -> None:
    """LRU's worst case: going round 4 sets with room for 3, it never hits. Belady keeps two of them."""
    found = explained(loop(2, 2, 40, 4), tmp_path / "t", cell_of("3cycles"))
    assert found.decode.counts["hits"] == 0
    assert found.verdict.kind == "policy"
    gain = found.decode.counts["misses"] - found.decode.counts["optimum_misses"]
    assert f"Belady would hit {gain:,} of the {found.decode.counts['misses']:,}" in found.verdict.sentence


def test_verdict_working_set(tmp_path: Path) -> None:
    """Going round 24 sets with room for 2: hardly anything can be kept whatever is evicted."""
    found = explained(loop(2, 2, 240, 24), tmp_path / "t", cell_of("2cycles"))
    assert found.verdict.kind == "working set"
    assert found.decode.counts["budget"] > found.decode.counts["policy"]
    assert found.verdict.sentence.endswith("no eviction could win more.")
    assert "so no eviction has fewer misses" in explain_text(found)


def test_belady_is_called_the_optimum_of_entries_of_one_size_only(tmp_path: Path) -> None:
    """Layers of 10 and 11 bytes an entry: a cache per layer holds one size, one for all layers holds two."""
    uneven = loop(2, 2, 240, 24, sizes=(10, 11))
    found = explained(uneven, tmp_path / "t", cell_of("2cycles"))
    assert found.verdict.sentence.endswith("what eviction could win at most is not known.")
    assert "so another eviction may have fewer misses" in explain_text(found)
    found = explained(uneven, tmp_path / "u", cell_of("2cycles", scope="per_layer"))
    assert found.verdict.sentence.endswith("no eviction could win more.")


def test_verdict_cold(tmp_path: Path) -> None:
    """Room for everything: each of the 8 sets is read once and never again."""
    found = explained(loop(2, 2, 40, 8), tmp_path / "t", cell_of("8cycles"))
    assert found.verdict.kind == "cold"
    c = found.decode.counts
    assert (c["misses"], c["cold"], c["policy"], c["budget"]) == (32, 32, 0, 0)
    assert "fit in the budget" in found.verdict.because[-1]


def test_verdict_below_a_cycle(tmp_path: Path) -> None:
    """The same set for ever, 4 layers: a cache of 3/4 of it hits nothing under LRU, yet Belady does."""
    found = explained(loop(4, 2, 30, 2), tmp_path / "t", cell_of("0.75cycles"))
    assert found.verdict.kind == "cliff"
    assert found.decode.counts["hits"] == 0
    assert found.decode.counts["optimum_hits"] > 0
    assert found.foot_bytes == 4 * 2 * 10 - 2 * 10
    assert "at or below the foot of the cliff" in found.verdict.because[0]
    assert "below the climb" in explain_text(found)


def test_verdict_without_misses(tmp_path: Path) -> None:
    """The prefill reads everything the decode uses."""
    trace = loop(2, 2, 8, 2)
    for row in trace.rows[: 2 * 2]:
        row["phase"] = 0
    found = explained(trace, tmp_path / "t", cell_of("2cycles"))
    assert found.verdict.kind == "nothing"
    assert found.prefill.counts["cold"] == found.prefill.counts["misses"] == 8


def test_verdict_without_a_cache(tmp_path: Path) -> None:
    found = explained(loop(2, 2, 8, 2), tmp_path / "t", cell_of("off"))
    assert found.verdict.kind == "no cache"
    assert found.decode.hit_rate.value == 0


def test_verdict_without_a_decode(tmp_path: Path) -> None:
    trace = generate(make_header(n_layer=2, n_expert=8, k=2), n_decode=0, n_prefill=4)
    found = explained(trace, tmp_path / "t", cell_of("2cycles"))
    assert found.verdict.kind == "no decode"
    assert math.isnan(found.decode.hit_rate.value)
    assert found.prefill.counts["lookups"] > 0


def test_an_empty_trace(tmp_path: Path) -> None:
    header = make_header(n_layer=2, n_expert=8, k=2)
    with TraceWriter(tmp_path / "t", header, 2):
        pass
    found = explain(tmp_path / "t", cell_of("2cycles"))
    assert found.verdict.kind == "no decode"
    assert explain_text(found)


@pytest.mark.slow
def test_one_layer_and_one_expert(tmp_path: Path) -> None:
    header = make_header(n_layer=1, n_expert=8, k=1)
    found = explained(generate(header, n_decode=30), tmp_path / "t", cell_of("0.5cycles"))
    assert found.foot_bytes is None
    assert found.verdict.kind != "cliff"
    assert "with one MoE layer nothing comes between" in explain_text(found)


def test_without_scores_or_timings(tmp_path: Path) -> None:
    trace = without_scores(generate(make_header(n_layer=2, n_expert=8, k=2), n_decode=20))
    found = explained(trace, tmp_path / "t", cell_of("1.5cycles"))
    assert found.timing is None
    assert not any(c.what.startswith("substitution") for c in found.changes)
    text = explain_text(found)
    assert "The trace has no scores" in text
    assert "The trace has no timings" in text


def test_wide_decode_graphs_and_turns(tmp_path: Path) -> None:
    trace = generate(
        make_header(n_layer=3, n_expert=8, k=2, sizes=(1000, 7)),
        n_decode=15,
        n_turns=2,
        tokens_per_decode_graph=2,
        throw_away=True,
    )
    found = explained(trace, tmp_path / "t", cell_of("1.5cycles"))
    assert found.decode.tokens == 60
    reference = reference_replay(trace, ReferenceCell(k=2, total_bytes=found.budget.total_bytes))
    assert found.decode.counts["hits"] == reference.decode.hits


def test_a_cell_that_is_not_lru(tmp_path: Path) -> None:
    policy = tmp_path / "newest.py"
    policy.write_text(
        "from simlab.policy import eviction\n\n\n@eviction('static', source='a test')\n"
        "def newest(entry, state, knobs):\n    return -entry.position\n"
    )
    found = explained(loop(2, 2, 40, 4), tmp_path / "t", cell_of("3cycles", evict=str(policy)))
    assert any(c.what == "LRU, router's own routing, same cache" for c in found.changes)
    # Evicting the newest is what Belady does when sets go round.
    assert found.decode.counts["hits"] > 0


def test_a_training_part_is_not_counted(tmp_path: Path) -> None:
    trace = generate(make_header(n_layer=2, n_expert=8, k=2), n_decode=40).write(tmp_path / "t")
    cell = cell_of("1.5cycles")
    found, numbers = explain(trace, cell, train="50%"), replay(trace, cell, train="50%")
    assert found.decode.tokens == numbers.decode.tokens == 20
    assert_counts(found.decode.counts, numbers.decode)
    assert found.curve["decode_hits"][0] + found.curve["decode_misses"][0] == numbers.decode.lookups


def test_one_expert_at_a_time_is_refused() -> None:
    with pytest.raises(InputError, match="--sequential"):
        explain(ORIGINAL, dataclasses.replace(cell_of("2cycles"), sequential=True))


# ---------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def toy(tmp_path: Path) -> str:
    files = [
        str(write_lines(tmp_path / "toy.csv", route_lines(decode=12))),
        str(write_lines(tmp_path / "toy.metrics.csv", metrics_lines(decode=12))),
    ]
    assert main(["import", *files, "--out", str(tmp_path / "toy.trace")]) == 0
    return str(tmp_path / "toy.trace")


def test_the_command(toy: str, tmp_path: Path, capsys: Captured) -> None:
    capsys.readouterr()
    chart = tmp_path / "e.html"
    assert main(["explain", toy, "--budget", "1.5cycles", "--chart", str(chart)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[3] == ""
    assert "VERDICT: " in shown.out
    assert "simulated" in shown.out
    page = chart.read_text("utf-8")
    assert "chart-explain" in page
    assert "replay (simulated)" in page
    assert main(["explain", toy, "--budget", "1.5cycles", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["replay", toy, "--budget", "1.5cycles", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    for name in ("tokens", "lookups", "hits", "misses"):
        assert found["decode"][name] == numbers["decode"][name]
        assert found["decode"][name] + found["prefill"][name] == numbers["all"][name]
    assert found["decode"]["hit_rate"]["value"] == numbers["decode"]["hit_rate"]
    assert sum(found["decode"][kind] for kind in KINDS) == numbers["decode"]["misses"]
    assert found["timing"]["source"] == "live"
    assert found["timing"]["wall_ms"]["value"] == pytest.approx(10.5)
    assert sum(row["lookups"] for row in found["by_layer"]) == found["decode"]["lookups"]
    assert main(["explain", toy, "--budget", "1.5cycles", "--chart", str(chart)]) == 2
    assert "--chart" in capsys.readouterr().err
    assert main(["explain", toy, "--budget", "1,2"]) == 2
    assert main(["explain", toy, "--budget", "1cycle", "--margin", ".1"]) == 2
    assert "scores" in capsys.readouterr().err


def test_the_recorded_cell_is_the_default(capsys: Captured) -> None:
    assert main(["explain", str(ORIGINAL), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget_cycles"] == 2
    assert (found["route"], found["evict"], found["scope"]) == ("original", "lru", "global")


def test_a_budget_below_a_cycle_says_so_once(toy: str, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["explain", toy, "--budget", "0.5cycles", "--json"]) == 0
    assert "below one token cycle" in capsys.readouterr().err


def test_an_exact_budget_from_python() -> None:
    """A cell made in Python, with a budget no text would give."""
    cell = dataclasses.replace(cell_of("2cycles"), budget=Budget("bytes", 3_000_001, "3000001 bytes"))
    found = explain(ORIGINAL, cell)
    assert found.budget.total_bytes == 3_000_001
    assert found.decode.hit_rate.value == replay(ORIGINAL, cell).decode.hit_rate
