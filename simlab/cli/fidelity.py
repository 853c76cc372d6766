"""`fidelity` and `quality`: how far replays are off, and what cells cost, both against live runs of a grid."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from simlab import __version__
from simlab.cli.engine_binary import add_engine_binary, fidelity_binary, refuse_details
from simlab.cli.options import (
    add_cell_options,
    add_engine_options,
    add_force,
    add_json,
    add_model,
    cells_from_args,
    check_output,
    engine_options,
    warn_about_cells,
    whole_number,
)
from simlab.errors import InputError
from simlab.locks import locked

BUDGETS = ("1.2cycles", "2cycles", "4cycles")
MARGINS = ("0", "0.05", "0.1", "0.15", "0.2", "0.3", "0.6")
DROPS = ("0.5", "0.75", "1")
CALIBRATED = (0.15, 0.3, 0.6)
TOKENS = 2048
"""Of each text, where nothing else is asked for."""


LEVELS = (
    "L1: a replay of the text's recording under the original routing. L2: live, the same tokens forced. L3: live, the "
    "model writes."
)


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "fidelity",
        help="how far replays are off from live runs",
        description="Run texts live under each cell, replay the same cells from a recording of the original routing, "
        "and print the signed errors of the replay.",
        epilog=LEVELS,
    )
    add_model(parser)
    add_text_options(parser, required=False)
    parser.add_argument(
        "--recorded",
        metavar="SPEC",
        action="append",
        help="also replay on scores from between recordings, of the original routing and of this policy at the "
        "budget after @, such as substitute:L=.3@2cycles; repeatable",
    )
    parser.add_argument("--free", action="store_true", help="also let the model write by itself (L3)")
    parser.add_argument(
        "--again",
        action="store_true",
        help="also run every cell live a second time, another token first, to tell how far apart chance puts two runs",
    )
    parser.add_argument(
        "--speed",
        type=whole_number(1),
        metavar="N",
        help="also foretell tokens/s and check them, N live runs of each cell in turns with the original routing",
    )
    parser.add_argument(
        "--by",
        choices=("text", "layer", "position"),
        help="also print errors by text, layer or stretch of the text",
    )
    add_cell_options(
        parser,
        lists=True,
        default_budget=f"{','.join(BUDGETS)}; without a policy, margins {','.join(MARGINS)} "
        f"and drops {','.join(DROPS)}",
    )
    add_engine_options(parser)
    add_engine_binary(
        parser,
        "set replays beside runs of this program of the BigMoeOnEdge family instead, on the --text or on a --prompt",
        "a prompt for it to continue freely; replays are then of what it wrote under the original routing",
    )
    add_json(parser)
    parser.set_defaults(run=_fidelity)

    parser = commands.add_parser(
        "quality",
        help="fit what cells cost in nll from a few live margins",
        description="Run texts live under each cell, fit the rise in nll on a few margins from what a replay knows, "
        "and print how well every form of that law foretells texts, margins, budgets and policies left out.",
    )
    add_model(parser)
    add_text_options(parser)
    parser.add_argument(
        "--calibrate",
        type=_margins,
        default=CALIBRATED,
        metavar="L,..",
        help=f"margins that laws are fitted on (default {','.join(f'{m:g}' for m in CALIBRATED)})",
    )
    parser.add_argument(
        "--form", metavar="FORM", help="the form of the law to keep (left out: the best known)"
    )
    parser.add_argument("--out", metavar="LAW.json", help="write the law fitted on all texts")
    add_force(parser)
    add_cell_options(
        parser,
        lists=True,
        default_budget=f"{','.join(BUDGETS)}; without a policy, margins {','.join(MARGINS[1:])}",
    )
    add_engine_options(parser)
    add_json(parser)
    parser.set_defaults(run=_quality)


def add_text_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """`--text`, `--tokens`, `--stretches` and `--keep`: which texts to run, and where their recordings stay."""
    parser.add_argument("--text", nargs="+", required=required, metavar="FILE", help="the texts to run")
    parser.add_argument(
        "--tokens",
        type=whole_number(16),
        default=TOKENS,
        metavar="N",
        help=f"most tokens of a text (default {TOKENS})",
    )
    parser.add_argument(
        "--stretches",
        type=_counts,
        default=(1,),
        metavar="N,..",
        help="make N texts of each file, or of each file its own number, from starts spread evenly over it",
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep the recordings in this folder, and go on with those it has"
    )


def _counts(text: str) -> tuple[int, ...]:
    """`--stretches`: one whole number or several."""
    return tuple(whole_number(1)(word) for word in text.split(","))


def _margins(text: str) -> tuple[float, ...]:
    """`--calibrate`: margins, each above 0 and at most 1."""
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of margins") from None
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"'{text}': margins to fit on must lie above 0 and be at most 1")
    return values


def grid_cells(args: argparse.Namespace, default_routes: Sequence[str]) -> list[Any]:
    """The cells of a command line; without policy options, the default routes."""
    if not (args.route or args.margin or args.drop or args.top_k):
        args.route = list(default_routes)
    args.budget = args.budget or list(BUDGETS)
    return cells_from_args(args)


def recorded_cells(specs: Sequence[str] | None, args: argparse.Namespace) -> list[Any]:
    """The cells of `--recorded SPEC@BUDGET`, with the eviction and scope of the others."""
    from simlab.cells import build_cells

    found = []
    for spec in specs or ():
        route, at, budget = spec.rpartition("@")
        if not at:
            raise InputError(f"--recorded {spec}: has no budget; write substitute:L=.3@2cycles")
        found += build_cells(
            budgets=[budget],
            routes=[route],
            evicts=(args.evict or ["lru"])[:1],
            scope=args.scope or "global",
        )
    return found


def _fidelity(args: argparse.Namespace) -> None:
    from simlab.cli.output import Progress, print_json
    from simlab.judge.fidelity.grid import Plan, run
    from simlab.judge.fidelity.runs import RunStore, read_texts
    from simlab.judge.fidelity.text import fidelity_json, fidelity_text
    from simlab.judge.scores.scoring import Engines

    routes = [f"substitute:L={m}" for m in MARGINS] + [f"drop_cold:F={f}" for f in DROPS]
    if args.engine_binary is not None:
        fidelity_binary(args, BUDGETS, routes)
        return
    refuse_details(args, "without it texts are run, and --free lets the model write on from them")
    if args.text is None:
        raise InputError("--text: is missing; name the texts to run")
    cells, recorded = grid_cells(args, routes), recorded_cells(args.recorded, args)
    with ExitStack() as stack:
        folder = keep_folder(args.keep, stack)
        engines = stack.enter_context(Engines(args.model, engine_options(args)))
        texts = read_texts(engines, args.text, args.tokens, args.stretches)
        warn_about_cells([*cells, *recorded], engines.get().header())
        progress = stack.enter_context(Progress("fidelity"))
        plan = Plan(texts, cells, recorded, args.free, args.again, args.train)
        store = RunStore(folder, engines)
        rows = run(plan, store, progress)
        of_speed = []
        if args.speed is not None:
            from simlab.judge.fidelity.speed import speeds

            fast = stack.enter_context(Progress("speeds"))
            of_speed = speeds(texts, cells, store, args.speed, args.model, fast, **engine_options(args))
    if args.json:
        print_json(fidelity_json(rows, of_speed))
        return
    names = ", ".join(text.name for text in texts)
    print(f"{len(texts)} texts, {sum(len(text.tokens) for text in texts):,} tokens: {names}\n")
    print(fidelity_text(rows, of_speed, args.by))


def _quality(args: argparse.Namespace) -> None:
    from simlab.cli.output import Progress, print_json, say_written, write_whole
    from simlab.judge.fidelity.runs import RunStore, read_texts
    from simlab.judge.quality.law import DEFAULT_FORM, FORMS
    from simlab.judge.quality.runs import judge, live_runs, without_budget
    from simlab.judge.quality.text import quality_json, quality_text
    from simlab.judge.scores.scoring import Engines
    from simlab.trace.provenance import text_digest
    from simlab.types import Provenance

    out = check_output(args.out, "--out", args.force, (".json",)) if args.out is not None else None
    form = args.form or DEFAULT_FORM
    if form not in FORMS:
        raise InputError(f"--form {form}: there are {'; '.join(FORMS)}")
    cells = grid_cells(args, [f"substitute:L={m}" for m in MARGINS[1:]])
    with ExitStack() as stack:
        folder = keep_folder(args.keep, stack)
        engines = stack.enter_context(Engines(args.model, engine_options(args)))
        texts = read_texts(engines, args.text, args.tokens, args.stretches)
        warn_about_cells(cells, engines.get().header())
        progress = stack.enter_context(Progress("quality"))
        runs = live_runs(texts, cells, RunStore(folder, engines), progress, train=args.train)
        digest = text_digest([text.tokens for text in texts])
        provenance = Provenance(engines.get().model.digest, digest, simlab=__version__)
    found = judge(runs, args.calibrate, args.budget, form, provenance)
    several = len(texts) > 1 and len(args.budget) > 1
    apart = without_budget(runs, args.calibrate, args.budget) if several else []
    if out is not None:
        write_whole(out, found.model.save)
        say_written(out)
    if args.json:
        print_json(quality_json(found, apart))
    else:
        print(quality_text(found, apart))


def keep_folder(keep: str | None, stack: ExitStack) -> Path:
    """The folder of the recordings, `--keep` or one that goes with the command."""
    if keep is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simlab-runs-")))
    folder = Path(keep)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--keep {keep}: {error.strerror}") from error
    stack.enter_context(locked(folder, f"--keep {keep}"))
    return folder
