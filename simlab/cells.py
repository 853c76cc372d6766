"""Budgets, routes and lists of cells, from the words a user writes. Grammar: interface.md, cell options."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from simlab.errors import InputError
from simlab.policy import find_eviction, find_routing
from simlab.prefetch import parse_prefetch
from simlab.types import Budget, Cell, Policy, ResolvedBudget, Route, RoutingPolicy, Scope, Step, TraceHeader

MIB = 1 << 20
_PLACE = {"width": 0, "rerank": 1, "swap": 1, "drop": 2}
"""Of the stages in a route: a rerank and a swap both say which experts run."""
_BUDGET = re.compile(
    r"^(?P<amount>[0-9]*\.?[0-9]+(?:e[+-]?\d+)?)(?P<unit>MiB|GiB|cycles?|/layer|%)$", re.IGNORECASE
)
_LARGEST = 1e8
"""Of any unit: keeps the bytes of every budget well inside int64."""
_BUDGET_FORMS = "2000MiB, 2.5cycles, 48/layer, 25% or off"


def parse_budget(text: str) -> Budget:
    """`2000MiB`, `2.5cycles`, `48/layer`, `25%` or `off`."""
    text = text.strip()
    if text.lower() == "off":
        return Budget("off", 0.0, "off")
    match = _BUDGET.match(text)
    if not match:
        raise InputError(f"--budget {text}: not a budget; write {_BUDGET_FORMS}")
    amount = float(match["amount"])
    unit = match["unit"].lower()
    if not 0 < amount < _LARGEST:
        raise InputError(
            f"--budget {text}: must be above zero and below {_LARGEST:g} ('off' runs without a cache)"
        )
    if unit in ("mib", "gib"):
        return Budget("bytes", amount * (1024 if unit == "gib" else 1) * MIB, text)
    if unit.startswith("cycle"):
        return Budget("cycles", amount, text)
    if unit == "/layer":
        if amount != int(amount):
            raise InputError(f"--budget {text}: experts per layer must be a whole number")
        return Budget("per_layer", amount, text)
    if amount > 100:
        raise InputError(f"--budget {text}: at most 100% of the expert bytes")
    return Budget("fraction", amount / 100, text)


def route_spec(route: Route) -> str:
    """A route as `--route` takes it: `substitute:L=0.15+drop_cold:F=0.75,prefill=0`.

    What it begins from is "unknown" where the router's own picks are not.
    """

    def one(step: Step) -> str:
        knobs = ",".join(f"{name}={value:g}" for name, value in step.knobs.items())
        return step.policy.name + (f":{knobs}" if knobs else "")

    if not route.router_known:
        acting = (s for s in route.steps if not s.policy.is_builtin("original"))
        return "+".join(["unknown", *map(one, acting)])
    return "+".join(map(one, route.steps)) or route.name


def effective_k(route: Route, header: TraceHeader) -> int:
    """Experts per token in force: the k' of a `width` step, else the model's own.

    Raises:
        InputError: the step asks for more experts than a layer has, or for none.
    """
    step = route.step("width")
    if step is None:
        return header.n_expert_used
    from simlab.routing import width

    k = width(step, header.n_expert_used)
    if not 1 <= k <= header.n_expert:
        raise InputError(
            f"{step.option or step.policy.name}: must lie between 1 and this model's {header.n_expert} experts; "
            f"it asks for {k} experts per token"
        )
    return k


def recorded_budget(header: TraceHeader) -> str | None:
    """The cache size a trace was recorded at, as `--budget` takes it; None where it is unknown."""
    if header.budget is not None or header.budget_bytes is None:
        return header.budget
    # A power of two divides exactly, and repr gives the digits that read back as the same float.
    return f"{header.budget_bytes / MIB!r}MiB" if header.budget_bytes else "off"


def resolve_budget(budget: Budget, scope: Scope, header: TraceHeader, k: int) -> ResolvedBudget:
    """The bytes a budget comes to for one model: exact integers, `layer_bytes` in MoE layer order."""
    sizes = [int(header.entry_bytes[layer]) for layer in header.moe_layers]
    if budget.kind == "off":
        return ResolvedBudget(0, (0,) * len(sizes), per_layer=False, off=True)
    if budget.kind == "per_layer":
        layer_bytes = tuple(int(budget.amount) * size for size in sizes)
        return ResolvedBudget(sum(layer_bytes), layer_bytes, per_layer=True)
    total = {
        "bytes": lambda: math.floor(budget.amount),
        "cycles": lambda: math.floor(budget.amount * header.cycle_bytes(k)),
        "fraction": lambda: math.floor(budget.amount * header.expert_bytes),
    }[budget.kind]()
    if total <= 0:
        raise InputError(f"--budget {budget.text}: comes to less than one byte for this model")
    return ResolvedBudget(total, (total // len(sizes),) * len(sizes), per_layer=scope == "per_layer")


def parse_route(text: str) -> Route:
    """A SPEC such as `substitute:L=.15+drop_cold:F=.75,renorm=0`, or a policy file, as a route."""
    parts = [part.strip() for part in text.split("+")]
    for place, part in enumerate(parts, 1):
        if not part.partition(":")[0].strip():
            where = f"part {place} of {len(parts)} " if len(parts) > 1 else ""
            raise InputError(f"--route '{text}': {where}names no policy; write name:knob=v, composed with +")
    steps = [_parse_step(part, text) for part in parts]
    steps.sort(key=_place)
    for first, second in itertools.pairwise(steps):
        a, b = first.policy, second.policy
        if a.stage == b.stage:
            raise InputError(
                f"--route {text}: two {a.stage} policies in one route; one of each stage composes"
            )
        if _place(first) == _place(second):
            raise InputError(
                f"--route {text}: {a.name} ({a.stage}) and {b.name} ({b.stage}) both decide which experts run; "
                "give one of them"
            )
    return Route(tuple(steps))


def _place(step: Step) -> int:
    return _PLACE[step.policy.stage]


def make_step(policy: RoutingPolicy, given: dict[str, float], option: str) -> Step:
    """A step with defaults filled in and every knob checked against its range; `option` is what asked for it."""
    return Step(policy, _fill_knobs(policy, given, option), option)


def _fill_knobs(policy: Policy, given: dict[str, float], option: str) -> dict[str, float]:
    """A policy's knobs, those not given at their defaults, checked against their ranges."""
    for name in given:
        if name not in policy.knobs:
            known = ", ".join(policy.knobs) or "none"
            raise InputError(f"{option}: {policy.name} has no knob '{name}'; it has {known}")
    knobs: dict[str, float] = {}
    for name, knob in policy.knobs.items():
        value = given.get(name, knob.default)
        if not knob.low <= value <= knob.high:  # false for NaN too
            raise InputError(
                f"{option}: {policy.name}:{name} must lie between {knob.low:g} and {knob.high:g}"
            )
        if knob.integer and value != int(value):
            raise InputError(f"{option}: {policy.name}:{name} must be a whole number")
        knobs[name] = int(value) if knob.integer else float(value)
    return knobs


def _parse_step(part: str, whole: str) -> Step:
    name, given = _parse_spec(part, f"--route {whole}")
    return make_step(find_routing(name), given, f"--route {whole}")


def _parse_spec(text: str, option: str) -> tuple[str, dict[str, float]]:
    """`name:knob=v,knob=v` as a name and numbers."""
    name, _, rest = text.partition(":")
    given: dict[str, float] = {}
    for pair in filter(None, (p.strip() for p in rest.split(","))):
        knob, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"{option}: '{pair}' is not knob=value")
        if knob.strip() in given:
            raise InputError(f"{option}: '{knob.strip()}' is given twice")
        given[knob.strip()] = parse_number(value, option)
    return name.strip(), given


def parse_evict(text: str) -> tuple[str, dict[str, float]]:
    """A SPEC such as `lfu_decay:half_life=64`, or a policy file, as a name and all of its knobs.

    Raises:
        InputError: no such policy, or a knob it does not have or out of its range.
    """
    name, given = _parse_spec(text, f"--evict {text}")
    return name, _fill_knobs(find_eviction(name), given, f"--evict {text}")


def check_eviction(cell: Cell, *, trained: bool) -> None:
    """Refuse an eviction policy that lacks what it learns from, or has another scope than the cell.

    Args:
        trained: whether the run has a training part.
    """
    policy = find_eviction(cell.evict)
    if "training" in policy.needs and not trained:
        raise InputError(
            f"--evict {policy.name}: learns from a training part; add --train 25%, OTHER.trace or same"
        )
    if policy.scope is not None and cell.scope != policy.scope:
        raise InputError(f"--evict {policy.name}: has scope {policy.scope}, this cell has {cell.scope}")


def check_live(cell: Cell) -> None:
    """Refuse a cell that only a replay can run."""
    if cell.sequential:
        raise InputError("--sequential: measures what a replay makes of it; the engine runs whole batches")
    policy = find_eviction(cell.evict)
    if "future" in policy.needs:
        raise InputError(
            f"--evict {policy.name}: knows the future, which a live run does not have; replay it"
        )


def parse_number(text: str, option: str) -> float:
    """A float, or one clear line."""
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option}: '{text}' is not a number") from None


def build_cells(
    *,
    budgets: Sequence[str],
    margins: Sequence[str] = (),
    drops: Sequence[str] = (),
    top_ks: Sequence[str] = (),
    routes: Sequence[str] = (),
    evicts: Sequence[str] = ("lru",),
    scope: Scope = "global",
    sequential: bool = False,
    prefetch: str | None = None,
) -> list[Cell]:
    """Every combination of the options as cells, budgets outermost; lists as `interface.md` allows them.

    `margins`, `drops` and `top_ks` multiply into each route; a route that has that stage refuses them.
    `scope` is that of policies which have none of their own, `prefetch` what replays read ahead.
    """
    bases = [parse_route(r) for r in routes] or [Route()]
    ahead = parse_prefetch(prefetch).text if prefetch is not None else None
    shorthands = [
        [_short("top_k", "k", v, "--top-k") for v in top_ks] or [None],
        [_short("substitute", "L", v, "--margin") for v in margins] or [None],
        [_short("drop_cold", "F", v, "--drop") for v in drops] or [None],
    ]
    found: list[Cell] = []
    parsed = [parse_budget(b) for b in budgets]
    keeps = [parse_evict(e) for e in evicts]
    extras = list(itertools.product(*shorthands))
    for budget, (evict, knobs), base, extra in itertools.product(parsed, keeps, bases, extras):
        steps = list(base.steps)
        for step in filter(None, extra):
            same = next((s for s in steps if _place(s) == _place(step)), None)
            if same is not None and same.policy.is_builtin("original"):
                steps.remove(same)
            elif same is not None:
                raise InputError(
                    f"--route {same.policy.name}: {step.policy.name} decides the {same.policy.stage} too; "
                    "give one of them"
                )
            steps.append(step)
        steps.sort(key=_place)
        route = Route(tuple(steps)) if steps else parse_route("original")
        check_cache(route, budget)
        # Experts of its own for each layer are a cache per layer, whatever the scope was said to be.
        of_budget: Scope = "per_layer" if budget.kind == "per_layer" else scope
        if prefetch is not None and budget.kind == "off":
            raise InputError("--prefetch: needs a cache to read ahead into; --budget off has none")
        own_scope = find_eviction(evict).scope or of_budget
        found.append(Cell(route, budget, evict, knobs, own_scope, sequential, ahead))
    if len(set(map(_identity, found))) < len(found):
        found = list({_identity(c): c for c in found}.values())
    return found


def _identity(cell: Cell) -> tuple:
    """Equal for cells that are the same setting: of the same code, whatever it is called."""
    steps = tuple((s.policy.stage, s.policy.function, tuple(s.knobs.items())) for s in cell.route.steps)
    evict = find_eviction(cell.evict)
    keeps = (evict.function, evict.touch, tuple(cell.evict_knobs.items()), cell.scope, cell.sequential)
    return (steps, keeps, cell.budget, cell.prefetch)


def _short(name: str, knob: str, value: str, option: str) -> Step:
    return make_step(find_routing(name), {knob: parse_number(value, option)}, option + " " + str(value))


def check_cache(route: Route, budget: Budget) -> None:
    """A margin or a drop prefers what is resident: without a cache there is nothing to prefer."""
    if budget.kind != "off":
        return
    for step in route.steps:
        if step.policy.uses_cache and not step.policy.is_builtin("original"):
            raise InputError(f"--budget off: {step.policy.name} needs a cache, or nothing is resident")
