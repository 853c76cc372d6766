"""A cell beside the router's own routing in the same cache, token by token, with intervals.

Both ran on the same tokens, so what differs between tokens cancels in the difference. Live runs are taken from their
own recordings, replays from the counters of their rows. Intervals are block bootstraps over decode tokens: how far a
figure moves along this text, not what another text would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.cells import MIB
from simlab.judge.misses.explain import rate
from simlab.judge.stats import Interval, paired_difference
from simlab.replay.run import Replayer
from simlab.replay.slots import row_table
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, CellNumbers

Floats = NDArray[np.float64]


class DecodeSeries(NamedTuple):
    """Counters of each decode token, float64 `[tokens]` each."""

    turn: NDArray[np.int64]
    lookups: Floats
    hits: Floats
    read_mib: Floats
    substituted: Floats
    slots: Floats
    mass: Floats
    """Router mass displaced, added up over the token's events; NaN where it is unknown."""
    events: Floats


def is_exact(cell: Cell) -> bool:
    """Whether a cell runs the router's own routing."""
    return all(
        s.policy.is_builtin("original")
        or (s.policy.is_builtin("substitute") and s.knobs["L"] == 0)
        or (s.policy.is_builtin("drop_cold") and s.knobs["F"] == 0)
        for s in cell.route.steps
    )


def baseline(cell: Cell, others: Sequence[CellNumbers]) -> CellNumbers | None:
    """The cell of the router's own routing in the same cache, if it is among `others`."""

    def cache(one: Cell) -> tuple[object, ...]:
        return one.budget, one.evict, dict(one.evict_knobs), one.scope, one.sequential

    return next((o for o in others if is_exact(o.cell) and cache(o.cell) == cache(cell)), None)


def recorded_series(trace: Trace) -> DecodeSeries:
    """The decode tokens of a recording, from what it says happened."""
    tokens = trace.collect(
        "tokens", trace.tokens.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN))
    )
    slots = (
        trace.collect(
            "routing",
            trace.routing.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)).select(
                "graph", slots=(pl.col("experts").arr.to_list().list.eval(pl.element() >= 0)).list.sum()
            ),
        )
        .group_by("graph")
        .agg(pl.col("slots").sum())
    )
    tokens = tokens.join(slots, on="graph", how="left", maintain_order="left")

    def of(name: str) -> Floats:
        return tokens[name].cast(pl.Float64).to_numpy()

    unknown = np.full(tokens.height, np.nan)
    return DecodeSeries(
        turn=tokens["turn"].to_numpy().astype(np.int64),
        lookups=of("lookups"),
        hits=of("hits"),
        read_mib=of("read_bytes") / MIB,
        substituted=of("substituted"),
        slots=of("slots"),
        mass=unknown,
        events=unknown,
    )


def replayed_series(
    trace: Trace, cells: Sequence[Cell], train: str | None = None
) -> list[tuple[CellNumbers, DecodeSeries]]:
    """Replays of cells, with the counters of their decode tokens.

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    replayer = Replayer(trace, cells, detail=True, train=train)
    while replayer.advance():
        pass
    series = []
    for place, numbers in enumerate(replayer.numbers()):
        rows = row_table(replayer, place).filter(pl.col("counted") & (pl.col("phase") == DECODE))
        names = [
            n
            for n in ("lookups", "hits", "read_bytes", "substituted", "slots", "mass_displaced", "events")
            if n in rows.columns
        ]
        tokens = rows.group_by("turn", "graph", "step", "pos_in_graph", maintain_order=True).agg(
            pl.col(names).sum()
        )

        def of(name: str, tokens: pl.DataFrame = tokens) -> Floats:
            if name not in tokens.columns:
                return np.full(tokens.height, np.nan)
            return tokens[name].cast(pl.Float64).to_numpy()

        series.append(
            (
                numbers,
                DecodeSeries(
                    tokens["turn"].to_numpy().astype(np.int64),
                    of("lookups"),
                    of("hits"),
                    of("read_bytes") / MIB,
                    of("substituted"),
                    of("slots"),
                    of("mass_displaced"),
                    of("events"),
                ),
            )
        )
    return series


def intervals_of(series: DecodeSeries) -> dict[str, tuple[float, float]]:
    """95 % intervals of a run's own means, those that are known.

    `hit_rate`, `substituted` (of slots) and `mass_displaced` are shares, `read_mib_per_token` is MiB.
    """
    ones = np.ones(len(series.turn))
    found = {
        "hit_rate": rate(series.hits, series.lookups, series.turn).interval,
        "read_mib_per_token": rate(series.read_mib, ones, series.turn).interval,
        "substituted": rate(series.substituted, series.slots, series.turn).interval,
        "mass_displaced": rate(series.mass, series.events, series.turn).interval,
    }
    return {name: (low, high) for name, (low, high) in found.items() if math.isfinite(low)}


def read_saved(first: DecodeSeries, other: DecodeSeries) -> Interval:
    """Interval of the MiB per decode token that `other` reads less than `first` did on the same tokens."""
    split = [[s.read_mib[s.turn == turn] for turn in np.unique(s.turn)] for s in (other, first)]
    return paired_difference(*split)[1]


def with_intervals(numbers: Sequence[CellNumbers], series: Sequence[DecodeSeries]) -> list[CellNumbers]:
    """Cells with the intervals of their means, and with that of `read_mib_saved` beside their baseline's run."""
    by_cell = {id(n): s for n, s in zip(numbers, series, strict=True)}
    made = []
    for n, s in zip(numbers, series, strict=True):
        intervals: dict[str, tuple[float, float]] = intervals_of(s)
        base = baseline(n.cell, numbers)
        if base is not None and base is not n and len(by_cell[id(base)].turn) == len(s.turn):
            low, high = read_saved(by_cell[id(base)], s)
            if math.isfinite(low):
                intervals["read_mib_saved"] = (low, high)
        made.append(replace(n, intervals=intervals))
    return made
