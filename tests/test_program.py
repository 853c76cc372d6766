"""A sweep is one compiled program per policy code; neither cells nor tokens add one, no step calls Python.

And the code may be anyone's: policy files, with state of their own.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import textwrap
from collections import OrderedDict

import jax
import numpy as np
import polars as pl
import pytest
from synthetic import generate, make_header

import simlab.policy
import simlab.replay.run as run
import simlab.types
from simlab.cells import build_cells
from simlab.policy import eviction
from simlab.replay import programs
from simlab.replay.kernel import first_carry, program
from simlab.replay.run import CHUNK_ROWS, Replayer, sweep
from simlab.replay.slots import replay_slots

# Sizes no other test file uses, so that nothing is compiled beforehand.
HEADER = make_header(n_layer=2, n_expert=12, k=3)


def _grid(n: int) -> list:
    margins = [f"{0.02 * (i + 1):g}" for i in range(n)]
    return build_cells(budgets=[f"{10 * (i + 1)}%" for i in range(n)], margins=margins)


def _finish(replayer: Replayer) -> None:
    while replayer.advance():
        pass


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return generate(HEADER, seed=1, n_decode=20).write(tmp_path_factory.mktemp("short") / "t")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return generate(HEADER, seed=2, n_decode=700).write(tmp_path_factory.mktemp("long") / "t")


@pytest.mark.parametrize(("plain", "most"), [(True, 1), (False, 1)])
def test_eight_margins_by_eight_budgets_are_one_group(short, long, plain, most):
    """One group, and as many compilations for 8 x 8 cells as for 2 x 2, whatever the length of the trace.

    The loop has a program for the policy's keys, and leaves the rest to numba.
    """
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        for n_cells in (8, 2):
            before = len(compiled)
            for trace in (short, long):
                replayer = Replayer(trace, _grid(n_cells), plain=plain)
                assert len(replayer.groups) == 1
                _finish(replayer)
            assert 1 <= len(compiled) - before <= most
            before = len(compiled)
            # Of the settings, which go through JAX before the loop, there are as many; scans take any cells as lanes.
            n_margins = n_cells**2 if plain else n_cells
            budgets = [f"{40 + i}%" for i in range(n_cells**2 // n_margins)]
            other = build_cells(budgets=budgets, margins=[f"{(i + 1) / 500}" for i in range(n_margins)])
            _finish(Replayer(long, other, plain=plain))
            assert len(compiled) == before
    finally:
        jax.monitoring.clear_event_listeners()


def test_python_steps_once_per_chunk_and_group(long, monkeypatch):
    """No Python loop over tokens, layers or cells: a program is called once per stretch of rows."""
    calls = []
    real = run.program

    def counting(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(run, "program", counting)
    for n in (2, 8):
        calls.clear()
        _finish(Replayer(long, _grid(n), plain=True))
        assert len(calls) == math.ceil(long.n_rows / CHUNK_ROWS) > 2


def test_lanes_come_in_few_sizes(short):
    """Sweeps of like size share a program: 3 margins and 4 are both 4 lanes, 17 cells and 32 both 32."""

    def lanes(n):
        cells = [build_cells(budgets=["20%"], margins=[f"{(i + 1) / 100}"])[0] for i in range(n)]
        return Replayer(short, cells, loops=False).groups[0].n_lanes

    assert [lanes(n) for n in (1, 2, 3, 4, 5, 9, 16, 17, 33)] == [1, 2, 4, 4, 8, 16, 16, 32, 48]


def test_few_programs_are_kept(short, monkeypatch):
    """The memory mappings of compiled code are given back: past 65,530 of them XLA crashes."""

    def mappings():
        with open("/proc/self/maps") as lines:
            return sum(1 for _ in lines)

    monkeypatch.setattr(programs, "_PROGRAMS", OrderedDict())
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 1)
    found = []
    for n in (1, 2, 5):
        # One program of its own for each width.
        cells = build_cells(budgets=["20%"], margins=[f"{i / 10}" for i in range(n)])
        _finish(Replayer(short, cells, plain=True))
        gc.collect()
        found.append(mappings())
        assert len(programs._PROGRAMS) == 1
    assert found[-1] - found[0] < 100


def test_groups_follow_the_policies_code_alone(short):
    cells = build_cells(
        budgets=["20%", "off", "3/layer"], routes=["original", "top_k:k=2", "top_k:k=1"]
    ) + build_cells(budgets=["20%", "30%"], routes=["substitute:L=.1", "substitute:L=.2"], scope="per_layer")
    groups = Replayer(short, cells, plain=True).groups
    assert [len(g.indices) for g in groups] == [3, 6, 4]


def test_nothing_calls_back_into_python(short):
    replayer = Replayer(
        short, build_cells(budgets=["20%"], routes=["top_k:k=2+substitute:L=.1+drop_cold:F=1"]), plain=True
    )
    group = replayer.groups[0]
    rows = replayer.columns.chunk(0, short.n_rows, CHUNK_ROWS, replayer._needs)
    text = program(group.shape, group.n_lanes).lower(group.carry, rows, group.lanes).as_text()
    assert "stablehlo.while" in text
    assert "callback" not in text
    assert not re.search(r"custom_call @(?!Sharding)\w*(python|py_|xla_ffi)", text)


def test_counters_bytes_and_positions_are_int64(short):
    shape = Replayer(short, _grid(2), plain=True).groups[0].shape
    carry = first_carry(shape, 4)
    for name in ("stamp", "used", "position", "counters"):
        assert carry[name].dtype == np.int64
    replayer = Replayer(short, _grid(2), plain=True)
    _finish(replayer)
    assert replayer.groups[0].carry["used"].dtype == np.int64
    assert replayer.groups[0].lanes["total_budget"].dtype == np.int64


# -- code from outside: policy files, state of routing and eviction policies ---------------------------------


def test_a_users_own_policy_file(tmp_path):
    generate(make_header(), seed=1).write(tmp_path / "t")
    source = """
        from simlab.policy import routing
        from simlab.types import Choice, Knob

        @routing("rerank", knobs={"M": Knob(6, 1, 512, integer=True)}, needs={"scores", "rank"})
        def resident_window(xp, candidates, row, state, knobs):
            near = candidates.resident & (candidates.rank < knobs.M)
            return Choice(value=candidates.value, tier=near.astype(xp.int32)), state
    """
    path = tmp_path / "my_policy.py"
    path.write_text(textwrap.dedent(source))
    cells = build_cells(budgets=["40%"], routes=[str(path)]) + build_cells(
        budgets=["40%"], routes=[f"{path}:M=4", f"{path}:M=16"]
    )
    mine, narrow, wide = (n.decode for n in sweep(tmp_path / "t", cells))
    # A window of k is the router's set; the wider the window, the more goes to what is resident.
    assert narrow.substituted == 0 < (mine.substituted or 0) < (wide.substituted or 0)
    assert narrow.hits < mine.hits < wide.hits
    assert wide.reranked == wide.slots


def test_routing_state_is_kept_per_layer(tmp_path):
    """A policy whose state counts decode rows and which drops every slot but the top from the third on."""

    @simlab.policy.routing("drop", needs={"weights"}, state={"seen": 0.0})
    def late(xp, candidates, row, state, knobs):
        dropping = (state["seen"] >= 2) & (candidates.weight >= 0)
        return simlab.types.Choice(drop=dropping), {"seen": state["seen"] + 1}

    trace = generate(make_header(), seed=21, n_decode=10).write(tmp_path / "t")
    base = build_cells(budgets=["40%"])[0]
    cell = dataclasses.replace(base, route=simlab.types.Route((simlab.types.Step(late, {}),)))
    slots = replay_slots(trace, cell).slots
    per_graph = slots.group_by("graph", "phase", "layer", maintain_order=True).agg(pl.col("dropped").sum())
    decode = per_graph.filter(pl.col("phase") == 1)
    assert decode["dropped"].to_list() == [0] * 6 + [3] * (3 * 8)
    assert per_graph.filter(pl.col("phase") == 0)["dropped"].sum() == 0


def test_access_weights_and_floating_keys(tmp_path, monkeypatch):
    """`touch` gets the applied weights, renormalised after drops: per row they add up to the old total."""

    def add(xp, state, access, knobs):
        return {"sum": state["sum"] + access.weight, "hits": state["hits"] + access.hit}

    @eviction(touch=add, state={"sum": 0.0, "hits": 0})
    def weighted(xp, state, last_position, batch, knobs):
        return state["sum"]

    known = simlab.policy.builtin_policies()
    monkeypatch.setattr(simlab.policy, "builtin_policies", lambda: {**known, "weighted": weighted})
    trace = generate(make_header(), seed=22)
    n_rows = len(trace.rows)
    opened = trace.write(tmp_path / "t")
    for route, total in (
        ("drop_cold:F=1", n_rows),
        ("drop_cold:F=0", n_rows),
        ("drop_cold:F=1,renorm=0", None),
    ):
        replayer = Replayer(opened, build_cells(budgets=["40%"], routes=[route], evicts=["weighted"]))
        while replayer.advance():
            pass
        state = replayer.state()
        sums = float(state["0['eviction_state']['sum']"].sum())
        if total is None:
            assert sums < n_rows - 1
        else:
            assert sums == pytest.approx(total, rel=1e-5)
        assert state["0['eviction_state']['hits']"].sum() == replayer.numbers()[0].all.hits
