"""The replay scan for keys that move by themselves, where all lanes route alike: one step is one batch.

What is known of an entry, its last use and the policy's state, is then the same in every lane, and so is the order
in which entries would leave at a batch. It is found beforehand, once for all lanes (`keyed_order.py`). Lanes
differ in what is in RAM alone, and what leaves is the first that is there, in the batch's order.

Steps are those of `ranked.py`, with an entry's place in `[B, E]` where a rank stands there.

Shapes: `B` MoE layers, `E` experts per layer, `U` entries of a step, `W` lanes, `P` places of an order. A *cache* is
all layers, or with budgets per layer one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from simlab.replay.batches import WORD
from simlab.replay.bits import nth_one, taken
from simlab.replay.programs import kept
from simlab.replay.ranked import added_up
from simlab.replay.shape import Tree, at_layer, put
from simlab.types import Array

MOST_PLACES = 32 * WORD
"""Places of an order that are looked at in one pass, more by repetition."""
_AT_ONCE = 8
"""Entries that may leave in one pass, as many as a decoded token mostly uses of a layer."""


@dataclass(frozen=True, eq=False)
class KeyedShape:
    """All that is compiled in."""

    n_layers: int
    n_expert: int
    n_slots: int
    """Entries of a step."""
    per_layer: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        return ("keyed", self.per_layer, self.n_layers, self.n_expert, self.n_slots)

    @property
    def of_cache(self) -> int:
        """Entries of a cache."""
        return self.n_expert if self.per_layer else self.n_layers * self.n_expert

    @property
    def at_once(self) -> int:
        """Places of one pass."""
        return min(MOST_PLACES, -(-self.of_cache // WORD) * WORD)

    @property
    def n_places(self) -> int:
        """Places of an order; past a cache's entries they hold `nowhere`."""
        return self.n_parts * self.at_once

    @property
    def n_parts(self) -> int:
        """Passes that look at a whole order."""
        return -(-self.of_cache // self.at_once)

    @property
    def nowhere(self) -> int:
        """A place in `[B, E]` of no entry, which is never in RAM."""
        return self.n_layers * self.n_expert


class _Left(NamedTuple):
    """Where an eviction stands."""

    resident: Array
    """bool `[B * E + 1, W]`."""
    part: Array
    """int32: which places of the order come next."""
    over: Array
    """int32 `[W]`: units still to free; none where no entry is left."""
    freed: Array
    """int32 `[W]`: units freed."""
    evicted: Array
    """int32 `[W]`."""


def run(
    shape: KeyedShape,
    carry: Tree,
    order: Array,
    n_parts: Array,
    rows: Tree,
    n: Array,
    shared: Array,
    lanes: Tree,
) -> tuple[Tree, Array]:
    """The carry after the first `n` steps of `rows`; and whether the orders sufficed, without which it is wrong.

    Args:
        order: int32 `[batches, P]`, entries by place in `[B, E]`, first to leave first. n_parts: how many times
            `at_once` of its places are known; those after are not looked at.
        rows: as `ranked.run` takes them, with places in `[B, E]` for ranks; `order` int32, the step's batch.
        shared: int64 `[2, counters, 1]`: counts that are the same in all lanes.
    """
    n_rows, n_lanes = rows["layer"].shape[0], carry["used"].shape[1]

    def step(i: Array, loop: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        row = {name: at_layer(column, i) for name, column in rows.items()}
        resident, used, told, short = loop
        resident, used, one, over = _step(shape, lanes, resident, used, order, n_parts, row)
        return resident, used, put(told, one, i), short | over

    entries = carry["resident"].reshape(-1, n_lanes)
    resident = jnp.concatenate([entries, jnp.zeros((1, n_lanes), bool)])
    told = jnp.zeros((n_rows, 2, n_lanes), jnp.int32)
    first = resident, carry["used"], told, jnp.bool_(False)
    resident, used, told, short = lax.fori_loop(0, n, step, first)
    after = {
        "resident": resident[:-1].reshape(carry["resident"].shape),
        "used": used,
        "counters": carry["counters"] + shared + added_up(rows, n, told[:, 0], told[:, 1], lanes),
    }
    # Of whole orders nothing is missing: what is over then is more than there is.
    return carry | after, ~short | (n_parts == shape.n_parts)


def _step(
    shape: KeyedShape, lanes: Tree, resident: Array, used: Array, order: Array, n_parts: Array, row: Tree
) -> tuple[Array, Array, Array, Array]:
    """Put in, look up, evict: as in `ranked.py`; and whether something is still over."""
    on = ~lanes["off"]
    new, old = (jnp.where(row[name] >= 0, row[name], shape.nowhere) for name in ("put", "look_up"))
    resident = resident.at[new].set(on & (new < shape.nowhere)[:, None], mode="promise_in_bounds")
    hits = taken(resident, old).sum(axis=0, dtype=jnp.int32)
    resident = resident.at[old].set(False, mode="promise_in_bounds")
    cache, layer = row["cache"], row["layer"]
    held = at_layer(used, cache) + jnp.where(on, row["n"] - hits, 0) * lanes["units"][layer]
    over = jnp.where(row["evicts"], held - lanes["budget"][cache], 0)
    left = _evict(shape, lanes, resident, order, n_parts, row["order"], over)
    used = put(used, held - left.freed, cache)
    return left.resident, used, jnp.stack([hits, left.evicted]), (left.over > 0).any()


def _evict(
    shape: KeyedShape, lanes: Tree, resident: Array, order: Array, n_parts: Array, batch: Array, over: Array
) -> _Left:
    """Take out the first entries of the batch's order until nothing is over, or none is left."""
    lane = jnp.arange(over.shape[0], dtype=jnp.int32)
    n_words = shape.at_once // WORD
    nth = jnp.arange(_AT_ONCE, dtype=jnp.int32)[:, None]

    def in_order(resident: Array, places: Array) -> Array:
        """uint32 `[words, W]`: what of the order is in RAM."""
        places = places.reshape(n_words, WORD)
        words = jnp.zeros((n_words, lane.shape[0]), jnp.uint32)
        # Bit by bit, not as one reduction, which XLA would run across the lanes.
        for bit in range(WORD):
            words = words | jnp.where(taken(resident, places[:, bit]), jnp.uint32(1 << bit), jnp.uint32(0))
        return words

    def some(s: _Left) -> _Left:
        places = lax.dynamic_slice(order, (batch, s.part * shape.at_once), (1, shape.at_once))[0]
        first = kept(nth_one)(kept(in_order)(s.resident, places), nth)
        place = kept(lambda places, first: taken(places, jnp.minimum(first, shape.at_once - 1)))(
            places, first
        )
        found = first < shape.at_once
        units = jnp.where(found, lanes["units"][jnp.minimum(place // shape.n_expert, shape.n_layers - 1)], 0)
        before = jnp.zeros_like(units)
        for i in range(1, _AT_ONCE):
            before = before + jnp.where(nth >= i, units[i - 1], 0)
        gone = found & (before < s.over)
        freed = jnp.where(gone, units, 0).sum(axis=0, dtype=jnp.int32)
        left = jnp.maximum(s.over - freed, 0)
        going_on = (found[-1] & (left > 0)).any()
        return _Left(
            resident=s.resident.at[jnp.where(gone, place, shape.nowhere), lane].set(
                False, mode="promise_in_bounds"
            ),
            part=s.part + jnp.where(going_on, 0, 1),
            over=left,
            freed=s.freed + freed,
            evicted=s.evicted + gone.sum(axis=0, dtype=jnp.int32),
        )

    nothing = jnp.zeros_like(over)
    return lax.while_loop(
        lambda s: (s.over > 0).any() & (s.part < n_parts),
        some,
        _Left(resident, jnp.int32(0), over, nothing, nothing),
    )
