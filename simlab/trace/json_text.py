"""JSON as other programs write it: read in one place, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simlab.errors import InputError
from simlab.trace.reading import one_line, read_bytes, shown

JSON_TIMES = 25
"""Memory of parsed JSON over its bytes: an empty object takes 72 with its place in a list, and three to write."""


class _Twice(ValueError):
    """A field that an object has twice."""


def read_json(path: Path, nan: bool = True) -> Any:
    """The JSON value of a file.

    Raises:
        InputError: the file cannot be read, is too large, or is not JSON.
    """
    return parse_json(read_bytes(path, times=JSON_TIMES), str(path), nan)


def parse_json(data: bytes, where: str, nan: bool = True) -> Any:
    """A JSON value in which no object has a field twice; with `nan`, as Python writes NaN and Infinity, too.

    Raises:
        InputError: not JSON; the text begins with `where`.
    """
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=None if nan else _no_constant)
    except _Twice as error:
        raise InputError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        # ValueError is JSONDecodeError, UnicodeDecodeError and a number of thousands of digits.
        why = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise InputError(f"{where}: not JSON: {why}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Twice(f"field {shown(twice)} is there twice")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
