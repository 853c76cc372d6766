"""Belady on a finished run: by hand, against every eviction there is, against a script of other authors."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from route_files import shared
from synthetic import from_batches, generate, make_header

from simlab.cells import MIB, build_cells, resolve_budget
from simlab.replay.columns import TraceColumns
from simlab.replay.lookups import find_lookups, original_ids
from simlab.replay.optimum import optimal_hits
from simlab.replay.run import sweep
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, open_trace
from simlab.types import ResolvedBudget, Scope


def belady(trace: Trace, total: int) -> np.ndarray:
    columns = TraceColumns(trace)
    lookups = find_lookups(columns, original_ids(columns))
    return optimal_hits(columns, lookups, ResolvedBudget(total, (total,), per_layer=False))


def test_belady_by_hand(tmp_path: Path) -> None:
    """One layer, k = 1, room for two: 0 1 2 0 1 2. LRU hits nothing, Belady 0 and one more.

    2 arrives: of 0 (used next) and 1, 1 leaves. 0 hits. 1 is read: 0 is never used again and leaves. 2 hits.
    """
    header = make_header(n_layer=1, n_expert=4, k=1, sizes=(10,))
    trace = from_batches(header, [[0], [1], [2], [0], [1], [2]]).write(tmp_path / "t")
    assert belady(trace, 20).tolist() == [False, False, False, True, False, True]
    assert belady(trace, 30).tolist() == [False] * 3 + [True] * 3
    assert belady(trace, 10).tolist() == [False] * 6


def most_hits(batches: list[set[int]], room: int) -> int:
    """The most hits of any eviction at all, by trying every set that could stay after each batch."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for batch in batches:
        following: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            others = resident - batch
            hits += len(resident & batch)
            for n in range(min(len(others), max(room - len(batch), 0)) + 1):
                for kept in itertools.combinations(sorted(others), n):
                    after = frozenset(kept) | batch
                    following[after] = max(following.get(after, 0), hits)
        best = following
    return max(best.values())


@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=9), st.integers(1, 5)
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_eviction_hits_more_than_belady(batches: list[set[int]], room: int) -> None:
    header = make_header(n_layer=1, n_expert=6, k=3, sizes=(1,))
    padded = [sorted(b) + [-1] * (3 - len(b)) for b in batches]
    with tempfile.TemporaryDirectory() as folder:
        found = belady(from_batches(header, padded).write(Path(folder) / "t"), room)
    assert found.sum() == most_hits(batches, room)


def test_belady_on_the_recorded_qwen_decode(tmp_path: Path) -> None:
    """Hit rates and bytes of the script of the engine's authors, at eleven budgets."""
    path = import_files([str(shared("bmoe/qwen.route.csv"))], str(tmp_path / "q.trace"), False)
    trace = open_trace(path)
    columns = TraceColumns(trace)
    lookups = find_lookups(columns, original_ids(columns))
    decode = columns.decode[lookups.row]
    for line in shared("bmoe/qwen-curve.csv").read_text().split()[1:]:
        budget, policy, hit_all, hit_decode, read = line.split(",")
        if policy != "belady":
            continue
        total = int(budget) * MIB
        hit = optimal_hits(columns, lookups, ResolvedBudget(total, (total,), per_layer=False))
        assert 100 * hit.mean() == pytest.approx(float(hit_all), abs=6e-4)
        assert 100 * hit[decode].mean() == pytest.approx(float(hit_decode), abs=6e-4)
        assert lookups.size[~hit].sum() / MIB == pytest.approx(float(read), abs=0.06)


@pytest.mark.parametrize("scope", ["global", "per_layer"])
def test_the_policy_called_belady_has_as_many_hits(scope: Scope, tmp_path: Path) -> None:
    """Entries of one size: the replayer's policy breaks ties another way, which changes no count."""
    pytest.importorskip("simlab.policies.belady", reason="this checkout has no eviction policy 'belady'")
    header = make_header(n_layer=3, n_expert=12, k=3, sizes=(10,))
    trace = generate(header, n_prefill=5, n_decode=30, n_turns=2, throw_away=True).write(tmp_path / "t")
    columns = TraceColumns(trace)
    lookups = find_lookups(columns, original_ids(columns))
    counted = columns.counted[lookups.row]
    decode = counted & columns.decode[lookups.row]
    cells = build_cells(budgets=["0.5cycles", "1.2cycles", "2cycles"], evicts=["belady"], scope=scope)
    for numbers in sweep(trace, cells):
        budget = resolve_budget(numbers.cell.budget, scope, header, header.n_expert_used)
        hit = optimal_hits(columns, lookups, budget)
        assert (hit & decode).sum() == numbers.decode.hits
        assert (hit & counted).sum() == numbers.all.hits
