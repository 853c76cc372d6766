"""`simlab bench replay`: the replayer beside loops written by hand, on identical work, in one process.

First every contender replays every cell and all counts must be equal, at the end and after every token, and
every slot of some cells; only then are they timed, in turns, there and back. The figures are nanoseconds per
routing event and cell, a routing event being one token at one MoE layer, and how many times the replayer's time
each contender takes, taken within a repeat, so that a machine that slows down for a while slows all of them.

Each is timed on the same work twice: `whole` from the trace's folder, reading and all, and `memory` from the decoded
tables in memory, what it prepares of them included. `alone`, a part of `whole`, leaves out what it prepares too, and
with it work that only some of them have, such as sorting scores.
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
from simlab.bench.spreads import Spread, spread
from simlab.bench.workload import Workload, of_original_routing
from simlab.errors import RunError
from simlab.replay.run import Replayer, TraceLike
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
    run: Callable[[TraceLike, Sequence[Cell]], Ran]
    places: list[int]
    """Which of the cells it replays."""
    on_one_core: str = ""
    """The name of the same loop on one core, for one that is spread over all."""


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
        figures = measure(opened, cells, everyone, repeats, lambda share: say(0.4 + 0.6 * share))
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

    def loop(parallel: bool, linked: bool) -> Callable[[TraceLike, Sequence[Cell]], Ran]:
        return lambda trace, some: contenders.hand_written(trace, some, parallel=parallel, linked=linked)

    cores = len(os.sched_getaffinity(0))
    found = [Contender(REPLAYER, contenders.replayer, everything)]
    for name, linked in (("numba", False), ("numba with a linked list", True)):
        one = f"{name}, 1 core"
        found += [
            Contender(one, loop(False, linked), everything),
            Contender(f"{name}, {cores} cores", loop(True, linked), everything, on_one_core=one),
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
    """Time all contenders in turns, each from the folder and from memory."""
    decoded = contenders.in_memory(trace)
    ran: dict[str, list[tuple[Ran, Ran]]] = {contender.name: [] for contender in everyone}
    for repeat in range(repeats):
        for number, contender in enumerate(everyone if repeat % 2 == 0 else everyone[::-1]):
            some = [cells[i] for i in contender.places]
            ran[contender.name].append((contender.run(trace.path, some), contender.run(decoded, some)))
            progress((repeat + (number + 1) / len(everyone)) / repeats)
    seconds = {name: _seconds(mine) for name, mine in ran.items()}
    own = seconds[REPLAYER]
    rows = []
    for contender in everyone:
        # Ratios are per cell, also where a contender replays a few of them only.
        work = trace.n_rows * len(contender.places)
        scale = len(cells) / len(contender.places)
        row: dict[str, Any] = {"name": contender.name, "cells": len(contender.places)}
        for which, mine in seconds[contender.name].items():
            row[f"{which}_ns"] = spread([s / work * 1e9 for s in mine])._asdict()
            row[f"{which}_ratio"] = _ratio([scale * s for s in mine], own[which])._asdict()
        if contender.on_one_core:
            one = seconds[contender.on_one_core]["alone"]
            row["times_one_core"] = _ratio(one, seconds[contender.name]["alone"])._asdict()
        rows.append(row)
    whole = [from_folder for from_folder, _ in ran[REPLAYER]]
    stages = {name: spread([r.stages[name] for r in whole])._asdict() for name in whole[0].stages}
    return {
        "contenders": rows,
        "replayer_stages_s": stages,
        "replayer_s": spread([r.whole_s for r in whole])._asdict(),
    }


def _seconds(ran: Sequence[tuple[Ran, Ran]]) -> dict[str, list[float]]:
    """What a contender's repeats took, of runs from the folder and from memory."""
    return {
        "whole": [from_folder.whole_s for from_folder, _ in ran],
        "memory": [from_memory.whole_s for _, from_memory in ran],
        "alone": [from_folder.alone_s for from_folder, _ in ran],
    }


def _ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of times of the same repeats."""
    return spread([a / b for a, b in zip(over, under, strict=True)])
