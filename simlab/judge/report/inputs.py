"""From files to a report: traces, sweeps of them, live runs beside them, and what a trace says by itself.

What speaks in the report's first sentence is replayed anew on the trace: that gives its interval, and shows whether a
table is of the trace it was given with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from simlab.cells import build_cells, recorded_budget
from simlab.errors import InputError
from simlab.judge.against import replayed_series, with_intervals
from simlab.judge.misses.explain import explain
from simlab.judge.report.cells_file import TRACE, can_replay, numbers_of, pairs_of, read_cells_table
from simlab.judge.report.commands import sweep_commands, train_option, validate_commands
from simlab.judge.report.page import TraceReport
from simlab.judge.report.verdict import Chosen, sweep_choice
from simlab.replay.curve import lru_curve
from simlab.trace.info import trace_info
from simlab.trace.measured import measured
from simlab.trace.provenance import OF_TRACE, check, trace_provenance
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers, Comparison, Scope

UNKNOWN_BUDGET = "2cycles"
"""What a trace of an unknown budget is explained at if nobody says: a small cache, above the cliff."""
_INTERVALS_SHARE = 0.4
"""Of the time a trace takes, about what the replay of a sweep's two chosen cells does."""


def trace_report(
    path: str,
    *,
    name: str | None = None,
    sweep: Sequence[CellNumbers] = (),
    comparisons: Sequence[Comparison] = (),
    explained: Cell | None = None,
    progress: Callable[[float], None] | None = None,
) -> TraceReport:
    """Everything of one trace.

    Args:
        path: the trace's folder.
        name: what the page calls it; None: its path.
        explained: the cell to take apart; None leaves that out.

    Raises:
        InputError: the trace cannot be read, or the sweep's numbers are not those of this trace.
    """

    def part(start: float, end: float) -> Callable[[float], None]:
        return lambda share: progress(start + (end - start) * share) if progress is not None else None

    trace = open_trace(path)
    wanted = trace_provenance(trace.header)
    live = [n for pair in comparisons for n in (pair.replay, pair.live)]
    for option, tables in (("--sweep", sweep), ("--validate", live)):
        for found in dict.fromkeys(n.provenance for n in tables):
            check(found, wanted, OF_TRACE, f"{option}: a setting", path, "give the table made of this trace")
    info = trace_info(path)
    chosen = sweep_choice(sweep)
    if chosen is not None and not comparisons:
        chosen = _with_intervals(path, trace, chosen, train_option(sweep), part(0, _INTERVALS_SHARE))
    curve = lru_curve(trace) if info["decode_tokens"] else None
    return TraceReport(
        name=name or path,
        header=trace.header,
        tokens={phase: info[f"{phase}_tokens"] for phase in ("prefill", "decode")},
        measured=measured(trace),
        sweep=sweep,
        chosen=chosen,
        comparisons=comparisons,
        curve=curve,
        explanation=None
        if explained is None
        else explain(trace, explained, progress=part(_INTERVALS_SHARE, 1)),
    )


def _with_intervals(
    name: str, trace: Trace, chosen: Chosen, train: Sequence[str], progress: Callable[[float], None]
) -> Chosen:
    """The two cells of a sweep's verdict, replayed for their intervals.

    Raises:
        InputError: the replay counts otherwise than the sweep says.
    """
    if not all(can_replay(n.cell) for n in chosen):
        return chosen
    part = train[-1] if train else None
    made = replayed_series(trace, [n.cell for n in chosen], part, progress=progress)
    for told, (found, _) in zip(chosen, made, strict=True):
        for count in ("lookups", "hits", "substituted", "dropped"):
            here, there = getattr(found.decode, count), getattr(told.decode, count)
            if here != there:
                raise InputError(
                    f"{name}: replays {here} decode {count} at {told.cell.budget.text} where the sweep has {there}; it "
                    "is of another trace or of another version of simlab"
                )
    return Chosen(*with_intervals([n for n, _ in made], [s for _, s in made]))


def cell_to_explain(trace: str, budget: str | None) -> tuple[Cell, str | None]:
    """The router's own routing under LRU at a budget, and a note where nobody said which.

    Raises:
        InputError: no budget.
    """
    header = open_trace(trace).header
    note: str | None = None
    scope: Scope = "global"
    if budget is None:
        scope = header.scope or "global"
        budget = recorded_budget(header)
        if budget is None:
            budget = UNKNOWN_BUDGET
            note = (
                f"{trace} does not say what budget it was recorded at; it is explained at {UNKNOWN_BUDGET} "
                "(--budget names another)."
            )
        elif budget == "off":
            note = f"{trace} was recorded without a cache, and is explained so (--budget names another)."
    return build_cells(budgets=[budget], scope=scope)[0], note


def sweeps_by_trace(files: Sequence[str], traces: Sequence[str]) -> dict[str, list[CellNumbers]]:
    """The cells of sweep tables by the trace they are of.

    A table with a column `trace` says it; others are of the traces in their order, one table for each.

    Raises:
        InputError: a file is no table of cells, or it is not clear of which trace.
    """
    found: dict[str, list[CellNumbers]] = {name: [] for name in traces}
    waiting = list(traces)
    for file in files:
        path = Path(file)
        frame = read_cells_table(path)
        if "live" in frame["source"]:
            raise InputError(f"--sweep {file}: holds live runs; give them as --validate")
        if TRACE not in frame.columns:
            if not waiting:
                raise InputError(f"--sweep {file}: more tables than traces; it says not which trace it is of")
            found[waiting.pop(0)] += numbers_of(path, frame)
            continue
        for value in frame[TRACE].unique(maintain_order=True):
            name = next((n for n in traces if Path(n) == Path(value)), None)
            if name is None:
                raise InputError(
                    f"--sweep {file}: has cells of {value}, which is not among the traces of this report"
                )
            found[name] += numbers_of(path, frame.filter(frame[TRACE] == value))
            if name in waiting:
                waiting.remove(name)
    if files and waiting:
        raise InputError(
            f"--sweep: none of the tables is of {waiting[0]}; give one for each trace, in their order"
        )
    return found


def comparisons_by_trace(files: Sequence[str], traces: Sequence[str]) -> dict[str, list[Comparison]]:
    """Replays beside live runs, from what `validate --json` printed: one file for each trace, in their order.

    Raises:
        InputError: a file holds no such pairs, or there are more files than traces.
    """
    if len(files) > len(traces):
        raise InputError(f"--validate {files[len(traces)]}: more files than traces")
    if files and len(files) < len(traces):
        raise InputError(f"--validate: give one file for each of the {len(traces)} traces, in their order")
    found: dict[str, list[Comparison]] = {}
    for name, file in zip(traces, files, strict=False):
        path = Path(file)
        pairs = pairs_of(path, numbers_of(path, read_cells_table(path)))
        found[name] = [Comparison(*pair) for pair in pairs]
    return found


class Files(NamedTuple):
    """A report made of files, but for writing it."""

    traces: list[TraceReport]
    commands: list[str]
    """What makes the sweeps and live runs again."""
    notes: list[str]


def report_of_files(
    traces: Sequence[str],
    sweeps: Sequence[str],
    validations: Sequence[str],
    budget: str | None = None,
    *,
    progress: Callable[[float], None] | None = None,
) -> Files:
    """Read all that a report is made of.

    Raises:
        InputError: a file cannot be read, or does not belong to the traces.
    """
    if len(set(map(Path, traces))) < len(traces):
        raise InputError("T.trace: the same trace is given twice")
    swept = sweeps_by_trace(sweeps, traces)
    compared = comparisons_by_trace(validations, traces)
    made: list[TraceReport] = []
    commands: list[str] = []
    notes: list[str] = []
    short = [Path(path).name for path in traces]
    for place, name in enumerate(traces):

        def part(done: float, place: int = place) -> None:
            if progress is not None:
                progress((place + done) / len(traces))

        cell, note = cell_to_explain(name, budget)
        notes += [note] if note else []
        sweep, comparisons = swept[name], compared.get(name, [])
        label = short[place] if short.count(short[place]) == 1 else name
        made.append(
            trace_report(
                name, name=label, sweep=sweep, comparisons=comparisons, explained=cell, progress=part
            )
        )
        # A table of several traces comes from one command.
        file = sweeps[place] if len(sweeps) == len(traces) else None
        if sweep and (file is not None or place == 0):
            of = [name] if file is not None else list(traces)
            commands += sweep_commands(of, sweep, file or sweeps[0])
        if comparisons:
            numbers = [c.replay for c in comparisons]
            commands += validate_commands(name, made[-1].header.model, numbers, validations[place])
    return Files(made, commands, notes)
