"""Columns of a trace's tables. Meanings: interface.md, "The trace"."""

from __future__ import annotations

import polars as pl

SCHEMA_VERSION = 1
TABLES = ("routing", "reads", "tokens")

_WHERE = {
    "turn": pl.Int32,
    "graph": pl.Int64,
    "phase": pl.Int8,
    "step": pl.Int64,
}


def routing_schema(n_expert: int, width: int) -> dict[str, pl.DataType]:
    """One row per token and MoE layer; `width` slots per row, -1 as expert id where a slot does not exist."""
    return {
        **{name: dtype() for name, dtype in _WHERE.items()},
        "layer": pl.Int32(),
        "pos_in_graph": pl.Int32(),
        "token": pl.Int32(),
        "scores": pl.Array(pl.Float32, n_expert),
        "gate_probs": pl.Array(pl.Float32, n_expert),
        "router_experts": pl.Array(pl.Int32, width),
        "experts": pl.Array(pl.Int32, width),
        "weights": pl.Array(pl.Float32, width),
        "residency": pl.Array(pl.Int8, width),
        "dropped": pl.Array(pl.Boolean, width),
        "read_bytes": pl.Array(pl.Int64, width),
    }


READS = {
    **{name: dtype() for name, dtype in _WHERE.items()},
    "layer": pl.Int32(),
    "expert": pl.Int32(),
    "projection": pl.String(),
    "lane": pl.Int32(),
    "speculative": pl.Boolean(),
    "offset": pl.Int64(),
    "req_bytes": pl.Int64(),
    "window_bytes": pl.Int64(),
    "start_ns": pl.Int64(),
    "latency_ns": pl.Int64(),
}

TOKENS = {
    **{name: dtype() for name, dtype in _WHERE.items()},
    "token": pl.Int32(),
    "next_token": pl.Int32(),
    "nll": pl.Float64(),
    "hit": pl.Boolean(),
    "wall_ns": pl.Int64(),
    "compute_ns": pl.Int64(),
    "read_wait_ns": pl.Int64(),
    "management_ns": pl.Int64(),
    "read_bytes": pl.Int64(),
    "window_bytes": pl.Int64(),
    "lookups": pl.Int64(),
    "hits": pl.Int64(),
    "reranked": pl.Int64(),
    "substituted": pl.Int64(),
    "dropped": pl.Int64(),
    "evictions": pl.Int64(),
    "major_faults": pl.Int64(),
}


def table_schema(table: str, n_expert: int, width: int) -> dict[str, pl.DataType]:
    """Schema of one table by name."""
    if table == "routing":
        return routing_schema(n_expert, width)
    return {"reads": READS, "tokens": TOKENS}[table]
