"""The routing policies by hand, on one row as in a live decode, and what holds for any row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_routing import DROPS, REROUTES, ReferenceRow

from simlab.cells import parse_route
from simlab.errors import InputError, RunError
from simlab.policy import find_routing
from simlab.record.live_route import LiveRoute
from simlab.routing import lighter_sums
from simlab.scores import mass_before, ranking_values, router_mass, router_ranking
from simlab.types import Gating, WeightRule

f32 = np.float32
N_EXPERT, K = 8, 3
RULE = WeightRule(softmax_over_selected=True, normalise=False)
COUNTS = np.array([[(7 * a * b + a + b) % 5 for b in range(N_EXPERT)] for a in range(N_EXPERT)])


def taught(counts: Any = COUNTS) -> Any:
    """What `buddy` learns of counts `[E, E]`, for two layers."""
    train = find_routing("buddy").train
    assert train is not None
    together = np.repeat(np.asarray(counts)[None], 2, axis=0)
    return {"swap": {"place": np.asarray(train(SimpleNamespace(coactivation=together))["place"], f32)}}


def live(text: str, k: int = K, n_expert: int = N_EXPERT, rule: WeightRule | None = RULE) -> LiveRoute:
    learned = taught() if text.startswith("buddy") else None
    return LiveRoute(parse_route(text), k, n_expert, 2, "raw", rule, "logits", learned)


def rerouted(text: str, scores: list[float], resident: set[int], route: LiveRoute | None = None) -> list[int]:
    """The experts of one row at layer 0; the router's picks are the best by score, then by id."""
    row = np.array([scores], f32)
    router = np.argsort(-row[0], kind="stable")[:K].astype(np.int32)[None]
    at_hand = np.isin(np.arange(len(scores)), list(resident))
    return (route or live(text)).rerank(0, row, router, at_hand).experts[0].tolist()


#          0  1  2  3  4  5  6  7
SCORES = [8, 7, 6, 5, 4, 3, 2, 0.0]


@pytest.mark.parametrize(
    ("text", "resident", "experts"),
    [
        # Range 8, bonus 1.6: 0 stays as the first, then 3 at 6.6 and 1 at 7, 2 at 6.
        ("cache_prior:lambda=0.2,J=1", {3}, [0, 1, 3]),
        ("cache_prior:lambda=0.2,J=3", {3}, [0, 1, 2]),
        # Bonus 4: 5 reaches 7, as much as 1, which has the lower id.
        ("cache_prior:lambda=0.5,J=0", {5}, [0, 1, 5]),
        ("max_rank:M=5,J=1", {3, 4, 5}, [0, 3, 4]),
        # The window holds one; the router's ranking fills up.
        ("max_rank:M=4,J=1", {3, 4, 5}, [0, 3, 1]),
        ("max_rank:M=8,J=0", {7, 5}, [5, 7, 0]),
        ("max_rank:M=2,J=2", {3, 4, 5}, [0, 1, 2]),
        # Mass .633, .233, .086, .031, ...: with .866 before it 2 is the window's last at .9, at .97 it is 3.
        ("cum_prob:p=0.9,J=0", {2, 3}, [0, 1, 2]),
        ("cum_prob:p=0.97,J=0", {2, 3}, [2, 3, 0]),
        ("cum_prob:p=0.97,J=2", {2, 3, 4}, [0, 1, 2]),
        ("resident_only", {2, 5, 7, 4}, [2, 4, 5]),
        ("resident_only", {2, 5}, [0, 1, 2]),
        # Weights .665, .245, .090: 1 and 2 are light and missing, the best at hand first.
        ("swap_on_miss:tau=0.25", {0, 4, 6}, [0, 4, 6]),
        ("swap_on_miss:tau=0.2", {0, 4, 6}, [0, 1, 4]),
        ("swap_on_miss:tau=0.25", {6}, [0, 6, 2]),
        ("swap_on_miss:tau=1", {1, 5}, [5, 1, 2]),
    ],
)
def test_by_hand(text, resident, experts):
    assert rerouted(text, SCORES, resident) == experts


def test_the_mean_range_by_hand():
    """Ranges 8, 2 and 2 at layer 0: means 8, 5 and 4, bonuses 2, 1.25 and 1; another layer knows nothing of it."""
    route = live("cache_prior:lambda=0.25,J=0")
    narrow = [8, 7.5, 7, 6, 6, 6, 6, 6.0]
    assert rerouted("", SCORES, set(), route) == [0, 1, 2]
    # 6 + 1.25 beats 7, and would not with the row's own range.
    assert rerouted("", narrow, {5}, route) == [0, 1, 5]
    # 6 + 1 ties with 7: the lower id.
    assert rerouted("", narrow, {5}, route) == [0, 1, 2]
    row = np.array([narrow], f32)
    at_hand = np.arange(8) == 5
    assert route.rerank(1, row, np.array([[0, 1, 2]], np.int32), at_hand).substituted == 0


def test_picks_among_the_first_stay_even_where_they_tie():
    """The router put 5 before 3 although they score alike; the lower id would win otherwise."""
    route = live("cache_prior:lambda=0.2,J=3")
    row = np.array([[9, 8, 1, 7, 1, 7, 1, 0]], f32)
    found = route.rerank(0, row, np.array([[0, 1, 5]], np.int32), np.arange(8) == 3)
    assert (found.experts.tolist(), found.reranked) == ([[0, 1, 5]], 0)
    two = live("cache_prior:lambda=0.2,J=2").rerank(
        0, row, np.array([[0, 1, 5]], np.int32), np.arange(8) == 3
    )
    assert two.experts.tolist() == [[0, 1, 3]]


@pytest.mark.parametrize(
    ("text", "weights", "dropped"),
    [
        ("skip_ratio:beta=0.5", [0.5, 0.25, 0.2], [False, False, True]),
        ("skip_ratio:beta=1", [0.4, 0.4, 0.2], [False, False, True]),
        # The lightest first: .1, then .1 + .3, then all; 0.4 is not below itself.
        ("adaptive_k:t=0.5", [0.6, 0.1, 0.3], [False, True, True]),
        ("adaptive_k:t=0.4", [0.6, 0.1, 0.3], [False, True, False]),
        ("adaptive_k:t=0.5,sensitivity=2", [0.6, 0.1, 0.3], [False, True, False]),
        # Of equal ones the later is lighter; the heaviest always runs.
        ("adaptive_k:t=0.3", [0.25, 0.25, 0.25], [False, False, True]),
        ("adaptive_k:t=10", [0.2, 0.5, 0.3], [True, False, True]),
    ],
)
def test_drops_by_hand(text, weights, dropped):
    row, experts = np.array([weights], f32), np.array([[4, 2, 6]], np.int32)
    none, resident = np.zeros((1, N_EXPERT), f32), np.ones(N_EXPERT, bool)
    found = live(text).drop(0, none, experts, row, resident, decode=True)
    assert found is not None
    assert found.dropped.tolist() == [dropped]
    top = experts[0, int(np.argmax(row))]
    assert found.walk.tolist() == [[top if d else e for d, e in zip(dropped, experts[0], strict=True)]]
    assert live(text).drop(0, none, experts, row, resident, decode=False) is None


def test_lighter_sums_by_hand():
    weight = np.array([[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]], f32)
    assert lighter_sums(np, weight).tolist() == [[1, 0.5], [0.5, 0.25], [0.25, 1]]
    assert lighter_sums(np, np.array([0.5, -np.inf], f32)).tolist() == [0.5, 0]


def test_mass_before_by_hand():
    scores = np.array([[0.1, 0.2, 0.6, 0.1], [0.25, 0.25, 0.25, 0.25]], f32)
    picks = np.array([[2, 1], [3, 0]], np.int32)
    order = router_ranking(ranking_values(scores, "prob"), picks)
    assert order.tolist() == [[2, 1, 0, 3], [3, 0, 1, 2]]
    found = mass_before(router_mass(scores, "softmax"), order)
    assert found[0] == pytest.approx([0.8, 0.6, 0, 0.9], abs=1e-7)
    assert found[1].tolist() == [0.25, 0.5, 0.75, 0]


def test_what_cannot_be_known_live_is_refused():
    with pytest.raises(RunError, match="cum_prob needs the router's gating"):
        LiveRoute(parse_route("cum_prob"), K, N_EXPERT, 1, "raw", RULE)
    with pytest.raises(InputError, match="buddy learns 'place' from a part of a trace"):
        LiveRoute(parse_route("buddy"), K, N_EXPERT, 1, "raw", RULE)
    with pytest.raises(RunError, match="needs weights cannot run where the gate is a tensor of its own"):
        rerouted("", SCORES, {4}, live("swap_on_miss:tau=1", rule=None))


# -- any row -------------------------------------------------------------------------------------------------

VALUES = {
    "cache_prior": st.builds(
        "cache_prior:lambda={},J={}".format, st.floats(0, 2, width=32), st.integers(0, 4)
    ),
    "max_rank": st.builds("max_rank:M={},J={}".format, st.integers(0, 9), st.integers(0, 4)),
    "cum_prob": st.builds("cum_prob:p={},J={}".format, st.floats(0, 1, width=32), st.integers(0, 4)),
    "resident_only": st.just("resident_only"),
    "swap_on_miss": st.builds("swap_on_miss:tau={}".format, st.floats(0, 1.5, width=32)),
    "buddy": st.builds("buddy:n={}".format, st.integers(0, 8)),
}
some_scores = st.lists(
    st.sampled_from([0.0, 0.25, 0.5, 0.5000001, 3.0, float("-inf"), float("inf"), float("nan")]),
    min_size=N_EXPERT,
    max_size=N_EXPERT,
)
flags = st.lists(st.booleans(), min_size=N_EXPERT, max_size=N_EXPERT)


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.lists(some_scores, min_size=1, max_size=3), resident=flags)
def test_any_row_is_rerouted_as_plain_python_does_and_keeps_to_the_rules(name, data, rows, resident):
    text = data.draw(VALUES[name])
    k = data.draw(st.integers(1, K))
    route, step = live(text, k), parse_route(text).steps[0]
    at_hand, state = {e for e in range(N_EXPERT) if resident[e]}, {}
    for scores in rows:
        row = np.array([scores], f32)
        values = ranking_values(row, "raw")[0]
        order = sorted(range(N_EXPERT), key=lambda e: (-float(values[e]), e))
        router = data.draw(st.permutations(order[:k]))
        finite = values[np.isfinite(values)]
        exact = [np.exp(np.float64(v) - finite.max()) if np.isfinite(v) else 0.0 for v in values]
        weights = softmax_over(row[0], router)
        given_row = ReferenceRow(
            values=list(values),
            mass=[m / sum(exact) if sum(exact) > 0 else 0.0 for m in exact]
            if len(finite)
            else [0.0] * N_EXPERT,
            recorded=list(router),
            router=list(router),
            weights=weights,
            resident=at_hand,
            k=k,
            knobs=dict(step.knobs),
            learned=COUNTS.tolist(),
            state=state,
        )
        want = REROUTES[name](given_row)
        found = route.rerank(0, row, np.array([router], np.int32), np.array(resident))
        experts = found.experts[0].tolist()
        assert found.reranked == (0 if want is None else k)
        if want is None or set(want) == set(router):
            want = list(router)
        assert experts == want
        assert len(set(experts)) == k
        assert found.substituted == len(set(experts) - set(router))
        # What takes a slot is at hand and of a finite score, or was ranked next by the router.
        for slot, expert in enumerate(experts):
            if expert not in router and find_routing(name).stage == "swap":
                assert expert in at_hand
                assert np.isfinite(values[expert])
                assert router[slot] not in at_hand


def softmax_over(scores: np.ndarray, router: list[int]) -> list[Any]:
    """Weights of the picks in float32 steps, as the graph takes them: NaN spoils the row, infinite ones weigh 0."""
    finite = scores[np.isfinite(scores)]
    top = finite.max() if len(finite) else f32(0)
    parts = []
    for e in router:
        if np.isfinite(scores[e]):
            parts.append(f32(np.exp(np.float64(f32(scores[e] - top)))))
        else:
            parts.append(f32(np.nan) if np.isnan(scores[e]) else f32(0))
    total = f32(sum(float(p) for p in parts))
    with np.errstate(all="ignore"):
        return [f32(p / total) for p in parts]


@pytest.mark.parametrize("name", DROPS)
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    weights=st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5]), min_size=1, max_size=6),
    resident=flags,
)
def test_any_row_is_dropped_from_as_plain_python_does(name, data, weights, resident):
    knob = {"skip_ratio": "beta", "adaptive_k": "t"}[name]
    text = f"{name}:{knob}={data.draw(st.floats(0, 1, width=32))}"
    route, step = live(text, k=len(weights)), parse_route(text).steps[0]
    row, experts = np.array([weights], f32), np.arange(len(weights), dtype=np.int32)[None]
    want = DROPS[name](list(row[0]), dict(step.knobs), None)
    want[int(np.argmax(row))] = False
    none = np.zeros((2, N_EXPERT), f32)
    found = route.drop(0, none[:1], experts, row, np.array(resident), decode=True)
    assert (found.dropped[0].tolist() if found is not None else [False] * len(want)) == want
    two = route.drop(0, none, experts.repeat(2, 0), row.repeat(2, 0), np.array(resident), decode=True)
    assert (two is None) == (found is None)
    if found is not None and two is not None:
        for one, many in zip(found, two, strict=True):
            assert one[0].tobytes() == many[0].tobytes() == many[1].tobytes()


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=N_EXPERT, max_size=N_EXPERT), min_size=2, max_size=5
    ),
    gating=st.sampled_from(["logits", "sigmoid"]),
)
def test_mass_is_the_same_for_one_row_as_for_many(rows, gating: Gating):
    scores = np.array(rows, f32)
    picks = np.argsort(-scores, axis=1, kind="stable")[:, :K].astype(np.int32)
    order = router_ranking(ranking_values(scores, "raw"), picks)
    many = mass_before(router_mass(scores, gating), order)
    for i in range(len(rows)):
        one = mass_before(router_mass(scores[i : i + 1], gating), order[i : i + 1])
        assert one.tobytes() == many[i : i + 1].tobytes()
