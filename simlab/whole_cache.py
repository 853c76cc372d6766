"""Tools for eviction policies that look at a whole cache: the same with NumPy and with JAX.

A whole-cache policy (`simlab.policy.whole_cache`) takes arrays whose first axis is the entries and whose other
axes, if any, are lanes; it may reduce along the first and loop with `repeat`, each lane as often as it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simlab.types import Array

_LAST = np.iinfo(np.int64).max

Carry = dict[str, Array]


def repeat(xp: Any, going: Callable[[Carry], Array], step: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`while going(carry): carry = step(carry)`, lane by lane.

    Args:
        going: bool `[...]`, one per lane; a lane that stops keeps what it has.
        step: gives every array of `carry` anew, `[..., lanes]`; dtypes stay those of `carry`.
    """

    def advance(carry: Carry) -> Carry:
        active, new = going(carry), step(carry)
        return {name: xp.where(active, new[name], old).astype(old.dtype) for name, old in carry.items()}

    if xp is np:
        while np.any(going(carry)):
            carry = advance(carry)
        return carry
    from jax import lax

    return lax.while_loop(lambda c: going(c).any(), advance, {n: xp.asarray(v) for n, v in carry.items()})


def lowest(xp: Any, among: Array, key: Array) -> Array:
    """bool `[N, ...]`: in each lane the one entry of smallest int64 key in `among`, ties to the first; or none."""
    at = xp.argmin(xp.where(among, key, _LAST), axis=0)
    return (along_entries(xp, among) == at) & among


def along_entries(xp: Any, like: Array) -> Array:
    """int64 `[N, 1, ...]`: 0 to N - 1 along the first axis of `like`."""
    return xp.arange(like.shape[0]).reshape((-1,) + (1,) * (like.ndim - 1))


def of(xp: Any, one: Array, values: Array) -> Array:
    """`[...]`: what `values` holds at the one entry that `one` marks, 0 where it marks none."""
    return xp.where(one, values, 0).sum(axis=0)


def evict_in_order(xp: Any, among: Array, key: Array, sizes: Array, over: Array) -> Array:
    """bool `[N, ...]`: the entries of smallest int64 key in `among` that together free `over` bytes, or all."""

    def going(carry: Carry) -> Array:
        return (carry["over"] > 0) & (among & ~carry["leaving"]).any(axis=0)

    def step(carry: Carry) -> Carry:
        victim = lowest(xp, among & ~carry["leaving"], key)
        return {"leaving": carry["leaving"] | victim, "over": carry["over"] - of(xp, victim, sizes)}

    return repeat(xp, going, step, {"leaving": among & False, "over": over})["leaving"]
