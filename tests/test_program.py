"""A sweep is one compiled program per policy code; neither cells nor tokens add one, no step calls Python.

And the code may be anyone's: policy files, with state of their own.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import textwrap
from collections import OrderedDict

import jax
import polars as pl
import pytest
from synthetic import generate, make_header

import simlab.policy
import simlab.types
from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.policy import eviction
from simlab.replay import programs
from simlab.replay.kernel import program
from simlab.replay.run import Replayer, sweep
from simlab.replay.scan_lanes import CHUNK_ROWS, ScanLanes
from simlab.replay.slots import replay_slots

# Sizes no other test file uses, so that nothing is compiled beforehand.
HEADER = make_header(n_layer=2, n_expert=12, k=3)


def _grid(n: int) -> list:
    margins = [f"{0.02 * (i + 1):g}" for i in range(n)]
    return build_cells(budgets=[f"{10 * (i + 1)}%" for i in range(n)], margins=margins)


def _scan(trace, cells):
    return Replayer(trace, cells, backend="jax")


def _finish(replayer: Replayer) -> None:
    while replayer.advance():
        pass


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return generate(HEADER, seed=1, n_decode=20).write(tmp_path_factory.mktemp("short") / "t")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return generate(HEADER, seed=2, n_decode=700).write(tmp_path_factory.mktemp("long") / "t")


def test_eight_margins_by_eight_budgets_are_one_program(short, long):
    """As many compilations for 8 x 8 cells as for 2 x 2, whatever the length of the trace."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        for n_cells in (8, 2):
            before = len(compiled)
            for trace in (short, long):
                _finish(_scan(trace, _grid(n_cells)))
            assert len(compiled) - before == 1
    finally:
        jax.monitoring.clear_event_listeners()


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
        _finish(_scan(short, cells))
        gc.collect()
        found.append(mappings())
        assert len(programs._PROGRAMS) == 1
    assert found[-1] - found[0] < 100


def test_groups_of_a_scan_follow_the_policies_code_alone(short):
    cells = build_cells(
        budgets=["20%", "off", "3/layer"], routes=["original", "top_k:k=2", "top_k:k=1"]
    ) + build_cells(budgets=["20%", "30%"], routes=["substitute:L=.1", "substitute:L=.2"], scope="per_layer")
    lanes = _scan(short, cells)._lanes
    assert isinstance(lanes, ScanLanes)
    assert [len(g.indices) for g in lanes.groups] == [3, 6, 4]


def test_a_scan_refuses_queues(short):
    with pytest.raises(InputError, match="--evict arc: keeps queues, which the JAX scan cannot run"):
        _scan(short, build_cells(budgets=["20%"], evicts=["arc"]))


def test_nothing_calls_back_into_python(short):
    replayer = _scan(short, build_cells(budgets=["20%"], routes=["top_k:k=2+substitute:L=.1+drop_cold:F=1"]))
    lanes = replayer._lanes
    assert isinstance(lanes, ScanLanes)
    (group,) = lanes.groups
    rows = replayer.columns.chunk(0, short.n_rows, CHUNK_ROWS, lanes._needs)
    text = program(group.shape, group.n_lanes).lower(group.carry, rows, group.lanes).as_text()
    assert "stablehlo.while" in text
    assert "callback" not in text
    assert not re.search(r"custom_call @(?!Sharding)\w*(python|py_|xla_ffi)", text)


# -- code from outside: policy files, state of routing and eviction policies ---------------------------------


def test_a_users_own_policy_file(tmp_path):
    generate(make_header(), seed=1).write(tmp_path / "t")
    source = """
        from simlab.policy import routing
        from simlab.types import Knob, Rerank

        @routing("rerank", knobs={"M": Knob(6, 1, 512, integer=True)}, needs={"scores", "rank"})
        def resident_window(candidate, row, state, knobs):
            near = candidate.resident & (candidate.rank < knobs.M)
            return Rerank(candidate.value, near, True)
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

    def see(row, state, knobs):
        return (state[0] + 1,)

    @simlab.policy.routing("drop", needs={"weights"}, state={"seen": 0.0}, update=see)
    def late(candidate, row, state, knobs):
        (seen,) = state
        return (seen > 2) & (candidate.weight >= 0)

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

    def add(state, access, knobs):
        total, hits = state
        return total + access.weight, hits + access.hit

    @eviction("static", touch=add, state={"sum": 0.0, "hits": 0})
    def weighted(entry, state, knobs):
        total, _ = state
        return total

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
        totals, hits = replayer.state()["0.entry_state"].T
        sums = float(totals.sum())
        if total is None:
            assert sums < n_rows - 1
        else:
            assert sums == pytest.approx(total, rel=1e-5)
        assert hits.sum() == replayer.numbers()[0].all.hits
