"""Tables of cells that simlab wrote, read back: `sweep --out` (parquet, CSV), `sweep --json`, `validate --json`.

A file may be from anywhere, so every column is checked, and what is wrong is refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from simlab.cells import parse_budget
from simlab.cli.output import (
    INTERVALS,
    JSON_TEXT,
    KNOB_FIELDS,
    LIVE_FIELDS,
    PHASES,
    PROVENANCE,
    READ_AHEAD,
    cells_from_frame,
    cells_schema,
    json_to_row,
)
from simlab.errors import InputError
from simlab.policy import builtin_policies
from simlab.prefetch import parse_prefetch
from simlab.trace.csv_text import require_room
from simlab.trace.json_text import JSON_TIMES, parse_json
from simlab.trace.parquet_probe import probe_parquet
from simlab.trace.provenance import read_provenance
from simlab.trace.reading import one_line, read_bytes, shown
from simlab.types import Cell, CellNumbers, EvictionPolicy, Route, RoutingPolicy, Step

TRACE = "trace"
"""The column in front of a sweep of several traces: which one a cell is of, as the command line named it."""
_WANTED = "write it with simlab sweep --out, or with --json of sweep or validate"
_MAY_LACK = frozenset(
    {
        "route",
        "margin",
        "drop",
        "prefetch",
        "note",
        *(f"{phase}_substituted" for phase in PHASES),
        *JSON_TEXT,
        *LIVE_FIELDS,
    }
)
"""Fields that JSON leaves out, or that are unknown, for many cells."""
_WORDS = {pl.String: "text", pl.Int64: "a whole number", pl.Float64: "a number", pl.Boolean: "true or false"}
_KINDS: dict[Any, tuple[type, ...]] = {
    pl.String: (str,),
    pl.Int64: (int,),
    pl.Float64: (int, float),
    pl.Boolean: (bool,),
}


def read_cells_table(path: Path) -> pl.DataFrame:
    """A table of cells with the columns of `simlab.cli.output.cells_schema`, and `trace` in front if it has one.

    Raises:
        InputError: it is no such table, or a value in it cannot be used.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a table of cells; {_WANTED}")
    if path.suffix == ".parquet":
        return _checked(path, _parquet(path), _row)
    data = read_bytes(path, times=JSON_TIMES)
    if path.suffix == ".csv":
        return _checked(path, _csv(path, data), lambda row: f"line {row + 2}")
    if data.lstrip()[:1] in (b"[", b"{"):
        return _from_json(path, data)
    raise InputError(f"{path}: neither .parquet, .csv nor JSON; {_WANTED}")


def _row(row: int) -> str:
    return f"row {row}"


def _parquet(path: Path) -> pl.DataFrame:
    read_bytes(path, 64)
    if why := probe_parquet(path, None):
        raise InputError(f"{path}: cannot be read as parquet: {why}")
    if not {"source", "route"} <= set(pl.read_parquet_schema(path)):
        raise InputError(f"{path}: is no table of cells; {_WANTED}")
    names = [name for name in pl.read_parquet_schema(path) if name in (TRACE, *cells_schema())]
    if why := probe_parquet(path, names):
        raise InputError(f"{path}: cannot be read: {why}")
    return pl.read_parquet(path, columns=names)


def _csv(path: Path, data: bytes) -> pl.DataFrame:
    if not data.endswith(b"\n"):
        raise InputError(f"{path}: cut short, its last line does not end; write it again")
    heading, _, rows = data.partition(b"\n")
    require_room(path, 1, heading.count(b",") + 1, rows.count(b",") + rows.count(b"\n"))
    try:
        words = pl.read_csv(data, infer_schema=False)
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: cannot be read as CSV: {one_line(error)}") from error
    typed = []
    for name, kind in cells_schema().items():
        if name not in words.columns:
            continue
        column = words[name]
        read = (
            pl.Series(name, [{"true": True, "false": False}.get(word) for word in column], dtype=pl.Boolean)
            if kind == pl.Boolean
            else column.cast(kind, strict=False)
        )
        bad = read.is_null() & column.is_not_null()
        if bad.any():
            row = int(bad.arg_max() or 0)
            raise InputError(
                f"{path}, line {row + 2}, field '{name}': {shown(column[row])} is not {_WORDS[kind]}"
            )
        typed.append(read)
    front = [words[TRACE]] if TRACE in words.columns else []
    return pl.DataFrame([*front, *typed])


def _from_json(path: Path, data: bytes) -> pl.DataFrame:
    value = parse_json(data, str(path), nan=False)
    cells = value if isinstance(value, list) else [value]
    schema, rows = cells_schema(), []
    several = all(isinstance(cell, dict) and TRACE in cell for cell in cells) and bool(cells)
    for number, cell in enumerate(cells, 1):
        where = f"{path}, cell {number}"
        if not isinstance(cell, dict) or not all(isinstance(cell.get(phase), dict) for phase in PHASES):
            raise InputError(f"{where}: is no cell with its numbers; {_WANTED}")
        for name in KNOB_FIELDS:
            if not isinstance(cell.get(name), dict):
                raise InputError(f"{where}, field '{name}': is missing, or holds no knobs by name")
        row = json_to_row(cell)
        for name, kind in schema.items():
            value = row.get(name)
            if value is not None and (
                not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != pl.Boolean)
            ):
                raise InputError(f"{where}, field '{name}': {shown(value)} is not {_WORDS[kind]}")
        if several and not isinstance(row[TRACE], str):
            raise InputError(f"{where}, field '{TRACE}': {shown(row[TRACE])} is not text")
        rows.append({name: row.get(name) for name in (TRACE, *schema)})
    front = {TRACE: pl.String} if several else {}
    try:
        frame = pl.DataFrame(rows, schema=front | schema, strict=False)
    except (pl.exceptions.PolarsError, OverflowError) as error:
        raise InputError(f"{path}: a number is out of range: {one_line(error)}") from error
    return _checked(path, frame, lambda row: f"cell {row + 1}")


def _checked(path: Path, frame: pl.DataFrame, place: Callable[[int], str]) -> pl.DataFrame:
    """The columns of the schema in its order, each of its type and without holes where there may be none."""
    schema = cells_schema()
    for name in ("prefetch", *JSON_TEXT):
        if name not in frame.columns:  # of a version that did not have it yet
            frame = frame.with_columns(pl.lit(None, pl.String).alias(name))
    for name, kind in schema.items():
        if name not in frame.columns:
            raise InputError(f"{path}: has no column '{name}'; {_WANTED} of this version")
        if frame[name].dtype != kind:
            raise InputError(f"{path}: column '{name}' is {frame[name].dtype}, not {kind()}")
        optional = kind == pl.Float64 and name.startswith(PHASES)
        if not optional and name not in _MAY_LACK and frame[name].null_count():
            row = int(frame[name].is_null().arg_max() or 0)
            raise InputError(f"{path}, {place(row)}, field '{name}': is missing")
    for name, legal in (("source", ("replay", "live")), ("scope", ("global", "per_layer"))):
        bad = ~frame[name].is_in(legal)
        if bad.any():
            row = int(bad.arg_max() or 0)
            value, words = shown(frame[name][row]), " or ".join(legal)
            raise InputError(f"{path}, {place(row)}, field '{name}': {value} is not {words}")
    if not frame.height:
        raise InputError(f"{path}: holds no cells")
    for row, text in enumerate(frame[INTERVALS]):
        if text is not None:
            _check_intervals(text, f"{path}, {place(row)}, field '{INTERVALS}'")
    for row, text in enumerate(frame[READ_AHEAD]):
        if text is not None:
            _knobs(text, f"{path}, {place(row)}, field '{READ_AHEAD}'")
    for row, text in enumerate(frame[PROVENANCE]):
        if text is not None:
            where = f"{path}, {place(row)}, field '{PROVENANCE}'"
            read_provenance(parse_json(text.encode(), where), where)
    front = [TRACE] if TRACE in frame.columns else []
    return frame.select(*front, *schema)


def _check_intervals(text: str, where: str) -> None:
    value = parse_json(text.encode(), where)
    pairs = value.values() if isinstance(value, dict) else [None]
    if not all(isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) for p in pairs):
        raise InputError(f"{where}: {shown(value)} is no set of [low, high] by name")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---------------------------------------------------------------------------------------------------------
# From a row to its cell


def numbers_of(path: Path, frame: pl.DataFrame) -> list[CellNumbers]:
    """The cells and their numbers, in the table's order.

    A policy from a user's file keeps its name and knobs alone: it can be shown, not replayed.

    Raises:
        InputError: a policy, knob or budget that this version does not know.
    """
    cells = [_cell(f"{path}, cell {n}", row) for n, row in enumerate(frame.iter_rows(named=True), 1)]
    return cells_from_frame(frame, cells)


def _cell(where: str, row: dict[str, Any]) -> Cell:
    try:
        return Cell(
            route=_route(row["route"] or "original", _knobs(row["knobs"], f"{where}, field 'knobs'")),
            budget=parse_budget(row["budget"]),
            evict=row["evict"],
            evict_knobs=_knobs(row["evict_knobs"], f"{where}, field 'evict_knobs'"),
            scope=row["scope"],
            sequential=row["sequential"],
            prefetch=row["prefetch"] and parse_prefetch(row["prefetch"]).text,
        )
    except InputError as error:
        raise error if str(error).startswith(where) else InputError(f"{where}: {error}") from error


def _knobs(text: str, where: str) -> dict[str, float]:
    value = parse_json(text.encode(), where)
    if not isinstance(value, dict) or not all(map(_is_number, value.values())):
        raise InputError(f"{where}: {shown(value)} is no set of numbers by name")
    return value


def _route(name: str, knobs: dict[str, float]) -> Route:
    steps, left = [], dict(knobs)
    policies = [_policy(part) for part in name.split("+")]
    for policy in sorted(policies, key=is_foreign):
        mine = {}
        for knob in [*left] if is_foreign(policy) else policy.knobs:
            found = next((key for key in (f"{policy.name}.{knob}", knob) if key in left), None)
            if found is None:
                raise InputError(f"{policy.name}: its knob '{knob}' is missing")
            mine[knob] = left.pop(found)
        steps.append(Step(policy, mine))
    if left:
        raise InputError(f"{name}: has no knob '{next(iter(left))}'")
    order = [policy.name for policy in policies]
    return Route(tuple(sorted(steps, key=lambda step: order.index(step.policy.name))))


def _policy(name: str) -> RoutingPolicy:
    if "@" in name:
        return RoutingPolicy(name, "rerank", _not_here, origin=name.partition("@")[2])
    policy = builtin_policies().get(name)  # a name out of a file never makes a file run
    if not isinstance(policy, RoutingPolicy):
        raise InputError(f"route {shown(name)}: there is no such routing policy in this version")
    return policy


def _not_here(*_: Any) -> Any:
    raise InputError("a policy of a user's file cannot be run from a table of its numbers")


def is_foreign(policy: RoutingPolicy) -> bool:
    """Whether a table named a policy that is not here, being a user's file."""
    return policy.function is _not_here


def can_replay(cell: Cell) -> bool:
    """Whether a cell of a table can be replayed: all its policies are built in."""
    evicts = isinstance(builtin_policies().get(cell.evict), EvictionPolicy)
    return evicts and not any(is_foreign(step.policy) for step in cell.route.steps)


def same_cell(first: Cell, other: Cell) -> bool:
    """Whether two cells are one setting, however their routes were written."""
    return _identity(first) == _identity(other)


def _identity(cell: Cell) -> tuple[Any, ...]:
    steps = [
        (s.policy.name, sorted(s.knobs.items())) for s in cell.route.steps if s.policy.name != "original"
    ]
    knobs = sorted(cell.evict_knobs.items())
    return steps, cell.budget, cell.evict, knobs, cell.scope, cell.sequential, cell.prefetch


def pairs_of(path: Path, numbers: Sequence[CellNumbers]) -> list[tuple[CellNumbers, CellNumbers]]:
    """Replay and live of each cell, as `validate --json` writes them: one after the other.

    Raises:
        InputError: the cells do not come in such pairs.
    """
    for place in range(0, len(numbers), 2):
        pair = numbers[place : place + 2]
        if [n.source for n in pair] != ["replay", "live"] or not same_cell(pair[0].cell, pair[1].cell):
            raise InputError(
                f"{path}, cell {place + 1}: is no replay with its live run next; write it with simlab validate --json"
            )
    return list(zip(numbers[::2], numbers[1::2], strict=True))
