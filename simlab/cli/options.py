"""Options that several commands share, and from them to cells.

Grammar and meanings: interface.md, "Commands". Nothing here imports polars or JAX: `--help` is instant.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simlab.cells import (
    MIB,
    build_cells,
    check_eviction,
    check_live,
    effective_k,
    recorded_budget,
    resolve_budget,
)
from simlab.errors import InputError, SimlabWarning
from simlab.policy import find_routing
from simlab.types import Cell, TraceHeader

HIGH_MARGIN = 0.20
"""From here on a margin's cost does not show in the text it writes (engine-semantics, sections 7 and 8)."""
FEW_EXPERTS = 4
"""At this k or below one dropped slot is a large share of a token (engine-semantics, section 2)."""


AS_RECORDED = "the one the trace was recorded at"
AS_MEMORY_ALLOWS = "all experts, or what free memory holds of them"
TABLES, PAGES, PICTURES = (".parquet", ".csv"), (".html",), (".svg",)
"""Endings of the files that commands write."""


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number between `low` and `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < low or (high is not None and value > high):
            legal = f"between {low} and {high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{value} must be {legal}")
        return value

    return parse


def _values(option: str, lists: bool) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        values = [part.strip() for part in text.split(",")]
        if not all(values):
            raise argparse.ArgumentTypeError(f"'{text}' has an empty value")
        if len(values) > 1 and not lists:
            raise argparse.ArgumentTypeError(
                f"'{text}' is a list; one value here, sweep and validate take lists"
            )
        return values

    parse.__name__ = option
    return parse


def _specs(lists: bool) -> Callable[[str], list[str]]:
    """As `_values`, where a value may have several knobs: `knob=v` alone belongs to the value before it."""
    split = _values("evict", lists=True)

    def parse(text: str) -> list[str]:
        specs: list[str] = []
        for part in split(text):
            if specs and "=" in part and ":" not in part:
                specs[-1] += f",{part}"
            else:
                specs.append(part)
        if len(specs) > 1 and not lists:
            return _values("evict", lists)(text)
        return specs

    parse.__name__ = "evict"
    return parse


def add_trace(parser: argparse.ArgumentParser) -> None:
    """`T.trace`, the trace a command is about, stored as `trace`."""
    parser.add_argument("trace", metavar="T.trace", help="the trace's folder")


def add_model(parser: argparse.ArgumentParser) -> None:
    """`[MODEL]`, stored as `model`; None: the embedded one."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a GGUF file, its first shard if split; left out, the embedded model",
    )


def add_cell_options(parser: argparse.ArgumentParser, lists: bool, default_budget: str) -> None:
    """The options that make a cell; with `lists`, each takes several values and every combination is a cell.

    `default_budget` says what a command takes where `--budget` is left out: `AS_RECORDED` or `AS_MEMORY_ALLOWS`.
    Each is stored as a list of words or None: `budget, margin, drop, top_k, route, evict`; `scope` and `train`
    are words, `sequential` is a bool.
    """
    several = ",.." if lists else ""
    group = parser.add_argument_group("cell options" + (" (comma-separated lists multiply)" if lists else ""))

    def add(name: str, metavar: str, text: str) -> None:
        group.add_argument(f"--{name}", type=_values(name, lists), metavar=metavar + several, help=text)

    add(
        "budget",
        "B",
        f"cache size: 2000MiB, 2.5cycles (token cycles), 48/layer, 25%% or off; left out, {default_budget}",
    )
    add("margin", "L", "short for --route substitute:L=; 0 to 1")
    add("drop", "F", "short for --route drop_cold:F=; 0 to 1")
    add("top-k", "K", "experts per token, whatever the model was trained with")
    group.add_argument(
        "--route",
        action="append",
        metavar="SPEC",
        help="name:knob=v,knob=v, composed with +, or a file my_policy.py"
        + ("; repeatable" if lists else "")
        + " ('simlab policies' lists them)",
    )
    group.add_argument(
        "--evict",
        type=_specs(lists),
        metavar="SPEC" + several,
        help="eviction policy, name:knob=v,knob=v or a file (default lru)",
    )
    parser.set_defaults(lists=lists, live=False)
    group.add_argument(
        "--scope", choices=("global", "per_layer"), help="one cache (default) or one per layer"
    )
    group.add_argument(
        "--prefetch",
        metavar="NAME:K=..",
        help="read ahead: previous_token:K=1, the experts the token before ran at the next K layers, or next_gate:K=8, "
        "the K best by the next layer's gate; a replay has the latter only as it was recorded",
    )
    group.add_argument(
        "--sequential",
        action="store_true",
        help="look up and evict one expert at a time, to measure what that does (replay only)",
    )
    group.add_argument(
        "--train",
        metavar="PART",
        help="what policies learn from: 25%% (the first decode tokens, not counted), OTHER.trace or same",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of the live engine: `lanes, buffered, threads, ctx, ubatch`; None: the engine's choice.

    A command that has them runs its cells live.
    """
    parser.set_defaults(live=True)
    group = parser.add_argument_group("engine options")
    group.add_argument(
        "--lanes", type=whole_number(1, 8), default=4, metavar="N", help="reader lanes, 1 to 8 (default 4)"
    )
    group.add_argument("--buffered", action="store_true", help="read through the page cache, not O_DIRECT")
    group.add_argument(
        "--overlap", action="store_true", help="read down projections while gate and up are computed"
    )
    group.add_argument("--threads", type=whole_number(1), metavar="N", help="compute threads")
    group.add_argument("--ctx", type=whole_number(2), metavar="N", help="context length in tokens")
    group.add_argument(
        "--ubatch", type=whole_number(1), metavar="N", help="largest number of tokens in one graph"
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options of a command line as `simlab.Engine` takes them."""
    options: dict[str, Any] = {
        "lanes": args.lanes,
        "buffered": args.buffered,
        "n_threads": args.threads,
        "n_ctx": args.ctx,
        "overlap": args.overlap,
        "prefetch": getattr(args, "prefetch", None),
        "train": getattr(args, "train", None),
    }
    if args.ubatch is not None:
        options["n_ubatch"] = args.ubatch
    return options


def add_json(parser: argparse.ArgumentParser, default: Any = False) -> None:
    """`--json`: the answer as JSON on stdout and nothing else there."""
    parser.add_argument(
        "--json", action="store_true", default=default, help="print JSON, and nothing else, on stdout"
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    """`--force`: replace outputs that exist."""
    parser.add_argument("--force", action="store_true", help="replace outputs that exist")


def cells_from_args(
    args: argparse.Namespace, default_budget: str | None = None, recorded: TraceHeader | None = None
) -> list[Cell]:
    """The cells that the cell options of a command line ask for.

    Args:
        default_budget: used where `--budget` was not given.
        recorded: a trace's header; what the options leave out, budget and policy, is then as it was recorded.

    Raises:
        InputError: a value out of its range, an unknown policy, or no budget at all.
    """
    if not args.lists and len(args.route or ()) > 1:
        raise InputError("--route: one value here, sweep and validate take several; compose policies with +")
    scope, routes, evicts = args.scope, args.route, args.evict
    if recorded is not None:
        default_budget = recorded_budget(recorded)
        if not args.budget:
            scope = scope or recorded.scope
        if not (routes or args.margin or args.drop or args.top_k):
            routes = [recorded_route(recorded)]
        evicts = evicts or [recorded_evict(recorded)]
    budgets = args.budget or ([default_budget] if default_budget else None)
    if not budgets:
        raise InputError("--budget: is missing; write 2000MiB, 2.5cycles, 48/layer, 25% or off")
    cells = build_cells(
        budgets=budgets,
        margins=args.margin or (),
        drops=args.drop or (),
        top_ks=args.top_k or (),
        routes=routes or (),
        evicts=evicts or ("lru",),
        scope=scope or "global",
        sequential=args.sequential,
        # A live command's engine reads ahead, whatever the cell.
        prefetch=None if args.live else args.prefetch,
    )
    for cell in cells:
        check_eviction(cell, trained=args.train is not None)
        if args.live:
            check_live(cell)
    return cells


def recorded_route(header: TraceHeader) -> str:
    """The route a trace was recorded under, as `--route` takes it.

    Where the trace holds what ran and not what the router picked, that already is what a rerank or swap made of it.

    Raises:
        InputError: it was a user's file, which the trace does not carry, or its knobs are not known.
    """
    parts = []
    for name in (header.route or "original").split("+"):
        _refuse_file("--route", name, header)
        policy = find_routing(name)
        if not header.router_known and policy.stage in ("rerank", "swap"):
            continue
        knobs = {k: header.knobs.get(f"{name}.{k}", header.knobs.get(k)) for k in policy.knobs}
        if None in knobs.values():
            raise InputError(f"the trace was recorded under {name} with unknown knobs; give --route")
        parts.append(name + (":" + ",".join(f"{k}={v!r}" for k, v in knobs.items()) if knobs else ""))
    return "+".join(parts) or "original"


def recorded_evict(header: TraceHeader) -> str:
    """The eviction policy a trace was recorded under, as `--evict` takes it.

    Raises:
        InputError: it was a user's file, which the trace does not carry.
    """
    name = header.evict or "lru"
    _refuse_file("--evict", name, header)
    knobs = ",".join(f"{k}={v!r}" for k, v in _own_knobs(header, name).items())
    return name + (f":{knobs}" if knobs else "")


def _own_knobs(header: TraceHeader, policy: str) -> dict[str, float]:
    """Knobs of a header that are kept under their policy's name, without it."""
    prefix = f"{policy}."
    return {k.removeprefix(prefix): v for k, v in header.knobs.items() if k.startswith(prefix)}


def _refuse_file(option: str, name: str, header: TraceHeader) -> None:
    """Refuse a recorded policy that was a user's file, `policy@file.py` or `file.py`: no trace names code to run."""
    file = name.rpartition("@")[2]
    if file.endswith(".py"):
        own = _own_knobs(header, name)
        if option == "--route":
            evict = f"{header.evict}."
            own |= {k: v for k, v in header.knobs.items() if "." not in k and not k.startswith(evict)}
        knobs = ":" + ",".join(f"{k}={v:g}" for k, v in own.items()) if own else ""
        raise InputError(
            f"the trace was recorded under a policy file, {file}, which it does not carry; "
            f"give that file with {option} {file}{knobs}"
        )


def warn_about_cells(cells: Sequence[Cell], header: TraceHeader) -> None:
    """One line for each thing about these cells that a user of this model should know before they run.

    Raises:
        InputError: a cell wants no experts, or more per token than the model has.
    """
    margins = [c.margin for c in cells if c.margin is not None and c.margin >= HIGH_MARGIN]
    if margins:
        _warn(
            f"a margin of {HIGH_MARGIN:.2f} or more (here {max(margins):g}): "
            "replies will read well while the model behind them is worse"
        )
    small: dict[str, float] = {}
    for cell in cells:
        k = effective_k(cell.route, header)
        resolved = resolve_budget(cell.budget, cell.scope, header, k)
        if not resolved.off and resolved.total_bytes < header.cycle_bytes(k):
            small[cell.budget.text] = header.cycle_bytes(k) / MIB
    if small:
        _warn(
            f"--budget {', '.join(small)}: below one token cycle "
            f"({max(small.values()):.2f} MiB), where margins and drops do next to nothing"
        )
    few = [effective_k(c.route, header) for c in cells if c.route.step("drop") is not None]
    if few and min(few) <= FEW_EXPERTS:
        _warn(f"dropping at k = {min(few)}: with {FEW_EXPERTS} experts or fewer each slot is a large share")


def _warn(text: str) -> None:
    warnings.warn(text, SimlabWarning, stacklevel=3)


def output_file(args: argparse.Namespace, name: str, suffixes: Sequence[str]) -> Path | None:
    """The file that the option `--name` asks for, checked before any work starts; None where it was not given.

    Raises:
        InputError: it exists, cannot be created or has the wrong kind.
    """
    path = getattr(args, name)
    return None if path is None else check_output(path, f"--{name}", args.force, suffixes)


def check_output(path: str, option: str, force: bool, suffixes: Sequence[str]) -> Path:
    """Refuse an output file that exists, cannot be created or has the wrong kind, before any work starts."""
    target = Path(path)
    if target.suffix not in suffixes:
        raise InputError(f"{option} {path}: the name must end in {' or '.join(suffixes)}")
    if target.is_dir():
        raise InputError(f"{option} {path}: is a folder")
    if target.exists() and not force:
        raise InputError(f"{option} {path}: exists already; add --force to replace it")
    if not target.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{option} {path}: the folder {target.parent} is not writable")
    return target
