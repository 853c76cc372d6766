"""Whether the tables of a trace are whole: every graph in its place, and what the header says is what the rows say."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl

from simlab.errors import InputError, SimlabWarning
from simlab.trace.parts import collect
from simlab.trace.schema import TABLES
from simlab.types import DECODE, PREFILL, TraceHeader

_READ_ROWS = 1 << 20


def check_routing(folder: Path, header: TraceHeader, routing: pl.LazyFrame) -> None:
    """Refuse rows that a replay would take in the wrong order or at no place, or whose reads are of other sizes.

    Raises:
        InputError: names the column, or the field of the header.
    """
    known = ("graph", "layer", "turn", "phase", "step")
    falls = pl.col("graph").diff() < 0
    found = collect(
        folder,
        "routing",
        routing.select(
            *(pl.col(name).null_count().alias(f"no {name}") for name in known),
            pl.col("phase").is_between(PREFILL, DECODE).all().alias("phases"),
            falls.any().alias("falls"),
            falls.arg_max().alias("row"),
            pl.col("layer").unique().sort().implode().alias("layers"),
            pl.len().alias("rows"),
        ),
    ).row(0, named=True)
    for name in known:
        if found[f"no {name}"]:
            raise InputError(f"{folder}/routing: column '{name}': {found[f'no {name}']} rows have none")
    if not found["phases"]:
        raise InputError(f"{folder}/routing: column 'phase': neither {PREFILL} nor {DECODE} in some rows")
    if found["falls"]:
        raise InputError(
            f"{folder}/routing: column 'graph' goes down at row {found['row']}; its parts are out of order"
        )
    for layer in found["layers"]:
        if layer not in header.entry_bytes:
            raise InputError(
                f"{folder}/header.json: entry_bytes has no layer {layer}, which the routing table has"
            )
    for start in range(0, found["rows"], _READ_ROWS):
        _check_entry_bytes(folder, header, routing.slice(start, _READ_ROWS))


def _check_entry_bytes(folder: Path, header: TraceHeader, routing: pl.LazyFrame) -> None:
    """A slot is charged nothing or the bytes of one entry of its layer."""
    frame = collect(folder, "routing", routing.select("layer", "read_bytes")).drop_nulls("read_bytes")
    if not frame.height:
        return
    entry = frame["layer"].replace_strict(dict(header.entry_bytes), return_dtype=pl.Int64).to_numpy()
    charged = frame["read_bytes"].to_numpy().reshape(frame.height, -1)
    wrong = ((charged != 0) & (charged != entry[:, None])).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(
            f"{folder}/header.json: field 'entry_bytes': {entry[row]} bytes for layer {frame['layer'][row]}, but the "
            f"routing table charges reads of {charged[row].max()} bytes there"
        )


def complete_graphs(folder: Path, frames: Mapping[str, pl.LazyFrame]) -> dict[str, pl.LazyFrame]:
    """The tables of an unfinished recording up to the last graph that each of them has, with one warning.

    Parts are written in order, the tokens table's last: a cut takes graphs from the end. Where a graph before a table's
    last one is not there, a part is missing in the middle.

    Raises:
        InputError: such a part.
    """
    tokens = collect(folder, "tokens", frames["tokens"].select("graph", "window_bytes"))
    in_tokens = set(tokens["graph"].drop_nulls().to_list())
    last = max(in_tokens, default=-1)
    read = set(tokens.filter(pl.col("window_bytes") > 0)["graph"].to_list())
    for table, wanted in (
        ("tokens", set(range(last + 1))),
        ("routing", set(range(last + 1))),
        ("reads", read),
    ):
        graphs = (
            collect(folder, table, frames[table].select(pl.col("graph").unique())).to_series().drop_nulls()
        )
        absent = wanted - set(graphs.to_list())
        missing = _missing_part(folder, table)
        # Of reads a file of another engine may tell only some.
        if not absent or (table == "reads" and (graphs.is_empty() or missing is None)):
            continue
        first = min(absent)
        if first < (graphs.max() if len(graphs) else -1):
            where = f"{folder}/{table}/{missing}" if missing else f"{folder}/{table}"
            raise InputError(
                f"{where}: is missing; graph {first} and {len(absent) - 1} others of {last + 1} are not there, and "
                "what came after them would be replayed as if they had not been; copy the trace again"
            )
        last = min(last, first - 1)
    warnings.warn(
        f"{folder}: the recording did not finish; using its {last + 1} complete graphs",
        SimlabWarning,
        stacklevel=3,
    )
    return {table: frame.filter(pl.col("graph") <= last) for table, frame in frames.items()}


def _missing_part(folder: Path, table: str) -> str | None:
    """The first part of a table that is not there, where another of its number or a later one is; None if all are."""
    numbers = {
        name: {
            int(m[1])
            for p in (folder / name).glob("part-*.parquet")
            if (m := re.match(r"part-(\d+)\.", p.name))
        }
        for name in TABLES
    }
    most = max(set().union(*numbers.values()), default=-1)
    number = min(set(range(most + 1)) - numbers[table], default=None)
    return None if number is None else f"part-{number:06d}.parquet"
