"""Finished groups of a sweep on disk, beside the table they will become, so that a killed sweep goes on.

`F.parquet.parts/` holds one table per finished group, written whole by rename, and `sweep.json`, which says
what sweep it is: of which traces, cells and training part, by which code, in which groups. The same command
goes on with it; another one is refused, since its table would be a mixture.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import polars as pl

import simlab
from simlab.cli.output import cells_from_frame, cells_to_frame, write_frame, write_whole
from simlab.errors import InputError, RunError, SimlabWarning
from simlab.files import TEMPORARY
from simlab.locks import locked
from simlab.replay.groups import Group
from simlab.trace.provenance import folder_digest, policy_words
from simlab.trace.store import Trace
from simlab.types import Cell, CellNumbers

_WORDS = {
    "traces": "the trace has changed",
    "cells": "the cell options have changed",
    "train": "--train has changed",
    "code": "simlab has changed",
}


def describe(traces: Sequence[Trace], cells: Sequence[Cell], train: str | None) -> dict[str, str]:
    """What makes a sweep the same sweep, as digests by name."""
    other = Path(train or "")
    return {
        "traces": _digest(*(folder_digest(trace.path) for trace in traces)),
        "cells": _digest(*(f"{policy_words(c)} | {c.budget.kind} {c.budget.amount!r}" for c in cells)),
        "train": _digest(train or "", folder_digest(other) if (other / "header.json").is_file() else ""),
        "code": code_digest(),
    }


def code_digest() -> str:
    """Of the code that decides what a replay gives."""
    package = Path(simlab.__file__).parent
    files = sorted([*package.glob("*.py"), *(package / "replay").glob("*.py")])
    return _digest(simlab.__version__, *(file.read_text(encoding="utf-8") for file in files))


def _digest(*words: str) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


class Parts:
    """The folder of a sweep's finished groups. Use as a context manager: one process works on it at a time."""

    def __init__(self, out: Path, sweep: dict[str, str], groups: Sequence[Group], *, force: bool) -> None:
        """Take up the folder beside `out`, or begin it.

        Args:
            sweep: from `describe`.
            groups: how the sweep is split if it begins; one that goes on keeps the groups it has.
            force: replace the parts of another sweep.

        Raises:
            InputError: the folder holds another sweep, or another process is at work on it.
            RunError: the folder cannot be written.
        """
        self.folder = out.with_name(out.name + ".parts")
        self._out = out
        with ExitStack() as lock:
            try:
                self.folder.mkdir(exist_ok=True)
                lock.enter_context(locked(self.folder, f"--out {out}"))
            except OSError as error:
                raise RunError(f"{self.folder}: {error.strerror}") from error
            self.groups = self._take_up(sweep, groups, force)
            self._lock = lock.pop_all()

    def _take_up(self, sweep: dict[str, str], groups: Sequence[Group], force: bool) -> list[Group]:
        for left in self.folder.glob(TEMPORARY):
            left.unlink(missing_ok=True)
        manifest = self.folder / "sweep.json"
        if manifest.exists():
            try:
                past = json.loads(manifest.read_text(encoding="utf-8"))
                changed = next((name for name in sweep if past["sweep"].get(name) != sweep[name]), None)
                kept = [Group(group["trace"], tuple(group["places"])) for group in past["groups"]]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"--out {self._out}: {manifest} is not of simlab sweep; remove it") from None
            if changed is None:
                return kept
            if not force:
                raise InputError(
                    f"--out {self._out}: {self.folder} holds groups of another sweep ({_WORDS[changed]}); "
                    "remove it, or add --force to start over"
                )
            manifest.unlink()
            for part in self.folder.glob("group-*.parquet"):
                part.unlink()
        text = json.dumps(
            {"sweep": sweep, "groups": [{"trace": g.trace, "places": g.places} for g in groups]}
        )
        write_whole(manifest, lambda path: path.write_text(text, encoding="utf-8"))
        return list(groups)

    def _path(self, group: Group) -> Path:
        return self.folder / f"group-{self.groups.index(group):05d}.parquet"

    def load(self, group: Group, cells: Sequence[Cell]) -> list[CellNumbers] | None:
        """The numbers of a group, given its cells; None if it is not finished."""
        path = self._path(group)
        if not path.exists():
            return None
        try:
            frame = pl.read_parquet(path)
            return cells_from_frame(frame, cells)
        except (Exception, pl.exceptions.PanicException):  # cut short by a power failure
            warnings.warn(f"{path}: cannot be read; this group is run again", SimlabWarning, stacklevel=2)
            return None

    def save(self, group: Group, numbers: Sequence[CellNumbers]) -> None:
        """Keep a finished group.

        Raises:
            RunError: it cannot be written.
        """
        write_frame(self._path(group), cells_to_frame(numbers))

    def remove(self) -> None:
        """Remove the folder, once the table is written; whatever else somebody put there stays."""
        for path in [*self.folder.glob("group-*.parquet"), self.folder / "sweep.json"]:
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()
