"""A cell beside the router's own routing in the same cache, token by token, with intervals.

Both ran on the same tokens, so what differs between tokens cancels in the difference. Live runs are taken from their
own recordings, replays from the counters of their rows. Intervals are block bootstraps over decode tokens: how far a
figure moves along this text, not what another text would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.cells import MIB
from simlab.judge.measure import row_counts
from simlab.judge.misses.explain import linearised
from simlab.judge.stats import Interval, block_bootstrap_of, paired_difference
from simlab.replay.run import Replayer
from simlab.replay.slots import row_table
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, CellNumbers

Floats = NDArray[np.float64]

_SLOTS_AT_ONCE = 1 << 24
"""Slots, of all rows and cells together, kept at once; some 50 bytes each."""


class DecodeSeries(NamedTuple):
    """Counters of each decode token, float64 `[tokens]` each."""

    turn: NDArray[np.int64]
    lookups: Floats
    hits: Floats
    read_mib: Floats
    substituted: Floats
    dropped: Floats
    slots: Floats
    mass: Floats
    """Router mass displaced, added up over the token's events; NaN where it is unknown, as regret."""
    regret: Floats
    agreement: Floats
    events: Floats


def is_exact(cell: Cell) -> bool:
    """Whether a cell runs the router's own routing."""
    return all(step.is_exact for step in cell.route.steps)


def baseline(cell: Cell, others: Sequence[CellNumbers]) -> CellNumbers | None:
    """The cell of the router's own routing in the same cache, if it is among `others`."""

    def cache(one: Cell) -> tuple[object, ...]:
        return one.budget, one.evict, dict(one.evict_knobs), one.scope, one.sequential, one.prefetch

    return next((o for o in others if is_exact(o.cell) and cache(o.cell) == cache(cell)), None)


def recorded_series(trace: Trace, rows: pl.DataFrame | None = None) -> DecodeSeries:
    """The decode tokens of a recording, from what it says happened.

    Args:
        rows: `row_counts` of the trace, where they are known already.

    Raises:
        InputError: the trace lacks what was executed.
    """
    tokens = trace.collect(
        "tokens", trace.tokens.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN))
    )
    rows = (row_counts(trace) if rows is None else rows).filter("decode")
    per_graph = rows.group_by("graph").agg(pl.col("slots", "mass", "regret", "agreement", "events").sum())
    tokens = tokens.join(per_graph, on="graph", how="left", maintain_order="left")
    if not trace.has_scores:
        tokens = tokens.with_columns(mass=math.nan, regret=math.nan)
    return _series(tokens)


def _series(tokens: pl.DataFrame) -> DecodeSeries:
    """A row per decode token, as series."""

    def of(name: str) -> Floats:
        return tokens[name].cast(pl.Float64).to_numpy()

    counts = {n: of(n) for n in DecodeSeries._fields if n not in ("turn", "read_mib")}
    return DecodeSeries(
        turn=tokens["turn"].to_numpy().astype(np.int64), read_mib=of("read_bytes") / MIB, **counts
    )


def replayed_series(
    trace: Trace,
    cells: Sequence[Cell],
    train: str | None = None,
    *,
    progress: Callable[[float], None] | None = None,
) -> list[tuple[CellNumbers, DecodeSeries]]:
    """Replays of cells, with the counters of their decode tokens.

    Args:
        progress: called now and then with the share done.

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    found = []
    # Every slot of every row is kept until it is added up: so many cells at once as memory allows.
    at_once = max(_SLOTS_AT_ONCE // max(trace.n_rows * trace.width, 1), 1)
    for start in range(0, len(cells), at_once):
        replayer = Replayer(trace, cells[start : start + at_once], detail=True, train=train)
        n_rows = max(replayer.columns.n_rows, 1)
        while replayer.advance():
            if progress is not None:
                here = min(at_once, len(cells) - start)
                progress((start + here * replayer.row / n_rows) / len(cells))
        for place, numbers in enumerate(replayer.numbers()):
            rows = row_table(replayer, place).filter(pl.col("counted") & (pl.col("phase") == DECODE))
            names = {"mass_displaced": "mass", "score_regret": "regret"}
            unknown = {new: math.nan for old, new in names.items() if old not in rows.columns}
            rows = rows.rename(names, strict=False).with_columns(**unknown)
            counts = {*DecodeSeries._fields, "read_bytes"} - {"turn", "read_mib"}
            by_token = rows.group_by("turn", "graph", "step", "pos_in_graph", maintain_order=True)
            found.append((numbers, _series(by_token.agg(pl.col(*sorted(counts)).sum()))))
    return found


def intervals_of(series: DecodeSeries) -> dict[str, tuple[float, float]]:
    """95 % intervals of a run's own means, those that are known.

    `hit_rate`, `substituted` and `dropped` (of slots) are shares, `read_mib_per_token` is MiB, the rest are means over
    routing events as `PhaseNumbers` has them.
    """
    parts = {
        "hit_rate": (series.hits, series.lookups),
        "read_mib_per_token": (series.read_mib, np.ones(len(series.turn))),
        "substituted": (series.substituted, series.slots),
        "dropped": (series.dropped, series.slots),
        "mass_displaced": (series.mass, series.events),
        "score_regret": (series.regret, series.events),
        "agreement": (series.agreement, series.events),
    }
    values = {name: linearised(*of) for name, of in parts.items()}
    known = {name: of for name, of in values.items() if of is not None}
    turns = np.unique(series.turn)
    by_turn = [[of[series.turn == turn] for turn in turns] for of in known.values()]
    found = block_bootstrap_of(by_turn, lambda *means: np.array(means)) if known else []
    return {name: (low, high) for name, (low, high) in zip(known, found, strict=True) if math.isfinite(low)}


def read_saved(first: DecodeSeries, other: DecodeSeries) -> Interval:
    """Interval of the MiB per decode token that `other` reads less than `first` did on the same tokens."""
    split = [[s.read_mib[s.turn == turn] for turn in np.unique(s.turn)] for s in (other, first)]
    return paired_difference(*split)[1]


def with_intervals(numbers: Sequence[CellNumbers], series: Sequence[DecodeSeries]) -> list[CellNumbers]:
    """Cells with the intervals of their means too, and with that of `read_mib_saved` beside their baseline's run."""
    by_cell = {id(n): s for n, s in zip(numbers, series, strict=True)}
    made = []
    for n, s in zip(numbers, series, strict=True):
        own = {name: ends for name, ends in intervals_of(s).items() if getattr(n.decode, name, 0) is not None}
        intervals = {**n.intervals, **own}
        base = baseline(n.cell, numbers)
        if base is not None and base is not n and len(by_cell[id(base)].turn) == len(s.turn):
            low, high = read_saved(by_cell[id(base)], s)
            if math.isfinite(low):
                intervals["read_mib_saved"] = (low, high)
        made.append(replace(n, intervals=intervals))
    return made
