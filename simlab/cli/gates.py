"""`gates`: the engine's own examination, on the embedded model and on the user's."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simlab.cli.options import add_engine_options, add_json, engine_options
from simlab.cli.output import Progress, align, print_json
from simlab.errors import InputError, RunError, SimlabError

if TYPE_CHECKING:
    from simlab.judge.gates import GateResult

_WORDS = {True: "pass", False: "FAIL", None: "n/a"}


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "gates",
        help="check a model's streamed logits against plain llama.cpp, bit for bit",
        description="Run every gate on each model: what must not change the logits does not, what may does act, "
        "and damage is seen. Exit status 1 if a gate fails or a model is refused.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="GGUF files, first shards if split; left out, the embedded model",
    )
    add_engine_options(parser)
    add_json(parser)
    parser.set_defaults(run=_gates)


def _gates(args: argparse.Namespace) -> None:
    from simlab.judge.gates import N_TOKENS, run_gates
    from simlab.record.engine import EMBEDDED_MODEL

    if args.ctx is not None and args.ctx < N_TOKENS:
        raise InputError(f"--ctx {args.ctx}: the gates need {N_TOKENS} or more")
    models = [Path(name) for name in args.models] or [EMBEDDED_MODEL]
    for path in models:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
    entries, bad = [], 0
    for path in models:
        results, refused = list[Any](), None
        try:
            with Progress(f"gates on {path.name}") as progress:
                results = run_gates(path, progress=progress, **engine_options(args))
        except SimlabError as error:
            refused = str(error)
        bad += refused is not None or any(result.passed is False for result in results)
        entries.append(
            {
                "model": str(path),
                "refused": refused,
                "gates": [dataclasses.asdict(result) for result in results],
            }
        )
        if not args.json:
            print(f"{path.name}: refused: {refused}\n" if refused else _table(path, results))
    if args.json:
        print_json(entries)
    if bad:
        raise RunError(f"{bad} of {len(models)} models failed a gate or were refused")


def _table(path: Path, results: Sequence[GateResult]) -> str:
    """One model's gates for reading."""
    from simlab.judge.gates import COUNTERS

    columns = (*COUNTERS, "logits", "differing")
    lines = [["gate", "claim", "result", *columns, "note"]]
    for r in results:
        counts = [str(r.counts[name]) if name in r.counts else "-" for name in columns]
        lines.append([r.gate, r.claim, _WORDS[r.passed], *counts, r.note])
    return f"{path.name}\n{align(lines)}\n"
