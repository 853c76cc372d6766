"""The replay scan where a fixed order says who leaves: one step is one batch, for all lanes at once.

On a routing that no lane changes, an entry's use is the same use in every lane. If a policy's key of an entry
moves only when the entry is used, all keys that will ever be compared are known beforehand, and so is their
order: every use gets its *rank* in it (`ranked_walk.py`). A cache is then a bit per rank, set where the entry's
latest use has that rank and the entry is in RAM, and what leaves are the lowest bits. So nothing is searched
by key, whatever the key is.

A wide batch takes several steps: one for each `U` of its entries to look up, one for each `U` to put in.

Shapes: `B` MoE layers, `E` experts per layer, `U` entries of a step, `W` lanes, `N` words of 32 ranks. A *cache*
is all layers, or with budgets per layer one of them; a *line* is the entries of one size in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from simlab.replay.batches import WORD
from simlab.replay.recency import Passed, below, ones, pass_bits
from simlab.replay.shape import COUNTERS, Tree, at_layer, put
from simlab.types import Array

WORDS_AT_ONCE = 2
"""Words that hold a bit and are emptied in one pass, more by repetition: XLA computes anew what many words share."""


@dataclass(frozen=True, eq=False)
class RankedShape:
    """All that is compiled in."""

    n_layers: int
    n_expert: int
    n_slots: int
    """Entries of a step."""
    per_layer: bool
    n_lines: int
    n_words: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        sizes = (self.n_layers, self.n_expert, self.n_slots, self.n_lines, self.n_words)
        return ("ranked", self.per_layer, *sizes)


def run(
    shape: RankedShape, carry: Tree, order: Tree, rows: Tree, n: Array, shared: Array, lanes: Tree
) -> Tree:
    """The carry after the first `n` steps of `rows`.

    Args:
        order: `entry` int32 `[caches, 32 N]`, which entry's rank each is before the first step, by place in
            `[B, E]`, -1 for the ranks of later uses; `rank` int32 `[B, E]`, each entry's after the last step.
        rows: by step `put` and `look_up` int32 `[U]`, ranks at which entries come in and at which they lie, -1
            where none; `put_line`, `line`, `cache`, `layer`; `n` entries it looks up, `n_cold` of them for the first
            time; `evicts`, `decode`, `counted`.
        shared: int64 `[2, counters, 1]`: counts that are the same in all lanes.
    """
    n_rows, n_lanes = rows["layer"].shape[0], carry["used"].shape[1]

    def step(i: Array, state: tuple[_Bits, Array, Array]) -> tuple[_Bits, Array, Array]:
        row = {name: at_layer(column, i) for name, column in rows.items()}
        bits, used, told = state
        bits, used, one = _step(shape, lanes, bits, used, row)
        return bits, used, put(told, one, i)

    told = jnp.zeros((n_rows, 2, n_lanes), jnp.int32)
    words = _laid_out(shape, carry, order, lanes)
    bits, used, told = lax.fori_loop(0, n, step, (_Bits(words, _some(shape, words)), carry["used"], told))
    return carry | {
        "resident": _resident(shape, bits.words, order, lanes),
        "used": used,
        "counters": carry["counters"] + shared + added_up(rows, n, told[:, 0], told[:, 1], lanes),
    }


def added_up(rows: Tree, n: Array, hits: Array, evictions: Array, lanes: Tree) -> Array:
    """int64 `[2, counters, W]`: by phase what the first `n` steps count, of hits and evictions by step `[rows, W]`."""
    misses = rows["n"][:, None] - hits
    count = {
        "hits": hits,
        "misses": misses,
        "read_bytes": misses * lanes["entry_bytes"][rows["layer"]][:, None],
        "evictions": evictions,
        "rereads": jnp.where(lanes["off"], 0, misses - rows["n_cold"][:, None]),
    }
    none = jnp.zeros_like(misses)
    counters = jnp.stack([count.get(name, none).astype(jnp.int64) for name in COUNTERS], axis=1)
    walked = (jnp.arange(len(hits)) < n) & rows["counted"]
    phase = (walked & (rows["decode"] == jnp.arange(2)[:, None]))[..., None, None]
    return jnp.where(phase, counters, 0).sum(axis=1)


class _Bits(NamedTuple):
    """What is in RAM, by rank."""

    words: Array
    """uint32 `[lines, N, W]`."""
    some: Array
    """uint32 `[caches, N / 32, W]`: a bit for each word that may hold one, in any line; looking up leaves it."""


def _some(shape: RankedShape, words: Array) -> Array:
    """`_Bits.some` of words."""
    seen = words != 0
    if not shape.per_layer:
        seen = seen.any(axis=0, keepdims=True)
    missing = -shape.n_words % WORD
    seen = jnp.pad(seen, ((0, 0), (0, missing), (0, 0))).astype(jnp.uint32)
    seen = seen.reshape(len(seen), -1, WORD, seen.shape[2]) << jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    return seen.sum(axis=2, dtype=jnp.uint32)


def _laid_out(shape: RankedShape, carry: Tree, order: Tree, lanes: Tree) -> Array:
    """uint32 `[lines, N, W]`: what is in RAM, by rank."""
    n_lanes = carry["used"].shape[1]
    entry = order["entry"]
    flat = carry["resident"].reshape(-1, n_lanes)
    there = (flat[jnp.maximum(entry, 0)] & (entry >= 0)[..., None]).astype(jnp.uint32)
    words = there.reshape(-1, shape.n_words, WORD, n_lanes) << jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    if shape.per_layer:
        return words.sum(axis=2, dtype=jnp.uint32)
    line = lanes["line"][jnp.maximum(entry, 0) // shape.n_expert].reshape(-1, shape.n_words, WORD, 1)
    mine = line == jnp.arange(shape.n_lines)[:, None, None, None]
    return jnp.where(mine, words, jnp.uint32(0)).sum(axis=2, dtype=jnp.uint32)


def _resident(shape: RankedShape, bits: Array, order: Tree, lanes: Tree) -> Array:
    """bool `[B, E, W]`: what is in RAM, by entry."""
    rank = jnp.maximum(order["rank"], 0)
    words = bits[lanes["line"][:, None], rank // WORD]
    bit = (words >> (rank % WORD).astype(jnp.uint32)[..., None]) & jnp.uint32(1)
    return (bit > 0) & (order["rank"] >= 0)[..., None]


def _bit_of(rank: Array) -> Array:
    """uint32: the bit of a rank in its word, none for -1."""
    return jnp.where(rank >= 0, jnp.uint32(1) << (rank % WORD).astype(jnp.uint32), jnp.uint32(0))


def _step(shape: RankedShape, lanes: Tree, bits: _Bits, used: Array, row: Tree) -> tuple[_Bits, Array, Array]:
    """Put in, look up, evict: the bits, the units in use, and hits and evictions int32 `[2, W]`."""
    on, old = ~lanes["off"], row["look_up"]
    bits = _put(shape, bits, row["put"], row["put_line"], on)
    at, mask = jnp.maximum(old, 0) // WORD, _bit_of(old)[:, None]
    hit = bits.words[row["line"], at] & mask
    # What is used leaves its rank; distinct bits, so that taking them off never borrows.
    bits = bits._replace(words=bits.words.at[row["line"], at].add(-hit))
    hits = (hit > 0).sum(axis=0, dtype=jnp.int32)
    cache = row["cache"]
    held = at_layer(used, cache) + jnp.where(on, row["n"] - hits, 0) * lanes["units"][row["layer"]]
    over = jnp.where(row["evicts"], held - lanes["budget"][cache], 0)
    bits, passed = _evict(shape, lanes, bits, row, Passed(jnp.zeros_like(over), over, over * 0))
    held = held + passed.over - over
    return bits, put(used, held, cache), jnp.stack([hits, passed.evicted])


def _put(shape: RankedShape, bits: _Bits, ranks: Array, line: Array, on: Array) -> _Bits:
    """Entries at new ranks, in all lanes that have a cache."""
    at = jnp.maximum(ranks, 0) // WORD
    words = bits.words.at[line, at].add(jnp.where(on, _bit_of(ranks)[:, None], jnp.uint32(0)))
    # Several ranks of one word are one bit there.
    earlier = jnp.tril(jnp.ones((shape.n_slots, shape.n_slots), bool), -1)
    again = (earlier & (at[:, None] == at[None]) & (ranks >= 0)[None]).any(axis=1)
    bit = _bit_of(jnp.where((ranks >= 0) & ~again, at, -1))[:, None]
    cache, group = line if shape.per_layer else jnp.int32(0), at // WORD
    missing = jnp.where(on, bit & ~bits.some[cache, group], jnp.uint32(0))
    return _Bits(words, bits.some.at[cache, group].add(missing))


def _evict(shape: RankedShape, lanes: Tree, bits: _Bits, row: Tree, state: Passed) -> tuple[_Bits, Passed]:
    """Clear the lowest bits until nothing is over, or no bit is left; `mark` 1 says that none was."""
    cache, line, lane = row["cache"], row["line"], jnp.arange(bits.some.shape[2])
    lines = line[None] if shape.per_layer else jnp.arange(shape.n_lines)
    sizes = lanes["line_units"][line][None] if shape.per_layer else lanes["line_units"]

    def going(s: Passed) -> Array:
        return (s.over > 0) & (s.mark == 0)

    def clear(loop: tuple[_Bits, Passed]) -> tuple[_Bits, Passed]:
        bits, s = loop
        groups = at_layer(bits.some, cache)
        left, number = groups[-1], jnp.full_like(s.over, len(groups) - 1)
        for i in range(len(groups) - 2, -1, -1):
            left = jnp.where(groups[i] != 0, groups[i], left)
            number = jnp.where(groups[i] != 0, i, number)
        # Barriers, since a value that several others are made of would be computed anew for each.
        left, number = lax.optimization_barrier((left, number))
        empty = left == 0
        lowest, places = [], []
        for _ in range(WORDS_AT_ONCE):
            bit = left & -left
            lowest.append(bit)
            # Past the last word: dropped when written, read as empty.
            places.append(jnp.where(bit != 0, number * WORD + ones(bit - jnp.uint32(1)), shape.n_words))
            left = left ^ bit
        words = lax.optimization_barrier(jnp.stack(places))
        where = lines[:, None, None], words, lane
        window = lax.optimization_barrier(bits.words.at[where].get(mode="fill", fill_value=0))
        moved = pass_bits(window, sizes, jnp.zeros_like(s.over), s, jnp.int32(WORDS_AT_ONCE * WORD))
        moved = lax.optimization_barrier(moved)
        end = moved.mark + 1 - WORD * jnp.arange(WORDS_AT_ONCE, dtype=jnp.int32)[:, None]
        gone = jnp.where(going(s), window & below(jnp.clip(end, 0, WORD)), jnp.uint32(0))
        emptied = going(s) & (gone == window).all(axis=0)
        emptied = jnp.where(emptied, jnp.stack(lowest), jnp.uint32(0)).sum(axis=0, dtype=jnp.uint32)
        bits = _Bits(
            bits.words.at[where].add(-gone, mode="drop"),
            bits.some.at[cache, number, lane].add(-emptied),
        )
        after = Passed(empty.astype(jnp.int32), moved.over, moved.evicted)
        return bits, Passed._make(
            jnp.where(going(s), fresh, before) for fresh, before in zip(after, s, strict=True)
        )

    return lax.while_loop(lambda x: going(x[1]).any(), clear, (bits, state))
