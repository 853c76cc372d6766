"""What more cores give: the same sweep on one device of one core, on one device of all, and on all devices; in turns.

JAX settles at its start how many devices a CPU is, so each runs in a process of its own, which is warmed up and then
replays once each time it is told to. Beside them stands what the machine can give at all: a process on every core, each
with the whole sweep, all at once, against one of them with the others idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from simlab.bench.spreads import spread
from simlab.errors import RunError
from simlab.replay.devices import n_parts
from simlab.replay.lanes import padded_lanes

_ONE_DEVICE = {"JAX_NUM_CPU_DEVICES": "1"}


def spreading(
    trace: Path, n_cells: int, *, repeats: int, progress: Callable[[float], None] | None = None
) -> dict[str, Any] | None:
    """Seconds of `grid(n_cells)` on one core, on one device and on all, and ratios within a repeat; None where the
    lanes are too few to be spread.

    Raises:
        RunError: a process failed, or two did not give the same numbers.
    """
    say = progress or (lambda _share: None)
    devices = n_parts(padded_lanes(n_cells))
    if devices == 1:
        return None
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        everyone: list[subprocess.Popen[str]] = []
        numbers: list[Any] = []

        def child(pinned_to: Sequence[int], setting: dict[str, str]) -> subprocess.Popen[str]:
            everyone.append(stack.enter_context(_child(trace, n_cells, pinned_to, setting)))
            # One after the other: most of them want the same programs, which JAX may be keeping on disk.
            numbers.append(_answer(everyone[-1])["numbers"])
            return everyone[-1]

        on_each_core = [child([core], _ONE_DEVICE) for core in cores]
        one_device, all_devices = child(cores, _ONE_DEVICE), child(cores, {})
        if any(found != numbers[0] for found in numbers):
            raise RunError("bench replay: one device and several do not give the same numbers")
        turns = {
            "one_core_s": on_each_core[:1],
            "one_s": [one_device],
            "all_s": [all_devices],
            "every_core_s": on_each_core,
        }
        ran: dict[str, list[float]] = {name: [] for name in turns}
        for repeat in range(repeats):
            for name in list(turns) if repeat % 2 == 0 else reversed(turns):
                ran[name].append(_together(turns[name]))
            say((repeat + 1) / repeats)
        for one in everyone:
            assert one.stdin is not None
            one.stdin.close()

    def ratio(over: str, under: str, times: int = 1) -> dict[str, float]:
        pairs = zip(ran[over], ran[under], strict=True)
        return spread([times * a / b for a, b in pairs])._asdict()

    return {
        "cells": n_cells,
        "devices": devices,
        "cores": len(cores),
        **{name: spread(seconds)._asdict() for name, seconds in ran.items()},
        "one_core_over_all": ratio("one_core_s", "all_s"),
        "one_over_all": ratio("one_s", "all_s"),
        "ceiling": ratio("one_core_s", "every_core_s", len(cores)),
    }


def _together(children: Sequence[subprocess.Popen[str]]) -> float:
    """Seconds until each of some processes has replayed once, all at the same time."""
    start = time.perf_counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        _answer(child)
    return time.perf_counter() - start


def _child(trace: Path, n_cells: int, cores: Sequence[int], setting: dict[str, str]) -> subprocess.Popen[str]:
    # JAX counts the cores when it starts.
    code = (
        f"import os; os.sched_setaffinity(0, {list(cores)!r}); "
        f"from simlab.bench.spreading import serve; serve({str(trace)!r}, {n_cells})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | setting,
    )


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        assert child.stderr is not None
        why = child.stderr.read().strip().splitlines()[-1:] or ["no answer"]
        raise RunError(f"bench replay: a replaying process failed: {why[0]}")
    return json.loads(line)


def serve(trace: str, n_cells: int) -> None:
    """Replay once and print the counts; then once for each line read, and say when it is done."""
    from simlab.bench import contenders
    from simlab.bench.workload import grid

    cells = grid(n_cells)
    print(json.dumps({"numbers": contenders.replayer(trace, cells).counts}), flush=True)
    for _ in sys.stdin:
        contenders.replayer(trace, cells)
        print(json.dumps({}), flush=True)
