"""The replayer and what it is compared with, each behind one function: from a trace to counts.

Every contender reports two times: `whole`, from what it was handed to the counts, and `alone`, the part in which the
cells are replayed, with reading and preparing the rows taken off. Handed a folder, its whole time holds reading;
handed a trace `in_memory`, none of it, and still whatever it makes of the rows before it replays them.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.bench import loops
from simlab.cells import MIB, resolve_budget
from simlab.errors import InputError
from simlab.replay.columns import TraceColumns
from simlab.replay.run import Replayer, TraceLike
from simlab.scores import ranking_values, row_statistics
from simlab.trace.schema import TABLES
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers

_ROWS = 4096
"""Rows read at a time."""

Counts = dict[str, dict[str, float]]
"""By phase, `decode` and `all`, and name; what all contenders of a cell must agree on."""


@dataclass(frozen=True)
class Ran:
    """One run of a contender."""

    counts: list[Counts]
    """Per cell."""
    whole_s: float
    alone_s: float
    stages: Mapping[str, float]
    """Seconds of the parts of `whole_s`."""
    slots: NDArray[np.int32] | None = None
    """`[cells, rows, k, 2]`: expert and residency of every slot, if asked for."""


def in_memory(trace: Trace) -> Trace:
    """The trace with its tables decoded, so that whoever replays it reads nothing."""
    tables = {name: trace.collect(name, getattr(trace, name)).rechunk().lazy() for name in TABLES}
    return replace(trace, **tables)


def _opened(trace: TraceLike) -> Trace:
    return trace if isinstance(trace, Trace) else open_trace(trace)


# -- the replayer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TimedTrace(Trace):
    """A trace that measures how long its tables take to read."""

    spent_s: list[float] = field(default_factory=list)
    """One item per query."""

    def collect(self, table: str, frame: pl.LazyFrame) -> pl.DataFrame:
        start = time.perf_counter()
        found = super().collect(table, frame)
        self.spent_s.append(time.perf_counter() - start)
        return found


def replayer(trace: TraceLike, cells: Sequence[Cell]) -> Ran:
    """`simlab.sweep`, taken apart: reading, preparing columns, and the rest.

    Threads of the replayer prepare rows while others walk: the rest is less than what walking takes.
    """
    start = time.perf_counter()
    opened = _opened(trace)
    timed = _TimedTrace(**{f.name: getattr(opened, f.name) for f in fields(Trace)})
    opening_s = time.perf_counter() - start
    replay = Replayer(timed, cells)
    chunk = replay.columns.chunk
    chunks_s: list[tuple[float, float]] = []
    n_reads = len(timed.spent_s)

    def timed_chunk(*args: Any, **named: Any) -> Any:
        before = time.perf_counter()
        found = chunk(*args, **named)
        chunks_s.append((before, time.perf_counter()))
        return found

    replay.columns.chunk = timed_chunk
    while replay.advance():
        pass
    numbers = replay.numbers()
    whole_s = time.perf_counter() - start
    load_s = opening_s + sum(timed.spent_s)
    prepare_s = max(_covered(chunks_s) - sum(timed.spent_s[n_reads:]), 0.0)
    alone_s = max(whole_s - load_s - prepare_s, 0.0)
    stages = {"load": load_s, "prepare columns": prepare_s, "the rest": alone_s}
    return Ran([counts_of(n) for n in numbers], whole_s, alone_s, stages)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in one of some spans at least."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def counts_of(numbers: CellNumbers) -> Counts:
    """The counts of a cell that every contender keeps."""
    names = (*(n for n in loops.COUNTS if n != "read_bytes"), "misses", "read_mib")
    return {p: {n: getattr(getattr(numbers, p), n) for n in names} for p in ("decode", "all")}


# -- the loop written by hand --------------------------------------------------------------------------------


def hand_written(
    trace: TraceLike,
    cells: Sequence[Cell],
    *,
    parallel: bool = False,
    linked: bool = False,
    slots: bool = False,
) -> Ran:
    """`loops.one_core` or `loops.parallel` over rows read a stretch at a time.

    Args:
        linked: find victims by a linked list instead of by going through all stamps.
        slots: keep every slot; memory grows with rows x cells.

    Raises:
        InputError: cells or a trace that the loop does not know (see `check_workload`).
    """
    start = time.perf_counter()
    loop = Loop(_opened(trace), cells, parallel=parallel, linked=linked)
    kept: list[NDArray[np.int32]] = []
    while loop.row < loop.n_rows:
        kept.append(loop.advance(loop.row + _ROWS, slots=slots))
    whole_s = time.perf_counter() - start
    stages = {"load and prepare": whole_s - loop.alone_s, "loop": loop.alone_s}
    return Ran(loop.counts(), whole_s, loop.alone_s, stages, np.concatenate(kept, axis=1) if slots else None)


class Loop:
    """The loop over a trace, a stretch at a time."""

    def __init__(self, trace: Trace, cells: Sequence[Cell], *, parallel: bool, linked: bool) -> None:
        check_workload(trace, cells)
        header = trace.header
        self._trace = trace
        self._columns = TraceColumns(trace)
        if (self._columns.recorded < 0).any() or self._columns.speculative.shape[1]:
            raise InputError(
                f"{trace.path}: bench replay wants a trace without look-ahead and without empty slots"
            )
        self._phase = np.where(self._columns.counted, self._columns.decode, 2).astype(np.int8)
        self._run = loops.parallel if parallel else loops.one_core
        self._linked = linked
        self._margins = np.array([cell.margin or 0 for cell in cells], np.float32)
        budgets = [resolve_budget(c.budget, c.scope, header, trace.width).total_bytes for c in cells]
        self._budgets = np.array(budgets, np.int64)
        self._entry_bytes = np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64)
        self._state = loops.first_state(len(cells), len(header.moe_layers), header.n_expert)
        self.n_rows = trace.n_rows
        self.row = 0
        """Rows below this one are done."""
        self.alone_s = 0.0
        """Seconds in the loop itself."""

    def advance(self, stop: int, *, slots: bool = False) -> NDArray[np.int32]:
        """Go on to row `stop`, or to the end of its batch; the slots, if asked for."""
        stop = min(stop, self.n_rows)
        # The loop keeps a batch's misses to itself until the batch ends.
        stop += int(np.argmax(self._columns.batch_end[stop - 1 :]))
        rows = self._read(self.row, stop)
        told = np.empty((len(self._margins), (stop - self.row) * slots, self._trace.width, 2), np.int32)
        before = time.perf_counter()
        self._run(rows, self._entry_bytes, self._margins, self._budgets, self._linked, self._state, told)
        self.alone_s += time.perf_counter() - before
        self.row = stop
        return told

    def counts(self) -> list[Counts]:
        """Of every cell, over the rows done."""
        return [_loop_counts(of_cell) for of_cell in self._state.counts]

    def _read(self, start: int, stop: int) -> loops.Rows:
        columns, space, part = self._columns, self._trace.header.score_space, slice(start, stop)
        assert space is not None
        values = ranking_values(self._trace.values("scores", start, stop - start).to_numpy(), space)
        return loops.Rows(
            values=values,
            range=row_statistics(values).range,
            router=columns.recorded[part],
            layer=columns.layer[part],
            decode=columns.decode[part],
            phase=self._phase[part],
            batch_start=columns.batch_start[part],
            batch_end=columns.batch_end[part],
        )


def check_workload(trace: Trace, cells: Sequence[Cell]) -> None:
    """Refuse what the loops do not know: any policy but `substitute` and `lru` in one global cache.

    Raises:
        InputError: the first such cell, or what the trace lacks.
    """
    if not trace.has_scores or trace.header.score_space is None:
        raise InputError(f"{trace.path}: bench replay compares margins, which need the router's scores")
    if trace.width != trace.header.n_expert_used:
        raise InputError(
            f"{trace.path}: {trace.width} experts per row, but the model runs {trace.header.n_expert_used}"
        )
    for cell in cells:
        known = cell.route.name in ("substitute", "original") and cell.evict == "lru" and not cell.sequential
        if not known or cell.scope != "global" or cell.budget.kind == "off":
            raise InputError(f"bench replay: the loop knows substitute with one global lru, not {cell}")


def _loop_counts(of_cell: NDArray[np.int64]) -> Counts:
    """A cell's counts, `[3, 7]`, under their names."""
    return {"decode": _told(of_cell[1]), "all": _told(of_cell[0] + of_cell[1])}


def _told(row: NDArray[np.int64]) -> dict[str, float]:
    counts: dict[str, float] = {name: int(n) for name, n in zip(loops.COUNTS, row, strict=True)}
    return {name: n for name, n in counts.items() if name != "read_bytes"} | {
        "misses": counts["lookups"] - counts["hits"],
        "read_mib": counts["read_bytes"] / MIB,
    }


# -- the original routing in plain Python --------------------------------------------------------------------


def ordered_dict(trace: TraceLike, cells: Sequence[Cell]) -> Ran:
    """An `OrderedDict` per cell over the recorded routing; what a script of an afternoon does.

    Raises:
        InputError: cells with a margin, or a trace that the loops do not know.
    """
    start = time.perf_counter()
    opened = _opened(trace)
    if any(cell.margin for cell in cells):
        raise InputError("bench replay: the plain dict replays the original routing only")
    columns = TraceColumns(opened)
    header = opened.header
    sizes = [header.entry_bytes[layer] for layer in header.moe_layers]
    phase = np.where(columns.counted, columns.decode, 2).tolist()
    batches = list(
        zip(columns.layer.tolist(), phase, columns.recorded.tolist(), columns.batch_end.tolist(), strict=True)
    )
    before = time.perf_counter()
    counts = [
        _plain(batches, sizes, resolve_budget(c.budget, c.scope, header, opened.width).total_bytes)
        for c in cells
    ]
    end = time.perf_counter()
    stages = {"load and prepare": before - start, "loop": end - before}
    return Ran(counts, end - start, end - before, stages)


def _plain(rows: Sequence[tuple[int, int, list[int], bool]], sizes: Sequence[int], budget: int) -> Counts:
    """One cache over rows of (layer, phase, ids, whether the batch ends)."""
    cache: OrderedDict[tuple[int, int], int] = OrderedDict()
    seen: set[tuple[int, int]] = set()
    table = [[0] * len(loops.COUNTS) for _ in loops.PHASES]
    used = 0
    batch: set[int] = set()
    arrived: set[int] = set()
    for layer, phase, ids, ends in rows:
        mine = table[phase]
        for expert in ids:
            key = layer, expert
            if expert not in batch:
                batch.add(expert)
                mine[loops.LOOKUPS] += 1
                if key in cache:
                    mine[loops.HITS] += 1
                else:
                    mine[loops.BYTES] += sizes[layer]
                    if key not in seen:
                        mine[loops.COLD] += 1
                        seen.add(key)
                    arrived.add(expert)
                    cache[key] = sizes[layer]
            cache.move_to_end(key)
        if ends:
            used += len(arrived) * sizes[layer]
            while used > budget:
                oldest = next(iter(cache))
                if oldest[0] == layer and oldest[1] in batch:
                    break
                used -= cache.pop(oldest)
                mine[loops.EVICTIONS] += 1
            batch.clear()
            arrived.clear()
    return _loop_counts(np.array(table))
