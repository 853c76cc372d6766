"""The charts: what they draw, that they stay small, that they can be read in light, in dark and by everyone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

import vl_convert
from test_report import COMPARISONS, HEADER, LIVE, SWEEP, cells, numbers, points

import simlab.charts.theme
from simlab.charts.anatomy import curve_chart, foot_cycles
from simlab.charts.grids import expert_chart, grid_chart
from simlab.charts.live import comparison_chart, pareto_chart, pareto_front
from simlab.charts.sweeps import (
    budget_chart,
    margin_chart,
    policy_chart,
    price_chart,
    sweep_charts,
    tradeoff_chart,
)
from simlab.charts.theme import CONFIG, GREY, MOST_ROWS, RAMP, alt, data, in_notebook, ramp, themed, thinned
from simlab.charts.times import (
    Speed,
    read_latency_chart,
    read_size_chart,
    size_name,
    speed_chart,
    split_chart,
)
from simlab.charts.words import series_labels
from simlab.judge.stats import UNKNOWN, Interval
from simlab.types import Comparison

PAGES = ("#ffffff", "#14171c", "#181c1a")
"""Backgrounds: of the page in light and dark, of marimo in dark."""


def rows(chart: Any) -> list[dict[str, Any]]:
    """All rows of a chart, after its specification has gone through Vega-Lite's compiler."""
    spec = themed(chart).to_dict()
    assert vl_convert.vegalite_to_vega(spec)["marks"]
    return points(spec)


def tables(chart: Any) -> list[list[dict[str, Any]]]:
    """The rows of every layer."""
    return [layer.data["values"] for layer in chart.layer]


# ---------------------------------------------------------------------------------------------------------
# What they draw


def test_budgets_are_drawn_by_policy_with_the_cycle_and_the_cliff() -> None:
    found = rows(budget_chart(SWEEP, foot_cycles=foot_cycles(HEADER, "global")))
    lines = {(r["series"], r["cycles"], round(r["miss"], 1)) for r in found if "miss" in r}
    assert lines >= {("L = 0", 2, 65.9), ("L = 0", 4, 40), ("L = 0.3", 4, 10)}
    # Two layers of one size: one cycle less the half that is the largest layer's.
    assert {(r["mark"], r["cycles"]) for r in found if "mark" in r} == {
        ("one cycle", 1),
        ("end of the cliff", 0.5),
    }
    assert {r["mark"] for r in rows(budget_chart(SWEEP)) if "mark" in r} == {"one cycle"}
    assert foot_cycles(HEADER, "per_layer") is None
    assert foot_cycles(dataclasses.replace(HEADER, entry_bytes={1: 1}), "global") is None


def test_policies_are_drawn_best_first() -> None:
    evicts = {"fifo": 0.3, "lru": 0.5, "lfu": 0.4}
    found = [
        numbers(c, evicts[c.evict] + bonus, 1.0)
        for budget, bonus in (("2cycles", 0.0), ("4cycles", 0.2))
        for c in cells(budgets=[budget], margins=[], evicts=list(evicts))
    ]
    chart = policy_chart(found)
    assert len({r["budget"] for r in rows(chart)}) == 2
    order = chart.to_dict()["layer"][1]["encoding"]["y"]["sort"]
    assert order == [f"original routing, {name}" for name in ("lru", "lfu", "fifo")]


def test_a_sweep_has_the_charts_it_has_numbers_for() -> None:
    original = cells(margins=[])
    budgets = [numbers(c, 0.5, 1.0, mass=None) for c in cells(budgets=["1cycle", "2cycles"], margins=[])]
    evicts = [numbers(c, 0.5, 1.0, mass=None) for c in cells(margins=[], evicts=["lru", "fifo"])]
    margins = [numbers(c, 0.5, 1.0, mass=None) for c in cells()]
    assert list(sweep_charts([numbers(original[0], 0.5, 1.0, mass=None)])) == []
    assert list(sweep_charts(budgets)) == ["budget"]
    assert list(sweep_charts(evicts)) == ["policy"]
    assert list(sweep_charts(margins)) == ["margin"]
    assert list(sweep_charts(SWEEP)) == ["margin", "budget", "tradeoff"]


def test_lines_of_budgets_are_named_by_what_differs() -> None:
    both = [numbers(c, 0.5, 1.0) for c in cells(budgets=["1cycle", "2cycles"], margins=["0", ".1"])]
    assert series_labels(both, "budget") == ["L = 0", "L = 0.1"] * 2
    one = [numbers(c, 0.5, 1.0) for c in cells(budgets=["1cycle", "2cycles"], margins=[])]
    assert series_labels(one, "budget") == ["original routing, lru"] * 2


def test_names_at_the_ends_of_lines_stand_right_of_their_own_plot() -> None:
    both = themed(alt.hconcat(margin_chart(SWEEP), margin_chart(SWEEP))).to_dict()
    groups = [m for m in vl_convert.vegalite_to_vega(both)["marks"] if m["type"] == "group"]
    assert len(groups) == 2
    for group in groups:
        (names,) = (m["encode"]["update"] for m in group["marks"] if m["type"] == "text")
        # The width of the group it stands in, not that of both.
        assert names["x"] == {"field": {"group": "width"}}
        assert names["dx"]["value"] > 0


def test_a_margin_is_marked_and_can_be_picked() -> None:
    spec = margin_chart(SWEEP, chosen=0.15, pick="picked").to_dict()
    assert [p["name"] for p in spec["params"]] == ["picked"]
    assert spec["params"][0]["select"]["fields"] == ["margin"]
    assert {"margin": 0.15} in points(spec)
    assert {"margin": 0.17} in points(margin_chart(SWEEP, chosen=0.17).to_dict())
    assert "params" not in margin_chart(SWEEP).to_dict()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12))
def test_the_front_is_what_nobody_beats(found: list[tuple[int, int]]) -> None:
    front = pareto_front(found)

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a[0] >= b[0] and a[1] <= b[1] and a != b

    unbeaten = {p for p in found if not any(beats(q, p) for q in found)}
    assert {found[i] for i in front} == unbeaten
    assert len(front) == len(unbeaten)
    assert [found[i][1] for i in front] == sorted(found[i][1] for i in front)


def test_speed_against_quality_says_who_is_beaten() -> None:
    known = ((2.366, 4.2352), (3.84, 4.4024), (5.1, 5.36))
    runs = [dataclasses.replace(n, tok_s=speed, ppl=ppl) for n, (speed, ppl) in zip(LIVE, known, strict=True)]
    slow = dataclasses.replace(LIVE[1], tok_s=1.0, ppl=5.0, intervals={"tok_s": (0.9, 1.1)})
    found = rows(pareto_chart([*runs, slow, SWEEP[0]]))
    beaten = {r["tok_s"]: r["best"] for r in found}
    assert set(beaten) == {2.366, 3.84, 5.1, 1.0}  # a replay has neither
    assert {speed for speed, word in beaten.items() if word == "beaten in both"} == {1.0}
    assert any(r["slow"] == 0.9 for r in found)


def test_replay_beside_live_has_the_intervals_it_is_given() -> None:
    intervals = [{"hit_rate": Interval(50.0, 60.0)}, {}, {"hit_rate": UNKNOWN}]
    found = rows(comparison_chart(COMPARISONS, intervals))
    assert {(r["pick"], r["low"], r["high"]) for r in found if r.get("low") is not None} == {
        ("1", 50.0, 60.0)
    }
    assert all(r.get("low") is None for r in rows(comparison_chart(COMPARISONS)))


def test_prices_are_paired_where_all_are() -> None:
    pairs = [
        Comparison(
            r,
            dataclasses.replace(m, ppl_ratio=ratio, intervals={"ppl_ratio": (ratio - 0.01, ratio + 0.01)}),
        )
        for r, m, ratio in zip(SWEEP, LIVE, (1.0, 1.04, 1.3), strict=False)
    ]
    found = rows(price_chart(pairs, chosen=0.15))
    assert {(r["margin"], round(r["price"], 6), round(r["high"], 6)) for r in found} == {
        (0.0, 0.0, 1.0), (0.15, 4.0, 5.0), (0.3, 30.0, 31.0)
    }  # fmt: skip
    alone = Comparison(SWEEP[1], dataclasses.replace(LIVE[1], ppl_ratio=None))
    plain = rows(price_chart([pairs[0], alone]))
    assert {r["price"] for r in plain} == {LIVE[0].ppl, LIVE[1].ppl}


def test_grids_and_experts() -> None:
    grid = pl.DataFrame({"token": [0, 4], "tokens": [4, 2], "layer": [7, 7], "share": [25.0, 50.0]})
    found = rows(grid_chart(grid, "share", "Title", "Share (%)"))
    assert [(r["from"], r["to"], r["layer"], r["value"]) for r in found] == [(0, 4, 7, 25.0), (4, 6, 7, 50.0)]
    changed = pl.DataFrame(
        {"layer": range(40), "expert": [3] * 40, "brought_in": [2] * 40, "left_out": [1] * 40}
    )
    chart = expert_chart(changed)
    assert {(r["times"], r["drawn"]) for r in rows(chart)} == {(2, 2), (1, -1)}
    assert len(rows(chart)) == 48
    assert "the 24 most changed of 40" in chart.to_dict()["title"]["subtitle"]


def test_times_are_drawn_as_measured_or_simulated() -> None:
    parts = {"compute": 2.0, "waiting for reads": 5.0}
    found = rows(split_chart({"recorded, live (measured)": parts, "L = 0.1, replay (simulated)": parts}))
    assert sum(r["ms"] for r in found) == 14
    speeds = [Speed("a", 10.0, Interval(9.0, 11.0), live=False), Speed("a", 12.0, UNKNOWN, live=True)]
    assert [(r["source"], r["low"]) for r in rows(speed_chart(speeds))] [:2] == [
        ("replay (simulated)", 9.0), ("live (measured)", None)
    ]  # fmt: skip
    assert [size_name(n) for n in (12288, 2654208)] == ["12 KiB", "2.53 MiB"]


def test_reads_of_many_sizes_are_the_commonest() -> None:
    n = 40
    reads = pl.DataFrame(
        {"window_bytes": range(4096, 4096 * (n + 1), 4096), "lane": [0] * n, "reads": [1] * n,
         "mib": [float(i) for i in range(n)], "median_us": [None] * n}
    )  # fmt: skip
    chart = read_size_chart(reads, "buffered")
    assert len(rows(chart)) == 12
    assert "the 12 sizes of most bytes out of 40" in chart.to_dict()["title"]["subtitle"]
    assert "page cache" in chart.to_dict()["title"]["subtitle"]
    times = {name: [100.0] * n for name in ("p10_us", "median_us", "p90_us", "mib_s")}
    latencies = reads.select("window_bytes", "reads").with_columns(
        under_way=pl.Series(range(1, n + 1)), **{k: pl.Series(v) for k, v in times.items()}
    )
    assert {r["window_bytes"] for r in rows(read_latency_chart(latencies, None))} == {
        4096 * i for i in (37, 38, 39, 40)
    }


# ---------------------------------------------------------------------------------------------------------
# Size


def test_a_chart_refuses_more_rows_than_a_page_should_hold() -> None:
    data([{}] * MOST_ROWS)
    with pytest.raises(ValueError, match="at most 5000"):
        data([{}] * (MOST_ROWS + 1))
    assert thinned(list(range(11)), 3) == [0, 5, 10]
    assert thinned([1, 2], 3) == [1, 2]


def test_a_sweep_of_many_lines_stays_readable() -> None:
    margins, budgets = [str(i / 100) for i in range(20)], [f"{i / 10 + 1}cycles" for i in range(30)]
    many = [numbers(c, 0.5, 1.0) for c in cells(budgets=budgets, margins=margins)]
    chart = margin_chart(many)
    assert "12 of 30 lines drawn" in chart.title["subtitle"]
    drawn = {r["size"] for table in tables(chart) for r in table if "size" in r}
    assert len(drawn) == 12
    assert (min(drawn), max(drawn)) == (4.0, pytest.approx(4 * 3.9))
    assert "12 of 20 lines drawn" in budget_chart(many).title["subtitle"]


def test_a_sweep_of_thousands_is_drawn_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        numbers(c, 0.5, 1.0) for c in cells(budgets=["1cycle"], margins=[str(i / 600) for i in range(500)])
    ]
    monkeypatch.setattr(simlab.charts.theme, "MOST_ROWS", 200)
    chart = tradeoff_chart(many)
    assert "200 of 500 cells drawn" in chart.title["subtitle"]
    assert max(map(len, tables(chart))) == 200


def test_a_long_curve_is_drawn_in_steps_of_a_pixel() -> None:
    n = 50_000
    budgets = np.arange(1, n + 1)
    curve = pl.DataFrame(
        {
            "budget_cycles": budgets / n,
            "decode_hit_rate": budgets / n,
            "decode_read_mib_per_token": 1 - budgets / n,
        }
    )
    assert len(rows(curve_chart(curve, HEADER, "global"))) < MOST_ROWS


# ---------------------------------------------------------------------------------------------------------
# Colours


def linear(colour: str) -> np.ndarray:
    """Linear light of `#rrggbb`, `[3]`."""
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(light: np.ndarray) -> np.ndarray:
    """CIELAB of linear light under D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(light, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


BLIND = {
    "normal": np.eye(3),
    # Viénot, Brettel and Mollon 1999, and Brettel 1997 for tritans, as single matrices on linear light.
    "protan": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
    "deutan": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    "tritan": np.array([[1, 0.14461, -0.14461], [0, 0.85924, 0.14076], [0, 0.85924, 0.14076]]),
}


@pytest.mark.parametrize("colour", [*RAMP, GREY])
def test_colours_stand_out_on_every_background(colour: str) -> None:
    # 2.6: orange on white, always with a label or a legend beside it.
    assert min(contrast(colour, page) for page in PAGES) > 2.6


@pytest.mark.parametrize("sight", BLIND)
def test_colours_are_told_apart_by_everyone(sight: str) -> None:
    seen = [lab(BLIND[sight] @ linear(colour)) for colour in RAMP]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) > 15


def test_the_ramp_goes_through_its_colours() -> None:
    assert [ramp(i / 3) for i in range(4)] == list(RAMP)


def test_a_notebook_leaves_colours_of_words_to_its_theme() -> None:
    config = in_notebook(margin_chart(SWEEP)).to_dict()["config"]
    assert not {"labelColor", "titleColor"} & set(config["axis"])
    assert config["background"] == "transparent" == CONFIG["background"]
    assert "gridColor" not in CONFIG["axis"]
