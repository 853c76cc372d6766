"""The order of eviction of keys that move, against a sort of each batch by itself, and the loop against a slow walk."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import generate, make_header

from simlab.cells import build_cells
from simlab.policy import eviction
from simlab.replay import keyed, keyed_walk
from simlab.replay.keyed_order import blocks, in_order, packed_keys, whole_keys
from simlab.replay.keyed_walk import pack, unpack
from simlab.replay.run import Replayer
from simlab.replay.shared_loop import (
    EVICTIONS,
    HITS,
    N_COUNTS,
    PHASES,
    READ_BYTES,
    Batches,
    Caches,
    Keys,
    walk_keyed,
)
from simlab.replay.shared_order import LAST_USE

N = 7
"""Entries."""
EXTREMES = {
    "int64": [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1],
    "int32": [-(2**31), -1, 0, 1, 2**31 - 1],
    "uint64": [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    "float32": [float("-inf"), -1.5, -0.0, 0.0, 1e-45, 3.0, float("inf")],
    "float64": [float("-inf"), -1.0, -0.0, 0.0, 1.0, 1.0 + 2**-52, 1.0 + 2**-51, 1e300, float("inf")],
}


def slow(key: Any, last_use: dict[int, int]) -> list[int]:
    """Entries that were ever used, least key first, of equal ones the one used longest ago."""
    return sorted(last_use, key=lambda entry: (key[entry], last_use[entry]))


@eviction(state={"worth": 0}, source="a test")
def worth(xp, state, last_position, batch, knobs):
    """What each entry is given."""
    return state["worth"]


packed_by_jax = jax.jit(lambda known, batch, bits: packed_keys(worth, known, {}, batch, bits, {}))


@given(
    dtype=st.sampled_from(sorted(EXTREMES)),
    data=st.data(),
    uses=st.lists(st.lists(st.integers(0, N - 1), unique=True, max_size=3), min_size=1, max_size=6),
    first=st.lists(st.integers(-1, 5), min_size=N, max_size=N),
    size=st.sampled_from([1, 3]),
    n=st.integers(1, N),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_entries_by_key_and_then_by_last_use(dtype, data, uses, first, size, n):
    """Keys of every type at their ends, equal ones and ones a last bit apart, in blocks of any size, cut anywhere."""
    values = st.sampled_from(EXTREMES[dtype])
    start = data.draw(st.lists(values, min_size=N, max_size=N))
    # Stamps are places in the walk: all different, but for entries never used.
    stamp = np.array([-1 if x < 0 else x * N + i for i, x in enumerate(first)])
    made = [(batch, entry, data.draw(values)) for batch, used in enumerate(uses) for entry in used]
    now = {LAST_USE: stamp, "worth": np.array(start, dtype)}
    batch, entry = (np.array([use[i] for use in made], np.int64) for i in (0, 1))
    new = {LAST_USE: 100 + np.arange(len(made)), "worth": np.array([use[2] for use in made], dtype)}
    found = np.full((len(uses), n), -1)
    for block in blocks(now, batch, entry, new, len(uses), size):
        of_block = np.minimum(np.arange(block.start, block.start + size), len(uses) - 1)
        packed, whole, key, _ = packed_by_jax(block.known, of_block, np.int32(block.bits))
        some = in_order(
            np.asarray(packed), None if bool(whole) else np.asarray(key), block.entry, block.bits, n
        )
        found[block.start : block.start + size] = some[: len(uses) - block.start]
    keys, last_use = list(start), {e: int(s) for e, s in enumerate(stamp) if s >= 0}
    for number in range(len(uses)):
        for place, (of, entry_used, value) in enumerate(made):
            if of == number:
                keys[entry_used], last_use[entry_used] = value, 100 + place
        want = slow(keys, last_use)[:n]
        assert found[number, : len(want)].tolist() == want, number


@pytest.mark.slow
@pytest.mark.parametrize("evict", ["random", "lfru"])
def test_an_order_that_is_too_short_is_found_again_longer(tmp_path, monkeypatch, evict):
    """A small cache's few entries may all stand past the first part of the order."""
    monkeypatch.setattr(keyed, "MOST_PLACES", 32)
    asked: list[int] = []
    orders = keyed_walk.KeyedWalk._orders

    def told(self: Any, *given: Any) -> Any:
        asked.append(self._n_parts)
        return orders(self, *given)

    monkeypatch.setattr(keyed_walk.KeyedWalk, "_orders", told)
    header = make_header(n_layer=3, n_expert=60, k=4, sizes=(700, 900))
    trace = generate(header, seed=8, n_prefill=3, n_decode=25, grain=0.3).write(tmp_path / "t")
    cells = build_cells(budgets=["4%", "50%"], evicts=[evict])
    fast, plain = Replayer(trace, cells, loops=False), Replayer(trace, cells, plain=True)
    for replayer in (fast, plain):
        while replayer.advance():
            pass
    assert fast.numbers() == plain.numbers()
    assert asked[0] == 1
    assert max(asked) > 1


@pytest.mark.parametrize("dtype", sorted(EXTREMES))
def test_whole_keys_are_in_the_order_of_keys(dtype):
    """Equal where these are, both zeros among them; NaN as the lowest of all."""
    values = [*EXTREMES[dtype], *([float("nan")] if dtype.startswith("float") else [])]
    key = np.array(values, dtype)
    one = np.zeros(1, np.int64)
    n = len(key)
    by_jax = jax.jit(lambda known: whole_keys(worth, known, one.astype(np.int32), one, {}, n=n, n_expert=n))
    whole = np.asarray(by_jax({"worth": key[None]})[0])[0].tolist()
    ranked = [float("-inf") if value != value else value for value in key.tolist()]
    for a, wa in zip(ranked, whole, strict=True):
        for b, wb in zip(ranked, whole, strict=True):
            assert ((a < b), (a == b)) == ((wa < wb), (wa == wb)), (a, b)


def walk_slowly(
    used: list[list[int]], of_cache: list[int], keys: np.ndarray, units: np.ndarray, budget: int, bypass: bool
) -> tuple[list[set[int]], int, int, int]:
    """One lane by sets and sorts: what is in RAM in each cache, hits, evictions and units read."""
    resident: dict[int, set[int]] = {}
    last: dict[tuple[int, int], int] = {}
    hits = evictions = read = position = 0
    for number, (entries, cache) in enumerate(zip(used, of_cache, strict=True)):
        mine = resident.setdefault(cache, set())
        hits += len(mine & set(entries))
        read += sum(units[cache, e] for e in set(entries) - mine)
        for entry in entries:
            last[cache, entry] = position
            position += 1
        mine |= set(entries)
        go = sorted(
            (e for e in mine if bypass or e not in entries),
            key=lambda e: (keys[number][e], last[cache, e]),
        )
        for entry in go:
            if sum(units[cache, e] for e in mine) <= budget:
                break
            mine.discard(entry)
            evictions += 1
    return [resident.get(cache, set()) for cache in range(units.shape[0])], hits, evictions, read


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from([5, 64, 150]),
    n_caches=st.integers(1, 2),
    n_keys=st.sampled_from([2, 40, 2**64]),
    most=st.integers(0, 9),
    bypass=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_loop_against_a_slow_walk(seed, n, n_caches, n_keys, most, bypass):
    """Few and many equal keys, entries of two sizes, caches of one word and of several, budgets of nothing to all."""
    rng = np.random.default_rng(seed)
    # Each layer is of one size, and a cache of two layers.
    n_expert = -(-n // 2)
    n = 2 * n_expert
    units = np.repeat(rng.integers(1, 4, 2 * n_caches), n_expert).reshape(n_caches, n).astype(np.int32)
    n_batches = 30
    of_cache = rng.integers(0, n_caches, n_batches)
    layer = 2 * of_cache + rng.integers(0, 2, n_batches)
    used = [
        (rng.choice(n_expert, min(rng.integers(0, most + 1), n_expert), replace=False) + n_expert * (b % 2))
        for b in layer
    ]
    budgets = [0, 3, int(units[0].sum() // 4), int(units[0].sum() // 2), int(units[0].sum())]
    keys = rng.integers(0, n_keys, (n_batches, n), np.uint64, endpoint=False)
    # As JAX gives them, so that numba need not compile the loop for others.
    keys.flags.writeable = False
    begins = np.append(0, np.cumsum([len(u) for u in used]))
    entry = np.concatenate([u + n * c for u, c in zip(used, of_cache, strict=True)]).astype(np.int64)
    caches = Caches(
        units=units.ravel(),
        least_units=units.min(axis=1),
        entry_bytes=units.reshape(-1, n_expert)[:, 0].astype(np.int64),
        budget=np.tile(np.array(budgets, np.int32), (n_caches, 1)),
        off=np.zeros(len(budgets), bool),
        bypass=bypass,
        resident=np.zeros((n_caches * n, len(budgets)), bool),
        used=np.zeros((n_caches, len(budgets)), np.int32),
        counts=np.zeros((PHASES, N_COUNTS, len(budgets)), np.int64),
    )
    batches = Batches(begins, np.arange(n_batches), layer, of_cache, np.zeros(n_batches, np.int64))
    last, position = np.full(n_caches * n, -1), np.arange(len(entry))
    for start, stop in ((0, 11), (11, n_batches)):
        held = pack(caches.resident, n_caches)
        walk_keyed(batches, Keys(start, stop - start, keys[start:stop], entry, position, last), caches, held)
        caches.resident[:] = unpack(held, n)
    for lane, budget in enumerate(budgets):
        want, hits, evictions, read = walk_slowly(
            [u.tolist() for u in used], of_cache.tolist(), keys, units, budget, bypass
        )
        there = caches.resident[:, lane].reshape(n_caches, n)
        assert [set(np.flatnonzero(x).tolist()) for x in there] == want
        assert caches.used[:, lane].tolist() == [
            sum(units[c, e] for e in mine) for c, mine in enumerate(want)
        ]
        told = caches.counts[0, :, lane]
        assert (told[HITS], told[EVICTIONS], told[READ_BYTES]) == (hits, evictions, read)
