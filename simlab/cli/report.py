"""`report` and `diff`: results shown to others, and results held to each other."""

from __future__ import annotations

import argparse
from typing import Any

from simlab.cli.options import add_json
from simlab.cli.output import print_json

_DIFFERENT = 1
"""Exit status where the two differ, as that of diff(1)."""


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
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


def _diff(args: argparse.Namespace) -> None:
    from simlab.judge.diff import diff, diff_text, diff_to_json

    found = diff(args.a, args.b)
    if args.json:
        print_json(diff_to_json(args.a, args.b, found))
    else:
        print(diff_text(args.a, args.b, found))
    if not found.same:
        raise SystemExit(_DIFFERENT)
