"""What a trace holds, in a few numbers. Reads few columns, so it answers in well under a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from simlab.trace.measured import Measured, measured, measured_text
from simlab.trace.schema import TABLES
from simlab.trace.store import Trace, open_trace
from simlab.types import DECODE, PREFILL, TraceHeader

_MIB = 1 << 20


def trace_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts of a trace as plain JSON values; sizes in bytes unless the name says MiB.

    Tokens are positions evaluated: the rows of each graph's widest layer. The throw-away turn -1 is left out.

    Raises:
        InputError: the trace cannot be opened.
    """
    trace = open_trace(path)
    header = trace.header
    cycle = header.cycle_bytes()
    budget = header.budget_bytes
    sizes = sorted(header.entry_bytes.values())
    dense = header.dense_bytes
    rule = header.weight_rule
    counts = _counts(trace)
    return {
        "trace": str(trace.path),
        "schema_version": header.schema_version,
        "complete": header.complete,
        "model": header.model,
        "arch": header.arch,
        "n_layer": header.n_layer,
        "n_moe_layers": len(header.moe_layers),
        "moe_layers": list(header.moe_layers),
        "n_expert": header.n_expert,
        "n_expert_used": header.n_expert_used,
        "routing_width": trace.width,
        "gating": header.gating,
        "score_space": header.score_space,
        "weight_rule": None
        if rule is None
        else {
            "softmax_over_selected": rule.softmax_over_selected,
            "normalise": rule.normalise,
            "clamp_min": rule.clamp_min,
            "scale": rule.scale,
        },
        "entry_bytes_min": sizes[0],
        "entry_bytes_max": sizes[-1],
        "expert_bytes": header.expert_bytes,
        "dense_bytes": sum(dense.values()) if dense else None,
        "cycle_bytes": cycle,
        "cycle_mib": cycle / _MIB,
        "budget_bytes": budget,
        "budget_mib": None if budget is None else budget / _MIB,
        "budget_cycles": None if budget is None else budget / cycle,
        "route": header.route,
        "knobs": dict(header.knobs),
        "evict": header.evict,
        "scope": header.scope,
        "io_mode": header.io_mode,
        "engine": header.engine,
        "engine_version": header.engine_version,
        "cpu": header.cpu,
        "created": header.created,
        **counts,
        "measured": measured(trace)._asdict(),
        "disk_bytes": _disk_bytes(trace.path),
        "warnings": _warnings(header, counts["score_coverage_pct"]),
    }


def _counts(trace: Trace) -> dict[str, Any]:
    per_layer = (
        trace.routing.filter(pl.col("turn") >= 0)
        .group_by("graph", "layer")
        .agg(
            pl.len().alias("rows"),
            pl.col("turn").first(),
            pl.col("phase").first(),
            pl.col("step").min().alias("low"),
            pl.col("step").max().alias("high"),
        )
    )
    graphs = trace.collect(
        "routing",
        per_layer.group_by("graph")
        .agg(pl.col("rows").max(), pl.col("turn", "phase").first(), pl.col("low").min(), pl.col("high").max())
        .sort("graph"),
    )
    with_scores = trace.n_rows - trace.null_count("scores")
    by_phase = {phase: graphs.filter(pl.col("phase") == phase) for phase in (PREFILL, DECODE)}
    known = graphs.filter(pl.col("high") >= 0)
    return {
        "rows": trace.n_rows,
        "turns": graphs["turn"].n_unique(),
        "graphs": graphs.height,
        "prefill_graphs": by_phase[PREFILL].height,
        "decode_graphs": by_phase[DECODE].height,
        "prefill_tokens": int(by_phase[PREFILL]["rows"].sum()),
        "decode_tokens": int(by_phase[DECODE]["rows"].sum()),
        "first_step": int(known["low"][0]) if known.height else None,
        "last_step": int(known["high"][-1]) if known.height else None,
        "score_coverage_pct": 100.0 * with_scores / trace.n_rows if trace.n_rows else 0.0,
    }


def _disk_bytes(folder: Path) -> dict[str, int]:
    sizes = {table: _folder_bytes(folder / table) for table in TABLES}
    return {**sizes, "total": _folder_bytes(folder)}


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _warnings(header: TraceHeader, score_coverage_pct: float) -> list[str]:
    found: list[str] = []
    if not header.complete:
        found.append("the recording did not finish; only its complete graphs are used")
    if header.route == "drop_cold" and "F" not in header.knobs:
        found.append("slots were dropped when it was recorded, at a threshold nobody wrote down")
    if not header.router_known:
        found.append(
            "it holds the experts that ran, and nobody says what the router picked (import with --route)"
        )
    if header.budget_bytes is None:
        found.append("the cache size it was recorded at is unknown")
    elif 0 < header.budget_bytes < header.cycle_bytes():
        found.append("recorded below one token cycle: a global LRU hits next to nothing there")
    if score_coverage_pct < 100:
        found.append("some or all rows have no scores: policies that rerank cannot be replayed")
    return found


def info_lines(info: dict[str, Any]) -> Sequence[str]:
    """The same facts for reading."""

    def known(value: Any, text: str) -> str:
        return "unknown" if value is None else text

    knobs = ", ".join(f"{name}={value:g}" for name, value in info["knobs"].items())
    policy = known(
        info["route"],
        ", ".join(
            part
            for part in (
                f"{info['route']}{' (' + knobs + ')' if knobs else ''}",
                info["evict"],
                info["scope"],
            )
            if part
        ),
    )
    budget, rule, disk = info["budget_mib"], info["weight_rule"], info["disk_bytes"]
    entries = f"{info['entry_bytes_min']:,} to {info['entry_bytes_max']:,} bytes"
    if info["entry_bytes_min"] == info["entry_bytes_max"]:
        entries = f"{info['entry_bytes_min']:,} bytes"
    facts = {
        "trace": f"{info['trace']}, schema {info['schema_version']}, "
        f"{'complete' if info['complete'] else 'NOT complete'}",
        "model": f"{info['model']} ({info['arch']})",
        "shape": f"{info['n_layer']} layers, {info['n_moe_layers']} with experts, "
        f"{info['n_expert']} experts, k = {info['n_expert_used']}",
        "tokens": f"{info['prefill_tokens']} prefill in {info['prefill_graphs']} graphs, "
        f"{info['decode_tokens']} decode in {info['decode_graphs']} graphs, "
        f"{info['turns']} turn{'s' * (info['turns'] != 1)}",
        "steps": known(info["first_step"], f"{info['first_step']} to {info['last_step']}"),
        "gating": known(info["gating"], f"{info['gating']}, scores are {info['score_space']}"),
        "weights": known(rule, ", ".join(f"{name}={value}" for name, value in (rule or {}).items())),
        "scores": f"{info['score_coverage_pct']:.1f} % of {info['rows']:,} rows",
        "entry": f"{entries}; all experts {info['expert_bytes'] / _MIB:,.1f} MiB",
        "dense": known(
            info["dense_bytes"], f"{(info['dense_bytes'] or 0) / _MIB:,.1f} MiB in the MoE layers"
        ),
        "token cycle": f"{info['cycle_bytes']:,} bytes = {info['cycle_mib']:,.2f} MiB",
        "budget": "off"
        if budget == 0
        else known(budget, f"{budget or 0:,.1f} MiB = {info['budget_cycles'] or 0:.2f} cycles"),
        "policy": policy,
        "engine": known(info["engine"], f"{info['engine']} {info['engine_version'] or ''}".strip())
        + f", reads {info['io_mode'] or 'unknown'}",
        "measured": measured_text(Measured(**info["measured"])) or "nothing",
        "on disk": ", ".join(f"{table} {size / _MIB:.2f} MiB" for table, size in disk.items()),
    }
    return [f"{name:<12}{text}" for name, text in facts.items()] + [
        f"warning     {text}" for text in info["warnings"]
    ]
