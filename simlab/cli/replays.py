"""`replay` and `sweep`: what a trace would have done under other policies and budgets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simlab.cli.options import (
    AS_RECORDED,
    PAGES,
    PICTURES,
    TABLES,
    add_cell_options,
    add_force,
    add_json,
    cells_from_args,
    output_file,
    warn_about_cells,
    whole_number,
)
from simlab.cli.output import (
    TABLE_LEGEND,
    Progress,
    cell_to_json,
    cells_to_frame,
    frame_table,
    print_json,
    say_written,
    table,
    write_frame,
    write_whole,
)
from simlab.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from simlab.replay.parts import Parts
    from simlab.trace.store import Trace
    from simlab.types import Cell, CellNumbers


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace under one cell",
        description="Replay a trace under one policy and budget (left out: the one it was recorded at). Of several "
        "traces, recordings of the same tokens under other policies, the scores come from between the two that "
        "stray from the router about as far as the cell does.",
        epilog=TABLE_LEGEND,
    )
    parser.add_argument(
        "traces",
        metavar="T.trace",
        nargs="+",
        help="the trace's folder; more than one: a set of the same tokens",
    )
    add_cell_options(parser, lists=False, default_budget=AS_RECORDED)
    add_json(parser)
    parser.add_argument("--slots", metavar="F.parquet", help="write one row per routed slot")
    _add_intervals(parser)
    _add_backend(parser)
    parser.add_argument(
        "--by", choices=("layer", "token"), help="also give the decode numbers by layer or token"
    )
    add_force(parser)
    parser.set_defaults(run=_replay)

    parser = commands.add_parser(
        "sweep",
        help="replay a trace under many cells at once",
        description="Replay traces under every combination of the cell options. With --out, finished groups of "
        "cells are kept beside it until the table is whole: the same command goes on where a killed one stopped.",
        epilog=TABLE_LEGEND,
    )
    parser.add_argument(
        "traces", metavar="T.trace", nargs="+", help="trace folders, or URLs such as s3://bucket/T.trace"
    )
    add_cell_options(parser, lists=True, default_budget=AS_RECORDED)
    add_json(parser)
    _add_intervals(parser)
    _add_backend(parser)
    parser.add_argument("--out", metavar="F.parquet|.csv", help="write the cells as a flat table")
    parser.add_argument(
        "--chart",
        metavar="F.html|.svg",
        help="write a page with charts of the cells, or the first of them as a picture",
    )
    parser.add_argument(
        "--group",
        type=whole_number(1),
        metavar="N",
        help="replay at most N cells together (left out: what the trace's length suggests)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="spread groups of cells over a Ray cluster; local or local:N starts N workers here",
    )
    add_force(parser)
    parser.set_defaults(run=_sweep)


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("loop", "jax"),
        default="loop",
        help="what replays: the compiled loop, or the JAX scan, for accelerators and without queue policies",
    )


def _add_intervals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--intervals",
        action="store_true",
        help="give the decode means 95 %% intervals, from blocks of tokens; replays a second time, row by row",
    )


def _cells(args: argparse.Namespace, trace: Trace) -> list[Cell]:
    cells = cells_from_args(args, recorded=trace.header)
    warn_about_cells(cells, trace.header)
    return cells


def _replay(args: argparse.Namespace) -> None:
    from simlab.trace.measured import measured, measured_text
    from simlab.trace.store import open_trace

    slots_path = output_file(args, "slots", TABLES[:1])
    traces = [open_trace(path) for path in args.traces]
    (cell,) = _cells(args, traces[0])
    with ExitStack() as stack:
        trace, note = traces[0], None
        if len(traces) > 1:
            from simlab.judge.fidelity.trace_set import open_set

            of_set = stack.enter_context(open_set(traces))
            (place,) = of_set.places([cell], train=args.train)
            trace, note = of_set.trace(place), of_set.describe(place)
        if slots_path is None and args.by is None:
            from simlab.replay.run import sweep

            with Progress("replay") as progress:
                numbers, by = (
                    sweep(trace, [cell], progress=progress, train=args.train, backend=args.backend)[0],
                    None,
                )
        else:
            from simlab.replay.slots import by_layer, by_token, replay_slots

            result = replay_slots(trace, cell, train=args.train, backend=args.backend)
            numbers = result.numbers
            by = {"layer": by_layer, "token": by_token}[args.by](result) if args.by else None
            if slots_path is not None:
                write_frame(slots_path, _told_slots(result.slots, trace))
                say_written(slots_path)
        if args.intervals:
            (numbers,) = _with_intervals(args, trace, [numbers])
    if note is not None:
        numbers = replace(numbers, note="; ".join(filter(None, (numbers.note, note))))
    if args.json:
        print_json(cell_to_json(numbers) | ({f"by_{args.by}": by.to_dicts()} if by is not None else {}))
        return
    print(table([numbers]))
    if by is not None:
        print("\n" + frame_table(by))
    if figures := measured_text(measured(traces[0])):
        print(f"measured when it was recorded, decode: {figures}")


def _told_slots(slots: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """The slots as they are written: without what the router picked where nobody knows it."""
    if trace.header.router_known:
        return slots
    import polars as pl

    return slots.with_columns(pl.lit(None, pl.Int32).alias("router_expert"))


def _sweep(args: argparse.Namespace) -> None:
    from simlab.trace.remote import local_copy
    from simlab.trace.store import open_trace

    out = output_file(args, "out", TABLES)
    chart = output_file(args, "chart", (*PAGES, *PICTURES))
    if chart is not None and len(args.traces) > 1:
        raise InputError("--chart: shows one trace; give one")
    if args.ray is not None:
        from simlab.replay.cluster import check_address

        check_address(args.ray)
    traces = [open_trace(local_copy(path)) for path in args.traces]
    # Where cells are left to the recording, they must be the same cells for all traces.
    cells = _cells(args, traces[0])
    for trace in traces[1:]:
        if _cells(args, trace) != cells:
            raise InputError(
                f"{trace.path}: was recorded under other settings than {traces[0].path}; give --budget and policies"
            )
    with ExitStack() as stack:
        numbers, parts = _run_groups(args, traces, cells, out, stack)
        if args.intervals:
            numbers = [_with_intervals(args, *of) for of in zip(traces, numbers, strict=True)]
        if out is not None:
            write_frame(out, _frame(args.traces, numbers))
            say_written(out)
        if parts is not None:
            parts.remove()
    if chart is not None:
        _draw(chart, numbers[0], traces[0])
    several = len(traces) > 1
    if args.json:
        named = zip(args.traces, numbers, strict=True)
        print_json([({"trace": t} if several else {}) | cell_to_json(n) for t, of in named for n in of])
        return
    for trace, of_trace in zip(args.traces, numbers, strict=True):
        print((f"{trace}\n" if several else "") + table(of_trace))


def _with_intervals(
    args: argparse.Namespace, trace: Trace, numbers: Sequence[CellNumbers]
) -> list[CellNumbers]:
    from simlab.judge.against import replayed_series, with_intervals

    with Progress(f"intervals of {len(numbers)} cells") as progress:
        found = replayed_series(trace, [n.cell for n in numbers], args.train, progress=progress)
    return with_intervals(numbers, [series for _, series in found])


def _draw(chart: Path, numbers: Sequence[CellNumbers], trace: Trace) -> None:
    if chart.suffix in PICTURES:
        from simlab.charts.pictures import write_sweep_picture

        write_whole(chart, lambda path: write_sweep_picture(path, numbers))
    else:
        from simlab.charts.pages import write_sweep_page

        write_whole(chart, lambda path: write_sweep_page(path, numbers, trace))
    say_written(chart)


def _run_groups(
    args: argparse.Namespace,
    traces: Sequence[Trace],
    cells: Sequence[Cell],
    out: Path | None,
    stack: ExitStack,
) -> tuple[list[list[CellNumbers]], Parts | None]:
    """The numbers per trace, and the folder of finished groups if there is one; `stack` closes it."""
    from simlab.replay.groups import check, merged, run_here, split

    groups = split(traces, cells, args.group)
    parts = None
    if out is not None and (len(groups) > 1 or out.with_name(f"{out.name}.parts").exists()):
        from simlab.replay.parts import Parts, describe

        parts = stack.enter_context(Parts(out, describe(traces, cells, args.train), groups, force=args.force))
        groups = parts.groups
    found, missing = [], []
    for group in groups:
        kept = parts.load(group, [cells[i] for i in group.places]) if parts is not None else None
        if kept is not None:
            found.append((group, kept))
        else:
            missing.append(group)
    if parts is not None and found:
        _say(f"going on with {parts.folder}: {len(found)} of {len(groups)} groups of cells are done")
    if len(missing) > 1:
        check(traces, cells, args.train)
    with Progress(f"sweep of {len(cells) * len(traces)} cells") as progress:
        if args.ray is not None and missing:
            from simlab.replay.cluster import run_on_ray

            ran = run_on_ray(args.ray, args.traces, cells, missing, train=args.train, progress=progress)
        else:
            ran = run_here(traces, cells, missing, train=args.train, progress=progress, backend=args.backend)
        # Closed at once on the way out, so that no cluster is left running.
        with closing(ran):
            for group, numbers in ran:
                if parts is not None:
                    parts.save(group, numbers)
                found.append((group, numbers))
    return merged(found, len(traces), len(cells)), parts


def _frame(names: Sequence[str], numbers: Sequence[Sequence[CellNumbers]]) -> pl.DataFrame:
    """The flat table; of several traces with the column `trace` in front."""
    import polars as pl

    if len(names) == 1:
        return cells_to_frame(numbers[0])
    frames = [
        cells_to_frame(of_trace).select(pl.lit(name).alias("trace"), pl.all())
        for name, of_trace in zip(names, numbers, strict=True)
    ]
    return pl.concat(frames)


def _say(text: str) -> None:
    print(f"simlab: {text}", file=sys.stderr, flush=True)
