"""The live cache's two forms agree, and so do the NumPy and the JAX way of taking the best."""

from __future__ import annotations

from types import SimpleNamespace

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


def caches(budget):
    lru = find_eviction("lru")
    return [LiveCache(SIZES, N_EXPERT, budget, lru, SimpleNamespace(), ordered) for ordered in (True, False)]


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
def test_the_ordered_form_evicts_what_the_array_form_does(first, later, walks):
    ordered, arrays = caches(first)
    used = 0
    for number, (layer, rows) in enumerate(walks):
        if number == len(walks) // 2 and not (first.off or later.off):
            ordered.set_budget(later)
            arrays.set_budget(later)
        walk = np.array(rows, dtype=np.int32)
        weights = np.ones(walk.shape, dtype=np.float32)
        a, b = (cache.run_batch(layer, walk, None, weights) for cache in (ordered, arrays))
        assert a._replace(evicted=sorted(a.evicted)) == b._replace(evicted=sorted(b.evicted))
        assert np.array_equal(ordered.resident, arrays.resident)
        assert a.lookups == a.hits + len(a.misses) == len(set(walk[walk >= 0].tolist()))
        used = int((ordered.resident.reshape(N_LAYERS, -1).sum(axis=1) * SIZES).sum())
    budget = ordered.budget
    if walks and not budget.off and not budget.per_layer:
        batch_bytes = len({e for row in walks[-1][1] for e in row if e >= 0}) * int(SIZES[walks[-1][0]])
        assert used <= max(budget.total_bytes, batch_bytes)


def test_the_read_is_charged_to_the_first_slot_that_runs():
    cache = caches(ResolvedBudget(1000, (0,) * 3, per_layer=False))[0]
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
