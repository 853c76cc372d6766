"""The replay scan for keys that move by themselves, where all lanes route alike: one step is one batch.

What is known of an entry, its last use and the policy's state, is then the same in every lane, and a key is
computed once for all of them. Lanes differ in what is in RAM alone. An entry leaves by the least key of each
layer, looked for anew only in the layer that lost one.

Steps are those of `ranked.py`, with an entry's place in `[B, E]` where a rank stands there.

Shapes: `B` MoE layers, `E` experts per layer, `U` entries of a step, `W` lanes. A *cache* is all layers, or with
budgets per layer one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from simlab.replay.ranked import added_up
from simlab.replay.shape import Tree, at_layer, code_key, put
from simlab.routing import entry_facts, eviction_key
from simlab.types import Array, EvictionPolicy

_LAST = jnp.iinfo(jnp.int64).max
_ROUNDS = 6
"""Entries that leave, in each lane, before keys are computed anew: what a decoded token may miss in a layer."""


@dataclass(frozen=True, eq=False)
class KeyedShape:
    """All that is compiled in."""

    eviction: EvictionPolicy
    n_layers: int
    n_expert: int
    n_slots: int
    """Entries of a step."""
    per_layer: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        sizes = (self.n_layers, self.n_expert, self.n_slots)
        return ("keyed", code_key((), self.eviction), self.per_layer, *sizes)


class _Known(NamedTuple):
    """What all lanes know alike, `[B * E]`."""

    stamp: Array
    state: Tree


class _Left(NamedTuple):
    """Where an eviction stands."""

    resident: Array
    """bool `[B * E, W]`."""
    least: Array
    """`[layers, W]`: least key of an entry in RAM, the largest number where there is none."""
    over: Array
    """int32 `[W]`: units still to free; none where no entry is left."""
    freed: Array
    """int32 `[W]`: units freed."""
    evicted: Array
    """int32 `[W]`."""


def run(
    shape: KeyedShape, carry: Tree, known: Tree, rows: Tree, n: Array, shared: Array, lanes: Tree
) -> Tree:
    """The carry after the first `n` steps of `rows`.

    Args:
        known: `stamp` int64 `[B, E]` and `state`, the policy's by name, before the first step.
        rows: as `ranked.run` takes them, with places in `[B, E]` for ranks; `stamp` int64 `[U]` and `state`, of
            what is put in; `batch` int64.
        shared: int64 `[2, counters, 1]`: counts that are the same in all lanes.
    """
    n_rows, n_lanes = rows["layer"].shape[0], carry["used"].shape[1]

    def step(i: Array, loop: tuple[_Known, Array, Array, Array]) -> tuple[_Known, Array, Array, Array]:
        row = {name: at_layer(column, i) for name, column in rows.items() if name != "state"}
        row["state"] = {name: at_layer(column, i) for name, column in rows["state"].items()}
        known, resident, used, told = loop
        known, resident, used, one = _step(shape, lanes, known, resident, used, row)
        return known, resident, used, put(told, one, i)

    first = _Known(known["stamp"].reshape(-1), {name: x.reshape(-1) for name, x in known["state"].items()})
    resident = carry["resident"].reshape(-1, n_lanes)
    told = jnp.zeros((n_rows, 2, n_lanes), jnp.int32)
    _, resident, used, told = lax.fori_loop(0, n, step, (first, resident, carry["used"], told))
    return carry | {
        "resident": resident.reshape(carry["resident"].shape),
        "used": used,
        "counters": carry["counters"] + shared + added_up(rows, n, told[:, 0], told[:, 1], lanes),
    }


def _step(
    shape: KeyedShape, lanes: Tree, known: _Known, resident: Array, used: Array, row: Tree
) -> tuple[_Known, Array, Array, Array]:
    """Put in, look up, evict: as in `ranked.py`."""
    on, n_entries = ~lanes["off"], resident.shape[0]
    new, old = (jnp.where(row[name] >= 0, row[name], n_entries) for name in ("put", "look_up"))
    known = _Known(
        known.stamp.at[new].set(row["stamp"], mode="drop"),
        {name: x.at[new].set(row["state"][name], mode="drop") for name, x in known.state.items()},
    )
    resident = resident.at[new].set(on, mode="drop")
    hits = resident.at[old].get(mode="fill", fill_value=False).sum(axis=0, dtype=jnp.int32)
    resident = resident.at[old].set(False, mode="drop")
    cache, layer = row["cache"], row["layer"]
    held = at_layer(used, cache) + jnp.where(on, row["n"] - hits, 0) * lanes["units"][layer]
    over = jnp.where(row["evicts"], held - lanes["budget"][cache], 0)
    resident, freed, evicted = _evict(shape, lanes, known, resident, row, over)
    return known, resident, put(used, held - freed, cache), jnp.stack([hits, evicted])


def _keys(shape: KeyedShape, lanes: Tree, known: _Known, row: Tree) -> tuple[Array, Array]:
    """Keys and stamps of the batch's cache, `[layers, E]`."""
    shaped = (shape.n_layers, shape.n_expert)
    layer = jnp.broadcast_to(jnp.arange(shape.n_layers, dtype=jnp.int32)[:, None], shaped)
    expert = jnp.broadcast_to(jnp.arange(shape.n_expert, dtype=jnp.int32), shaped)
    state = {name: x.reshape(shaped) for name, x in known.state.items()}
    nothing = jnp.zeros(shaped, bool)
    state |= entry_facts(shape.eviction, layer, expert, nothing, nothing)
    stamp = known.stamp.reshape(shaped)
    if shape.per_layer:
        state = {name: at_layer(x, row["layer"])[None] for name, x in state.items()}
        stamp = at_layer(stamp, row["layer"])[None]
    knobs = SimpleNamespace(**lanes["knob_values"])
    return eviction_key(jnp, shape.eviction, state, stamp, row["batch"], knobs), stamp


def _folded(x: Array) -> Array:
    """`x.min(axis=1)`, an eighth of it at a time: XLA folds along the lanes and then has less to reduce."""
    n = x.shape[1] // 8
    if x.shape[1] % 8 == 0:
        parts = [lax.slice_in_dim(x, i * n, (i + 1) * n, axis=1) for i in range(8)]
        x = reduce(jnp.minimum, parts)
    return x.min(axis=1)


def _evict(
    shape: KeyedShape, lanes: Tree, known: _Known, resident: Array, row: Tree, over: Array
) -> tuple[Array, Array, Array]:
    """What is in RAM after it, units freed and entries evicted."""
    lane, n_expert = jnp.arange(over.shape[0]), shape.n_expert
    first = row["layer"] if shape.per_layer else jnp.int32(0)
    units = lanes["units"][row["layer"]][None] if shape.per_layer else lanes["units"]

    # Before the loop, since inside it each key would be computed anew for each lane.
    key, stamp = _keys(shape, lanes, known, row)
    floating = jnp.issubdtype(key.dtype, jnp.floating)
    most = jnp.inf if floating else jnp.iinfo(key.dtype).max

    def some(start: _Left) -> _Left:
        def of_cache(resident: Array) -> Array:
            mine = (
                at_layer(resident.reshape(shape.n_layers, n_expert, -1), first)
                if shape.per_layer
                else resident
            )
            return mine.reshape(-1, n_expert, over.shape[0])

        def one(s: _Left) -> _Left:
            least = s.least.min(axis=0)
            is_least = s.least == least
            several = ((is_least.sum(axis=0) > 1) & (s.over > 0)).any()
            numbers = jnp.arange(len(s.least), dtype=jnp.int32)[:, None]
            # Of layers with an equal least key the one whose entry was used least recently.
            mine = lax.cond(
                several,
                lambda: (
                    _folded(
                        jnp.where(of_cache(s.resident) & (key[..., None] == least), stamp[..., None], _LAST)
                    )
                    .argmin(axis=0)
                    .astype(jnp.int32)
                ),
                lambda: jnp.where(is_least, numbers, len(s.least)).min(axis=0),
            )
            keys, stamps = key[mine].T, stamp[mine].T
            places = (first + mine) * n_expert + jnp.arange(n_expert, dtype=jnp.int32)[:, None]
            there = s.resident[places, lane]
            stamps = jnp.where(there & (keys == least), stamps, _LAST)
            oldest = stamps.min(axis=0)
            found = (oldest < _LAST) & (s.over > 0)
            # Whatever has been used was used last at a place of its own.
            is_victim = stamps == oldest
            following = jnp.where(there & ~is_victim, keys, most).min(axis=0)
            place = jnp.where(is_victim & found, places, s.resident.shape[0]).min(axis=0)
            freed = jnp.where(found, units[mine], 0)
            return _Left(
                resident=s.resident.at[place, lane].set(False, mode="drop"),
                least=jnp.where((numbers == mine) & found, following, s.least),
                over=jnp.where(found, s.over - freed, 0),
                freed=s.freed + freed,
                evicted=s.evicted + found,
            )

        left = start._replace(least=_folded(jnp.where(of_cache(start.resident), key[..., None], most)))
        # In a row, since a loop of its own would copy what is in RAM at each turn.
        for _ in range(_ROUNDS):
            left = one(left)
        return left._replace(least=start.least)

    nothing = jnp.zeros_like(over)
    left = lax.while_loop(
        lambda s: (s.over > 0).any(), some, _Left(resident, jnp.zeros(()), over, nothing, nothing)
    )
    return left.resident, left.freed, left.evicted
