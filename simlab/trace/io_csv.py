"""`io_trace v1`: one line per flash read of a BigMoeOnEdge engine. Spec: engine-semantics, section 4."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.csv_text import (
    EXACT,
    INT32,
    MAX_EXPERT,
    MAX_LAYER,
    CsvText,
    IoMode,
    key_values,
    read_csv_text,
)

TAG = "io_trace v1"
_COLUMNS = {
    "turn": (0, INT32), "phase": (0, 1), "step": (-1, INT32), "layer": (0, MAX_LAYER),
    "expert": (0, MAX_EXPERT), "proj": (0, INT32), "lane": (0, INT32), "spec": (0, INT32),
    "offset": (0, EXACT), "req_bytes": (0, EXACT), "read_bytes": (0, EXACT), "latency_ns": (0, EXACT),
}  # fmt: skip
"""Column, its smallest and its largest value."""


@dataclass(frozen=True)
class IoFile:
    """A read io trace: int64 columns by their names in the file."""

    text: CsvText
    io_mode: IoMode | None
    columns: dict[str, NDArray]

    @property
    def path(self) -> Path:
        return self.text.path

    def check_against(self, route: Path, n_expert: int, layers: Collection[int]) -> None:
        """Refuse reads of what the route trace's model does not stream."""
        layer, expert = self.columns["layer"], self.columns["expert"]
        foreign = ~np.isin(layer, list(layers))
        if foreign.any():
            index = int(np.argmax(foreign))
            raise self.text.refuse(index, "layer", f"{layer[index]} is not a streamed layer of {route}")
        if (expert >= n_expert).any():
            index = int(np.argmax(expert >= n_expert))
            raise self.text.refuse(index, "expert", f"{expert[index]}, but {route} has n_expert={n_expert}")


def read_io(path: Path) -> IoFile:
    """Read an io trace.

    Raises:
        InputError: not an io trace of version 1, or a value in it cannot be used.
    """
    text = read_csv_text(path)
    if not text.comments or text.comments[0][1] != TAG:
        raise InputError(f"{path}, line 1: not an io trace, it should begin with '# {TAG}'")
    text.require(_COLUMNS)
    if text.tail is not None:
        warnings.warn(f"{path}: cut short at its end; its last line is left out", SimlabWarning, stacklevel=3)
    io_mode: IoMode | None = None
    for line, comment in text.comments[1:]:
        io_mode = key_values(path, line, comment).io_mode() or io_mode
    columns = {name: text.integers(name, low, high) for name, (low, high) in _COLUMNS.items()}
    return IoFile(text, io_mode, columns)
