"""Timed live runs of several cells, interleaved so that what the machine does falls on all of them alike.

A machine's speed changes within seconds, by tens of percent on a shared one. Runs that follow one another measure
that as much as they measure the cells. Here every cell of a group has an engine of its own, and the engines take
turns of some tokens, there and back (A B B A), over the same token ids; the first cell of every group is the
reference, so that groups can be set beside each other. Where memory holds one engine only, whole runs take turns.

A run that is interrupted finds the processor's caches full of the others' data. In turns of four tokens that made the
policies' own code a quarter slower, and everything else a tenth to a fifth, than in a run of its own, which is what a
user has; so turns are long, and the first tokens of each are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simlab.cells import effective_k, resolve_budget
from simlab.judge.validate import check_live, planned_graphs
from simlab.record.engine import Engine
from simlab.record.machine import available_memory_bytes
from simlab.record.plan import PlannedGraph
from simlab.record.recorder import Recorder
from simlab.trace.store import Trace, TraceWriter, open_trace
from simlab.types import DECODE, Cell, TraceHeader

TURN_TOKENS, SETTLING_TOKENS = 32, 4
"""Graphs a cell runs before the next one has its turn, and how many of them are not counted."""
MOST_TOGETHER = 4
"""Cells of a group, the reference among them: more would stretch a turn's return beyond the machine's moods."""
_ENGINE_BYTES = 256 << 20
"""What an engine takes beside its cache and the model's dense weights, which engines share: contexts and buffers."""

Graphs = Sequence[tuple[PlannedGraph, list[int], int | None]]


@dataclass(frozen=True)
class LiveTrace:
    """One live run of a cell."""

    cell: int
    """Index among the cells asked for; -1 for the reference."""
    group: int
    """Runs of one group shared the machine's moods."""
    trace: Trace
    counted: np.ndarray
    """bool `[decode tokens]`: those after which the caches are its own again; `run_interleaved` says which."""
    machine: dict[str, float | None]
    """Load and free memory when the group began (`machine_state`)."""


class LiveRun:
    """A live run that can stop between graphs and go on; records its own trace."""

    def __init__(self, engine: Engine, graphs: Graphs, cell: Cell, out: Path) -> None:
        engine.start(cell)
        self._engine, self._graphs, self._at, self._turn = engine, graphs, 0, None
        self._out = out
        self._writer = TraceWriter(out, engine.header(cell), effective_k(cell.route, engine.header()))
        self._recorder = Recorder(self._writer)

    def advance(self, n: int) -> bool:
        """Run up to n graphs; False once there are none left."""
        for plan, tokens, following in self._graphs[self._at : self._at + n]:
            # A turn that goes on at a later position kept the context of the one before.
            if plan.turn != self._turn and plan.first_position == 0:
                self._engine.forget_context()
            self._turn = plan.turn
            self._engine.run_graph(plan, tokens, following, self._recorder)
        self._at += n
        return self._at < len(self._graphs)

    def finish(self) -> Trace:
        """Close the trace and open it for reading."""
        self._recorder.flush()
        self._engine.model.check()
        self._writer.close()
        return open_trace(self._out)


def run_interleaved(
    trace: Trace,
    reference: Cell,
    cells: Sequence[Cell],
    model: str | os.PathLike[str] | None,
    folder: Path,
    *,
    repeats: int,
    warm_up: int = 0,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Iterator[LiveTrace]:
    """Run the token ids of a trace live under each cell, `repeats` times, and under the reference in each group.

    Args:
        warm_up: decode tokens at the start of every run that are not counted.
        folder: an existing folder for the recordings.
        options: of `Engine`.

    Raises:
        InputError: the trace carries no token ids, or an engine refuses the model or a cell.
    """
    check_live(trace, model)
    graphs = planned_graphs(trace)
    together = _together([reference, *cells], trace.header)
    counted = counted_tokens(graphs, warm_up, together > 1)
    width = max(1, together - 1)
    parts = [list(range(i, min(i + width, len(cells)))) for i in range(0, len(cells), width)]
    if together == 1:
        parts = [[-1], *parts]
    rounds = [part for r in range(repeats) for part in (parts if r % 2 == 0 else parts[::-1])]
    for group, part in enumerate(rounds):
        members = part if together == 1 else [-1, *part]
        state = machine_state()
        with ExitStack() as stack:
            runs = []
            for cell in members:
                asked = reference if cell < 0 else cells[cell]
                k = effective_k(asked.route, trace.header) if asked.route.step("width") else None
                engine = stack.enter_context(Engine(model, top_k=k, **options))
                runs.append(LiveRun(engine, graphs, asked, folder / f"{group}-{cell + 1}.trace"))
            for turn in range(-(-len(graphs) // TURN_TOKENS)):
                for run in runs if turn % 2 == 0 else reversed(runs):
                    run.advance(TURN_TOKENS)
                if progress is not None:
                    progress((group + (turn + 1) * TURN_TOKENS / (len(graphs) + TURN_TOKENS)) / len(rounds))
            found = [
                LiveTrace(c, group, run.finish(), counted, state)
                for c, run in zip(members, runs, strict=True)
            ]
        yield from found


def counted_tokens(graphs: Graphs, warm_up: int, in_turns: bool) -> np.ndarray:
    """Which decode tokens count, bool `[decode tokens]`: after the warm-up, and not the first of a turn."""
    decodes = np.array([plan.phase == DECODE for plan, _, _ in graphs])
    place = np.arange(len(graphs)) % TURN_TOKENS
    settled = place >= SETTLING_TOKENS if in_turns else np.ones(len(graphs), dtype=bool)
    counted = settled[decodes]
    counted[:warm_up] = False
    return counted


def _together(cells: Sequence[Cell], header: TraceHeader) -> int:
    """Engines that fit in half of the free memory at once, 1 to `MOST_TOGETHER`."""
    largest = max(
        min(
            resolve_budget(c.budget, c.scope, header, effective_k(c.route, header)).total_bytes,
            header.expert_bytes,
        )
        for c in cells
    )
    dense = sum((header.dense_bytes or {}).values())
    room = available_memory_bytes() // 2 - dense
    return max(1, min(MOST_TOGETHER, len(cells), room // (largest + _ENGINE_BYTES)))


def machine_state() -> dict[str, float | None]:
    """Load average over a minute, free memory in MiB and the first core's MHz; null where it cannot be read."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = None
    return {"load": load, "available_mib": available_memory_bytes() / 2**20, "cpu_mhz": _mhz()}


def _mhz() -> float | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split(":", 1)[1] for line in lines if line.startswith("cpu MHz")), None)
    return float(found) if found is not None else None
