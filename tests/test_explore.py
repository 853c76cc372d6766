"""Grids of where a cell misses or changes the routing, and the views that notebooks replay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

pytest.importorskip("altair")

from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.judge import explore
from simlab.judge.explore_time import alike
from simlab.judge.misses.grids import MOST_CELLS, change_grid, changed_experts, grid, miss_grid
from simlab.judge.speed.read_lanes import reads_by_size_and_lane
from simlab.replay.slots import SlotReplay, replay_slots
from simlab.trace.store import Trace, open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_trace(TRACES / "margin-0.15.trace")


@pytest.fixture(scope="module")
def replayed(trace: Trace) -> SlotReplay:
    return replay_slots(trace, build_cells(budgets=["2cycles"], margins=["0.15"])[0])


def test_a_grid_adds_up_stretches() -> None:
    frame = pl.DataFrame({"token": [0, 0, 1, 2, 2], "layer": [3, 4, 3, 3, 4], "misses": [1, 2, 4, 8, 16]})
    assert grid(frame, ["misses"]).rows() == [
        (0, 1, 3, 1), (0, 1, 4, 2), (1, 1, 3, 4), (2, 1, 3, 8), (2, 1, 4, 16)
    ]  # fmt: skip
    assert grid(frame.clear(), ["misses"]).rows() == []


@pytest.mark.parametrize(
    ("tokens", "layers"), [(1, 1), (120, 2), (121, 2), (1000, 60), (50, 4000), (3, 6000)]
)
def test_a_grid_is_small_and_loses_nothing(tokens: int, layers: int) -> None:
    token, layer = np.divmod(np.arange(tokens * layers), layers)
    found = grid(pl.DataFrame({"token": token, "layer": layer, "n": np.ones(len(token), int)}), ["n"])
    assert found["n"].sum() == tokens * layers
    assert found.height <= max(MOST_CELLS, layers)
    of_layer = found.filter(pl.col("layer") == layers - 1)
    assert of_layer["tokens"].sum() == tokens
    assert of_layer["token"].to_list() == np.cumsum([0, *of_layer["tokens"][:-1]]).tolist()
    assert (found["n"] == found["tokens"]).all()


def test_misses_of_lookups() -> None:
    lookups = pl.DataFrame({"token": [0, 0, 0, 1], "layer": [1, 1, 2, 1], "hit": [True, False, False, True]})
    assert miss_grid(lookups).rows() == [(0, 1, 1, 2, 1, 50.0), (0, 1, 2, 1, 1, 100.0), (1, 1, 1, 1, 0, 0.0)]


@pytest.mark.slow
def test_changes_against_a_walk_over_the_slots(trace: Trace, replayed: SlotReplay) -> None:
    decode = replayed.numbers.decode
    rows: dict[tuple[int, int], list[dict]] = {}
    for slot in replayed.slots.filter((pl.col("phase") == 1) & (pl.col("turn") >= 0)).iter_rows(named=True):
        rows.setdefault((slot["graph"], slot["layer"]), []).append(slot)
    brought, left = Counter(), Counter()
    for (_, layer), slots in rows.items():
        picked, ran = {s["router_expert"] for s in slots}, {s["expert"] for s in slots}
        brought.update((layer, expert) for expert in ran - picked)
        left.update((layer, expert) for expert in picked - ran)
    found = changed_experts(replayed)
    assert {(r[0], r[1]): r[2] for r in found.rows() if r[2]} == brought
    assert {(r[0], r[1]): r[3] for r in found.rows() if r[3]} == left
    assert sum(brought.values()) == decode.substituted
    total = found["brought_in"] + found["left_out"]
    assert total.to_list() == sorted(total, reverse=True)
    where = change_grid(replayed)
    assert (where["slots"].sum(), where["substituted"].sum()) == (decode.slots, decode.substituted)


@pytest.mark.slow
def test_changes_have_the_figures_of_the_replay_with_intervals(trace: Trace, replayed: SlotReplay) -> None:
    found, decode = explore.changes(trace, replayed.numbers.cell), replayed.numbers.decode
    assert found.numbers == replayed.numbers
    for rate, value in (
        (found.miss_rate, decode.misses / decode.lookups),
        (found.mib_per_token, decode.read_mib_per_token),
        (found.substituted, (decode.substituted or 0) / decode.slots),
    ):
        assert rate.value == pytest.approx(value, rel=1e-12)
        assert rate.interval.low < rate.value < rate.interval.high


@pytest.mark.slow
def test_shipped_perplexities_belong_to_replays_of_today() -> None:
    path = TRACES / "original.validate.json"
    live = explore.measured_cells(path)
    assert [n.cell.margin for n in live] == [0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6]
    for n in live:
        low, high = n.intervals["ppl"]
        assert n.ppl is not None
        assert low < n.ppl < high
    numbers = explore.margin_sweep(open_trace(TRACES / "original.trace"), 2, explore.MARGINS, "lru", "global")
    assert len(numbers) == 3 * len(explore.MARGINS)
    here = explore.at_budget(numbers, 2)
    priced = explore.priced(here, live)
    assert [p.replay.cell.margin for p in priced] == [n.cell.margin for n in live]
    assert explore.priced(numbers, live) == priced  # no other budget was run live
    replays = [n for n in explore.numbers_of(path, explore.read_cells_table(path)) if n.source == "replay"]
    for told, pair in zip(replays, priced, strict=True):
        assert (told.decode.misses, told.decode.substituted) == (
            pair.replay.decode.misses,
            pair.replay.decode.substituted,
        )


def test_files_without_perplexities_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json"):
        explore.measured_cells(tmp_path / "none.json")
    text = (TRACES / "original.validate.json").read_text()
    blind = tmp_path / "blind.json"
    blind.write_text(text.replace('"live"', '"replay"'))
    with pytest.raises(InputError, match="holds no live cell with a perplexity"):
        explore.measured_cells(blind)


def test_what_a_person_types(tmp_path: Path) -> None:
    assert explore.traces_in(TRACES)[0] == "original.trace"
    assert len(explore.traces_in(TRACES)) == 3
    assert explore.traces_in(tmp_path) == []
    assert explore.chosen_trace(TRACES, "original.trace", " ").path == TRACES / "original.trace"
    assert explore.chosen_trace(tmp_path, "x", f" {TRACES / 'drop-0.75.trace'} ").header.route == "drop_cold"
    with pytest.raises(InputError, match="nowhere"):
        explore.chosen_trace(TRACES, "original.trace", str(tmp_path / "nowhere"))
    assert explore.margin_list(".2, 0.1,,.2") == ["0", "0.1", ".2"]
    assert explore.margin_list("") == ["0"]
    for wrong in ("x", "0.1, 2"):
        with pytest.raises(InputError, match="--margin"):
            explore.margin_list(wrong)


def test_choices_fit_the_trace(trace: Trace) -> None:
    steps = explore.budget_steps(trace.header)
    assert steps[0] == 0.25
    assert steps[-1] == 8  # all experts: 64 of 8 a token
    assert {1, 2, 4} <= set(steps)
    evictions = explore.evictions()
    assert evictions[0] == "lru"
    assert "belady" in evictions
    assert [p.header.route for p in map(open_trace, sorted(TRACES.glob("*.trace")))] == [
        "drop_cold", "substitute", "original"
    ]  # fmt: skip
    assert [other.path.name for other in alike(trace)] == ["drop-0.75.trace", "original.trace"]


def test_reads_by_size_and_lane_are_all_decode_reads(trace: Trace) -> None:
    found = reads_by_size_and_lane(trace)
    decode = trace.reads.filter((pl.col("phase") == 1) & (pl.col("turn") >= 0)).collect()
    assert found["reads"].sum() == decode.height
    assert found["mib"].sum() == pytest.approx(decode["window_bytes"].sum() / 2**20)
    size, lane, reads, mib, median = found.row(0)
    own = decode.filter((pl.col("window_bytes") == size) & (pl.col("lane") == lane))
    assert (reads, mib) == (own.height, own.height * size / 2**20)
    assert median == pytest.approx(np.median(own["latency_ns"].to_numpy()) / 1000)
