"""Bit masks along lanes: the n-th set bit, experts in score order, a watermark that moves over set bits.

A mask is `N` words of 32 places, the lowest bit of the first word first. All is elementwise over the last axis,
written so that XLA makes one loop of each function and the loop runs along the lanes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.replay.batches import WORD
from simlab.replay.programs import kept
from simlab.routing import selection_key
from simlab.types import Array


def ones(words: Array) -> Array:
    """int32: bits set in each word."""
    return lax.population_count(words).astype(jnp.int32)


def taken(x: Array, at: Array) -> Array:
    """`x[at]` along the first axis, every place within bounds."""
    # What indexing by `x.at` comes to, traced several times faster.
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(np.ndim(at), np.ndim(at) + x.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, jnp.asarray(at)[..., None], numbers, (1, *x.shape[1:]), mode=mode)


def nth_one(words: Array, n: Array) -> Array:
    """int32: place of the `n`-th set bit (from 0) of each mask; 32 * N where there is none.

    Args:
        words: uint32 `[N, ...]`. n: int32 of a shape that goes with `words[0]`.
    """
    shape = np.broadcast_shapes(words.shape[1:], n.shape)
    word, left = jnp.broadcast_to(words[0], shape), jnp.broadcast_to(n, shape)
    place, end = jnp.zeros(shape, jnp.int32), ones(words[0])
    for i in range(1, words.shape[0]):
        here = end <= n
        word = jnp.where(here, words[i], word)
        left = jnp.where(here, n - end, left)
        place = jnp.where(here, i * WORD, place)
        end = end + ones(words[i])
    for half in (16, 8, 4, 2, 1):
        low = ones(word & jnp.uint32((1 << half) - 1))
        above = left >= low
        left = jnp.where(above, left - low, left)
        word = jnp.where(above, word >> jnp.uint32(half), word)
        place = jnp.where(above, place + half, place)
    return jnp.where(end <= n, words.shape[0] * WORD, place)


def below(place: Array) -> Array:
    """uint32: the bits of a word under `place`, 0 to 32."""
    part = (jnp.uint32(1) << jnp.minimum(place, WORD - 1).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(place >= WORD, jnp.uint32(0xFFFFFFFF), part)


def word_of(place: Array) -> Array:
    """int32: the word a place, 0 or more, lies in."""
    return place >> WORD.bit_length() - 1


def bit_of(place: Array) -> Array:
    """uint32: the bit a place, 0 or more, has in its word."""
    return jnp.uint32(1) << (place & (WORD - 1)).astype(jnp.uint32)


def names(n_expert: int) -> Any:
    """uint32 `[n]`: in words of score order the bits that name an expert; the rest is padding."""
    n_words = -(-n_expert // WORD)
    left = n_expert - WORD * np.arange(n_words)
    return np.where(left >= WORD, 0xFFFFFFFF, (1 << np.minimum(left, WORD - 1)) - 1).astype(np.uint32)


def in_score_order(order: Array, stamps: Array, first: Array, mark: Array, n_expert: int) -> Array:
    """uint32 `[n, W]`: the experts of a layer in RAM as bits, best score first.

    Args:
        order: int32 `[32 * n]`, experts in score order. stamps: int32 `[rows, W]`, the layer's from row `first` on.
    """
    rows = (order + first).reshape(-1, WORD)
    words = jnp.zeros((rows.shape[0], mark.shape[0]), jnp.uint32)
    # Bit by bit, not as one reduction, which XLA would run across the lanes.
    for bit in range(WORD):
        in_ram = taken(stamps, rows[:, bit]) > mark
        words = words | jnp.where(in_ram, jnp.uint32(1 << bit), jnp.uint32(0))
    return words & names(n_expert)[:, None]


def top_of_few(xp: Any, value: Array, tier: Array, expert: Array, n: int) -> Array:
    """`simlab.routing.take_top` for some tens of candidates: counts for each how many are better."""
    key = kept(partial(selection_key, xp))(value, tier, expert)
    # Keys differ, so the count is a candidate's place.
    place = kept(lambda key: (key[:, None] > key).sum(axis=0, dtype=xp.int32))(key)
    slot = xp.arange(n, dtype=xp.int32)[:, None]
    return kept(
        lambda place, expert: xp.where(place[:, None] == slot, expert[:, None], 0).sum(axis=0, dtype=xp.int32)
    )(place, expert)


class Passed(NamedTuple):
    """A watermark that moved up. int32 `[W]`."""

    mark: Array
    over: Array
    """Units still to free."""
    evicted: Array
    """Entries passed."""


def pass_bits(window: Array, sizes: Array, first: Array, state: Passed, last: Array) -> Passed:
    """Move the watermark over entries until nothing is over, at most to the window's end or to `last`.

    Args:
        window: uint32 `[L, n, W]`, by line the words from `first` on, bits at or under the watermark cleared.
        sizes: int32 `[L]`, units an entry of each line holds. first: int32 `[W]`, number of the first word.
    """
    n_lines, n_words = window.shape[:2]

    def units(words: Any) -> Any:
        return sum(ones(words[line]) * sizes[line] for line in range(n_lines))

    def entries(words: Any) -> Any:
        return sum(ones(words[line]) for line in range(n_lines))

    nothing = jnp.zeros_like(state.over)
    freed, gone, freed_before, gone_before, at = nothing, nothing, nothing, nothing, nothing + n_words
    word = jnp.zeros_like(window[:, 0])
    for i in range(n_words):
        after = freed + units(window[:, i])
        found = (at == n_words) & (after >= state.over)
        at = jnp.where(found, i, at)
        word = jnp.where(found, window[:, i], word)
        freed_before = jnp.where(found, freed, freed_before)
        gone_before = jnp.where(found, gone, gone_before)
        freed, gone = after, gone + entries(window[:, i])
    # The fewest low bits of that word which free what is left.
    n_low = nothing
    for half in (16, 8, 4, 2, 1):
        short = units(word & below(n_low + half)) < state.over - freed_before
        n_low = n_low + jnp.where(short, half, 0)
    low = word & below(n_low + 1)
    enough = at < n_words
    end = jnp.where(enough, (first + at) * WORD + n_low, (first + n_words) * WORD - 1)
    return Passed(
        mark=jnp.minimum(end, last),
        over=state.over - jnp.where(enough, freed_before + units(low), freed),
        evicted=state.evicted + jnp.where(enough, gone_before + entries(low), gone),
    )
