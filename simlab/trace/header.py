"""`header.json`: reading, checking and writing."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simlab.errors import InputError
from simlab.trace.schema import SCHEMA_VERSION
from simlab.types import TraceHeader, WeightRule

_REQUIRED = ("schema_version", "model", "arch", "n_layer", "n_expert", "n_expert_used", "entry_bytes")
_BY_LAYER = ("entry_bytes", "window_bytes", "dense_bytes")


def header_to_json(header: TraceHeader, rows: Mapping[str, int] | None, width: int) -> str:
    """The header as JSON text, with the row count of each table once the recording is complete."""
    fields = dataclasses.asdict(header)
    for name in _BY_LAYER:
        if fields[name] is not None:
            fields[name] = {str(k): v for k, v in sorted(fields[name].items())}
    fields["rows"] = dict(rows) if rows is not None else None
    fields["routing_width"] = width
    return json.dumps(fields, indent=1) + "\n"


def write_header(folder: Path, header: TraceHeader, rows: Mapping[str, int] | None, width: int) -> None:
    """Write `header.json` by rename, so that a reader never sees half of one."""
    temporary = folder / "header.json.tmp"
    temporary.write_text(header_to_json(header, rows, width))
    os.replace(temporary, folder / "header.json")


def read_header(folder: Path) -> tuple[TraceHeader, dict[str, int] | None, int]:
    """The header, the promised row counts (None while incomplete) and the slots per routing row."""
    path = folder / "header.json"
    if not folder.exists():
        raise InputError(f"{folder}: no such trace")
    if not path.is_file():
        raise InputError(f"{folder}: not a trace, it holds no header.json")
    try:
        fields = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path}: not a JSON object")
    for name in _REQUIRED:
        if name not in fields:
            raise InputError(f"{path}: field '{name}' is missing")
    if fields["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version {fields['schema_version']}, this simlab reads {SCHEMA_VERSION}; "
            "record or import again"
        )
    try:
        return _parse(fields)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: a field has the wrong form: {error}") from error


def _parse(fields: dict[str, Any]) -> tuple[TraceHeader, dict[str, int] | None, int]:
    rows = fields.pop("rows", None)
    width = int(fields.pop("routing_width", fields["n_expert_used"]))
    for name in _BY_LAYER:
        if fields.get(name) is not None:
            fields[name] = {
                int(k): tuple(v) if isinstance(v, list) else int(v) for k, v in fields[name].items()
            }
    fields["knobs"] = dict(fields.get("knobs") or {})
    if fields.get("weight_rule") is not None:
        fields["weight_rule"] = WeightRule(**fields["weight_rule"])
    known = {f.name for f in dataclasses.fields(TraceHeader)}
    header = TraceHeader(**{k: v for k, v in fields.items() if k in known})
    if not header.entry_bytes:
        raise ValueError("entry_bytes lists no MoE layer")
    for layer, size in header.entry_bytes.items():
        if size <= 0:
            raise ValueError(f"entry_bytes of layer {layer} is {size}")
    if not 1 <= header.n_expert_used <= header.n_expert:
        raise ValueError(f"n_expert_used {header.n_expert_used} of n_expert {header.n_expert}")
    return header, rows, width
