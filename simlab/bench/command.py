"""The sweep of 54 cells on a recorded trace, as a user runs it: the whole command, cold and warm.

Nine budgets in MiB x six eviction policies under the original routing (issue 6). The command is run in fresh
processes, with an empty compilation cache and again with the one the first run left, and the same sweep is
run warm inside this process, taken apart into its stages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simlab.bench import contenders
from simlab.bench.replay import check_counts
from simlab.bench.spreads import spread
from simlab.cells import build_cells
from simlab.errors import RunError

BUDGETS = tuple(f"{mib}MiB" for mib in (250, 500, 750, 1000, 1500, 2000, 3000, 4000, 6000))
EVICTS = ("lru", "lfu", "random", "belady", "layer_lru", "layer_lfu")


def command_sweep(
    trace: Path, *, repeats: int, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Time it; seconds, with the spread over the repeats.

    Raises:
        InputError: the trace cannot be replayed.
        RunError: a run of the command failed, or gave other numbers than the sweep in this process.
    """
    say = progress or (lambda _share: None)
    cells = build_cells(budgets=BUDGETS, evicts=EVICTS)
    first = contenders.replayer(trace, cells)
    warm = [contenders.replayer(trace, cells) for _ in range(repeats)]
    cold_s, cached_s = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for found in (cold_s, cached_s):
                seconds, told = _run_command(trace, Path(cache))
                found.append(seconds)
                for cell, numbers, truth in zip(cells, told, first.counts, strict=True):
                    counts = {p: {name: numbers[p][name] for name in truth[p]} for p in truth}
                    check_counts("the command", cell, counts, truth)
                say((len(cold_s) + len(cached_s)) / (2 * repeats))
    return {
        "trace": str(trace),
        "cells": len(cells),
        "repeats": repeats,
        "first_in_process_s": first.whole_s,
        "warm_s": spread([r.whole_s for r in warm])._asdict(),
        "stages_s": {name: spread([r.stages[name] for r in warm])._asdict() for name in warm[0].stages},
        "command_without_cache_s": spread(cold_s)._asdict(),
        "command_with_cache_s": spread(cached_s)._asdict(),
    }


def _run_command(trace: Path, cache: Path) -> tuple[float, list[dict[str, Any]]]:
    """`simlab sweep` in a fresh process with its compilation cache in a folder: seconds, and what it printed."""
    words = ["sweep", str(trace), "--budget", ",".join(BUDGETS), "--evict", ",".join(EVICTS), "--json"]
    # Wherever compiled programs and loops would be kept otherwise, by JAX and numba or in a user's folder for caches.
    own = {
        "XDG_CACHE_HOME": str(cache),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
    }
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "from simlab.cli.main import entry; entry()", *words],
        capture_output=True,
        text=True,
        env=os.environ | own,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RunError(f"bench replay: simlab sweep failed: {why[0]}")
    return seconds, json.loads(done.stdout)
