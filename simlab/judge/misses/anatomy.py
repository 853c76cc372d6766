"""What a cell's misses are made of: cold, policy or budget; by layer, along the decode, by reuse distance.

Every miss is one of three kinds:

- *cold*: the first miss of its entry, without look-ahead its first lookup. No eviction or budget avoids it.
- *policy*: not cold, and Belady, who knows the future, hits it at the same budget.
- *budget*: not cold, and Belady misses it too: at this budget there is no room for it.

Belady is run on what the cell executed, so for a lossy cell it answers what eviction alone could still gain
on that routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.cells import MIB, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.replay.columns import TraceColumns
from simlab.replay.lookups import NEVER, Lookups, find_lookups, reuse_bytes
from simlab.replay.optimum import optimal_hits
from simlab.replay.run import Replayer, TraceLike
from simlab.types import Cell, CellNumbers

KINDS = ("cold", "policy", "budget")


@dataclass(frozen=True)
class Anatomy:
    """The lookups of one cell, each with its fate."""

    numbers: CellNumbers
    columns: TraceColumns
    walk: NDArray[np.int32]
    """`[rows, slots]`: the ids the cache saw, dropped slots repointed, -1 where no slot is."""
    lookups: pl.DataFrame
    """One row per counted lookup, in the order of the walk: turn, graph, phase, step, layer (model layer
    number), expert, token (number of the decode token it is counted at, -1 in prefill), bytes, hit, cold,
    optimum_hit, kind ("hit" or one of `KINDS`), reuse_bytes (null for first lookups)."""

    @property
    def n_tokens(self) -> int:
        """Decode tokens."""
        return self.numbers.decode.tokens

    @property
    def decode(self) -> pl.DataFrame:
        return self.lookups.filter(pl.col("token") >= 0)

    @property
    def prefill(self) -> pl.DataFrame:
        return self.lookups.filter(pl.col("token") < 0)


def anatomy(
    trace: TraceLike,
    cell: Cell,
    *,
    progress: Callable[[float], None] | None = None,
    train: str | None = None,
) -> Anatomy:
    """Replay one cell and tell its misses apart.

    Args:
        progress: called now and then with the share of the rows done.
        train: what policies that learn do so from, as `--train` takes it.

    Raises:
        InputError: as `simlab.replay.run.replay`, and for a cell that looks up one expert at a time.
    """
    if cell.sequential:
        raise InputError("--sequential: misses are told apart batch by batch, not one expert at a time")
    replayer = Replayer(trace, [cell], detail=True, train=train)
    while replayer.advance():
        if progress is not None:
            progress(replayer.row / replayer.columns.n_rows)
    columns, header = replayer.columns, replayer.trace.header
    walk, resident = _executed(replayer)
    found = find_lookups(columns, walk)
    budget = resolve_budget(cell.budget, cell.scope, header, effective_k(cell.route, header))
    scope = "per_layer" if budget.per_layer else "global"
    reuse = reuse_bytes(columns, found, scope)
    hit, best = resident[found.row, found.slot], optimal_hits(columns, found, budget)
    cold = _first_misses(found, hit)
    kind = np.select([hit, cold, best], ["hit", "cold", "policy"], "budget")
    # Lookups come in the order entries are left behind; a reader expects that of the walk.
    order = np.lexsort((found.slot, found.row))
    order = order[columns.counted[found.row[order]]]
    row = found.row[order]
    where = columns.where.select("turn", "graph", "phase", "step", "layer")[row]
    table = where.with_columns(
        pl.Series("expert", found.expert[order]),
        pl.Series("token", decode_tokens(columns)[row]),
        pl.Series("bytes", found.size[order]),
        pl.Series("hit", hit[order]),
        pl.Series("cold", cold[order]),
        pl.Series("optimum_hit", best[order]),
        pl.Series("kind", kind[order], pl.String),
        pl.Series("reuse_bytes", reuse[order]),
    )
    known = pl.when(pl.col("reuse_bytes") != NEVER).then(pl.col("reuse_bytes"))
    table = table.with_columns(known.alias("reuse_bytes"))
    return Anatomy(replayer.numbers()[0], columns, walk, table)


def _executed(replayer: Replayer) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """What the only cell of a replay walked, dropped slots repointed, and what of it was resident: `[rows, k]`."""
    detail = replayer.detail(0)
    expert, residency, dropped, weight = (detail[n] for n in ("expert", "residency", "dropped", "weight"))
    if dropped.any():
        # The engine promotes the top slot's expert again at each slot it drops (engine-semantics, section 2).
        top = np.where(expert >= 0, weight, -np.inf).argmax(axis=1)[:, None]
        expert, residency = (
            np.where(dropped, np.take_along_axis(x, top, axis=1), x) for x in (expert, residency)
        )
    return expert, residency > 0


def _first_misses(lookups: Lookups, hit: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which lookups are the first miss of their entry, as the counter `cold_misses` has it."""
    missed = np.flatnonzero(~hit)
    entry = lookups.layer[missed] << 32 | lookups.expert[missed]
    _, first = np.unique(entry, return_index=True)
    cold = np.zeros(len(hit), bool)
    cold[missed[first]] = True
    return cold


def decode_tokens(columns: TraceColumns) -> NDArray[np.int64]:
    """int64 `[rows]`: number of each row's decode token, counted from 0 over the run; -1 for all other rows."""
    mine = columns.counted & columns.decode
    place = columns.where.select(pl.struct("graph", "pos_in_graph").rank("dense").alias("place"))["place"]
    number = np.full(columns.n_rows, -1, np.int64)
    _, number[mine] = np.unique(place.to_numpy()[mine], return_inverse=True)
    return number


def counts(lookups: pl.DataFrame) -> dict[str, int]:
    """Lookups, hits, misses of each kind and bytes read; `optimum_*`: under Belady at the same budget.

    `policy` misses are what Belady hits and the cell does not. The reverse happens too, so what a better
    eviction could gain in all is `misses - optimum_misses`.
    """
    bytes_, hit, best = (lookups[name].to_numpy() for name in ("bytes", "hit", "optimum_hit"))
    kinds = lookups["kind"].to_numpy()
    return {
        "lookups": len(hit),
        "hits": int(hit.sum()),
        "misses": int((~hit).sum()),
        **{kind: int((kinds == kind).sum()) for kind in KINDS},
        "read_bytes": int(bytes_[~hit].sum()),
        "optimum_hits": int(best.sum()),
        "optimum_misses": int((~best).sum()),
        "optimum_read_bytes": int(bytes_[~best].sum()),
    }


def by_layer(lookups: pl.DataFrame) -> pl.DataFrame:
    """`counts` of each MoE layer, in layer order, with the median reuse distance (bytes) of what came again."""
    return _grouped(lookups, "layer", [int(v) for v in lookups["layer"].unique().sort()])


def along_decode(decode: pl.DataFrame, n_tokens: int, n_windows: int = 12) -> pl.DataFrame:
    """`counts` in equal stretches of decode tokens; `window` is the number of the stretch's first token."""
    width = max(1, -(-n_tokens // n_windows))
    starts = list(range(0, n_tokens, width))
    in_window = decode.with_columns(window=pl.col("token") // width * width)
    return _grouped(in_window, "window", starts).with_columns(
        tokens=pl.Series([min(width, n_tokens - start) for start in starts], dtype=pl.Int64)
    )


def _grouped(lookups: pl.DataFrame, by: str, values: Sequence[int]) -> pl.DataFrame:
    rows = []
    for value in values:
        own = lookups.filter(pl.col(by) == value)
        row: dict[str, Any] = {by: value, **counts(own)}
        row["hit_rate"] = row["hits"] / row["lookups"] if row["lookups"] else None
        row["optimum_hit_rate"] = row["optimum_hits"] / row["lookups"] if row["lookups"] else None
        median = own["reuse_bytes"].median()
        row["median_reuse_bytes"] = median
        rows.append(row)
    floats = ("hit_rate", "optimum_hit_rate", "median_reuse_bytes")
    names = [by, *counts(lookups), *floats]
    return pl.DataFrame(rows, schema={n: pl.Float64 if n in floats else pl.Int64 for n in names})


def reuse_distribution(lookups: pl.DataFrame, cycle_bytes: int) -> pl.DataFrame:
    """How far lookups lie from the last use of their entry, in token cycles.

    Columns: `from_cycles`, `to_cycles` (null: no upper end), `lookups`, `share`. An LRU cache of
    `to_cycles` hits the rows up to that one; first lookups are in none of them.
    """
    edges = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, np.inf]
    cycles = lookups["reuse_bytes"].drop_nulls().to_numpy() / cycle_bytes
    # A cache of exactly an edge's size hits at that distance: the upper edge belongs to the row.
    place = np.clip(np.searchsorted(edges, cycles, side="left") - 1, 0, None)
    number = np.bincount(place, minlength=len(edges) - 1)
    last = int(np.flatnonzero(number)[-1]) + 1 if number.any() else 0
    return pl.DataFrame(
        {
            "from_cycles": edges[:last],
            "to_cycles": [None if np.isinf(e) else e for e in edges[1 : last + 1]],
            "lookups": number[:last],
            "share": number[:last] / max(lookups.height, 1),
        },
        schema={"from_cycles": pl.Float64, "to_cycles": pl.Float64, "lookups": pl.Int64, "share": pl.Float64},
    )


def working_set(found: Anatomy, budget_bytes: int | None) -> pl.DataFrame:
    """Distinct entries and bytes that stretches of consecutive decode tokens use, mean over all stretches.

    Denning's working set (1968). One of the n - w + 1 stretches of w tokens starts at s; a use of an entry
    at t whose last use was at p brings the entry into the stretches with p < s <= t and s + w > t, and
    those are counted once. So one pass over the uses gives every length.

    Columns: `tokens`, `entries`, `mib`, `of_budget` (null without a budget).
    """
    columns, n_tokens = found.columns, found.n_tokens
    n_expert = columns.trace.header.n_expert
    row, slot = np.nonzero(found.walk >= 0)
    token = decode_tokens(columns)[row]
    entry = columns.layer[row].astype(np.int64) * n_expert + found.walk[row, slot]
    uses = np.unique(np.stack([entry, token], axis=1)[token >= 0], axis=0)
    entry, token = uses[:, 0], uses[:, 1]
    before = np.full(len(token), -1, np.int64)
    same = entry[1:] == entry[:-1]
    before[1:][same] = token[:-1][same]
    header = columns.trace.header
    size = np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64)[entry // n_expert]
    rows = []
    width = 1
    while width <= n_tokens:
        n = n_tokens - width + 1
        first, last = np.maximum(before, token - width) + 1, np.minimum(token, n - 1)
        stretches = np.maximum(last - np.maximum(first, 0) + 1, 0)
        size_mib = float((stretches * size).sum()) / n / MIB
        share = size_mib * MIB / budget_bytes if budget_bytes else None
        rows.append({"tokens": width, "entries": stretches.sum() / n, "mib": size_mib, "of_budget": share})
        width = n_tokens if width < n_tokens < 2 * width else 2 * width
    floats = dict.fromkeys(("entries", "mib", "of_budget"), pl.Float64)
    return pl.DataFrame(rows, schema={"tokens": pl.Int64, **floats})
