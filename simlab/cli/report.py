"""`report` and `diff`: results shown to others, and results held to each other."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from simlab.cli.options import PAGES, add_force, add_json, output_file
from simlab.cli.output import Progress, print_json, say_written

_DIFFERENT = 1
"""Exit status where the two differ, as that of diff(1)."""


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "report",
        help="one offline page: what was run, verdict, tables, charts, caveats",
        description="Write one HTML file that opens without a network. Of a trace alone: its LRU curve and what limits "
        "it at one budget. With --sweep and --validate: their cells, and the verdict on them. Several traces stand "
        "side by side.",
    )
    parser.add_argument("traces", nargs="+", metavar="T.trace", help="the traces' folders")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="F",
        help="cells of simlab sweep, --out (parquet, csv) or --json; once for each trace, in their order, or one table "
        "of a sweep of them all",
    )
    parser.add_argument(
        "--validate",
        action="append",
        default=[],
        metavar="F",
        help="what simlab validate --json printed; once for each trace, in their order",
    )
    parser.add_argument(
        "--budget", metavar="B", help="where to ask 'policy or working set?' (default: where it was recorded)"
    )
    parser.add_argument("--out", required=True, metavar="R.html", help="the page to write")
    add_force(parser)
    parser.set_defaults(run=_report)

    parser = commands.add_parser(
        "diff",
        help="the first differing slot or cell of two traces, slot tables or sweeps",
        description="Compare two traces, two slot tables of replay --slots (or a trace with one), or two tables of "
        "cells (sweep --out, sweep or validate --json). Exit status 0: nothing differs, 1: something does.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="T.trace, slots.parquet, sweep.parquet|.csv|.json"
        )
    add_json(parser)
    parser.set_defaults(run=_diff)


def _report(args: argparse.Namespace) -> None:
    out = output_file(args, "out", PAGES)
    assert out is not None
    from simlab.judge.report.inputs import report_of_files
    from simlab.judge.report.page import verdict, write_report

    with Progress("report") as progress:
        found = report_of_files(args.traces, args.sweep, args.validate, args.budget, progress=progress)
    words = [
        word for name in ("sweep", "validate") for file in getattr(args, name) for word in (f"--{name}", file)
    ]
    words += ["--budget", args.budget] if args.budget else []
    again = shlex.join(["simlab", "report", *args.traces, *words, "--out", args.out])
    write_report(out, found.traces, commands=[*found.commands, again], notes=found.notes)
    say_written(out)
    for one in found.traces:
        print((f"{one.name}: " if len(found.traces) > 1 else "") + verdict(one).sentence)


def _diff(args: argparse.Namespace) -> None:
    from simlab.judge.diff import diff, diff_text, diff_to_json

    found = diff(args.a, args.b)
    if args.json:
        print_json(diff_to_json(args.a, args.b, found))
    else:
        print(diff_text(args.a, args.b, found))
    if not found.same:
        raise SystemExit(_DIFFERENT)
