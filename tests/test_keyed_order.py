"""The order of eviction of keys that move, against a sort of each batch by itself."""

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
from simlab.replay.keyed_order import LAST_USE, blocks, in_order, packed_keys
from simlab.replay.run import Replayer

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
        packed, whole, key = packed_by_jax(block.known, of_block, np.int32(block.bits))
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
    fast, plain = Replayer(trace, cells), Replayer(trace, cells, plain=True)
    for replayer in (fast, plain):
        while replayer.advance():
            pass
    assert fast.numbers() == plain.numbers()
    assert asked[0] == 1
    assert max(asked) > 1
