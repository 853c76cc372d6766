"""Replaying a cell on scores that fit it, from several recordings of the same tokens.

A replay on scores recorded under the original routing overlooks that substituted experts change the later scores. With
recordings under a few other margins at hand, the scores of a cell are taken from between the two recordings that
stray from the router about as far as it does, so that a recording at one budget or under one policy serves cells of
others. How far a cell strays is told by a replay of it on the recording that strays least; the other recordings'
cells are replayed there too, so that like is set beside like and a recorded cell lands on its own recording.

Source: this project's docs/fidelity.md, where the errors with and without are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simlab.errors import InputError
from simlab.judge.quality.features import features_of, features_of_recording
from simlab.judge.quality.law import recorded_cell
from simlab.replay.run import sweep
from simlab.trace.blend import blend, check_same_events
from simlab.trace.store import Trace
from simlab.types import Cell, CellNumbers

STEPS = 8
"""Blends between two neighbouring recordings: cells that ask for nearly the same share one."""
BEND = 10.0
"""Of how far a cell strays: squared L1 distance of the applied weights, d + BEND d^2. Later scores drift like the nll
rises, and this is about the ratio of both terms in the quality law of docs/quality.md."""


class Place(NamedTuple):
    """Between which recordings a cell's scores lie."""

    below: int
    """Index of the recording that strays less."""
    step: int
    """Share of the next recording, in `1 / STEPS`; 0: the one below alone."""


class TraceSet:
    """Recordings of the same tokens of one model, in the order of how far each strays from the router.

    Args:
        traces: recordings made by simlab, at least two of them.
        folder: where blends are written.

    Raises:
        InputError: they are not of the same tokens, or one does not say what was executed.
    """

    def __init__(self, traces: Sequence[Trace], folder: Path) -> None:
        if len(traces) < 2:
            raise InputError("a set of traces wants at least two recordings of the same tokens")
        check_same_events(traces)
        cells = [recorded_cell(trace.header) for trace in traces]
        ran = [
            features_of_recording(trace, cell)["distance"][0]
            for trace, cell in zip(traces, cells, strict=True)
        ]
        self._base = traces[int(np.argmin(ran))]
        strays = self._strays(cells, None)
        order = np.argsort(strays, kind="stable")
        self.traces = [traces[i] for i in order]
        self.strays = [strays[i] for i in order]
        self._folder = folder
        self._blends: dict[Place, Trace] = {}

    def place(self, strayed: float) -> Place:
        """Where a cell that strays this far lies; beyond the last recording, the last one."""
        last = len(self.traces) - 1
        below = int(np.searchsorted(self.strays, strayed, side="right")) - 1
        if below >= last:
            return Place(last, 0)
        if below < 0:
            return Place(0, 0)
        span = self.strays[below + 1] - self.strays[below]
        step = round(STEPS * (strayed - self.strays[below]) / span)
        return Place(below + 1, 0) if step == STEPS else Place(below, step)

    def describe(self, place: Place) -> str:
        """A place in words."""
        below = self.traces[place.below].path.name
        if place.step == 0:
            return f"scores of {below}"
        return (
            f"scores {place.step}/{STEPS} of the way from {below} to {self.traces[place.below + 1].path.name}"
        )

    def trace(self, place: Place) -> Trace:
        """The recording or the blend at a place; blends are written once."""
        if place.step == 0:
            return self.traces[place.below]
        if place not in self._blends:
            share = place.step / STEPS
            pair = self.traces[place.below : place.below + 2]
            out = self._folder / f"{place.below}-{place.step}.trace"
            self._blends[place] = blend(pair, [1 - share, share], out)
        return self._blends[place]

    def places(self, cells: Sequence[Cell], *, train: str | None = None) -> list[Place]:
        """Where each cell lies."""
        return [self.place(strayed) for strayed in self._strays(cells, train)]

    def _strays(self, cells: Sequence[Cell], train: str | None) -> list[float]:
        """How far each cell strays from the router on the recording that does least."""
        distance = features_of(self._base, cells, train=train)["distance"].to_numpy()
        return (distance + BEND * distance**2).tolist()

    def groups(self, cells: Sequence[Cell], *, train: str | None = None) -> Iterator[tuple[Trace, list[int]]]:
        """Each trace that cells are to be replayed on, and the indices of those cells."""
        places = self.places(cells, train=train)
        for place in sorted(set(places)):
            yield self.trace(place), [i for i, of in enumerate(places) if of == place]

    def replay(self, cells: Sequence[Cell], *, train: str | None = None) -> list[CellNumbers]:
        """Replay every cell on the scores that fit it; results in the order of `cells`."""
        found: dict[int, CellNumbers] = {}
        for trace, some in self.groups(cells, train=train):
            found |= dict(zip(some, sweep(trace, [cells[i] for i in some], train=train), strict=True))
        return [found[i] for i in range(len(cells))]


@contextmanager
def open_set(traces: Sequence[Trace]) -> Iterator[TraceSet]:
    """A set whose blends are thrown away at the end."""
    with tempfile.TemporaryDirectory(prefix="simlab-set-") as folder:
        yield TraceSet(traces, Path(folder))
