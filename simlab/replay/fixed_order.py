"""Whether the order in which a policy evicts is fixed beforehand, found out from its own code.

It is where an entry's key moves only when the entry is used, and is the same in every lane then. That is read off
the policy's functions as JAX traces them: the key reads neither the batch's number nor what changes by itself,
`touch` does not read whether it was a hit, and both work entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simlab.replay.shape import code_key
from simlab.routing import first_state
from simlab.types import Access, EvictionPolicy

_N = 3
"""Entries of the arrays that functions are traced with."""
_BY_ENTRY = {
    "abs", "add", "and", "bitcast_convert_type", "ceil", "clamp", "convert_element_type", "copy", "div",
    "eq", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "population_count", "rem", "round", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sqrt", "square", "sub", "xor",
}  # fmt: skip
"""Primitives that make each element of the same elements of what they are given, alike in NumPy and XLA."""


_KNOWN: dict[Hashable, bool] = {}


def has_fixed_order(policy: EvictionPolicy) -> bool:
    """Whether a key policy's order of eviction is known before a replay on a routing that no lane changes."""
    code = code_key((), policy)
    if code not in _KNOWN:
        _KNOWN[code] = policy.key is not None and policy.needs <= {"ids", "future"} and _is_fixed(policy)
    return _KNOWN[code]


def _is_fixed(policy: EvictionPolicy) -> bool:
    state = first_state(policy.state, (_N,))
    ids = {"layer": np.zeros(_N, np.int32), "expert": np.zeros(_N, np.int32)} if "ids" in policy.needs else {}
    knobs = {
        name: (np.int32 if knob.integer else np.float32)(knob.default) for name, knob in policy.knobs.items()
    }
    whole, no = np.zeros(_N, np.int64), np.zeros(_N, bool)
    key, touch = policy.key, policy.touch
    assert key is not None

    def key_of(state: Any, last: Any, knobs: Any, batch: Any) -> Any:
        return key(jnp, state, last, batch, SimpleNamespace(**knobs))

    def touched(state: Any, access: Any, knobs: Any, hit: Any) -> Any:
        assert touch is not None
        new = touch(jnp, dict(state), Access(hit=hit, **access), SimpleNamespace(**knobs))
        return {name: new[name] for name in state}

    access = {"position": whole, "first": no, "weight": np.zeros(_N, np.float32), "batch": whole}
    access |= {"layer": whole.astype(np.int32), "expert": whole.astype(np.int32)}
    access |= {"next_position": whole, "next_batch": whole}
    return _ignores_last(key_of, state | ids, whole, knobs, np.int64(0)) and (
        touch is None or _ignores_last(touched, state, access, knobs, no)
    )


def _ignores_last(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function works entry by entry and makes nothing of its last argument."""
    try:
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    except Exception:
        # A policy that fails says so when it runs.
        return False
    return _by_entry(jaxpr) and not _is_used(jaxpr, jaxpr.invars[-1])


def _by_entry(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == "broadcast_in_dim":
            if any(getattr(v.aval, "shape", ()) for v in equation.invars):
                return False
        elif inner is not None:
            if not _by_entry(inner.jaxpr):
                return False
        elif equation.primitive.name not in _BY_ENTRY:
            return False
    return True


def _is_used(jaxpr: Any, variable: Any) -> bool:
    """Whether the outputs are made of a variable."""
    live = list(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if any(out is v for out in equation.outvars for v in live):
            live += equation.invars
    return any(v is variable for v in live)
