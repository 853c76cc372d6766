"""`ppl`, `choices` and `humaneval`: the commands that judge cells by what the model says under them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simlab.cli.options import (
    AS_MEMORY_ALLOWS,
    add_cell_options,
    add_engine_options,
    add_json,
    add_model,
    whole_number,
)
from simlab.errors import InputError

_WARMED = (
    "; a cell that goes on warms its cache with the last of them alone, so that its misses, and under a lossy policy "
    "its answers, may differ a little from those of a run in one go"
)


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = _score(
        commands,
        "ppl",
        "perplexity of texts under each cell",
        "Score texts token by token under each cell; differences are against the first, token by token.",
        resumed="; the figures are those of a run in one go",
    )
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="the texts to score")
    parser.add_argument(
        "--wide",
        action="store_true",
        help="one graph holds a whole window: shows what such a score cannot see",
    )
    parser.set_defaults(run=_ppl)

    parser = _score(
        commands,
        "choices",
        "multiple-choice questions under each cell",
        "Answer multiple-choice questions under each cell; flips are against the first.",
    )
    parser.add_argument(
        "--items",
        required=True,
        metavar="FILE",
        help="JSONL or parquet with subject, question, choices, answer",
    )
    parser.set_defaults(run=_choices)

    parser = _score(
        commands,
        "humaneval",
        "HumanEval's problems under each cell",
        "Complete HumanEval's problems under each cell, greedily, and run their tests on the completions.",
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="the first N problems only")
    parser.add_argument(
        "--allow-code-execution",
        nargs="?",
        const="protected",
        choices=("protected", "unprotected"),
        help="run the code the model writes, under bubblewrap; =unprotected: in a process with limits alone, where it "
        "can do what you can do",
    )
    parser.set_defaults(run=_humaneval)


def _score(
    commands: Any, name: str, help_text: str, description: str, resumed: str = _WARMED
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=description)
    add_model(parser)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="F.jsonl",
        help="keep finished items in this file, and skip those it has" + resumed,
    )
    add_cell_options(parser, lists=True, default_budget=AS_MEMORY_ALLOWS)
    add_engine_options(parser)
    add_json(parser)
    return parser


def _ppl(args: argparse.Namespace) -> None:
    from simlab.judge.scores.ppl import ppl_command

    ppl_command(args)


def _choices(args: argparse.Namespace) -> None:
    from simlab.judge.scores.choices import choices_command

    choices_command(args)


def _humaneval(args: argparse.Namespace) -> None:
    if args.allow_code_execution is None:
        raise InputError(
            "--allow-code-execution: is missing; humaneval runs code that the model writes, in a sandbox"
        )
    from simlab.judge.scores.humaneval import humaneval_command

    humaneval_command(args)
