"""From routing events and finished reads to the tables of a trace, written between graphs.

While a graph runs, references are kept and nothing else; the columns of many graphs are made at once, as a batch of one
row is too small to be worth a NumPy call of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simlab.record.hook import GraphTally, RoutingEvent
from simlab.record.reads import FinishedRead
from simlab.trace.store import TraceWriter

_FLUSH_SECONDS = 2.0


@dataclass(frozen=True)
class GraphPlace:
    """Where in a recording a graph stands."""

    turn: int
    graph: int
    phase: int
    positions: Sequence[int]
    tokens: Sequence[int]


class Recorder:
    """Collects one graph at a time; what it collects is turned into parts outside any timed span."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._events: list[RoutingEvent] = []
        self._reads: list[tuple[FinishedRead, bool]] = []
        self._kept_events: list[tuple[GraphPlace, RoutingEvent]] = []
        self._kept_reads: list[tuple[GraphPlace, FinishedRead, bool]] = []
        self._kept_graphs: list[dict[str, Any]] = []
        self._epoch_ns = time.perf_counter_ns()
        self._flushed = time.monotonic()

    def on_batch(self, event: RoutingEvent) -> None:
        """Called by the hook for each batch; only keeps references."""
        self._events.append(event)

    def on_reads(self, reads: Sequence[FinishedRead], speculative: bool) -> None:
        """Called by the hook when reads are done."""
        self._reads += [(read, speculative) for read in reads]

    def end_graph(
        self,
        place: GraphPlace,
        tally: GraphTally,
        *,
        wall_ns: int,
        compute_ns: int,
        major_faults: int,
        next_token: int | None,
        nll: float | None,
        hit: bool | None,
    ) -> None:
        """Write down a finished graph."""
        self._kept_events += [(place, event) for event in self._events]
        self._kept_reads += [(place, read, speculative) for read, speculative in self._reads]
        self._events, self._reads = [], []
        single = len(place.tokens) == 1
        self._kept_graphs.append(
            {
                "turn": place.turn,
                "graph": place.graph,
                "phase": place.phase,
                "step": place.positions[-1],
                "token": place.tokens[0] if single else None,
                "next_token": next_token,
                "nll": nll,
                "hit": hit,
                "wall_ns": wall_ns,
                "compute_ns": compute_ns,
                "read_wait_ns": tally.read_wait_ns,
                "management_ns": tally.hook_ns - tally.read_wait_ns,
                "read_bytes": tally.read_bytes,
                "window_bytes": tally.window_bytes,
                "lookups": tally.lookups,
                "hits": tally.hits,
                "reranked": tally.reranked,
                "substituted": tally.substituted,
                "dropped": tally.dropped,
                "evictions": tally.evictions,
                "major_faults": major_faults,
            }
        )
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Turn what was collected into parts."""
        events, reads, graphs = self._kept_events, self._kept_reads, self._kept_graphs
        self._kept_events, self._kept_reads, self._kept_graphs = [], [], []
        if events:
            self._writer.add("routing", _routing_columns(events))
        if reads:
            self._writer.add("reads", _read_columns(reads, self._epoch_ns))
        if graphs:
            self._writer.add("tokens", {name: [row[name] for row in graphs] for name in graphs[0]})
        self._writer.flush()
        self._flushed = time.monotonic()


def _routing_columns(events: Sequence[tuple[GraphPlace, RoutingEvent]]) -> dict[str, Any]:
    n_rows = [len(event.router_experts) for _, event in events]
    # The last layer may route only the tokens whose output was asked for.
    pos_in_graph = [
        range(n) if n == len(place.tokens) else [len(place.tokens) - 1] * n
        for n, (place, _) in zip(n_rows, events, strict=True)
    ]
    places = [(place, row) for (place, _), rows in zip(events, pos_in_graph, strict=True) for row in rows]

    def per_event(values: list[int]) -> np.ndarray:
        return np.repeat(values, n_rows)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(event, name) for _, event in events])

    experts = joined("experts")
    read_bytes = np.zeros(experts.shape, dtype=np.int64)
    start = 0
    for n, (_, event) in zip(n_rows, events, strict=True):
        for row, slot in event.charged:
            read_bytes[start + row, slot] = event.entry_bytes
        start += n
    columns = {
        "turn": per_event([place.turn for place, _ in events]),
        "graph": per_event([place.graph for place, _ in events]),
        "phase": per_event([place.phase for place, _ in events]),
        "step": np.array([place.positions[row] for place, row in places]),
        "layer": per_event([event.layer for _, event in events]),
        "pos_in_graph": np.array([row for _, row in places]),
        "token": np.array([place.tokens[row] for place, row in places]),
        "scores": joined("scores"),
        "router_experts": joined("router_experts"),
        "experts": experts,
        "weights": joined("weights"),
        "residency": joined("residency"),
        "dropped": joined("dropped"),
        "read_bytes": read_bytes,
    }
    if events[0][1].gate_probs is not None:
        columns["gate_probs"] = joined("gate_probs")
    return columns


def _read_columns(reads: Sequence[tuple[GraphPlace, FinishedRead, bool]], epoch_ns: int) -> dict[str, Any]:
    return {
        "turn": [place.turn for place, _, _ in reads],
        "graph": [place.graph for place, _, _ in reads],
        "phase": [place.phase for place, _, _ in reads],
        "step": [place.positions[-1] for place, _, _ in reads],
        "layer": [read.slice.layer for _, read, _ in reads],
        "expert": [read.slice.expert for _, read, _ in reads],
        "projection": [read.slice.projection for _, read, _ in reads],
        "lane": [read.lane for _, read, _ in reads],
        "speculative": [speculative for _, _, speculative in reads],
        "offset": [read.offset for _, read, _ in reads],
        "req_bytes": [read.slice.size for _, read, _ in reads],
        "window_bytes": [read.window_bytes for _, read, _ in reads],
        "start_ns": [read.start_ns - epoch_ns for _, read, _ in reads],
        "latency_ns": [read.latency_ns for _, read, _ in reads],
    }
