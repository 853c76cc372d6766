"""What holds for every trace, on random small ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Synthetic, generate, make_header

from simlab.cells import build_cells
from simlab.replay.run import Replayer
from simlab.replay.slots import slot_table
from simlab.types import CellNumbers, Scope

# One shape and six lanes throughout, so that two programs serve all examples.
HEADER = make_header(n_layer=2, n_expert=8, k=2)

traces = st.builds(
    lambda **options: generate(HEADER, **options),
    seed=st.integers(0, 2**32 - 1),
    n_prefill=st.integers(0, 5),
    n_decode=st.integers(0, 25),
    n_turns=st.integers(1, 2),
    tokens_per_decode_graph=st.integers(1, 3),
    throw_away=st.booleans(),
    grain=st.sampled_from([0.0, 0.7]),
)
few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def run(trace: Synthetic, cells: list) -> tuple[Replayer, list[CellNumbers]]:
    with tempfile.TemporaryDirectory() as folder:
        replayer = Replayer(trace.write(Path(folder) / "t"), cells, detail=True)
        while replayer.advance():
            pass
    return replayer, replayer.numbers()


@given(traces)
@few
def test_more_budget_never_reads_more_under_lru(trace):
    """LRU is a stack algorithm; entries of one size, the router's own routing, in either scope."""
    scopes: tuple[Scope, ...] = ("global", "per_layer")
    for scope in scopes:
        _, numbers = run(
            trace, build_cells(budgets=[f"{n}%" for n in (10, 20, 40, 60, 80, 100)], scope=scope)
        )
        reads = [n.all.read_mib for n in numbers]
        assert reads == sorted(reads, reverse=True)
        assert numbers[-1].all.capacity_misses == 0
        assert numbers[-1].all.evictions == 0


@given(traces)
@few
def test_counters_add_up(trace):
    cells = build_cells(
        budgets=["5%", "30%", "3/layer"],
        routes=[f"substitute:L={L}+drop_cold:F={F}" for L, F in ((0.3, 0), (0.1, 1))],
    )
    replayer, numbers = run(trace, cells)
    for index, cell in enumerate(numbers):
        table = slot_table(replayer, index)
        for part in (cell.decode, cell.all):
            assert part.hits + part.misses == part.lookups
            assert part.cold_misses + part.capacity_misses == part.misses
            # All entries are of one size, and what was missed before and is missing now was evicted.
            assert part.read_mib == part.misses * 1000 / 2**20
            assert part.rereads == part.capacity_misses
            assert part.lookups <= part.slots - part.dropped
            assert (part.substituted or 0) <= part.reranked <= part.slots
        counted = table.filter(table["turn"] >= 0)
        assert counted["read_bytes"].sum() == cell.all.misses * 1000
        assert counted["dropped"].sum() == cell.all.dropped
        assert counted.height == cell.all.slots


@given(traces)
@few
def test_margin_and_threshold_of_zero_change_nothing(trace):
    budgets = [f"{n}%" for n in (5, 10, 20, 40, 60, 90)]
    idle, changed = run(trace, build_cells(budgets=budgets, routes=["substitute:L=0+drop_cold:F=0"]))
    plain, original = run(trace, build_cells(budgets=budgets))
    for index, (a, b) in enumerate(zip(changed, original, strict=True)):
        assert a.decode == b.decode
        assert a.all == b.all
        assert slot_table(idle, index).equals(slot_table(plain, index))
        for part in (a.decode, a.all):
            assert part.mass_displaced in (0.0, None)
            assert part.agreement in (1.0, None)
