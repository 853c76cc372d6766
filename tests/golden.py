"""Counts of every built-in policy as they were before the replay loop; `python tests/golden.py` prints them.

They are exact: a change of any of them is a change of behaviour.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simlab.cells import build_cells, route_spec
from simlab.replay.run import sweep
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers

ROOT = Path(__file__).parent.parent
TRACES = ("original.trace", "margin-0.15.trace")
QWEN = ROOT.parent / "shared" / "data" / "bmoe" / "qwen.route.csv"
STORED = Path(__file__).parent / "golden.json"
EVICTIONS = (
    "lru", "fifo", "random:seed=7", "lfu", "lfu_decay:half_life=48", "lfru", "weighted_lfu", "least_stale", "clock",
    "slru", "sieve", "s3fifo", "two_q", "arc", "lirs", "wtinylfu:window=0.1,sample=2", "gdsf", "layer_lru",
    "layer_lfu", "static_pin", "belady", "belady_bypass", "lookahead:m=48",
)  # fmt: skip
ROUTES = (
    "substitute:L=0.2", "cache_prior:lambda=0.3,J=1", "max_rank:M=8,J=1", "cum_prob:p=0.8,J=1", "resident_only",
    "swap_on_miss:tau=0.3", "buddy:n=4", "top_k:k=2", "drop_cold:F=0.75", "adaptive_k:t=0.2", "skip_ratio:beta=0.4",
    "top_k:k=3+substitute:L=0.1+drop_cold:F=1,prefill=1",
)  # fmt: skip


def policy_cells() -> list[Cell]:
    """Every built-in policy: evictions under two budgets, routes beside LRU, and some of both."""
    cells = build_cells(budgets=["25%"], evicts=EVICTIONS)
    cells += build_cells(budgets=["9/layer"], evicts=EVICTIONS)
    cells += build_cells(budgets=["30%"], routes=ROUTES)
    evicts = ["lfu", "lfru", "s3fifo", "belady"]
    cells += build_cells(budgets=["30%"], routes=["substitute:L=0.2+drop_cold:F=0.5"], evicts=evicts)
    return cells


def name_of(cell: Cell) -> str:
    return f"{route_spec(cell.route)} {cell.evict_spec} {cell.budget.text}"


def counts_of(numbers: CellNumbers) -> dict[str, list[int]]:
    """The whole numbers of both phases, and the others' exact digits."""
    found = {}
    for phase in ("decode", "all"):
        values = dataclasses.asdict(getattr(numbers, phase))
        found[phase] = [v for v in values.values() if isinstance(v, int)]
        floats = [float(v).hex() for v in values.values() if isinstance(v, float)]
        found[phase].append(hashlib.sha256(" ".join(floats).encode()).hexdigest()[:8])
    return found


def digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def counts(trace: Trace, cells: Sequence[Cell], train: str | None = None) -> dict[str, Any]:
    names = map(name_of, cells)
    return dict(zip(names, map(counts_of, sweep(trace, cells, train=train)), strict=True))


def of_shipped(name: str) -> dict[str, Any]:
    return counts(open_trace(ROOT / "traces" / name), policy_cells(), train="25%")


def of_bench(folder: Path) -> dict[str, str]:
    """The bench workload's 64 settings, a digest of each."""
    from simlab.bench.workload import Workload

    workload = Workload()
    found = counts(workload.generate(folder), workload.make_cells())
    return {name: digest(one) for name, one in found.items()}


def of_qwen(folder: Path) -> dict[str, Any]:
    from simlab.cli.main import main

    assert main(["import", str(QWEN), "--out", str(folder / "qwen.trace")]) == 0
    trace = open_trace(folder / "qwen.trace")
    cells = build_cells(budgets=["2000MiB", "4000MiB"], evicts=["lru", "lfu", "lfu_decay", "belady"])
    return {"rows": trace.n_rows} | counts(trace, cells)


def everything() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shipped = {name: of_shipped(name) for name in TRACES}
        return shipped | {"bench": of_bench(Path(folder) / "bench"), "qwen": of_qwen(Path(folder))}


if __name__ == "__main__":
    json.dump(everything(), sys.stdout)
