"""From the files of other tools to a trace folder.

Three families: a BigMoeOnEdge engine's `route_trace v1` with its metrics and io trace; arrays of ids, weights and
scores; long tables of routings, the JSON of fingerprints among them. A file is recognised by its content, its name
counts only where that is no help. What arrays and tables do not say of their model comes from a JSON file beside
them or from options (`simlab.trace.facts`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from simlab.errors import InputError
from simlab.trace import arrays, bmoe_metrics, io_csv, route_csv
from simlab.trace.facts import Facts, read_facts
from simlab.trace.fingerprint import is_fingerprint, read_fingerprint
from simlab.trace.json_text import JSON_TIMES, parse_json, read_json
from simlab.trace.provenance import import_provenance
from simlab.trace.reading import read_bytes
from simlab.trace.route_tables import trace_of_route
from simlab.trace.routings import Routings, trace_of
from simlab.trace.schema import table_schema
from simlab.trace.store import TraceWriter, check_output, prepare_folder
from simlab.trace.table_files import read_csv_table, read_json_lines, read_parquet_table
from simlab.trace.tables import looks_like_table, routings_of_table
from simlab.types import TraceHeader

_FLUSH_ROWS, _FLUSH_SCORES = 1 << 16, 1 << 25
_HEAD = 4096
_ENGINE_KINDS = ("route trace", "metrics file", "io trace")


def import_files(
    files: Sequence[str], out: str, force: bool = False, facts: Mapping[str, Any] | None = None
) -> Path:
    """Make a trace of the files of one run, in any order.

    Args:
        files: a route trace and, where given, its metrics and io trace; or arrays; or one table. A JSON object
            among them that is no fingerprint is the model facts of the others; without one, `X.json` beside
            `X.npz` (or whatever the first file is called) is.
        out: the trace folder to write; nothing is written unless every file could be read.
        force: replace what `out` holds.
        facts: what arrays and tables do not say of their model, by the names of `simlab.trace.facts.Facts`;
            they beat those of the JSON file.

    Raises:
        InputError: a file cannot be used, a fact is missing, or `out` exists.
    """
    if os.path.realpath(out) in map(os.path.realpath, files):
        raise InputError(f"--out {out}: is one of the files to import; name another folder")
    check_output(out, force)
    header, frames = read_run(files, facts or {})
    header = replace(header, provenance=import_provenance([Path(file) for file in files]))
    folder = prepare_folder(out, force)
    _write(folder, header, frames)
    return folder


def read_run(files: Sequence[str], facts: Mapping[str, Any]) -> tuple[TraceHeader, dict[str, pl.DataFrame]]:
    """The header and the tables of the files of one run, in memory; columns nobody knows are left out.

    Raises:
        InputError: a file cannot be used, or a fact is missing.
    """
    by_kind: dict[str, list[Path]] = {}
    for name in files:
        path = Path(name)
        kind = _kind(path, bool(facts.get("columns")))
        others = by_kind.setdefault(kind, [])
        if others and kind != "npy file":
            raise InputError(f"{path}: a second {kind} beside {others[0]}; a trace is made of one")
        others.append(path)
    sidecars = by_kind.pop("model facts", [])
    if not by_kind:
        raise InputError(f"{files[0]}: model facts, and no routings among the files")
    if any(kind in by_kind for kind in _ENGINE_KINDS):
        own = {name: value for name, value in facts.items() if name != "route"}
        found = _engine_files(files[0], by_kind, sidecars, own)
        header, tables = trace_of_route(found, read_facts(None, {"route": facts.get("route")}).route)
    else:
        if len(by_kind) > 1:
            one, two = (paths[0] for paths in list(by_kind.values())[:2])
            raise InputError(f"{two}: another kind of file than {one}; a trace is made of one")
        kind, paths = next(iter(by_kind.items()))
        beside = paths[0].with_suffix(".json")
        if not sidecars and beside != paths[0] and beside.is_file():
            sidecars = [beside]
        read = read_facts(sidecars[0] if sidecars else None, facts)
        if read.axes is not None and kind not in ("npy file", "array file"):
            raise read.refuse(
                "axes", f"{paths[0]} is no array, and its rows say which layer and token they are of"
            )
        header, tables = trace_of(_READERS[kind](paths, read), read)
    return header, {table: _frame(table, columns, header) for table, columns in tables.items()}


def _engine_files(
    first: str, by_kind: Mapping[str, list[Path]], sidecars: list[Path], facts: Mapping[str, Any]
) -> dict[str, Path]:
    if "route trace" not in by_kind:
        raise InputError(f"{first}: no route trace among the files, and a trace cannot be made without one")
    for kind, paths in by_kind.items():
        if kind not in _ENGINE_KINDS:
            raise InputError(
                f"{paths[0]}: another kind of file than {by_kind['route trace'][0]}, a route trace"
            )
    given = [name for name, value in facts.items() if value is not None]
    if given or sidecars:
        what = str(sidecars[0]) if sidecars else f"--{given[0].replace('_', '-')}"
        raise InputError(f"{what}: model facts are for arrays and tables; a route trace has its own")
    return {kind: paths[0] for kind, paths in by_kind.items()}


# ---------------------------------------------------------------------------------------------------------
# Kinds


def _kind(path: Path, with_columns: bool) -> str:
    head = read_bytes(path, _HEAD)
    if arrays.is_arrays(path, head):
        return "npy file" if head.startswith(arrays.NPY) or path.suffix == ".npy" else "array file"
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return "parquet table"
    first = head.split(b"\n", 1)[0].decode(errors="replace").lstrip("\ufeff").strip()
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return _json_kind(path)
    comment = first.lstrip("#").strip()
    if comment.startswith(bmoe_metrics.TAG) or first.startswith(bmoe_metrics.OLDEST_HEADING):
        return "metrics file"
    if comment == io_csv.TAG:
        return "io trace"
    if comment.startswith("compute_trace"):
        raise InputError(
            f"{path}, line 1: a compute trace; simlab imports {route_csv.TAG}, its metrics and its io_trace"
        )
    # Everything else goes to the route reader, whose refusals say what is wrong with it.
    is_table = (
        not comment.startswith("route_trace") and first and (with_columns or looks_like_table(_heading(head)))
    )
    return "CSV table" if is_table else "route trace"


def _heading(head: bytes) -> list[str]:
    """Column names of what may be a CSV, from its beginning."""
    lines = (line.strip() for line in head.removeprefix(b"\xef\xbb\xbf").splitlines())
    first = next((line for line in lines if line and not line.startswith(b"#")), b"")
    return [name.strip().strip('"').strip() for name in first.decode(errors="replace").split(",")]


def _json_kind(path: Path) -> str:
    """JSON text: routings of a fingerprint, model facts, or a table of one object per line."""
    if path.suffix in (".jsonl", ".ndjson"):
        return "JSONL table"
    data = read_bytes(path, times=JSON_TIMES)
    try:
        content = parse_json(data, str(path))
    except InputError:
        # Several objects, one a line, are no JSON value; what is neither is refused there with its line.
        first = data.lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0]
        try:
            is_line = isinstance(parse_json(first, str(path)), dict)
        except InputError:
            is_line = False
        if is_line:
            return "JSONL table"
        raise
    if is_fingerprint(content):
        return "fingerprint"
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON list; a table has one JSON object per line")
    names = {name.lower() for name in content}
    return "JSONL table" if looks_like_table(list(names)) else "model facts"


def _read_fingerprint(paths: Sequence[Path], facts: Facts) -> Routings:
    return read_fingerprint(paths[0], read_json(paths[0]), facts)


_READERS = {
    "npy file": arrays.read_arrays,
    "array file": arrays.read_arrays,
    "CSV table": lambda paths, facts: routings_of_table(read_csv_table(paths[0], facts), facts),
    "parquet table": lambda paths, facts: routings_of_table(read_parquet_table(paths[0], facts), facts),
    "JSONL table": lambda paths, facts: routings_of_table(read_json_lines(paths[0], facts), facts),
    "fingerprint": _read_fingerprint,
}


# ---------------------------------------------------------------------------------------------------------
# Writing


def _frame(table: str, columns: dict[str, Any], header: TraceHeader) -> pl.DataFrame:
    """Columns in the types of the trace's schema, so that nothing can fail once the folder is made."""
    schema = table_schema(table, header.n_expert, header.n_expert_used)
    return pl.DataFrame(columns, schema={name: schema[name] for name in columns}, strict=True)


def _write(folder: Path, header: TraceHeader, frames: dict[str, pl.DataFrame]) -> None:
    routing = frames["routing"]
    # The writer fills the score columns with nulls, which take as much memory as scores.
    n_rows = max(1, min(_FLUSH_ROWS, _FLUSH_SCORES // header.n_expert))
    with TraceWriter(folder, header, header.n_expert_used) as writer:
        if "reads" in frames:
            writer.add("reads", frames["reads"].to_dict())
        for start in range(0, routing.height, n_rows):
            writer.add("routing", routing.slice(start, n_rows).to_dict())
            writer.flush()
        # Last, because a reader trusts the graphs the tokens table names.
        writer.add("tokens", frames["tokens"].to_dict())
