"""Eviction policies: hand-worked cases, an independent reference slot for slot, and what holds for all of them."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
from eviction_cases import (
    CAUSAL,
    FUTURE,
    assert_evicts_as_reference,
    hits_of,
    live_hits,
    lookup_hits,
    of_name,
    shipped,
    unequal,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import from_batches, generate, make_header

from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.policy import builtin_policies, find_eviction
from simlab.replay.run import replay, sweep
from simlab.replay.slots import replay_slots
from simlab.routing import knob_values
from simlab.types import Entry, EvictionPolicy

# -- by hand -------------------------------------------------------------------------------------------------

ONE = make_header(n_layer=1, n_expert=5, k=1)
SEQUENCE = [0, 1, 2, 0, 3, 0, 1, 4, 0, 2, 1]
BY_HAND = {
    # Three entries; the victims, from the miss of 3 on, are in the comment.
    "lru": "00010100100",  # 1, 2, 3, 1, 4
    "layer_lru": "00010100100",
    "least_stale": "00010100100",
    "fifo": "00010000101",  # 0, 1, 2, 3, 0
    "lfu": "00010100101",  # 1, 2, 3, 4
    "layer_lfu": "00010100101",
    "lfru": "00010100101",  # 1 (1/4), 2 (1/5), 3 (1/4), 4 (1/3)
    "lfu_decay:half_life=1": "00010100100",  # 1, 2, 3, 1 (2^-8 + 2^-3 against 2^-2 of 4)
    "clock": "00010100100",  # 0 spared, 1; 2; 3; 0 spared, 1
    "sieve": "00010100100",  # 0 spared, 1; 2; 3; 1
    "slru": "00010100100",  # 0 is protected; 1, 2, 3, 1
    "belady": "00010110101",  # 2 (used again last), 3 (never), 4 (never, less recent than 0)
    "belady_bypass": "00010110111",  # 3 and 4 themselves
    "two_q": "00010000101",  # 0, 1, 2 (room to remember one: 0 and 1 are back in the main queue), 3, 4
    "s3fifo": "00010000101",  # 0 (used once), 1, 2 (0 and 1 are back in the main queue), 3, 4
    "arc": "00010100000",  # T1's 1; 1 is back, p 1: T1's 2; T2's 0; 0 is back, p 0: 3; p 1: T2's 1; p 0: 4
    "lirs": "00010110101",  # 0 and 1 are LIR; 2, 3, 4 pass through Q
    "wtinylfu": "00010100100",  # 1, 2; candidate 1 (2 uses) against 3 (1): 3; 1; candidate 2 against 4: 4
    "gdsf": "00010100100",  # 1 (worth 1), 2 (1), 3 (2, like 1 but older), 1 (2), 4 (3, like 2 but older)
    "lookahead:m=0": "00010100100",
    "lookahead:m=2": "00010110101",  # 2 is out of sight, 3, 4
}


@pytest.mark.parametrize("evict", BY_HAND)
def test_a_sequence_by_hand(evict):
    """The live cache and the reference, to which others hold the replay."""
    assert_by_hand(evict, "3/layer", from_batches(ONE, [[e] for e in SEQUENCE]), BY_HAND[evict])


def assert_by_hand(evict, budget, trace, want):
    def text(hits):
        return "".join(str(int(h)) for h in hits)

    assert text(hits_of(trace, budget, evict)) == want
    if "future" not in of_name(evict).needs:
        assert text(live_hits(trace, budget, evict)) == want


SIX = make_header(n_layer=1, n_expert=6, k=1)


@pytest.mark.parametrize(
    ("evict", "budget", "tokens", "want"),
    [
        ("lru", "3/layer", "000123450", "011000000"),
        # Used twice more, 0 moves to the main queue; 1, 2 and 3 leave.
        ("s3fifo", "3/layer", "000123450", "011000001"),
        # Uses in the first queue do not count: 0 leaves first, and is forgotten for 1.
        ("two_q", "3/layer", "000123450", "011000000"),
        # 2, 3 and 4 lose against 0, which has three uses.
        ("wtinylfu", "3/layer", "000123450", "011000001"),
        # As above, but all counts are halved at the sixth lookup; then 4 ties with 0, and leaves.
        ("wtinylfu:sample=2", "3/layer", "000123450", "011000001"),
        ("lru", "3/layer", "01210321", "00011000"),
    ],
)
def test_what_sets_a_policy_apart_by_hand(evict, budget, tokens, want):
    assert_by_hand(evict, budget, from_batches(SIX, [[int(e)] for e in tokens]), want)


def test_gdsf_evicts_large_entries_first():
    """8000 bytes: the 3000 byte entries 0, 1 and 2 of the second layer leave though the first layer's are older."""
    header = make_header(n_layer=2, n_expert=4, k=1, sizes=(1000, 3000))
    assert_by_hand("gdsf", "50%", from_batches(header, [[e] for e in (0, 1, 2, 0, 1)]), "0000001010")


def test_arc_and_lirs_survive_a_scan():
    """Two entries used again and again, then a scan of more than fits: LRU loses both, these keep them."""
    header = make_header(n_layer=1, n_expert=12, k=1)
    trace = from_batches(header, [[e] for e in (0, 1, 0, 1, 0, 1, 5, 6, 7, 8, 9, 10, 0, 1)])
    assert not any(live_hits(trace, "4/layer", "lru")[-2:])
    for evict in ("arc", "lirs"):
        assert all(live_hits(trace, "4/layer", evict)[-2:]), evict


def test_the_conformance_case(tmp_path):
    """policies.md: three layers, two entries each, 30 lookups, 12 hits, 18 misses, 12 evictions."""
    trace = from_batches(make_header(n_layer=3, n_expert=4, k=2), [[0, 1], [0, 2], [0, 1], [0, 3], [0, 1]])
    numbers = replay(trace.write(tmp_path / "t"), build_cells(budgets=["2/layer"])[0]).decode
    assert (numbers.lookups, numbers.hits, numbers.misses, numbers.evictions) == (30, 12, 18, 12)
    assert sum(live_hits(trace, "2/layer", "layer_lru")) == 12


def test_slru_protects_what_was_used_twice():
    """Five entries, four of them protected: 0 to 3 used twice survive a scan that LRU would lose them to."""
    header = make_header(n_layer=1, n_expert=12, k=1)
    trace = from_batches(header, [[e] for e in (0, 1, 2, 3, 0, 1, 2, 3, 5, 6, 7, 8, 9, 0, 1, 2, 3)])
    assert [sum(live_hits(trace, "5/layer", evict)) for evict in ("lru", "slru")] == [4, 8]


def test_slru_gives_up_protection_beyond_four_fifths():
    """Five entries: the fifth that is used twice takes the protection of the least recent, 0, which then goes."""
    header = make_header(n_layer=1, n_expert=12, k=1)
    trace = from_batches(header, [[e] for e in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0)])
    assert live_hits(trace, "5/layer", "slru") == [False] * 5 + [True] * 5 + [False] * 2


def test_random_by_hand(tmp_path):
    """The key itself, worked out with Python's integers."""

    def mixed(h):
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    policy = find_eviction("random")
    layer, expert = np.array([0, 1, 47], np.int32), np.array([5, 0, 127], np.int32)
    none = np.zeros(3, bool)
    entry = Entry(np.zeros(3), layer, expert, none, none, np.int64(7))
    key = policy.function(entry, (), knob_values(policy.knobs, {"seed": 3}))
    want = [mixed(mixed(mixed(mixed(3) ^ 7) ^ int(a)) ^ int(e)) for a, e in zip(layer, expert, strict=True)]
    assert key.tolist() == want


def test_a_decayed_count_halves_at_its_half_life():
    halved = importlib.import_module("simlab.policies.lfu").halved
    ages = np.arange(4000)
    for half_life in (0.5, 1, 3, 64, 777.25):
        found = halved(np.full(4000, 3.0), ages, np.float32(half_life))
        exact = 3.0 * 2.0 ** (-ages / half_life)
        near = exact > 1e-280
        np.testing.assert_allclose(found[near], exact[near], rtol=1e-12)
        assert (found[~near] < 1e-279).all()
    assert halved(np.ones(3), np.array([0, 64, 128]), np.float32(64)).tolist() == [1, 0.5, 0.25]


# -- the reference -------------------------------------------------------------------------------------------

NAMES = {p.name for p in builtin_policies().values() if isinstance(p, EvictionPolicy)}


def test_every_policy_is_tested_here():
    assert {n.partition(":")[0] for n in (*CAUSAL, *FUTURE, "static_pin")} == NAMES


SPECS = {
    name: [s for s in (*CAUSAL, *FUTURE) if s.partition(":")[0] == name] for name in NAMES - {"static_pin"}
}
"""What is tested of each policy, all of it in one program."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPECS))
def test_replays_as_the_reference_has_them(name, tmp_path):
    """A part of a shipped trace, and an odd trace of the same shape, which share a program."""
    scores, budgets = "weighted" in name, ["5%", "30%", "6/layer", "70%"]
    real, odd = shipped(3, 80, scores), unequal(64, 8, 25, scores)
    assert_evicts_as_reference(real, SPECS[name], budgets, tmp_path / "real")
    assert_evicts_as_reference(odd, SPECS[name], budgets, tmp_path / "odd")


@pytest.mark.parametrize("evict", ["lfu", "arc", "lookahead:m=9"])
def test_one_expert_at_a_time_as_the_reference_has_it(evict, tmp_path):
    budgets = ["5%", "30%", "4/layer", "70%"]
    assert_evicts_as_reference(unequal(), [evict], budgets, tmp_path / "t", sequential=True)


@pytest.mark.parametrize(("evict", "sequential"), [("lfu", False), ("slru", True), ("s3fifo", False)])
def test_lossy_routings_as_the_reference_has_them(evict, sequential, tmp_path):
    trace = generate(make_header(), seed=8, n_decode=30)
    budgets = ["30%", "5/layer", "50%", "2%"]
    route = "substitute:L=0.3"
    assert_evicts_as_reference(trace, [evict], budgets, tmp_path / "t", route=route, sequential=sequential)


# -- what holds for all --------------------------------------------------------------------------------------

traces = st.builds(
    lambda **options: generate(make_header(n_layer=2, n_expert=8, k=2, sizes=(1000, 600)), **options),
    seed=st.integers(0, 2**32 - 1),
    n_prefill=st.integers(0, 4),
    n_decode=st.integers(1, 20),
    tokens_per_decode_graph=st.integers(1, 2),
)
decodes = st.builds(
    lambda **options: generate(make_header(n_layer=2, n_expert=8, k=2), n_prefill=0, **options),
    seed=st.integers(0, 2**32 - 1),
    n_decode=st.integers(1, 30),
    tokens_per_decode_graph=st.integers(1, 2),
)
few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("evict", CAUSAL)
def test_a_live_cache_evicts_as_the_reference(evict):
    """And counts, keeps its budget, and lets none of a batch's own go."""
    for seed, budget in enumerate(["10%", "30%", "60%", "1/layer", "3/layer", "off"]):
        trace = unequal() if seed % 2 else generate(make_header(n_layer=2, n_expert=8, k=2), seed=seed)
        assert live_hits(trace, budget, evict) == hits_of(trace, budget, evict), budget


@given(trace=traces, budget=st.sampled_from(["10%", "30%", "3/layer"]), evict=st.sampled_from(list(CAUSAL)))
@few
def test_a_live_cache_evicts_as_the_reference_on_any_trace(trace, budget, evict):
    assert live_hits(trace, budget, evict) == hits_of(trace, budget, evict)


@given(trace=traces, evict=st.sampled_from(["lru", "lfu", "belady", "least_stale", "lfru"]))
@few
def test_more_budget_never_reads_more_of_a_stack_policy(trace, evict):
    equal = dataclasses.replace(trace, header=make_header(n_layer=2, n_expert=8, k=2))
    for budgets in (["10%", "30%", "50%", "80%", "100%"], [f"{n}/layer" for n in (1, 2, 4, 6, 8)]):
        hits = [lookup_hits(equal, budget, evict) for budget in budgets]
        assert hits == sorted(hits)


@given(trace=decodes, capacity=st.integers(4, 7), evict=st.sampled_from([*CAUSAL, "lookahead:m=9"]))
@few
def test_no_policy_beats_belady(trace, capacity, evict):
    """Entries of one size, a cache per layer that holds a batch, the router's own routing."""
    best = lookup_hits(trace, f"{capacity}/layer", "belady")
    assert lookup_hits(trace, f"{capacity}/layer", evict) <= best
    assert lookup_hits(trace, f"{capacity}/layer", "belady_bypass") >= best


# -- training, futures, one at a time: what is asked for and what is said -------------------------------------


def test_static_pin_by_hand(tmp_path):
    """Trained on the first half: 0 is picked three times, 1 twice. Two entries: 0 and 1 stay, 2 leaves at once."""
    header = make_header(n_layer=1, n_expert=4, k=1)
    trace = from_batches(header, [[e] for e in (0, 1, 0, 2, 1, 0, 2, 2, 1, 2, 0, 3)]).write(tmp_path / "t")
    cell = build_cells(budgets=["2/layer"], evicts=["static_pin"])[0]
    found = replay_slots(trace, cell, train="50%")
    assert found.slots["residency"].to_list() == [0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0]
    numbers = found.numbers
    # Only the second half counts: 2, 2, 1, 2, 0, 3.
    assert (numbers.decode.tokens, numbers.decode.lookups, numbers.decode.hits) == (6, 6, 2)
    assert numbers.decode.evictions == 4
    assert numbers.note == "trained on 50% of decode, not counted"
    same = replay(trace, cell, train="same")
    # 0 and 2 are picked four times each.
    assert (same.decode.tokens, same.decode.hits) == (12, 6)
    assert same.note is not None
    assert same.note.startswith("diagnostic")
    other = from_batches(header, [[3], [2], [3], [2]]).write(tmp_path / "other")
    taught = replay(trace, cell, train=str(other.path))
    assert (taught.decode.tokens, taught.decode.hits) == (12, 3)


def test_rows_that_teach_are_not_counted_in_any_cell(tmp_path):
    trace = generate(make_header(), seed=2).write(tmp_path / "t")
    cells = build_cells(budgets=["40%"], evicts=["lru", "static_pin"])
    whole = replay(trace, cells[0])
    lru, pinned = sweep(trace, cells, train="40%")
    assert lru.decode.tokens == pinned.decode.tokens == 15
    assert whole.decode.tokens == 25
    assert 0 < lru.decode.misses < whole.decode.misses
    assert lru.note == "40% of decode not counted"
    assert replay_slots(trace, cells[0], train="40%").numbers == lru


def test_static_pin_untrained_is_refused(tmp_path):
    trace = generate(make_header(), n_decode=3).write(tmp_path / "t")
    with pytest.raises(
        InputError, match=r"--evict static_pin: learns .* add --train 25%, OTHER.trace or same"
    ):
        replay(trace, build_cells(budgets=["40%"], evicts=["static_pin"])[0])


def test_the_optimum_of_a_lossy_routing_is_that_of_the_routing_lru_ran(tmp_path):
    trace = generate(make_header(), seed=4, n_decode=30).write(tmp_path / "t")
    lru, best, bypass = (
        replay_slots(trace, cell)
        for cell in build_cells(
            budgets=["40%"],
            routes=["substitute:L=0.3+drop_cold:F=0.5"],
            evicts=["lru", "belady", "belady_bypass"],
        )
    )
    assert lru.numbers.note is None
    for found in (best, bypass):
        assert found.numbers.note == "knows the future of the routing that lru ran"
        for name in ("router_expert", "expert", "dropped", "weight"):
            assert found.slots[name].equals(lru.slots[name]), name
        for name in ("lookups", "substituted", "dropped", "mass_displaced", "agreement"):
            assert getattr(found.numbers.decode, name) == getattr(lru.numbers.decode, name)
    misses = [f.numbers.all.misses for f in (bypass, best, lru)]
    assert misses == sorted(misses)
    assert misses[0] < misses[2]


def test_one_at_a_time_changes_the_numbers_and_says_so(tmp_path):
    """Capacity 2, batches {0,1},{2,0}: as batches 0 is a hit; one at a time 2 has pushed it out."""
    header = make_header(n_layer=1, n_expert=4, k=2)
    trace = from_batches(header, [[0, 1], [2, 0]]).write(tmp_path / "t")
    cells = build_cells(budgets=["2/layer"]) + build_cells(budgets=["2/layer"], sequential=True)
    together, apart = sweep(trace, cells)
    assert (together.decode.hits, apart.decode.hits) == (1, 0)
    assert together.note is None
    assert apart.note == "one expert at a time"


def test_a_scope_of_its_own_and_another_do_not_go_together(tmp_path):
    trace = generate(make_header(), n_decode=3).write(tmp_path / "t")
    cell = build_cells(budgets=["40%"], evicts=["layer_lfu"])[0]
    assert cell.scope == "per_layer"
    by_scope = build_cells(budgets=["40%"], evicts=["lfu"], scope="per_layer")[0]
    assert replay(trace, cell).all == replay(trace, by_scope).all
    with pytest.raises(InputError, match="--evict layer_lfu: has scope per_layer, this cell has global"):
        replay(trace, dataclasses.replace(cell, scope="global"))


def test_the_files_say_where_they_are_from():
    for policy in builtin_policies().values():
        if isinstance(policy, EvictionPolicy):
            assert policy.source, policy.name
            assert policy.function.__doc__, policy.name
            assert of_name(policy.name) is policy
