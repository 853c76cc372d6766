"""Picking: choices by hand on made settings, the default grid, refusals, and a short pick checked live."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_header

from simlab.cells import build_cells, parse_route
from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.measure import measure
from simlab.judge.pick import evenly_along
from simlab.judge.pick_settings import (
    Rise,
    Setting,
    at_least,
    default_routes,
    pareto,
    rise_of,
    spread_along,
    surely,
    within_rise,
    without_twins,
)
from simlab.judge.quality.law import QualityModel, recorded_cell
from simlab.judge.speed.trace_time_cells import Foretold
from simlab.judge.stats import Interval
from simlab.policy import find_routing
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.trace.store import open_trace
from simlab.types import CellNumbers

ORIGINAL = Path(__file__).resolve().parent.parent / "traces" / "original.trace"
TEXT = EMBEDDED_MODEL.with_name("text-b.txt")


@cache
def measured_once() -> CellNumbers:
    trace = open_trace(ORIGINAL)
    return measure(trace, recorded_cell(trace.header))


@pytest.fixture
def numbers() -> CellNumbers:
    return measured_once()


def setting(
    numbers: CellNumbers, tok_s: float, rise: float | None, mass: float = 0.0, misses: int = 0
) -> Setting:
    """Intervals: a tenth around the speed, half a point of perplexity above and below."""
    decode = dataclasses.replace(numbers.decode, mass_displaced=mass, misses=misses)
    speed, nothing = Interval(0.9 * tok_s, 1.1 * tok_s), Interval(0, 0)
    foretold = Foretold(
        dataclasses.replace(numbers, decode=decode),
        tok_s,
        speed,
        1e3 / tok_s,
        0,
        nothing,
        0,
        0,
        0,
        "reads",
        None,
    )
    of_ppl = None if rise is None else Rise(rise, rise - 0.005, rise + 0.005)
    return Setting(foretold, 1.0, Interval(0.9, 1.1), of_ppl)


def test_a_limit_on_perplexity(numbers):
    some = [setting(numbers, s, r) for s, r in ((100, 0.0), (150, 0.018), (140, 0.01), (300, 0.05))]
    picks = within_rise(some, 0.02)
    assert [p.foretold.tok_s for p in picks] == [150, 140, 100]
    assert [surely(p, 0.02, None) for p in picks] == [False, True, True]
    assert within_rise([setting(numbers, 9, None)], 1.0) == []


def test_a_least_speed(numbers):
    some = [setting(numbers, s, r) for s, r in ((100, 0.0), (150, 0.02), (160, 0.01), (300, 0.05))]
    picks = at_least(some, 150)
    assert [(p.foretold.tok_s, p.cost) for p in picks] == [(160, 0.01), (150, 0.02), (300, 0.05)]
    assert [surely(p, None, 144) for p in picks] == [True, False, True]
    # Without a law the mass displaced stands for the cost.
    by_mass = [setting(numbers, 200, None, mass=m) for m in (0.3, 0.1)]
    assert [p.cost for p in at_least(by_mass, 1)] == [0.1, 0.3]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_a_front_is_what_none_beats(pairs):
    base = measured_once()
    some = [setting(base, float(s), r / 100) for s, r in pairs]
    front = [(s.foretold.tok_s, s.cost) for s in pareto(some)]
    best = {
        (float(s), r / 100)
        for s, r in pairs
        if not any((t >= s and q < r) or (t > s and q <= r) for t, q in pairs)
    }
    assert set(front) == best
    assert front == sorted(front, key=lambda p: p[1])
    few = spread_along(pareto(some), 3)
    assert len(few) <= 3
    assert {few[0].cost, few[-1].cost} <= {front[0][1], front[-1][1]}


def test_evenly_along_by_hand():
    points = np.array([[0.0, 0.0], [1.0, 0.1], [2.0, 0.5], [10.0, 1.0]])
    # Steps 0.14, 0.41 and 0.94 of 1.49: the middle lies nearest to the third.
    assert evenly_along(points, 3) == [0, 2, 3]
    assert evenly_along(points, 9) == [0, 1, 2, 3]


def test_twins(numbers):
    one, same, other = (setting(numbers, s, None, misses=m) for s, m in ((100, 5), (101, 5), (100, 6)))
    assert without_twins([one, same, other]) == [one, other]


def test_a_rise_in_perplexity():
    assert rise_of(0.0, -0.01, 0.01) == pytest.approx((0, -0.00995, 0.01005), rel=1e-3)


def test_the_default_grid_has_every_routing_policy():
    """But those that a trace cannot run; and every entry is a legal route."""
    header = dataclasses.replace(make_header(), n_expert=64, n_expert_used=8)
    routes = default_routes(header, scores=True, trained=True)
    named = {step.policy.name for route in routes for step in parse_route(route).steps}
    folder = Path(__file__).resolve().parent.parent / "policies"
    known = {p.stem for p in folder.glob("*.py")}
    routing = set()
    for name in known:
        try:
            routing.add(find_routing(name).name)
        except InputError:
            continue
    assert named == routing
    assert len(build_cells(budgets=["2cycles"], routes=routes)) == len(routes)
    assert not any(r.startswith("buddy") for r in default_routes(header, scores=True, trained=False))
    blind = default_routes(header, scores=False, trained=False)
    assert not any(r.startswith(("substitute", "cum_prob", "max_rank", "cache_prior")) for r in blind)
    assert "original" in blind


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-ppl-increase", "2%"], "perplexity is not known from a trace alone"),
        (["--max-ppl-increase", "200%"], "must lie between 0% and 100%"),
        (["--max-ppl-increase", "lots"], "'lots' is not a share; write 2% or 0.02"),
        (["--min-tok-s", "0"], "must be above 0"),
        ([], "one of the arguments --max-ppl-increase --min-tok-s --pareto is required"),
        (["--pareto", "--calibration", "nowhere.json"], "nowhere.json: no such file"),
    ],
)
def test_what_is_refused(words, said, capsys):
    assert main(["pick", str(ORIGINAL), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_pick_checked_live(tmp_path, capsys):
    """A law is calibrated and kept; every prediction of every pick has its live figure and a yes or no."""
    trace = tmp_path / "base.trace"
    with Engine(n_threads=1) as engine:
        (cell,) = build_cells(budgets=["2cycles"])
        engine.record_text(engine.tokenize(TEXT.read_bytes())[:72], cell, trace)
    law = tmp_path / "law.json"
    words = ["pick", str(trace), "--budget", "2cycles,4cycles", "--margin", "0,0.1,0.3", "--threads", "1"]
    live = [*words, "--max-ppl-increase", "30%", "--live", "--calibration", str(law), "--top", "3"]
    assert main([*live, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert QualityModel.load(law).calibrated_on == 3
    assert len(found["settings"]) == 6
    picks = [found["settings"][i] for i in found["picks"]]
    assert [p["tok_s"] for p in picks] == sorted((p["tok_s"] for p in picks), reverse=True)
    assert all(p["ppl_increase"]["value"] <= 0.3 for p in picks)
    assert [one["setting"] for one in found["live"]] == found["picks"]
    for one in found["live"]:
        low, high = one["tok_s_interval"].values()
        assert one["tok_s_held"] == (low <= one["live_tok_s"] <= high)
        rise = found["settings"][one["setting"]]["ppl_increase"]
        assert one["ppl_increase_held"] == (rise["low"] <= one["live_ppl_increase"] <= rise["high"])
        assert isinstance(one["read_mib_held"], bool)
    # The law is there now: no live run, the same foretold values.
    assert main([*words, "--pareto", "--calibration", str(law)]) == 0
    shown = capsys.readouterr().out
    assert "Perplexity by a law calibrated on 3 live runs" in shown
    assert "6 settings replayed (simulated)" in shown
    assert main([*words, "--min-tok-s", "1e9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["picks"] == []
