"""A recorded phone decode under five policies, against the curve its authors' own script computed."""

from __future__ import annotations

import csv

import pytest
from route_files import shared

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.replay.run import sweep

NAMES = {"lru": "lru", "lfu": "lfu", "layer": "layer_lru", "layerlfu": "layer_lfu", "belady": "belady"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    out = tmp_path_factory.mktemp("bmoe") / "qwen.trace"
    assert main(["import", str(shared("bmoe/qwen.route.csv")), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("theirs", NAMES)
def test_decode_hit_rates_are_those_of_the_authors_script(trace, theirs):
    """At every budget of the file; it gives three decimals of a per cent, and so exactly these."""
    rows = [
        row
        for row in csv.DictReader(shared("bmoe/qwen-curve.csv").read_text().splitlines())
        if row["policy"] == theirs
    ]
    assert len(rows) == 11
    cells = build_cells(budgets=[f"{row['budget_mib']}MiB" for row in rows], evicts=[NAMES[theirs]])
    for row, numbers in zip(rows, sweep(trace, cells), strict=True):
        assert numbers.decode.hit_rate is not None
        found = 100 * numbers.decode.hit_rate
        assert found == pytest.approx(float(row["hit_pct_decode"]), abs=0.001), row["budget_mib"]
