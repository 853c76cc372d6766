"""The replay scan where the least recently used entry leaves: one step is one batch, for all lanes at once.

Under LRU the entries in RAM are those whose last occurrence lies above a *watermark* in the walk, and evicting
only moves the watermark up. So nothing is searched: a bit per place in the walk says whether an entry occurred
there last, and the watermark moves over as many bits as there are bytes to free. Of the candidates of a rerank
policy only the first k in RAM and the first k not in RAM can win a slot (`RoutingPolicy.ordered`); they are
found as bits of a mask laid in score order. Both are exact, whatever the knobs and budgets.

A step's writes are made at the start of the next one: XLA then sees every read of the state after the write and
updates it in place, where it would else copy all of it at each step.

`recency_walk.py` cuts a trace into calls of this scan and `batches.py` makes its columns. `kernel.py` is the scan
that holds for every policy and tells what each slot did; tests hold the two against each other.

Shapes: `B` MoE layers, `E` experts per layer, `K` slots of a batch, `W` lanes, `N` words of 32 places. A *cache*
is all layers, or with budgets per layer one of them; a *line* is the entries of one size in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.replay.batches import WORD
from simlab.replay.routes import Routed, against_router, declared, drop_slots, facts_of, first_routing_state
from simlab.replay.shape import (
    COUNTERS,
    NO_ROW,
    ProgramShape,
    Tree,
    at_layer,
    first_counts,
    put,
)
from simlab.routing import Rerouted, rerank
from simlab.types import Array, Candidates, EvictionPolicy, Step

WINDOW_WORDS = 3
"""Words the watermark may pass at once; farther goes by repetition."""


def is_recency(policy: EvictionPolicy) -> bool:
    """Whether a policy is LRU by its code: one whose key is the last occurrence handed to it, and nothing else."""
    if policy.key is None or policy.touch is not None or policy.bypass or policy.needs or policy.state:
        return False
    last = object()
    try:
        return policy.key(np, {}, last, 0, SimpleNamespace()) is last  # type: ignore[arg-type]
    except Exception:
        return False


# -- bits ----------------------------------------------------------------------------------------------------


def ones(words: Array) -> Array:
    """int32: bits set in each word."""
    return lax.population_count(words).astype(jnp.int32)


def nth_one(words: Array, n: Array) -> Array:
    """int32: place of the `n`-th set bit (from 0) of each mask; at least 32 * N where there is none.

    Args:
        words: uint32 `[N, ...]`, the lowest bit first. n: int32 of a shape that goes with `words[0]`.
    """
    count = ones(words)
    passed = [jnp.zeros_like(count[0])]
    for row in count:
        passed.append(passed[-1] + row)
    at: Array = sum((end <= n).astype(jnp.int32) for end in passed[1:])
    word = jnp.zeros(at.shape, jnp.uint32)
    before = jnp.zeros(at.shape, jnp.int32)
    for i in range(words.shape[0]):
        word = jnp.where(at == i, words[i], word)
        before = jnp.where(at == i, passed[i], before)
    left, place = n - before, jnp.zeros(at.shape, jnp.int32)
    for half in (16, 8, 4, 2, 1):
        low = ones(word & jnp.uint32((1 << half) - 1))
        above = left >= low
        left = jnp.where(above, left - low, left)
        word = jnp.where(above, word >> jnp.uint32(half), word)
        place = place + jnp.where(above, half, 0)
    return at * WORD + place


def below(place: Array) -> Array:
    """uint32: the bits of a word under `place`, 0 to 32."""
    part = (jnp.uint32(1) << jnp.minimum(place, WORD - 1).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(place >= WORD, jnp.uint32(0xFFFFFFFF), part)


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


# -- the scan ------------------------------------------------------------------------------------------------


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


def _no_write(shape: RecencyShape, n_lanes: int) -> Tree:
    """A write of the step before the first."""
    return {
        "experts": jnp.full((shape.n_slots, n_lanes), -1, jnp.int32),
        "places": jnp.zeros((shape.n_slots, n_lanes), jnp.int32),
        "words": jnp.zeros((_words_of(shape.n_slots), n_lanes), jnp.uint32),
        "layer": jnp.int32(0),
        "line": jnp.int32(0),
        "word": jnp.int32(0),
    }


def _words_of(n_slots: int) -> int:
    """Words that `n_slots` places in a row can lie in."""
    return (n_slots + WORD - 2) // WORD + 1


_COUNTED = ("lookups", "hits", "cold_misses", "evictions", "reranked", "substituted", "dropped")
"""What a step counts; the rest follows from it after the loop, for all rows at once."""


def run(shape: RecencyShape, carry: Tree, rows: Tree, n: Array, lanes: Tree) -> Tree:
    """The carry after the first `n` batches of `rows`."""
    n_rows, n_lanes = rows["layer"].shape[0], carry["used"].shape[1]
    told = {"counts": jnp.zeros((n_rows, len(_COUNTED), n_lanes), jnp.int32)}
    if shape.routed:
        told["ran"] = jnp.zeros((n_rows, shape.n_slots, n_lanes), jnp.int32)

    def step(i: Array, state: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        row = {name: at_layer(column, i) for name, column in rows.items()}
        carry, write, told = state
        carry, write, one = _step(shape, lanes, carry, write, row)
        return carry, write, {name: put(told[name], one[name], i) for name in told}

    carry, write, told = lax.fori_loop(0, n, step, (carry, _no_write(shape, n_lanes), told))
    stamp, last = _written(carry, write)
    return carry | {"stamp": stamp, "last": last} | _added_up(shape, carry, rows, n, lanes, told)


def _added_up(shape: RecencyShape, carry: Tree, rows: Tree, n: Array, lanes: Tree, told: Tree) -> Tree:
    """Counters and sums with those of the first `n` batches."""
    count = {name: told["counts"][:, i] for i, name in enumerate(_COUNTED)}
    count["misses"] = count["lookups"] - count["hits"]
    count["rereads"] = jnp.where(lanes["off"], 0, count["misses"] - count["cold_misses"])
    count["read_bytes"] = count["misses"] * lanes["entry_bytes"][rows["layer"]][:, None]
    # A row's experts differ; the slots of rows that are not routed are the same in all lanes and counted outside.
    count["slots"] = count["lookups"] + count["dropped"] if shape.routed else jnp.zeros_like(count["hits"])
    counters = jnp.stack([count[name].astype(jnp.int64) for name in COUNTERS], axis=1)
    walked = (jnp.arange(rows["layer"].shape[0]) < n) & rows["counted"]
    # [phases, rows, 1, 1]
    phase = (walked & (rows["decode"] == jnp.arange(2)[:, None]))[..., None, None]
    added = {"counters": carry["counters"] + jnp.where(phase, counters, 0).sum(axis=1)}
    if shape.routed:
        given = {name: rows[name] for name in ("router", "router_k", "mass", "regret") if name in rows}
        sums = jax.vmap(partial(against_router, shape.program))(given, told["ran"])
        # One row after the other, so that a sum does not depend on where calls begin.
        added["sums"] = lax.fori_loop(
            0, n, lambda i, total: total + jnp.where(phase[:, i], sums[i], 0.0), carry["sums"]
        )
    return added


def _written(carry: Tree, write: Tree) -> tuple[Array, Array]:
    """Stamps and last-occurrence bits after the writes of the step before."""
    n_expert, n_lanes = carry["stamp"].shape[1:]
    at = jnp.where(write["experts"] >= 0, write["experts"], n_expert)
    stamp = carry["stamp"].at[write["layer"], at, jnp.arange(n_lanes)].set(write["places"], mode="drop")
    corner = (write["line"], write["word"], jnp.int32(0))
    words = lax.dynamic_slice(carry["last"], corner, (1, *write["words"].shape))
    return stamp, lax.dynamic_update_slice(carry["last"], words | write["words"], corner)


def _step(shape: RecencyShape, lanes: Tree, carry: Tree, write: Tree, row: Tree) -> tuple[Tree, Tree, Tree]:
    """One batch: route it, look its experts up, evict. The carry, what is to be written, and what it came to."""
    layer, base = row["layer"], row["base"]
    stamp, last = _written(carry, write)
    n_lanes = stamp.shape[2]
    cache = layer if shape.per_layer else jnp.int32(0)
    line = layer if shape.per_layer else row["line"]
    mark, used = at_layer(carry["mark"], cache), at_layer(carry["used"], cache)
    stamps = at_layer(stamp, layer)
    state = {
        stage: {name: at_layer(v, layer) for name, v in s.items()}
        for stage, s in carry["routing_state"].items()
    }
    count, told = {}, {}
    if shape.routed:
        routed, state = _route(shape, lanes, row, stamps, mark, state)
        experts, places = _walk(shape, routed, base)
        told["ran"] = jnp.where(routed.dropped, -1, routed.experts)
        count = {
            "reranked": routed.reranked,
            "substituted": routed.substituted,
            "dropped": routed.dropped.sum(axis=0, dtype=jnp.int32),
        }
        if shape.program.step("drop") is not None:
            is_nan = ((routed.walk >= 0) & jnp.isnan(routed.weights)).any(axis=0)
            carry = carry | {"nan_row": jnp.minimum(carry["nan_row"], jnp.where(is_nan, row["row"], NO_ROW))}
    else:
        experts = jnp.broadcast_to(row["experts"][:, None], (shape.n_slots, n_lanes))
        places = base + jnp.arange(shape.n_slots, dtype=jnp.int32)[:, None] + jnp.zeros_like(experts)

    exists = experts >= 0
    old = jnp.where(exists, jnp.take_along_axis(stamps, jnp.maximum(experts, 0), axis=0), -1)
    count["lookups"] = exists.sum(axis=0, dtype=jnp.int32)
    count["hits"] = (old > mark).sum(axis=0, dtype=jnp.int32)
    count["cold_misses"] = (exists & (old < 0)).sum(axis=0, dtype=jnp.int32)
    gone = jnp.where(old >= 0, jnp.uint32(1) << (old & (WORD - 1)).astype(jnp.uint32), jnp.uint32(0))
    # An entry occurred last in one place, so taking its bit off by subtraction never borrows.
    last = last.at[line, jnp.maximum(old, 0) // WORD, jnp.arange(n_lanes)].add(
        -gone, mode="promise_in_bounds"
    )
    used = used + (count["lookups"] - count["hits"]) * lanes["units"][layer]
    passed = _evict(shape, lanes, last, line, Passed(mark, used - lanes["budget"][cache], mark * 0), base - 1)
    used = passed.over + lanes["budget"][cache]
    off = lanes["off"]
    # Without a cache nothing that has occurred is in RAM.
    mark = jnp.where(off, base + shape.n_slots - 1, passed.mark)
    count["evictions"] = jnp.where(off, 0, passed.evicted)
    told["counts"] = jnp.stack([count.get(name, jnp.zeros_like(mark)) for name in _COUNTED])
    new_carry = carry | {
        "stamp": stamp,
        "last": last,
        "mark": put(carry["mark"], mark, cache),
        "used": put(carry["used"], jnp.where(off, 0, used), cache),
        "routing_state": {
            stage: {name: put(v, state[stage][name], layer) for name, v in s.items()}
            for stage, s in carry["routing_state"].items()
        },
    }
    word = base // WORD
    new_write = {
        "experts": experts,
        "places": places,
        "words": _marks(shape, exists, places, base, write["words"].shape[0]),
        "layer": layer,
        "line": line,
        "word": word,
    }
    return new_carry, new_write, told


def _route(
    shape: RecencyShape, lanes: Tree, row: Tree, stamps: Array, mark: Array, state: Tree
) -> tuple[Routed, Tree]:
    """Each lane's routing of a single-row batch."""
    program = shape.program
    n_expert, n_lanes = stamps.shape
    router = jnp.broadcast_to(row["router"][: program.n_slots, None], (program.n_slots, n_lanes))
    found = Rerouted(router, jnp.zeros_like(lanes["k"]), jnp.zeros_like(lanes["k"]), None)
    step = program.step("rerank")
    if step is not None:
        bits, there = _in_score_order(row["order"], stamps, mark)
        nth = jnp.arange(program.n_slots, dtype=jnp.int32)[:, None]
        masks = jnp.stack([bits, ~bits & there], axis=1)[:, :, None]
        place = nth_one(masks, nth).reshape(2 * program.n_slots, n_lanes)
        exists = place < n_expert
        place = jnp.minimum(place, n_expert - 1)
        candidates = Candidates(
            value=jnp.where(exists, row["ranked"][place], -jnp.inf),
            # A candidate that does not exist loses every tie.
            expert=jnp.where(exists, row["order"][place], n_expert),
            rank=jnp.zeros_like(place),
            resident=exists & (jnp.arange(place.shape[0]) < program.n_slots)[:, None],
            weight=jnp.zeros(place.shape, jnp.float32),
        )
        knobs = SimpleNamespace(**lanes["knobs"]["rerank"])
        facts = facts_of(step, row, lanes["k"], _n_resident(step, row, stamps, mark))
        armed = jnp.broadcast_to(row["decode"], (n_lanes,))
        candidates = declared(step, candidates)
        found = rerank(jnp, step, knobs, candidates, facts, router, armed, state["rerank"], n_expert)
        state["rerank"] = found.state
    resident = (jnp.take_along_axis(stamps, jnp.maximum(found.experts, 0), axis=0) > mark) & (
        found.experts >= 0
    )
    step = program.step("drop")
    n_resident = _n_resident(step, row, stamps, mark) if step is not None else None
    return drop_slots(program, lanes, row, router, found, resident, n_resident, state)


def _in_score_order(order: Array, stamps: Array, mark: Array) -> tuple[Array, Array]:
    """uint32 `[n, W]`: the experts in RAM as bits, best score first; and `[n, 1]` the bits that name an expert."""
    n_words, (n_expert, n_lanes) = order.shape[0] // WORD, stamps.shape
    in_ram = (stamps[order] > mark).astype(jnp.uint32).reshape(n_words, WORD, n_lanes)
    there = below(n_expert - WORD * jnp.arange(n_words, dtype=jnp.int32))[:, None]
    bits = (in_ram << jnp.arange(WORD, dtype=jnp.uint32)[:, None]).sum(axis=1, dtype=jnp.uint32)
    return bits & there, there


def _n_resident(step: Step, row: Tree, stamps: Array, mark: Array) -> Array:
    """int32 `[W]`: experts in RAM, for a policy that reads scores only those of a finite one."""
    if "scores" not in step.policy.needs:
        return (stamps > mark).sum(axis=0, dtype=jnp.int32)
    bits, _ = _in_score_order(row["order"], stamps, mark)
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
    first = base // WORD
    if not shape.routed:
        # All places from the base on, in every lane.
        start = (first + jnp.arange(n_words, dtype=jnp.int32)[:, None]) * WORD
        end = base + exists.sum(axis=0, dtype=jnp.int32)
        return below(jnp.clip(end - start, 0, WORD)) & ~below(jnp.clip(base - start, 0, WORD))
    bits = jnp.where(exists, jnp.uint32(1) << (places % WORD).astype(jnp.uint32), jnp.uint32(0))
    at = (places // WORD - first) == jnp.arange(n_words, dtype=jnp.int32)[:, None, None]
    return jnp.where(at, bits, jnp.uint32(0)).sum(axis=1, dtype=jnp.uint32)


def _evict(shape: RecencyShape, lanes: Tree, last: Array, line: Array, state: Passed, end: Array) -> Passed:
    """The watermark where nothing is over any more, or at `end`, the place before the batch's first."""
    lane = jnp.arange(last.shape[2])
    lines = [line] if shape.per_layer else list(range(shape.n_lines))
    sizes = lanes["line_units"][line][None] if shape.per_layer else lanes["line_units"]

    def going(s: Passed) -> Array:
        return (s.over > 0) & (s.mark < end)

    def move(s: Passed) -> Passed:
        first = (s.mark + 1) // WORD
        window = jnp.stack(
            [jnp.stack([last[q, first + i, lane] for i in range(WINDOW_WORDS)]) for q in lines]
        )
        window = window.at[:, 0].set(window[:, 0] & ~below((s.mark + 1) % WORD))
        moved = pass_bits(window, sizes, first, s, end)
        return Passed._make(jnp.where(going(s), new, old) for new, old in zip(moved, s, strict=True))

    return lax.while_loop(lambda s: going(s).any(), move, state)


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
