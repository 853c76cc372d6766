"""`bench`: what the engine costs per routing event, and how fast the replayer is beside loops written by hand."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simlab.cli.options import add_json, whole_number
from simlab.cli.output import Progress, align, print_json
from simlab.errors import InputError

_AXES = ("cells", "experts", "tokens")
_Measured = tuple[dict[str, Any], str]
"""What was found, as plain JSON values and for reading."""


def add_commands(commands: Any) -> None:
    """Add the command and its two subjects to the subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure the engine or the replayer on this machine",
        description="Measure the replayer beside loops written by hand, and what the engine costs per routing event; "
        "without a word both, as they are measured where no option is given.",
    )
    add_json(parser)
    subjects = parser.add_subparsers(title="what (left out, both)", metavar="[replay|engine]", dest="what")
    engine = subjects.add_parser(
        "engine",
        help="the hook's cost per routing event, and each way of reading against serial",
        description="Measure on the shipped text, everything interleaved in one process: the hook's time beside "
        "a plain decode with everything resident, and read wait under overlap and look-ahead against serial.",
        allow_abbrev=False,
    )
    engine.add_argument("--model", metavar="GGUF", help="left out, the embedded model")
    engine.add_argument(
        "--tokens", type=whole_number(16), default=128, metavar="N", help="tokens in each pass (default 128)"
    )
    engine.add_argument(
        "--repeats", type=whole_number(1), default=4, metavar="N", help="passes of each cell (default 4)"
    )
    engine.add_argument("--lanes", type=whole_number(1, 8), default=4, metavar="N", help="reader lanes")
    engine.add_argument("--threads", type=whole_number(1), metavar="N", help="compute threads of the engine")
    replay = subjects.add_parser(
        "replay",
        help="the replayer beside loops written by hand, on identical work",
        description="Replay margins x budgets over a generated trace with this replayer, a loop compiled by numba and "
        "a plain dict; hold their results to each other; then time them in turns.",
        allow_abbrev=False,
    )
    _add_replay_options(replay)
    measures = {replay: _replay, engine: _engine}
    for subject, measure in measures.items():
        subject.set_defaults(run=lambda args, measure=measure: _tell(args, [measure(args)]))
        # Where nothing stands after the subject, what stands before it holds.
        add_json(subject, default=argparse.SUPPRESS)
        subject.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of a failure"
        )
    parser.set_defaults(
        run=lambda args: _tell(args, [measure(one.parse_args([])) for one, measure in measures.items()])
    )


def _tell(args: argparse.Namespace, measured: Sequence[_Measured]) -> None:
    """Print what one subject found, or both by their names."""
    if args.json:
        print_json(measured[0][0] if args.what else {"replay": measured[0][0], "engine": measured[1][0]})
    else:
        print("\n\n".join(text for _, text in measured))


def _add_replay_options(parser: argparse.ArgumentParser) -> None:
    def number(name: str, low: int, high: int, default: int, text: str) -> None:
        parser.add_argument(
            f"--{name}",
            type=whole_number(low, high),
            default=default,
            metavar="N",
            help=f"{text} (default {default})",
        )

    number("cells", 1, 65536, 64, "cells, about as many margins as budgets")
    number("tokens", 9, 1_000_000, 300, "tokens of the generated trace")
    number("layers", 1, 1000, 40, "its MoE layers")
    number("experts", 2, 4096, 256, "its experts in each layer")
    number("repeats", 1, 1000, 5, "timed runs of each contender")
    parser.add_argument("--trace", metavar="T.trace", help="replay this trace instead of a generated one")
    parser.add_argument(
        "--workload",
        choices=("margins", "qwen"),
        default="margins",
        help="margins: margins x budgets (default); qwen: nine budgets x six evictions on --trace, as a command, "
        "cold and warm",
    )
    parser.add_argument(
        "--scaling",
        nargs="?",
        const=",".join(_AXES),
        metavar="AXIS,..",
        help=f"tables over {', '.join(_AXES)} (left out, all three) instead",
    )
    parser.add_argument(
        "--point-seconds",
        type=whole_number(1),
        default=120,
        metavar="S",
        help="longest that a point of --scaling may take (default 120)",
    )
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="folder for generated traces (default: the system's for temporary files)",
    )
    parser.add_argument("--history", metavar="F.jsonl", help="add this run to a history of runs")
    parser.add_argument(
        "--against",
        metavar="F.jsonl",
        help="say what changed since the last run of this machine in a history",
    )


def _replay(args: argparse.Namespace) -> _Measured:
    scratch = Path(args.scratch) if args.scratch else None
    if scratch is not None and not scratch.is_dir():
        raise InputError(f"--scratch {scratch}: no such folder")
    compares = args.scaling is None and args.workload == "margins"
    for name in ("history", "against"):
        if getattr(args, name) and not compares:
            raise InputError(f"--{name}: holds comparisons; leave out --scaling and --workload qwen")
    return (_compare if compares else _scaling if args.scaling else _qwen)(args, scratch)


def _compare(args: argparse.Namespace, scratch: Path | None) -> _Measured:
    from simlab.bench import history, text
    from simlab.bench.long import SHORT_TOKENS, long_trace
    from simlab.bench.replay import bench_replay
    from simlab.bench.workload import Workload

    workload = Workload(args.cells, args.tokens, args.layers, args.experts)
    trace = Path(args.trace) if args.trace else None
    is_long = trace is None and args.tokens > SHORT_TOKENS
    with Progress("bench replay") as progress:
        found = bench_replay(
            # The loops keep up with a long trace no better than with its first tokens.
            dataclasses.replace(workload, tokens=SHORT_TOKENS) if is_long else workload,
            trace=trace,
            repeats=args.repeats,
            scratch=scratch,
            progress=progress,
        )
    told = [text.comparison(found)]
    if is_long:
        with Progress("bench replay: long trace") as progress:
            found["long"] = long_trace(workload, scratch=scratch, progress=progress)
        told.append(text.long_trace(found["long"]))
    now = history.entry(found)
    if args.against:
        past = history.last_of(Path(args.against), now)
        found["against"] = None
        if past is None:
            told.append(f"{args.against}: holds no run of this machine and workload")
        else:
            changes = history.change(past, now)
            found["against"] = {"date": past["date"], "commit": past["commit"], "changes": changes}
            told.append(text.change(past, changes))
    if args.history:
        history.append(Path(args.history), now)
    return found, "\n\n".join(told)


def _scaling(args: argparse.Namespace, scratch: Path | None) -> _Measured:
    from simlab.bench import text
    from simlab.bench.scaling import scaling
    from simlab.bench.workload import Workload

    axes = [word.strip() for word in args.scaling.split(",")]
    if not set(axes) <= set(_AXES):
        raise InputError(f"--scaling {args.scaling}: there are {', '.join(_AXES)}")
    found = scaling(
        Workload(args.cells, args.tokens, args.layers, args.experts),
        axes,
        repeats=args.repeats,
        point_s=args.point_seconds,
        scratch=scratch,
        say=lambda line: print(f"simlab: bench replay: {line}", file=sys.stderr, flush=True),
    )
    return {"scaling": found}, text.scaling(found)


def _qwen(args: argparse.Namespace, _scratch: Path | None) -> _Measured:
    from simlab.bench import text
    from simlab.bench.command import command_sweep

    if not args.trace:
        raise InputError("--workload qwen: needs --trace, a decode recorded or imported")
    with Progress("bench replay: sweep of 54 cells") as progress:
        found = command_sweep(Path(args.trace), repeats=args.repeats, progress=progress)
    return found, text.command_sweep(found)


def _engine(args: argparse.Namespace) -> _Measured:
    from simlab.judge.bench_engine import bench_engine

    model = Path(args.model) if args.model is not None else None
    if model is not None and not model.is_file():
        raise InputError(f"--model {model}: no such file")
    with Progress("bench engine") as progress:
        found = bench_engine(
            model,
            n_tokens=args.tokens,
            repeats=args.repeats,
            progress=progress,
            lanes=args.lanes,
            n_threads=args.threads,
        )
    return found, report(found)


def _between(measured: dict[str, Any], form: str = ".1f") -> str:
    """A value and its interval in one word."""
    low, high = measured["interval"]
    return f"{measured['value']:{form}}[{low:{form}}..{high:{form}}]"


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def report(found: dict[str, Any]) -> str:
    """The bench for reading: medians with 95 % intervals, times in microseconds per routing event."""
    asking, target = found["asking"], found["target_us"]
    head = (
        f"{found['model']}: {found['n_expert']} experts, top {found['n_expert_used']}, {found['n_moe_layers']} MoE "
        f"layers; {found['tokens']} tokens, {found['repeats']} passes"
    )
    hook = [
        ["route", "budget", "recording", "observed us", "all passes", "release us", "callback us", "writing us",
         "total us", "of plain step", "misses"]
    ]  # fmt: skip
    for row in found["hook"]:
        hook.append(
            [
                row["route"],
                row["budget"],
                "yes" if row["recording"] else "no",
                _between(row["observed_us"]),
                _number(row["all_passes_us"]),
                _number(row["release_us"]),
                _between(asking["callback_us"]),
                _number(row["writing_us"]),
                _number(row["total_us"]),
                f"{100 * row['share_of_plain_step']:.0f}%",
                _number(row["misses_per_event"]),
            ]
        )
    reads = [
        ["mode", "wait ms/token", "wait ratio", "tok/s", "tok/s ratio", "issued MiB", "useful", "wasted"]
    ]
    for row in found["reads"]:
        mib = [_number(row[f"{name}_bytes"] / 2**20, ".2f") for name in ("issued", "useful", "wasted")]
        reads.append(
            [
                row["mode"],
                _number(row["read_wait_ms_per_token"], ".2f"),
                _between(row["read_wait_ratio"], ".3f"),
                _number(row["tok_s"]),
                _between(row["tok_s_ratio"], ".3f"),
                *mib,
            ]
        )
    return "\n".join(
        [
            head,
            "",
            "The hook, reads excluded, per routing event (one MoE layer of one token); median [95 % interval]"
            + (f"; target {target:.0f} us" if target else ""),
            align(hook),
            f"callback: asked about {asking['nodes_per_event']:.0f} nodes, {_between(asking['declining_us'])} us if it "
            f"declines them all; a plain decode step takes {_between(asking['plain_step_us'], '.0f')} us",
            "",
            f"Reading at a budget of {found['reads'][0]['budget_bytes'] / 2**20:.2f} MiB (25 %), original routing, "
            "logits identical to serial; ratio [95 % interval]",
            align(reads),
        ]
    )
