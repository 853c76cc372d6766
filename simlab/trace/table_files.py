"""The files of `simlab.trace.tables`: CSV, parquet and JSONL, each read into the same columns.

A column is checked as it is read, so that a refusal names the line (CSV, JSONL) or row (parquet) of the file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.trace.csv_text import read_csv_text
from simlab.trace.facts import Facts
from simlab.trace.json_text import JSON_TIMES, parse_json
from simlab.trace.parquet_probe import probe_parquet
from simlab.trace.reading import read_bytes, shown
from simlab.trace.tables import MAY_BE_LISTS, WHOLE, Column, Table, pick_columns

_PARQUET_TIMES = 5
"""Memory over eight bytes a value, from a parquet table to the rows of a trace; measured."""
_FLOAT32 = float(np.finfo(np.float32).max)
_LIST_MARKS = r"[\[\](),;\s]+"
_WHOLE_WORD = r"^[+-]?[0-9]+$"
_FLOAT_WORD = r"^[+-]?(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|inf|infinity|nan)$"

Place = Callable[[int, str], str]


def read_csv_table(path: Path, facts: Facts) -> Table:
    """A CSV table.

    Raises:
        InputError: the file is not CSV, or a value in it cannot be used.
    """
    text = read_csv_text(path)
    names = pick_columns(path, [name for name in text.columns if name], facts)
    columns: dict[str, Column] = {}

    def place(row: int, field: str) -> str:
        return f"{path}, line {text.line_of(row)}, field '{field}'"

    for ours, theirs in names.items():
        words = text.frame[theirs].str.strip_chars()
        if words.null_count():
            raise InputError(f"{place(int(words.is_null().arg_max() or 0), theirs)}: is missing")
        listed = ours in MAY_BE_LISTS and bool(words.str.contains(_LIST_MARKS).any())
        if listed:
            parts = words.str.replace_all(_LIST_MARKS, " ").str.strip_chars().str.split(" ")
            lengths = parts.list.len().cast(pl.Int64).to_numpy().copy()
            empty = (parts.list.join("") == "").to_numpy()
            lengths[empty] = 0
            flat = parts.filter(~empty).explode() if not empty.all() else pl.Series([], dtype=pl.String)
            row_of = np.repeat(np.arange(len(lengths)), lengths)
        else:
            flat, lengths, row_of = words, None, np.arange(len(words))
        columns[ours] = Column(_numbers(flat, ours, theirs, row_of, place), lengths)
    return Table(path, names, columns, text.frame.height, place, cut=text.tail is not None)


def _numbers(words: pl.Series, ours: str, theirs: str, row_of: NDArray, place: Place) -> NDArray:
    whole = ours in WHOLE
    lower = words if whole else words.str.to_lowercase()
    fits = lower.str.contains(_WHOLE_WORD if whole else _FLOAT_WORD)
    if not fits.all():
        index = int((~fits).arg_max() or 0)
        wanted = "a whole number" if whole else "a number"
        raise InputError(f"{place(int(row_of[index]), theirs)}: {shown(words[index])} is not {wanted}")
    values = lower.cast(pl.Int64 if whole else pl.Float64, strict=False)
    if values.null_count():
        index = int(values.is_null().arg_max() or 0)
        raise InputError(f"{place(int(row_of[index]), theirs)}: {shown(words[index])} is out of range")
    return _in_range(values.to_numpy(), ours, theirs, row_of, place)


def read_parquet_table(path: Path, facts: Facts) -> Table:
    """A parquet table.

    Raises:
        InputError: the file is not parquet, or a value in it cannot be used.
    """
    data = read_bytes(path)

    def place(row: int, field: str) -> str:
        return f"{path}, row {row}, column '{field}'"

    def refuse_unreadable(columns: list[str] | None) -> None:
        problem = probe_parquet(path, columns, _PARQUET_TIMES)
        if problem is not None:
            raise InputError(f"{path}: not a readable parquet file: {problem}")

    refuse_unreadable(None)
    names = pick_columns(path, list(pl.read_parquet_schema(io.BytesIO(data))), facts)
    refuse_unreadable(list(names.values()))
    frame = pl.read_parquet(io.BytesIO(data), columns=list(names.values()))
    columns = {ours: _from_series(frame[theirs], ours, theirs, place) for ours, theirs in names.items()}
    return Table(path, names, columns, frame.height, place)


def _from_series(series: pl.Series, ours: str, theirs: str, place: Place) -> Column:
    if series.null_count():
        raise InputError(f"{place(int(series.is_null().arg_max() or 0), theirs)}: is null")
    lengths: NDArray[np.int64] | None = None
    row_of = np.arange(len(series))
    if isinstance(series.dtype, (pl.List, pl.Array)):
        lists = series.cast(pl.List(series.dtype.inner)) if isinstance(series.dtype, pl.Array) else series
        lengths = lists.list.len().cast(pl.Int64).to_numpy()
        row_of = np.repeat(row_of, lengths)
        series = lists.filter(pl.Series(lengths > 0)).explode()
        if series.null_count():
            raise InputError(f"{place(int(row_of[series.is_null().arg_max() or 0]), theirs)}: holds a null")
    whole = ours in WHOLE
    if not (series.dtype.is_integer() or (series.dtype.is_float() and not whole)):
        wanted = "whole numbers" if whole else "numbers"
        raise InputError(f"{place(0, theirs)}: of type {series.dtype}, must be {wanted}, or lists of them")
    if whole and series.dtype in (pl.UInt64, pl.Int128):
        high = WHOLE[ours][1]
        series = series.clip(-1 if series.dtype == pl.Int128 else 0, high + 1).cast(pl.Int64)
    values = series.cast(pl.Int64 if whole else pl.Float64).to_numpy()
    return Column(_in_range(values, ours, theirs, row_of, place), lengths)


def read_json_lines(path: Path, facts: Facts) -> Table:
    """A JSONL table.

    Raises:
        InputError: a line is not a JSON object, or a value in it cannot be used.
    """
    data = read_bytes(path, times=JSON_TIMES, lines=True)
    numbers: list[int] = []
    rows: list[dict[str, Any]] = []
    cut = False
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, f"{path}, line {number}")
        except InputError:
            # The last line, if no newline ends it, may have been cut in the middle.
            if number < len(lines) or not rows:
                raise
            cut = True
            continue
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: {shown(row)}, must be a JSON object")
        numbers.append(number)
        rows.append(row)

    def place(row: int, field: str) -> str:
        return f"{path}, line {numbers[row]}, field '{field}'"

    names = pick_columns(path, list(rows[0]), facts)
    for index, row in enumerate(rows):
        for theirs in names.values():
            if theirs not in row:
                raise InputError(f"{place(index, theirs)}: is missing")
    columns = {
        ours: column_of([row[theirs] for row in rows], ours, theirs, place) for ours, theirs in names.items()
    }
    return Table(path, names, columns, len(rows), place, cut)


def column_of(values: Sequence[Any], ours: str, theirs: str, place: Place) -> Column:
    """A column of parsed JSON values, all of them numbers or all of them lists of numbers.

    Raises:
        InputError: a value of another kind, with its place.
    """
    lengths: NDArray[np.int64] | None = None
    row_of = np.arange(len(values))
    flat: list[Any] = list(values)
    if values and isinstance(values[0], list):
        for row, value in enumerate(values):
            if not isinstance(value, list):
                raise InputError(f"{place(row, theirs)}: {shown(value)}, must be a list, as in the first row")
        lengths = np.array([len(value) for value in values], np.int64)
        row_of = np.repeat(row_of, lengths)
        flat = [item for value in values for item in value]
    whole = ours in WHOLE
    kinds = (int,) if whole else (int, float)
    for index, item in enumerate(flat):
        # A bool is an int to Python, and a number of hundreds of digits no float.
        if type(item) not in kinds or (type(item) is int and not -(1 << 63) <= item < 1 << 63):
            wanted = "a whole number" if whole else "a number"
            raise InputError(f"{place(int(row_of[index]), theirs)}: {shown(item)}, must be {wanted} in range")
    numbers = np.array(flat, np.int64 if whole else np.float64)
    return Column(_in_range(numbers, ours, theirs, row_of, place), lengths)


def _in_range(values: NDArray, ours: str, theirs: str, row_of: NDArray, place: Place) -> NDArray:
    """Whole numbers in their column's range as int64; floats that fit float32, infinities and NaN as such, as that."""
    if ours in WHOLE:
        low, high = WHOLE[ours]
        wrong = (values < low) | (values > high)
        legal = f"from {low} to {high}"
    else:
        wrong = (np.abs(values) > _FLOAT32) & ~np.isinf(values)
        legal = f"from {-_FLOAT32:.4g} to {_FLOAT32:.4g}"
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InputError(
            f"{place(int(row_of[index]), theirs)}: {values[index]:.15g} is out of range, must be {legal}"
        )
    return values.astype(np.int64 if ours in WHOLE else np.float32, copy=False)
