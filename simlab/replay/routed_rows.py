"""Rows as the loop of `routed_loop.py` takes them: by rank, with the policy's keys compared beforehand.

All lanes of one setting compare the same keys again and again: of an expert in RAM only how many of those not in RAM
are better has to be known. What the loop reads of a row then fits a few cache lines.

Shapes: `n` rows, `S` settings, `E` experts per layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simlab.replay.loops import loop
from simlab.types import Array

_MOST_BEFORE = np.iinfo(np.uint8).max


class Rows(NamedTuple):
    """Batches: of single rows that lanes route, or lists of what all lanes walk.

    What stands by *rank* lies in score order, best first: what a row is asked for then lies close together.
    """

    layer: Array
    """int32 `[n]`."""
    counted: Array
    """bool `[n]`."""
    slots: Array
    """int64 `[n]`: experts of the batch; a routed row has k different ones, or none."""
    router: Array
    """int32 `[n, max(k, k_model) or E]`: the router's; of a list what it uses, in the order of last occurrences."""
    router_k: Array
    """int32 `[n]`: the router's own k of a routed row, 0 of a list."""
    router_rank: Array
    """int32 `[n, max(k, k_model)]`: ranks of `router`, -1 where none."""
    expert: Array
    """uint16 `[n, E]`, by rank."""
    key: Array
    """float32 `[n, S, 2, E]`: by rank what the policy gives experts that are not in RAM, and those that are. Not NaN;
    neither ascends."""
    active: Array
    """bool `[n, S]`: rows the policy looks at."""
    reach: Array
    """int32 `[n, S]`: ranks from here on win no slot, whatever is in RAM."""
    before: Array
    """uint8 `[n, S, E]`: an expert in RAM goes before all of those not in RAM whose rank is this or more."""
    is_plain: Array
    """bool `[n, S]`: whether `before` says all; not where equal keys would have to be put in order by their ids."""
    mass: Array
    """float64 `[n, E]`, by rank, as `regret`: see `ColumnNeeds`."""
    regret: Array

    @classmethod
    def of_lists(cls, layer: Array, counted: Array, experts: Array) -> Rows:
        """Batches that all lanes walk alike; experts int32 `[n, E]`, then -1."""
        n = len(layer)
        nothing, none, key = np.zeros((n, 0)), np.zeros(n, np.int32), np.zeros((n, 1, 2, 0), np.float32)
        # As JAX gives them: of other arrays numba would compile the loop once more.
        key.flags.writeable = False
        return cls(
            layer=layer,
            counted=counted,
            slots=(experts >= 0).sum(axis=1),
            router=experts,
            router_k=none,
            router_rank=nothing.astype(np.int32),
            expert=nothing.astype(np.uint16),
            key=key,
            active=np.zeros((n, 1), bool),
            reach=np.zeros((n, 1), np.int32),
            before=np.zeros((n, 1, 0), np.uint8),
            is_plain=np.zeros((n, 1), bool),
            mass=nothing,
            regret=nothing,
        )


@loop
def by_rank(expert: Any, router: Any, mass: Any, regret: Any) -> tuple[Any, Any, Any]:
    """`router_rank`, and `mass` and `regret` by rank; of arrays by expert, and `expert` by rank."""
    n, n_expert = expert.shape
    router_rank = np.full(router.shape, -1, np.int32)
    of_rank, regret_of_rank = np.empty(mass.shape), np.empty(mass.shape)
    rank_of = np.empty(n_expert, np.int32)
    for row in range(n):
        for rank in range(n_expert):
            rank_of[expert[row, rank]] = rank
            of_rank[row, rank] = mass[row, expert[row, rank]]
            regret_of_rank[row, rank] = regret[row, expert[row, rank]]
        for slot in range(router.shape[1]):
            if router[row, slot] >= 0:
                router_rank[row, slot] = rank_of[router[row, slot]]
    return router_rank, of_rank, regret_of_rank


@loop
def _able(key: Any, expert: Any, row: int, least: Any) -> tuple[int, Any]:
    """How many keys, which do not ascend, are not less; and how often of them equal ones go by descending id."""
    low, high = 0, len(key)
    while low < high:
        middle = (low + high) // 2
        if key[middle] >= least:
            low = middle + 1
        else:
            high = middle
    same = np.int32(0)
    for rank in range(1, low):
        same += np.int32(key[rank] == key[rank - 1])
    unsure = 0
    if same > 0:
        for rank in range(1, low):
            unsure += np.int64((key[rank] == key[rank - 1]) & (expert[row, rank] < expert[row, rank - 1]))
    return low, unsure


@loop
def compare_keys(key: Any, active: Any, expert: Any, k: int) -> tuple[Any, Any, Any]:
    """`reach`, `before` and `is_plain` of `Rows`, where the policy looks at a row."""
    n, n_settings, _, n_expert = key.shape
    most = min(k, n_expert)
    reach = np.zeros((n, n_settings), np.int32)
    before = np.full((n, n_settings, n_expert), _MOST_BEFORE, np.uint8)
    is_plain = np.zeros((n, n_settings), np.bool_)
    better = np.zeros(n_expert, np.int32)
    for row in range(n):
        for which in range(n_settings):
            if not active[row, which]:
                continue
            outside, inside = key[row, which, 0], key[row, which, 1]
            # At least k experts are as good as the worst of the first k, whatever is in RAM.
            least = min(outside[most - 1], inside[most - 1])
            n_out, unsure_out = _able(outside, expert, row, least)
            n_in, unsure_in = _able(inside, expert, row, least)
            reach[row, which] = max(n_out, n_in)
            unsure = unsure_out + unsure_in
            if n_out >= _MOST_BEFORE:
                continue
            better[:n_in] = 0
            for out in range(n_out):
                other = outside[out]
                same = np.int32(0)
                for rank in range(n_in):
                    better[rank] += np.int32(other > inside[rank])
                    same += np.int32(other == inside[rank])
                # An expert is not beside itself.
                unsure += np.int64(same) - np.int64(out < n_in and other == inside[min(out, n_in - 1)])
            for rank in range(n_in):
                before[row, which, rank] = better[rank]
            is_plain[row, which] = unsure == 0
    return reach, before, is_plain
