"""How the replayer's time grows with cells, experts and tokens, beside the loop on one core and on all.

One size is varied at a time, the others are the workload's. A point that would take longer than it may is
left out and says so; what it would take is reckoned from the point before it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simlab.bench import contenders
from simlab.bench.contenders import Ran
from simlab.bench.replay import check_counts
from simlab.bench.scratch import scratch_folder
from simlab.bench.workload import Workload
from simlab.types import Cell

AXES: dict[str, tuple[int, ...]] = {
    "cells": (1, 4, 16, 64, 256, 1024, 4096),
    "experts": (8, 16, 32, 64, 128, 256, 512),
    "tokens": (100, 1_000, 10_000, 100_000),
}


class Speed(NamedTuple):
    """Seconds per routing event and cell, and per score of the trace, at the last point that was measured."""

    replayer: float
    loop: float
    generating: float


def scaling(
    workload: Workload,
    axes: Sequence[str],
    *,
    repeats: int,
    point_s: float,
    scratch: Path | None = None,
    say: Callable[[str], None],
    axis_values: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """A list of points per axis; a point left out has `skipped`, why.

    Args:
        point_s: seconds one point may take, making its trace included.
        say: told what is left out, and of each point before it starts.
        axis_values: sizes other than those of `AXES`.

    Raises:
        RunError: the loop does not agree with the replayer.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for axis in axes:
        found[axis] = []
        speed: Speed | None = None
        for value in (axis_values or AXES)[axis]:
            point = dataclasses.replace(workload, **{axis: value})
            point_row: dict[str, Any] = {axis: value}
            events = point.events * point.cells
            expected = 0.0
            if speed is not None:
                expected = 2 * events * speed.replayer + point.events * point.experts * speed.generating
            if expected > point_s:
                point_row["skipped"] = f"would take about {expected:.0f} s, above {point_s:.0f} s"
                say(f"{axis} {value}: left out, {point_row['skipped']}")
            else:
                say(f"{axis} {value}")
                with_loop = speed is None or expected + 2 * events * speed.loop <= point_s
                measured, speed = _point(point, repeats, point_s, scratch, with_loop, speed)
                point_row |= measured
            found[axis].append(point_row)
    return found


def _point(
    point: Workload, repeats: int, point_s: float, scratch: Path | None, with_loop: bool, before: Speed | None
) -> tuple[dict[str, Any], Speed]:
    """One point: a first run with compilation, then timed ones in turns until the repeats or the time are over."""
    start = time.perf_counter()
    with scratch_folder(scratch) as folder:
        path = folder / "generated.trace"
        point.generate(path)
        generated_s = time.perf_counter() - start
        cells = point.make_cells()
        runs: dict[str, Callable[[], Ran]] = {"replayer": lambda: contenders.replayer(path, cells)}
        if with_loop:
            runs["numba_1_core"] = lambda: contenders.hand_written(path, cells)
            runs["numba_parallel"] = lambda: contenders.hand_written(path, cells, parallel=True)
        first = {name: run() for name, run in runs.items()}
        for name, ran in first.items():
            _hold(name, cells, ran, first["replayer"])
        timed: dict[str, list[Ran]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                timed[name].append(run())
            if time.perf_counter() - start > point_s:
                break
    events = point.events * point.cells

    def median_s(name: str, which: str) -> float:
        return statistics.median(getattr(ran, which) for ran in timed[name])

    row: dict[str, Any] = {"first_run_s": first["replayer"].whole_s, "runs": len(timed["replayer"])}
    for name in ("replayer", "numba_1_core", "numba_parallel"):
        for which in ("whole", "alone"):
            value = median_s(name, f"{which}_s") / events * 1e9 if name in timed else None
            row[f"{name}_{which}_ns"] = value
    speed = Speed(
        replayer=median_s("replayer", "whole_s") / events,
        loop=sum(median_s(n, "whole_s") for n in timed if n != "replayer") / events
        if with_loop
        else before.loop
        if before is not None
        else 0.0,
        generating=generated_s / (point.events * point.experts),
    )
    return row, speed


def _hold(name: str, cells: Sequence[Cell], ran: Ran, truth: Ran) -> None:
    for cell, counts, expected in zip(cells, ran.counts, truth.counts, strict=True):
        check_counts(name, cell, counts, expected)
