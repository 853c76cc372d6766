"""Reads of a recording by their size and by the reader thread (lane) that made them. Measured, not simulated."""

from __future__ import annotations

import polars as pl

from simlab.cells import MIB
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN


def reads_by_size_and_lane(trace: Trace) -> pl.DataFrame:
    """Decode reads by the bytes asked of the device and by lane.

    Columns: `window_bytes`, `lane`, `reads`, `mib` asked for in all, `median_us` (null where unknown); sorted by
    the first two. Empty for a trace without reads, or of which neither is known.
    """
    decode = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
    known = pl.all_horizontal(pl.col("window_bytes", "lane").is_not_null())
    found = trace.reads.filter(decode & known).group_by("window_bytes", "lane")
    return trace.collect(
        "reads",
        found.agg(
            reads=pl.len().cast(pl.Int64),
            mib=pl.col("window_bytes").sum() / MIB,
            median_us=(pl.col("latency_ns") / 1e3).median(),
        ).sort("window_bytes", "lane"),
    )
