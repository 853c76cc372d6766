"""Writing a policy, and finding one by name.

A policy is one pure function of one candidate, or one entry, with its knobs as data; the decorators here give it a
name and declare its knobs and inputs. The same function is compiled by numba, for replays and for the live engine, and
called with arrays by NumPy and JAX, so it must not branch on values: it computes with operators, comparisons and the
functions of `simlab.xp`, and whatever needs the whole row comes in as a field of `Row`.

A user's mistake is one line that names the file: declarations are checked by the decorators, what the
function does by a dry run on tiny arrays before its first use, and what only shows later by whoever calls it
(`simlab.policy_check`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from simlab.errors import InputError
from simlab.policy_check import check_policy, one_line
from simlab.types import (
    EvictionPolicy,
    KeyFunction,
    Knob,
    Learned,
    Policy,
    PrepareFunction,
    QueueFunction,
    RoutingFunction,
    RoutingPolicy,
    Scope,
    Stage,
    TouchFunction,
    TrainFunction,
    UpdateFunction,
)

_OF_EXPERTS = frozenset({"scores", "rank", "weights", "mass"})
_NEEDS: Mapping[Stage, frozenset[str]] = {
    "width": frozenset(),
    "rerank": _OF_EXPERTS,
    "swap": _OF_EXPERTS,
    "drop": frozenset({"scores", "rank", "weights", "lighter"}),
}
_KINDS = ("layer", "expert", "pair")
_ROUTING_ARGUMENTS = ("candidate", "row", "state", "knobs")
_WIDTH_ARGUMENTS = ("k", "knobs")
_UPDATE_ARGUMENTS = ("row", "state", "knobs")
_KEY_ARGUMENTS = ("entry", "state", "knobs")
_TOUCH_ARGUMENTS = ("state", "access", "knobs")
_QUEUE_ARGUMENTS = ("cache", "knobs")
_PREPARE_ARGUMENTS = ("counts", "sizes", "capacity", "knobs")
_LARGEST_WHOLE = 2**31 - 1

# -- declaring -----------------------------------------------------------------------------------------------


def routing(
    stage: Stage,
    *,
    knobs: Mapping[str, Knob] | None = None,
    needs: frozenset[str] | set[str] = frozenset(),
    state: Mapping[str, float] | None = None,
    update: UpdateFunction | None = None,
    learns: Mapping[str, Learned] | None = None,
    train: TrainFunction | None = None,
    uses_cache: bool = True,
    ordered: bool = False,
    source: str = "",
) -> Callable[[RoutingFunction], RoutingPolicy]:
    """Declare a routing policy named after the function it decorates.

    Args:
        stage: "width" (how many experts), "rerank" (which experts), "swap" (which of the router's experts are
            replaced, and by which) or "drop" (which slots are skipped).
        knobs: its numbers, by name.
        needs: what it reads of a trace: "scores", "rank", "weights", "mass", and for slots "lighter".
        state: names and first values of per-layer float32 state; `update` changes it, once per row.
        learns: what `train` returns, by name; the policy finds it in `candidate.learned`.
        train: called once with the training part of a trace (`--train`).
        uses_cache: False for one that does not look at residency: it then runs with the cache off too.
        ordered: True for a rerank or swap that never puts the lower-scored of two candidates first which are alike
            in residency and outside the router's picks: a replay then looks at the best of each kind only, and is
            much faster.
        source: paper section or spec line.

    Raises:
        InputError: a declaration that cannot be used.
    """
    if callable(stage):
        raise InputError(f'policy {_name_of(stage)}: write @routing("rerank"), with the stage it decides')

    def declare(function: RoutingFunction) -> RoutingPolicy:
        where = _check_function(function, _WIDTH_ARGUMENTS if stage == "width" else _ROUTING_ARGUMENTS)
        if stage not in get_args(Stage):
            raise InputError(f"{where}: stage {stage!r} must be one of {', '.join(get_args(Stage))}")
        if stage == "width" and (needs or state or learns):
            raise InputError(
                f"{where}: a width policy gives one k for the whole run; it can have no needs and no state"
            )
        if isinstance(needs, str) or not frozenset(needs) <= _NEEDS[stage]:
            given = needs if isinstance(needs, str) else ", ".join(sorted(map(str, needs)))
            known = ", ".join(sorted(_NEEDS[stage]))
            raise InputError(f"{where}: needs '{given}' must be a set of {known} in a {stage} policy")
        if bool(state) != (update is not None):
            raise InputError(f"{where}: update says how state changes; give both or neither")
        if update is not None:
            _check_arguments(f"{where}: update", update, _UPDATE_ARGUMENTS)
        if ordered and (stage not in ("rerank", "swap") or "scores" not in needs):
            raise InputError(f"{where}: only a rerank or swap policy that needs scores can be ordered")
        return RoutingPolicy(
            name=_label(function),
            stage=stage,
            function=function,
            knobs=_check_knobs(where, knobs),
            needs=frozenset(needs),
            state=_check_state(where, state),
            update=update,
            learns=_check_learns(where, stage, learns, train),
            train=train,
            uses_cache=uses_cache and stage != "width",
            ordered=ordered,
            source=source,
            source_hash=_source_hash(function),
            origin=_origin(function),
        )

    return declare


def eviction(
    kind: Literal["static", "dynamic"],
    *,
    touch: TouchFunction | None = None,
    state: Mapping[str, float] | None = None,
    knobs: Mapping[str, Knob] | None = None,
    needs: frozenset[str] | set[str] = frozenset(),
    bypass: bool = False,
    scope: Scope | None = None,
    source: str = "",
) -> Callable[[KeyFunction], EvictionPolicy]:
    """Declare an eviction policy from its key function; `touch` updates its per-entry `state`.

    Args:
        kind: "static" for a key that changes only when its entry is used, "dynamic" for one that changes by itself
            (with `entry.batch`, `entry.in_pass` or `entry.speculative`).
        needs: "pass" and "future" (see `EvictionPolicy.needs`).
        bypass: whether the batch's own entries may leave at its end too.
        scope: the only scope it has.

    Raises:
        InputError: a declaration that cannot be used.
    """
    if callable(kind):
        raise InputError(f'policy {_name_of(kind)}: write @eviction("static") or @eviction("dynamic")')

    def declare(key: KeyFunction) -> EvictionPolicy:
        where = _check_function(key, _KEY_ARGUMENTS)
        if kind not in ("static", "dynamic"):
            raise InputError(f"{where}: kind {kind!r} must be static or dynamic")
        if kind == "static" and "pass" in needs:
            raise InputError(f"{where}: needs 'pass', which changes by itself; declare it dynamic")
        common = _check_eviction(where, key, touch, state, knobs, needs, {"pass", "future"}, scope, source)
        return EvictionPolicy(kind=kind, touch=touch, bypass=bypass, **common)

    return declare


def queue(
    *,
    state: Mapping[str, float] | None = None,
    scalars: Mapping[str, float] | None = None,
    knobs: Mapping[str, Knob] | None = None,
    needs: frozenset[str] | set[str] = frozenset(),
    prepare: PrepareFunction | None = None,
    bypass: bool = False,
    scope: Scope | None = None,
    source: str = "",
) -> Callable[[QueueFunction], EvictionPolicy]:
    """Declare an eviction policy that keeps its entries in queues, with the tools of `simlab.queues`.

    It runs at every batch's end, compiled by numba alone; the JAX scan cannot run it.

    Args:
        state: names and first values of per-entry state; `scalars`: of state a whole cache has once.
        needs: "training", which wants `prepare`.
        prepare: gives the first values of state from counts over a training part (`PrepareFunction`).
        bypass, scope: as for `eviction`.

    Raises:
        InputError: a declaration that cannot be used.
    """

    def declare(function: QueueFunction) -> EvictionPolicy:
        where = _check_function(function, _QUEUE_ARGUMENTS)
        common = _check_eviction(where, function, None, state, knobs, needs, {"training"}, scope, source)
        once = _check_state(where, scalars)
        if ("training" in common["needs"]) != (prepare is not None):
            raise InputError(f"{where}: prepare and needs={{'training'}} go together; give both or neither")
        if prepare is not None:
            _check_arguments(f"{where}: prepare", prepare, _PREPARE_ARGUMENTS)
        return EvictionPolicy(kind="queue", scalars=once, prepare=prepare, bypass=bypass, **common)

    return declare


def _check_eviction(
    where: str,
    function: Callable[..., Any],
    touch: TouchFunction | None,
    state: Mapping[str, float] | None,
    knobs: Mapping[str, Knob] | None,
    needs: frozenset[str] | set[str],
    known: set[str],
    scope: Scope | None,
    source: str,
) -> dict[str, Any]:
    """The fields that all kinds of eviction policy have."""
    if touch is not None:
        _check_arguments(f"{where}: touch", touch, _TOUCH_ARGUMENTS)
    if isinstance(needs, str) or not frozenset(needs) <= known:
        given = needs if isinstance(needs, str) else ", ".join(sorted(map(str, needs)))
        raise InputError(f"{where}: needs '{given}' must be a set of {', '.join(sorted(known))}")
    if "future" in needs and touch is None:
        raise InputError(f"{where}: needs 'future' is shown to touch, which it does not have")
    if scope not in (None, *get_args(Scope)):
        raise InputError(f"{where}: scope {scope!r} must be one of {', '.join(get_args(Scope))}")
    return {
        "name": _label(function),
        "function": function,
        "state": _check_state(where, state),
        "knobs": _check_knobs(where, knobs),
        "needs": frozenset(needs),
        "scope": scope,
        "source": source,
        "source_hash": _source_hash(function),
        "origin": _origin(function),
    }


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _origin(function: Callable[..., Any]) -> str:
    module = function.__module__ or ""
    if module.startswith("simlab.policies."):
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).name if file else "notebook"


def _label(function: Callable[..., Any]) -> str:
    origin = _origin(function)
    return f"{_name_of(function)}@{origin}" if origin else _name_of(function)


def _source_hash(function: Callable[..., Any]) -> str:
    module = inspect.getmodule(function)
    try:
        text = inspect.getsource(module if module is not None else function)
    except (OSError, TypeError):  # a module without a file, such as a notebook's
        try:
            text = inspect.getsource(function)
        except OSError:
            text = ""
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _check_function(function: Any, arguments: tuple[str, ...]) -> str:
    where = f"policy {_name_of(function)}"
    special = (inspect.iscoroutinefunction, inspect.isgeneratorfunction)
    if not inspect.isfunction(function) or any(is_one(function) for is_one in special):
        raise InputError(f"{where}: a policy is one plain function ({', '.join(arguments)})")
    _check_arguments(where, function, arguments)
    return where


def _check_arguments(where: str, function: Any, arguments: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(function)
        if next(iter(signature.parameters), "") == "xp":
            raise InputError(
                f"{where}: takes xp, which policies no longer do; it must take ({', '.join(arguments)}), of one "
                "candidate or entry, and import what it computes with from simlab.xp"
            )
        signature.bind(*arguments)
    except (TypeError, ValueError):
        raise InputError(f"{where} must be a function that takes ({', '.join(arguments)})") from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _check_knobs(where: str, knobs: Mapping[str, Knob] | None) -> dict[str, Knob]:
    if not isinstance(knobs, Mapping | None):
        raise InputError(f"{where}: knobs must be a mapping from names to Knob(default, low, high)")
    for name, knob in (knobs or {}).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{where}: a knob's name must be a Python name, not {name!r}")
        if not isinstance(knob, Knob):
            raise InputError(f"{where}: knob {name} must be a Knob(default, low, high), not {knob!r}")
        if not all(map(_is_number, knob[:3])) or not knob.low <= knob.default <= knob.high:
            raise InputError(f"{where}: knob {name} must have finite numbers with low <= default <= high")
        if knob.integer and (knob.default != int(knob.default) or max(map(abs, knob[1:3])) > _LARGEST_WHOLE):
            raise InputError(f"{where}: knob {name} must have a whole default and int32 limits")
    return dict(knobs or {})


def _check_state(where: str, state: Mapping[str, float] | None) -> dict[str, float]:
    if not isinstance(state, Mapping | None):
        raise InputError(f"{where}: state must be a mapping from names to first values")
    for name, value in (state or {}).items():
        if not isinstance(name, str) or not isinstance(value, (int, float)):
            raise InputError(f"{where}: state {name!r} must be a name with a number as its first value")
    return dict(state or {})


def _check_learns(
    where: str, stage: Stage, learns: Mapping[str, Learned] | None, train: TrainFunction | None
) -> dict[str, Learned]:
    if not isinstance(learns, Mapping | None):
        raise InputError(f"{where}: learns must be a mapping from names to Learned(per)")
    if bool(learns) != (train is not None):
        raise InputError(f"{where}: learns says what train returns; give both or neither")
    for name, learned in (learns or {}).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{where}: what is learned must have a Python name, not {name!r}")
        if not isinstance(learned, Learned) or learned.per not in _KINDS:
            raise InputError(f"{where}: learns {name} must be a Learned(per) of {', '.join(_KINDS)}")
        if learned.per == "pair" and stage != "swap":
            raise InputError(f"{where}: learns {name} per pair of experts, which only a swap policy is shown")
        if learned.untrained is not None and not _is_number(learned.untrained):
            raise InputError(f"{where}: learns {name}: untrained must be a finite number or None")
    if train is not None:
        _check_arguments(f"{where}: train", train, ("training",))
    return dict(learns or {})


# -- finding -------------------------------------------------------------------------------------------------


@cache
def builtin_policies() -> Mapping[str, Policy]:
    """Every policy in `simlab.policies` by name."""
    package = importlib.import_module("simlab.policies")
    found: dict[str, Policy] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        for policy in _policies_of(importlib.import_module(f"simlab.policies.{info.name}")):
            found[policy.name] = policy
    return found


def _policies_of(module: Any) -> list[Policy]:
    return [v for v in vars(module).values() if isinstance(v, Policy)]


_PATHS: dict[str, str] = {}
"""Origins given out, by the path they stand for."""


def _distinct_origin(path: str) -> str:
    """A file's name, with as many of its folders as tell it from the files loaded before."""
    parts = Path(path).parts
    names = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1))
    return next((name for name in names if _PATHS.setdefault(name, path) == path), path)


@cache
def _policies_of_file(path: str, content: bytes) -> tuple[Policy, ...]:
    """The policies of a file, once per content: an edited file is another set of policies."""
    digest = hashlib.sha256(content).hexdigest()
    spec = importlib.util.spec_from_file_location(f"simlab_user_policy_{digest[:16]}_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        # inspect.getsource, and so the policy's source hash, wants the module findable by name.
        sys.modules[spec.name] = module
        # Compiled here, since Python's own cache takes an edit within a second for the file it knows.
        exec(compile(content, path, "exec", dont_inherit=True), vars(module))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"{path}: importing the policy failed: {one_line(error)}") from error
    builtin = list(builtin_policies().values())
    found = [p for p in _policies_of(module) if not any(p is b for b in builtin)]
    if not found:
        raise InputError(
            f"{path}: holds no policy; decorate one function with simlab.policy.routing or .eviction"
        )
    origin = _distinct_origin(path)
    return tuple(replace(p, name=f"{p.name.partition('@')[0]}@{origin}", origin=origin) for p in found)


def find_routing(name: str) -> RoutingPolicy:
    """The routing policy of that name, or the one in that `.py` file, checked by a dry run."""
    return _find(name, RoutingPolicy, "routing", "--route")


def find_eviction(name: str) -> EvictionPolicy:
    """The eviction policy of that name, or the one in that `.py` file, checked by a dry run."""
    return _find(name, EvictionPolicy, "eviction", "--evict")


def _find(name: str, kind: type, word: str, option: str) -> Any:
    path = Path(name)
    if name.endswith(".py") and (path.is_file() or "@" not in name):
        if not path.is_file():
            raise InputError(f"{option} {name}: no such file")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{option} {name}: {error.strerror}") from error
        candidates = [p for p in _policies_of_file(str(path.resolve()), content) if isinstance(p, kind)]
        if len(candidates) != 1:
            raise InputError(
                f"{option} {name}: wants exactly one {word} policy in the file, found {len(candidates)}"
            )
        policy = candidates[0]
    else:
        policy: Any = builtin_policies().get(name)
        if not isinstance(policy, kind):
            known = ", ".join(sorted(n for n, p in builtin_policies().items() if isinstance(p, kind)))
            hint = f"give the file {name.partition('@')[2]}" if "@" in name else f"there are {known}"
            raise InputError(f"{option} {name}: no such {word} policy; {hint}")
    check_policy(policy)
    return policy
