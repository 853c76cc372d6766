"""The eval callback: where substitution, dropping, the cache and the reads happen, between two graph nodes.

llama.cpp asks before each node whether to stop after it. The hook stops at two per MoE layer: the router's
top-k, where substitution rewrites the ids, and the last node of the weight chain, where dropping edits ids
and weights and the missing experts are read. The expert matmuls come after both.
Rules: engine-semantics, sections 1 to 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import string_at
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import numpy as np

from simlab.errors import RunError
from simlab.record.cache import LiveCache
from simlab.record.discovery import Routing, score_tensor
from simlab.record.experts import ExpertMemory, slices_of
from simlab.record.ggml import NAME_OFFSET, Tensor, rows_of
from simlab.record.llama import EvalCallback
from simlab.record.reads import FinishedRead, ReadLanes
from simlab.routing import Dropped, drop, drop_armed, knob_values, rerank
from simlab.scores import applied_weights, gate_numerators, ranking_values, router_ranking, row_statistics
from simlab.types import DECODE, Array, Candidates, Route, Row, ScoreSpace, Step, TraceHeader


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
    read_bytes: np.ndarray


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
    hook_ns: int = 0


class _Pending(NamedTuple):
    """A batch between its top-k and its weights."""

    layer: int
    at: int
    """Its index among the MoE layers."""
    ids: np.ndarray
    scores: np.ndarray
    router: np.ndarray
    experts: np.ndarray
    resident: np.ndarray
    row: Row


class HasHook(Protocol):
    """Whoever holds the hook of the session that runs."""

    hook: Hook | None


def node_callback(routing: Routing, holder: HasHook) -> EvalCallback:
    """The eval callback of a context: asks for a routing's nodes and hands them to the session's hook.

    llama.cpp calls it for every node of every graph, so the asking path is one look-up.
    """

    class Wanted(dict[bytes, bool]):
        def __missing__(self, name: bytes) -> bool:
            self[name] = name.decode(errors="replace") in routing.nodes
            return self[name]

    wanted = Wanted()

    def on_node(pointer: int, ask: bool, _user: object) -> bool:
        if ask:
            return wanted[string_at(pointer + NAME_OFFSET)]
        return holder.hook is None or holder.hook.observe(pointer)

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
        route: Route,
        k: int,
    ) -> None:
        self._routing, self._header = routing, header
        self._experts, self._lanes, self._cache = experts, lanes, cache
        self._k = k
        self._rerank, self._drop = route.step("rerank"), route.step("drop")
        self._rerank_knobs, self._drop_knobs = _knobs(self._rerank), _knobs(self._drop)
        self._index = {layer: i for i, layer in enumerate(header.moe_layers)}
        self._ids = np.arange(header.n_expert, dtype=np.int32)
        self._rerank_state = self._new_state(self._rerank)
        self._drop_state = self._new_state(self._drop)
        self._pending: _Pending | None = None
        self._uncached: list[tuple[int, int]] = []
        self._gate: np.ndarray | None = None
        self._space: ScoreSpace = routing.score_space
        self._needs_scores = bool(route.needs & {"scores", "rank"})
        self.error: BaseException | None = None
        self.tally = GraphTally()
        self.phase = DECODE
        self.on_batch: Callable[[RoutingEvent, Sequence[FinishedRead]], None] | None = None

    def _new_state(self, step) -> list[dict[str, Array]]:
        names = step.policy.state if step else {}
        return [{n: np.float32(v) for n, v in names.items()} for _ in self._index]

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
                name = string_at(pointer + NAME_OFFSET).decode()
                if name in self._routing.top_k_nodes:
                    self._route(pointer, self._routing.top_k_nodes[name])
                else:
                    if name in self._routing.gate_nodes:
                        self._read_gate(pointer)
                    if name in self._routing.weight_nodes:
                        self._load(pointer, self._routing.weight_nodes[name])
        except BaseException as error:
            self.error = error
        self.tally.hook_ns += time.perf_counter_ns() - started
        return self.error is None

    # -- at the top-k ---------------------------------------------------------------------------------------

    def _route(self, pointer: int, layer: int) -> None:
        top_k = Tensor.from_address(pointer)
        k, n_rows = top_k.ne[0], top_k.ne[1]
        if n_rows == 0:
            return
        ids = rows_of(top_k, k, n_rows, top_k.nb[1], np.int32)
        score = Tensor.from_address(score_tensor(pointer))
        if (score.ne[0], score.ne[1]) != (self._header.n_expert, n_rows):
            raise RunError(f"layer {layer}: the score tensor has {score.ne[1]} rows, the routing {n_rows}")
        scores = rows_of(score, score.ne[0], n_rows, score.nb[1], np.float32).copy()
        router = ids.T.copy()
        index = self._index[layer]
        resident = self._cache.residency(index)
        values, row = self._look(index, scores, resident)
        experts = router
        if self._rerank is not None and self.phase == DECODE and self._header.n_expert > k:
            experts = self._substitute(self._rerank, scores, values, row, router, resident)
            if experts is not router:
                ids[:] = experts.T
        self._pending = _Pending(layer, index, ids, scores, router, experts, resident, row)

    def _look(self, index: int, scores: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, Row]:
        """Ranking values `[rows, n_expert]` and the rows' statistics; zeros where no policy needs scores."""
        n = len(scores)
        k, layer = np.full(n, self._k, dtype=np.int32), np.full(n, index, dtype=np.int32)
        if not self._needs_scores:
            zero = np.zeros(n, dtype=np.float32)
            return np.zeros_like(scores), Row(k, layer, zero, zero, np.zeros(n, dtype=np.int32))
        values = ranking_values(scores, self._space)
        statistics = row_statistics(values)
        n_resident = (np.isfinite(values) & resident).sum(axis=1).astype(np.int32)
        return values, Row(k, layer, statistics.top, statistics.range, n_resident)

    def _substitute(
        self,
        step: Step,
        scores: np.ndarray,
        values: np.ndarray,
        row: Row,
        router: np.ndarray,
        resident: np.ndarray,
    ) -> np.ndarray:
        """The executed ids `[k, rows]` after the rerank policy; `router` itself where nothing changed."""
        n_expert, n_rows = values.shape[1], values.shape[0]
        needs = step.policy.needs
        candidates = Candidates(
            value=values.T,
            expert=np.broadcast_to(self._ids[:, None], (n_expert, n_rows)),
            rank=self._ranks(values, router)
            if "rank" in needs
            else np.zeros((n_expert, n_rows), dtype=np.int32),
            resident=np.broadcast_to(resident[:, None], (n_expert, n_rows)),
            weight=self._own_weights(scores, router)
            if "weights" in needs
            else np.zeros((n_expert, n_rows), np.float32),
        )
        # A policy with state sees rows one after the other, as the replayer's scan does.
        groups = [slice(i, i + 1) for i in range(n_rows)] if step.policy.state else [slice(0, n_rows)]
        index, parts = int(row.layer[0]), []
        for rows in groups:
            found = rerank(
                np,
                step,
                self._rerank_knobs,
                Candidates(*(field[:, rows] for field in candidates)),
                Row(*(field[rows] for field in row)),
                router[:, rows],
                np.ones(rows.stop - rows.start, dtype=bool),
                self._rerank_state[index],
            )
            if step.policy.state:
                self._rerank_state[index] = {name: a[0] for name, a in found.state.items()}
            self.tally.reranked += int(found.reranked.sum())
            self.tally.substituted += int(found.substituted.sum())
            parts.append(found)
        if not any(part.substituted.any() for part in parts):
            return router
        return np.concatenate([part.experts for part in parts], axis=1).astype(np.int32)

    @staticmethod
    def _ranks(values: np.ndarray, router: np.ndarray) -> np.ndarray:
        """int32 `[n_expert, rows]`: place of every expert in the router's own ranking."""
        order = router_ranking(values, router.T)
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(order.shape[1])[None], axis=1)
        return ranks.T.astype(np.int32)

    def _own_weights(self, scores: np.ndarray, router: np.ndarray) -> np.ndarray:
        """`[n_expert, rows]`: the weights of the router's own picks, rebuilt; the graph has not made them yet."""
        rule = self._routing.weight_rule
        if self._routing.separate_gate:
            raise RunError(
                "a rerank policy that needs weights cannot run where the gate is a tensor of its own"
            )
        numerators = np.take_along_axis(gate_numerators(scores, rule).T, router, axis=0)
        found = np.zeros((scores.shape[1], scores.shape[0]), dtype=np.float32)
        np.put_along_axis(found, router, applied_weights(np, numerators, router >= 0, rule), axis=0)
        return found

    def _read_gate(self, pointer: int) -> None:
        """Copy the gate probabilities the weights are gathered from, while their buffer is surely alive."""
        reshaped = Tensor.from_address(Tensor.from_address(pointer).src[0])
        n_expert, n_rows = self._header.n_expert, Tensor.from_address(pointer).ne[2]
        self._gate = rows_of(reshaped, n_expert, n_rows, 4 * n_expert, np.float32).copy()

    # -- at the weights -------------------------------------------------------------------------------------

    def _load(self, pointer: int, layer: int) -> None:
        """Drop, look up, evict and read for one batch."""
        batch, self._pending = self._pending, None
        if batch is None:
            return
        if batch.layer != layer:
            raise RunError(
                f"layer {layer}: its weights came before its routing; this graph cannot be streamed"
            )
        k, n_rows = batch.router.shape
        node = Tensor.from_address(pointer)
        # [1, k, n] or [k, n]: the same bytes in the same order, told apart only by their extents.
        if node.ne[0] * node.ne[1] * node.ne[2] != k * n_rows:
            raise RunError(
                f"layer {layer}: the weights are {list(node.ne)}, expected {k} for each of {n_rows} rows"
            )
        live = rows_of(node, k, n_rows, 4 * k, np.float32)
        weights = live.T.copy()
        residency = batch.resident[batch.experts]
        dropped, walk, applied = np.zeros_like(residency), batch.experts, weights
        if self._drop is not None:
            outcome = self._drop_slots(self._drop, batch, weights, residency)
            if outcome.dropped.any():
                dropped, walk = outcome.dropped, outcome.walk
                applied = self._apply_drop(weights, dropped)
                live[:] = applied.T
                batch.ids[:] = walk.T
        looked_up = self._cache.run_batch(batch.at, walk, dropped, applied)
        self.release_uncached()
        for at, expert in looked_up.evicted:
            self._experts.release(self._header.moe_layers[at], expert)
        slices = slices_of(self._experts, layer, looked_up.misses)
        before = time.perf_counter_ns()
        reads = self._lanes.read(slices) if slices else []
        if self._cache.budget.off:
            self._uncached = [(layer, expert) for expert in looked_up.misses]
        tally = self.tally
        tally.read_wait_ns += time.perf_counter_ns() - before if slices else 0
        entry_bytes = self._header.entry_bytes[layer]
        tally.lookups += looked_up.lookups
        tally.hits += looked_up.hits
        tally.dropped += int(dropped.sum())
        tally.evictions += len(looked_up.evicted)
        tally.read_bytes += entry_bytes * len(looked_up.misses)
        tally.window_bytes += sum(r.window_bytes for r in reads)
        if self.on_batch is not None:
            read_bytes = np.zeros((n_rows, k), dtype=np.int64)
            for row, slot in looked_up.charged.values():
                read_bytes[row, slot] = entry_bytes
            event = RoutingEvent(
                layer,
                batch.scores,
                self._gate,
                batch.router.T,
                batch.experts.T,
                weights.T,
                residency.T.astype(np.int8),
                dropped.T,
                read_bytes,
            )
            self.on_batch(event, reads)

    def _drop_slots(self, step: Step, batch: _Pending, weights: np.ndarray, residency: np.ndarray) -> Dropped:
        if np.isnan(weights).any():
            raise RunError(
                f"layer {batch.layer}: a routing weight is NaN; {step.policy.name} cannot decide on it"
            )
        armed = drop_armed(np, step, self._drop_knobs, np.full(weights.shape[1], self.phase == DECODE))
        slots = Candidates(
            value=weights,
            expert=batch.experts,
            rank=np.broadcast_to(np.arange(len(weights), dtype=np.int32)[:, None], weights.shape),
            resident=residency,
            weight=weights,
        )
        found = drop(np, step, self._drop_knobs, slots, batch.row, armed, self._drop_state[batch.at])
        self._drop_state[batch.at] = found.state
        return found

    def _apply_drop(self, weights: np.ndarray, dropped: np.ndarray) -> np.ndarray:
        """The weights `[k, rows]` after dropping: zeros, and the survivors scaled back to the old total."""
        applied = np.where(dropped, np.float32(0), weights)
        if getattr(self._drop_knobs, "renorm", 1):
            total, kept = np.zeros((2, weights.shape[1]), dtype=np.float32)
            for slot in range(len(weights)):
                total = total + weights[slot]
                kept = kept + applied[slot]
            scaled = dropped.any(axis=0) & (kept > 0)
            applied = applied * np.where(scaled, total / np.where(scaled, kept, 1), 1).astype(np.float32)
        return applied

    def release_uncached(self) -> None:
        """With the cache off, give back what the last batch read: its matmuls are done."""
        for layer, expert in self._uncached:
            self._experts.release(layer, expert)
        self._uncached = []


def _knobs(step: Step | None) -> SimpleNamespace:
    return knob_values(step.policy.knobs, step.knobs) if step else SimpleNamespace()
