"""`simlab fidelity`: the grid of texts, cells and levels, run and set side by side.

Every cell is run live on every text (L2), kept in a folder if one is named; the replay (L1) is of the text's recording
under the original routing, and with `recorded` cells a second replay takes its scores from between recordings
(`trace_set.py`). Cells that were themselves recorded for the set are left out of that second comparison: there the
replay is of the live run itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from simlab.cells import effective_k, parse_route, resolve_budget
from simlab.judge.fidelity.errors import (
    N_PARTS,
    Counts,
    Errors,
    counts_of_recording,
    counts_of_replays,
    errors,
)
from simlab.judge.fidelity.runs import RunStore
from simlab.judge.fidelity.trace_set import open_set
from simlab.judge.scores.ppl import Text
from simlab.judge.scores.scoring import Tick
from simlab.trace.store import Trace
from simlab.types import Cell

REPLAY, SET, FREE, AGAIN = "L1-L2", "set-L2", "L1-L3", "L2-L2"
"""What is compared: a replay of one recording or of a set with forced tokens, one with what the model writes freely,
and a second live run with the first."""
WHOLE = "all"


@dataclass(frozen=True)
class FidelityRow:
    """The errors of one cell."""

    compared: str
    """`REPLAY`, `SET`, `FREE` or `AGAIN`."""
    cell: Cell
    budget_cycles: float
    text: str | None
    """None: all texts together, each token weighing the same."""
    part: str
    """`all`, `layer 3`, or `tokens 512-1023`."""
    errors: Errors


@dataclass(frozen=True)
class Plan:
    """What to run."""

    texts: Sequence[Text]
    cells: Sequence[Cell]
    recorded: Sequence[Cell] = ()
    """Cells recorded beside the original routing, which the set takes its scores from; none: no set."""
    free: bool = False
    """Whether the model also writes by itself (L3)."""
    again: bool = False
    """Whether every cell is also run live a second time, to say how far two such runs are apart by chance."""
    train: str | None = None
    """What policies learn from, live and in replays, as `--train` takes it."""


def run(plan: Plan, store: RunStore, progress: Tick | None = None) -> list[FidelityRow]:
    """Run what the store lacks, replay, and compare.

    Raises:
        InputError: as `RunStore.record` and the replays.
    """
    # A replay takes about a quarter of the time of a live run.
    n_replayed = len(plan.cells) * (1 + bool(plan.recorded) + plan.free) / 4
    n_parts = len(plan.cells) * (1 + plan.free + plan.again) + len(plan.recorded) + 1 + n_replayed
    done = 0.0

    def next_part(n: float) -> Tick:
        nonlocal done
        start, done = done, done + n

        def tick(share: float) -> None:
            if progress is not None:
                progress((start + n * share) / n_parts)

        return tick

    original = original_cell(plan.cells[0])
    bases = store.record(plan.texts, [original], next_part(1))[0]
    live = store.record(plan.texts, plan.cells, next_part(len(plan.cells)))
    recorded = store.record(plan.texts, plan.recorded, next_part(len(plan.recorded)))
    quarter = len(plan.cells) / 4
    forced = [[counts_of_recording(trace) for trace in of_cell] for of_cell in live]
    rows = compare(
        REPLAY,
        plan,
        range(len(plan.cells)),
        _replays(bases, plan, next_part(quarter)),
        forced,
        bases[0],
    )
    if recorded:
        # Where a cell was recorded for the set, the set's replay is of the live run itself.
        rest = [i for i, cell in enumerate(plan.cells) if cell not in plan.recorded]
        replays = _set_replays(bases, recorded, [plan.cells[i] for i in rest], plan.train, next_part(quarter))
        rows += compare(SET, plan, rest, replays, [forced[i] for i in rest], bases[0])
    if plan.again:
        second = store.record_again(plan.texts, plan.cells, next_part(len(plan.cells)))
        counts = [[counts_of_recording(trace) for trace in of_cell] for of_cell in second]
        rows += compare(AGAIN, plan, range(len(plan.cells)), counts, forced, bases[0])
    if plan.free:
        free = store.generate(plan.texts, [original, *plan.cells], next_part(len(plan.cells)))
        written = [[counts_of_recording(trace) for trace in of_cell] for of_cell in free[1:]]
        replays = _replays(free[0], plan, next_part(quarter))
        rows += compare(FREE, plan, range(len(plan.cells)), replays, written, bases[0])
    return rows


def original_cell(cell: Cell) -> Cell:
    """The router's own routing at a cell's budget: its scores are the same at every budget."""
    return replace(cell, route=parse_route("original"))


def _replays(traces: Sequence[Trace], plan: Plan, tick: Tick) -> list[list[Counts]]:
    """Per cell, its counts on each trace."""
    found = []
    for trace in traces:
        found.append(counts_of_replays(trace, plan.cells, train=plan.train))
        tick(len(found) / len(traces))
    return _by_cell(found)


def _set_replays(
    bases: Sequence[Trace],
    recorded: Sequence[Sequence[Trace]],
    cells: Sequence[Cell],
    train: str | None,
    tick: Tick,
) -> list[list[Counts]]:
    """As `_replays`, each text's scores taken from between its recordings."""
    found = []
    for i, base in enumerate(bases):
        with open_set([base, *(of_cell[i] for of_cell in recorded)]) as traces:
            of_text: dict[int, Counts] = {}
            for trace, some in traces.groups(cells, train=train):
                counts = counts_of_replays(trace, [cells[c] for c in some], train=train)
                of_text |= dict(zip(some, counts, strict=True))
            found.append([of_text[c] for c in range(len(cells))])
        tick(len(found) / len(bases))
    return _by_cell(found)


def _by_cell(by_text: Sequence[Sequence[Counts]]) -> list[list[Counts]]:
    return [list(of_cell) for of_cell in zip(*by_text, strict=True)]


def compare(
    compared: str,
    plan: Plan,
    places: Sequence[int],
    replays: Sequence[Sequence[Counts]],
    live: Sequence[Sequence[Counts]],
    base: Trace,
) -> list[FidelityRow]:
    """Errors of every cell: on all texts, on each of them, and on all by layer and by stretch of the text."""
    rows = []
    header = base.header
    for place, replay, of_live in zip(places, replays, live, strict=True):
        cell = plan.cells[place]
        k = effective_k(cell.route, header)
        cycles = resolve_budget(cell.budget, cell.scope, header, k).total_bytes / header.cycle_bytes(k)

        def add(
            text: str | None,
            part: str,
            a: Sequence[Counts],
            b: Sequence[Counts],
            cell: Cell = cell,
            cycles: float = cycles,
        ) -> None:
            off = errors(a, b, paired=compared != FREE)
            rows.append(FidelityRow(compared, cell, cycles, text, part, off))

        add(None, WHOLE, replay, of_live)
        for text, a, b in zip(plan.texts, replay, of_live, strict=True):
            add(text.name, WHOLE, [a], [b])
        for i, layer in enumerate(header.moe_layers):
            add(None, f"layer {layer}", [c.part(layer=i) for c in replay], [c.part(layer=i) for c in of_live])
        shortest = min(c.n_tokens for c in (*replay, *of_live))
        edges = [shortest * i // N_PARTS for i in range(N_PARTS + 1)]
        for start, stop in pairwise(edges):
            cut = slice(start, stop)
            add(
                None,
                f"tokens {start}-{stop - 1}",
                [c.part(cut) for c in replay],
                [c.part(cut) for c in of_live],
            )
    return rows
