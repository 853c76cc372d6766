"""The scans for cells that route alike against the one that holds for every policy, and the reference."""

from __future__ import annotations

import numpy as np
import pytest
from eviction_cases import as_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import reference_replay
from synthetic import Synthetic, from_batches, generate, make_header

from simlab.cells import build_cells
from simlab.policy import builtin_policies, eviction, find_eviction
from simlab.replay import keyed_walk, ranked_walk, shared_walk
from simlab.replay.accesses import find_accesses
from simlab.replay.run import Replayer
from simlab.replay.shared_order import shared_order
from simlab.replay.shared_walk import SharedWalk
from simlab.trace.store import Trace
from simlab.types import Cell, EvictionPolicy, Knob, Scope

LOOPED = (
    "lru", "layer_lru", "lfu", "layer_lfu", "weighted_lfu", "belady", "belady_bypass", "random", "lfru",
)  # fmt: skip
BUDGETS = ["off", "6%", "20%", "45%", "100%"]


def resident(replayer: Replayer, cell: int) -> np.ndarray:
    """bool `[B, E]`: a cell's entries in RAM."""
    group = next(g for g in replayer.groups if cell in g.indices)
    return np.asarray(group.carry["resident"])[..., group.indices.index(cell)]


def agree(trace: Trace, cells: list[Cell], *, rows_at_once: int) -> None:
    """Walk the plain scan, the loops and the scans for shared routes side by side, and compare caches and counters
    after every few rows."""
    plain = Replayer(trace, cells, plain=True)
    others = [Replayer(trace, cells), Replayer(trace, cells, loops=False)]
    assert all(isinstance(group.walk, SharedWalk) for fast in others for group in fast.groups)
    assert all(group.walk is None for group in plain.groups)
    while plain.advance(rows_at_once):
        for fast in others:
            assert fast.advance(rows_at_once)
            assert fast.row == plain.row
            for cell, (mine, theirs) in enumerate(zip(fast.numbers(), plain.numbers(), strict=True)):
                assert np.array_equal(resident(fast, cell), resident(plain, cell)), (cells[cell], fast.row)
                for phase in ("decode", "all"):
                    a, b = vars(getattr(mine, phase)), vars(getattr(theirs, phase))
                    for name, value in b.items():
                        close = value is not None and name in ("mass_displaced", "score_regret", "agreement")
                        want = pytest.approx(value, rel=1e-12, abs=1e-15) if close else value
                        assert a[name] == want, (cells[cell], fast.row, name)
    assert not any(fast.advance() for fast in others)


@pytest.fixture
def short_calls(monkeypatch):
    """Few batches in one call, so that ranks are handed out anew again and again, and fewer with keys at a time."""
    for module in (shared_walk, ranked_walk, keyed_walk):
        monkeypatch.setattr(module, "STEPS", 7)
    monkeypatch.setattr(shared_walk, "LOOP_ROWS", 4)
    monkeypatch.setattr(keyed_walk, "_AT_ONCE", 200)


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
@pytest.mark.parametrize("evicts", [("lfu", "belady_bypass"), ("random:seed=3", "lookahead:m=9")])
@given(trace=traces)
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_orders_walk_alike(short_calls, tmp_path_factory, evicts, trace: Synthetic):
    written = trace.write(tmp_path_factory.mktemp("t") / "t")
    agree(written, build_cells(budgets=BUDGETS, evicts=evicts), rows_at_once=5)


@pytest.mark.slow
def test_narrower_and_wider_routes_walk_alike(tmp_path):
    """Other widths than the recorded one, per layer and global, more than 32 words of ranks, three entry sizes."""
    header = make_header(n_layer=3, n_expert=70, k=4, sizes=(700, 900, 1100))
    trace = generate(header, seed=3, n_prefill=9, n_decode=30, grain=0.4).write(tmp_path / "t")
    cells = build_cells(budgets=BUDGETS, evicts=["weighted_lfu"], routes=["top_k:k=2", "top_k:k=6"])
    cells += build_cells(budgets=BUDGETS, evicts=["layer_lfu", "random"], scope="per_layer")
    agree(trace, cells, rows_at_once=40)


@pytest.mark.parametrize("scope", ["global", "per_layer"])
def test_counts_as_the_reference(tmp_path, scope: Scope):
    """Every count of a run by the slow reference, without a second scan of ours: all policies that loops walk, entries
    of two sizes, budgets from none and below one token's to all."""
    header = make_header(n_layer=2, n_expert=70, k=3, sizes=(900, 1300))
    trace = generate(header, seed=11, n_prefill=5, n_decode=30, grain=0.5)
    evicts = [*LOOPED, "lfu_decay:half_life=40", "lookahead:m=9"]
    if scope == "global":
        evicts = [e for e in evicts if not e.startswith("layer")]
    budgets = ["off", "3%", "15%", "50%", "100%"]
    cells = build_cells(budgets=budgets, evicts=evicts, scope=scope)
    replayer = Replayer(trace.write(tmp_path / "t"), cells)
    assert all(isinstance(group.walk, SharedWalk) for group in replayer.groups)
    while replayer.advance():
        pass
    some = 0
    for cell, numbers in zip(cells, replayer.numbers(), strict=True):
        golden = reference_replay(trace, as_reference(cell, trace, evict_of(cell)))
        for name in ("lookups", "hits", "misses", "cold_misses", "evictions", "rereads"):
            assert getattr(numbers.decode, name) == getattr(golden.decode, name), (cell, name)
            want = getattr(golden.decode, name) + getattr(golden.prefill, name)
            assert getattr(numbers.all, name) == want, (cell, name)
        some += numbers.all.evictions
    assert some > 0


def evict_of(cell: Cell) -> str:
    """A cell's eviction policy as `--evict` takes it."""
    knobs = ",".join(f"{name}={value:g}" for name, value in cell.evict_knobs.items())
    return f"{cell.evict}:{knobs}" if knobs else cell.evict


def test_by_hand(tmp_path):
    """Three places, LFU: 1, 2, 3 and 4 leave (the sequence of `test_eviction.BY_HAND`)."""
    sequence = [0, 1, 2, 0, 3, 0, 1, 4, 0, 2, 1]
    trace = from_batches(make_header(n_layer=1, n_expert=5, k=1), [[e] for e in sequence])
    replayer = Replayer(trace.write(tmp_path / "t"), build_cells(budgets=["3/layer"], evicts=["lfu"]))
    told = []
    while replayer.advance(1):
        told.append("".join(str(e) for e in np.flatnonzero(resident(replayer, 0)[0])))
    assert isinstance(replayer.groups[0].walk, SharedWalk)
    assert told == ["0", "01", "012", "012", "023", "023", "013", "014", "014", "012", "012"]
    assert replayer.numbers()[0].all.hits == 4


def test_it_stops_and_goes_on_from_arrays(tmp_path):
    trace = generate(make_header(n_layer=2, n_expert=12, k=2), seed=5, n_prefill=3, n_decode=40)
    trace = trace.write(tmp_path / "t")
    cells = build_cells(budgets=["20%", "50%"], evicts=["lfu", "random"])
    whole, part = Replayer(trace, cells), Replayer(trace, cells)
    while whole.advance():
        pass
    part.advance(33)
    later = Replayer.from_state(trace, cells, part.state())
    while later.advance():
        pass
    assert later.numbers() == whole.numbers()


@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(-1, 3), min_size=3, max_size=3)),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None, derandomize=True)
def test_accesses_by_hand(rows: list[tuple[bool, list[int]]]):
    """Rows with holes and with an expert in several slots, batches of any length, against lists."""
    starts = [True, *(start for start, _ in rows[1:])]
    layer = [sum(starts[: i + 1]) % 2 for i in range(len(rows))]
    accesses, uses = [], []
    batch = place = 0
    seen: list[tuple[int, int]] = []
    for number, (_, experts) in enumerate(rows):
        batch += starts[number]
        of_row = {}
        for slot, expert in enumerate(experts):
            if expert >= 0:
                of_row[4 * layer[number] + expert] = (slot, place)
                place += 1
        for entry, (slot, at) in sorted(of_row.items(), key=lambda item: item[1]):
            turn = sum(entry == before for _, before in seen)
            first = (batch, entry) not in seen
            seen.append((batch, entry))
            accesses.append((entry, number, slot, at, first, turn))
    for access, (of_batch, entry) in enumerate(seen):
        if (of_batch, entry) not in seen[access + 1 :]:
            before = max((u for u, (other, _, _) in enumerate(uses) if other == entry), default=-1)
            uses.append((entry, access, before))
    ids = np.array([experts for _, experts in rows], np.int32)
    found = find_accesses(ids, np.array(layer, np.int32), np.array(starts), 2, 4)
    assert list(zip(*(x.tolist() for x in found[:6]), strict=True)) == accesses
    assert list(zip(found.closing.tolist(), found.before.tolist(), strict=True)) == [u[1:] for u in uses]
    of_batch = [seen[u[1]][0] for u in uses]
    assert np.diff(found.begins).tolist() == [of_batch.count(b + 1) for b in range(batch)]
    assert found.n_slots == place


# -- which policies have a fixed order -----------------------------------------------------------------------


def use(xp, state, access, knobs):
    return {"n": state["n"] + access.first}


def use_of_hits(xp, state, access, knobs):
    return {"n": state["n"] + access.hit}


def use_of_rank(xp, state, access, knobs):
    return {"n": state["n"] + xp.sum(access.first)}


def use_unused_hit(xp, state, access, knobs):
    _ = access.hit & access.first
    return {"n": xp.where(access.first, state["n"] + 1, state["n"])}


def policy(touch, key=lambda xp, state, last_position, batch, knobs: state["n"], **options) -> EvictionPolicy:
    knobs = {"scale": Knob(2, 1, 9, integer=True)}
    return eviction(touch=touch, state={"n": 0}, knobs=knobs, **options)(key)


@pytest.mark.parametrize(
    ("declared", "order"),
    [
        (policy(use), "fixed"),
        (policy(use_unused_hit), "fixed"),
        (policy(use, lambda xp, state, last_position, batch, knobs: state["n"] * knobs.scale), "fixed"),
        (policy(use, lambda xp, state, last_position, batch, knobs: state["expert"], needs={"ids"}), "fixed"),
        (policy(use_of_hits), None),
        (policy(use_of_rank), None),
        (policy(use, lambda xp, state, last_position, batch, knobs: state["n"] - batch), "moving"),
        (policy(use, lambda xp, state, last_position, batch, knobs: xp.cumsum(state["n"])), None),
        (policy(use, lambda xp, state, last_position, batch, knobs: xp.exp(state["n"])), None),
        (
            policy(use, lambda xp, state, last_position, batch, knobs: 1 * state["in_pass"], needs={"pass"}),
            None,
        ),
    ],
)
def test_the_order_is_read_off_the_code(declared, order):
    assert shared_order(declared) == order


def test_the_order_of_the_shipped_policies():
    known = {name: shared_order(find_eviction(name)) for name in builtin_policies() if is_key(name)}
    assert {n for n, order in known.items() if order == "fixed"} == {
        "lru", "layer_lru", "lfu", "layer_lfu", "weighted_lfu", "belady", "belady_bypass"
    }  # fmt: skip
    assert {n for n, order in known.items() if order == "moving"} == {
        "random",
        "lfru",
        "lfu_decay",
        "lookahead",
    }
    # What came in by a miss, or by look-ahead, may differ by lane.
    assert {n for n, order in known.items() if order is None} == {"fifo", "least_stale"}


def is_key(name: str) -> bool:
    policy = builtin_policies()[name]
    return isinstance(policy, EvictionPolicy) and policy.key is not None
