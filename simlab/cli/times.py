"""`time`: the time of a token, fitted on what an engine measured, and how far that can be trusted.

For readers, everything but cells of a trace is measured or fitted on what was; cells are replayed.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from simlab.cli.options import (
    AS_RECORDED,
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
from simlab.cli.output import Progress, print_json, say_written, write_whole
from simlab.cli.times_text import READS_OF, Found, foretold_json, foretold_lines, report, to_json
from simlab.errors import InputError

_CELL_OPTIONS = ("budget", "margin", "drop", "top_k", "route", "evict", "scope", "train")


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "time",
        help="what a token's time is made of, and how well it is predicted",
        description="Fit token time = compute + page faults + management + exposed reads on a bmoe_metrics file or "
        "a trace, from each token's bytes and its place in the run, and judge it on halves of the tokens left out. "
        "Of a trace, also give the latency of its reads and, with cell options, the speed of other cells (simulated); "
        "with --check those cells also run live, in turns with the recorded one, beside what was foretold.",
    )
    parser.add_argument(
        "source", metavar="METRICS.csv|T.trace", help="a bmoe_metrics file or a trace's folder"
    )
    add_model(parser)
    parser.add_argument(
        "--check", action="store_true", help="run the cells live too, and set both side by side"
    )
    parser.add_argument(
        "--repeats", type=whole_number(1), default=2, metavar="N", help="live runs of each cell (default 2)"
    )
    parser.add_argument(
        "--device", metavar="PROFILE.json", help="foretell the cells for the device of this profile instead"
    )
    parser.add_argument(
        "--profile-out", metavar="F.json", help="write the profile of the machine the trace was recorded on"
    )
    add_force(parser)
    add_cell_options(parser, lists=True, default_budget=AS_RECORDED)
    add_engine_options(parser)
    add_json(parser)
    parser.set_defaults(run=_time)


def _time(args: argparse.Namespace) -> None:
    if args.device is not None:
        _on_device(args)
        return
    found = _of_trace(args) if Path(args.source).is_dir() or "://" in args.source else _of_metrics(args)
    if args.json:
        print_json(to_json(found))
    else:
        print(report(found))


def _asked(args: argparse.Namespace) -> list[str]:
    """The cell options that were given."""
    names = [name for name in _CELL_OPTIONS if getattr(args, name) is not None]
    return names + ["sequential"] * args.sequential


def _of_metrics(args: argparse.Namespace) -> Found:
    from simlab.judge.speed.time_check import check_time
    from simlab.judge.speed.token_time import timings_of
    from simlab.trace.bmoe_metrics import read_metrics

    given = [name for name in ("check", "device", "profile_out") if getattr(args, name)]
    for name in _asked(args) + given:
        raise InputError(f"--{name.replace('_', '-')}: needs a trace to replay, {args.source} is none")
    metrics = read_metrics(Path(args.source))
    timings = timings_of(metrics)
    return Found(args.source, metrics.io_mode, timings, check_time(timings))


def _of_trace(args: argparse.Namespace) -> Found:
    from simlab.judge.quality.law import recorded_cell
    from simlab.judge.speed.time_check import check_time
    from simlab.judge.speed.trace_time import read_latencies, timings_of_trace
    from simlab.judge.speed.trace_time_cells import Foreteller, replay_work
    from simlab.trace.store import open_trace

    profile = None
    if args.profile_out is not None:
        profile = check_output(args.profile_out, "--profile-out", args.force, (".json",))
    trace = open_trace(args.source)
    if args.check and not _asked(args):
        raise InputError(
            "--check: runs cells live; name some, such as --margin 0,0.1 --budget 2cycles,4cycles"
        )
    args.live = args.check
    cells = cells_from_args(args, recorded=trace.header) if _asked(args) else []
    warn_about_cells(cells, trace.header)
    timings = timings_of_trace(trace)
    check = check_time(timings)
    found = Found(args.source, trace.header.io_mode, timings, check, read_latencies(trace))
    if profile is not None:
        from simlab.judge.speed.device import profile_of
        from simlab.judge.speed.moments import known_moments
        from simlab.judge.speed.trace_time_cells import fit_costs

        costs = fit_costs(trace, timings)
        if costs is None or found.latencies is None:
            raise InputError(
                f"--profile-out: {args.source} does not have the time of every read, miss and move"
            )
        later = costs.at_another_moment(known_moments(trace.header.cpu))
        made = profile_of(trace, later, timings.composition, found.latencies)
        write_whole(profile, made.save)
        say_written(profile)
    if not cells:
        return found
    if args.check:
        from simlab.judge.speed.time_check_live import check_cells

        with Progress("time") as progress:
            live = check_cells(
                trace, recorded_cell(trace.header), cells, args.model, repeats=args.repeats, progress=progress,
                **engine_options(args),
            )  # fmt: skip
        return dataclasses.replace(found, live=live)
    recorded = recorded_cell(trace.header) if trace.header.engine == "simlab" else None
    teller = Foreteller(trace, recorded, train=args.train, timings=timings)
    with Progress("time") as progress:
        foretold = [
            teller.foretell(r) for r in replay_work(trace, cells, train=args.train, progress=progress)
        ]
    return dataclasses.replace(found, foretold=foretold, moments=teller.moments)


def _on_device(args: argparse.Namespace) -> None:
    """Cells of a trace for another device: their work from a replay, their times from its profile."""
    from simlab.judge.quality.law import recorded_cell
    from simlab.judge.speed.device import costs_on, load_profile
    from simlab.judge.speed.trace_time import timings_of_trace
    from simlab.judge.speed.trace_time_cells import by_costs, fit_costs, policy_times, replay_work
    from simlab.trace.store import open_trace

    if not Path(args.source).is_dir() and "://" not in args.source:
        raise InputError(f"--device: needs a trace to replay, {args.source} is none")
    for name in ("check", "profile_out"):
        if getattr(args, name):
            raise InputError(
                f"--{name.replace('_', '-')}: is of this machine, --device of another; give one of them"
            )
    profile = load_profile(Path(args.device))
    trace = open_trace(args.source)
    cells = cells_from_args(args, recorded=trace.header)
    warn_about_cells(cells, trace.header)
    try:
        timed = fit_costs(trace, timings_of_trace(trace))
    except InputError:
        timed = None  # its own times are not needed
    costs = costs_on(profile, trace, timed)
    recorded = recorded_cell(trace.header) if trace.header.engine == "simlab" else None
    policy_ms = policy_times(trace, recorded, args.train)
    with Progress("time") as progress:
        foretold = [
            by_costs(costs, r.numbers, r.work, policy_ms(r.numbers.cell))
            for r in replay_work(trace, cells, train=args.train, progress=progress)
        ]
    if args.json:
        cells_json = [foretold_json(f) for f in foretold]
        print_json({"source": args.source, "device": dataclasses.asdict(profile), "cells": cells_json})
        return
    print(
        f"{args.source} on {profile.device} ({args.device}): {profile.lanes} lanes, {profile.composition} reads; "
        f"{READS_OF[profile.io_mode]}; {profile.compute_ms_per_token:.2f} ms compute per token"
    )
    lines = foretold_lines(
        foretold, f"Cells foretold (decode, simulated) for {profile.device} [95 % intervals]; ms per token:"
    )
    if any(f.policy_ms for f in foretold):
        lines.append("The policies' own time is that of this machine and of its Python.")
    print("\n".join(lines))
