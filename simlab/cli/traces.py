"""`import` and `info`: from other tools' files to a trace, and what a trace holds."""

from __future__ import annotations

import argparse
from typing import Any

from simlab.cli.options import add_force, add_json
from simlab.cli.output import print_json


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "import",
        help="make a trace of another tool's files",
        description="Make a trace of a route_trace v1 file and, if given, its metrics and io_trace files.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="recognised by their first line, in any order"
    )
    parser.add_argument("--out", required=True, metavar="T.trace", help="the trace folder to write")
    add_force(parser)
    parser.set_defaults(run=_import)

    parser = commands.add_parser("info", help="what a trace holds")
    parser.add_argument("trace", metavar="T.trace")
    add_json(parser)
    parser.set_defaults(run=_info)


def _import(args: argparse.Namespace) -> None:
    from simlab.trace.importer import import_files
    from simlab.trace.info import trace_info

    info = trace_info(import_files(args.files, args.out, args.force))
    print(
        f"{args.out}: {info['rows']} routing rows, {info['n_moe_layers']} MoE layers, "
        f"{info['prefill_tokens']} prefill and {info['decode_tokens']} decode tokens"
    )


def _info(args: argparse.Namespace) -> None:
    from simlab.trace.info import info_lines, trace_info

    info = trace_info(args.trace)
    if args.json:
        print_json(info)
    else:
        print("\n".join(info_lines(info)))
