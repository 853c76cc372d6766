"""The engine's one-row way of running a route gives what the general way gives, and drops as written down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.cells import parse_route
from simlab.errors import RunError
from simlab.record.live_route import LiveRoute
from simlab.record.one_row import after_drop, best_of, finite_values
from simlab.routing import take_top
from simlab.types import WeightRule

N_EXPERT, K = 10, 3
RULE = WeightRule(normalise=True)


def route_of(text: str) -> LiveRoute:
    return LiveRoute(parse_route(text), K, N_EXPERT, 2, "raw", RULE)


scores = st.lists(
    st.sampled_from([0.0, 0.25, 0.5, 0.5000001, 1.0, float("-inf"), float("inf"), float("nan")]),
    min_size=N_EXPERT,
    max_size=N_EXPERT,
)


@settings(max_examples=200, deadline=None)
@given(
    row=scores, resident=st.lists(st.booleans(), min_size=N_EXPERT, max_size=N_EXPERT), margin=st.floats(0, 1)
)
def test_one_row_is_rerouted_like_one_of_many(row, resident, margin):
    live = route_of(f"substitute:L={margin}")
    values = np.array([row], dtype=np.float32)
    ranked = np.where(np.isnan(values[0]), -np.inf, values[0])
    router = np.lexsort((np.arange(N_EXPERT), -ranked))[:K].astype(np.int32)[None]
    at_hand = np.array(resident)
    one = live.rerank(0, values, router, at_hand)
    two = live.rerank(0, np.repeat(values, 2, axis=0), np.repeat(router, 2, axis=0), at_hand)
    assert two.experts.tolist() == [one.experts[0].tolist()] * 2
    assert (two.reranked, two.substituted) == (2 * one.reranked, 2 * one.substituted)


def test_dropping_by_hand():
    live = route_of("drop_cold:F=0.9")
    # F / k = 0.3: slots 1 and 2 are light, slot 2 is at hand, slot 0 is the top.
    weights = np.array([[0.6, 0.25, 0.15]], dtype=np.float32)
    experts = np.array([[7, 2, 5]], dtype=np.int32)
    resident = np.zeros(N_EXPERT, dtype=bool)
    resident[5] = True
    none = np.zeros((1, N_EXPERT), dtype=np.float32)
    found = live.drop(0, none, experts, weights, resident, decode=True)
    assert found is not None
    assert found.dropped.tolist() == [[False, True, False]]
    assert found.walk.tolist() == [[7, 7, 5]]
    total, kept = np.float32(0.6) + np.float32(0.25) + np.float32(0.15), np.float32(0.6) + np.float32(0.15)
    expected = np.array([0.6, 0, 0.15], dtype=np.float32) * (total / kept)
    assert found.applied.tolist() == [expected.tolist()]
    assert live.drop(0, none, experts, weights, resident, decode=False) is None
    plain = route_of("drop_cold:F=0.9,renorm=0").drop(0, none, experts, weights, resident, decode=True)
    assert plain is not None
    assert plain.applied.tolist() == [[np.float32(0.6), 0, np.float32(0.15)]]


def test_a_nan_weight_is_refused():
    weights = np.array([[0.6, np.nan, 0.15]], dtype=np.float32)
    with pytest.raises(RunError, match="weight is NaN"):
        route_of("drop_cold:F=1").drop(
            0,
            np.zeros((1, N_EXPERT), dtype=np.float32),
            np.array([[1, 2, 3]], dtype=np.int32),
            weights,
            np.zeros(N_EXPERT, dtype=bool),
            decode=True,
        )


values = st.lists(
    st.sampled_from([0.0, -0.0, 0.25, 1.0, 1.0000001, 7.0, float("-inf"), float("nan")]),
    min_size=4,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(row=values, k=st.integers(1, 4), data=st.data())
def test_the_best_of_a_row_are_those_of_take_top(row, k, data):
    value = np.array(row, dtype=np.float32)
    experts = np.arange(len(value), dtype=np.int32)
    router = np.array(data.draw(st.permutations(range(len(value))))[:k], dtype=np.int32)
    best = np.empty(k, dtype=np.int32)
    n_new = best_of(value, router, np.empty_like(value), best)
    expected = take_top(np, value, 0, experts, k).tolist()
    assert best.tolist() == expected
    assert n_new == len(set(expected) - set(router.tolist()))


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8),
    data=st.data(),
    renorm=st.sampled_from([0, 1]),
)
def test_what_follows_a_drop_is_the_same_for_one_row(row, data, renorm):
    weight = np.array(row, dtype=np.float32)
    top = int(weight.argmax())
    dropped = np.array(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))
    dropped[top] = False
    experts = np.arange(len(row), dtype=np.int32)[::-1].copy()
    walk, applied = np.empty_like(experts), np.empty_like(weight)
    after_drop(weight, experts, dropped, top, bool(renorm), walk, applied)
    assert walk.tolist() == np.where(dropped, experts[top], experts).tolist()
    expected = np.where(dropped, np.float32(0), weight)
    if renorm and dropped.any() and expected.sum() > 0:
        total, kept = np.add.accumulate(weight)[-1], np.add.accumulate(expected)[-1]
        expected = expected * np.float32(total / kept)
    assert applied.tobytes() == expected.tobytes()


@settings(max_examples=200, deadline=None)
@given(row=scores)
def test_finite_rows_are_told_apart_and_measured(row):
    ranked = np.array(row, dtype=np.float32)
    found, ends = np.empty_like(ranked), np.empty(2, dtype=np.float32)
    assert finite_values(ranked, found, ends) == np.isfinite(ranked).all()
    if np.isfinite(ranked).all():
        assert found.tolist() == ranked.tolist()
        assert ends.tolist() == [ranked.max(), ranked.min()]
