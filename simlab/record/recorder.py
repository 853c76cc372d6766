"""From routing events and finished reads to the tables of a trace, written between graphs."""

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
        self._kept: dict[str, list[dict[str, Any]]] = {"routing": [], "reads": [], "tokens": []}
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
        where = {"turn": place.turn, "graph": place.graph, "phase": place.phase}
        for event in self._events:
            self._kept["routing"].append(self._routing_columns(place, where, event))
        if self._reads:
            self._kept["reads"].append(self._read_columns(place, where))
        self._events, self._reads = [], []
        single = len(place.tokens) == 1
        self._kept["tokens"].append(
            {
                **where,
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

    def _routing_columns(
        self, place: GraphPlace, where: dict[str, int], event: RoutingEvent
    ) -> dict[str, Any]:
        n = len(event.router_experts)
        # The last layer may route only the tokens whose output was asked for.
        rows = np.arange(n) if n == len(place.tokens) else np.array([len(place.tokens) - 1] * n)
        read_bytes = np.zeros(event.experts.shape, dtype=np.int64)
        for row, slot in event.charged:
            read_bytes[row, slot] = event.entry_bytes
        columns: dict[str, Any] = {
            **{name: np.full(n, value) for name, value in where.items()},
            "step": np.asarray(place.positions)[rows],
            "layer": np.full(n, event.layer),
            "pos_in_graph": rows,
            "token": np.asarray(place.tokens)[rows],
            "scores": event.scores,
            "router_experts": event.router_experts,
            "experts": event.experts,
            "weights": event.weights,
            "residency": event.residency,
            "dropped": event.dropped,
            "read_bytes": read_bytes,
        }
        if event.gate_probs is not None:
            columns["gate_probs"] = event.gate_probs
        return columns

    def _read_columns(self, place: GraphPlace, where: dict[str, int]) -> dict[str, Any]:
        n = len(self._reads)
        return {
            **{name: np.full(n, value) for name, value in where.items()},
            "step": np.full(n, place.positions[-1]),
            "layer": np.array([r.slice.layer for r, _ in self._reads]),
            "expert": np.array([r.slice.expert for r, _ in self._reads]),
            "projection": [r.slice.projection for r, _ in self._reads],
            "lane": np.array([r.lane for r, _ in self._reads]),
            "speculative": np.array([speculative for _, speculative in self._reads]),
            "offset": np.array([r.offset for r, _ in self._reads]),
            "req_bytes": np.array([r.slice.size for r, _ in self._reads]),
            "window_bytes": np.array([r.window_bytes for r, _ in self._reads]),
            "start_ns": np.array([r.start_ns - self._epoch_ns for r, _ in self._reads]),
            "latency_ns": np.array([r.latency_ns for r, _ in self._reads]),
        }

    def flush(self) -> None:
        """Turn what was collected into parts."""
        for table in ("routing", "reads"):
            kept, self._kept[table] = self._kept[table], []
            if kept:
                names = {name for columns in kept for name in columns}
                self._writer.add(table, {name: _joined([c[name] for c in kept]) for name in names})
        kept, self._kept["tokens"] = self._kept["tokens"], []
        if kept:
            self._writer.add("tokens", {name: [row[name] for row in kept] for name in kept[0]})
        self._writer.flush()
        self._flushed = time.monotonic()


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return np.concatenate(parts)
