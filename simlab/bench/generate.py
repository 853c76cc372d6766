"""Traces made up for benchmarks: scores that drift from token to token as a router's do, written as they come.

Each layer has a fixed preference for some experts, a topic that drifts slowly, and noise of its own in every
token; `softmax` of their sum is what the graph would have sorted. At the default strengths a least-recent
cache hits about as often as on recorded decodes of models of this width. Nothing is kept but one token's
state, so that a trace may be larger than memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.trace.store import Trace, TraceWriter, open_trace
from simlab.types import DECODE, PREFILL, TraceHeader, WeightRule

PREFILL_TOKENS = 8
"""As `simlab record` starts a text: one prefill graph, then one token per graph."""
ENTRY_BYTES = 1 << 20
_PART_BYTES = 16 << 20
_PREFERENCE, _TOPIC, _NOISE = 0.8, 1.0, 1.0
_KEPT = 0.9
"""Of the topic, from one token to the next."""


def trace_bytes(n_tokens: int, n_layers: int, n_expert: int) -> int:
    """About how large a generated trace is on disk; float32 scores hardly compress."""
    return n_tokens * n_layers * (4 * n_expert + 64)


def generate_trace(
    folder: Path,
    *,
    n_tokens: int,
    n_layers: int,
    n_expert: int,
    k: int,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Write a trace of a made-up softmax router and open it.

    Args:
        n_tokens: more than `PREFILL_TOKENS`, which are one prefill graph.
        k: experts per token, below `n_expert`.
        progress: called now and then with the share done.

    Raises:
        InputError: there is not enough room on the disk.
    """
    size = trace_bytes(n_tokens, n_layers, n_expert)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise InputError(
            f"{folder}: a trace of {size / 2**30:.1f} GiB does not fit; {free / 2**30:.1f} are free"
        )
    header = TraceHeader(
        model="generated",
        arch="generated",
        n_layer=n_layers,
        n_expert=n_expert,
        n_expert_used=k,
        gating="softmax",
        score_space="prob",
        weight_rule=WeightRule(),
        entry_bytes=dict.fromkeys(range(n_layers), ENTRY_BYTES),
    )
    rng = np.random.default_rng(seed)
    shape = (n_layers, n_expert)
    preference = rng.normal(0, _PREFERENCE, shape).astype(np.float32)
    topic = rng.normal(0, _TOPIC, shape).astype(np.float32)
    drift = np.float32(_TOPIC * (1 - _KEPT**2) ** 0.5)
    per_part = max(_PART_BYTES // (4 * n_layers * n_expert), 1)
    with TraceWriter(folder, header, k) as writer:
        # The prefill, which is one graph, is a part of its own.
        starts = [0, *range(PREFILL_TOKENS, n_tokens, per_part)]
        for start, stop in zip(starts, [*starts[1:], n_tokens], strict=True):
            logits = np.empty((stop - start, *shape), np.float32)
            for row in logits:
                topic = np.float32(_KEPT) * topic + drift * rng.standard_normal(shape, np.float32)
                row[:] = preference + topic + np.float32(_NOISE) * rng.standard_normal(shape, np.float32)
            _add(writer, start, _softmax(logits), k)
            if progress is not None:
                progress(stop / n_tokens)
    return open_trace(folder)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def _add(writer: TraceWriter, start: int, scores: NDArray[np.float32], k: int) -> None:
    """Write tokens from `start` on, scores `[tokens, layers, experts]`: the prefill graph, or graphs of one token."""
    n, n_layers, n_expert = scores.shape
    step = np.arange(start, start + n)
    layer = np.arange(n_layers, dtype=np.int32)
    position = np.zeros(n, np.int32)
    if start == 0:
        # A graph is written layer by layer.
        scores = scores.transpose(1, 0, 2)
        columns = {"step": np.tile(step, n_layers), "layer": np.repeat(layer, n)}
        graph, phase, position = np.zeros(n * n_layers, np.int64), PREFILL, np.tile(step, n_layers)
    else:
        columns = {"step": np.repeat(step, n_layers), "layer": np.tile(layer, n)}
        graph, phase, position = columns["step"] - PREFILL_TOKENS + 1, DECODE, np.repeat(position, n_layers)
    rows = np.ascontiguousarray(scores).reshape(-1, n_expert)
    best = np.argpartition(rows, n_expert - k, axis=1)[:, n_expert - k :]
    order = np.argsort(-np.take_along_axis(rows, best, axis=1), axis=1, kind="stable")
    writer.add(
        "routing",
        columns
        | {
            "turn": np.zeros(len(rows), np.int32),
            "graph": graph,
            "phase": np.full(len(rows), phase, np.int8),
            "pos_in_graph": position.astype(np.int32),
            "scores": rows,
            "router_experts": np.take_along_axis(best, order, axis=1).astype(np.int32),
        },
    )
    writer.flush()
