"""JSON as other programs write it: read in one place, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simlab.errors import InputError


class _Twice(ValueError):
    """A field that an object has twice."""


def read_bytes(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        InputError: the file is missing, cannot be read, is empty or a Git-LFS pointer.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    refuse_no_data(path, data)
    return data


def refuse_no_data(path: Path, head: bytes) -> None:
    """Refuse a file that begins like one without data.

    Raises:
        InputError: it is empty or a Git-LFS pointer.
    """
    if not head.strip():
        raise InputError(f"{path}: the file is empty")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}, line 1: a Git-LFS pointer, not the data; run 'git lfs pull' to fetch it")


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


def shown(value: Any) -> str:
    """A value, cut to what fits into a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = "a value that cannot be shown"
    return text if len(text) <= 60 else f"{text[:60]}..."


def one_line(error: BaseException) -> str:
    """The text of an exception on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
