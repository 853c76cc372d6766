"""On every layout: what the engine did, the replayer does again, over chunks of prompts and turns of a session.

Each recording has two turns that share one cache, and prompts of 8 tokens in graphs of three. One runs every kind
of policy on a small cache, one the router's own choice on a cache that cannot keep anything from token to token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import TEXT, THREADS, blanked, cell_of, record
from test_live_replay import assert_same_slots

pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")

from tiny_models import LAYOUTS, Layout, make_model

from simlab.cells import MIB
from simlab.cli.options import warn_about_cells
from simlab.errors import SimlabWarning
from simlab.judge.measure import measure
from simlab.record.engine import Engine
from simlab.replay.slots import replay_slots
from simlab.trace.store import Trace
from simlab.types import DECODE, PREFILL, Cell, CellNumbers

pytestmark = pytest.mark.slow

WINDOW, CHUNK, N_TURNS = 17, 3, 2
N_DECODED = N_TURNS * (WINDOW - 8 - 1)
SIZES: dict[str, dict[str, Any]] = {
    "gemma4": {"k": 2},
    "qwen35": {"n_expert": 8, "k": 2},
    "fused": {"n_layer": 3, "scale": 2.5},
}
"""Overrides that leave a layout what it is and give it the compiled shape of another."""
SHAPES: dict[str, Layout] = {name: replace(layout, **SIZES.get(name, {})) for name, layout in LAYOUTS.items()}
LIGHT = '''
from simlab.policy import routing
from simlab.types import Knob
from simlab.xp import quotient

@routing("drop", knobs={"F": Knob(1, 0, 9)}, needs={"weights"})
def light(slot, row, state, knobs):
    """As drop_cold, with a bound for weights that sum to more than 1."""
    return ~slot.resident & (slot.weight < quotient(knobs.F, row.k))
'''


class Opened:
    """The engine on one layout."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.layout, self.folder = name, SHAPES[name], folder
        path = make_model(folder, name, **SIZES.get(name, {}))
        self.engine = Engine(path, n_ctx=WINDOW, n_ubatch=CHUNK, n_threads=THREADS)
        self.tokens = self.engine.tokenize(TEXT)[: N_TURNS * WINDOW]

    def lossy_route(self) -> str:
        """Margin and drop, where there is more than one slot; the bound grows with the weights' sum."""
        margin, scale = "substitute:L=0.15", self.layout.scale
        if self.layout.k == 1:
            return margin
        if scale == 1:
            return f"{margin}+drop_cold:F=0.75"
        path = self.folder / "light.py"
        path.write_text(LIGHT)
        return f"{margin}+{path}:F={0.95 * scale}"

    def record(self, cell: Cell, folder: Path) -> Trace:
        """A recording with the turns and chunks this file is about."""
        trace = record(self.engine, self.tokens, cell, folder / "live.trace")
        tokens = trace.tokens.collect()
        assert tokens["turn"].unique().sort().to_list() == list(range(N_TURNS))
        assert tokens.filter(phase=PREFILL).height == N_TURNS * 3
        assert tokens.filter(phase=DECODE).height == N_DECODED
        first = trace.routing.filter(phase=PREFILL, layer=trace.header.moe_layers[0]).collect()
        assert first["pos_in_graph"].to_list() == [0, 1, 2, 0, 1, 2, 0, 1] * N_TURNS
        return trace

    def replay(self, trace: Trace, cell: Cell, folder: Path) -> CellNumbers:
        """The replay of a blanked copy, equal in every slot."""
        if self.layout.gating == "logits":
            return assert_same_slots_and_close_weights(trace, cell, folder)
        return assert_same_slots(trace, cell, folder)


def assert_same_slots_and_close_weights(trace: Trace, cell: Cell, folder: Path) -> CellNumbers:
    """As `assert_same_slots`, where the graph's weights are a softmax over the selected.

    ggml's exponential and the C library's differ in their last bit, so weights rebuilt from logits are within
    one or two units of the recorded ones. What is decided on them is compared exactly.
    """
    found, recorded = replay_slots(blanked(trace, folder / "blank.trace"), cell), trace.routing.collect()
    exact = {"expert": "experts", "residency": "residency", "dropped": "dropped", "read_bytes": "read_bytes"}
    for replayed, column in exact.items():
        was = recorded[column].to_numpy().reshape(-1)
        np.testing.assert_array_equal(found.slots[replayed].to_numpy(), was, err_msg=column)
    weights = recorded["weights"].to_numpy().reshape(-1)
    np.testing.assert_allclose(found.slots["weight"].to_numpy(), weights, rtol=0, atol=1e-6)
    live = measure(trace, cell)
    for phase in ("decode", "all"):
        assert asdict(getattr(found.numbers, phase)) == pytest.approx(asdict(getattr(live, phase)), abs=1e-12)
    return found.numbers


@pytest.fixture(scope="module", params=LAYOUTS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The engine on every layout, one after the other."""
    found = Opened(request.param, tmp_path_factory.mktemp("layout"))
    with found.engine:
        yield found


def test_margin_and_drop_replay_slot_for_slot(opened: Opened, tmp_path: Path) -> None:
    cell = cell_of("1.2cycles", opened.lossy_route())
    trace = opened.record(cell, tmp_path)
    numbers = opened.replay(trace, cell, tmp_path)
    assert numbers.decode.tokens == N_DECODED
    assert (numbers.decode.substituted or 0) > 0
    assert (numbers.decode.dropped > 0) == (opened.layout.k > 1)
    assert 0 < numbers.decode.hits < numbers.decode.lookups
    if opened.layout.k > 1:
        # The second turn starts on what the first left behind: its first graph finds some of it.
        second = trace.routing.filter(turn=1).collect()
        assert second.filter(graph=second["graph"].min())["residency"].explode().gt(0).any()


def test_below_a_token_cycle_nothing_stays_until_the_next_token(opened: Opened, tmp_path: Path) -> None:
    header, k, n_layers = opened.engine.header(), opened.layout.k, len(opened.layout.moe_layers)
    assert n_layers >= 2
    budget = header.cycle_bytes() - k * max(header.entry_bytes.values())
    cell = cell_of(f"{budget / MIB!r}MiB")
    with pytest.warns(SimlabWarning, match="below one token cycle"):
        warn_about_cells([cell], header)
    trace = opened.record(cell, tmp_path)
    assert trace.header.budget_bytes == budget
    numbers = opened.replay(trace, cell, tmp_path)
    live = trace.tokens.filter(phase=DECODE).collect()
    for lookups, hits in (
        (live["lookups"].sum(), live["hits"].sum()),
        (numbers.decode.lookups, numbers.decode.hits),
    ):
        assert lookups == k * n_layers * N_DECODED
        assert hits == 0
    assert numbers.decode.hit_rate == 0


def test_masked_scores_replay_and_are_never_picked(tmp_path: Path) -> None:
    """Experts outside a token's groups have a score of -inf, which no margin lifts."""
    opened, cell = Opened("grouped", tmp_path), cell_of("2cycles", "substitute:L=0.3")
    with opened.engine:
        trace = opened.record(cell, tmp_path)
    decode = opened.replay(trace, cell, tmp_path).decode
    assert (decode.substituted or 0) > 0
    rows = trace.routing.collect()
    # The gate knows nothing of masks and biases: every expert has its share, and of those is the mass that was lost.
    own = rows.filter(phase=DECODE)
    gate = own["gate_probs"].to_numpy().astype(np.float64)
    share = gate / gate.sum(axis=1, keepdims=True)
    picked, ran = (
        np.take_along_axis(share, own[name].to_numpy().astype(np.int64), axis=1).sum(axis=1)
        for name in ("router_experts", "experts")
    )
    assert decode.mass_displaced == pytest.approx((picked - ran).mean(), abs=1e-12)
    scores, experts = rows["scores"].to_numpy(), rows["experts"].to_numpy()
    assert np.isneginf(scores).any(axis=1).all()
    assert not np.isneginf(np.take_along_axis(scores, experts, axis=1)).any()
