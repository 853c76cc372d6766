"""The replay scan where the least recently used entry leaves: one step is one batch, for all lanes at once.

Under LRU the entries in RAM are those whose last occurrence lies above a *watermark* in the walk, and evicting
only moves the watermark up. So nothing is searched: a bit per place in the walk says whether an entry occurred
there last, and the watermark moves over as many bits as there are bytes to free. Of the candidates of a rerank
policy only the first k in RAM, the first k not in RAM, and what rounding makes equal to the last of these can win
a slot (`RoutingPolicy.ordered`); they are found as bits of a mask laid in score order.

A step's writes are made at the start of the next one: XLA then sees every read of the state after the write and
updates it in place, where it would else copy all of it at each step. Arrays that are read or written lane by lane
are flat, so that one number is their index. A step tells what it did, in small numbers, and what follows from
that is reckoned after the loop for all steps at once.

`recency_walk.py` cuts a trace into calls of this scan and `batches.py` makes its columns. `kernel.py` is the scan
that holds for every policy and tells what each slot did; tests hold the two against each other.

Shapes: `B` MoE layers, `E` experts per layer, `K` slots of a batch, `W` lanes, `N` words of 32 places. A *cache*
is all layers, or with budgets per layer one of them; a *line* is the entries of one size in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.replay.batches import WORD
from simlab.replay.bits import (
    Passed,
    below,
    bit_of,
    in_score_order,
    names,
    nth_one,
    ones,
    pass_bits,
    taken,
    top_of_few,
    word_of,
)
from simlab.replay.programs import kept
from simlab.replay.routes import Routed, declared, drop_slots, facts_of, fault_of, first_routing_state
from simlab.replay.shape import NO_ROW, ProgramShape, Tree, at_layer, first_counts, put
from simlab.replay.tally import COLD, HIT, KNOWN, NONE, add_up
from simlab.routing import Rerouted, rerank
from simlab.types import Array, Candidates, EvictionPolicy, Step

WINDOW_WORDS = 3
"""Words the watermark may pass at once; farther goes by repetition."""
_SPARE = 2
"""Candidates of each kind past the k-th. Rounding may make two scores a few last bits apart one value, and then the
lower id has the slot; three others so close to the k-th would be needed to miss one."""
_MARK, _OVER = (Passed._fields.index(name) for name in ("mark", "over"))


def is_recency(policy: EvictionPolicy) -> bool:
    """Whether a policy is LRU by its code: one whose key is the last occurrence handed to it, and nothing else."""
    if policy.key is None or policy.touch is not None or policy.bypass or policy.needs or policy.state:
        return False
    last = object()
    try:
        return policy.key(np, {}, last, 0, SimpleNamespace()) is last  # type: ignore[arg-type]
    except Exception:
        return False


@dataclass(frozen=True, eq=False)
class RecencyShape:
    """All that is compiled in, beside what a `ProgramShape` says of policies and sizes."""

    program: ProgramShape
    n_slots: int
    """Slots of a batch: k, or of wide batches all experts of a layer."""
    routed: bool
    """Whether lanes route the batch, a single row; else all walk the experts that come with it."""
    per_layer: bool
    n_lines: int
    n_words: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        sizes = (self.n_slots, self.n_lines, self.n_words)
        return ("recency", self.program.key, self.routed, self.per_layer, *sizes)


def first_carry(shape: RecencyShape, n_lanes: int) -> Tree:
    """An empty cache and zero counters."""
    program = shape.program
    n_caches = program.n_layers if shape.per_layer else 1
    return {
        # Place of each entry's last occurrence, -1 before the first.
        "stamp": np.full((program.n_layers, program.n_expert, n_lanes), -1, np.int32),
        "last": np.zeros((shape.n_lines, shape.n_words, n_lanes), np.uint32),
        # Entries whose last occurrence is above it are in RAM.
        "mark": np.full((n_caches, n_lanes), -1, np.int32),
        "used": np.zeros((n_caches, n_lanes), np.int32),
        "routing_state": first_routing_state(program, n_lanes),
        **first_counts(n_lanes),
    }


NOWHERE = np.iinfo(np.int32).max
"""Index of a write that is not made."""


def _no_write(shape: RecencyShape, n_lanes: int) -> Tree:
    """What the step before the first left to be written."""
    return {"words": jnp.zeros((_words_of(shape.n_slots), n_lanes), jnp.uint32), "word": jnp.int32(0)}


def _flat(x: Array) -> Array:
    return x.reshape(-1)


def _words_of(n_slots: int) -> int:
    """Words that `n_slots` places in a row can lie in."""
    return (n_slots + WORD - 2) // WORD + 1


def run(shape: RecencyShape, carry: Tree, rows: Tree, n: Array, lanes: Tree) -> Tree:
    """The carry after the first `n` batches of `rows`."""
    n_rows = rows["layer"].shape[0]
    flat = carry | {name: carry[name].reshape(-1) for name in ("stamp", "last")}

    n_lanes = carry["used"].shape[1]
    state = flat, _no_write(shape, n_lanes), _in_ram(shape, flat, rows, jnp.int32(0))
    shapes = jax.eval_shape(lambda state: _step(shape, lanes, rows, jnp.int32(0), state)[1], state)
    told = {name: jnp.zeros((n_rows, *x.shape), x.dtype) for name, x in shapes.items()}

    def step(i: Array, state: tuple[Any, Tree]) -> tuple[Any, Tree]:
        after, one = _step(shape, lanes, rows, i, state[0])
        return after, {name: put(x, one[name], i) for name, x in state[1].items()}

    (flat, write, _), told = lax.fori_loop(0, n, step, (state, told))
    given = {
        "stamp": flat["stamp"].reshape(carry["stamp"].shape),
        "last": _written(flat["last"], write).reshape(carry["last"].shape),
    }
    return flat | given | add_up(shape.program, shape.routed, carry, rows, n, lanes, told)


def _in_ram(shape: RecencyShape, flat: Tree, rows: Tree, i: Array) -> Array:
    """uint32 `[n, W]`: which experts are in RAM for row `i`, in its score order; nothing where nobody asks."""
    n_lanes, n_expert = flat["used"].shape[1], shape.program.n_expert
    if not shape.routed or "order" not in rows:
        return jnp.zeros((0, n_lanes), jnp.uint32)
    layer = at_layer(rows["layer"], i)
    mark = at_layer(flat["mark"], layer if shape.per_layer else jnp.int32(0))
    stamps = flat["stamp"].reshape(-1, n_lanes)
    find = kept(partial(in_score_order, n_expert=n_expert))
    return find(at_layer(rows["order"], i), stamps, layer * n_expert, mark)


def _written(last: Array, write: Tree) -> Array:
    """Last-occurrence bits, flat, with those of the step before."""
    words = write["words"].reshape(-1)
    at = (write["word"] * write["words"].shape[1],)
    return lax.dynamic_update_slice(last, lax.dynamic_slice(last, at, words.shape) | words, at)


def _step(shape: RecencyShape, lanes: Tree, rows: Tree, i: Array, before: Any) -> tuple[Any, Tree]:
    """Batch `i`: route it, look its experts up, evict. What the next one starts from, and what this one came to."""
    flat, write, bits = before
    row = {name: at_layer(column, i) for name, column in rows.items()}
    layer, base = row["layer"], row["base"]
    stamp, last = flat["stamp"], _written(flat["last"], write)
    n_lanes = flat["used"].shape[1]
    cache = layer if shape.per_layer else jnp.int32(0)
    line = layer if shape.per_layer else row["line"]
    mark, used = at_layer(flat["mark"], cache), at_layer(flat["used"], cache)
    first = layer * shape.program.n_expert
    state = {
        stage: {name: at_layer(v, layer) for name, v in s.items()}
        for stage, s in flat["routing_state"].items()
    }
    told = {}
    nan_row, fault = flat["nan_row"], flat["fault"]
    if shape.routed:
        routed, state = _route(shape, lanes, row, stamp, mark, bits, state)
        experts, places = _walk(shape, routed, base)
        told["ran"] = jnp.where(routed.dropped, -1, routed.experts).astype(jnp.int16)
        if shape.program.step("rerank") is not None:
            told |= {"reranked": routed.reranked, "substituted": routed.substituted}
            fault = jnp.minimum(fault, fault_of(row, routed))
        if shape.program.step("drop") is not None:
            told["dropped"] = routed.dropped.sum(axis=0, dtype=jnp.int32)
            is_nan = ((routed.walk >= 0) & jnp.isnan(routed.weights)).any(axis=0)
            nan_row = jnp.minimum(nan_row, jnp.where(is_nan, row["row"], NO_ROW))
    else:
        experts = jnp.broadcast_to(row["experts"][:, None], (shape.n_slots, n_lanes))
        places = base + jnp.arange(shape.n_slots, dtype=jnp.int32)[:, None] + jnp.zeros_like(experts)

    lane = jnp.arange(n_lanes, dtype=jnp.int32)
    experts = kept(lambda experts: experts)(experts)
    at = kept(lambda experts: _flat((first + jnp.maximum(experts, 0)) * n_lanes + lane))(experts)
    old = kept(
        lambda stamp, at, experts: jnp.where(experts >= 0, taken(stamp, at.reshape(experts.shape)), -1)
    )(stamp, at, experts)
    exists = experts >= 0
    told["found"] = jnp.where(exists, jnp.where(old > mark, HIT, jnp.where(old < 0, COLD, KNOWN)), NONE)
    # An entry occurred last in one place, so taking its bit off by subtraction never borrows.
    gone = kept(lambda old: _flat(-jnp.where(old >= 0, bit_of(old), jnp.uint32(0))))(old)
    word = line * shape.n_words
    of_gone = kept(lambda old: _flat((word + word_of(jnp.maximum(old, 0))) * n_lanes + lane))(old)
    last = last.at[of_gone].add(gone, mode="promise_in_bounds", wrap_negative_indices=False)
    n_misses = (exists & (old <= mark)).sum(axis=0, dtype=jnp.int32)
    budget = lanes["budget"][cache]
    over = used + n_misses * lanes["units"][layer] - budget
    passed = _evict(shape, lanes, last, line, Passed(mark, over, jnp.zeros_like(mark)), base - 1)
    off = lanes["off"]
    # Without a cache nothing that has occurred is in RAM.
    mark = jnp.where(off, base + shape.n_slots - 1, passed.mark)
    told["evictions"] = jnp.where(off, 0, passed.evicted)
    # What is written waits for what was read, or XLA would copy all stamps to write into the copy.
    written = kept(lambda old, places: _flat(jnp.where(old < base, places, 0)))(old, places)
    at = kept(lambda at, exists: jnp.where(_flat(exists), at, NOWHERE))(at, exists)
    new_flat = flat | {
        "stamp": stamp.at[at].set(written, mode="drop", wrap_negative_indices=False),
        "last": last,
        "nan_row": nan_row,
        "fault": fault,
        "mark": put(flat["mark"], mark, cache),
        "used": put(flat["used"], jnp.where(off, 0, passed.over + budget), cache),
        "routing_state": {
            stage: {name: put(v, state[stage][name], layer) for name, v in s.items()}
            for stage, s in flat["routing_state"].items()
        },
    }
    new_write = {
        "words": _marks(shape, exists, places, base, write["words"].shape[0]),
        "word": line * shape.n_words + word_of(base),
    }
    bits = _in_ram(shape, new_flat, rows, jnp.minimum(i + 1, rows["layer"].shape[0] - 1))
    return (new_flat, new_write, bits), told


def _route(
    shape: RecencyShape, lanes: Tree, row: Tree, stamp: Array, mark: Array, bits: Array, state: Tree
) -> tuple[Routed, Tree]:
    """Each lane's routing of a single-row batch."""
    program = shape.program
    n_lanes, k = mark.shape[0], program.n_slots
    stamps = stamp.reshape(-1, n_lanes)
    first = row["layer"] * program.n_expert
    router = row["router"][:k, None]
    found = Rerouted(
        jnp.broadcast_to(router, (k, n_lanes)), jnp.zeros_like(lanes["k"]), jnp.zeros_like(lanes["k"]), None
    )
    step = program.step("rerank")
    if step is not None:
        # Those not in RAM are the bits turned over.
        flip = np.stack([np.zeros_like(names(program.n_expert)), names(program.n_expert)], axis=1)
        masks = (bits[:, None] ^ flip[:, :, None])[:, :, None]
        n_each = k + _SPARE
        place = kept(nth_one)(masks, jnp.arange(n_each, dtype=jnp.int32)[None, :, None])
        ranked = kept(taken)(row["ranked"], place.reshape(2 * n_each, n_lanes))
        expert = (ranked & 0xFFFFFFFF).astype(jnp.int32)
        candidates = Candidates(
            value=lax.bitcast_convert_type((ranked >> 32).astype(jnp.int32), jnp.float32),
            expert=expert,
            rank=jnp.zeros_like(expert),
            resident=(np.arange(2 * n_each) < n_each)[:, None] & (expert < program.n_expert),
            weight=jnp.zeros(expert.shape, jnp.float32),
        )
        knobs = SimpleNamespace(**lanes["knobs"]["rerank"])
        facts = facts_of(step, row, lanes["k"], _n_resident(shape, step, row, stamps, mark, bits))
        armed = jnp.broadcast_to(row["decode"], (n_lanes,))
        candidates = declared(step, candidates)
        found = rerank(
            jnp, step, knobs, candidates, facts, router, armed, state["rerank"], program.n_expert, top_of_few
        )
        state["rerank"] = found.state
    at = (first + jnp.maximum(found.experts, 0)) * n_lanes + jnp.arange(n_lanes, dtype=jnp.int32)
    resident = (taken(stamp, at) > mark) & (found.experts >= 0)
    step = program.step("drop")
    n_resident = _n_resident(shape, step, row, stamps, mark, bits) if step is not None else None
    return drop_slots(program, lanes, row, router, found, resident, n_resident, state)


def _n_resident(shape: RecencyShape, step: Step, row: Tree, stamps: Array, mark: Array, bits: Array) -> Array:
    """int32 `[W]`: experts in RAM, for a policy that reads scores only those of a finite one."""
    if "scores" not in step.policy.needs:
        mine = lax.dynamic_slice_in_dim(stamps, row["layer"] * shape.program.n_expert, shape.program.n_expert)
        return (mine > mark).sum(axis=0, dtype=jnp.int32)
    return ones(bits & row["finite"][:, None]).sum(axis=0, dtype=jnp.int32)


def _walk(shape: RecencyShape, routed: Routed, base: Array) -> tuple[Array, Array]:
    """Experts a routed row looks up, -1 where none, and the places they occur last at; int32 `[K, W]` each."""
    slot = jnp.arange(shape.n_slots, dtype=jnp.int32)[:, None]
    if shape.program.step("drop") is None:
        return routed.walk, base + slot + jnp.zeros_like(routed.walk)
    # The slots that were dropped walk the top slot's expert once more.
    same = routed.walk[:, None] == routed.walk[None]
    last = jnp.where(same, slot[None], -1).max(axis=1)
    return jnp.where(routed.dropped, -1, routed.walk), base + last


def _marks(shape: RecencyShape, exists: Array, places: Array, base: Array, n_words: int) -> Array:
    """uint32 `[n_words, W]`: the bits of the places in the words from that of `base` on."""
    first = word_of(base)
    if not shape.routed:
        # All places from the base on, in every lane.
        start = (first + jnp.arange(n_words, dtype=jnp.int32)[:, None]) * WORD
        end = base + exists.sum(axis=0, dtype=jnp.int32)
        return below(jnp.clip(end - start, 0, WORD)) & ~below(jnp.clip(base - start, 0, WORD))
    bits = jnp.where(exists, bit_of(places), jnp.uint32(0))
    at = (word_of(places) - first) == jnp.arange(n_words, dtype=jnp.int32)[:, None, None]
    return jnp.where(at, bits, jnp.uint32(0)).sum(axis=1, dtype=jnp.uint32)


def _evict(shape: RecencyShape, lanes: Tree, last: Array, line: Array, state: Passed, end: Array) -> Passed:
    """The watermark where nothing is over any more, or at `end`, the place before the batch's first."""
    n_lanes = state.mark.shape[0]
    lines = line[None] if shape.per_layer else np.arange(shape.n_lines, dtype=np.int32)
    sizes = lanes["line_units"][line][None] if shape.per_layer else lanes["line_units"]
    step = np.arange(WINDOW_WORDS, dtype=np.int32)[:, None]

    lane = jnp.arange(n_lanes, dtype=jnp.int32)

    def going(s: Array, end: Array) -> Array:
        return (s[_OVER] > 0) & (s[_MARK] < end)

    def words(last: Array, lines: Array, first: Array) -> Array:
        return taken(last, (lines[:, None, None] * shape.n_words + first + step) * n_lanes + lane)

    def moved(window: Array, s: Array, sizes: Array, end: Array) -> Array:
        start = s[_MARK] + 1
        window = jnp.where(step == 0, window & ~below(start & (WORD - 1)), window)
        new = pass_bits(window, sizes, word_of(start), Passed(*s), end)
        # One array of the three by choosing, since joining them would be a loop with branches.
        which = np.arange(len(new))[:, None]
        new = jnp.where(which == _MARK, new.mark, jnp.where(which == _OVER, new.over, new.evicted))
        return jnp.where(going(s, end), new, s)

    def move(s: Array) -> Array:
        window = kept(words)(last, lines, word_of(s[_MARK] + 1))
        return kept(moved)(window, s, sizes, end)

    first = move(jnp.stack(state))
    return Passed(*lax.while_loop(lambda s: going(s, end).any(), move, first))


# -- new numbers for old places ------------------------------------------------------------------------------


def renumbered(shape: RecencyShape, carry: Tree, line_of_layer: Array) -> Tree:
    """The carry with the places of last occurrences counted anew from 0, so that the words suffice for any length.

    Order is all that places are compared for; afterwards a cache's places lie below the number of its entries.
    """
    n_layers, n_expert, n_lanes = carry["stamp"].shape
    n_caches, lane = carry["mark"].shape[0], jnp.arange(n_lanes)
    # [caches, lines, words, W]: with budgets per layer each line is a cache.
    last = carry["last"].reshape(n_caches, -1, shape.n_words, n_lanes)
    words = last.sum(axis=1, dtype=jnp.uint32)
    counts = ones(words)
    before = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts

    def rank(places: Array) -> Array:
        """Occurrences before each place; `[caches, n, W]`."""
        at = jnp.clip(places // WORD, 0, shape.n_words - 1)
        word = jnp.take_along_axis(words, at, axis=1)
        return jnp.take_along_axis(before, at, axis=1) + ones(word & below(places - at * WORD))

    old = carry["stamp"].reshape(n_caches, -1, n_lanes)
    new = jnp.where(old >= 0, rank(old), -1)
    # A place of -1 has nothing at or under it.
    mark = rank(carry["mark"][:, None] + 1)[:, 0] - 1
    bit = jnp.where(new >= 0, jnp.uint32(1) << (new % WORD).astype(jnp.uint32), jnp.uint32(0))
    cache = jnp.arange(n_caches)[:, None, None]
    line = jnp.zeros(n_layers, jnp.int32) if shape.per_layer else line_of_layer
    line = jnp.repeat(line, n_expert).reshape(n_caches, -1)[..., None]
    fresh = jnp.zeros_like(last).at[cache, line, jnp.maximum(new, 0) // WORD, lane].add(bit)
    return carry | {
        "stamp": new.reshape(carry["stamp"].shape),
        "last": fresh.reshape(carry["last"].shape),
        "mark": mark,
    }
