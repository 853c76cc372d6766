"""Charts of time: reads by size and lane, their latency, what a token's time goes into, foretold against live."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from simlab.charts.theme import (
    BLUE,
    GREEN,
    GREY,
    HEIGHT,
    ORANGE,
    PURPLE,
    alt,
    data,
    finished,
    layered,
    ramp,
)
from simlab.charts.words import LIVE_LABEL, REPLAY_LABEL
from simlab.judge.speed.token_time import Timings
from simlab.judge.stats import Interval

_SIZES = 4
"""Read sizes that get a colour of their own: the commonest."""
_MOST_SIZES = 12
"""Read sizes that get a bar."""
_WINDOWS = 60
PARTS = {"compute": GREEN, "page faults": GREY, "cache management": PURPLE, "waiting for reads": BLUE}
"""Parts of a token's time and their colours."""


def read_size_chart(reads: pl.DataFrame, io_mode: str | None) -> alt.Chart:
    """MiB read in decode by the size of the read and the reader thread (lane) that made it.

    Args:
        reads: columns `window_bytes`, `lane`, `reads`, `mib`, `median_us` (`simlab.judge.speed.read_lanes`).
        io_mode: of the recording.
    """
    sizes = _sizes(reads)
    rows = [
        {
            "size": sizes[r["window_bytes"]],
            "lane": f"lane {r['lane']}",
            "place": r["lane"],
            "reads": r["reads"],
            "mib": r["mib"],
            "median_us": r["median_us"],
        }
        for r in reads.iter_rows(named=True)
        if r["window_bytes"] in sizes
    ]
    lanes = sorted({r["lane"] for r in rows}, key=lambda name: int(name.split()[1]))
    colours = [ramp(i / max(len(lanes) - 1, 1)) for i in range(len(lanes))]
    few = len(sizes) < reads["window_bytes"].n_unique()
    n = reads["window_bytes"].n_unique()
    return finished(
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            y=alt.Y("size:N").title("Size of a read").sort(list(sizes.values())),
            x=alt.X("mib:Q").title("Read in decode (MiB)").stack("zero"),
            color=alt.Color("lane:N")
            .scale(domain=lanes, range=colours)
            .legend(alt.Legend(title=None, orient="top")),
            order=alt.Order("place:Q"),
            tooltip=[
                alt.Tooltip("size:N", title="Size"),
                alt.Tooltip("lane:N", title="Reader thread"),
                alt.Tooltip("reads:Q", title="Reads", format=","),
                alt.Tooltip("mib:Q", title="MiB", format=".4~r"),
                alt.Tooltip("median_us:Q", title="Median latency (µs)", format=".0f"),
            ],
        ),
        "Reads by size and reader thread",
        _measured(io_mode) + (f"; the {len(sizes)} sizes of most bytes out of {n}" if few else ""),
        height=max(60, 34 * len(sizes)),
    )


def _sizes(reads: pl.DataFrame) -> dict[int, str]:
    """Names of the read sizes that carry most bytes, from the smallest size up."""
    by_size = (
        reads.group_by("window_bytes").agg(pl.col("mib").sum()).sort("mib", "window_bytes", descending=True)
    )
    return {size: size_name(size) for size in sorted(by_size["window_bytes"].head(_MOST_SIZES).to_list())}


def size_name(n_bytes: int) -> str:
    """`26 KiB`, `2.53 MiB`."""
    return f"{n_bytes / 2**20:.3g} MiB" if n_bytes >= 2**20 else f"{n_bytes / 1024:.4g} KiB"


def _measured(io_mode: str | None) -> str:
    how = {"direct": "direct reads", "buffered": "buffered reads: the page cache may have answered"}
    return f"{LIVE_LABEL}, {how.get(io_mode or '', 'direct or buffered, unknown')}"


def read_latency_chart(latencies: pl.DataFrame, io_mode: str | None) -> alt.LayerChart:
    """Latency of decode reads (µs) by how many were under way, median and the middle 80 %, for the commonest sizes.

    Args:
        latencies: as `simlab.judge.speed.trace_time.read_latencies` gives them.
        io_mode: of the recording.
    """
    by_size = latencies.group_by("window_bytes").agg(pl.col("reads").sum())
    common = by_size.sort("reads", "window_bytes", descending=True)["window_bytes"].head(_SIZES).to_list()
    names = {size: size_name(size) for size in sorted(common)}
    # Side by side, so that the bars of one size do not cover those of another.
    aside = {size: 0.1 * (i - (len(names) - 1) / 2) for i, size in enumerate(names)}
    rows = [
        {**r, "size": names[r["window_bytes"]], "at": r["under_way"] + aside[r["window_bytes"]]}
        for r in latencies.iter_rows(named=True)
        if r["window_bytes"] in names
    ]
    x = alt.X("at:Q").title("Reads under way when it started").axis(alt.Axis(tickMinStep=1, format="d"))
    y = alt.Y("median_us:Q").title("Latency of a read (µs)").scale(zero=True)
    colours = [ramp(i / max(len(names) - 1, 1)) for i in range(len(names))] if len(names) > 1 else [BLUE]
    colour = (
        alt.Color("size:N")
        .scale(domain=list(names.values()), range=colours)
        .legend(alt.Legend(title="Size of a read", orient="top", symbolOpacity=1))
    )
    chart = alt.Chart(data(rows))
    spans = chart.mark_rule(strokeWidth=2, opacity=0.5).encode(
        x=x, y=alt.Y("p10_us:Q"), y2="p90_us:Q", color=colour
    )
    lines = chart.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=colour)
    points = chart.mark_circle(size=60, opacity=1).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=[
            alt.Tooltip("size:N", title="Size"),
            alt.Tooltip("under_way:Q", title="Under way"),
            alt.Tooltip("reads:Q", title="Reads", format=","),
            alt.Tooltip("median_us:Q", title="Median (µs)", format=".0f"),
            alt.Tooltip("p10_us:Q", title="10 % below (µs)", format=".0f"),
            alt.Tooltip("p90_us:Q", title="10 % above (µs)", format=".0f"),
            alt.Tooltip("mib_s:Q", title="MiB/s at the median", format=".0f"),
        ],
    )
    return finished(
        layered(spans, lines, points), "Latency of reads", f"{_measured(io_mode)}; bars: the middle 80 %"
    )


def along_time_chart(timings: Timings) -> alt.Chart:
    """Measured time of decode tokens (ms) by part, stacked, means over stretches of the run."""
    parts = _measured_parts(timings)
    edges = np.unique(np.linspace(0, timings.n, min(_WINDOWS, timings.n) + 1).astype(int))
    rows = []
    for start, stop in itertools.pairwise(edges):
        top = 0.0
        for name, values in parts.items():
            mean = float(values[start:stop].mean())
            place = {"from": float(timings.age[start]), "to": float(timings.age[stop - 1]) + 1}
            rows.append({**place, "part": name, "low": top, "high": top + mean, "ms": mean})
            top += mean
    return finished(
        alt.Chart(data(rows))
        .mark_rect()
        .encode(
            x=alt.X("from:Q").title("Decode token").scale(nice=False),
            x2="to:Q",
            y=alt.Y("low:Q").title("Time per token (ms)").scale(zero=True),
            y2="high:Q",
            color=_part_colour(parts),
            tooltip=[
                alt.Tooltip("part:N", title="Part"),
                alt.Tooltip("ms:Q", title="ms per token", format=".2f"),
                alt.Tooltip("from:Q", title="From token"),
            ],
        ),
        "Where a token's time goes",
        f"{LIVE_LABEL}, {timings.composition} reads",
    )


def _measured_parts(timings: Timings) -> dict[str, np.ndarray]:
    parts = {"compute": timings.compute_ms}
    if timings.management_ms is not None:
        parts["cache management"] = timings.management_ms
    return parts | {"waiting for reads": timings.exposed_ms}


def _part_colour(names: Sequence[str] | Mapping[str, Any]) -> alt.Color:
    shown = [name for name in PARTS if name in names]
    return (
        alt.Color("part:N")
        .scale(domain=shown, range=[PARTS[name] for name in shown])
        .legend(alt.Legend(title=None, orient="top", labelLimit=200))
    )


def split_chart(runs: Mapping[str, Mapping[str, float]]) -> alt.Chart:
    """Mean time per decode token (ms) of each run by part, names of `PARTS`; a run says in its name what it is."""
    rows = [
        {"run": run, "part": part, "ms": parts[part], "place": place}
        for run, parts in runs.items()
        for place, part in enumerate(PARTS)
        if part in parts
    ]
    return finished(
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            y=alt.Y("run:N")
            .title(None)
            .sort(list(runs))
            .axis(alt.Axis(labelLimit=300, domain=False, ticks=False)),
            x=alt.X("ms:Q").title("Time per token (ms)").stack("zero"),
            color=_part_colour([part for parts in runs.values() for part in parts]),
            order="place:Q",
            tooltip=[
                alt.Tooltip("run:N", title="Run"),
                alt.Tooltip("part:N", title="Part"),
                alt.Tooltip("ms:Q", title="ms per token", format=".2f"),
            ],
        ),
        "What a token's time is made of",
        "means over the decode",
        height=max(60, 34 * len(runs)),
    )


class Speed(NamedTuple):
    """A cell's speed, foretold or measured."""

    cell: str
    tok_s: float
    interval: Interval
    live: bool


def speed_chart(speeds: Sequence[Speed]) -> alt.LayerChart:
    """Tokens/s of cells, foretold beside measured, with 95 % intervals; cells in the order given."""
    rows = [
        {
            "cell": s.cell,
            "tok_s": s.tok_s,
            "low": s.interval.low if np.isfinite(s.interval.low) else None,
            "high": s.interval.high if np.isfinite(s.interval.high) else None,
            "source": LIVE_LABEL if s.live else REPLAY_LABEL,
        }
        for s in speeds
    ]
    order = list(dict.fromkeys(s.cell for s in speeds))
    y = (
        alt.Y("cell:N")
        .title(None)
        .sort(order)
        .axis(alt.Axis(labelLimit=320, domain=False, ticks=False, grid=True))
    )
    offset = alt.YOffset("source:N").sort([REPLAY_LABEL, LIVE_LABEL])
    x = alt.X("tok_s:Q").title("Tokens per second").scale(zero=True)
    colour = (
        alt.Color("source:N")
        .scale(domain=[REPLAY_LABEL, LIVE_LABEL], range=[ORANGE, BLUE])
        .legend(alt.Legend(title=None, orient="top", labelLimit=200))
    )
    chart = alt.Chart(data(rows))
    spans = chart.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q"), x2="high:Q", y=y, yOffset=offset, color=colour
    )
    points = chart.mark_circle(size=80, opacity=1).encode(
        x=x,
        y=y,
        yOffset=offset,
        color=colour,
        tooltip=[
            alt.Tooltip("cell:N", title="Cell"),
            alt.Tooltip("source:N", title="Source"),
            alt.Tooltip("tok_s:Q", title="Tokens per second", format=".4~r"),
            alt.Tooltip("low:Q", title="95 % interval from", format=".4~r"),
            alt.Tooltip("high:Q", title="to", format=".4~r"),
        ],
    )
    return finished(
        layered(spans, points),
        "Foretold against live",
        "bars: 95 % intervals of the mean over a run this long",
        height=max(70, min(HEIGHT, 44 * len(order))),
    )
