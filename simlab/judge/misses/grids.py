"""Where and when a cell misses or changes the routing: sums over stretches of decode tokens and layers, and by expert.

A grid has a row per stretch and MoE layer and is small enough to draw, however long the decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from simlab.replay.slots import SlotReplay
from simlab.types import DECODE

MOST_CELLS = 5000
MOST_STRETCHES = 120
"""Stretches across: more would be thinner than a few pixels."""


def grid(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Columns added up over stretches of tokens and layers.

    Args:
        frame: `token` (number of the decode token, from 0), `layer`, and the columns to add up.
        names: of those columns.

    Returns: `token` (first of the stretch), `tokens` in it, `layer`, and the sums, in this order of rows.
    """
    if frame.is_empty():
        return frame.select("token", pl.lit(0).alias("tokens"), "layer", *names)
    n_tokens = int(frame["token"].to_numpy().max()) + 1
    n_layers = frame["layer"].n_unique()
    most = max(1, min(MOST_STRETCHES, MOST_CELLS // n_layers))
    width = -(-n_tokens // most)
    first = (pl.col("token") // width * width).cast(pl.Int64)
    return (
        frame.with_columns(token=first)
        .group_by("token", "layer")
        .agg(pl.col(*names).sum())
        .with_columns(tokens=pl.min_horizontal(pl.lit(width), n_tokens - pl.col("token")))
        .select("token", "tokens", "layer", *names)
        .sort("token", "layer")
    )


def miss_grid(decode: pl.DataFrame) -> pl.DataFrame:
    """`grid` of `lookups` and `misses`, and `miss_percent`, from lookups of `anatomy.Anatomy`."""
    counted = decode.select(
        "token", "layer", lookups=pl.lit(1, pl.Int64), misses=(~pl.col("hit")).cast(pl.Int64)
    )
    return grid(counted, ["lookups", "misses"]).with_columns(miss_percent=_percent("misses", "lookups"))


def change_grid(replay: SlotReplay) -> pl.DataFrame:
    """`grid` of decode `slots`, those `substituted` and `dropped`, and `changed_percent`, the two of all slots."""
    decode = replay.rows.filter((pl.col("phase") == DECODE) & pl.col("counted"))
    place = pl.struct("graph", "pos_in_graph").rank("dense").cast(pl.Int64) - 1
    names = ["slots", "substituted", "dropped"]
    found = grid(decode.select("layer", *names, token=place), names)
    changed = found.with_columns(changed=pl.col("substituted") + pl.col("dropped"))
    return changed.with_columns(changed_percent=_percent("changed", "slots"))


def changed_experts(replay: SlotReplay) -> pl.DataFrame:
    """How often each expert ran in decode though the router had not picked it, and was left out though it had.

    Columns: `layer`, `expert`, `brought_in`, `left_out` (dropped slots included), in decode rows; only experts
    with either, most changes first.
    """
    # The slots of a row stand together and start with slot 0.
    slots = replay.slots.with_columns(row=(pl.col("slot") == 0).cum_sum())
    decode = slots.filter((pl.col("phase") == DECODE) & (pl.col("turn") >= 0))
    picked = decode.select("row", "layer", expert="router_expert")
    ran = decode.filter(~pl.col("dropped")).select("row", "layer", "expert")
    on = ["row", "layer", "expert"]
    kinds = {
        "brought_in": ran.join(picked, on=on, how="anti"),
        "left_out": picked.join(ran, on=on, how="anti"),
    }
    parts = [
        frame.group_by("layer", "expert").agg(pl.len().cast(pl.Int64).alias(kind))
        for kind, frame in kinds.items()
    ]
    both = parts[0].join(parts[1], on=["layer", "expert"], how="full", coalesce=True).fill_null(0)
    return both.sort(-(pl.col("brought_in") + pl.col("left_out")), "layer", "expert")


def _percent(part: str, whole: str) -> pl.Expr:
    return pl.when(pl.col(whole) > 0).then(100 * pl.col(part) / pl.col(whole))
