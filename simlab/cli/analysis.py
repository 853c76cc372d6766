"""`curve` and `explain`: LRU at every budget, and whether policy or working set limits a decode."""

from __future__ import annotations

import argparse
import json
from typing import Any

from simlab.cli.options import (
    AS_RECORDED,
    PAGES,
    TABLES,
    add_cell_options,
    add_force,
    add_json,
    add_trace,
    cells_from_args,
    output_file,
    warn_about_cells,
)
from simlab.cli.output import Progress, align, json_value, print_json, say_written, write_frame, write_whole
from simlab.errors import InputError


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "curve",
        help="the exact LRU curve at every budget",
        description="Hits and bytes read by an LRU cache of every size, exactly, from one pass over the "
        "router's own routing.",
    )
    add_trace(parser)
    parser.add_argument(
        "--scope",
        choices=("global", "per_layer"),
        default="global",
        help="one cache (default), or one per layer that share the budget evenly",
    )
    add_json(parser)
    parser.add_argument("--out", metavar="F.parquet|.csv", help="write every step as a flat table")
    parser.add_argument("--chart", metavar="F.html", help="write a page with the curve")
    add_force(parser)
    parser.set_defaults(run=_curve)

    parser = commands.add_parser(
        "explain",
        help="policy or working set: what limits a decode at one budget",
        description="Take the misses of one cell apart (left out: the cell the trace was recorded at): what is "
        "cold, what a better eviction would hit, what the budget has no room for.",
    )
    add_trace(parser)
    add_cell_options(parser, lists=False, default_budget=AS_RECORDED)
    add_json(parser)
    parser.add_argument("--chart", metavar="F.html", help="write the page with its chart")
    add_force(parser)
    parser.set_defaults(run=_explain)


def _curve(args: argparse.Namespace) -> None:
    from simlab.replay.curve import at_budget, curve_to_json, landmarks, lru_curve, routing_words
    from simlab.trace.store import open_trace

    out = output_file(args, "out", TABLES)
    chart = output_file(args, "chart", PAGES)
    trace = open_trace(args.trace)
    curve = lru_curve(trace, args.scope)
    if out is not None:
        write_frame(out, curve)
        say_written(out)
    if chart is not None:
        from simlab.charts.pages import write_curve_page

        write_whole(chart, lambda path: write_curve_page(path, curve, trace, args.scope))
        say_written(chart)
    if args.json:
        # Tens of thousands of steps: one line, not one number a line.
        print(json.dumps(json_value(curve_to_json(curve, trace, args.scope)), allow_nan=False))
        return
    header = trace.header
    print(
        f"{args.trace}: LRU, {args.scope.replace('_', ' ')}, {routing_words(header)}, replay (simulated), exact at "
        f"every budget; {curve.height:,} steps"
    )
    lines = [["budget MiB", "cycles", "hit %", "MiB/token", "misses", "all hit %", "what"]]
    for mark in landmarks(curve, header, args.scope):
        step = at_budget(curve, mark.budget_bytes)
        lines.append(
            [
                _number(step["budget_mib"], 2),
                _number(step["budget_cycles"], 3),
                _number(step["decode_hit_rate"], 2, 100),
                _number(step["decode_read_mib_per_token"], 2),
                str(step["decode_misses"]),
                _number(step["all_hit_rate"], 2, 100),
                mark.what,
            ]
        )
    print(align(lines))


def _number(value: float | None, digits: int, scale: float = 1) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def _explain(args: argparse.Namespace) -> None:
    from simlab.trace.store import open_trace

    chart = output_file(args, "chart", PAGES)
    if args.prefetch is not None:
        raise InputError("--prefetch: explain takes a cache apart that reads nothing ahead; replay shows it")
    trace = open_trace(args.trace)
    (cell,) = cells_from_args(args, recorded=trace.header)
    warn_about_cells([cell], trace.header)
    from simlab.judge.misses.explain import explain
    from simlab.judge.misses.explain_text import explain_text, explain_to_json

    with Progress("explain") as progress:
        found = explain(trace, cell, progress=progress, train=getattr(args, "train", None))
    if chart is not None:
        from simlab.charts.pages import write_explain_page

        write_whole(chart, lambda path: write_explain_page(path, found))
        say_written(chart)
    if args.json:
        print_json(explain_to_json(found))
    else:
        print(explain_text(found))
