"""What a trace measured: its tokens as timings, its reads by size and company."""

from __future__ import annotations

import numpy as np
import polars as pl

from simlab.cells import MIB
from simlab.errors import InputError
from simlab.judge.speed.token_time import Composition, Timings
from simlab.judge.speed.trace_time_reads import reads_under_way
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN

_MS = 1e-6
"""Milliseconds in a nanosecond."""
_TIMES = ("wall_ns", "read_wait_ns", "management_ns")


def timings_of_trace(trace: Trace) -> Timings:
    """The decoded tokens of a trace with their times; compute is what reads and management leave of the wall time.

    Overlapped is a trace whose reads were under way for longer than its tokens waited for them.

    Raises:
        InputError: no decoded token has the times, or a decode graph holds several tokens.
    """
    decode = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
    tokens = trace.collect("tokens", trace.tokens.filter(decode).sort("graph", maintain_order=True))
    if tokens["graph"].n_unique() < tokens.height:
        raise InputError(
            f"{trace.path}/tokens: several tokens share a decode graph, so no token has a time of its own"
        )
    tokens = tokens.with_columns(age=pl.int_range(pl.len()).cast(pl.Float64))
    usable = tokens.filter(
        pl.all_horizontal(pl.col(*_TIMES, "read_bytes").is_not_null()) & (pl.col("wall_ns") > 0)
    )
    if not usable.height:
        raise InputError(
            f"{trace.path}/tokens: no decoded token has {', '.join(_TIMES)} and read_bytes; record the trace with "
            "simlab, or import it with its metrics file"
        )
    wall, wait, management = (usable[name].to_numpy() * _MS for name in _TIMES)
    counted = usable["major_faults"].count() > 0
    return Timings(
        composition=_composition(trace, usable),
        age=usable["age"].to_numpy(),
        read_mib=usable["read_bytes"].to_numpy() / MIB,
        wall_ms=wall,
        exposed_ms=wait,
        management_ms=management,
        compute_ms=np.maximum(0.0, wall - wait - management),
        faults=usable["major_faults"].fill_null(0).to_numpy().astype(np.float64) if counted else None,
        left_out=tokens.height - usable.height,
    )


def _composition(trace: Trace, tokens: pl.DataFrame) -> Composition:
    end = pl.col("start_ns") + pl.col("latency_ns")
    spans = trace.collect(
        "reads",
        trace.reads.group_by("graph", "layer")
        .agg(span=end.max() - pl.col("start_ns").min())
        .group_by("graph")
        .agg(pl.col("span").sum()),
    )
    both = tokens.join(spans, on="graph", how="inner")
    over = (both["span"] - both["read_wait_ns"]).drop_nulls().median()
    return "overlapped" if isinstance(over, (int, float)) and over > 0 else "serial"


def read_latencies(trace: Trace) -> pl.DataFrame:
    """Latency of decode reads by the bytes asked of the device and by how many reads were then under way.

    Columns: window_bytes, under_way (this one included, when it started), reads, and over them p10_us,
    median_us, p90_us; mib_s, what that many reads of that size bring in at the median. Empty without reads.
    """
    known = pl.all_horizontal(pl.col("window_bytes", "start_ns", "latency_ns").is_not_null())
    reads = trace.collect("reads", trace.reads.filter((pl.col("phase") == DECODE) & known))
    micro = pl.col("latency_ns") / 1e3
    return (
        reads.with_columns(under_way=pl.Series(reads_under_way(reads), dtype=pl.Int64))
        .group_by("window_bytes", "under_way")
        .agg(
            reads=pl.len(),
            p10_us=micro.quantile(0.1, "linear"),
            median_us=micro.median(),
            p90_us=micro.quantile(0.9, "linear"),
        )
        .with_columns(mib_s=pl.col("under_way") * pl.col("window_bytes") / MIB / pl.col("median_us") * 1e6)
        .sort("window_bytes", "under_way")
    )
