"""Small synthetic traces: rows as plain dicts, written to a trace folder with `TraceWriter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simlab.trace.store import Trace, TraceWriter, open_trace
from simlab.types import TraceHeader, WeightRule

f32 = np.float32


@dataclass
class Synthetic:
    """A trace in memory: its header and its routing rows in execution order."""

    header: TraceHeader
    rows: list[dict[str, Any]]
    width: int

    def write(self, folder: Path) -> Trace:
        """Write the folder and open it. Columns that no row has stay null."""
        with TraceWriter(folder, self.header, self.width) as writer:
            if self.rows:
                names = [n for n in self.rows[0] if self.rows[0][n] is not None]
                writer.add("routing", {n: _column(n, [row[n] for row in self.rows]) for n in names})
        return open_trace(folder)


_TYPES: dict[str, Any] = {"scores": f32, "gate_probs": f32, "weights": f32}
_INTS = {
    "turn": np.int32,
    "phase": np.int8,
    "layer": np.int32,
    "pos_in_graph": np.int32,
    "router_experts": np.int32,
}


def _column(name: str, values: list[Any]) -> Any:
    return np.array(values, _TYPES.get(name) or _INTS.get(name, np.int64))


def make_header(
    *,
    n_layer: int = 3,
    n_expert: int = 16,
    k: int = 4,
    gating: Any = "softmax",
    space: Any = "prob",
    rule: WeightRule | None = WeightRule(),  # noqa: B008
    sizes: Sequence[int] = (1000,),
    first_layer: int = 0,
) -> TraceHeader:
    """A header; `sizes` are repeated over the MoE layers, `first_layer` leaves dense layers in front."""
    layers = range(first_layer, first_layer + n_layer)
    entry_bytes = {layer: int(sizes[i % len(sizes)]) for i, layer in enumerate(layers)}
    return TraceHeader(
        "synthetic", "test", first_layer + n_layer, n_expert, k, gating, space, rule, entry_bytes
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return (shifted / shifted.sum()).astype(f32)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(f32)


Scorer = Callable[[np.random.Generator, np.ndarray], Mapping[str, np.ndarray]]
"""From a generator and a row of logits to `scores` and, perhaps, `gate_probs`."""


def probabilities(rng: np.random.Generator, logits: np.ndarray) -> Mapping[str, np.ndarray]:
    return {"scores": softmax(logits)}


def biased_sigmoid(rng: np.random.Generator, logits: np.ndarray) -> Mapping[str, np.ndarray]:
    gate = sigmoid(logits)
    bias = np.linspace(-0.2, 0.2, len(gate)).astype(f32)
    return {"scores": gate + bias, "gate_probs": gate}


def raw_logits(rng: np.random.Generator, logits: np.ndarray) -> Mapping[str, np.ndarray]:
    return {"scores": logits.astype(f32)}


def generate(
    header: TraceHeader,
    *,
    seed: int = 0,
    n_prefill: int = 6,
    n_decode: int = 25,
    n_turns: int = 1,
    tokens_per_decode_graph: int = 1,
    throw_away: bool = False,
    width: int | None = None,
    scorer: Scorer = probabilities,
    grain: float = 0.0,
    last_layer_one_row: bool = False,
) -> Synthetic:
    """Random routing with some locality; `grain` > 0 rounds logits to a grid, which makes exact ties.

    The router's ids are the best `width` (default: the model's k) by score, ties in no particular order.
    """
    rng = np.random.default_rng(seed)
    width = width or header.n_expert_used
    layers = header.moe_layers
    drift = {layer: rng.normal(0, 1.5, header.n_expert) for layer in layers}
    rows: list[dict[str, Any]] = []
    graph = 0

    def add_graph(turn: int, phase: int, steps: Sequence[int]) -> None:
        nonlocal graph
        for layer in layers:
            only_last = last_layer_one_row and phase == 0 and layer == layers[-1]
            for pos, step in enumerate(steps):
                if only_last and pos < len(steps) - 1:
                    continue
                drift[layer] = 0.9 * drift[layer] + rng.normal(0, 0.6, header.n_expert)
                logits = drift[layer]
                if grain:
                    logits = np.round(logits / grain) * grain
                scored = scorer(rng, logits.astype(f32))
                rows.append(
                    {
                        "turn": turn, "graph": graph, "phase": phase, "step": step, "layer": layer,
                        "pos_in_graph": pos,
                        **{name: np.asarray(x, f32) for name, x in scored.items()},
                        "router_experts": route(rng, np.asarray(scored["scores"]), width),
                    }
                )  # fmt: skip
        graph += 1

    if throw_away:
        add_graph(-1, 0, [0])
    step = 0
    for turn in range(n_turns):
        if n_prefill:
            add_graph(turn, 0, range(step, step + n_prefill))
            step += n_prefill
        for _ in range(n_decode):
            add_graph(turn, 1, range(step, step + tokens_per_decode_graph))
            step += tokens_per_decode_graph
    return Synthetic(header, rows, width)


def route(rng: np.random.Generator, scores: np.ndarray, width: int) -> list[int]:
    """The best `width` ids by score, NaN as lowest, equal scores in random order."""
    value = np.where(np.isnan(scores), -np.inf, scores)
    order = np.lexsort((rng.random(len(value)), -value))
    return [int(e) for e in order[:width]]


def without_scores(trace: Synthetic, *, weights: bool = True) -> Synthetic:
    """As an imported trace: no scores, no gating, the router's weights as recorded or none."""
    rng = np.random.default_rng(7)
    header = dataclasses.replace(trace.header, gating=None, score_space=None, weight_rule=None)
    rows = []
    for row in trace.rows:
        kept = {n: v for n, v in row.items() if n not in ("scores", "gate_probs")}
        if weights:
            kept["weights"] = np.sort(rng.dirichlet(np.ones(trace.width)))[::-1].astype(f32)
        rows.append(kept)
    return Synthetic(header, rows, trace.width)


def from_batches(header: TraceHeader, tokens: Sequence[Sequence[int]]) -> Synthetic:
    """One decode graph per token, the same ids at every layer, no scores."""
    rows = [
        {
            "turn": 0, "graph": graph, "phase": 1, "step": graph, "layer": layer, "pos_in_graph": 0,
            "router_experts": list(ids),
        }
        for graph, ids in enumerate(tokens)
        for layer in header.moe_layers
    ]  # fmt: skip
    return Synthetic(header, rows, len(tokens[0]))
