"""What an eviction policy's keys rest on, found out from its own code.

On a routing that no lane changes, an entry's uses are the same in every lane. A policy that makes its state of
those alone, not of hits, has the same keys in all lanes; if its key does not move from batch to batch either, the
order in which it evicts is fixed beforehand. That is read off the policy's functions as JAX traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, Literal

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


Order = Literal["fixed", "moving"]
_KNOWN: dict[Hashable, Order | None] = {}


def shared_order(policy: EvictionPolicy) -> Order | None:
    """How a key policy orders entries on a routing that no lane changes; None where it may differ by lane.

    "fixed": a key moves only when its entry is used. "moving": it may move with every batch.
    """
    code = code_key((), policy)
    if code not in _KNOWN:
        takes_part = policy.key is not None and policy.needs <= {"ids", "future"}
        _KNOWN[code] = _shared_order(policy) if takes_part else None
    return _KNOWN[code]


def _shared_order(policy: EvictionPolicy) -> Order | None:
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
    of_key = uses_last(key_of, state | ids, whole, knobs, np.int64(0))
    of_touch = False if touch is None else uses_last(touched, state, access, knobs, no)
    if of_key is None or of_touch is not False:
        return None
    return "moving" if of_key else "fixed"


def uses_last(function: Callable[..., Any], *arguments: Any) -> bool | None:
    """Whether a function makes anything of its last argument; None where it does not work entry by entry."""
    try:
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    except Exception:
        # A policy that fails says so when it runs.
        return None
    return _is_used(jaxpr, jaxpr.invars[-1]) if _by_entry(jaxpr) else None


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
