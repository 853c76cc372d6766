"""Replaying a trace that is larger than memory should be: peak memory, and time per token beside a short one's.

The replays run in a process of their own, since what the bench itself keeps would count as theirs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simlab.bench.scratch import scratch_folder
from simlab.bench.workload import Workload
from simlab.errors import RunError

SHORT_TOKENS = 1000


def long_trace(
    workload: Workload, *, scratch: Path | None = None, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Replay the workload's trace once and one of 1,000 tokens several times; memory in bytes.

    Raises:
        InputError: there is not enough room for the trace.
        RunError: the replaying process failed.
    """
    say = progress or (lambda _share: None)
    with scratch_folder(scratch) as folder:
        short, long = folder / "short.trace", folder / "long.trace"
        Workload(
            workload.cells, min(SHORT_TOKENS, workload.tokens), workload.layers, workload.experts
        ).generate(short)
        workload.generate(long, lambda share: say(0.5 * share))
        found = _in_child(workload.cells, [short, short, short, short, long])
    say(1.0)
    ran = found["runs"]
    warm = sorted(run["seconds"] / run["tokens"] for run in ran[1:-1])
    last = ran[-1]
    return {
        "tokens": last["tokens"],
        "short_tokens": ran[0]["tokens"],
        "cells": workload.cells,
        "score_bytes": 4 * last["tokens"] * workload.layers * workload.experts,
        "seconds": last["seconds"],
        "s_per_token": last["seconds"] / last["tokens"],
        "short_s_per_token": warm[len(warm) // 2],
        "ratio": last["seconds"] / last["tokens"] / warm[len(warm) // 2],
        "peak_rss_bytes": last["peak_rss_bytes"],
        "short_peak_rss_bytes": ran[-2]["peak_rss_bytes"],
    }


def _in_child(n_cells: int, traces: Sequence[Path]) -> dict[str, Any]:
    """Replay traces one after the other in a fresh process (`replay_and_tell`)."""
    call = f"from simlab.bench.long import replay_and_tell; replay_and_tell({n_cells}, {list(map(str, traces))!r})"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RunError(f"bench replay: the replaying process failed: {why[0]}")
    return json.loads(done.stdout)


def replay_and_tell(n_cells: int, traces: Sequence[str]) -> None:
    """Replay each trace under `grid(n_cells)` and print seconds, tokens and peak memory so far as JSON."""
    import time

    from simlab.bench.workload import grid
    from simlab.replay.run import sweep

    runs = []
    for trace in traces:
        start = time.perf_counter()
        numbers = sweep(trace, grid(n_cells))
        seconds = time.perf_counter() - start
        runs.append({"seconds": seconds, "tokens": numbers[0].all.tokens, "peak_rss_bytes": _peak_rss()})
    print(json.dumps({"runs": runs}))


def _peak_rss() -> int:
    """Most memory this process has held, in bytes; getrusage's figure would include its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RunError("bench replay: /proc/self/status does not tell the peak memory")
