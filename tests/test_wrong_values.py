"""A policy's value of NaN, or of +inf made from finite input, is refused with policy, row and expert, by every engine
and live; -inf is legal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import generate, make_header

from simlab.cells import build_cells, parse_budget, parse_route, resolve_budget
from simlab.errors import InputError
from simlab.policy import find_eviction
from simlab.record.cache import LiveCache
from simlab.record.live_route import LiveRoute
from simlab.replay.run import Replayer
from simlab.routing import knob_values
from simlab.trace.store import Trace
from simlab.types import WeightRule

HEADER = make_header(n_layer=2, n_expert=10, k=3)
ENGINES = {"any": {"plain": True}, "scans": {"loops": False}, "loops": {}}

RERANK = """from simlab.policy import routing
from simlab.types import Choice

@routing("{stage}", needs={{"scores"}}, ordered={ordered})
def mine(xp, candidates, row, state, knobs):
    at = (row.layer == 1) & (candidates.value == row.top)
    value = candidates.value
    return Choice(value=xp.where(at, {value}, value), replace=candidates.expert >= 0), state
"""
KEY = """from simlab.policy import eviction

def touch(xp, state, access, knobs):
    return {{"at": access.batch + 0.0 * state["at"]}}

@eviction(touch=touch, state={{"at": 0.0}})
def mine(xp, state, last_position, batch, knobs):
    return {key}
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return generate(HEADER, seed=4, n_decode=30).write(tmp_path_factory.mktemp("wrong") / "t")


def first_row(trace: Trace) -> tuple[str, int]:
    """Of the first decode row of the second MoE layer: its place, and its best expert."""
    rows = trace.routing.collect()
    model_layer = HEADER.moe_layers[1]
    at = int(np.flatnonzero((rows["phase"] == 1) & (rows["layer"] == model_layer))[0])
    best = int(np.nanargmax(rows["scores"][at].to_numpy()))
    return f"layer {model_layer}, step {rows['step'][at]} (row {at})", best


def replay(trace: Trace, engine: str, **cell: Any) -> Replayer:
    replayer = Replayer(trace, build_cells(budgets=["40%"], **cell), **ENGINES[engine])
    while replayer.advance():
        pass
    return replayer


@pytest.mark.parametrize(
    ("engine", "stage", "ordered", "value"),
    [
        *((engine, "rerank", True, value) for engine in ENGINES for value in ("xp.nan", "xp.inf")),
        ("loops", "rerank", False, "xp.nan"),
        ("loops", "swap", False, "xp.inf"),
    ],
)
def test_a_wrong_value_names_policy_row_and_expert(trace, tmp_path, engine, stage, ordered, value) -> None:
    path = tmp_path / "p.py"
    path.write_text(RERANK.format(stage=stage, value=value, ordered=ordered))
    place, expert = first_row(trace)
    with pytest.raises(InputError) as refused:
        replay(trace, engine, routes=[str(path)])
    assert str(refused.value).startswith("policy mine@")
    assert str(refused.value).endswith(
        f"p.py: its value of expert {expert} is NaN or +inf at {place}; only -inf may be"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_minus_infinity_masks(trace, tmp_path, engine) -> None:
    path = tmp_path / "p.py"
    path.write_text(RERANK.format(stage="rerank", value="-xp.inf", ordered=False))
    n = replay(trace, engine, routes=[str(path)]).numbers()[0].decode
    # Of the second layer's rows the best expert goes, and another takes its slot.
    assert n.substituted == 30


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "key",
    [
        'xp.where(state["at"] >= 20, xp.nan, state["at"])',
        'xp.where(state["at"] >= 20, xp.inf, state["at"])',
        'xp.where((batch >= 20) & (state["at"] >= 0), xp.nan, state["at"])',
    ],
    ids=["static NaN", "static +inf", "dynamic NaN"],
)
def test_a_wrong_key_names_policy_row_and_entry(trace, tmp_path, engine, key) -> None:
    path = tmp_path / "p.py"
    path.write_text(KEY.format(key=key))
    told = r"policy mine@.*p.py: its key of expert \d of MoE layer \d is NaN or \+inf at layer"
    with pytest.raises(InputError, match=told):
        replay(trace, engine, evicts=[str(path)])


def test_a_wrong_value_live_names_policy_layer_and_expert(tmp_path) -> None:
    for stage in ("rerank", "swap"):
        path = tmp_path / f"{stage}.py"
        path.write_text(RERANK.format(stage=stage, value="xp.nan", ordered=False))
        route = LiveRoute(parse_route(str(path)), 3, 10, 2, "raw", WeightRule())
        scores = np.arange(10, dtype=np.float32)[None]
        router = np.array([[9, 8, 7]], np.int32)
        route.rerank(0, scores, router, np.ones(10, bool))
        for rows in (1, 2):
            with pytest.raises(InputError, match=r"its value of expert 9 is NaN or .inf at MoE layer 1"):
                route.rerank(1, np.repeat(scores, rows, 0), np.repeat(router, rows, 0), np.ones(10, bool))


def test_a_wrong_key_live_names_policy_and_entry(tmp_path: Path) -> None:
    path = tmp_path / "p.py"
    path.write_text(KEY.format(key='xp.where(state["at"] == 1, xp.nan, state["at"])'))
    sizes = np.array([HEADER.entry_bytes[i] for i in HEADER.moe_layers])
    budget = resolve_budget(parse_budget("4/layer"), "global", HEADER, 3)
    cache = LiveCache(sizes, 10, budget, find_eviction(str(path)), knob_values({}, {}))
    weights = np.ones((1, 3), np.float32)
    # Batch 1 uses experts 4, 5 and 6 of the second layer; batch 2 has to evict one of them.
    cache.run_batch(0, np.array([[1, 2, 3]], np.int32), None, weights)
    cache.run_batch(1, np.array([[4, 5, 6]], np.int32), None, weights)
    with pytest.raises(InputError, match=r"its key of expert 4 of MoE layer 1 is NaN or .inf at MoE layer 1"):
        cache.run_batch(1, np.array([[7, 8, 9]], np.int32), None, weights)
