"""Counting: what the steps of `recency.py` told, added up after the loop; what all lanes have alike; and counters under
their names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from simlab.cells import MIB
from simlab.replay.routes import against_router
from simlab.replay.shape import COUNTERS, SUMS, ProgramShape, Tree
from simlab.types import DECODE, PREFILL, Array, PhaseNumbers

NONE, KNOWN, COLD, HIT = (np.int8(n) for n in (-1, 0, 1, 2))
"""What a look-up found: there was none; an entry not in RAM, seen before or for the first time; one in RAM."""
_AT_ONCE = 8
"""Rows added in one go."""


def add_up(
    program: ProgramShape, routed: bool, carry: Tree, rows: Tree, n: Array, lanes: Tree, told: Tree
) -> Tree:
    """Counters and sums with those of the first `n` batches.

    Args:
        routed: whether lanes routed the rows; those are of decode graphs. told: by `_step`, arrays `[rows, ..., W]`.
    """
    found = told["found"]
    count = {
        "lookups": (found != NONE).sum(axis=1, dtype=jnp.int32),
        "hits": (found == HIT).sum(axis=1, dtype=jnp.int32),
        "cold_misses": (found == COLD).sum(axis=1, dtype=jnp.int32),
        **{name: x for name, x in told.items() if name in COUNTERS},
    }
    nothing = jnp.zeros_like(count["hits"])
    count["misses"] = count["lookups"] - count["hits"]
    count["rereads"] = jnp.where(lanes["off"], 0, count["misses"] - count["cold_misses"])
    count["read_bytes"] = count["misses"] * lanes["entry_bytes"][rows["layer"]][:, None]
    # A row's experts differ; the slots of rows that are not routed are the same in all lanes and counted outside.
    count["slots"] = count["lookups"] + count.get("dropped", nothing) if routed else nothing
    walked = (jnp.arange(found.shape[0]) < n) & rows["counted"]
    counters = carry["counters"]
    for phase in (DECODE,) if routed else (PREFILL, DECODE):
        mine = (walked & (rows["decode"] == phase))[:, None]
        for place, name in enumerate(COUNTERS):
            if name in count:
                added = jnp.where(mine, count[name], 0).sum(axis=0)
                counters = counters.at[phase, place].add(added)
    if not routed:
        return {"counters": counters}
    lost = against_router(program, rows, told["ran"])
    sums = _in_order(carry["sums"][DECODE], lost, walked)
    return {"counters": counters, "sums": carry["sums"].at[DECODE].set(sums)}


def _in_order(totals: Array, parts: tuple[Array, ...], counted: Array) -> Array:
    """Each total and then its parts added row after row, so that it does not matter where calls begin.

    Args:
        totals: `[n, W]`. parts: n arrays `[rows, W]`. counted: bool `[rows]`.
    """
    n_rows = len(counted)
    parts = tuple(jnp.pad(part, ((0, -n_rows % _AT_ONCE), (0, 0))) for part in parts)
    counted = jnp.pad(counted, (0, -n_rows % _AT_ONCE))

    def add(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        now = lax.dynamic_slice_in_dim(counted, i * _AT_ONCE, _AT_ONCE)
        found = []
        for total, part in zip(totals, parts, strict=True):
            some = lax.dynamic_slice_in_dim(part, i * _AT_ONCE, _AT_ONCE)
            for row in range(_AT_ONCE):
                total = total + jnp.where(now[row], some[row], 0.0)
            found.append(total)
        return tuple(found)

    return jnp.stack(lax.fori_loop(0, len(counted) // _AT_ONCE, add, tuple(totals)))


def lane_independent(program: ProgramShape, carry: Tree, rows: dict[str, NDArray[Any]]) -> Tree:
    """Counters and sums with what rows add that no lane changes: slots, agreement, and a narrower k's loss."""
    walk, router = rows["router"][:, : program.n_slots], rows["router"][:, : program.n_expert_used]
    counters, sums = np.array(carry["counters"]), np.array(carry["sums"])
    n_slots = (walk >= 0).sum(axis=1)
    shared = min(walk.shape[1], program.n_expert_used)
    same = (router[:, :shared] >= 0).sum(axis=1)
    rated = {"agreement": same / np.maximum(rows["router_k"], 1)}
    if program.scores and program.n_slots != program.n_expert_used:
        rated |= {
            name: _lost(rows[column], router, walk)
            for name, column in (("mass_displaced", "mass"), ("score_regret", "regret"))
        }
    for phase in (0, 1):
        mine = rows["counted"] & (rows["decode"] == phase)
        counters[phase, COUNTERS.index("slots")] += n_slots[mine].sum()
        for name, values in rated.items():
            at = SUMS.index(name)
            # Row after row, as the other scan adds them up.
            column = np.repeat(values[mine][:, None], sums.shape[2], axis=1)
            sums[phase, at] = np.add.accumulate(np.concatenate([sums[phase, at][None], column]))[-1]
    return {"counters": counters, "sums": sums}


def _lost(
    share: NDArray[np.float64], router: NDArray[np.int32], walk: NDArray[np.int32]
) -> NDArray[np.float64]:
    """float64 `[rows]`: what the router's experts hold and those that run do not, slot by slot."""
    lost = np.zeros(len(share))
    rows = np.arange(len(share))
    for slot in range(max(router.shape[1], walk.shape[1])):
        of = [
            np.where(ids[:, slot] >= 0, share[rows, np.maximum(ids[:, slot], 0)], 0.0)
            if slot < ids.shape[1]
            else np.zeros(len(share))
            for ids in (router, walk)
        ]
        lost += of[0] - of[1]
    return lost


def phase_numbers(
    counters: NDArray[np.int64],
    sums: NDArray[np.float64],
    tokens: int,
    events: int,
    unknown: Collection[str],
) -> PhaseNumbers:
    """The counters of one phase under their names in the JSON contract; None: ratios of nothing, and `unknown`."""
    count = {name: int(value) for name, value in zip(COUNTERS, counters, strict=True)}
    mean = {name: float(value) / events if events else None for name, value in zip(SUMS, sums, strict=True)}
    read_mib = count.pop("read_bytes") / MIB
    numbers = PhaseNumbers(
        tokens=tokens,
        hit_rate=count["hits"] / count["lookups"] if count["lookups"] else None,
        capacity_misses=count["misses"] - count["cold_misses"],
        read_mib=read_mib,
        read_mib_per_token=read_mib / tokens if tokens else None,
        **mean,
        **count,
    )
    return replace(numbers, **dict.fromkeys(unknown))
