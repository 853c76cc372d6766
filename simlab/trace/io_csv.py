"""`io_trace v1`: one line per flash read of a BigMoeOnEdge engine. Spec: engine-semantics, section 4."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.csv_text import key_values, read_csv_text

TAG = "io_trace v1"
_COLUMNS = {
    "turn": 0, "phase": 0, "step": -1, "layer": 0, "expert": 0, "proj": 0,
    "lane": 0, "spec": 0, "offset": 0, "req_bytes": 0, "read_bytes": 0, "latency_ns": 0,
}  # fmt: skip
"""Column and its smallest value."""


@dataclass(frozen=True)
class IoFile:
    """A read io trace: int64 columns by their names in the file."""

    path: Path
    settings: dict[str, str]
    columns: dict[str, NDArray]


def read_io(path: Path) -> IoFile:
    """Read an io trace.

    Raises:
        InputError: not an io trace of version 1, or a value in it cannot be used.
    """
    text = read_csv_text(path)
    if not text.comments or text.comments[0][1] != TAG:
        raise InputError(f"{path}, line 1: not an io trace, it should begin with '# {TAG}'")
    for column in _COLUMNS:
        if column not in text.columns:
            raise InputError(f"{path}: column '{column}' is missing")
    if text.tail is not None:
        warnings.warn(f"{path}: cut short at its end; its last line is left out", SimlabWarning, stacklevel=3)
    settings: dict[str, str] = {}
    for _, comment in text.comments[1:]:
        settings |= key_values(comment)
    return IoFile(path, settings, {name: text.integers(name, low) for name, low in _COLUMNS.items()})
