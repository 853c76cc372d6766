"""`simlab bench replay`: the replayer beside loops written by hand, on identical work, in one process.

First every contender replays every cell and all counts must be equal, at the end and after every token, and
every slot of some cells; only then are they timed, in turns, there and back. The figures are nanoseconds per
routing event and cell, a routing event being one token at one MoE layer, and how many times the replayer's time
each contender takes, taken within a repeat, so that a machine that slows down for a while slows all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simlab.bench import contenders
from simlab.bench.contenders import Ran
from simlab.bench.scratch import scratch_folder
from simlab.bench.spreading import spreading
from simlab.bench.spreads import spread
from simlab.bench.workload import Workload, of_original_routing
from simlab.errors import RunError
from simlab.replay.run import Replayer
from simlab.replay.slots import replay_slots
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell

REPLAYER = "replayer"
N_SLOT_CELLS = 8
"""Cells compared slot for slot, spread evenly over all."""
MOST_STOPS = 400
"""How often, at most, counts are compared on the way through a trace."""

Progress = Callable[[float], None]


class Contender(NamedTuple):
    """One way to replay some of the cells."""

    name: str
    run: Callable[[Path, Sequence[Cell]], Ran]
    places: list[int]
    """Which of the cells it replays."""


def bench_replay(
    workload: Workload,
    *,
    trace: Path | None = None,
    repeats: int = 5,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare and measure; the value that `simlab bench replay --json` prints.

    Args:
        trace: replayed instead of a generated one, whatever the workload says of its sizes.
        scratch: folder for the generated trace; left out, the system's for temporary files.

    Raises:
        InputError: the trace cannot be replayed by the loops.
        RunError: two contenders do not agree.
    """
    say = progress or (lambda _share: None)
    with scratch_folder(scratch) as folder:
        opened = open_trace(trace) if trace else workload.generate(folder / "generated.trace")
        cells = workload.make_cells()
        contenders.check_workload(opened, cells)
        everyone = find_contenders(cells)
        found = compare(opened, cells, everyone, lambda share: say(0.4 * share))
        figures = measure(opened, cells, everyone, repeats, lambda share: say(0.4 + 0.5 * share))
        figures["spreading"] = spreading(
            opened.path, len(cells), repeats=repeats, progress=lambda share: say(0.9 + 0.1 * share)
        )
    header = opened.header
    sizes = {
        "trace": str(trace) if trace else "generated",
        "cells": len(cells),
        "rows": opened.n_rows,
        "layers": len(header.moe_layers),
        "experts": header.n_expert,
        "k": header.n_expert_used,
    }
    return {"workload": sizes, "repeats": repeats, **found, **figures}


def find_contenders(cells: Sequence[Cell]) -> list[Contender]:
    """The replayer and what it is compared with."""
    everything, original = list(range(len(cells))), of_original_routing(cells)

    def loop(parallel: bool, linked: bool) -> Callable[[Path, Sequence[Cell]], Ran]:
        return lambda trace, some: contenders.hand_written(trace, some, parallel=parallel, linked=linked)

    cores = len(os.sched_getaffinity(0))
    found = [
        Contender(REPLAYER, contenders.replayer, everything),
        Contender("numba, 1 core", loop(False, False), everything),
        Contender(f"numba, {cores} cores", loop(True, False), everything),
        Contender("numba with a linked list, 1 core", loop(False, True), everything),
        Contender(f"numba with a linked list, {cores} cores", loop(True, True), everything),
    ]
    if original:
        found.append(Contender("Python OrderedDict (original routing)", contenders.ordered_dict, original))
    return found


def compare(
    trace: Trace, cells: Sequence[Cell], everyone: Sequence[Contender], progress: Progress
) -> dict[str, Any]:
    """Run every contender once, hold them to the replayer's numbers, and say how long its first run took.

    Raises:
        RunError: two of them do not agree.
    """
    start = time.perf_counter()
    truth = contenders.replayer(trace.path, cells).counts
    first_s = time.perf_counter() - start
    for number, contender in enumerate(everyone[1:], 1):
        progress(number / (len(everyone) + 1))
        found = contender.run(trace.path, [cells[i] for i in contender.places]).counts
        for place, counts in zip(contender.places, found, strict=True):
            check_counts(contender.name, cells[place], counts, truth[place])
    places = sorted({int(i) for i in np.linspace(0, len(cells) - 1, min(N_SLOT_CELLS, len(cells)))})
    n_slots = sum(check_slots(trace, cells[i]) for i in places)
    return {
        "first_run_s": first_s,
        "cells_equal": len(cells),
        "stops_equal": check_on_the_way(trace, cells),
        "slots_equal": {"cells": len(places), "slots": n_slots},
    }


def check_counts(name: str, cell: Cell, found: contenders.Counts, truth: contenders.Counts) -> None:
    """Raise `RunError` for the first count of a cell that is not the replayer's."""
    for phase, counts in found.items():
        for what, value in counts.items():
            if value != truth[phase][what]:
                raise RunError(
                    f"bench replay: at {cell.budget.text}, margin {cell.margin}: {phase} {what} is "
                    f"{truth[phase][what]} by the replayer and {value} by {name}"
                )


def check_on_the_way(trace: Trace, cells: Sequence[Cell]) -> int:
    """Hold all counts of all cells to the loop's after every few rows; how often they were compared.

    What the replayer is timed with keeps no slots, so that this is the finest its own numbers can be compared.

    Raises:
        RunError: the first count that differs.
    """
    replayer = Replayer(trace, cells)
    loop = contenders.Loop(trace, cells, parallel=False, linked=True)
    # A token, unless the trace is long.
    step = max(len(trace.header.moe_layers), trace.n_rows // MOST_STOPS)
    stops = 0
    while loop.row < loop.n_rows:
        # The loop stops at the ends of batches, where the replayer can stop too.
        loop.advance(loop.row + step)
        replayer.advance(loop.row - replayer.row)
        for cell, found, numbers in zip(cells, loop.counts(), replayer.numbers(), strict=True):
            check_counts(f"the loop, up to row {loop.row}", cell, found, contenders.counts_of(numbers))
        stops += 1
    return stops


def check_slots(trace: Trace, cell: Cell) -> int:
    """Hold expert and residency of every slot of a cell to the loop's; how many slots there are.

    Raises:
        RunError: the first slot that differs.
    """
    table = replay_slots(trace, cell).slots
    kept = contenders.hand_written(trace.path, [cell], slots=True).slots
    assert kept is not None
    for place, column in enumerate(("expert", "residency")):
        mine, theirs = table[column].to_numpy(), kept[0, :, :, place].ravel()
        if not np.array_equal(mine, theirs):
            slot = int(np.flatnonzero(mine != theirs)[0]) if len(mine) == len(theirs) else -1
            raise RunError(
                f"bench replay: at {cell.budget.text}, margin {cell.margin}: {column} differs from the loop's, "
                f"first at slot {slot} of {len(mine)}"
            )
    return table.height


def measure(
    trace: Trace, cells: Sequence[Cell], everyone: Sequence[Contender], repeats: int, progress: Progress
) -> dict[str, Any]:
    """Time all contenders in turns."""
    ran: list[list[Ran]] = [[] for _ in everyone]
    there = list(range(len(everyone)))
    for repeat in range(repeats):
        for number, place in enumerate(there if repeat % 2 == 0 else there[::-1]):
            contender = everyone[place]
            ran[place].append(contender.run(trace.path, [cells[i] for i in contender.places]))
            progress((repeat + (number + 1) / len(everyone)) / repeats)
    rows = []
    for contender, mine in zip(everyone, ran, strict=True):
        # Ratios are per cell, also where a contender replays a few of them only.
        work = trace.n_rows * len(contender.places)
        scale = len(cells) / len(contender.places)
        paired = list(zip(mine, ran[0], strict=True))
        rows.append(
            {
                "name": contender.name,
                "cells": len(contender.places),
                "whole_ns": spread([r.whole_s / work * 1e9 for r in mine])._asdict(),
                "alone_ns": spread([r.alone_s / work * 1e9 for r in mine])._asdict(),
                "whole_ratio": spread([scale * r.whole_s / own.whole_s for r, own in paired])._asdict(),
                "alone_ratio": spread([scale * r.alone_s / own.alone_s for r, own in paired])._asdict(),
            }
        )
    stages = {name: spread([r.stages[name] for r in ran[0]])._asdict() for name in ran[0][0].stages}
    return {
        "contenders": rows,
        "replayer_stages_s": stages,
        "replayer_s": spread([r.whole_s for r in ran[0]])._asdict(),
    }
