"""What a policy's own code takes per routing event: the engine's code rehearsed on the rows of a trace.

A trace recorded under one policy does not know the time of another's. Here the live engine's side of a cell, its
routing (`LiveRoute`) and its cache (`LiveCache`), runs on recorded rows with a clock around it. Between two events a
stretch of memory is gone through, as a decode step goes through weights: with warm caches the same code takes a half
to a quarter of the time. The clock is this thread's CPU time, so that others on the machine do not count.

The median is taken: live it is the mean with long times cut, and a load that others put on the machine during a
rehearsal moves it less.

It is this machine's time, of Python and NumPy. It holds for traces that were recorded by this engine on a machine
like this one; `rehearsal` says None for others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from simlab.cells import effective_k
from simlab.learning import learn
from simlab.policy import find_eviction
from simlab.replay.training import Training
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell

_TIMED_TOKENS = 48
_WARM_TOKENS = 160
"""Tokens that go before the timed ones, to fill the cache; and at most as many as the trace has."""
_SWEPT_BYTES = 4 << 20
"""Several times what a core keeps to itself."""


@dataclass(frozen=True)
class _Rows:
    """Decode rows of a trace, one token each, in order."""

    layer: np.ndarray
    scores: np.ndarray
    router: np.ndarray
    weights: np.ndarray


class Rehearsal:
    """Rehearses cells on the rows of one trace; what was timed once is kept.

    Args:
        recorded: the cell the trace was recorded under.
        training: what policies learn from, as `simlab.replay.training.load_training` gives it.
    """

    def __init__(self, trace: Trace, rows: _Rows, recorded: Cell, training: Training | None) -> None:
        self._trace, self._recorded, self._training, self._rows = trace, recorded, training, rows
        self._known: dict[tuple, tuple[float, float]] = {}
        self._sweep = np.ones(_SWEPT_BYTES // 16)
        self._swept = np.empty_like(self._sweep)

    def extra_ms(self, cell: Cell) -> float:
        """ms per token that a cell's own code takes more than the recorded cell's would.

        The cache's code takes longer the more it misses, which recorded tokens tell; only an eviction policy
        other than the recorded one adds to it here.
        """
        route = self._route_ms(cell) - self._route_ms(self._recorded)
        if _keeping(cell) == _keeping(self._recorded):
            return route
        kept = replace(cell, evict=self._recorded.evict, evict_knobs=self._recorded.evict_knobs)
        if find_eviction(cell.evict).scope is not None:
            kept = replace(kept, scope=self._recorded.scope)
        return route + self._timed(cell)[1] - self._timed(kept)[1]

    def _route_ms(self, cell: Cell) -> float:
        """Routing code alone: the same whatever the budget, the eviction and, nearly, the knobs."""
        key = ("route", tuple((s.policy.stage, s.policy.function) for s in cell.route.steps))
        if key not in self._known:
            self._known[key] = self._timed(cell)
        return self._known[key][0]

    def _timed(self, cell: Cell) -> tuple[float, float]:
        key = (
            tuple((s.policy.function, *s.knobs.items()) for s in cell.route.steps),
            *_keeping(cell),
            cell.budget,
        )
        if key not in self._known:
            self._known[key] = self._run(cell)
        return self._known[key]

    def _run(self, cell: Cell) -> tuple[float, float]:
        """Median ms per token of the routing code and of the cache code over the timed tokens."""
        from simlab.record.cache import live_cache
        from simlab.record.live_route import LiveRoute

        header, rows = self._trace.header, self._rows
        n_layers, k = len(header.moe_layers), effective_k(cell.route, header)
        learned = learn(cell.route.steps, self._training, n_layers, header.n_expert)
        route = LiveRoute(
            cell.route, k, header.n_expert, n_layers, header.score_space or "raw", header.weight_rule,
            header.gating, learned,
        )  # fmt: skip
        cache = live_cache(cell, header, self._training)
        router, weights = rows.router[:, :k], rows.weights[:, :k]
        if k > rows.router.shape[1]:
            router = np.argsort(-rows.scores, axis=1, kind="stable")[:, :k].astype(np.int32)
            weights = np.full(router.shape, 1 / k, dtype=np.float32)
        first_timed = max(0, len(rows.layer) - _TIMED_TOKENS * n_layers)
        spent = []
        for i, layer in enumerate(rows.layer.tolist()):
            scores, own, applied = rows.scores[i : i + 1], router[i : i + 1], weights[i : i + 1]
            if i >= first_timed:
                np.add(self._sweep, 1.0, out=self._swept)
            began = time.thread_time_ns()
            walk = own
            if route.reranks:
                found = route.rerank(layer, scores, own, cache.residency(layer))
                walk = found.experts if found.substituted else own
            dropped = None
            if route.drops:
                drop = route.drop(layer, scores, walk, applied, cache.residency(layer), True)
                if drop is not None:
                    dropped, walk, applied = drop
            routed = time.thread_time_ns()
            cache.run_batch(layer, walk, dropped, applied)
            if i >= first_timed:
                spent.append((routed - began, time.thread_time_ns() - routed))
        tokens = np.array(spent, dtype=np.float64).reshape(-1, n_layers, 2).sum(axis=1)
        of_route, of_cache = np.median(tokens, axis=0) / 1e6
        return float(of_route), float(of_cache)


def _keeping(cell: Cell) -> tuple:
    return (find_eviction(cell.evict).function, tuple(cell.evict_knobs.items()), cell.scope)


def rehearsal(trace: Trace, recorded: Cell, training: Training | None = None) -> Rehearsal | None:
    """A rehearsal on a trace, or None where it would say nothing.

    That is where another engine recorded it, and where decode steps are not of one token or lack weights.
    """
    if trace.header.engine != "simlab":
        return None
    rows = _decode_rows(trace, _WARM_TOKENS + _TIMED_TOKENS)
    return None if rows is None else Rehearsal(trace, rows, recorded, training)


def _decode_rows(trace: Trace, n_tokens: int) -> _Rows | None:
    """The first decode tokens; None where a step has several tokens, or a slot is empty or has no weight."""
    header = trace.header
    n_layers = len(header.moe_layers)
    wanted = trace.routing.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN))
    names = ["graph", "layer", "router_experts", "weights"] + ["scores"] * trace.has_scores
    rows = trace.collect("routing", wanted.select(names).head(n_tokens * n_layers))
    whole = rows.height // n_layers * n_layers
    rows = rows.head(whole)
    layer = np.searchsorted(header.moe_layers, rows["layer"].to_numpy())
    if (
        not whole
        or rows["weights"].null_count()
        or (layer != np.tile(np.arange(n_layers), whole // n_layers)).any()
    ):
        return None

    def wide(name: str, width: int, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(rows[name].to_numpy().reshape(-1, width).astype(dtype))

    router, weights = wide("router_experts", trace.width, np.int32), wide("weights", trace.width, np.float32)
    if (router < 0).any() or not np.isfinite(weights).all():
        return None
    scores = (
        wide("scores", header.n_expert, np.float32)
        if trace.has_scores
        else np.zeros((whole, header.n_expert), dtype=np.float32)
    )
    return _Rows(layer, scores, router, weights)
