"""`header.json`: reading, checking and writing.

A field's type is the one `TraceHeader` declares, so a new field is checked without a word here; `_LIMITS` has
the range of those that are not legal everywhere. Fields nobody knows are left alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from simlab.cells import parse_budget, resolve_budget
from simlab.errors import InputError
from simlab.files import replacing
from simlab.trace.csv_text import EXACT, MAX_ENTRY_BYTES, MAX_EXPERT, MAX_LAYER
from simlab.trace.json_text import read_json
from simlab.trace.reading import check_inside, shown
from simlab.trace.schema import SCHEMA_VERSION, TABLES
from simlab.types import TraceHeader

_MISSING = dataclasses.MISSING
_REQUIRED = (
    "schema_version",
    *(f.name for f in dataclasses.fields(TraceHeader) if f.default is f.default_factory is _MISSING),
)
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")
_PART = re.compile(rf"(?:{'|'.join(TABLES)})/part-[0-9]+\.parquet")
_BY_LAYER = ("entry_bytes", "window_bytes", "dense_bytes")
_INT64 = (1 << 63) - 1
_FLOAT32 = 3.4e38
_LIMITS: dict[str, tuple[float, float]] = {
    "n_layer": (1, MAX_LAYER + 1),
    "n_expert": (1, MAX_EXPERT),
    "n_expert_used": (1, MAX_EXPERT),
    "routing_width": (1, MAX_EXPERT),
    "entry_bytes": (1, MAX_ENTRY_BYTES),
    "window_bytes": (0, EXACT),
    "dense_bytes": (0, EXACT),
    "weight_rule.clamp_min": (0, 1),
    "weight_rule.scale": (1e-6, 1e6),
}
"""Smallest and largest value of a field or of each of its items; otherwise any size, any float32."""


class _WrongField(Exception):
    """What is wrong with a field; its text begins with the field's name."""


@dataclass(frozen=True)
class HeaderFile:
    """What `header.json` holds: the header, and what only the reader of the tables needs."""

    header: TraceHeader
    rows: Mapping[str, int] | None
    """Rows of each table; None while the recording goes on."""
    width: int
    """Slots per routing row (`routing_width`)."""
    part_sha256: Mapping[str, str]
    """SHA-256 of each part, by "table/part"; empty while the recording goes on, or from a tool that writes none."""
    as_written: bool = True
    """Whether the fields have the `header_sha256` that was written with them, or none was."""


def header_to_json(file: HeaderFile) -> str:
    """The header as JSON text."""
    fields = dataclasses.asdict(file.header)
    for name in _BY_LAYER:
        if fields[name] is not None:
            fields[name] = {str(k): v for k, v in sorted(fields[name].items())}
    fields["rows"] = dict(file.rows) if file.rows is not None else None
    fields["routing_width"] = file.width
    fields["part_sha256"] = dict(file.part_sha256)
    fields["header_sha256"] = _sha256(fields)
    return json.dumps(fields, indent=1) + "\n"


def _sha256(fields: Mapping[str, Any]) -> str:
    """Of all fields but `header_sha256`, whatever their order and the file's layout."""
    rest = {name: value for name, value in fields.items() if name != "header_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_header(folder: Path, file: HeaderFile) -> None:
    """Write `header.json` by rename, so that a reader never sees half of one."""
    with replacing(folder / "header.json") as temporary:
        temporary.write_text(header_to_json(file))


def read_header(folder: Path) -> HeaderFile:
    """Read and check the header of a trace.

    Raises:
        InputError: there is none, or one that cannot be used; names the field.
    """
    path = folder / "header.json"
    try:
        if not folder.exists():
            raise InputError(f"{folder}: no such trace")
        if not path.is_file():
            raise InputError(f"{folder}: not a trace, it holds no header.json")
        check_inside(folder, path)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error
    fields = read_json(path, nan=False)
    if not isinstance(fields, dict):
        raise InputError(f"{path}: not a JSON object")
    for name in _REQUIRED:
        if name not in fields:
            raise InputError(f"{path}: field '{name}' is missing")
    version = fields["schema_version"]
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: field 'schema_version': schema_version {shown(version)}, this simlab reads {SCHEMA_VERSION}; "
            "record or import again"
        )
    try:
        file = _parse(fields)
    except _WrongField as error:
        raise InputError(f"{path}: {error}") from error
    written = fields.get("header_sha256")
    return file if written is None else dataclasses.replace(file, as_written=written == _sha256(fields))


def _parse(fields: dict[str, Any]) -> HeaderFile:
    types = get_type_hints(TraceHeader)
    header = TraceHeader(**{name: _read(name, fields[name], types[name]) for name in types if name in fields})
    rows: dict[str, int] | None = _read("rows", fields.get("rows"), dict[str, int] | None)
    for table in TABLES:
        if rows is not None and table not in rows:
            raise _WrongField(f"field 'rows': has no '{table}'")
    width = _read("routing_width", fields.get("routing_width", header.n_expert_used), int)
    if not header.entry_bytes:
        raise _WrongField("field 'entry_bytes': entry_bytes lists no MoE layer")
    if header.n_expert_used > header.n_expert:
        raise _WrongField(
            f"field 'n_expert_used': n_expert_used {header.n_expert_used} of n_expert {header.n_expert}"
        )
    if width > header.n_expert:
        raise _WrongField(f"field 'routing_width': {width} of n_expert {header.n_expert}")
    for name in _BY_LAYER:
        for layer in getattr(header, name) or ():
            if layer >= header.n_layer:
                raise _WrongField(f"field '{name}': layer {layer} of n_layer {header.n_layer}")
    for layer, windows in (header.window_bytes or {}).items():
        if len(windows) != header.n_expert:
            raise _WrongField(
                f"field 'window_bytes': layer {layer} has {len(windows)} of n_expert {header.n_expert}"
            )
    if header.expert_bytes > _INT64 >> 2:
        raise _WrongField(f"field 'entry_bytes': {header.expert_bytes} in all, must be below 2^61")
    sha256: dict[str, str] | None = _read("part_sha256", fields.get("part_sha256"), dict[str, str] | None)
    for name in sha256 or {}:
        if not _PART.fullmatch(name):
            raise _WrongField(f"field 'part_sha256': {shown(name)} is no part of a table")
    _check_agreement(header, width)
    return HeaderFile(header, rows, width, sha256 or {})


def _check_agreement(header: TraceHeader, width: int) -> None:
    """Refuse fields that contradict each other: slots per row, and the budget in words and in bytes."""
    k: int | None = header.n_expert_used
    steps = (header.route or "?").split("+")
    if "top_k" in steps:
        k = int(header.knobs.get("top_k.k", header.knobs.get("k", k)))
    elif header.route is None or any("@" in step for step in steps):
        k = None  # a policy nobody knows may have changed the width
    if k not in (None, width):
        raise _WrongField(
            f"field 'n_expert_used': {k} experts per token under route {header.route}, but the routing table has "
            f"{width} slots per row (routing_width)"
        )
    if header.budget is None or header.budget_bytes is None:
        return
    try:
        budget = parse_budget(header.budget)
        if budget.kind == "cycles" and k is None:
            return
        found = resolve_budget(budget, header.scope or "global", header, k or header.n_expert_used)
    except InputError as error:
        raise _WrongField(f"field 'budget': {error}") from error
    if found.total_bytes != header.budget_bytes:
        raise _WrongField(
            f"field 'budget': {header.budget} comes to {found.total_bytes} bytes for this model, but budget_bytes "
            f"is {header.budget_bytes}"
        )


def _read(name: str, value: Any, kind: Any) -> Any:
    """One value as the type declared for it; `name` is its field and, after a dot, its place in there."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        return _read(name, value, next(option for option in inner if option is not NoneType))
    if origin is Literal:
        if value not in inner or not isinstance(value, str):
            raise _wrong(name, value, f"one of {', '.join(inner)}")
        return value
    if origin in (dict, Mapping):
        return _read_object(name, value, *inner)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        return tuple(_read(name, item, inner[0]) for item in value)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(name, value, kind)
    if kind is str:
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise _wrong(name, value, "a text in UTF-8")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value
    return _read_number(name, value, kind)


def _read_number(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    numbers, wanted = (int, "a whole number") if kind is int else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, numbers):
        raise _wrong(name, value, wanted)
    otherwise = (0, _INT64) if kind is int else (-_FLOAT32, _FLOAT32)
    low, high = _LIMITS.get(name, _LIMITS.get(name.split(".")[0], otherwise))
    if not low <= value <= high:
        raise _wrong(name, value, f"from {low:.15g} to {high:.15g}")
    return value


def _read_object(name: str, value: Any, key_kind: Any, item_kind: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    if key_kind is not int:
        return {_read(name, key, str): _read(f"{name}.{key}", item, item_kind) for key, item in value.items()}
    for key in value:
        if not _LAYER.fullmatch(key):
            raise _WrongField(f"field '{name}': {shown(key)} is not a layer number")
    return {int(key): _read(f"{name}.{key}", item, item_kind) for key, item in value.items()}


def _read_dataclass(name: str, value: Any, kind: Any) -> Any:
    """A field that is a dataclass of its own; unlike in the header, a part nobody knows changes its meaning."""
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    types = get_type_hints(kind)
    for part in value:
        if part not in types:
            raise _WrongField(f"field '{name}.{part}': unknown to this simlab")
    return kind(**{part: _read(f"{name}.{part}", item, types[part]) for part, item in value.items()})


def _wrong(name: str, value: Any, wanted: str) -> _WrongField:
    field, _, place = name.partition(".")
    at = f" of {'layer ' if field in _BY_LAYER else ''}{place}" if place else ""
    if field == "weight_rule":
        field, at = name, ""
    return _WrongField(f"field '{field}': {field}{at} is {shown(value)}, must be {wanted}")
