"""`pick`: settings for a trace with what is foretold of each, and a live check of the picks.

For readers, everything foretold is simulated; the live columns are what a run on this machine gave.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simlab.cli.options import (
    AS_RECORDED,
    add_cell_options,
    add_engine_options,
    add_json,
    add_model,
    add_trace,
    cells_from_args,
    engine_options,
    recorded_evict,
    warn_about_cells,
    whole_number,
)
from simlab.cli.output import Progress, align, cell_to_json, cell_words, print_json, say_written, write_whole
from simlab.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simlab.judge.pick_live import CheckedPick
    from simlab.judge.pick_settings import Setting
    from simlab.judge.quality.law import QualityModel
    from simlab.judge.speed.moments import Moments
    from simlab.trace.store import Trace
    from simlab.types import Cell

_SHOWN = 5


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "pick",
        help="settings for a trace: tokens/s, bytes and perplexity foretold, and checked live",
        description="Replay every routing policy at a few values of its knobs (or the cells asked for) at the budgets "
        "and evictions named, and pick among them by foretold tokens/s and perplexity; with --live, run the picks and "
        "set every prediction beside its live figure.",
    )
    add_trace(parser)
    add_model(parser)
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument(
        "--max-ppl-increase",
        type=_share,
        metavar="P",
        help="the fastest settings that cost at most so much perplexity, 2%% or 0.02",
    )
    goal.add_argument(
        "--min-tok-s", type=_speed, metavar="X", help="the settings of at least X tokens/s that cost least"
    )
    goal.add_argument(
        "--pareto", action="store_true", help="all settings that none beats in both tokens/s and cost"
    )
    parser.add_argument(
        "--top",
        type=whole_number(1),
        default=_SHOWN,
        metavar="N",
        help=f"picks shown and run live (default {_SHOWN}; --pareto: spread along the front)",
    )
    parser.add_argument(
        "--calibration",
        metavar="F.json",
        help="a quality law to foretell perplexity by; with --live, where there is no such file, the law is "
        "calibrated on live margins and written there",
    )
    parser.add_argument("--live", dest="check", action="store_true", help="run the picks live")
    parser.add_argument(
        "--repeats", type=whole_number(1), default=1, metavar="N", help="live runs of each pick (default 1)"
    )
    add_cell_options(parser, lists=True, default_budget=AS_RECORDED)
    add_engine_options(parser)
    add_json(parser)
    parser.set_defaults(run=_pick)


def _share(text: str) -> float:
    number, percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share; write 2% or 0.02") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must lie between 0% and 100%; write 2% or 0.02")
    return value


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _pick(args: argparse.Namespace) -> None:
    from simlab.judge import pick_settings as picking
    from simlab.judge.quality.law import recorded_cell
    from simlab.judge.speed.trace_time_cells import Foreteller
    from simlab.trace.store import open_trace

    trace = open_trace(args.trace)
    law = _law(args, trace)
    cells = _cells(args, trace)
    warn_about_cells(cells, trace.header)
    recorded = recorded_cell(trace.header) if trace.header.engine == "simlab" else None
    if args.check and recorded is None:
        raise InputError(
            f"--live: {trace.path} was not recorded by simlab, so its tokens cannot be run again"
        )
    teller = Foreteller(trace, recorded, train=args.train)
    moments = teller.moments if teller.later is not None else None
    with Progress("pick: replay") as progress:
        settings = picking.settings_of(trace, teller, cells, law, train=args.train, progress=progress)
    choices = picking.without_twins(settings)
    if args.max_ppl_increase is not None:
        fit = picking.within_rise(choices, args.max_ppl_increase)
        picks = fit[: args.top]
    elif args.min_tok_s is not None:
        fit = picking.at_least(choices, args.min_tok_s)
        picks = fit[: args.top]
    else:
        fit = picking.pareto(choices)
        picks = picking.spread_along(fit, args.top)
    checked: list[CheckedPick] = []
    if args.check and picks:
        from simlab.judge.pick_live import check_picks

        assert recorded is not None
        with Progress("pick: live") as progress:
            checked = check_picks(
                trace,
                recorded,
                picks,
                args.model,
                repeats=args.repeats,
                progress=progress,
                **engine_options(args),
            )
    if args.json:
        print_json(_to_json(args, law, settings, fit, picks, checked, moments))
    else:
        print(_text(args, trace.header.io_mode, law, settings, choices, fit, picks, checked, moments))


def _law(args: argparse.Namespace, trace: Trace) -> QualityModel | None:
    """The quality law: of a file, or calibrated live; None where there is none and none is needed."""
    from simlab.judge.pick_settings import check_law
    from simlab.judge.quality.law import QualityModel
    from simlab.trace.provenance import check, trace_provenance

    path = Path(args.calibration) if args.calibration is not None else None
    if path is not None and (path.exists() or not args.check):
        law = QualityModel.load(path)
        check(
            law.provenance,
            trace_provenance(trace.header),
            ("model",),
            f"--calibration {path}",
            f"the model of {trace.path}",
            "calibrate on that model (simlab quality --out, or pick --live with a new file)",
        )
        return law
    law = None
    if args.check:
        from simlab.judge.pick_live import calibrate_law

        if path is not None and not path.parent.is_dir():
            raise InputError(f"--calibration {path}: there is no folder {path.parent}")
        with Progress("pick: calibrate") as progress:
            law = calibrate_law(trace, args.model, progress, **engine_options(args))
        if path is not None:
            write_whole(path, law.save)
            say_written(path)
    if args.max_ppl_increase is not None:
        return check_law(law, "--max-ppl-increase")
    return law


def _cells(args: argparse.Namespace, trace: Trace) -> list[Cell]:
    """The cells named by the cell options; where they name no routing, every policy's grid."""
    from simlab.judge.pick_settings import default_routes

    args.live = args.check
    if not (args.route or args.margin or args.drop or args.top_k):
        args.route = default_routes(trace.header, scores=trace.has_scores, trained=args.train is not None)
        args.evict = args.evict or [recorded_evict(trace.header)]
    return cells_from_args(args, recorded=trace.header)


def _to_json(
    args: argparse.Namespace,
    law: QualityModel | None,
    settings: Sequence[Setting],
    fit: Sequence[Setting],
    picks: Sequence[Setting],
    checked: Sequence[CheckedPick],
    moments: Moments | None,
) -> dict[str, Any]:
    places = {id(s): i for i, s in enumerate(settings)}

    def plain(s: Setting) -> dict[str, Any]:
        f = s.foretold
        return {
            "numbers": cell_to_json(f.numbers),
            "tok_s": f.tok_s,
            "tok_s_interval": f.tok_s_interval._asdict(),
            "read_wait_ms": f.read_wait_ms,
            "management_ms": f.management_ms,
            "policy_ms": f.policy_ms,
            "compute_ms": f.compute_ms,
            "bound": f.bound,
            "read_mib_per_token": s.mib_per_token,
            "read_mib_interval": s.mib_interval._asdict(),
            "ppl_increase": s.rise._asdict() if s.rise is not None else None,
            "surely": _surely(args, s),
        }

    def live(c: CheckedPick) -> dict[str, Any]:
        return {
            "setting": places[id(c.setting)],
            "group": c.run.group,
            "tok_s": c.run.today.tok_s,
            "tok_s_interval": c.run.today.tok_s_interval._asdict(),
            "live_tok_s": c.run.live_tok_s,
            "tok_s_held": c.speed_held,
            "live_read_mib_per_token": c.run.live.decode.read_mib_per_token,
            "read_mib_held": c.bytes_held,
            "live_ppl_increase": c.live_rise,
            "ppl_increase_held": c.rise_held,
            "machine": c.run.machine,
        }

    return {
        "source": "simulated",
        "trace": args.trace,
        "law": dataclasses.asdict(law) if law is not None else None,
        "settings": [plain(s) for s in settings],
        "fit": [places[id(s)] for s in fit],
        "picks": [places[id(s)] for s in picks],
        "live": [live(c) for c in checked],
        "moments": dataclasses.asdict(moments) if moments is not None else None,
    }


def _surely(args: argparse.Namespace, s: Setting) -> bool | None:
    """Whether the limit holds at the worse ends too; None without a limit."""
    from simlab.judge.pick_settings import surely

    return None if args.pareto else surely(s, args.max_ppl_increase, args.min_tok_s)


def _between(value: float, low: float, high: float, digits: int, scale: float = 1) -> str:
    return f"{scale * value:.{digits}f} [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"


def _text(
    args: argparse.Namespace,
    io_mode: str | None,
    law: QualityModel | None,
    settings: Sequence[Setting],
    choices: Sequence[Setting],
    fit: Sequence[Setting],
    picks: Sequence[Setting],
    checked: Sequence[CheckedPick],
    moments: Moments | None,
) -> str:
    if args.max_ppl_increase is not None:
        goal = f"at most {100 * args.max_ppl_increase:g} % more perplexity, fastest first"
    elif args.min_tok_s is not None:
        goal = f"at least {args.min_tok_s:g} tokens/s, least cost first"
    else:
        goal = "the front of tokens/s against cost"
    twins = len(settings) - len(choices)
    lines = [
        f"{args.trace}: {len(settings)} settings replayed (simulated)"
        + (f", {twins} of them the same as another" if twins else "")
        + f"; {goal}: {len(fit)}"
        + (f", {len(picks)} shown" if len(picks) < len(fit) else "")
    ]
    if law is None:
        lines.append(
            "Perplexity is not known without a quality law (--calibration, --live); cost is mass displaced."
        )
    else:
        lines.append(
            f"Perplexity by a law calibrated on {law.calibrated_on} live runs, over the original routing."
        )
    if io_mode == "buffered":
        lines.append("Its reads were buffered: the speeds are of this machine's page cache, not of a flash.")
    if not fit:
        fastest = max((s.foretold.tok_s for s in choices), default=math.nan)
        return "\n".join([*lines, f"No setting fits; the fastest is foretold {fastest:.1f} tokens/s."])
    table = [
        ["route", "evict", "budget MiB", "tokens/s", "MiB/token", "ppl increase %", "mass", "bound", "surely"]
    ]
    for s in picks:
        mass = s.foretold.numbers.decode.mass_displaced
        sure = _surely(args, s)
        table.append(
            [
                *cell_words(s.foretold.numbers),
                _between(s.foretold.tok_s, *s.foretold.tok_s_interval, 1),
                _between(s.mib_per_token, *s.mib_interval, 2),
                "-" if s.rise is None else _between(*s.rise, 2, 100),
                "-" if mass is None else f"{mass:.4f}",
                s.foretold.bound,
                "-" if sure is None else "yes" if sure else "no",
            ]
        )
    lines += [
        "",
        align(table),
        "Intervals: 95 % for tokens/s and bytes, 90 % for perplexity; surely: the limit holds at their worse end too.",
    ]
    if moments is not None:
        lines.append(f"In those of tokens/s: {moments.words()}.")
    if checked:
        lines += [
            "",
            "Each prediction and its live figure; tokens/s foretold at the speed the machine had then, after warm-up:",
            align(_live_table(checked)),
        ]
    return "\n".join(lines)


def _live_table(checked: Sequence[CheckedPick]) -> list[list[str]]:
    def said(held: bool | None) -> str:
        return "-" if held is None else "yes" if held else "no"

    table = [["route", "evict", "budget MiB", "tokens/s", "live", "in", "MiB/token", "live", "in", "ppl increase %",
              "live", "in"]]  # fmt: skip
    for c in checked:
        s, run = c.setting, c.run
        live_mib = run.live.decode.read_mib_per_token
        table.append(
            [
                *cell_words(s.foretold.numbers),
                _between(run.today.tok_s, *run.today.tok_s_interval, 1),
                f"{run.live_tok_s:.1f}",
                said(c.speed_held),
                _between(s.mib_per_token, *s.mib_interval, 2),
                "-" if live_mib is None else f"{live_mib:.2f}",
                said(c.bytes_held),
                "-" if s.rise is None else _between(*s.rise, 2, 100),
                "-" if c.live_rise is None else f"{100 * c.live_rise:.2f}",
                said(c.rise_held),
            ]
        )
    return table
