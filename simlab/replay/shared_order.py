"""What an eviction policy's keys rest on, found out from its own code.

On a routing that no lane changes, an entry's uses are the same in every lane. A policy that makes its state of
those alone, not of hits, has the same keys in all lanes; if its key does not move from batch to batch either, the
order in which it evicts is fixed beforehand. That is read off the policy's functions as JAX traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

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

LAST_USE = "last use"
"""The position of an entry's last use beside the policy's state, by a name that no state of a policy has."""


class Reads(NamedTuple):
    """What a policy's functions make something of, on a routing that no lane changes."""

    order: Order
    by_key: frozenset[str]
    """Of the policy's state, and `LAST_USE`."""
    by_touch: frozenset[str]
    """Of the policy's state: where it is none, what an access leaves behind does not rest on those before."""
    of_access: frozenset[str]
    """Fields of `Access`, by `touch`."""


_KNOWN: dict[Hashable, Reads | None] = {}


def shared_order(policy: EvictionPolicy) -> Order | None:
    """How a key policy orders entries on a routing that no lane changes; None where it may differ by lane.

    "fixed": a key moves only when its entry is used. "moving": it may move with every batch.
    """
    found = reads(policy)
    return None if found is None else found.order


def reads(policy: EvictionPolicy) -> Reads | None:
    """What a policy with a shared order rests on; None for one without."""
    code = code_key((), policy)
    if code not in _KNOWN:
        takes_part = policy.key is not None and policy.needs <= {"ids", "future"}
        _KNOWN[code] = _reads(policy) if takes_part else None
    return _KNOWN[code]


def _reads(policy: EvictionPolicy) -> Reads | None:
    state = first_state(policy.state, (_N,))
    ids = {"layer": np.zeros(_N, np.int32), "expert": np.zeros(_N, np.int32)} if "ids" in policy.needs else {}
    knobs = {
        name: (np.int32 if knob.integer else np.float32)(knob.default) for name, knob in policy.knobs.items()
    }
    whole, no = np.zeros(_N, np.int64), np.zeros(_N, bool)
    key, touch = policy.key, policy.touch
    assert key is not None

    def key_of(given: Any) -> Any:
        known = given["state"] | given["ids"]
        return key(jnp, known, given["last"], given["batch"], SimpleNamespace(**given["knobs"]))

    def touched(given: Any) -> Any:
        assert touch is not None
        access = Access(hit=given["hit"], **given["access"])
        new = touch(jnp, dict(given["state"]), access, SimpleNamespace(**given["knobs"]))
        return {name: new[name] for name in state}

    access = {"position": whole, "first": no, "weight": np.zeros(_N, np.float32), "batch": whole}
    access |= {"layer": whole.astype(np.int32), "expert": whole.astype(np.int32)}
    access |= {"next_position": whole, "next_batch": whole}
    common = {"state": state, "knobs": knobs}
    of_key = used(key_of, common | {"ids": ids, "last": whole, "batch": np.int64(0)})
    nothing = {"state": dict.fromkeys(state, False), "hit": False, "access": dict.fromkeys(access, False)}
    of_touch = nothing if touch is None else used(touched, common | {"access": access, "hit": no})
    if of_key is None or of_touch is None or of_touch["hit"]:
        return None
    return Reads(
        order="moving" if of_key["batch"] else "fixed",
        by_key=_names(of_key["state"]) | ({LAST_USE} if of_key["last"] else frozenset()),
        by_touch=_names(of_touch["state"]),
        of_access=_names(of_touch["access"]),
    )


def _names(used: Mapping[str, bool]) -> frozenset[str]:
    return frozenset([name for name, is_used in used.items() if is_used])


def used(function: Callable[[Any], Any], given: Any) -> Any:
    """Of each array of `given` whether a function makes anything of it; None where it does not work by entry."""
    try:
        jaxpr = jax.make_jaxpr(function)(given).jaxpr
    except Exception:
        # A policy that fails says so when it runs.
        return None
    if not _by_entry(jaxpr):
        return None
    return jax.tree.unflatten(jax.tree.structure(given), [_is_used(jaxpr, v) for v in jaxpr.invars])


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
