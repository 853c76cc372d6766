"""What a person who moves a slider asks of a trace: small views that are replayed anew in a fraction of a second.

A view has the same number of lanes at every position of a slider, so the first replay compiles the program and
the others run it. Everything here is simulated unless it says that it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from simlab.cells import MIB, build_cells
from simlab.errors import InputError
from simlab.judge.misses.explain import Rate, rate
from simlab.judge.misses.grids import change_grid, changed_experts
from simlab.judge.report.cells_file import numbers_of, read_cells_table
from simlab.policy import builtin_policies
from simlab.replay.run import sweep
from simlab.replay.slots import by_token, replay_slots
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers, Comparison, EvictionPolicy, Scope, TraceHeader

MARGINS = ("0", "0.02", "0.05", "0.075", "0.1", "0.125", "0.15", "0.175", "0.2", "0.25", "0.3", "0.35", "0.4",
           "0.45", "0.5", "0.6")  # fmt: skip
"""Steps of the margin slider: dense where a margin costs little."""
_AROUND = (0.5, 1.0, 2.0)
"""Budgets replayed beside the chosen one, as its multiples."""


def traces_in(folder: Path) -> list[str]:
    """Names of the traces that lie in a folder, the recording of the router's own routing first."""
    found = sorted(p.parent.name for p in folder.glob("*.trace/header.json"))
    return sorted(found, key=lambda name: (name != "original.trace", name))


def trace_picker(mo: Any, folder: Path) -> tuple[Any, Any]:
    """A choice among the traces that lie in a folder, and a path to type, at first what a script's `--trace` says.

    Args:
        mo: the module marimo.
    """
    shipped = mo.ui.dropdown(traces_in(folder), value="original.trace", label="Shipped trace")
    typed = mo.ui.text(
        value=(mo.app_meta().mode and mo.cli_args().get("trace")) or "",
        placeholder="/path/to/your.trace",
        label="or a path of your own",
        full_width=True,
    )
    return shipped, typed


def cache_picker(mo: Any) -> tuple[Any, Any]:
    """A choice of the eviction policy, and of one cache or one per layer; `mo` as in `trace_picker`."""
    eviction = mo.ui.dropdown(evictions(), value="lru", label="Eviction")
    scopes = {"one cache": "global", "a cache per layer": "per_layer"}
    return eviction, mo.ui.dropdown(scopes, value="one cache", label="Scope")


def chosen_trace(folder: Path, shipped: str, typed: str) -> Trace:
    """The trace a person typed the path of, else the shipped one they chose.

    Raises:
        InputError: it is not a trace.
    """
    return open_trace(Path(typed.strip()).expanduser() if typed.strip() else folder / shipped)


def evictions() -> list[str]:
    """Evictions that run on any trace in any cache, LRU first: those that need no training."""
    found = [
        p.name
        for p in builtin_policies().values()
        if isinstance(p, EvictionPolicy) and "training" not in p.needs and p.scope is None
    ]
    return sorted(found, key=lambda name: (name != "lru", name))


def budget_steps(header: TraceHeader) -> list[float]:
    """Budgets in token cycles for a slider: a quarter cycle to the whole model, a quarter apart or wider."""
    whole = header.expert_bytes / header.cycle_bytes()
    apart = 0.25 * max(1, round(whole / 40))
    return [round(float(c), 2) for c in np.arange(0.25, whole + 1e-9, apart)]


def margin_cells(cycles: float, margins: Sequence[str], evict: str, scope: Scope) -> list[Cell]:
    """Cells of every margin at half, once and twice a budget."""
    budgets = [f"{cycles * factor:g}cycles" for factor in _AROUND]
    return build_cells(budgets=budgets, margins=margins, evicts=[evict], scope=scope)


def margin_list(text: str) -> list[str]:
    """Margins a person typed, ascending, without doubles, and always with 0 to compare with.

    Raises:
        InputError: one that is no number between 0 and 1.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = {build_cells(budgets=["1cycle"], margins=[word])[0].margin or 0.0: word for word in words}
    known.setdefault(0.0, "0")
    return [known[margin] for margin in sorted(known)]


def margin_sweep(
    trace: Trace, cycles: float, margins: Sequence[str], evict: str, scope: Scope
) -> list[CellNumbers]:
    """Replay `margin_cells`.

    Raises:
        InputError: as `simlab.replay.run.sweep`; of a trace without scores, that it has none.
    """
    return sweep(trace, margin_cells(cycles, margins, evict, scope))


def at_budget(numbers: Sequence[CellNumbers], cycles: float) -> list[CellNumbers]:
    """The cells of one budget, in their order."""
    return [n for n in numbers if abs(n.cell.budget.amount - cycles) < 1e-9]


@dataclass(frozen=True)
class Changes:
    """One cell, slot by slot: its decode figures with intervals, and what it changed."""

    numbers: CellNumbers
    miss_rate: Rate
    mib_per_token: Rate
    substituted: Rate
    """Share of the slots."""
    grid: pl.DataFrame
    """As `simlab.judge.misses.grids.change_grid`."""
    experts: pl.DataFrame
    """As `simlab.judge.misses.grids.changed_experts`."""


def changes(trace: Trace, cell: Cell) -> Changes:
    """Replay one cell with every slot.

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    found = replay_slots(trace, cell)
    tokens = by_token(found)
    turns = tokens["turn"].to_numpy()

    def of(name: str) -> np.ndarray:
        return tokens[name].to_numpy().astype(np.float64)

    one = np.ones(len(turns))
    return Changes(
        numbers=found.numbers,
        miss_rate=rate(of("misses"), of("lookups"), turns),
        mib_per_token=rate(of("read_bytes") / MIB, one, turns),
        substituted=rate(of("substituted"), of("slots"), turns),
        grid=change_grid(found),
        experts=changed_experts(found),
    )


def measured_cells(path: Path) -> list[CellNumbers]:
    """Live cells with a perplexity, from what `validate --json` or `ppl --json` printed.

    Raises:
        InputError: it is no such file, or holds no perplexity.
    """
    found = [n for n in numbers_of(path, read_cells_table(path)) if n.source == "live" and n.ppl is not None]
    if not found:
        raise InputError(
            f"{path}: holds no live cell with a perplexity; write it with simlab validate or ppl, and --json"
        )
    return found


def priced(replayed: Sequence[CellNumbers], live: Sequence[CellNumbers]) -> list[Comparison]:
    """Replayed cells beside the live run of the same setting, those that have one."""

    def setting(n: CellNumbers) -> tuple[object, ...]:
        cell = n.cell
        plain = not cell.route.steps or cell.route.name == "original"
        steps = (
            (("substitute", (("L", 0.0),)),)
            if plain
            else tuple((s.policy.name, tuple(s.knobs.items())) for s in cell.route.steps)
        )
        return steps, n.top_k, cell.evict_spec, cell.scope, round(n.budget_mib * MIB)

    known = {setting(n): n for n in live}
    return [Comparison(n, known[setting(n)]) for n in replayed if setting(n) in known]
