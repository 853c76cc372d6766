"""The faster scan for LRU against the one that holds for every policy: the same caches after every batch."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Synthetic, biased_sigmoid, generate, make_header, raw_logits, without_scores

from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.policy import eviction, find_eviction, routing
from simlab.policy_check import check_policy
from simlab.replay import columns, devices, programs, recency_walk, routed_loop, routed_walk
from simlab.replay.batches import WORD, finite_words, score_order
from simlab.replay.bits import Passed, nth_one, pass_bits
from simlab.replay.recency import is_recency
from simlab.replay.routed_rows import compare_keys
from simlab.replay.routed_walk import RoutedWalk
from simlab.replay.run import Replayer
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers, Choice

ROUTES = ["substitute:L=0.1", "substitute:L=0.4", "substitute:L=1"]
BUDGETS = ["6%", "20%", "45%", "100%"]
# As few programs as possible: every route and scope of a test is one group of lanes.
few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def holds(replayer: Replayer, cell: int) -> tuple[list[tuple[int, int]], np.ndarray]:
    """A cell's entries from the least to the most recently used, and whether each is in RAM `[B, E]`.

    The compiled loop tells of entries in RAM alone.
    """
    for group in replayer.groups:
        if cell in group.indices:
            lane = group.indices.index(cell)
            if isinstance(group.walk, RoutedWalk):
                return held_by_loop(group.carry, lane, (group.shape.n_layers, group.shape.n_expert))
            stamp = np.asarray(group.carry["stamp"])
            if stamp.ndim == 3:
                stamp = stamp[..., lane]
            if "resident" in group.carry:
                resident = np.asarray(group.carry["resident"])[..., lane]
            else:
                resident = stamp > np.asarray(group.carry["mark"])[..., lane][:, None]
            seen = [(int(stamp[at]), at) for at in zip(*np.nonzero(stamp >= 0), strict=True)]
            return [(int(b), int(e)) for _, (b, e) in sorted(seen)], resident
    raise AssertionError(cell)


def held_by_loop(carry, lane: int, shape: tuple[int, int]) -> tuple[list[tuple[int, int]], np.ndarray]:
    tile, place = lane % len(carry["here"]), lane // len(carry["here"])
    live = np.unpackbits(carry["live"][tile, place].view(np.uint8), axis=-1, bitorder="little").astype(bool)
    entries = carry["log"][tile, place][live[:, : carry["log"].shape[-1]]]
    in_ram = carry["here"][tile] >> np.uint32(place) & 1 > 0
    return [(int(e) // shape[1], int(e) % shape[1]) for e in entries], in_ram.reshape(shape)


def agree(trace: Trace, cells: list[Cell], *, rows_at_once: int = 1, order: bool = True) -> Replayer:
    """Walk the loop, the scan and the plain scan side by side and compare caches and counters after every step."""
    plain = Replayer(trace, cells, plain=True)
    everyone = [Replayer(trace, cells), Replayer(trace, cells, loops=False)]
    assert all(group.walk is not None for fast in everyone for group in fast.groups)
    assert all(group.walk is None for group in plain.groups)
    while plain.advance(rows_at_once):
        for fast in everyone:
            assert fast.advance(rows_at_once)
            assert fast.row == plain.row
            for cell in range(len(cells)):
                (one, in_ram), (other, also) = holds(fast, cell), holds(plain, cell)
                assert np.array_equal(in_ram, also)
                if fast is everyone[0]:
                    one = [entry for entry in one if in_ram[entry]]
                    other = [entry for entry in other if in_ram[entry]]
                if order:
                    assert one == other
                else:
                    # A place of one cache says nothing about another's.
                    for layer in range(len(trace.header.moe_layers)):
                        assert [e for b, e in one if b == layer] == [e for b, e in other if b == layer]
            for mine, theirs in zip(fast.numbers(), plain.numbers(), strict=True):
                for phase in ("decode", "all"):
                    a, b = vars(getattr(mine, phase)), vars(getattr(theirs, phase))
                    for name, value in b.items():
                        close = value is not None and name in ("mass_displaced", "score_regret", "agreement")
                        assert a[name] == (pytest.approx(value, rel=1e-12, abs=1e-15) if close else value), (
                            name
                        )
    assert not any(fast.advance() for fast in everyone)
    return everyone[0]


def written(trace: Synthetic) -> Trace:
    folder = Path(tempfile.mkdtemp()) / "t"
    return trace.write(folder)


@pytest.fixture
def short_calls(monkeypatch):
    """Few batches in one call, so that places are counted anew again and again."""
    monkeypatch.setattr(recency_walk, "_BATCHES", {"routed": 4, "narrow": 4, "wide": 2})
    monkeypatch.setattr(routed_walk, "_MOST_ROWS", 4)


traces = st.builds(
    lambda sizes, **options: generate(make_header(n_layer=2, n_expert=40, k=3, sizes=sizes), **options),
    sizes=st.sampled_from([(1000,), (1000, 1500)]),
    seed=st.integers(0, 2**32 - 1),
    n_prefill=st.integers(0, 5),
    n_decode=st.integers(0, 12),
    n_turns=st.integers(1, 2),
    throw_away=st.booleans(),
    grain=st.sampled_from([0.0, 0.7]),
    last_layer_one_row=st.booleans(),
)


@pytest.mark.slow
@given(traces)
@few
def test_substitution_walks_alike(short_calls, trace):
    agree(written(trace), build_cells(budgets=BUDGETS, routes=ROUTES))


@pytest.mark.slow
@pytest.mark.parametrize("n_expert", [5, 70])
def test_any_number_of_experts(short_calls, n_expert):
    header = make_header(n_layer=3, n_expert=n_expert, k=4, sizes=(700, 900, 1100))
    for seed in range(2):
        trace = written(generate(header, seed=seed, n_prefill=3, n_decode=9, grain=0.5))
        agree(trace, build_cells(budgets=BUDGETS, routes=ROUTES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "routes",
    [
        ["substitute:L=0.2+drop_cold:F=1", "substitute:L=0.4+drop_cold:F=0.6,renorm=0"],
        ["drop_cold:F=1", "drop_cold:F=0.5"],
        ["skip_ratio:beta=0.5", "skip_ratio:beta=0.9"],
        ["resident_only"],
        ["top_k:k=2+substitute:L=0.3", "top_k:k=2+substitute:L=0.6"],
        ["top_k:k=6+substitute:L=0.3"],
    ],
    ids=lambda routes: routes[0],
)
def test_routes_walk_alike(routes):
    header = make_header(n_layer=2, n_expert=24, k=4, sizes=(1000, 1300))
    trace = written(generate(header, seed=3, n_prefill=4, n_decode=20, n_turns=2, throw_away=True))
    agree(trace, build_cells(budgets=BUDGETS, routes=routes), rows_at_once=3)


@pytest.mark.slow
def test_layers_of_their_own_walk_alike(short_calls):
    header = make_header(n_layer=3, n_expert=40, k=3, sizes=(1000, 1300))
    trace = written(generate(header, seed=5, n_prefill=4, n_decode=30))
    cells = build_cells(budgets=BUDGETS, routes=ROUTES, scope="per_layer")
    cells += build_cells(budgets=["4/layer", "9/layer"], routes=ROUTES)
    assert len(agree(trace, cells, order=False).groups) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scorer", [biased_sigmoid, raw_logits], ids=lambda s: s.__name__)
def test_other_scores_walk_alike(scorer):
    """-inf, inf and NaN among them, and rows that are all of one score."""

    def odd(rng, logits):
        found = dict(scorer(rng, logits))
        scores = found["scores"].copy()
        scores[rng.random(len(scores)) < 0.5] = -np.inf
        scores[rng.random(len(scores)) < 0.05] = np.nan
        scores[rng.random(len(scores)) < 0.02] = np.inf
        if rng.random() < 0.1:
            scores[:] = 0.25
        return found | {"scores": scores}

    header = make_header(
        n_layer=2, n_expert=24, k=4, gating="sigmoid" if scorer is biased_sigmoid else "logits", space="raw"
    )
    trace = written(generate(header, seed=4, n_decode=40, scorer=odd))
    agree(trace, build_cells(budgets=BUDGETS, routes=[*ROUTES, "resident_only"]), rows_at_once=2)


def test_scores_that_a_margin_makes_equal():
    """Two scores a last bit apart are one value after a bonus, and then the lower id has the slot."""

    def pairs(rng, logits):
        found = np.empty(len(logits), np.float32)
        # In a pair the higher id has the higher score; one score far below makes the bonus large.
        found[::2] = rng.permutation(len(logits) // 2) / 100
        found[1::2] = np.nextafter(found[::2], np.float32(1))
        found[-2:] = -8
        return {"scores": found}

    header = make_header(n_layer=1, n_expert=24, k=3, gating="logits", space="raw")
    trace = written(generate(header, seed=4, n_decode=120, scorer=pairs))
    agree(trace, build_cells(budgets=["20%", "45%", "70%"], routes=["substitute:L=0.05", "substitute:L=1"]))


@pytest.mark.slow
def test_without_scores_and_without_a_cache(short_calls):
    header = make_header(n_layer=2, n_expert=24, k=4)
    trace = written(without_scores(generate(header, seed=6, n_decode=20, last_layer_one_row=True)))
    agree(trace, build_cells(budgets=[*BUDGETS, "off"], routes=["original"]))


def test_one_layer_one_expert_per_token_and_no_decode():
    header = make_header(n_layer=1, n_expert=4, k=1)
    agree(written(generate(header, n_prefill=0, n_decode=9)), build_cells(budgets=BUDGETS, routes=ROUTES))
    agree(written(generate(header, n_decode=0)), build_cells(budgets=BUDGETS, routes=ROUTES))


@pytest.mark.slow
def test_rows_are_decoded_in_blocks(monkeypatch):
    trace = written(generate(make_header(n_layer=2, n_expert=24, k=4), seed=9, n_decode=20))
    cells = build_cells(budgets=BUDGETS, routes=ROUTES)
    whole = agree(trace, cells, rows_at_once=11).numbers()
    monkeypatch.setattr(columns, "BLOCK_ROWS", 7)
    assert agree(trace, cells, rows_at_once=11).numbers() == whole


@pytest.mark.slow
def test_a_saved_state_goes_on(short_calls):
    trace = written(generate(make_header(n_layer=2, n_expert=40, k=3), seed=8, n_decode=30))
    cells = build_cells(budgets=BUDGETS, routes=ROUTES)
    whole = agree(trace, cells)
    part = Replayer(trace, cells)
    part.advance(41)
    again = Replayer.from_state(trace, cells, part.state())
    while again.advance(7):
        pass
    assert again.numbers() == whole.numbers()


def test_what_cannot_take_the_faster_scan():
    header = make_header(n_layer=2, n_expert=24, k=4)
    many = written(generate(header, tokens_per_decode_graph=2))
    one = written(generate(header))
    cells = build_cells(budgets=["20%"], routes=["substitute:L=.1"])
    walks = [Replayer(t, cells).groups[0].walk is not None for t in (many, one)]
    # Several tokens of one decode graph share a batch's residency.
    assert walks == [False, True]
    for cells in (
        build_cells(budgets=["20%"], routes=["cache_prior"]),
        build_cells(budgets=["20%"], routes=["swap_on_miss"]),
        build_cells(budgets=["20%"], routes=["drop_cold:prefill=1"]),
        build_cells(budgets=["20%"], evicts=["lfu"]),
        build_cells(budgets=["20%"], sequential=True),
    ):
        (group,) = Replayer(one, cells).groups
        assert not isinstance(group.walk, (recency_walk.RecencyWalk, RoutedWalk))


# -- its parts -----------------------------------------------------------------------------------------------


def test_lru_is_known_by_its_code():
    @eviction()
    def mine(xp, state, last_position, batch, knobs):
        return last_position

    @eviction()
    def backwards(xp, state, last_position, batch, knobs):
        return -last_position

    named = [is_recency(find_eviction(name)) for name in ("lru", "layer_lru", "fifo", "random", "clock")]
    assert named == [True, True, False, False, False]
    assert is_recency(mine)
    assert not is_recency(backwards)


@given(
    st.lists(st.lists(st.integers(0, 2**WORD - 1), min_size=3, max_size=3), min_size=1, max_size=8),
    st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_the_nth_set_bit(lanes, n):
    words = np.array(lanes, np.uint32).T
    found = np.asarray(nth_one(words, np.full((1, words.shape[1]), n, np.int32)))[0]
    for lane, place in enumerate(found):
        ones = [i for i in range(3 * WORD) if words[i // WORD, lane] >> (i % WORD) & 1]
        assert place == ones[n] if n < len(ones) else place >= 3 * WORD


@given(
    st.lists(st.integers(0, 2**WORD - 1), min_size=6, max_size=6),
    st.integers(1, 400),
    st.integers(0, 120),
)
@settings(max_examples=100, deadline=None)
def test_the_watermark_passes_as_little_as_it_must(bits, over, last):
    """Two lines of entries of 2 and 5 units, three words each; the window starts at word 4."""
    second = [b & ~a for a, b in zip(bits[:3], bits[3:], strict=True)]
    window = np.array([bits[:3], second], np.uint32)[..., None]
    start = Passed(*(np.array([x], np.int32) for x in (4 * WORD - 1, over, 7)))
    limit = np.array([4 * WORD + last], np.int32)
    sizes, first = np.array([2, 5], np.int32), np.array([4], np.int32)
    moved = pass_bits(window, sizes, first, start, limit)
    freed = gone = end = 0
    for place in range(3 * WORD):
        for line, size in enumerate((2, 5)):
            if window[line, place // WORD, 0] >> (place % WORD) & 1 and freed < over:
                freed, gone, end = freed + size, gone + 1, place
    if freed < over:
        end = 3 * WORD - 1
    assert int(moved.over[0]) == over - freed
    assert int(moved.evicted[0]) == 7 + gone
    assert int(moved.mark[0]) == min(4 * WORD + end, 4 * WORD + last)


@pytest.mark.parametrize("n_expert", [5, 32, 70])
def test_score_order_is_that_of_a_stable_sort(n_expert):
    rng = np.random.default_rng(n_expert)
    values = rng.normal(size=(40, n_expert)).round(1).astype(np.float32) + np.float32(0)
    values[rng.random(values.shape) < 0.1] = -np.inf
    values[rng.random(values.shape) < 0.05] = np.inf
    order, ranked = score_order(values)
    assert order.shape[1] % WORD == 0
    for row, ids, told in zip(values, order, ranked, strict=True):
        best = np.lexsort((np.arange(n_expert), -row))
        assert (ids[:n_expert] == best).all()
        assert ((told & 0xFFFFFFFF) == [*best, *[n_expert] * (len(told) - n_expert)]).all()
        back = (told >> 32).astype(np.int32).view(np.float32)
        assert (back[:n_expert] == row[best]).all()
        assert (back[n_expert:] == -np.inf).all()
    words = finite_words(ranked)[..., None] >> np.arange(WORD, dtype=np.uint32) & 1
    finite = np.isfinite(np.take_along_axis(values, order[:, :n_expert].astype(int), axis=1))
    assert (words.reshape(len(values), -1)[:, :n_expert] == finite).all()
    assert not words.reshape(len(values), -1)[:, n_expert:].any()


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "scan"])
@pytest.mark.slow
def test_lanes_on_several_devices_are_those_on_one(loops, monkeypatch):
    trace = written(generate(make_header(n_layer=2, n_expert=24, k=4), seed=2, n_decode=12))
    cells = build_cells(budgets=BUDGETS, routes=[*ROUTES, "substitute:L=0.7"])
    assert devices.n_parts(len(cells)) == min(len(jax.local_devices()), 2)
    spread = finished(Replayer(trace, cells, loops=loops))
    monkeypatch.setattr(devices, "_FEWEST", len(cells) + 1)
    monkeypatch.setattr(routed_walk, "_FEWEST", len(cells) + 1)
    monkeypatch.setattr(programs, "_PROGRAMS", OrderedDict())
    assert devices.n_parts(len(cells)) == 1
    one = Replayer(trace, cells, loops=loops)
    assert finished(one) == spread
    if loops:
        assert len(one.groups[0].carry["here"]) == 1


def finished(replayer: Replayer) -> list[CellNumbers]:
    while replayer.advance():
        pass
    return replayer.numbers()


def test_many_lanes_are_those_of_few():
    """More than fit a tile, of sizes that do not divide: as a few at a time, which a tile holds."""
    trace = written(generate(make_header(n_layer=2, n_expert=64, k=4), seed=11, n_decode=30, n_prefill=3))
    budgets = ["6%", "9%", "20%", "33%", "45%", "70%", "100%"]
    cells = build_cells(budgets=budgets, margins=[f"{i / 40:.3f}" for i in range(1, 11)])
    many = Replayer(trace, cells)
    found = finished(many)
    assert len(many.groups[0].carry["here"]) == 3
    for start in range(0, len(cells), 14):
        assert finished(Replayer(trace, cells[start : start + 14])) == found[start : start + 14]


@pytest.mark.slow
def test_a_cache_of_more_entries_than_two_bytes_count(monkeypatch):
    """A loop for wider numbers, which a model of more experts than that would have."""
    trace = written(generate(make_header(n_layer=2, n_expert=24, k=4), seed=9, n_decode=40))
    cells = build_cells(budgets=BUDGETS, routes=ROUTES)
    narrow = finished(Replayer(trace, cells))
    monkeypatch.setattr(routed_loop, "_NEVER_16", 90)
    wide = Replayer(trace, cells)
    assert wide.groups[0].carry["last"].dtype == np.uint32
    assert finished(wide) == narrow


@pytest.mark.parametrize("k", [1, 3, 8])
def test_keys_are_compared_as_one_by_one(k):
    """How many of those not in RAM go before one in RAM, for keys of few values, so that many are equal."""
    rng = np.random.default_rng(k)
    expert = np.stack([rng.permutation(20) for _ in range(60)]).astype(np.uint16)
    outside = -np.sort(-rng.integers(0, 60, (60, 1, 20)), axis=2)
    key = np.stack([outside, np.maximum(outside + 5, outside)], axis=2).astype(np.float32)
    key[::7, :, :, 15:] = -np.inf
    reach, before, is_plain = compare_keys(key, np.ones((60, 1), bool), expert, k)
    assert 0 < is_plain.mean() < 1
    for row in range(60):
        out, inside = key[row, 0]
        least = min(out[k - 1], inside[k - 1])
        assert reach[row, 0] == max((out >= least).sum(), (inside >= least).sum())
        # Best first, and of equal ones the lower id: a list in order keeps its order so.
        if is_plain[row, 0]:
            n_out, n_in = (out >= least).sum(), (inside >= least).sum()
            for kind, n in ((out, n_out), (inside, n_in)):
                assert list(np.lexsort((expert[row, :n], -kind[:n]))) == list(range(n))
            for rank in range(n_in):
                better = [
                    (out[other], -int(expert[row, other])) > (inside[rank], -int(expert[row, rank]))
                    for other in range(n_out)
                    if other != rank
                ]
                mine = before[row, 0, rank]
                assert sum(better) == mine - (rank < min(mine, n_out))


@pytest.mark.parametrize("needs", [set(), {"scores", "rank"}], ids=["nothing", "rank too"])
def test_ordered_is_for_scores_alone(needs):
    with pytest.raises(InputError, match="only a rerank policy that needs scores and nothing else"):

        @routing("rerank", needs=needs, ordered=True)
        def wrong(xp, candidates, row, state, knobs):
            return Choice(value=candidates.value), state


def upside_down(xp, candidates, row, state, knobs):
    return Choice(value=-candidates.value), state


def of_residency_alone(xp, candidates, row, state, knobs):
    """The lower ids of those in RAM, of which the best two scores say nothing."""
    return Choice(value=xp.where(candidates.resident, 1, 0)), state


def shutting_out(xp, candidates, row, state, knobs):
    """As `resident_only`, but also where fewer than k are in RAM: then the lower ids of the others."""
    return Choice(value=xp.where(candidates.resident, candidates.value, xp.float32("-inf"))), state


@pytest.mark.parametrize(
    "function", [upside_down, of_residency_alone, shutting_out], ids=lambda f: f.__name__
)
def test_a_policy_that_is_not_ordered_as_it_says_is_refused(function):
    check_policy(routing("rerank", needs={"scores"})(function))
    with pytest.raises(InputError, match="ordered"):
        check_policy(routing("rerank", needs={"scores"}, ordered=True)(function))


@pytest.mark.slow
def test_a_shipped_trace_walks_alike():
    trace = open_trace(Path(__file__).parents[1] / "traces" / "original.trace")
    cells = build_cells(budgets=["0.6cycles", "1.2cycles", "2cycles", "60%"], margins=["0.05", "0.15", "0.6"])
    agree(trace, cells, rows_at_once=200)
