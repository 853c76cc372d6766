"""`replay` and `sweep`: what a trace would have done under other policies and budgets."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from simlab.cli.options import (
    add_cell_options,
    add_force,
    add_json,
    cells_from_args,
    check_output,
    warn_about_cells,
)
from simlab.cli.output import (
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

if TYPE_CHECKING:
    from simlab.trace.store import Trace
    from simlab.types import Cell


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace under one cell",
        description="Replay a trace under one policy and budget (left out: the one it was recorded at).",
    )
    parser.add_argument("trace", metavar="T.trace")
    add_cell_options(parser, lists=False)
    add_json(parser)
    parser.add_argument("--slots", metavar="F.parquet", help="write one row per routed slot")
    parser.add_argument(
        "--by", choices=("layer", "token"), help="also give the decode numbers by layer or token"
    )
    add_force(parser)
    parser.set_defaults(run=_replay)

    parser = commands.add_parser(
        "sweep",
        help="replay a trace under many cells at once",
        description="Replay a trace under every combination of the cell options.",
    )
    parser.add_argument("trace", metavar="T.trace")
    add_cell_options(parser, lists=True)
    add_json(parser)
    parser.add_argument("--out", metavar="F.parquet|.csv", help="write the cells as a flat table")
    parser.add_argument("--chart", metavar="F.html", help="write a chart of the cells")
    add_force(parser)
    parser.set_defaults(run=_sweep)


def _cells(args: argparse.Namespace, trace: Trace) -> list[Cell]:
    cells = cells_from_args(args, recorded=trace.header)
    warn_about_cells(cells, trace.header)
    return cells


def _replay(args: argparse.Namespace) -> None:
    from simlab.trace.store import open_trace

    slots_path = check_output(args.slots, "--slots", args.force, (".parquet",)) if args.slots else None
    trace = open_trace(args.trace)
    (cell,) = _cells(args, trace)
    if slots_path is None and args.by is None:
        from simlab.replay.run import sweep

        with Progress("replay") as progress:
            numbers, by = sweep(trace, [cell], progress=progress, train=args.train)[0], None
    else:
        from simlab.replay.slots import by_layer, by_token, replay_slots

        result = replay_slots(trace, cell, train=args.train)
        numbers = result.numbers
        by = {"layer": by_layer, "token": by_token}[args.by](result) if args.by else None
        if slots_path is not None:
            write_frame(slots_path, result.slots)
            say_written(slots_path)
    if args.json:
        print_json(cell_to_json(numbers) | ({f"by_{args.by}": by.to_dicts()} if by is not None else {}))
        return
    print(table([numbers]))
    if by is not None:
        print("\n" + frame_table(by))


def _sweep(args: argparse.Namespace) -> None:
    from simlab.trace.store import open_trace

    out = check_output(args.out, "--out", args.force, (".parquet", ".csv")) if args.out else None
    chart = check_output(args.chart, "--chart", args.force, (".html",)) if args.chart else None
    trace = open_trace(args.trace)
    cells = _cells(args, trace)
    from simlab.replay.run import sweep

    with Progress(f"sweep of {len(cells)} cells") as progress:
        numbers = sweep(trace, cells, progress=progress, train=args.train)
    if out is not None:
        write_frame(out, cells_to_frame(numbers))
        say_written(out)
    if chart is not None:
        from simlab.judge.charts import write_sweep_chart

        write_whole(chart, lambda path: write_sweep_chart(path, numbers, trace))
        say_written(chart)
    if args.json:
        print_json([cell_to_json(n) for n in numbers])
    else:
        print(table(numbers))
