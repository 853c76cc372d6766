"""A trace on disk: written in parts by rename, read lazily, checked on open.

A recording that was killed leaves whole parts behind; opening it keeps the graphs that every table has
complete and says so in one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import polars as pl

from simlab.bounds import require_memory
from simlab.errors import InputError, RunError, SimlabWarning
from simlab.files import TEMPORARY, replacing
from simlab.locks import locked
from simlab.trace.header import HeaderFile, read_header, write_header
from simlab.trace.parts import collect, part_sha256, scan_parts
from simlab.trace.reading import one_line
from simlab.trace.schema import TABLES, table_schema
from simlab.trace.whole import check_routing, complete_graphs
from simlab.types import TraceHeader

BLOCK_ROWS = 4096
"""Rows of a row group, and what a replay decodes at once."""
_DECODED_BYTES = 256 << 20
_ROW_BYTES, _SLOT_BYTES = 150, 40
"""Memory of a replay for each row and each of its slots, whatever it replays; measured."""
_KEPT_BYTES = 32 << 20
"""Scores up to this size are decoded once and kept with their trace."""


@dataclass(frozen=True)
class Trace:
    """An opened trace. The tables are lazy polars frames in execution order."""

    path: Path
    header: TraceHeader
    width: int
    """Slots per routing row."""
    n_rows: int
    """Routing rows."""
    routing: pl.LazyFrame
    reads: pl.LazyFrame
    tokens: pl.LazyFrame

    @cached_property
    def has_scores(self) -> bool:
        """Whether every routing row carries the scores its graph sorted."""
        if not self.n_rows:
            return False
        return self.null_count("scores") == 0

    def null_count(self, column: str) -> int:
        """Rows of the routing table without a value there; a null takes the memory of scores, so not all at once."""
        n = max(1, _DECODED_BYTES // (4 * self.header.n_expert))
        return sum(self.values(column, start, n).null_count() for start in range(0, self.n_rows, n))

    @cached_property
    def _all_scores(self) -> pl.Series | None:
        """The scores of a short trace, kept, since finding out whether any are missing decodes them all."""
        if 4 * self.n_rows * self.header.n_expert > _KEPT_BYTES:
            return None
        return self.collect("routing", self.routing.select("scores")).to_series().rechunk()

    def values(self, column: str, start: int, n: int) -> pl.Series:
        """A column of the routing table, `n` rows from `start` on or as many as there are.

        Raises:
            InputError: a part of the table cannot be read.
        """
        if column == "scores" and self._all_scores is not None:
            return self._all_scores.slice(start, n)
        return self.collect("routing", self.routing.select(column).slice(start, n)).to_series()

    def collect(self, table: str, frame: pl.LazyFrame) -> pl.DataFrame:
        """Run a query on one of the tables.

        Opening a trace reads little of it, so a damaged part may only show here.

        Raises:
            InputError: a part of the table cannot be read.
        """
        return collect(self.path, table, frame)


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace folder.

    Raises:
        InputError: no such folder, a header this version cannot read or that contradicts itself or the tables, a
            part that is missing or is a link to somewhere else, a table whose rows differ from the header's count, or
            rows out of order, of no known place, of a layer whose entry bytes are unknown, or more than memory holds.
    """
    folder = Path(path)
    file = read_header(folder)
    header, width = file.header, file.width
    frames: dict[str, pl.LazyFrame] = {}
    changed = [] if file.as_written else [folder / "header.json"]
    for table in TABLES:
        schema = table_schema(table, header.n_expert, width)
        frames[table], others = scan_parts(folder, table, schema, file.part_sha256)
        changed += others
    if file.rows is None:
        frames = complete_graphs(folder, frames)
    else:
        for table, frame in frames.items():
            found = _count(folder, table, frame)
            if found != file.rows[table]:
                raise InputError(f"{folder}/{table}: {found} rows, header.json promises {file.rows[table]}")
    n_rows = _count(folder, "routing", frames["routing"])
    on_disk = sum(part.stat().st_size for part in (folder / "routing").glob("part-*.parquet"))
    require_memory(n_rows * (_ROW_BYTES + width * _SLOT_BYTES), f"{folder}/routing: {n_rows} rows", on_disk)
    check_routing(folder, header, frames["routing"])
    trace = Trace(folder, header, width, n_rows, **frames)
    if changed:
        _warn_of_changes(changed)
    return trace


def _warn_of_changes(changed: list[Path]) -> None:
    others = f" (and {len(changed) - 1} other parts)" if len(changed) > 1 else ""
    field = "header_sha256" if changed[0].name == "header.json" else "part_sha256 in header.json"
    warnings.warn(
        f"{changed[0]}{others}: not what was recorded, its {field} differs; if nobody edited it, it is damaged: "
        "copy the trace again",
        SimlabWarning,
        stacklevel=3,
    )


def _count(folder: Path, table: str, frame: pl.LazyFrame) -> int:
    return collect(folder, table, frame.select(pl.len())).item()


def check_output(path: str | os.PathLike[str], force: bool) -> Path:
    """Refuse an output that cannot be made: without `force` any that exists, with it all but a trace nobody writes.

    Raises:
        InputError: `path` may not be written.
    """
    target = Path(path)
    try:
        if not target.parent.is_dir():
            raise InputError(f"--out {target}: {target.parent} is not a folder")
        os.lstat(target)
        if not force:
            raise InputError(f"--out {target}: exists already; add --force to replace it")
        if target.is_symlink() or not target.is_dir():
            raise InputError(f"--out {target}: is not a trace folder; --force does not remove it")
        if not _only_a_trace(target):
            raise InputError(f"--out {target}: a folder that is not a trace; --force does not remove it")
        with locked(target, f"--out {target}"):
            pass
    except FileNotFoundError:
        return target
    except OSError as error:  # a name too long, a folder that may not be entered
        raise InputError(f"--out {target}: {error.strerror}") from error
    return target


def _only_a_trace(folder: Path) -> bool:
    """Whether a folder holds a trace, finished or not, and nothing besides; or nothing at all."""
    # A header that was not finished stands under a temporary name.
    names = {"header.json" if entry.match(TEMPORARY) else entry.name for entry in folder.iterdir()}
    if names - {"header.json", *TABLES}:
        return False
    tables = [folder / table for table in TABLES if table in names]
    parts = [part for table in tables if table.is_dir() for part in table.iterdir()]
    known = all(part.match("part-*.*") or part.match(TEMPORARY) for part in parts)
    return ("header.json" in names or not parts) and all(table.is_dir() for table in tables) and known


def prepare_folder(path: str | os.PathLike[str], force: bool) -> Path:
    """Refuse what `check_output` refuses and, with `force`, remove the trace that was there. Creates nothing.

    Raises:
        InputError: `path` may not be written.
        RunError: the trace there could not be removed.
    """
    target = check_output(path, force)
    if target.exists():
        try:
            with locked(target, f"--out {target}"):
                # The header last: what is left if this is interrupted is still known for a trace.
                for table in TABLES:
                    shutil.rmtree(target / table, ignore_errors=True)
                shutil.rmtree(target)
        except OSError as error:
            raise RunError(f"--out {target}: cannot be replaced: {error.strerror}") from error
    return target


class TraceWriter:
    """Writes a trace part by part. Use as a context manager; `close` marks the trace complete.

    The folder is locked until then, so that no other command replaces or writes it meanwhile.
    `add` takes column arrays of equal length; a flush renames whole parts into place, the tokens table
    last, so that whatever is visible of the other tables is complete up to the last token seen.
    """

    def __init__(self, folder: Path, header: TraceHeader, width: int) -> None:
        self.folder = folder
        self.header = dataclasses.replace(header, complete=False)
        self.width = width
        self._pending: dict[str, list[pl.DataFrame]] = {table: [] for table in TABLES}
        self._rows: dict[str, int] = dict.fromkeys(TABLES, 0)
        self._parts = 0
        self._sha256: dict[str, str] = {}
        self._lock = contextlib.ExitStack()
        self._guard(self._create, "nothing was written")

    def _create(self) -> None:
        """Make the folder; on failure, leave nothing of it behind, so that another try finds the way clear."""
        folders = [self.folder / table for table in TABLES]
        new = [f for f in (*folders, self.folder, *self.folder.parents) if not f.exists()]
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locked(self.folder, str(self.folder)))
            if (self.folder / "header.json").exists():
                raise InputError(f"{self.folder}: holds a trace already; remove it or write elsewhere")
            write_header(self.folder, HeaderFile(self.header, None, self.width, {}))
        except BaseException:
            self._lock.close()
            for folder in new:  # the deepest first, and only if empty
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise

    def _guard(self, action: Any, left: str = "what was written before is readable") -> None:
        try:
            action()
        except (OSError, pl.exceptions.PolarsError) as error:
            # Polars reports a full disk as an error of its own, without an errno.
            why = getattr(error, "strerror", None) or one_line(error)
            raise RunError(f"{self.folder}: writing the trace failed: {why}; {left}") from error

    def add(self, table: str, columns: Mapping[str, Any]) -> None:
        """Append rows to a table; columns not given are null."""
        schema = table_schema(table, self.header.n_expert, self.width)
        given = {n: columns[n] for n in schema if n in columns}
        frame = pl.DataFrame(given, schema={n: schema[n] for n in given})
        missing = [pl.lit(None, dtype=schema[n]).alias(n) for n in schema if n not in given]
        self._pending[table].append(frame.with_columns(missing).select(list(schema)))

    def flush(self) -> None:
        """Make everything added so far visible to readers. Call between graphs."""
        self._guard(self._flush)

    def _flush(self) -> None:
        name = f"part-{self._parts:06d}.parquet"
        wrote = False
        for table in TABLES:
            if not self._pending[table]:
                continue
            frame = pl.concat(self._pending[table])
            target = self.folder / table / name
            with replacing(target) as temporary:
                frame.write_parquet(temporary, compression="zstd", statistics=True, row_group_size=BLOCK_ROWS)
                sha256 = part_sha256(temporary)
            self._rows[table] += frame.height
            self._sha256[f"{table}/{name}"] = sha256
            self._pending[table] = []
            wrote = True
        self._parts += wrote

    def close(self) -> None:
        """Flush, mark the trace complete and give the folder free."""
        with self._lock:
            self.flush()
            complete = dataclasses.replace(self.header, complete=True)
            file = HeaderFile(complete, self._rows, self.width, self._sha256)
            self._guard(lambda: write_header(self.folder, file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            # The run failed; keep what is whole, and leave the header saying that it did not finish.
            with self._lock:
                self.flush()
