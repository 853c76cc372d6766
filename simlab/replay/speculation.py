"""Look-ahead in a replay: what comes in before a batch is judged, and what the previous token's experts make of it.

Either the rows say what comes in, as a recording had it (`simlab.replay.early_reads`), or the experts that a lane ran
for the previous token are read for the next layers (`previous_token`), by the rules of the live engine
(record/lookahead.py): decode graphs alone look ahead; an entry that is missing when its read is issued is resident
when its layer comes, at the cold end of the cache.

Shapes: `B` MoE layers, `E` experts, `K` slots, `W` lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.replay.routes import gather
from simlab.replay.shape import ProgramShape, Tree, at_layer, put
from simlab.types import Array

COUNTS = ("issued", "useful", "read_bytes", "useful_bytes")
"""Of decode: entries that came in early, those looked up before they left, and the bytes of both."""


class Inserted(NamedTuple):
    """One layer after its speculative entries came in; `[E, W]` except `coldest` `[W]`."""

    stamps: Array
    resident: Array
    marks: Array
    """Resident by speculation and not looked up since."""
    coldest: Array
    """Stamp of the coldest entry so far: each newcomer goes below it."""


def first_look_ahead(shape: ProgramShape, n_lanes: int) -> Tree:
    """What the carry of a program that looks ahead holds before the first row."""
    entries = (shape.n_layers, shape.n_expert, n_lanes)
    found: Tree = {
        "marks": np.zeros(entries, bool),
        # A stamp no longer tells whether an entry was ever missed: speculation sets it too.
        "missed": np.zeros(entries, bool),
        "coldest": np.full(n_lanes, -1, np.int64),
        "read_ahead": np.zeros((len(COUNTS), n_lanes), np.int64),
    }
    if shape.ahead:
        for name in ("last_run", "under_way"):
            found[name] = np.full((shape.n_layers, shape.n_slots, n_lanes), -1, np.int32)
    return found


def insert(
    experts: Array, stamps: Array, resident: Array, marks: Array, coldest: Array, off: Array
) -> Inserted:
    """Bring entries of one layer in at the cold end, one below the other.

    Args:
        experts: int32 `[n, W]` or, the same for all lanes, `[n, 1]`; -1 for none, no expert twice.
        stamps, resident, marks: `[E, W]`. coldest, off: `[W]`.
    """
    named = experts[:, None] == jnp.arange(stamps.shape[0], dtype=jnp.int32)[:, None]  # [n, E, W]
    new = named & ~resident & ~off  # [n, E, W]
    place = jnp.cumsum(new.any(axis=1), axis=0)  # [n, W]
    stamp = coldest - (new * place[:, None]).sum(axis=0)
    arrives = new.any(axis=0)
    return Inserted(
        jnp.where(arrives, stamp, stamps),
        resident | arrives,
        marks | arrives,
        coldest - place[-1],
    )


def read_ahead(shape: ProgramShape, lanes: Tree, cache: Tree, row: Tree) -> Tree:
    """The cache after what look-ahead brought in before a batch."""
    layer = row["layer"]
    stamp, resident, marks = (at_layer(cache[name], layer) for name in ("stamp", "resident", "marks"))
    if shape.ahead:
        waiting = at_layer(cache["under_way"], layer)
        experts = jnp.where(row["decode"] & row["batch_start"], waiting, -1)
        cache = cache | {"under_way": put(cache["under_way"], jnp.full_like(waiting, -1), layer)}
    else:
        experts = row["speculative"][:, None]
    found = insert(experts, stamp, resident, marks, cache["coldest"], lanes["off"])
    entry_bytes = lanes["entry_bytes"][layer]
    issued = cache["coldest"] - found.coldest
    return cache | {
        "stamp": put(cache["stamp"], found.stamps, layer),
        "resident": put(cache["resident"], found.resident, layer),
        "marks": put(cache["marks"], found.marks, layer),
        "used": put(cache["used"], at_layer(cache["used"], layer) + issued * entry_bytes, layer),
        "coldest": found.coldest,
        "read_ahead": _counted(cache["read_ahead"], row, 0, issued, entry_bytes),
    }


def count_useful(counts: Array, row: Tree, useful: Array, entry_bytes: Array) -> Array:
    """The counts with the entries `[W]` of a row that were looked up and in RAM by speculation."""
    return _counted(counts, row, 1, useful, entry_bytes)


def _counted(counts: Array, row: Tree, place: int, n: Array, entry_bytes: Array) -> Array:
    n = jnp.where(row["counted"] & row["decode"], n, 0)
    return counts.at[place].add(n).at[place + 2].add(n * entry_bytes)


def issue(shape: ProgramShape, cache: Tree, row: Tree, walk: Array) -> Tree:
    """After a batch: remember what it ran, and issue the reads of the layers that come into reach.

    The first layer starts the whole reach, every later one adds the layer `shape.ahead` further on. Of a batch of
    several tokens the last one counts as the previous token.

    Args:
        walk: int32 `[K, W]`, what the row ran; -1 where a slot does not exist.
    """
    layer, n_layers, ahead = row["layer"], shape.n_layers, shape.ahead
    slot = jnp.arange(shape.n_slots)
    again = ((walk[:, None] == walk[None]) & (slot[None] < slot[:, None])[..., None]).any(axis=1)
    now = row["decode"] & row["batch_end"]
    ran = jnp.where(now, jnp.where(again, -1, walk), at_layer(cache["last_run"], layer))
    last_run = put(cache["last_run"], ran, layer)
    resident = cache["resident"]

    def missing(at: Array) -> Array:
        experts = at_layer(last_run, at)
        return jnp.where(gather(at_layer(resident, at), experts), -1, experts)

    def whole_reach(under_way: Array) -> Array:
        under_way = jnp.full_like(under_way, -1)  # what a graph left under way is given up
        for at in range(1, min(ahead, n_layers - 1) + 1):
            under_way = under_way.at[at].set(missing(jnp.int32(at)))
        return under_way

    def one_more(under_way: Array) -> Array:
        at = jnp.minimum(layer + ahead, n_layers - 1)
        found = jnp.where(layer + ahead < n_layers, missing(at), at_layer(under_way, at))
        return put(under_way, found, at)

    which = jnp.where(now, jnp.where(layer == 0, 1, 2), 0)
    under_way = lax.switch(which, [lambda x: x, whole_reach, one_more], cache["under_way"])
    return {"last_run": last_run, "under_way": under_way}
