"""What a replay makes of a cell before it runs: sizes in numbers, and where weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simlab.cells import effective_k, resolve_budget
from simlab.errors import InputError
from simlab.policy import find_eviction
from simlab.replay.columns import TraceColumns, WeightSource
from simlab.replay.early_reads import LookAhead, look_ahead
from simlab.trace.store import Trace
from simlab.types import Cell, EvictionPolicy, ResolvedBudget, Route, RoutingPolicy, Step


@dataclass(frozen=True)
class Resolved:
    """One cell over one trace."""

    cell: Cell
    k: int
    budget: ResolvedBudget
    eviction: EvictionPolicy
    weights: WeightSource | None
    """Where weights come from, None where nothing wants them or they are not known."""
    look_ahead: LookAhead
    twice: bool
    """Whether the eviction policy knows the future of a routing that is not the router's own."""

    @property
    def steps(self) -> tuple[Step, ...]:
        return acting_steps(self.cell.route)


def acting_steps(route: Route) -> tuple[Step, ...]:
    """The steps of a route that may change a row."""
    return tuple(step for step in route.steps if not step.policy.is_builtin("original"))


def follows_router(route: Route) -> bool:
    """Whether a route runs the router's own experts, as many as it likes."""
    return all(step.policy.stage == "width" for step in acting_steps(route))


def resolve(cell: Cell, columns: TraceColumns, *, has_scores: bool, detail: bool) -> Resolved:
    """What a cell comes to over a trace.

    Raises:
        InputError: the trace lacks what the cell needs.
    """
    trace, eviction = columns.trace, find_eviction(cell.evict)
    k = effective_k(cell.route, trace.header)
    _check_scores(trace, cell.route, k, has_scores)
    return Resolved(
        cell=cell,
        k=k,
        budget=resolve_budget(cell.budget, cell.scope, trace.header, k),
        eviction=eviction,
        weights=_weight_source(columns, cell.route, k, has_scores, detail or eviction.touch is not None),
        look_ahead=look_ahead(trace.header, columns.speculative.shape[1], cell),
        twice="future" in eviction.needs and not follows_router(cell.route),
    )


def _check_scores(trace: Trace, route: Route, k: int, has_scores: bool) -> None:
    """Refuse what cannot be known without scores, and widths the model does not have."""
    header, path = trace.header, trace.path
    if k > header.n_expert:
        raise InputError(f"{path}: {k} experts per token, but the model has {header.n_expert} in a layer")
    if has_scores:
        return
    asks = [s.policy.name for s in route.steps if s.policy.needs & {"scores", "rank", "mass"}]
    if k > trace.width:
        asks.append(f"{k} experts per token, above the recorded {trace.width},")
    if asks and not trace.has_scores:
        raise InputError(
            f"{path}: {asks[0]} needs the router's scores, which this trace does not carry; "
            "record it with simlab record"
        )
    if asks:
        missing = "score_space" if header.score_space is None else "gating"
        raise InputError(
            f"{path}/header.json: {asks[0]} needs the router's scores, but field '{missing}' is null"
        )


def _weight_source(
    columns: TraceColumns, route: Route, k: int, has_scores: bool, wanted: bool
) -> WeightSource | None:
    """Where the weights of a route's experts come from; refuses a drop whose weights cannot be known."""
    trace = columns.trace
    header, path = trace.header, trace.path
    asking = next(
        (s.policy.name for s in route.steps if s.policy.stage == "drop" or "weights" in s.policy.needs), None
    )
    if asking is None and not wanted:
        return None
    if has_scores and header.weight_rule is not None:
        return "scores"
    reroute, rule = route.reroute, header.weight_rule
    shares = rule is None or rule.normalise or rule.softmax_over_selected
    if has_scores:
        problem = "the weight rule, which header.json lacks"
    elif reroute is not None and not reroute.policy.is_builtin("original"):
        problem = f"the weights of the experts {reroute.policy.name} picks"
    elif k < trace.width and shares:
        problem = f"the weights of a narrower routing than the recorded {trace.width} experts"
    elif not columns.has_weights:
        problem = "the experts' weights"
    else:
        return "recorded"
    if asking is None:
        return None
    raise InputError(
        f"{path}: {asking} needs {problem}, which this trace does not carry; record it with simlab record"
    )


def code_key(steps: tuple[Step, ...], eviction: EvictionPolicy) -> tuple[Any, ...]:
    """Equal where the policies' code is the same: the functions themselves, whatever they are called."""

    def declared(p: RoutingPolicy | EvictionPolicy) -> tuple[Any, ...]:
        # repr, because 0 and 0.0 are equal and start arrays of different dtypes.
        once = p.scalars if isinstance(p, EvictionPolicy) else {}
        firsts = repr((sorted(p.state.items()), sorted(once.items())))
        return tuple((n, k.integer) for n, k in p.knobs.items()), firsts

    routing = tuple(
        (p.stage, p.function, p.update, p.needs, p.uses_cache, p.train, tuple(p.learns.items()), declared(p))
        for p in (s.policy for s in steps)
    )
    rules = (eviction.needs, eviction.bypass, eviction.scope, eviction.prepare)
    return (routing, eviction.function, eviction.touch, rules, declared(eviction))
