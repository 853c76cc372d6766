"""The engine's one-row way of running a route gives what the general way gives, and drops as written down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.cells import parse_route
from simlab.errors import RunError
from simlab.record.live_route import LiveRoute
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
