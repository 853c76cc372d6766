"""Which walk a group of cells takes that can take a faster one than the scan of `kernel.py`.

Where JAX runs on a CPU, most are compiled loops; scans by XLA are what accelerators take, and kinds that have no loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.cells import effective_k, resolve_budget
from simlab.policy import find_eviction
from simlab.replay.columns import TraceColumns
from simlab.replay.future import follows_router
from simlab.replay.keyed_walk import KeyedWalk
from simlab.replay.ranked_walk import RankedWalk
from simlab.replay.recency import is_recency
from simlab.replay.recency_walk import RecencyWalk
from simlab.replay.routed_keys import is_known_beforehand
from simlab.replay.routed_walk import RoutedWalk
from simlab.replay.shape import ProgramShape
from simlab.replay.shared_order import shared_order
from simlab.replay.shared_walk import SharedWalk
from simlab.replay.units import can_count
from simlab.routing import knob_values
from simlab.types import Cell, ResolvedBudget, Route, Step

Walk = RecencyWalk | RoutedWalk | SharedWalk


def kind_of_walk(
    cell: Cell, columns: TraceColumns, sizes: NDArray[np.int64], *, loops: bool
) -> tuple[Any, ...]:
    """The kind of walk a cell can take, and what else the cells of a group must share then; empty where there is none.

    The kinds: "routed", LRU whose lanes route by themselves by what is known of each row beforehand; "recency", any
    other LRU; "fixed" and "moving", where all lanes route alike and so share an order (`shared_order`).
    """
    header = columns.trace.header
    steps = {step.policy.stage: step for step in acting_steps(cell.route)}
    rerank, drop = steps.get("rerank"), steps.get("drop")
    eviction = find_eviction(cell.evict)
    recency = is_recency(eviction)
    # Where no lane changes the routing, that of LRU is an order like others, and its scan compiles sooner.
    order = shared_order(eviction) if follows_router(cell.route) else None
    if cell.sequential or "swap" in steps or not (recency or order):
        return ()
    if rerank is not None and (not rerank.policy.ordered or rerank.policy.learns):
        return ()
    if drop is not None and drop.knobs.get("prefill", 0) > 0:
        return ()
    k = effective_k(cell.route, header)
    if not can_count(sizes, header.n_expert):
        return ()
    if (rerank or drop) and not columns.single_rows(k):
        return ()
    per_layer = resolve_budget(cell.budget, cell.scope, header, k).per_layer
    if order:
        knobs = vars(knob_values(eviction.knobs, cell.evict_knobs))
        return order, k, per_layer, tuple(knobs.items())
    routed = loops and rerank is not None and drop is None and is_known_beforehand(rerank)
    return "routed" if routed else "recency", k, per_layer


def acting_steps(route: Route) -> tuple[Step, ...]:
    """The steps of a route that may change a row."""
    return tuple(step for step in route.steps if not step.policy.is_builtin("original"))


def is_looped(kind: str, loops: bool) -> bool:
    """Whether a kind's walk is a compiled loop, which takes any number of lanes and keeps its carry in NumPy."""
    return loops and kind != "recency"


def make_walk(
    kind: str,
    columns: TraceColumns,
    program: ProgramShape,
    budgets: Sequence[ResolvedBudget],
    sizes: NDArray[np.int64],
    knobs: SimpleNamespace,
    foretold: Mapping[str, NDArray[Any]],
    *,
    loops: bool,
) -> Walk:
    """The walk of a group's lanes, of a kind that `kind_of_walk` found.

    Args:
        sizes: bytes of an entry of each MoE layer. knobs: the eviction policy's. loops: False for the scans.
    """
    if kind in ("routed", "recency"):
        return (RoutedWalk if kind == "routed" else RecencyWalk)(columns, program, budgets, sizes)
    return (RankedWalk if kind == "fixed" else KeyedWalk)(
        columns, program, budgets, sizes, knobs, foretold, loops
    )
