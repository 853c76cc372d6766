"""Helpers of the tests that run the engine on the embedded model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

pytest.importorskip(
    "llama_cpp", reason="the live engine's extra is not installed: pip install 'simlab[engine]'"
)

from simlab.cells import build_cells
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.llama import Llama
from simlab.record.plan import text_graphs
from simlab.trace.store import Trace, TraceWriter, open_trace
from simlab.types import Cell, CellNumbers

TEXT = Path(EMBEDDED_MODEL).with_name("text-b.txt").read_bytes()
THREADS = 1
EXECUTED = ("experts", "residency", "dropped", "weights", "read_bytes")
COUNTERS = (
    "read_bytes",
    "window_bytes",
    "lookups",
    "hits",
    "reranked",
    "substituted",
    "dropped",
    "evictions",
)


def cell_of(budget: str, route: str = "original", **options) -> Cell:
    """One cell from its words."""
    return build_cells(budgets=[budget], routes=[route], **options)[0]


def plain_logits(tokens: list[int], n_ubatch: int = 512, n_threads: int = THREADS) -> np.ndarray:
    """Logits `[graphs, n_vocab]` of plain llama.cpp: fully resident, no callback."""
    plain = Llama(EMBEDDED_MODEL, n_ubatch=n_ubatch, n_threads=n_threads)
    found = []
    for plan in text_graphs(len(tokens), plain.n_ctx, n_ubatch):
        logits = plain.decode(tokens[plan.start : plan.stop], plan.first_position, plan.wants_output)
        if logits is not None:
            found.append(logits)
    plain.close()
    return np.stack(found)


def streamed_logits(engine: Engine, tokens: list[int]) -> tuple[np.ndarray, dict[str, int]]:
    """Logits `[graphs, n_vocab]` of a teacher-forced run of the session's cell, and its counters."""
    results = engine.score(tokens)
    names = ("lookups", "hits", "reranked", "substituted", "dropped", "evictions")
    counts = {name: sum(getattr(r.tally, name) for r in results) for name in names}
    return np.stack([r.logits for r in results if r.logits is not None]), counts


def record(engine: Engine, tokens: list[int], cell: Cell, out: Path) -> Trace:
    """Record a teacher-forced run."""
    engine.record_text(tokens, cell, out)
    return open_trace(out)


def blanked(trace: Trace, out: Path) -> Trace:
    """A copy of a trace that says nothing of what was executed: only scores, router ids and places are left."""
    with TraceWriter(out, trace.header, trace.width) as writer:
        routing = trace.routing.drop(EXECUTED).collect()
        writer.add("routing", {name: routing[name] for name in routing.columns})
        # What speculation brought in is an input, as the scores are.
        early = trace.reads.filter("speculative").collect()
        writer.add("reads", {name: early[name] for name in early.columns})
        tokens = trace.tokens.drop(COUNTERS).collect()
        writer.add("tokens", {name: tokens[name] for name in tokens.columns})
    copy = open_trace(out)
    for name in EXECUTED:
        assert copy.routing.select(pl.col(name).null_count()).collect().item() == trace.n_rows
    return copy


def with_interval(numbers: CellNumbers, name: str) -> list[float]:
    """Low end, value and high end of a live number."""
    low, high = numbers.intervals[name]
    return [low, getattr(numbers, name), high]
