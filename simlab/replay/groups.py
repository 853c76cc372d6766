"""A sweep in groups of cells: each fits in memory, runs alone, and can be kept, or run elsewhere.

A group is one pass over a trace, so groups are as large as is sensible: small sweeps are one group. Cells of
one program stay together, since a program is compiled once whatever number of cells are its lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from simlab.cells import effective_k
from simlab.policy import find_eviction
from simlab.replay.run import Backend, Replayer, sweep
from simlab.replay.settings import code_key, follows_router
from simlab.trace.store import Trace
from simlab.types import Cell, CellNumbers

_WORK = 100_000_000
"""Rows times cells of a group: some ten seconds, which is what a killed sweep loses."""
_LEAST_CELLS = 64
"""Below this many lanes a pass over a long trace pays more for reading it than for replaying it."""
_STATE_BYTES = 1 << 30
"""Most that the caches of a group may take, at about `_ENTRY_BYTES` for each entry of each cell."""
_ENTRY_BYTES = 64
_FORETOLD_BYTES = 1 << 30
"""The same of columns that are kept for every row and cell, at about `_SLOT_BYTES` a slot."""
_SLOT_BYTES = 48

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Group:
    """Cells that are replayed together over one trace."""

    trace: int
    """Which of the sweep's traces."""
    places: tuple[int, ...]
    """Of the cells among the sweep's cells."""


def split(traces: Sequence[Trace], cells: Sequence[Cell], size: int | None = None) -> list[Group]:
    """The groups of a sweep, trace by trace; together they have every cell of every trace once.

    Args:
        size: most cells of a group; left out, what the traces' lengths and models suggest.
    """
    groups: list[Group] = []
    for number, trace in enumerate(traces):
        by_code: dict[tuple[Any, ...], list[int]] = {}
        for place, cell in enumerate(cells):
            eviction = find_eviction(cell.evict)
            code = (code_key(cell.route.steps, eviction), cell.sequential, _runs_twice(cell))
            by_code.setdefault(code, []).append(place)
        room: list[int] = []
        most = 0
        for places in by_code.values():
            limit = size or _sensible(trace, _runs_twice(cells[places[0]]))
            for start in range(0, len(places), limit):
                more = places[start : start + limit]
                if room and len(room) + len(more) > min(most, limit):
                    groups.append(Group(number, tuple(room)))
                    room = []
                most = min(most, limit) if room else limit
                room = room + more
        if room:
            groups.append(Group(number, tuple(room)))
    return groups


def _runs_twice(cell: Cell) -> bool:
    return "future" in find_eviction(cell.evict).needs and not follows_router(cell.route)


def _sensible(trace: Trace, twice: bool) -> int:
    """Most cells of a group over a trace; a power of two, or a multiple of 64."""
    header = trace.header
    entries = header.n_expert * len(header.moe_layers)
    limit = max(_WORK // max(trace.n_rows, 1), _LEAST_CELLS)
    limit = min(limit, max(_STATE_BYTES // (entries * _ENTRY_BYTES), 1))
    if twice:
        slots = max(trace.n_rows, 1) * trace.width
        limit = min(limit, max(_FORETOLD_BYTES // (slots * _SLOT_BYTES), 1))
    return limit // _LEAST_CELLS * _LEAST_CELLS if limit >= _LEAST_CELLS else 1 << (limit.bit_length() - 1)


def check(traces: Sequence[Trace], cells: Sequence[Cell], train: str | None) -> None:
    """Refuse what a later group would be refused for, before the first one runs.

    Raises:
        InputError: a trace lacks what a route or `train` asks of it.
    """
    # What a trace must hold depends on the routes' policies and widths alone; an eviction policy's own
    # preparation takes long.
    for trace in traces:
        one_of_each = {
            (c.route.name, effective_k(c.route, trace.header)): dataclasses.replace(
                c, evict="lru", evict_knobs={}
            )
            for c in cells
        }
        Replayer(trace, list(one_of_each.values()), train=train)


def run_here(
    traces: Sequence[Trace],
    cells: Sequence[Cell],
    groups: Sequence[Group],
    *,
    train: str | None = None,
    progress: Progress | None = None,
    backend: Backend = "loop",
) -> Generator[tuple[Group, list[CellNumbers]], None, None]:
    """Run groups one after the other in this process; each with its numbers, in the order of its places.

    Args:
        progress: called with the share of the cells done.
    """
    total = sum(len(g.places) for g in groups)
    done = 0
    for group in groups:

        def say(share: float, done: int = done, size: int = len(group.places)) -> None:
            if progress is not None:
                progress((done + share * size) / total)

        yield (
            group,
            sweep(
                traces[group.trace],
                [cells[i] for i in group.places],
                progress=say,
                train=train,
                backend=backend,
            ),
        )
        done += len(group.places)


def merged(
    results: Sequence[tuple[Group, list[CellNumbers]]], n_traces: int, n_cells: int
) -> list[list[CellNumbers]]:
    """Per trace the numbers of all cells, in the order of the cells."""
    found: dict[tuple[int, int], CellNumbers] = {
        (group.trace, place): numbers
        for group, of_group in results
        for place, numbers in zip(group.places, of_group, strict=True)
    }
    return [[found[trace, place] for place in range(n_cells)] for trace in range(n_traces)]
