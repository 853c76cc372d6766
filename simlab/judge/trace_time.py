"""The time model of a trace: its tokens as timings, its reads by size and company, and cells foretold from it.

A cell is replayed and its tokens' bytes go through the model fitted on the recorded tokens. That carries the
recorded machine, threads and policy with it: the time a policy itself takes, and compute that falls when slots
are dropped, are those of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from simlab.cells import MIB
from simlab.errors import InputError
from simlab.judge.stats import Interval, block_bootstrap_mean
from simlab.judge.token_time import Composition, TimeModel, Timings
from simlab.replay.run import Replayer
from simlab.replay.slots import row_table
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, CellNumbers

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
    start, latency = reads["start_ns"].to_numpy(), reads["latency_ns"].to_numpy()
    # Of those that started no later, all that had not ended: clocks of one recording, so over graphs too.
    begun = np.searchsorted(np.sort(start), start, side="right")
    ended = np.searchsorted(np.sort(start + latency), start, side="right")
    micro = pl.col("latency_ns") / 1e3
    return (
        reads.with_columns(under_way=pl.Series(begun - ended, dtype=pl.Int64))
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


@dataclass(frozen=True)
class Foretold:
    """A cell's speed, foretold. Intervals are for the mean over a run as long as the recorded one."""

    numbers: CellNumbers
    tok_s: float
    tok_s_interval: Interval
    wall_ms: float
    read_wait_ms: float
    read_wait_interval: Interval
    bound: str
    """"compute" or "reads": the larger part of the mean token."""


def foretell(
    trace: Trace, timings: Timings, model: TimeModel, cells: Sequence[Cell], *, train: str | None = None
) -> list[Foretold]:
    """Replay cells and put their tokens through the model fitted on the trace.

    The intervals hold what chance does to the mean of the recorded run and of the foretold one, by blocks of
    the errors on the recorded tokens; not what another policy changes beside the bytes.

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    replayer = Replayer(trace, cells, detail=True, train=train)
    while replayer.advance():
        pass
    numbers = replayer.numbers()
    recorded = model.parts(timings.read_mib, timings.age)
    wall_noise = _noise(timings.wall_ms - np.sum(recorded, axis=0))
    wait_noise = _noise(timings.exposed_ms - recorded.exposed_read)
    found = []
    for i in range(len(cells)):
        tokens = _tokens(row_table(replayer, i))
        parts = model.parts(tokens["read_bytes"].to_numpy() / MIB, tokens["age"].to_numpy())
        wall, wait = float(np.sum(parts, axis=0).mean()), float(parts.exposed_read.mean())
        working = float((parts.compute + parts.page_faults).mean())
        low, high = (wall + end for end in wall_noise)
        found.append(
            Foretold(
                numbers=numbers[i],
                tok_s=1e3 / wall,
                tok_s_interval=Interval(1e3 / high, 1e3 / low if low > 0 else math.inf),
                wall_ms=wall,
                read_wait_ms=wait,
                read_wait_interval=Interval(*(max(0.0, wait + end) for end in wait_noise)),
                bound="compute" if working >= wait else "reads",
            )
        )
    return found


def _tokens(rows: pl.DataFrame) -> pl.DataFrame:
    """`read_bytes` and `age` of every counted decode graph of a replay; a training part ages the run all the same."""
    return (
        rows.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN))
        .group_by("graph", maintain_order=True)
        .agg(pl.col("read_bytes").sum(), pl.col("counted").all())
        .with_columns(age=pl.int_range(pl.len()).cast(pl.Float64))
        .filter("counted")
    )


def _noise(errors: np.ndarray) -> Interval:
    """How far the mean of one run may be from that of another: two runs' chance, independent of each other."""
    mean = float(errors.mean())
    low, high = block_bootstrap_mean([errors])
    return Interval(math.sqrt(2) * (low - mean), math.sqrt(2) * (high - mean))
