"""The command that makes a list of cells again, found from the cells alone."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence

from simlab.cells import MIB
from simlab.policy import builtin_policies
from simlab.types import Cell, CellNumbers, EvictionPolicy, Route

EMBEDDED_MODEL = "tiny-moe-q8_0.gguf"
"""The model of commands that name none (`simlab.record.engine.EMBEDDED_MODEL`, which needs the engine to import)."""
_TRAINED = re.compile(r"trained on (?P<part>.+?)(?: of decode, not counted)?(?:;|$)")
_UNCOUNTED = re.compile(r"(?P<part>\S+) of decode not counted")


def cell_options(cells: Sequence[Cell]) -> list[list[str]]:
    """Cell options of one command for all of the cells, or of as few as make them and no others."""
    if not cells:
        return []
    groups: dict[tuple[str | None, bool, str | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((_asked_scope(cell), cell.sequential, cell.prefetch), []).append(cell)
    if len(groups) > 1:
        return [options for group in groups.values() for options in cell_options(group)]
    for parts in (lambda c: (), lambda c: route_spec(c.route), lambda c: (route_spec(c.route), c.evict_spec)):
        split: dict[object, list[Cell]] = {}
        for cell in cells:
            split.setdefault(parts(cell), []).append(cell)
        found = [_product(part) for part in split.values()]
        if all(found):
            return [options for options in found if options]
    return [options for cell in cells if (options := _product([cell]))]


def _product(cells: Sequence[Cell]) -> list[str] | None:
    """The options of the cells if they are every combination of their budgets, evictions and routes."""
    budgets, evicts, routes = (
        list(dict.fromkeys(words))
        for words in (
            [budget_word(c) for c in cells],
            [c.evict_spec for c in cells],
            [route_spec(c.route) for c in cells],
        )
    )
    made = {(budget_word(c), c.evict_spec, route_spec(c.route)) for c in cells}
    if made != set(itertools.product(budgets, evicts, routes)):
        return None
    margins = [_margin_alone(c.route) for c in cells]
    options = ["--budget", ",".join(budgets)]
    if all(margin is not None for margin in margins):
        options += ["--margin", ",".join(dict.fromkeys(str(m) for m in margins))]
    elif routes != ["original"]:
        options += [word for route in routes for word in ("--route", route)]
    if evicts != ["lru"]:
        options += ["--evict", ",".join(evicts)]
    if (scope := _asked_scope(cells[0])) not in (None, "global"):
        options += ["--scope", str(scope)]
    options += ["--sequential"] if cells[0].sequential else []
    return options + (["--prefetch", cells[0].prefetch] if cells[0].prefetch else [])


def _asked_scope(cell: Cell) -> str | None:
    """What `--scope` has to say for this cell; None where the budget or the eviction policy decides."""
    policy = builtin_policies().get(cell.evict)
    own = policy.scope if isinstance(policy, EvictionPolicy) else None
    return None if cell.budget.kind == "per_layer" or own is not None else cell.scope


def budget_word(cell: Cell) -> str:
    """The budget as `--budget` takes it."""
    budget = cell.budget
    return f"{number_word(budget.amount / MIB)}MiB" if budget.kind == "bytes" else budget.text


def route_spec(route: Route) -> str:
    """The route as `--route` takes it; a user's policy as the file it came from."""
    parts = []
    for step in route.steps:
        knobs = ",".join(f"{name}={number_word(value)}" for name, value in step.knobs.items())
        parts.append((step.policy.origin or step.policy.name) + (f":{knobs}" if knobs else ""))
    return "+".join(parts) or "original"


def _margin_alone(route: Route) -> str | None:
    """L where the route is the built-in `substitute` and nothing else."""
    alone = len(route.steps) == 1 and route.steps[0].policy.is_builtin("substitute")
    return number_word(route.steps[0].knobs["L"]) if alone else None


def number_word(value: float) -> str:
    """The shortest text that reads back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def train_option(numbers: Sequence[CellNumbers]) -> list[str]:
    """The `--train` that the cells' notes tell of, if any."""
    for note in (n.note or "" for n in numbers):
        if "trained on the tokens it is measured on" in note:
            return ["--train", "same"]
        if found := _TRAINED.search(note) or _UNCOUNTED.search(note):
            return ["--train", found["part"]]
    return []


def sweep_commands(traces: Sequence[str], numbers: Sequence[CellNumbers], out: str) -> list[str]:
    """`simlab sweep` that gives these cells of each trace again; several where one cannot."""
    if out.endswith((".parquet", ".csv")):
        return _commands(["simlab", "sweep", *traces], numbers, ["--out", out])
    return [
        f"{command} --json > {shlex.quote(out)}"
        for command in _commands(["simlab", "sweep", *traces], numbers, [])
    ]


def validate_commands(trace: str, model: str, numbers: Sequence[CellNumbers], out: str) -> list[str]:
    """`simlab validate` that runs these cells again."""
    words = ["simlab", "validate", trace, *([] if model == EMBEDDED_MODEL else [model])]
    return [f"{command} --json > {shlex.quote(out)}" for command in _commands(words, numbers, [])]


def _commands(words: Sequence[str], numbers: Sequence[CellNumbers], more: Sequence[str]) -> list[str]:
    options = cell_options([n.cell for n in numbers])
    train = train_option(numbers)
    # Several commands cannot all write one file.
    more = more if len(options) == 1 else []
    return [shlex.join([*words, *these, *train, *more]) for these in options]
