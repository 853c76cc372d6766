"""`validate` and `fidelity` with `--engine-binary`: a program of the BigMoeOnEdge family for simlab's engine."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simlab.cli.options import cells_from_args, engine_options, warn_about_cells, whole_number
from simlab.errors import InputError

if TYPE_CHECKING:
    from simlab.record.external import ExternalEngine, Source

_LACKS = ("buffered", "prefetch", "ubatch", "train")
"""Options of simlab's engine that it has no flag for."""
_DETAILS = ("prompt", "n", "engine_args")


def add_engine_binary(parser: argparse.ArgumentParser, runs: str, prompt: str) -> Any:
    """`--engine-binary`, `--prompt`, `-n` and `--engine-args` in a group of their own, which is returned.

    Args:
        runs, prompt: what `--engine-binary` and `--prompt` say of themselves.
    """
    group = parser.add_argument_group("another engine")
    group.add_argument("--engine-binary", metavar="PATH", help=runs)
    group.add_argument("--prompt", metavar="STR", help=prompt)
    group.add_argument("-n", type=whole_number(1), metavar="N", help="tokens to generate after --prompt")
    group.add_argument("--engine-args", metavar="STR", help="further words for its command line")
    return group


def refuse_details(args: argparse.Namespace, instead: str, more: Sequence[str] = ()) -> None:
    """Without `--engine-binary`: refuse what goes with it.

    Args:
        instead: what happens without it. more: names of further options that go with it.

    Raises:
        InputError: one of them was given.
    """
    for name in (*more, *_DETAILS):
        if getattr(args, name) is not None:
            raise InputError(f"{_option(name)}: goes with --engine-binary; {instead}")


def _option(name: str) -> str:
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"


def _binary(args: argparse.Namespace, lacks: Sequence[str] = ()) -> ExternalEngine:
    """The binary with the options that are the same for all cells.

    Raises:
        InputError: no such program, or an option that does not go with one.
    """
    from simlab.record.engine import EMBEDDED_MODEL
    from simlab.record.external import ExternalEngine

    for name in (*_LACKS, *lacks):
        if getattr(args, name):
            raise InputError(f"{_option(name)}: the engine binary has no such option")
    if (args.prompt is None) != (args.n is None):
        raise InputError("-n: goes with --prompt, which needs it: the number of tokens to generate")
    try:
        more = shlex.split(args.engine_args or "")
    except ValueError as error:
        raise InputError(f"--engine-args {args.engine_args}: {error}") from error
    return ExternalEngine(
        args.engine_binary, args.model or EMBEDDED_MODEL, threads=args.threads, lanes=args.lanes, n_ctx=args.ctx,
        overlap=args.overlap, more=more,
    )  # fmt: skip


def _prompt(args: argparse.Namespace) -> Source:
    from simlab.record.external import Source

    return Source(prompt=args.prompt, n=args.n or 0)


def validate_binary(args: argparse.Namespace) -> None:
    """`simlab validate --engine-binary`."""
    from simlab.cli.output import Progress, cell_to_json, print_json, table
    from simlab.judge.external import validate_external
    from simlab.record.external import Source
    from simlab.trace.store import open_trace

    if (args.text is None) == (args.prompt is None):
        raise InputError("--engine-binary: wants the --text or the --prompt that the trace was recorded on")
    binary = _binary(args)
    trace = open_trace(args.trace)
    cells = cells_from_args(args, recorded=trace.header)
    warn_about_cells(cells, trace.header)
    source = Source(Path(args.text)) if args.text is not None else _prompt(args)
    with Progress("validate") as progress:
        compared = validate_external(trace, cells, binary, source, progress=progress)
    numbers = [n for pair in compared for n in (pair.replay, pair.live)]
    if args.json:
        print_json([cell_to_json(n) for n in numbers])
    else:
        print(table(numbers))


def fidelity_binary(args: argparse.Namespace, budgets: Sequence[str], routes: Sequence[str]) -> None:
    """`simlab fidelity --engine-binary`.

    Args:
        budgets: token cycles, taken as the nearest whole MiB where no budget is given.
        routes: taken where no policy is named; of a prompt, those that a route trace can be replayed under.
    """
    from simlab.cli.output import Progress, print_json
    from simlab.judge.fidelity.external import LEGEND, run_prompt, run_texts, whole_mib
    from simlab.judge.fidelity.grid import Plan
    from simlab.judge.fidelity.runs import RunStore, read_texts
    from simlab.judge.fidelity.text import fidelity_json, fidelity_text
    from simlab.judge.scores.scoring import Engines

    if (args.text is None) == (args.prompt is None):
        raise InputError("--engine-binary: wants --text or --prompt")
    binary = _binary(args, ("recorded", "free", "again", "speed", "keep"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simlab-external-")))
        engines = stack.enter_context(Engines(args.model, engine_options(args)))
        header = engines.get().header()
        args.budget = args.budget or sorted(
            {whole_mib(b, header) for b in budgets}, key=lambda b: int(b[:-3])
        )
        if not (args.route or args.margin or args.drop or args.top_k):
            args.route = [r for r in routes if args.text is not None or not r.startswith("substitute")]
            args.route += ["original"] if args.text is None else []
        cells = cells_from_args(args)
        warn_about_cells(cells, header)
        progress = stack.enter_context(Progress("fidelity"))
        if args.text is None:
            engines.close()
            what = f"a prompt continued by {args.n:,} tokens"
            rows = run_prompt(cells, binary, header, _prompt(args), folder, progress)
        else:
            texts = read_texts(engines, args.text, args.tokens, args.stretches)
            what = f"{len(texts)} texts, {sum(len(text.tokens) for text in texts):,} tokens: "
            what += ", ".join(text.name for text in texts)
            runs = folder / "runs"
            runs.mkdir()
            rows = run_texts(
                Plan(texts, cells), RunStore(folder / "recordings", engines), binary, runs, progress
            )
    if args.json:
        print_json(fidelity_json(rows, []))
    else:
        print(f"{what}\n\n{fidelity_text(rows, [], args.by)}\n{LEGEND}")
