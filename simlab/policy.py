"""Writing a policy, and finding one by name.

A policy is one pure function over arrays with its knobs as data; the decorators here give it a name and
declare its knobs and inputs. The same function runs with NumPy in the live engine and with `jax.numpy` in
the replayer, so it must not branch on values, loop over candidates or reduce over them: whatever needs the
whole row comes in as a field of `Row`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from simlab.errors import InputError
from simlab.types import (
    Array,
    EvictionPolicy,
    KeyFunction,
    Knob,
    RoutingFunction,
    RoutingPolicy,
    Stage,
    TouchFunction,
)


def _source_hash(function: Callable[..., Any]) -> str:
    module = inspect.getmodule(function)
    text = inspect.getsource(module if module is not None else function)
    return hashlib.sha256(text.encode()).hexdigest()


def routing(
    stage: Stage,
    *,
    knobs: Mapping[str, Knob] | None = None,
    needs: frozenset[str] | set[str] = frozenset(),
    state: Mapping[str, float] | None = None,
    source: str = "",
) -> Callable[[RoutingFunction], RoutingPolicy]:
    """Declare a routing policy named after the function it decorates.

    Args:
        stage: "width" (how many experts), "rerank" (which experts) or "drop" (which slots are skipped).
        knobs: its numbers, by name.
        needs: what it reads of a trace: "scores", "rank", "weights".
        state: names and first values of per-layer float32 state it carries from row to row.
        source: paper section or spec line.
    """

    def declare(function: RoutingFunction) -> RoutingPolicy:
        return RoutingPolicy(
            name=function.__name__,
            stage=stage,
            function=function,
            knobs=dict(knobs or {}),
            needs=frozenset(needs),
            state=dict(state or {}),
            source=source,
            source_hash=_source_hash(function),
        )

    return declare


def eviction(
    *,
    touch: TouchFunction | None = None,
    state: Mapping[str, float] | None = None,
    knobs: Mapping[str, Knob] | None = None,
    source: str = "",
) -> Callable[[KeyFunction], EvictionPolicy]:
    """Declare an eviction policy from its key function; `touch` updates its per-entry `state`."""

    def declare(key: KeyFunction) -> EvictionPolicy:
        return EvictionPolicy(
            name=key.__name__,
            key=key,
            touch=touch,
            state=dict(state or {}),
            knobs=dict(knobs or {}),
            source=source,
            source_hash=_source_hash(key),
        )

    return declare


def rounded(xp: Any, product: Array) -> Array:
    """`product`, rounded to its own precision before anything is added to it.

    A compiler may contract a product and the sum that follows into one fused multiply-add, which rounds
    once where NumPy rounds twice and decides some near-ties differently. A select between the two keeps
    XLA from doing so (tests/test_rounding.py shows both). Spec: engine-semantics, section 1.
    """
    return xp.where(product == product, product, xp.float32(float("nan")))


def quotient(xp: Any, dividend: Array, divisor: Array) -> Array:
    """`dividend / divisor` as one correctly rounded float32 division.

    XLA turns a division by a broadcast value into a product with its reciprocal, which rounds twice and
    misses NumPy's and ggml's quotient in a quarter of cases. In float64 either form is so close that
    rounding it to float32 gives the float32 quotient.
    """
    return (dividend.astype(xp.float64) / divisor.astype(xp.float64)).astype(xp.float32)


@cache
def builtin_policies() -> Mapping[str, RoutingPolicy | EvictionPolicy]:
    """Every policy in `simlab.policies` by name."""
    package = importlib.import_module("simlab.policies")
    found: dict[str, RoutingPolicy | EvictionPolicy] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        for policy in _policies_of(importlib.import_module(f"simlab.policies.{info.name}")):
            found[policy.name] = policy
    return found


def _policies_of(module: Any) -> list[RoutingPolicy | EvictionPolicy]:
    return [v for v in vars(module).values() if isinstance(v, (RoutingPolicy, EvictionPolicy))]


@cache
def _policies_of_file(path: str) -> tuple[RoutingPolicy | EvictionPolicy, ...]:
    spec = importlib.util.spec_from_file_location(f"simlab_user_policy_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        # inspect.getsource, and so the policy's source hash, wants the module findable by name.
        importlib.sys.modules[spec.name] = module  # type: ignore[attr-defined]
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path}: importing the policy failed: {type(error).__name__}: {error}") from error
    found = tuple(p for p in _policies_of(module) if p not in builtin_policies().values())
    if not found:
        raise InputError(
            f"{path}: holds no policy; decorate one function with simlab.policy.routing or .eviction"
        )
    return found


def find_routing(name: str) -> RoutingPolicy:
    """The routing policy of that name, or the one in that `.py` file."""
    return _find(name, RoutingPolicy, "routing", "--route")


def find_eviction(name: str) -> EvictionPolicy:
    """The eviction policy of that name, or the one in that `.py` file."""
    return _find(name, EvictionPolicy, "eviction", "--evict")


def _find(name: str, kind: type, word: str, option: str) -> Any:
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise InputError(f"{option} {name}: no such file")
        candidates = [p for p in _policies_of_file(str(Path(name).resolve())) if isinstance(p, kind)]
        if len(candidates) != 1:
            raise InputError(
                f"{option} {name}: wants exactly one {word} policy in the file, found {len(candidates)}"
            )
        return candidates[0]
    policy = builtin_policies().get(name)
    if not isinstance(policy, kind):
        known = ", ".join(sorted(p.name for p in builtin_policies().values() if isinstance(p, kind)))
        raise InputError(f"{option} {name}: no such {word} policy; there are {known}")
    return policy
