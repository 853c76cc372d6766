"""`demo`, `record` and `validate`: the commands that run a model."""

from __future__ import annotations

import argparse
from typing import Any

from simlab.cli.engine_binary import add_engine_binary, refuse_details, validate_binary
from simlab.cli.options import (
    AS_MEMORY_ALLOWS,
    AS_RECORDED,
    add_cell_options,
    add_engine_options,
    add_force,
    add_json,
    add_model,
    add_trace,
    whole_number,
)
from simlab.cli.output import TABLE_LEGEND
from simlab.errors import InputError


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "demo",
        help="record, sweep, pick, check live",
        description="Record the embedded model, sweep, pick a cell and check it live; DIR/report.html tells.",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for what the demo writes")
    add_force(parser)
    parser.set_defaults(run=_demo)

    parser = commands.add_parser(
        "record",
        help="run a model and record a trace",
        description="Run a model on a text, or let it generate, and record every routing.",
    )
    add_model(parser)
    parser.add_argument("--out", required=True, metavar="T.trace", help="the trace folder to write")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="score this text, one token per graph")
    parser.add_argument("--tokens", type=whole_number(2), metavar="N", help="most tokens of the --text")
    source.add_argument(
        "--prompt",
        action="append",
        metavar="STR",
        help="continue this prompt, greedily; repeated, each is a turn of one session, its expert cache kept",
    )
    parser.add_argument(
        "--keep-context",
        action="store_true",
        help="let a turn follow on the one before, its context kept too",
    )
    parser.add_argument("-n", type=whole_number(1), metavar="N", help="tokens to generate after --prompt")
    add_cell_options(parser, lists=False, default_budget=AS_MEMORY_ALLOWS)
    add_engine_options(parser)
    add_force(parser)
    parser.set_defaults(run=_record)

    parser = commands.add_parser(
        "validate",
        help="replay beside live runs of the same token ids",
        description="Run the trace's token ids live under each cell, with the replay's numbers beside.",
        epilog=TABLE_LEGEND,
    )
    add_trace(parser)
    add_model(parser)
    add_cell_options(parser, lists=True, default_budget=AS_RECORDED)
    add_engine_options(parser)
    external = add_engine_binary(
        parser,
        "run this program of the BigMoeOnEdge family instead, on the trace's --text, or --prompt and -n",
        "the prompt the trace was recorded on",
    )
    external.add_argument("--text", metavar="FILE", help="the text the trace was recorded on")
    add_json(parser)
    parser.set_defaults(run=_validate)


def _demo(args: argparse.Namespace) -> None:
    from simlab.judge.demo import demo_command

    demo_command(args)


def _record(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.n is None:
        raise InputError("-n: is missing; --prompt wants the number of tokens to generate, 1 or more")
    if args.text is not None and args.n is not None:
        raise InputError("-n: goes with --prompt; --tokens cuts a --text")
    if args.prompt is not None and args.tokens is not None:
        raise InputError("--tokens: goes with --text; -n is the number of tokens to generate")
    from simlab.record.run import record_command

    record_command(args)


def _validate(args: argparse.Namespace) -> None:
    if args.engine_binary is not None:
        validate_binary(args)
        return
    refuse_details(args, "the trace's own tokens are run here", ["text"])
    from simlab.judge.validate import validate_command

    validate_command(args)
