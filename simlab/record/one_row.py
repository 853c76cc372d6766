"""What a decode step does to one row of numbers, compiled: a NumPy call costs more than the row it is given.

Each of these is a shortcut of something in `simlab.scores` or `simlab.routing`, exact to the bit, and tested against
it. The policies themselves are not here: they run as they are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simlab.compiled import compiled

_MINUS_INFINITY = np.float32("-inf")


@compiled
def finite_values(ranked: Any, values: Any, ends: Any) -> bool:
    """Ranking values float32 `[E]` of a row and their largest and smallest in `ends`; False unless all are finite.

    `ranked` is float32, or float64 where it is a logarithm, which is rounded once. Both zeros become the one.
    """
    top, low = -np.inf, np.inf
    for i in range(len(ranked)):
        value = np.float32(ranked[i]) + np.float32(0)
        if not -np.inf < value < np.inf:
            return False
        values[i] = value
        top, low = max(top, value), min(low, value)
    ends[0], ends[1] = top, low
    return True


@compiled
def best_of(value: Any, router: Any, left: Any, best: Any) -> int:
    """`routing.take_top` of one tier: fills int32 `best` `[k]` and returns how many of them `router` `[k]` lacks.

    Descending by value, NaN as -inf, ties to the lower id. `left` is room for `[E]` values.
    """
    for i in range(len(value)):
        # What the comparison below never takes: those of -inf come last, by id, and are filled in after the rest.
        left[i] = value[i] if value[i] > _MINUS_INFINITY else np.nan
    n_new = 0
    for slot in range(len(best)):
        at, top = -1, _MINUS_INFINITY
        for i in range(len(left)):
            if left[i] > top:
                at, top = i, left[i]
        if at < 0:
            at = 0
            while value[at] > _MINUS_INFINITY or _is_in(best[:slot], at):
                at += 1
        else:
            left[at] = np.nan
        best[slot] = at
        n_new += not _is_in(router, at)
    return n_new


@compiled
def _is_in(experts: Any, expert: Any) -> bool:
    for i in range(len(experts)):  # noqa: SIM110 - numba compiles no generator expressions
        if experts[i] == expert:
            return True
    return False


@compiled
def after_drop(
    weight: Any, experts: Any, dropped: Any, top: int, renormalise: bool, walk: Any, applied: Any
) -> None:
    """Repoints dropped slots to the top slot's expert and takes their weights away; all `[k]`.

    Sums run in slot order, each rounded to float32, as `np.add.accumulate` adds.
    """
    total, kept = np.float32(0), np.float32(0)
    for i in range(len(weight)):
        walk[i] = experts[top] if dropped[i] else experts[i]
        applied[i] = np.float32(0) if dropped[i] else weight[i]
        total = total + weight[i] if i else weight[i]
        kept = kept + applied[i] if i else applied[i]
    if renormalise and kept > 0:
        factor = np.float32(total / kept)
        for i in range(len(applied)):
            applied[i] = applied[i] * factor
