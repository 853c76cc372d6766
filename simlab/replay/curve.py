"""The LRU curve: hits and bytes read at every cache size, from one pass over the router's own routing.

Every lookup has one budget from which on it hits (`simlab.replay.lookups.reuse_bytes`, with the proof), so
the curve is those budgets, sorted and counted. It equals a replay with `original` routing and `lru` at any
budget, to the lookup and to the byte.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from simlab.cells import MIB
from simlab.errors import SimlabWarning
from simlab.replay.columns import TraceColumns
from simlab.replay.lookups import find_lookups, original_ids, reuse_bytes
from simlab.trace.store import Trace, open_trace
from simlab.types import Scope, TraceHeader

PHASES = ("decode", "all")


class Landmark(NamedTuple):
    """A budget worth looking at, and why."""

    budget_bytes: int
    what: str


def lru_curve(trace: Trace | str | os.PathLike[str], scope: Scope = "global") -> pl.DataFrame:
    """Hits and bytes read under LRU at every budget, exactly; a row is a step.

    A row holds from its `budget_bytes` up to, and without, the next row's; the first begins at one byte, the
    last holds for whatever is larger. With scope "per_layer" a budget is the whole cache's, of which each
    MoE layer has `floor(budget / layers)`.

    Returns: int64 `budget_bytes`, float64 `budget_mib`, `budget_cycles`; and for `decode_` and `all_`
    (prefill included): int64 `hits`, `misses`, `cold_misses`, `read_bytes`, float64 `hit_rate`, `read_mib`,
    `read_mib_per_token` (null where there are no lookups or tokens). Simulated, as every replay.

    Raises:
        InputError: the trace cannot be replayed.
    """
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    columns = TraceColumns(trace)
    if columns.speculative.shape[1]:
        warnings.warn(
            f"{trace.path}: recorded with look-ahead; the curve is of the routing alone, without those reads",
            SimlabWarning,
            stacklevel=2,
        )
    return curve_of(columns, scope)


def curve_of(columns: TraceColumns, scope: Scope) -> pl.DataFrame:
    """`lru_curve` of columns at hand: of what they count."""
    lookups = find_lookups(columns, original_ids(columns))
    least = least_budgets(columns, reuse_bytes(columns, lookups, scope), scope)
    counted = columns.counted[lookups.row]
    warm = counted & ~lookups.cold
    budgets = np.unique(np.append(least[warm], 1))
    cycle = columns.trace.header.cycle_bytes()
    curve: dict[str, Any] = {
        "budget_bytes": budgets,
        "budget_mib": budgets / MIB,
        "budget_cycles": budgets / cycle,
    }
    in_phase = {"decode": counted & columns.decode[lookups.row], "all": counted}
    for phase in PHASES:
        mine = in_phase[phase]
        found, size = least[mine & warm], lookups.size[mine & warm]
        order = np.argsort(found)
        hits = np.searchsorted(found[order], budgets, side="right")
        spared = np.concatenate([[0], np.cumsum(size[order])])
        read = lookups.size[mine].sum() - spared[hits]
        tokens = columns.n_tokens(decode=True) + (columns.n_tokens(decode=False) if phase == "all" else 0)
        n = int(mine.sum())
        nothing = [None] * len(budgets)
        curve |= {
            f"{phase}_hits": hits,
            f"{phase}_misses": n - hits,
            f"{phase}_cold_misses": np.full(len(budgets), (mine & lookups.cold).sum()),
            f"{phase}_read_bytes": read,
            f"{phase}_hit_rate": hits / n if n else nothing,
            f"{phase}_read_mib": read / MIB,
            f"{phase}_read_mib_per_token": read / MIB / tokens if tokens else nothing,
        }
    floats = ("mib", "cycles", "rate", "token")
    return pl.DataFrame(
        curve, schema={name: pl.Float64 if name.endswith(floats) else pl.Int64 for name in curve}
    )


def least_budgets(columns: TraceColumns, reuse: np.ndarray, scope: Scope) -> np.ndarray:
    """int64 `[n]`: the smallest whole budget, in bytes and at least one, at which each lookup hits.

    With scope "per_layer" it is that of all layers together: `floor(budget / layers) >= reuse` holds from
    `layers * reuse` on.
    """
    share = len(columns.trace.header.moe_layers) if scope == "per_layer" else 1
    known = reuse <= np.iinfo(np.int64).max // share
    return np.where(known, np.maximum(np.where(known, reuse, 0) * share, 1), reuse)


def at_budget(curve: pl.DataFrame, budget_bytes: int) -> dict[str, Any]:
    """The step of a curve that holds at a budget, with that budget in place of the step's beginning.

    Raises:
        ValueError: a budget below one byte.
    """
    if budget_bytes < 1:
        raise ValueError(f"a budget of {budget_bytes} bytes is no cache")
    place = int(curve["budget_bytes"].search_sorted(budget_bytes, side="right")) - 1
    step = curve.row(place, named=True)
    cycle = round(step["budget_bytes"] / step["budget_cycles"])
    return step | {
        "budget_bytes": budget_bytes,
        "budget_mib": budget_bytes / MIB,
        "budget_cycles": budget_bytes / cycle,
    }


def cliff_foot(header: TraceHeader, k: int | None = None) -> int:
    """The largest budget, in bytes, with no hit in decode: one cycle minus k entries of the largest layer.

    For a global LRU with two or more MoE layers and one-token graphs (engine-semantics, section 3): between
    two uses of an entry lie at least all entries of the other layers. `k`: experts per token, if not the model's.
    """
    return header.cycle_bytes(k) - (k or header.n_expert_used) * max(header.entry_bytes.values())


def routing_words(header: TraceHeader) -> str:
    """Of which routing a trace's curve is: what the router picked, or what ran where that is all the trace has."""
    return "router's own routing" if header.router_known else "executed routing"


def landmarks(curve: pl.DataFrame, header: TraceHeader, scope: Scope = "global") -> list[Landmark]:
    """Budgets that tell the shape of a curve's decode side, ascending; some fall together on small traces.

    The knee is the point farthest above the straight line from the smallest budget to the largest that
    changes anything (Satopaa et al. 2011, both axes scaled to 1).
    """
    hits = curve["decode_hits"].to_numpy()
    budgets = curve["budget_bytes"].to_numpy()
    cycle = header.cycle_bytes()
    found: dict[int, list[str]] = {}

    def name(budget: int, what: str) -> None:
        found.setdefault(int(budget), []).append(what)

    if scope == "global" and len(header.moe_layers) > 1 and cliff_foot(header) > 0:
        name(cliff_foot(header), "one cycle minus k entries")
    for cycles in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0):
        if cycles <= 1 or cycles * cycle < budgets[-1]:
            name(int(cycles * cycle), "one token cycle" if cycles == 1 else "")
    most = hits[-1]
    if most > 0:
        name(budgets[np.argmax(hits > 0)], "first decode hit")
        name(budgets[np.argmax(hits >= 0.9 * most)], "90 % of what a cache can hit")
        name(budgets[np.argmax(hits == most)], "every reuse hits")
        span = max(int(budgets[-1]) - int(budgets[0]), 1)
        name(budgets[np.argmax(hits / most - (budgets - budgets[0]) / span)], "knee")
    return [Landmark(b, ", ".join(filter(None, words))) for b, words in sorted(found.items())]


def curve_to_json(curve: pl.DataFrame, trace: Trace, scope: Scope) -> Mapping[str, Any]:
    """The whole curve as plain values: facts once, steps as columns of whole numbers."""
    header = trace.header
    columns = ["budget_bytes", *(f"{p}_{name}" for p in PHASES for name in ("hits", "read_bytes"))]
    first = curve.row(0, named=True)
    return {
        "source": "replay",
        "route": "original" if header.router_known else None,
        "evict": "lru",
        "scope": scope,
        "model": header.model,
        "cycle_bytes": header.cycle_bytes(),
        "expert_bytes": header.expert_bytes,
        **{
            phase: {
                "lookups": first[f"{phase}_hits"] + first[f"{phase}_misses"],
                "cold_misses": first[f"{phase}_cold_misses"],
            }
            for phase in PHASES
        },
        "landmarks": [
            at_budget(curve, mark.budget_bytes) | {"what": mark.what}
            for mark in landmarks(curve, header, scope)
        ],
        "steps": {name: curve[name].to_list() for name in columns},
    }
