"""From a route trace and, where given, its metrics and its io trace, to a trace's header and tables.

What a file does not say stays null: `route_trace` has neither scores nor the router's own ids apart from the
executed ones, so a trace made from it can be replayed under every policy that needs no scores, and the gating
and the weight rule of its header are unknown. So is the routing policy of the run, unless somebody states it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.bmoe_metrics import MS, MetricsFile, read_metrics
from simlab.trace.facts import keeps_router
from simlab.trace.io_csv import IoFile, read_io
from simlab.trace.route_csv import RouteFile, read_route
from simlab.trace.routing_checks import warn_of_no_prompt
from simlab.types import DECODE, PREFILL, Route, TraceHeader

_BY_SPECULATION = 2
_WINDOW_SLACK = 4 * 2 * 4096
"""Bytes that the windows of a missed entry's reads, at most four, may have over it: up to a page at either end."""


def trace_of_route(
    by_kind: Mapping[str, Path], stated: Route | None = None
) -> tuple[TraceHeader, dict[str, dict[str, Any]]]:
    """The header and the columns of the tables.

    Args:
        by_kind: "route trace" and, where given, "metrics file" and "io trace".
        stated: what the run ran under, where somebody says it.

    Raises:
        InputError: a file cannot be used, or they are not of one run.
    """
    route = read_route(by_kind["route trace"])
    metrics = read_metrics(by_kind["metrics file"]) if "metrics file" in by_kind else None
    reads = read_io(by_kind["io trace"]) if "io trace" in by_kind else None
    if metrics is not None and metrics.n_expert not in (None, route.n_expert):
        problem = f"field 'n_expert': {metrics.n_expert}, but {route.path} has {route.n_expert}"
        raise _not_of_one_run(metrics, problem)
    if reads is not None:
        reads.check_against(route.path, route.n_expert, route.entry_bytes)
    tokens = _tokens(route, metrics)
    tables = {"routing": _routing(route), "tokens": tokens}
    if reads is not None:
        tables["reads"] = _reads(reads, tokens)
    return _header(route, metrics, reads, stated), tables


def _not_of_one_run(metrics: MetricsFile, problem: str) -> InputError:
    return InputError(f"{metrics.path}, {problem}; the two are not of one run")


# ---------------------------------------------------------------------------------------------------------
# Header


def _header(
    route: RouteFile, metrics: MetricsFile | None, reads: IoFile | None, stated: Route | None
) -> TraceHeader:
    policy, knobs, router_known = _policy(route, metrics, stated)
    io_mode = metrics.io_mode if metrics else None
    if io_mode is None and reads is not None:
        io_mode = reads.io_mode
    return TraceHeader(
        model=route.model,
        arch=route.arch,
        n_layer=route.n_layer,
        n_expert=route.n_expert,
        n_expert_used=route.k,
        gating=None,
        score_space=None,
        weight_rule=None,
        entry_bytes=route.entry_bytes,
        router_known=router_known,
        dense_bytes=route.dense_bytes,
        budget_bytes=metrics.budget_bytes if metrics else None,
        route=policy,
        knobs=knobs,
        evict="lru",
        scope="global",
        io_mode=io_mode,
        engine="bmoe",
        engine_version=metrics.engine_version if metrics else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _policy(
    route: RouteFile, metrics: MetricsFile | None, stated: Route | None
) -> tuple[str | None, dict[str, float], bool]:
    """Name and knobs of the run's routing policy, None where nobody knows, and whether the ids are the router's own.

    Without knobs `drop_cold` is one that no file says the threshold of.

    Raises:
        InputError: what was stated is not what the files say.
    """
    said = metrics.drop_knobs if metrics else None
    if stated is not None:
        _check_stated(route, metrics, stated)
        return stated.name, stated.knobs, keeps_router(stated)
    # Substituted ids are what a route trace holds, and nothing in it says whether there are any.
    known = metrics is not None and metrics.n_substituted == 0
    if said:
        return "drop_cold", said, known
    if not route.any_dropped:
        return ("original" if known else None), {}, known
    if metrics is not None and said is not None:
        raise InputError(f"{route.path}: has dropped slots, but {metrics.path} says dropping was off")
    warnings.warn(
        f"{route.path}: slots were dropped, at a threshold the file does not name; give the metrics file or --route",
        SimlabWarning,
        stacklevel=4,
    )
    return "drop_cold", {}, known


def _check_stated(route: RouteFile, metrics: MetricsFile | None, stated: Route) -> None:
    said, drop = metrics.drop_knobs if metrics else None, stated.step("drop")
    own = dict(drop.knobs) if drop is not None and drop.knobs.get("F", 1) > 0 else {}
    wide = stated.step("width")
    if wide is not None and wide.policy.is_builtin("top_k") and wide.knobs["k"] != route.k:
        raise InputError(
            f"--route {stated.name}: k is {wide.knobs['k']:g}, but {route.path} has {route.k} slots"
        )
    if drop is None and route.any_dropped:
        raise InputError(f"--route {stated.name}: {route.path} has dropped slots; add what dropped them")
    same = said is None or (
        said.keys() == own.keys() and all(math.isclose(said[n], own[n], rel_tol=1e-6) for n in said)
    )
    if metrics is not None and not same:
        raise InputError(
            f"--route {stated.name}: {metrics.path} says drop_cold {said or 'was off'}, not {own or 'off'}"
        )
    if metrics is not None and metrics.n_substituted and keeps_router(stated):
        raise InputError(
            f"--route {stated.name}: {metrics.path} says {metrics.n_substituted} slots were substituted"
        )


# ---------------------------------------------------------------------------------------------------------
# Tables


def _tokens(route: RouteFile, metrics: MetricsFile | None) -> dict[str, Any]:
    """The tokens table: one row per graph; a graph's step is its last token's."""
    graph = route.rows["graph"]
    n_graphs = int(graph[-1]) + 1
    first = np.searchsorted(graph, np.arange(n_graphs))
    if route.rows["phase"][0] == DECODE:
        warn_of_no_prompt(route.path, int(route.rows["step"][0]))
    step = np.full(n_graphs, -1, np.int64)
    np.maximum.at(step, graph, route.rows["step"])
    of_slot = graph[route.row_of_slot]
    columns: dict[str, Any] = {
        "turn": route.rows["turn"][first],
        "graph": np.arange(n_graphs),
        "phase": route.rows["phase"][first],
        "step": step,
        "read_bytes": _sum_by(of_slot, route.slots["read_bytes"], n_graphs),
        "dropped": _sum_by(of_slot, route.slots["dropped"], n_graphs),
    }
    if metrics is not None:
        columns |= _measured(route, metrics, columns)
    return columns


def _sum_by(group: NDArray, values: NDArray, n: int) -> NDArray[np.int64]:
    total = np.zeros(n, np.int64)
    np.add.at(total, group, values.astype(np.int64))
    return total


def _measured(
    route: RouteFile, metrics: MetricsFile, tokens: dict[str, NDArray]
) -> dict[str, list[int | None]]:
    """The metrics' columns, each on the graph its row belongs to.

    Metrics count the aligned windows they read, the route trace entry bytes: theirs is `window_bytes`.
    """
    graph_of = {
        (int(turn), int(step)): graph
        for graph, (turn, phase, step) in enumerate(
            zip(tokens["turn"], tokens["phase"], tokens["step"], strict=True)
        )
        if phase == DECODE and step >= 0
    }
    _check_one_run(route, metrics, tokens)
    places = [graph_of.get(place) for place in _places(route, metrics, tokens)]
    missing = places.count(None)
    if missing == len(places):
        raise _not_of_one_run(metrics, f"field 'step': none of its steps is in {route.path}")
    _check_bytes(route, metrics, tokens, places)
    if missing:
        warnings.warn(
            f"{metrics.path}: {missing} of its {len(places)} steps are not in {route.path}, and left out",
            SimlabWarning,
            stacklevel=5,
        )
    columns = metrics.columns
    found: dict[str, NDArray] = {
        "wall_ns": columns["wall_ms"] * MS,
        "compute_ns": columns["compute_ms"] * MS,
        "read_wait_ns": metrics.read_wait_ms * MS,
        "window_bytes": columns["read_bytes"],
    }
    if "mgmt_ms" in columns:
        found["management_ns"] = columns["mgmt_ms"] * MS
    if "majflt" in columns:
        found["major_faults"] = columns["majflt"]
    out: dict[str, list[int | None]] = {}
    for name, values in found.items():
        column: list[int | None] = [None] * len(tokens["graph"])
        for place, value in zip(places, values, strict=True):
            if place is not None and value >= 0:  # below zero or nan: not measured
                column[place] = round(float(value))
        out[name] = column
    return out


def _check_one_run(route: RouteFile, metrics: MetricsFile, tokens: dict[str, NDArray]) -> None:
    """Refuse metrics of another prompt, or of another number of decoded tokens."""
    turns, decode = tokens["turn"], (tokens["phase"] == DECODE) & (tokens["step"] >= 0)
    if not decode.any() or (tokens["step"] < 0).any():
        return
    first = int(tokens["step"][decode][0])
    if metrics.n_prompt not in (None, first) and len(np.unique(turns)) == 1:
        problem = f"field 'n_prompt': {metrics.n_prompt}, but {route.path} decodes from position {first}"
        raise _not_of_one_run(metrics, problem)
    several = (route.rows["phase"] == DECODE) & (route.rows["pos_in_graph"] > 0)
    if route.cut or not metrics.finished or several.any():
        return
    # A draft layer's rows are a graph of their own at a step that is there already.
    n_decoded = len(np.unique(np.stack([turns[decode], tokens["step"][decode]]), axis=1).T)
    if n_decoded != len(metrics.columns["step"]):
        problem = (
            f"field 'step': {len(metrics.columns['step'])} decoded tokens, but {route.path} has {n_decoded}"
        )
        raise _not_of_one_run(metrics, problem)


def _check_bytes(
    route: RouteFile, metrics: MetricsFile, tokens: dict[str, NDArray], places: Sequence[int | None]
) -> None:
    """Refuse metrics that read less than the entries charged, or, with nothing read ahead, more than their windows."""
    read = metrics.columns["read_bytes"]
    if not read.any():  # not measured
        return
    of_slot = route.rows["graph"][route.row_of_slot]
    n_missed = _sum_by(of_slot, route.slots["read_bytes"] > 0, len(tokens["graph"]))
    ahead = bool(metrics.speculative_mib) or bool((route.slots["residency"] == _BY_SPECULATION).any())
    for row, (place, found) in enumerate(zip(places, read.tolist(), strict=True)):
        if place is None:
            continue
        least = int(tokens["read_bytes"][place])
        if found < least or (not ahead and found > least + _WINDOW_SLACK * int(n_missed[place])):
            at = f"line {metrics.line_of(row)}, field 'read_bytes'"
            raise _not_of_one_run(
                metrics, f"{at}: {found}, but {route.path} charges {least} bytes at that step"
            )


def _places(route: RouteFile, metrics: MetricsFile, tokens: dict[str, NDArray]) -> list[tuple[int, int]]:
    """(turn, context position) of every metrics row: row s is step `n_prompt + s - 1`.

    The summary's `n_prompt` is one run's; in a session of several turns each turn's first decoded position,
    as the trace has it, takes its place.
    """
    steps = metrics.columns["step"]
    turns = metrics.columns.get("turn", np.full(len(steps), tokens["turn"][0]))
    if len(np.unique(tokens["turn"])) == 1 and len(np.unique(turns)) == 1:
        n_prompt = metrics.n_prompt
        if n_prompt is None:
            n_prompt = len(np.unique(route.rows["step"][route.rows["phase"] == PREFILL]))
        return [(int(turn), n_prompt + int(step) - 1) for turn, step in zip(turns, steps, strict=True)]
    places: list[tuple[int, int]] = []
    for turn, step in zip(turns, steps, strict=True):
        decoded = tokens["step"][(tokens["turn"] == turn) & (tokens["phase"] == DECODE)]
        start = int(decoded[0]) if len(decoded) else -1
        places.append((int(turn), start + int(step - steps[turns == turn][0])))
    return places


def _reads(reads: IoFile, tokens: dict[str, Any]) -> dict[str, Any]:
    """The reads table. A read stands on the graph whose last position its line names."""
    graph_of = {
        place: graph
        for graph, place in enumerate(
            zip(tokens["turn"].tolist(), tokens["phase"].tolist(), tokens["step"].tolist(), strict=True)
        )
    }
    columns = reads.columns
    places = zip(columns["turn"].tolist(), columns["phase"].tolist(), columns["step"].tolist(), strict=True)
    graph = np.array([graph_of.get(place, -1) for place in places], dtype=np.int64)
    keep = graph >= 0
    if not keep.all():
        warnings.warn(
            f"{reads.path}: {int((~keep).sum())} of its {len(keep)} reads belong to no graph of the route "
            "trace, and are left out",
            SimlabWarning,
            stacklevel=4,
        )
    kept = {name: values[keep] for name, values in columns.items()}
    return {
        **{
            name: kept[name]
            for name in ("turn", "phase", "step", "layer", "expert", "lane", "offset", "req_bytes")
        },
        "graph": graph[keep],
        # The number as the file has it: which projection it is depends on how the model lays its experts out.
        "projection": [str(p) for p in kept["proj"].tolist()],
        "speculative": kept["spec"] > 0,
        "window_bytes": kept["read_bytes"],
        "latency_ns": kept["latency_ns"],
    }


def _routing(route: RouteFile) -> dict[str, NDArray]:
    """The routing table, without the columns that a route trace cannot fill."""

    def by_slot(values: NDArray, empty: Any, dtype: Any) -> NDArray:
        matrix = np.full((len(route.rows["graph"]), route.k), empty, dtype)
        matrix[route.row_of_slot, route.slots["slot"]] = values
        return matrix

    experts = by_slot(route.slots["expert"], -1, np.int32)
    return {
        **route.rows,
        "router_experts": experts,
        "experts": experts,
        "weights": by_slot(route.slots["weight"], 0, np.float32),
        "residency": by_slot(route.slots["residency"], 0, np.int8),
        "dropped": by_slot(route.slots["dropped"], False, bool),
        "read_bytes": by_slot(route.slots["read_bytes"], 0, np.int64),
    }
