"""Every tiny random layout is a model llama.cpp runs, routes by, and the engine streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "llama_cpp", reason="the live engine's extra is not installed: pip install 'simlab[engine]'"
)
pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")

from tiny_models import LAYOUTS, make_model

from simlab.cells import build_cells
from simlab.record.engine import Engine
from simlab.record.gguf import read_gguf
from simlab.record.hook import RoutingEvent
from simlab.record.llama import Llama
from simlab.record.plan import text_graphs
from simlab.scores import applied_weights, gate_numerators

TEXT = "The quick brown fox\njumps: \u00e9\u20ac\x00 42".encode()
N_CTX = 128
STREAMED = list(LAYOUTS)
"""Layouts the engine streams; it refuses the router of the others by name."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of every layout."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder, name) for name in LAYOUTS}


def plain_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits `[graphs, n_vocab]` in step mode, fully resident."""
    plain = Llama(path, n_ctx=N_CTX, n_threads=1)
    found = [
        plain.decode(tokens[plan.start : plan.stop], plan.first_position, plan.wants_output)
        for plan in text_graphs(len(tokens), N_CTX, plain.n_ubatch)
    ]
    plain.close()
    return np.stack([logits for logits in found if logits is not None])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_loads_tokenises_bytes_and_decodes(models: dict[str, Path], name: str) -> None:
    llama = Llama(models[name], n_ctx=N_CTX, n_threads=1)
    tokens = llama.tokenize(TEXT)
    assert tokens == [3 + byte for byte in TEXT]
    assert llama.detokenize(tokens) == TEXT
    rows = [llama.decode([token], position) for position, token in enumerate(tokens[:12])]
    llama.close()
    logits = np.stack([row for row in rows if row is not None])
    assert logits.shape == (12, 259)
    assert np.isfinite(logits).all()
    assert len(np.unique(logits[:, 0])) == 12


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_file_holds_what_the_layout_says(models: dict[str, Path], name: str) -> None:
    layout, found = LAYOUTS[name], read_gguf(models[name])
    assert (found.arch, found.n_layer, found.n_expert, found.n_expert_used, len(found.files)) == (
        layout.arch,
        layout.n_layer,
        layout.n_expert,
        layout.k,
        layout.shards,
    )
    for layer in range(layout.n_layer):
        experts = {t for t in found.tensors if t.startswith(f"blk.{layer}.") and t.endswith("_exps.weight")}
        suffixes = layout.suffixes if layer in layout.moe_layers else ()
        assert experts == {f"blk.{layer}.{suffix}.weight" for suffix in suffixes}
        size = sum(found.tensors[t].size for t in experts)
        assert size == (layout.n_expert * layout.entry_bytes(layer) if suffixes else 0)
        assert layout.entry_bytes(layer) % 4096


@pytest.mark.parametrize("name", STREAMED)
def test_a_layout_streams_bit_for_bit_and_routes_by_token(models: dict[str, Path], name: str) -> None:
    layout, events = LAYOUTS[name], []

    class Listener:
        def on_batch(self, event: RoutingEvent) -> None:
            events.append(event)

        def on_reads(self, *_: object) -> None: ...

        def end_graph(self, *_: object, **__: object) -> None: ...

    with Engine(models[name], n_ctx=N_CTX, n_threads=1) as engine:
        tokens = engine.tokenize(TEXT)
        expected = plain_logits(models[name], tokens)
        for budget in ("off", "1.2cycles", "100%"):
            engine.start(build_cells(budgets=[budget], routes=["original"])[0])
            listener: object = Listener() if budget == "off" else None
            results = engine.score(tokens, listener)  # pyright: ignore[reportArgumentType]
            assert np.array_equal(np.stack([r.logits for r in results if r.logits is not None]), expected)
        routing, header = engine.routing, engine.header()
    assert header.entry_bytes == {layer: layout.entry_bytes(layer) for layer in layout.moe_layers}
    assert routing.weight_rule.scale == layout.scale
    assert routing.weight_rule.normalise == layout.normalised
    assert routing.weight_rule.softmax_over_selected == (layout.gating == "logits")
    assert routing.separate_gate == layout.separate_gate
    for event in events:
        # What is recorded must give the weights back: the gate is not read from a buffer used again since.
        assert (event.gate_probs is not None) == layout.separate_gate
        gate = event.scores if event.gate_probs is None else event.gate_probs
        numerators = np.take_along_axis(gate_numerators(gate, routing.weight_rule), event.router_experts, 1).T
        weights = applied_weights(np, numerators, np.ones(numerators.shape, bool), routing.weight_rule)
        assert np.allclose(weights.T, event.weights, rtol=0, atol=1e-6)
    for layer in layout.moe_layers:
        picks = [tuple(sorted(row)) for e in events if e.layer == layer for row in e.router_experts]
        assert len(set(picks)) > 5
        assert len(np.unique(picks)) > layout.n_expert // 4


def test_the_sharded_model_is_the_split_one(models: dict[str, Path]) -> None:
    tokens = [3 + byte for byte in TEXT[:12]]
    assert models["sharded"].name == "sharded-00001-of-00003.gguf"
    assert np.array_equal(plain_logits(models["sharded"], tokens), plain_logits(models["split"], tokens))


def test_a_model_is_made_by_its_seed_and_takes_overrides(models: dict[str, Path], tmp_path: Path) -> None:
    again = make_model(tmp_path, "mixed").read_bytes()
    assert again == models["mixed"].read_bytes()
    assert again != make_model(tmp_path, "mixed", seed=1).read_bytes()
    larger = read_gguf(make_model(tmp_path, "split", n_layer=5, n_embd=256, n_ff=128, n_expert=16, k=4))
    assert (larger.n_layer, larger.n_expert, larger.n_expert_used) == (5, 16, 4)
    assert larger.tensors["blk.4.ffn_up_exps.weight"].size == 16 * 128 * 256 // 32 * 34
