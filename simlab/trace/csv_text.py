"""CSV files with `#` comment lines, read as text columns that know the line every value stands on.

The fast path is one vectorised parse; lines are only counted when something is to be reported.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.errors import InputError

_COMMENT = re.compile(rb"(?m)^#[^\n]*")
_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class CsvText:
    """One CSV file, all values still text.

    `frame` has the file's columns and `row`, the number of the data line; `tail` holds the fields of a last
    line without a newline, which may have been cut in the middle, and is not part of `frame`.
    """

    path: Path
    comments: tuple[tuple[int, str], ...]
    """(line number, text after the `#`)."""
    columns: tuple[str, ...]
    frame: pl.DataFrame
    tail: tuple[str, ...] | None

    def line_of(self, index: int) -> int:
        """Line number in the file of row `index` of `frame`; the row after the last is `tail`."""
        wanted = int(self.frame["row"][index]) if index < self.frame.height else -1
        lines = self.path.read_bytes().split(b"\n")
        if wanted < 0:
            return len(lines)
        numbers = [n for n, line in enumerate(lines, 1) if not line.startswith(b"#")]
        heading = next(i for i, n in enumerate(numbers) if lines[n - 1].strip())
        return numbers[heading + 1 + wanted]

    def refuse(self, index: int, field: str, problem: str) -> InputError:
        """The error for one value."""
        return InputError(f"{self.path}, line {self.line_of(index)}, field '{field}': {problem}")

    def integers(self, column: str, low: int | None = None, high: int | None = None) -> NDArray[np.int64]:
        """A column as int64, every value between `low` and `high`."""
        text = self.frame[column]
        values = text.str.strip_chars().cast(pl.Int64, strict=False)
        self._refuse_null(column, text, values, "a whole number")
        found = values.to_numpy()
        outside = np.zeros(len(found), bool)
        if low is not None:
            outside |= found < low
        if high is not None:
            outside |= found > high
        if outside.any():
            index = int(np.argmax(outside))
            limits = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise self.refuse(index, column, f"{found[index]} is out of range, must be {limits}")
        return found

    def floats(self, column: str, dtype: type[pl.DataType] = pl.Float64) -> NDArray:
        """A column as floats; `nan` is a value."""
        text = self.frame[column]
        values = text.str.strip_chars().cast(dtype, strict=False)
        self._refuse_null(column, text, values, "a number")
        return values.to_numpy()

    def _refuse_null(self, column: str, text: pl.Series, values: pl.Series, wanted: str) -> None:
        if values.null_count():
            index = int(values.is_null().arg_max() or 0)
            found = text[index]
            raise self.refuse(index, column, "is missing" if found is None else f"'{found}' is not {wanted}")


def read_csv_text(path: Path) -> CsvText:
    """Read a file.

    Raises:
        InputError: the file is missing, empty, a Git-LFS pointer, not text, or has a line with more fields
            than its heading.
    """
    data = _read(path)
    comments = tuple(
        (data.count(b"\n", 0, m.start()) + 1, m[0].decode(errors="replace").strip().lstrip("#").strip())
        for m in _COMMENT.finditer(data)
    )
    body, _, last = data.rpartition(b"\n")
    last_line = last.decode(errors="replace")
    tail = tuple(next(csv.reader([last_line]), [])) if last.strip() and not last.startswith(b"#") else None
    heading = next((line for line in body.split(b"\n") if line.strip() and not line.startswith(b"#")), None)
    if heading is None:
        # Cut inside the heading, or nothing but comments: whoever wants columns will name the missing ones.
        return CsvText(path, comments, (), pl.DataFrame({"row": []}, schema={"row": pl.UInt32}), tail)
    try:
        frame = pl.read_csv(body + b"\n", infer_schema=False, comment_prefix="#")
    except pl.exceptions.PolarsError as error:
        raise _first_ragged_line(path, body, heading) from error
    columns = tuple(name.strip() for name in frame.columns)
    frame.columns = list(columns)
    frame = frame.with_row_index("row").filter(~pl.all_horizontal(pl.col(columns).is_null()))
    return CsvText(path, comments, columns, frame, tail)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not data.strip():
        raise InputError(f"{path}: the file is empty")
    if data.startswith(_GIT_LFS):
        raise InputError(f"{path}, line 1: a Git-LFS pointer, not the data; run 'git lfs pull' to fetch it")
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    if b"\0" in data[:4096]:
        raise InputError(f"{path}: a binary file, not text")
    return data


def _first_ragged_line(path: Path, body: bytes, heading: bytes) -> InputError:
    width = len(next(csv.reader([heading.decode(errors="replace")])))
    for number, line in enumerate(body.decode(errors="replace").split("\n"), 1):
        if line.startswith("#") or not line.strip():
            continue
        fields = next(csv.reader([line]))
        if len(fields) > width:
            return InputError(
                f"{path}, line {number}, field {width + 1}: more fields than the {width} columns named"
            )
        if line.count('"') % 2:
            return InputError(f"{path}, line {number}, field {len(fields)}: a quote that is not closed")
    return InputError(f"{path}: neither CSV nor UTF-8 text")


def key_values(text: str) -> dict[str, str]:
    """The `key=value` words of a comment line."""
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
