"""The parquet parts of a trace's table: known to be readable before this process reads them.

A damaged part can end the process that reads it. So the writer puts the SHA-256 of each part into header.json
(`part_sha256`), and a part that still has it is read at once: hashing costs a second per GB and starts nothing. Every
other part, be it of an unfinished recording, of another tool, edited or damaged, is read in a child process first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from simlab.errors import InputError
from simlab.trace.parquet_probe import probe_parquet
from simlab.trace.reading import check_inside, one_line

POLARS_FAILURES = (Exception, pl.exceptions.PanicException)
"""What polars raises on a damaged file; a panic of its parquet reader is no Exception."""


def part_sha256(part: Path) -> str:
    """The SHA-256 of a file, as 64 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def collect(folder: Path, table: str, frame: pl.LazyFrame) -> pl.DataFrame:
    """Run a query on a table.

    Raises:
        InputError: a part of the table cannot be read.
    """
    try:
        return frame.collect()
    except POLARS_FAILURES as error:
        raise InputError(f"{folder}/{table}: cannot be read: {one_line(error)}") from error


def scan_parts(
    folder: Path, table: str, schema: Mapping[str, pl.DataType], recorded: Mapping[str, str]
) -> tuple[pl.LazyFrame, list[Path]]:
    """A table's parts as one lazy frame, and those that are not what was recorded, though they can be read.

    `recorded` maps "table/part" to a SHA-256; parts that it does not list are as good as any.

    Raises:
        InputError: a part is missing, leads out of the trace, cannot be read, or has not the columns of `schema`.
    """
    parts = sorted((folder / table).glob("part-*.parquet"))
    names = {f"{table}/{part.name}" for part in parts}
    for name in sorted(recorded):
        if name.startswith(f"{table}/") and name not in names:
            raise InputError(
                f"{folder}/{name}: is missing, though header.json lists it; copy the trace again"
            )
    for part in parts:
        check_inside(folder, part)
    if not parts:
        return pl.LazyFrame(schema=dict(schema)), []
    changed = []
    for part in parts:
        if not part.is_file():  # a pipe would be waited for
            raise InputError(f"{part}: not a file")
        sha256 = recorded.get(f"{table}/{part.name}")
        as_recorded = sha256 is not None and sha256 == _read_sha256(part)
        _check_part(part, schema, as_recorded)
        if sha256 is not None and not as_recorded:
            changed.append(part)
    return pl.scan_parquet(parts, glob=False).select(list(schema)), changed


def _read_sha256(part: Path) -> str:
    try:
        return part_sha256(part)
    except OSError as error:
        raise InputError(f"{part}: cannot be read: {error.strerror}") from error


def _check_part(part: Path, schema: Mapping[str, pl.DataType], as_recorded: bool) -> None:
    if not as_recorded:
        _probe(part, None)
    try:
        found = pl.read_parquet_schema(part)
    except POLARS_FAILURES as error:
        raise _unreadable(part, one_line(error)) from error
    for name, dtype in schema.items():
        if name not in found:
            raise InputError(f"{part}: column '{name}' is missing")
        if found[name] != dtype:
            raise InputError(f"{part}: column '{name}' is {found[name]}, should be {dtype}")
    if not as_recorded:
        _probe(part, list(schema))


def _probe(part: Path, columns: list[str] | None) -> None:
    problem = probe_parquet(part, columns, times=2)
    if problem is not None:
        raise _unreadable(part, problem)


def _unreadable(part: Path, problem: str) -> InputError:
    return InputError(f"{part}: not a readable parquet file: {problem}; copy the trace again, or record anew")
