"""What spreading the lanes over the devices gives: the same sweep on one of them and on all, in turns.

JAX settles at its start how many devices a CPU is, so each runs in a process of its own, which is warmed up and then
replays once each time it is told to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from simlab.bench.spreads import spread
from simlab.errors import RunError
from simlab.replay.devices import n_parts
from simlab.replay.lanes import padded_lanes


def spreading(
    trace: Path, n_cells: int, *, repeats: int, progress: Callable[[float], None] | None = None
) -> dict[str, Any] | None:
    """Seconds of `grid(n_cells)` on one device and on all, and their ratio within a repeat; None where the lanes
    are too few to be spread.

    Raises:
        RunError: a process failed, or the two did not give the same numbers.
    """
    say = progress or (lambda _share: None)
    devices = n_parts(padded_lanes(n_cells))
    if devices == 1:
        return None
    with ExitStack() as stack:
        children = [
            stack.enter_context(_child(trace, n_cells, {"JAX_NUM_CPU_DEVICES": n} if n else {}))
            for n in ("1", "")
        ]
        first = [_answer(child) for child in children]
        if first[0]["numbers"] != first[1]["numbers"]:
            raise RunError("bench replay: one device and several do not give the same numbers")
        ran: list[list[float]] = [[], []]
        for repeat in range(repeats):
            for place in (0, 1) if repeat % 2 == 0 else (1, 0):
                child = children[place]
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
                ran[place].append(_answer(child)["seconds"])
            say((repeat + 1) / repeats)
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
    return {
        "cells": n_cells,
        "devices": devices,
        "one_s": spread(ran[0])._asdict(),
        "all_s": spread(ran[1])._asdict(),
        "ratio": spread([one / several for one, several in zip(*ran, strict=True)])._asdict(),
    }


def _child(trace: Path, n_cells: int, setting: dict[str, str]) -> subprocess.Popen[str]:
    code = f"from simlab.bench.spreading import serve; serve({str(trace)!r}, {n_cells})"
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
    """Replay once and print the counts; then once for each line read, and print the seconds."""
    from simlab.bench import contenders
    from simlab.bench.workload import grid

    cells = grid(n_cells)
    numbers = contenders.replayer(Path(trace), cells).counts
    print(json.dumps({"numbers": numbers}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        contenders.replayer(Path(trace), cells)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
