"""Every slot of a replay, and its counters by layer and by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from simlab.replay.run import Group, Replayer, TraceLike
from simlab.replay.shape import COUNTERS, SUMS
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


def replay_slots(trace: TraceLike, cell: Cell, *, train: str | None = None) -> SlotReplay:
    """Replay a trace under one cell and keep every slot (the table of `--slots`, interface.md).

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    replayer = Replayer(trace, [cell], detail=True, train=train)
    while replayer.advance():
        pass
    return SlotReplay(replayer.numbers()[0], slot_table(replayer, 0), row_table(replayer, 0))


def slot_table(replayer: Replayer, cell: int) -> pl.DataFrame:
    """The slots of one cell of a replay run with `detail=True`, from where it began; as `SlotReplay.slots`."""
    group, lane = _lane(replayer, cell)
    n_slots = group.shape.n_slots
    columns = {
        name: np.concatenate([np.empty((0, n_slots), d), *(c[name][:, :, lane] for c in group.detail)])
        for name, d in _SLOT_TYPES.items()
    }
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
    group, lane = _lane(replayer, cell)
    columns = replayer.columns
    counters = np.concatenate(
        [np.empty((0, len(COUNTERS)), np.int64), *(c["counters"][:, :, lane] for c in group.detail)]
    )
    sums = np.concatenate([np.empty((0, len(SUMS))), *(c["sums"][:, :, lane] for c in group.detail)])
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


def _lane(replayer: Replayer, cell: int) -> tuple[Group, int]:
    for group in replayer.groups:
        if cell in group.indices:
            return group, group.indices.index(cell)
    raise IndexError(f"no cell {cell}")
