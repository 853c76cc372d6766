"""What every reader of foreign files needs: their bytes, and values and errors in words that fit into a message."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from simlab.bounds import require_memory
from simlab.errors import InputError

LONGEST_LINE = 16 << 20
"""A row of 65,535 experts with scores and gate probabilities, every digit of them, is shorter."""


def read_bytes(path: Path, limit: int = -1, *, times: int = 2, lines: bool = False) -> bytes:
    """A file's bytes, or the first `limit` of them.

    Args:
        times: memory that the caller comes to per byte of the file.
        lines: whether it is text of lines, none of which may be over `LONGEST_LINE` bytes.

    Raises:
        InputError: the file is missing, cannot be read, is empty, a Git-LFS pointer or too large.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if limit < 0:
                if lines and size > LONGEST_LINE:
                    _refuse_long_line(path, file)
                require_memory(size * times, f"{path}: {size} bytes to read")
            data = file.read(limit)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not data.strip():
        raise InputError(f"{path}: the file is empty")
    if data.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}, line 1: a Git-LFS pointer, not the data; run 'git lfs pull' to fetch it")
    return data


def _refuse_long_line(path: Path, file: BinaryIO) -> None:
    """Blocks as long as the longest line: one without a newline is part of a line that is longer."""
    number = 1
    while len(block := file.read(LONGEST_LINE)) == LONGEST_LINE:
        newlines = block.count(b"\n")
        if not newlines:
            raise InputError(
                f"{path}, line {number}: over {LONGEST_LINE >> 20} MiB long, which no line of a table is; is it text?"
            )
        number += newlines
    file.seek(0)


def check_inside(folder: Path, file: Path) -> None:
    """Refuse a file of a trace that is a link to somewhere else.

    A snapshot in a cache of Hugging Face is made of links to `blobs` beside `snapshots`; they stay in that cache.

    Raises:
        InputError: the link leaves the trace's folder and the cache it lies in.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    caches = [p.parent for p in root.parents if p.name == "snapshots" and (p.parent / "blobs").is_dir()]
    if not any(target.is_relative_to(place) for place in (root, *caches)):
        raise InputError(
            f"{file}: a link to {target}, which is not in the trace's folder; copy the file there"
        )


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
