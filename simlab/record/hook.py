"""The eval callback: where substitution, dropping, the cache and the reads happen, between two graph nodes.

llama.cpp asks before each node whether to stop after it. The hook stops at two per MoE layer: the router's
top-k, where substitution rewrites the ids, and the last node of the weight chain, where dropping edits ids
and weights and the missing experts are read. The expert matmuls come after both. With overlapped reads it
also stops before the down projection, and with `next_gate` at the router's logits.
Rules: engine-semantics, sections 1 to 3.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from simlab.errors import RunError
from simlab.record.asking import Observer
from simlab.record.cache import LiveCache
from simlab.record.discovery import Routing
from simlab.record.experts import ExpertMemory
from simlab.record.ggml import F32, NAME_OFFSET, Tensor, rows_of
from simlab.record.live_route import LiveRoute
from simlab.record.lookahead import LookAhead
from simlab.record.reads import FinishedRead, PendingReads, ReadLanes
from simlab.record.views import NodeViews
from simlab.types import DECODE, TraceHeader

NODE_PREFIX = b"ffn_moe_"
"""What the names of the nodes of an expert layer begin with."""


class RoutingEvent(NamedTuple):
    """Everything one batch decided; arrays `[rows, ...]`. What the recorder writes down."""

    layer: int
    scores: np.ndarray
    gate_probs: np.ndarray | None
    router_experts: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    residency: np.ndarray
    dropped: np.ndarray
    charged: Sequence[tuple[int, int]]
    """(row, slot) of every read."""
    entry_bytes: int


@dataclass
class GraphTally:
    """What one graph did and what it waited for. Times in ns."""

    lookups: int = 0
    hits: int = 0
    reranked: int = 0
    substituted: int = 0
    dropped: int = 0
    evictions: int = 0
    read_bytes: int = 0
    window_bytes: int = 0
    read_wait_ns: int = 0
    release_ns: int = 0
    """Of the hook's time, what giving evicted pages back to the system took."""
    hook_ns: int = 0


class _Pending(NamedTuple):
    """A batch between its top-k and its weights; arrays `[rows, ...]`."""

    layer: int
    at: int
    """Its index among the MoE layers."""
    ids: np.ndarray
    """The graph's own ids, writable."""
    scores: np.ndarray
    router: np.ndarray
    experts: np.ndarray


class HasHook(Protocol):
    """Whoever holds the hook of the session that runs."""

    hook: Hook | None


def node_observer(holder: HasHook) -> Observer:
    """Hands each computed node to the session's hook; where there is none, the graph goes on."""

    def on_node(pointer: int) -> bool:
        try:
            hook = holder.hook
            return hook is None or hook.observe(pointer)
        except BaseException as error:  # must not cross the C frames above, and must not go unseen
            if holder.hook is not None:
                holder.hook.error = error
            return False

    return on_node


class Hook:
    """What happens at the observed nodes, with the policies and the cache of one cell.

    Exceptions never cross the C frames: they end the graph and wait in `error`.
    """

    def __init__(
        self,
        routing: Routing,
        header: TraceHeader,
        experts: ExpertMemory,
        lanes: ReadLanes,
        cache: LiveCache,
        route: LiveRoute,
        look_ahead: LookAhead | None = None,
    ) -> None:
        self._routing, self._header = routing, header
        self._experts, self._lanes, self._cache, self._route = experts, lanes, cache, route
        self._look_ahead = look_ahead
        self._late: PendingReads | None = None
        self._late_layers = frozenset(routing.down_nodes.values())
        self._layers = header.moe_layers
        self._index = {layer: i for i, layer in enumerate(header.moe_layers)}
        self._entry_bytes = dict(header.entry_bytes)
        self._actions = self._what_to_do(routing)
        self._views = NodeViews(routing.top_k_nodes, header.n_expert)
        self._pending: _Pending | None = None
        self._uncached: list[tuple[int, int]] = []
        self._gate: np.ndarray | None = None
        self.error: BaseException | None = None
        self.tally = GraphTally()
        self.phase = DECODE
        self.on_batch: Callable[[RoutingEvent], None] | None = None
        self.on_reads: Callable[[Sequence[FinishedRead], bool], None] | None = None

    def begin_graph(self, phase: int) -> None:
        """Reset the tally; decode graphs arm the policies."""
        self.tally = GraphTally()
        self.phase = phase
        self._pending = None

    def observe(self, pointer: int) -> bool:
        """One of the nodes that were asked for is computed; False ends the graph."""
        started = time.perf_counter_ns()
        try:
            if self.error is None:
                for act, layer in self._actions[string_at(pointer + NAME_OFFSET)]:
                    act(pointer, layer)
        except BaseException as error:
            self.error = error
        self.tally.hook_ns += time.perf_counter_ns() - started
        return self.error is None

    def _what_to_do(self, routing: Routing) -> dict[bytes, list[tuple[Callable[[int, int], None], int]]]:
        """Per node name, what happens there, in order."""
        found: dict[bytes, list[tuple[Callable[[int, int], None], int]]] = {}
        for act, nodes in (
            (self._reroute, routing.top_k_nodes),
            (self._finish_reads, routing.down_nodes),
            (self._see_input, routing.router_inputs),
            (self._read_gate, routing.gate_nodes),
            (self._load, routing.weight_nodes),
        ):
            for name, layer in nodes.items():
                found.setdefault(name.encode(), []).append((act, layer))
        return found

    def _reroute(self, pointer: int, _layer: int) -> None:
        """At the top-k: keep what the router chose, and let the rerank policy choose again."""
        view = self._views.top_k(pointer)
        if view is None:
            return
        at = self._index[view.layer]
        if self._look_ahead is not None:
            self._settle(self._look_ahead, at)
        router = view.ids.copy()
        # The graph may reuse the scores' buffer before the weights are there.
        keep = self.on_batch is not None or self._route.drops_by_score
        scores = view.scores.copy() if keep else view.scores
        experts = router
        if self._route.reranks and self.phase == DECODE:
            found = self._route.rerank(at, scores, router, self._cache.residency(at))
            self.tally.reranked += found.reranked
            self.tally.substituted += found.substituted
            if found.substituted:
                experts = found.experts
                view.ids[:] = experts
        self._pending = _Pending(view.layer, at, view.ids, scores, router, experts)

    def _read_gate(self, pointer: int, _layer: int) -> None:
        """For a recording: copy the gate probabilities the weights come from, while their buffer is surely alive."""
        if self.on_batch is None:
            return
        gathered = Tensor.from_address(pointer)
        source, n_expert = Tensor.from_address(gathered.src[0]), self._header.n_expert
        self._gate = rows_of(source, n_expert, gathered.ne[2], 4 * n_expert, np.float32).copy()

    def _load(self, pointer: int, layer: int) -> None:
        """At the weights: drop, look up, evict and read for one batch."""
        batch, self._pending = self._pending, None
        if batch is None:
            return
        if batch.layer != layer:
            raise RunError(
                f"layer {layer}: its weights came before its routing; this graph cannot be streamed"
            )
        n_rows, k = batch.router.shape
        live = self._views.weights(pointer, layer, k, n_rows)
        recording, resident = self.on_batch is not None, self._cache.residency(batch.at)
        weights = live.copy() if recording or self._route.drops else live
        residency = None
        if recording:
            residency = resident[batch.experts].astype(np.int8)
            if self._look_ahead is not None:
                residency += self._cache.speculative(batch.at)[batch.experts]
        walk, applied, dropped, n_dropped = batch.experts, weights, None, 0
        if self._route.drops:
            decode = self.phase == DECODE
            found = self._route.drop(batch.at, batch.scores, batch.experts, weights, resident, decode)
            if found is not None:
                dropped, walk, applied = found
                live[:] = applied
                batch.ids[:] = walk
                n_dropped = int(dropped.sum())
        looked_up = self._cache.run_batch(batch.at, walk, dropped, applied)
        entry_bytes, tally = self._entry_bytes[layer], self.tally
        if self._uncached:
            self.release_uncached()
        if looked_up.evicted:
            before = time.perf_counter_ns()
            for at, expert in looked_up.evicted:
                self._experts.release(self._layers[at], expert)
            tally.release_ns += time.perf_counter_ns() - before
        tally.lookups += looked_up.lookups
        tally.hits += looked_up.hits
        tally.dropped += n_dropped
        tally.evictions += len(looked_up.evicted) + len(looked_up.bypassed)
        tally.read_bytes += entry_bytes * len(looked_up.misses)
        if self.on_batch is not None and residency is not None:
            event = RoutingEvent(
                layer,
                batch.scores,
                self._gate,
                batch.router,
                batch.experts,
                weights,
                residency,
                dropped if dropped is not None else np.zeros(residency.shape, dtype=bool),
                looked_up.charged,
                entry_bytes,
            )
            self.on_batch(event)
        if looked_up.misses:
            self._read(layer, looked_up.misses)
            if self._cache.budget.off:
                self._uncached = [(layer, expert) for expert in looked_up.misses]
        if looked_up.bypassed:
            self._uncached = [(layer, expert) for expert in looked_up.bypassed]
        if self._look_ahead is not None and self.phase == DECODE:
            self._look_ahead.see_run(batch.at, [e for row in walk.tolist() for e in row])

    def _read(self, layer: int, misses: Sequence[int]) -> None:
        """Read missing experts; what the down projection needs may come while gate and up are computed."""
        slices = [s for expert in misses for s in self._experts.slices[layer, expert]]
        before = time.perf_counter_ns()
        if self._lanes.background and layer in self._late_layers:
            first = self._lanes.submit([s for s in slices if s.projection != "down"])
            self._late = self._lanes.submit([s for s in slices if s.projection == "down"])
            reads = self._lanes.collect(first)
        else:
            reads = self._lanes.read(slices)
        self.tally.read_wait_ns += time.perf_counter_ns() - before
        self._keep_reads(reads)

    def _finish_reads(self, _pointer: int = 0, _layer: int = 0) -> None:
        """Before the down projection: wait for what is still under way."""
        if self._late is None:
            return
        late, self._late = self._late, None
        before = time.perf_counter_ns()
        reads = self._lanes.collect(late)
        self.tally.read_wait_ns += time.perf_counter_ns() - before
        self._keep_reads(reads)

    def _settle(self, look_ahead: LookAhead, at: int) -> None:
        """Before a layer is routed: wait for what was read ahead for it."""
        before = time.perf_counter_ns()
        reads = look_ahead.settle(at)
        if reads:
            self.tally.read_wait_ns += time.perf_counter_ns() - before
            self._keep_reads(reads, speculative=True)

    def _see_input(self, pointer: int, layer: int) -> None:
        """At a router's logits: show the look-ahead what the router saw, while its buffer is surely alive."""
        if self._look_ahead is None or self.phase != DECODE or layer not in self._index:
            return
        source = Tensor.from_address(Tensor.from_address(pointer).src[1])
        if source.type == F32 and source.ne[1] == 1:
            self._look_ahead.see_input(self._index[layer], rows_of(source, source.ne[0], 1, 0, np.float32)[0])

    def _keep_reads(self, reads: Sequence[FinishedRead], speculative: bool = False) -> None:
        self.tally.window_bytes += sum([read.window_bytes for read in reads])
        if self.on_reads is not None and reads:
            self.on_reads(reads, speculative)

    def abandon(self) -> None:
        """After a failure: let nothing go on writing into the expert memory."""
        late, self._late = self._late, None
        if late is not None:
            with contextlib.suppress(RunError):
                self._lanes.collect(late)
        if self._look_ahead is not None:
            self._look_ahead.abandon()

    def end_graph(self) -> None:
        """Nothing may be under way when a graph's logits are used."""
        self._finish_reads()
        if self._look_ahead is not None:
            self._look_ahead.abandon()
        self.release_uncached()

    def release_uncached(self) -> None:
        """Give back what the last batch ran and the cache does not keep: its matmuls are done."""
        for layer, expert in self._uncached:
            self._experts.release(layer, expert)
        self._uncached = []
