"""The live cache by an ordered dictionary, and the NumPy and the JAX way of taking the best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.policy import find_eviction
from simlab.record.cache import LiveCache
from simlab.routing import take_top
from simlab.types import ResolvedBudget

N_LAYERS, N_EXPERT = 3, 6
SIZES = np.array([7, 5, 9], dtype=np.int64)


def cache_of(budget):
    return LiveCache(SIZES, N_EXPERT, 3, budget, find_eviction("lru"), {})


budgets = st.one_of(
    st.integers(1, 120).map(lambda b: ResolvedBudget(b, (b // 3,) * 3, per_layer=False)),
    st.lists(st.integers(0, 40), min_size=3, max_size=3).map(
        lambda b: ResolvedBudget(sum(b), tuple(b), per_layer=True)
    ),
    st.just(ResolvedBudget(0, (0,) * 3, per_layer=False, off=True)),
)
batches = st.lists(
    st.tuples(
        st.integers(0, N_LAYERS - 1),
        st.lists(st.lists(st.integers(-1, N_EXPERT - 1), min_size=2, max_size=2), min_size=1, max_size=3),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(first=budgets, later=budgets, walks=batches)
def test_a_cache_evicts_the_least_recent_down_to_its_budget(first, later, walks):
    """Against an ordered dictionary, also where the budget changes on the way."""
    cache, order, budget = cache_of(first), {}, first
    for number, (layer, rows) in enumerate(walks):
        if number == len(walks) // 2 and (first.off, first.per_layer) == (later.off, later.per_layer):
            cache.set_budget(later)
            budget = later
        walk = np.array(rows, dtype=np.int32)
        outcome = cache.run_batch(layer, walk, None, np.ones(walk.shape, dtype=np.float32))
        own = {(layer, e) for e in walk.ravel().tolist() if e >= 0}
        assert outcome.misses == list(
            dict.fromkeys(e for e in walk.ravel().tolist() if e >= 0 and (layer, e) not in order)
        )
        assert outcome.lookups == outcome.hits + len(outcome.misses) == len(own)
        for e in walk.ravel().tolist():
            if e >= 0 and not budget.off:
                order.pop((layer, e), None)
                order[layer, e] = None
        evicted = []
        for entry in [e for e in order if e not in own and (not budget.per_layer or e[0] == layer)]:
            held = sum(int(SIZES[at]) for at, _ in order if not budget.per_layer or at == layer)
            if held > (budget.layer_bytes[layer] if budget.per_layer else budget.total_bytes):
                del order[entry]
                evicted.append(entry)
        assert outcome.evicted == evicted
        assert np.flatnonzero(cache.resident).tolist() == sorted(at * N_EXPERT + e for at, e in order)


def test_the_read_is_charged_to_the_first_slot_that_runs():
    cache = cache_of(ResolvedBudget(1000, (0,) * 3, per_layer=False))
    walk = np.array([[4, 4, 2], [2, 5, 4]], dtype=np.int32)
    dropped = np.array([[True, False, False], [False, False, False]])
    outcome = cache.run_batch(1, walk, dropped, np.ones(walk.shape, dtype=np.float32))
    assert outcome.misses == [4, 2, 5]
    assert outcome.charged == [(0, 1), (0, 2), (1, 1)]
    assert (outcome.lookups, outcome.hits) == (3, 0)


scores = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan")])


@settings(max_examples=100, deadline=None)
@given(
    value=st.lists(scores, min_size=6, max_size=6), tier=st.lists(st.integers(-1, 1), min_size=6, max_size=6)
)
def test_numpy_and_jax_take_the_same_best(value, tier):
    jnp = pytest.importorskip("jax.numpy")
    import simlab.replay.kernel  # noqa: F401  (64-bit JAX)

    expert = np.array([3, 0, 5, 1, 4, 2], dtype=np.int32)
    values, tiers = np.array(value, dtype=np.float32), np.array(tier, dtype=np.int32)
    for t in (0, tiers):
        ours = take_top(np, values, t, expert, 4)
        theirs = take_top(
            jnp, jnp.asarray(values), t if isinstance(t, int) else jnp.asarray(t), jnp.asarray(expert), 4
        )
        assert ours.tolist() == np.asarray(theirs).tolist()
    by_hand = sorted(
        range(6), key=lambda i: (-tier[i], -(float("-inf") if value[i] != value[i] else value[i]), expert[i])
    )
    assert take_top(np, values, tiers, expert, 4).tolist() == [int(expert[i]) for i in by_hand[:4]]
