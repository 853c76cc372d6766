"""What was measured while a trace was recorded, over its decode steps: nothing here is replayed.

The engine writes all of it; an imported trace has what its files say, of a `bmoe_metrics` file the times and the
bytes of the aligned windows.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from simlab.trace.store import Trace
from simlab.types import DECODE

_MIB = 1 << 20


class Measured(NamedTuple):
    """Figures of the decode steps, each over the steps where it is known; None where it is in none."""

    tok_s: float | None
    wall_ms_per_token: float | None
    read_wait_ms_per_token: float | None
    compute_ms_per_token: float | None
    hit_rate: float | None
    """Hits / lookups."""
    read_mib: float | None
    """Entry bytes."""
    read_mib_per_token: float | None
    window_mib_per_token: float | None
    """Bytes as read from the device, which are aligned."""
    substituted: int | None
    """Slots."""
    dropped: int | None
    """Slots."""


def measured(trace: Trace) -> Measured:
    """Read the figures from the tokens table; the throw-away turn -1 is left out.

    Raises:
        InputError: the table cannot be read.
    """
    steps = trace.collect("tokens", trace.tokens.filter((pl.col("turn") >= 0) & (pl.col("phase") == DECODE)))

    def total(name: str) -> int | None:
        known = steps[name].drop_nulls()
        return int(known.sum()) if len(known) else None

    wall_ms = mean_of_known(steps["wall_ns"], 1e6)
    looked_up = steps.select("hits", "lookups").drop_nulls().sum()
    lookups = int(looked_up["lookups"][0])
    read = total("read_bytes")
    return Measured(
        tok_s=1e3 / wall_ms if wall_ms else None,
        wall_ms_per_token=wall_ms,
        read_wait_ms_per_token=mean_of_known(steps["read_wait_ns"], 1e6),
        compute_ms_per_token=mean_of_known(steps["compute_ns"], 1e6),
        hit_rate=int(looked_up["hits"][0]) / lookups if lookups else None,
        read_mib=None if read is None else read / _MIB,
        read_mib_per_token=mean_of_known(steps["read_bytes"], _MIB),
        window_mib_per_token=mean_of_known(steps["window_bytes"], _MIB),
        substituted=total("substituted"),
        dropped=total("dropped"),
    )


def mean_of_known(column: pl.Series, unit: float) -> float | None:
    """Mean of a column where it is not null, in units of so much; None where it is null throughout."""
    known = column.drop_nulls()
    return float(known.sum()) / len(known) / unit if len(known) else None


def measured_text(found: Measured) -> str:
    """The figures that are known, on one line; empty if none is."""
    parts = [
        (found.tok_s, "{:.2f} tok/s"),
        (found.read_wait_ms_per_token, "{:.2f} ms/token waiting for reads"),
        (None if found.hit_rate is None else 100 * found.hit_rate, "{:.1f} % of lookups hit"),
        (found.read_mib, "{:.1f} MiB read"),
        (found.read_mib_per_token, "{:.2f} MiB/token"),
        (found.window_mib_per_token, "{:.2f} MiB/token with alignment"),
        (found.substituted, "{} slots substituted"),
        (found.dropped, "{} dropped"),
    ]
    return ", ".join(form.format(value) for value, form in parts if value is not None)
