"""CSV files with `#` comment lines, read as text columns that know the line every value stands on.

The fast path is one vectorised parse; lines are only counted when something is to be reported. Every number
of these files, in a column or in a comment, is read here and nowhere else, and each reader states the range
it can use: what is outside, not finite or not a number is refused with its file, line and field.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.errors import InputError
from simlab.trace.reading import read_bytes

INT32 = (1 << 31) - 1
"""Largest turn, step and lane: the tables hold them in 32 bits."""
EXACT = 1 << 53
"""Largest time in ns and size in bytes of one measurement: whole in float64, and sums of many fit int64."""
MAX_EXPERT, MAX_LAYER = 65_535, (1 << 15) - 1
MAX_ENTRY_BYTES = (1 << 40) - 1

_MOST_COLUMNS = 10_000
"""Of a column of its own for every score and more; tables here have a dozen."""
_FIELD_BYTES = 54
"""Memory of a field at the most that is held of one at once, from text to the rows of a trace; measured."""
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x78\x01", b"\x78\x9c", b"\x78\xda")
"""How gzip, zstd and zlib begin; polars would unpack them, whatever size they come to."""

_COMMENT = re.compile(rb"(?m)^#[^\n]*")
_INDEX = "\0row"
"""Name of the row number column; no column of a file has it, because a NUL makes a file binary."""
_LAST = (1 << 32) - 1
"""Row number of the file's last line, however many blank lines stand above it."""
# ASCII only: `str.isdigit` and `int` take digits of every script, and not the same ones.
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


T = TypeVar("T", int, float)
IoMode = Literal["direct", "buffered"]


@dataclass(frozen=True)
class Words:
    """The `key=value` words of comment lines, each with its line; of a key given twice the last counts."""

    path: Path
    words: dict[str, tuple[int, str]]

    def text(self, name: str) -> str | None:
        """A word as it stands, null where the file does not have it."""
        return self.words[name][1] if name in self.words else None

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A word as a whole number between `low` and `high`."""
        return self._number(name, low, high, _WHOLE, int, "a whole number")

    def number(self, name: str, low: float, high: float) -> float | None:
        """A word as a finite number between `low` and `high`."""
        return self._number(name, low, high, _NUMBER, float, "a number")

    def io_mode(self) -> IoMode | None:
        """How the engine read its files, by the word `o_direct`; null where it is missing or neither 0 nor 1."""
        modes: dict[str | None, IoMode] = {"1": "direct", "0": "buffered"}
        return modes.get(self.text("o_direct"))

    def _number(
        self, name: str, low: T, high: T, form: re.Pattern[str], convert: Callable[[str], T], wanted: str
    ) -> T | None:
        text = self.text(name)
        if text is None:
            return None
        if not form.fullmatch(text):
            raise self.refuse(name, f"'{text}' is not {wanted}")
        # No legal number is that long, and Python refuses to convert a whole number of thousands of digits.
        value = convert(text) if len(text) < 400 else None
        if value is None or not low <= value <= high:
            raise self.refuse(name, _out_of_range(text, low, high))
        return value

    def refuse(self, name: str, problem: str) -> InputError:
        """The error for one word."""
        return InputError(f"{self.path}, line {self.words[name][0]}, field '{name}': {problem}")


def _out_of_range(text: object, low: float, high: float) -> str:
    return f"{text} is out of range, must be from {low:.15g} to {high:.15g}"


@dataclass(frozen=True)
class CsvText:
    """One CSV file, all values still text.

    `frame` has the file's columns and the number of each data line; `tail` holds the fields of a last
    line without a newline, which may have been cut in the middle, and is not part of `frame`.
    """

    path: Path
    comments: tuple[tuple[int, str], ...]
    """(line number, text after the `#`)."""
    heading_line: int
    columns: tuple[str, ...]
    frame: pl.DataFrame
    tail: tuple[str, ...] | None

    def line_of(self, index: int) -> int:
        """Line number in the file of row `index` of `frame`; the row after the last is `tail`."""
        wanted = int(self.frame[_INDEX][index]) if index < self.frame.height else _LAST
        lines = _read(self.path).split(b"\n")
        if wanted == _LAST:
            return len(lines)
        numbers = [n for n, line in enumerate(lines, 1) if not line.startswith(b"#")]
        heading = next(i for i, n in enumerate(numbers) if lines[n - 1].strip())
        return numbers[heading + 1 + wanted]

    def refuse(self, index: int, field: str, problem: str) -> InputError:
        """The error for one value."""
        return InputError(f"{self.path}, line {self.line_of(index)}, field '{field}': {problem}")

    def with_line(self, fields: Sequence[str]) -> CsvText:
        """The file with its tail taken in as a whole line of these fields."""
        names = [name for name in self.frame.columns if name != _INDEX]
        line = pl.DataFrame({name: [field] for name, field in zip(names, fields, strict=True)})
        number = pl.lit(_LAST, pl.UInt32).alias(_INDEX)
        frame = pl.concat([self.frame, line.select(number, pl.all().cast(pl.String))])
        return replace(self, frame=frame, tail=None)

    def require(self, columns: Iterable[str]) -> None:
        """Refuse a file without one of these columns."""
        for column in columns:
            if column not in self.columns:
                where = f"{self.path}, line {self.heading_line}" if self.heading_line else f"{self.path}"
                raise InputError(f"{where}: column '{column}' is missing")

    def integers(self, column: str, low: int, high: int) -> NDArray[np.int64]:
        """A column as int64, every value between `low` and `high`."""
        stripped = pl.col(column).str.strip_chars()
        values = self.frame.select(stripped.cast(pl.Int64, strict=False)).to_series()
        if values.null_count():
            # What int64 cannot hold is a whole number all the same: it is refused for its size.
            whole = stripped.str.contains(f"^(?:{_WHOLE.pattern})$").fill_null(False)
            huge = self.frame.select(whole).to_series()
            self._refuse_wrong(column, (values.is_null() & ~huge).to_numpy(), "a whole number")
            self._refuse_outside(column, values.is_null().to_numpy(), low, high)
        numbers = values.to_numpy()
        self._refuse_outside(column, (numbers < low) | (numbers > high), low, high)
        return numbers

    def floats(
        self, column: str, low: float, high: float, dtype: type[pl.DataType] = pl.Float64, nan: bool = True
    ) -> NDArray:
        """A column as floats, every value between `low` and `high`; `nan` is a value unless told otherwise."""
        values = self.frame.select(pl.col(column).str.strip_chars().cast(dtype, strict=False)).to_series()
        if values.null_count():
            self._refuse_wrong(column, values.is_null().to_numpy(), "a number")
        numbers = values.to_numpy()
        is_nan = np.isnan(numbers)
        if not nan:
            self._refuse_wrong(column, is_nan, "a number")
        self._refuse_outside(column, ~((numbers >= low) & (numbers <= high) | is_nan), low, high)
        return numbers

    def _refuse_wrong(self, column: str, wrong: NDArray[np.bool_], wanted: str) -> None:
        if wrong.any():
            index = int(np.argmax(wrong))
            found = self.frame[column][index]
            raise self.refuse(index, column, "is missing" if found is None else f"'{found}' is not {wanted}")

    def _refuse_outside(self, column: str, wrong: NDArray[np.bool_], low: float, high: float) -> None:
        if wrong.any():
            index = int(np.argmax(wrong))
            raise self.refuse(index, column, _out_of_range(self.frame[column][index].strip(), low, high))


def read_csv_text(path: Path) -> CsvText:
    """Read a file.

    Raises:
        InputError: the file is missing, empty, a Git-LFS pointer, not text, has a column twice, or has a
            line with more fields than its heading.
    """
    data = _read(path)
    comments = tuple(
        (data.count(b"\n", 0, m.start()) + 1, m[0].decode(errors="replace").strip().lstrip("#").strip())
        for m in _COMMENT.finditer(data)
    )
    body, _, last = data.rpartition(b"\n")
    tail = None
    if last.strip() and not last.startswith(b"#"):
        tail = tuple(_fields(path, data.count(b"\n") + 1, last.decode(errors="replace")))
    lines = enumerate(body.split(b"\n"), 1)
    found = next(((n, line) for n, line in lines if line.strip() and not line.startswith(b"#")), None)
    if found is None:
        # Cut inside the heading, or nothing but comments: whoever wants columns will name the missing ones.
        return CsvText(path, comments, 0, (), pl.DataFrame(schema={_INDEX: pl.UInt32}), tail)
    heading_line, heading = found
    _refuse_open_quote(path, data, body)
    require_room(path, heading_line, heading.count(b",") + 1, body.count(b",") + body.count(b"\n"))
    try:
        frame = pl.read_csv(body + b"\n", infer_schema=False, comment_prefix="#")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise _first_ragged_line(path, body, heading) from error
    columns = tuple(name.strip() for name in _fields(path, heading_line, heading.decode(errors="replace")))
    for number, name in enumerate(columns, 1):
        where = f"{path}, line {heading_line}, field {number}"
        if not name and frame[:, number - 1].null_count() < frame.height:
            raise InputError(f"{where}: a column without a name")
        if name and name in columns[: number - 1]:
            raise InputError(f"{where}: the column '{name}' a second time")
    if len(columns) != frame.width:
        raise InputError(f"{path}, line {heading_line}: the heading cannot be read")
    frame.columns = [name or f"\0{number}" for number, name in enumerate(columns)]
    empty = pl.all_horizontal(pl.col(frame.columns).is_null())
    return CsvText(
        path,
        comments,
        heading_line,
        columns,
        frame.with_row_index(_INDEX).cast({_INDEX: pl.UInt32}).filter(~empty),
        tail,
    )


def _read(path: Path) -> bytes:
    data = read_bytes(path, times=4, lines=True)
    if data.startswith(_PACKED):
        raise InputError(f"{path}: compressed; unpack it first")
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    place = data.find(b"\0")
    if place >= 0:
        raise InputError(f"{path}, line {_line_at(data, place)}: a binary file, not text")
    # A file may have been cut inside its last line end.
    data = data[:-1] if data.endswith(b"\r") else data
    place = data.find(b"\r")
    if place >= 0:
        field = data.count(b",", data.rfind(b"\n", 0, place) + 1, place) + 1
        raise InputError(
            f"{path}, line {_line_at(data, place)}, field {field}: a carriage return without a newline after it"
        )
    return data


def require_room(path: Path, heading_line: int, n_columns: int, n_fields: int) -> None:
    """Refuse a CSV of more columns than a table has, or of more fields than memory holds.

    Raises:
        InputError: such a file.
    """
    if n_columns > _MOST_COLUMNS:
        raise InputError(
            f"{path}, line {heading_line}: {n_columns} columns; a table has at most {_MOST_COLUMNS}"
        )
    require_memory(n_fields * _FIELD_BYTES, f"{path}: {n_fields} fields")


def _line_at(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1


def _fields(path: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise InputError(f"{path}, line {number}: not CSV: {error}") from error


def _refuse_open_quote(path: Path, data: bytes, body: bytes) -> None:
    """A quote that runs on over the line end: it would swallow the lines after it, or shift their numbers."""
    if b'"' not in data:
        return
    for number, line in enumerate(body.split(b"\n"), 1):
        if line.count(b'"') % 2 and not line.startswith(b"#"):
            field = len(_fields(path, number, line.decode(errors="replace")))
            raise InputError(f"{path}, line {number}, field {field}: a quote that is not closed")


def _first_ragged_line(path: Path, body: bytes, heading: bytes) -> InputError:
    width = len(_fields(path, 0, heading.decode(errors="replace")))
    for number, line in enumerate(body.split(b"\n"), 1):
        if line.startswith(b"#") or not line.strip():
            continue
        fields = _fields(path, number, line.decode(errors="replace"))
        if len(fields) > width:
            return InputError(
                f"{path}, line {number}, field {width + 1}: more fields than the {width} columns named"
            )
        try:
            line.decode()
        except UnicodeDecodeError as error:
            field = line.count(b",", 0, error.start) + 1
            return InputError(f"{path}, line {number}, field {field}: not UTF-8 text")
    return InputError(f"{path}: neither CSV nor UTF-8 text")


def key_values(path: Path, line: int, text: str) -> Words:
    """The `key=value` words of a comment line."""
    pairs = (word.split("=", 1) for word in text.split() if "=" in word)
    return Words(path, {name: (line, value) for name, value in pairs})
