"""Every slot of a replay, and its counters by layer and by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from simlab.replay.run import Backend, Replayer, TraceLike
from simlab.replay.tally import COUNTERS, SUMS
from simlab.types import Cell, CellNumbers

_WHERE = ("turn", "graph", "phase", "step", "layer")


@dataclass(frozen=True)
class SlotReplay:
    """A replay of one cell, slot by slot."""

    numbers: CellNumbers
    slots: pl.DataFrame
    """One row per slot that exists, in execution order: turn, graph, phase, step, layer, slot, router_expert,
    expert (after substitution, before repointing), weight (null if unknown), residency, dropped,
    read_bytes."""
    rows: pl.DataFrame
    """One row per routing row, the throw-away turn included: where it is, whether it is counted, its counters."""


def replay_slots(
    trace: TraceLike, cell: Cell, *, train: str | None = None, backend: Backend = "loop"
) -> SlotReplay:
    """Replay a trace under one cell and keep every slot (the table of `--slots`, interface.md).

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    replayer = Replayer(trace, [cell], detail=True, train=train, backend=backend)
    while replayer.advance():
        pass
    return SlotReplay(replayer.numbers()[0], slot_table(replayer, 0), row_table(replayer, 0))


def slot_table(replayer: Replayer, cell: int) -> pl.DataFrame:
    """The slots of one cell of a replay run with `detail=True`, from where it began; as `SlotReplay.slots`."""
    detail = replayer.detail(cell)
    columns = {name: detail[name].astype(kind, copy=False) for name, kind in _SLOT_TYPES.items()}
    row, slot = np.nonzero(columns["router_expert"] >= 0)
    where = replayer.columns.where.select(_WHERE)[replayer.first_row + row]
    found = {name: column[row, slot] for name, column in columns.items()}
    table = where.with_columns(
        pl.Series("slot", slot.astype(np.int32)), *(pl.Series(n, v) for n, v in found.items())
    )
    return table.with_columns(pl.col("weight").fill_nan(None))


_SLOT_TYPES = {
    "router_expert": np.int32,
    "expert": np.int32,
    "weight": np.float32,
    "residency": np.int8,
    "dropped": np.bool_,
    "read_bytes": np.int64,
}


def row_table(replayer: Replayer, cell: int) -> pl.DataFrame:
    """The counters of every routing row of one cell of a replay run with `detail=True`, from where it began."""
    columns, detail = replayer.columns, replayer.detail(cell)
    counters, sums = detail["counters"], detail["sums"]
    replayed = slice(replayer.first_row, replayer.row)
    return columns.where[replayed].with_columns(
        *(pl.Series(name, counters[:, i]) for i, name in enumerate(COUNTERS)),
        *(
            pl.Series(name, sums[:, i])
            for i, name in enumerate(SUMS)
            if replayer.has_scores or name == "agreement"
        ),
        pl.Series("counted", columns.counted[replayed]),
        pl.Series("events", (columns.router_k[replayed] > 0).astype(np.int64)),
    )


def by_layer(replay: SlotReplay) -> pl.DataFrame:
    """Decode counters of each MoE layer, in layer order; the counts add up to `numbers.decode`."""
    return _aggregate(replay, ["layer"])


def by_token(replay: SlotReplay) -> pl.DataFrame:
    """Decode counters of each token, in execution order; the counts add up to `numbers.decode`.

    Work that several tokens of one graph share, reads and evictions, is counted where it fell in the walk.
    """
    return _aggregate(replay, ["turn", "graph", "step", "pos_in_graph"])


def _aggregate(replay: SlotReplay, by: list[str]) -> pl.DataFrame:
    decode = replay.rows.filter((pl.col("phase") == 1) & pl.col("counted"))
    means = [name for name in SUMS if name in decode.columns]
    grouped = decode.group_by(by, maintain_order=True).agg(pl.col(*COUNTERS, *means, "events").sum())
    if by == ["layer"]:
        grouped = grouped.sort("layer")
    events, known = pl.col("events"), replay.numbers.all
    grouped = grouped.with_columns(
        pl.lit(None, pl.Int64 if name in COUNTERS else pl.Float64).alias(name)
        for name in ("substituted", *means)
        if getattr(known, name) is None
    )
    return grouped.with_columns(
        capacity_misses=pl.col("misses") - pl.col("cold_misses"),
        hit_rate=pl.when(pl.col("lookups") > 0).then(pl.col("hits") / pl.col("lookups")),
        read_mib=pl.col("read_bytes") / 2**20,
        **{name: pl.when(events > 0).then(pl.col(name) / events) for name in means},
    )
