"""Where two traces, two slot tables or two tables of cells first differ.

Slots are compared in execution order, exactly: ids, residency, drops, read bytes, and weights to the last bit. A trace
is a slot table too, so a replay's `--slots` can be held to the recording it came from. Of two traces the scores, gate
probabilities and token ids are compared as well. Cells are matched by their setting, whatever their order; their
counts exactly, means within `MEAN_TOLERANCE`, since a mean's last digit depends on how many cells ran together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl

from simlab.cli.output import INTERVALS
from simlab.errors import InputError
from simlab.judge.report.cells_file import TRACE, read_cells_table
from simlab.trace.parquet_probe import probe_parquet
from simlab.trace.reading import read_bytes
from simlab.trace.store import Trace, open_trace

Kind = Literal["slots", "cells"]
MEAN_TOLERANCE = 1e-12
"""Relative difference of two means that is none."""
PLACE = ("turn", "graph", "phase", "step", "layer", "slot")
"""Where a slot is: what a difference is named by."""
DECIDED = ("router_expert", "expert", "weight", "residency", "dropped", "read_bytes")
ROW_COLUMNS = ("token", "scores", "gate_probs")
"""What a trace also has of a whole row of slots."""
MODEL_FIELDS = (
    "n_layer", "n_expert", "n_expert_used", "gating", "score_space", "weight_rule", "entry_bytes", "budget_bytes",
    "route", "knobs", "evict", "scope",
)  # fmt: skip
"""Header fields that decide what a replay of the trace gives."""
SETTING = (
    "source", "route", "knobs", "top_k", "evict", "evict_knobs", "scope", "sequential", "prefetch",
    "budget_mib",
)  # fmt: skip
"""What a cell is matched by."""
_BESIDE = ("budget", "budget_cycles", "margin", "drop", INTERVALS)
"""Columns that say again what others say, or that a sweep may have been asked for or not."""
_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True)
class First:
    """The first slot, row or cell that differs."""

    where: dict[str, Any]
    """Its number from 0, and its place or setting."""
    columns: dict[str, tuple[Any, Any]]
    """What differs there: A's value and B's."""


@dataclass(frozen=True)
class Diff:
    """What sets B apart from A."""

    kind: Kind
    heights: tuple[int, int]
    """Slots or cells of each."""
    first: First | None = None
    differing: dict[str, int] = field(default_factory=dict)
    """How many slots or cells differ, by column."""
    header: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of two traces: fields of their headers that differ."""
    first_row: First | None = None
    """Of two traces: the first row whose scores, gate probabilities or token id differ."""
    only: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(default_factory=lambda: ([], []))
    """Settings that only A has, and only B."""
    not_compared: tuple[str, ...] = ()
    """Columns that one of the two does not know."""

    @property
    def same(self) -> bool:
        """Whether nothing that was compared differs."""
        found = (self.first, self.first_row, *self.only, self.header)
        return self.heights[0] == self.heights[1] and not any(found)


def diff(first: str | Path, other: str | Path) -> Diff:
    """Compare two traces, two slot tables (or a trace with one), or two tables of cells.

    Raises:
        InputError: one of them is neither, or the two are of different kinds.
    """
    paths = Path(first), Path(other)
    kinds = [_kind(path) for path in paths]
    if ("cells" in kinds) and kinds != ["cells", "cells"]:
        a, b = ("cells" if kind == "cells" else "slots" for kind in kinds)
        raise InputError(f"{paths[0]} holds {a}, {paths[1]} {b}: they cannot be compared")
    if kinds[0] == "cells":
        return _diff_cells(*(read_cells_table(path) for path in paths))
    traces = [open_trace(path) if kind == "trace" else None for path, kind in zip(paths, kinds, strict=True)]
    tables = [
        trace_slots(trace) if trace is not None else _slot_file(path)
        for path, trace in zip(paths, traces, strict=True)
    ]
    found = _diff_slots(*tables)
    a, b = traces
    if a is None or b is None:
        return found
    return Diff(**{**vars(found), "header": _header_diff(a, b), "first_row": _first_row(a, b)})


def _kind(path: Path) -> str:
    if path.is_dir():
        return "trace"
    if path.suffix == ".parquet":
        read_bytes(path, 64)
        if why := probe_parquet(path, None):
            raise InputError(f"{path}: cannot be read as parquet: {why}")
        if "router_expert" in pl.read_parquet_schema(path):
            return "slots"
    return "cells"


def trace_slots(trace: Trace) -> pl.DataFrame:
    """A recording's slots, one row each, with the columns that `simlab replay --slots` writes."""
    lists = {"router_experts": "router_expert", "experts": "expert", "weights": "weight"}
    names = [*lists, "residency", "dropped", "read_bytes"]
    query = (
        trace.routing.select(*PLACE[:-1], *(pl.col(name).arr.to_list() for name in names))
        .with_columns(slot=pl.lit(list(range(trace.width)), dtype=pl.List(pl.Int32)))
        # A column that is not known has no list in that row: as many nulls as there are slots.
        .with_columns(pl.col(name).fill_null(pl.lit([None] * trace.width)) for name in names)
        .explode("slot", *names)
        .rename(lists)
        .filter(pl.col("router_expert") >= 0)
    )
    return trace.collect("routing", query).select(*PLACE, *DECIDED)


def _slot_file(path: Path) -> pl.DataFrame:
    schema = pl.read_parquet_schema(path)
    for name in (*PLACE, *DECIDED):
        if name not in schema:
            raise InputError(f"{path}: has no column '{name}'; write slots with simlab replay --slots")
        if not (schema[name].is_numeric() or schema[name] == pl.Boolean):
            raise InputError(f"{path}: column '{name}' is {schema[name]}, not numbers")
    if why := probe_parquet(path, [*PLACE, *DECIDED]):
        raise InputError(f"{path}: cannot be read: {why}")
    return pl.read_parquet(path, columns=[*PLACE, *DECIDED])


# ---------------------------------------------------------------------------------------------------------
# Slots


def _diff_slots(a: pl.DataFrame, b: pl.DataFrame) -> Diff:
    heights = a.height, b.height
    unknown = [n for n in DECIDED if heights[0] and heights[1] and n in _unknown(a) ^ _unknown(b)]
    names = [n for n in (*PLACE, *DECIDED) if n not in unknown]
    common = min(heights)
    a, b = a.head(common), b.head(common)
    differs = pl.DataFrame([_differs(name, a[name], b[name]) for name in names])
    counts = {name: int(differs[name].sum()) for name in names}
    rows = [int(differs[name].arg_max() or 0) for name in names if counts[name]]
    first = None
    if rows:
        row = min(rows)
        columns = {name: (a[name][row], b[name][row]) for name in names if differs[name][row]}
        first = First({"slot_number": row} | {name: a[name][row] for name in PLACE}, columns)
    return Diff("slots", heights, first, {n: c for n, c in counts.items() if c}, not_compared=tuple(unknown))


def _unknown(frame: pl.DataFrame) -> set[str]:
    """Columns without a single value."""
    return {name for name in DECIDED if frame[name].null_count() == frame.height}


def _differs(name: str, a: pl.Series, b: pl.Series) -> pl.Series:
    return a.ne_missing(b).alias(name)


def _header_diff(a: Trace, b: Trace) -> dict[str, tuple[Any, Any]]:
    def value(trace: Trace, name: str) -> Any:
        found = getattr(trace.header, name)
        return dict(found) if isinstance(found, Mapping) else found

    pairs = {name: (value(a, name), value(b, name)) for name in MODEL_FIELDS}
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y}


def _first_row(a: Trace, b: Trace) -> First | None:
    """The first routing row that differs in what a trace has beside its slots; read chunk by chunk."""
    for start in range(0, min(a.n_rows, b.n_rows), _CHUNK_ROWS):
        wanted = [*PLACE[:-1], "pos_in_graph", *ROW_COLUMNS]
        chunks = [t.collect("routing", t.routing.select(wanted).slice(start, _CHUNK_ROWS)) for t in (a, b)]
        height = min(chunk.height for chunk in chunks)
        x, y = (chunk.head(height) for chunk in chunks)
        found: dict[str, int] = {}
        for name in ROW_COLUMNS:
            # Other numbers of experts: every row differs.
            mask = _differs(name, x[name], y[name]) if x[name].dtype == y[name].dtype else None
            if mask is None or mask.any():
                found[name] = 0 if mask is None else int(mask.arg_max() or 0)
        if found:
            row = min(found.values())
            where = {"row_number": start + row} | {n: x[n][row] for n in (*PLACE[:-1], "pos_in_graph")}
            return First(where, {n: _element(x[n][row], y[n][row]) for n, r in found.items() if r == row})
    return None


def _element(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values; of two rows of numbers the first number that differs, with its expert."""
    if not isinstance(a, pl.Series) or not isinstance(b, pl.Series):
        return tuple(
            "unknown" if v is None else f"{len(v)} values" if isinstance(v, pl.Series) else v for v in (a, b)
        )  # type: ignore[return-value]
    if len(a) != len(b):
        return f"{len(a)} values", f"{len(b)} values"
    place = int(a.ne_missing(b).arg_max() or 0)
    return f"expert {place}: {a[place]!r}", f"expert {place}: {b[place]!r}"


# ---------------------------------------------------------------------------------------------------------
# Cells


def _diff_cells(a: pl.DataFrame, b: pl.DataFrame) -> Diff:
    keys = [TRACE, *SETTING] if TRACE in a.columns and TRACE in b.columns else list(SETTING)
    x, y = (dict(_keyed(frame, keys)) for frame in (a, b))
    only = tuple(
        [dict(zip(keys, key, strict=False)) for key in one if key not in other]
        for one, other in ((x, y), (y, x))
    )
    values = [name for name in a.columns if name not in (*keys, *_BESIDE, TRACE)]
    counts: dict[str, int] = {}
    first = None
    for number, (key, row) in enumerate(x.items()):
        if key not in y:
            continue
        found = {n: (row[n], y[key][n]) for n in values if not _alike(row[n], y[key][n])}
        for name in found:
            counts[name] = counts.get(name, 0) + 1
        if found and first is None:
            first = First({"cell_number": number} | dict(zip(keys, key, strict=False)), found)
    return Diff("cells", (a.height, b.height), first, counts, only=(only[0], only[1]))


def _keyed(frame: pl.DataFrame, keys: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each row by its setting, and by its number among those of that setting."""
    seen: dict[tuple[Any, ...], int] = {}
    for row in frame.iter_rows(named=True):
        setting = tuple(row[name] for name in keys)
        seen[setting] = seen.get(setting, -1) + 1
        yield (*setting, seen[setting]), row


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= MEAN_TOLERANCE * max(abs(a), abs(b))
    return a == b


# ---------------------------------------------------------------------------------------------------------
# Words


def diff_to_json(first: str, other: str, found: Diff) -> dict[str, Any]:
    """A comparison as plain JSON values; pairs are [A's, B's]."""

    def plain(one: First | None) -> dict[str, Any] | None:
        return None if one is None else {**one.where, "differs": {n: list(p) for n, p in one.columns.items()}}

    return {
        "a": first,
        "b": other,
        "kind": found.kind,
        "same": found.same,
        found.kind: list(found.heights),
        "first": plain(found.first),
        "differing": found.differing,
        "header": {name: [_plain(v) for v in pair] for name, pair in found.header.items()},
        "first_row": plain(found.first_row),
        "only_a": found.only[0],
        "only_b": found.only[1],
        "not_compared": list(found.not_compared),
    }


def _plain(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dataclass_fields__") else value


def diff_text(first: str, other: str, found: Diff) -> str:
    """A comparison for reading: one line if nothing differs, else the first difference first."""
    what = found.kind
    a, b = found.heights
    lines = []
    if found.first is not None:
        lines += [f"first differing {what[:-1]}: {_where(found.first)}", *_pairs(found.first)]
    if found.first_row is not None:
        lines += [f"first differing row: {_where(found.first_row)}", *_pairs(found.first_row)]
    if a != b:
        lines.append(f"{first} has {a:,} {what}, {other} {b:,}")
    if found.differing:
        counts = ", ".join(f"{name} {count:,}" for name, count in found.differing.items())
        lines.append(f"{what} that differ, of {min(a, b):,}: {counts}")
    lines += [f"header, {name}: {x} | {y}" for name, (x, y) in found.header.items()]
    for name, cells in zip((first, other), found.only, strict=True):
        if cells:
            lines.append(f"only in {name}: {len(cells)} cells, the first {_setting(cells[0])}")
    if found.same:
        lines.append(f"{first} and {other}: no difference in {a:,} {what}")
    if found.not_compared:
        lines.append(f"not compared, unknown in one of them: {', '.join(found.not_compared)}")
    return "\n".join(lines)


def _where(one: First) -> str:
    (name, number), *place = one.where.items()
    words = _setting(dict(place)) if name == "cell_number" else ", ".join(f"{n} {v}" for n, v in place)
    return f"number {number:,} ({words})"


def _setting(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _pairs(one: First) -> list[str]:
    return [f"  {name}: {x} | {y}" for name, (x, y) in one.columns.items()]
