"""Tools for eviction policies that look at a whole cache: the same with NumPy and with JAX.

A whole-cache policy (`simlab.policy.whole_cache`) takes arrays whose first axis is the entries and whose other
axes, if any, are lanes; it may reduce along the first and loop with `repeat`, each lane as often as it needs.

A line of entries, such as a queue, is an int64 place per entry and one number for the line's end. Several
queues can share the places as long as each entry is in one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simlab.types import Array, CacheState

_LAST = np.iinfo(np.int64).max
_MILLION = 1_000_000

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


def lowest(xp: Any, among: Array, key: Array, then: Array | None = None) -> Array:
    """bool `[N, ...]`: in each lane the one entry of smallest int64 key in `among`, or none.

    Equal keys go by the second key `then` if there is one, and then to the first entry.
    """
    if then is not None:
        least = xp.where(among, key, _LAST).min(axis=0)
        among, key = among & (key == least), then
    at = xp.argmin(xp.where(among, key, _LAST), axis=0)
    return (along_entries(xp, among) == at) & among


def along_entries(xp: Any, like: Array) -> Array:
    """int64 `[N, 1, ...]`: 0 to N - 1 along the first axis of `like`."""
    return xp.arange(like.shape[0]).reshape((-1,) + (1,) * (like.ndim - 1))


def of(xp: Any, one: Array, values: Array) -> Array:
    """`[...]`: what `values` holds at the one entry that `one` marks, 0 where it marks none."""
    return xp.where(one, values, 0).sum(axis=0)


def held(xp: Any, among: Array, sizes: Array) -> Array:
    """int64 `[...]`: the bytes of the entries in `among` together."""
    return xp.where(among, sizes, 0).sum(axis=0)


def share(xp: Any, fraction: Array, capacity: Array) -> Array:
    """int64 `[...]`: that part of a cache's bytes, rounded down; a fraction counts to the millionth.

    Knobs are float32, whose 0.9 is a little less than nine tenths.
    """
    parts = xp.rint(xp.asarray(fraction).astype(xp.float64) * _MILLION).astype(xp.int64)
    return capacity * parts // _MILLION


def join(xp: Any, cache: CacheState, joining: Array, place: Array, end: Array) -> tuple[Array, Array]:
    """Places after entries of the batch went to the end of a line, in the order of their last occurrence.

    Args:
        joining: bool `[N, ...]`: which of `cache.touched` do.

    Returns:
        The places, `[N, ...]`, and the line's new end, `[...]`.
    """
    start = xp.where(joining, cache.position, _LAST).min(axis=0)
    newest = xp.where(joining, cache.position, -1).max(axis=0)
    n = xp.where(joining.any(axis=0), newest - start + 1, 0)
    return xp.where(joining, end + cache.position - start, place), end + n


def turns(xp: Any, among: Array, key: Array, sizes: Array, over: Array, then: Array | None = None) -> Array:
    """int64 `[N, ...]`: 1, 2, ... for the entries of `among` in the order of `lowest` until they make `over` bytes.

    0 for all others. All of `among` have a turn if they do not make `over` together.
    """

    def going(carry: Carry) -> Array:
        return (carry["over"] > 0) & (among & (carry["turn"] == 0)).any(axis=0)

    def step(carry: Carry) -> Carry:
        one = lowest(xp, among & (carry["turn"] == 0), key, then)
        return {
            "turn": xp.where(one, carry["n"] + 1, carry["turn"]),
            "n": carry["n"] + 1,
            "over": carry["over"] - of(xp, one, sizes),
        }

    start = {"turn": xp.zeros_like(sizes), "n": xp.zeros_like(over), "over": over}
    return repeat(xp, going, step, start)["turn"]


def evict_in_order(
    xp: Any, among: Array, key: Array, sizes: Array, over: Array, then: Array | None = None
) -> Array:
    """bool `[N, ...]`: the entries of smallest int64 key in `among` that together free `over` bytes, or all."""
    return turns(xp, among, key, sizes, over, then) > 0


def move_in_order(
    xp: Any, among: Array, key: Array, sizes: Array, over: Array, place: Array, end: Array
) -> tuple[Array, Array, Array]:
    """The entries of smallest int64 key in `among` that together make `over` bytes go to a line's end.

    Returns:
        bool `[N, ...]` of the entries that moved, the places, and the line's new end.
    """
    turn = turns(xp, among, key, sizes, over)
    return turn > 0, xp.where(turn > 0, end + turn - 1, place), end + turn.max(axis=0)


def evict_one_by_one(
    xp: Any, cache: CacheState, step: Callable[[Array, Carry], tuple[Array, Carry]], **carry: Array
) -> tuple[Array, Carry]:
    """Run `step` until the cache is within its budget, or nothing but the batch's own entries is left.

    Args:
        step: `(others, carry) -> (victim, changes)`. `others` are the entries that may still leave, bool
            `[N, ...]`, in every lane that counts at least one; `victim` is one of them, or none; `changes` are
            new values of what `carry` holds. It must get to a victim after finitely many rounds.
        carry: what `step` works on. It finds there too, but does not change, `leaving` and `over`.

    Returns:
        The entries that leave, bool `[N, ...]`, and the last `carry`.
    """
    may_leave = cache.resident & ~cache.touched

    def going(c: Carry) -> Array:
        return (c["over"] > 0) & (may_leave & ~c["leaving"]).any(axis=0)

    def advance(c: Carry) -> Carry:
        victim, changes = step(may_leave & ~c["leaving"], c)
        freed = {"leaving": c["leaving"] | victim, "over": c["over"] - of(xp, victim, cache.bytes)}
        return c | changes | freed

    carry = repeat(xp, going, advance, {**carry, "leaving": may_leave & False, "over": cache.over})
    return carry["leaving"], carry
