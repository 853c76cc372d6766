"""The figures a trace says were measured while it was recorded: by hand, and beside a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from route_files import metrics_lines, route_lines, write_lines
from test_trace_store import HEADER, LAYERS, WIDTH, written

from simlab.cli.main import main
from simlab.trace.importer import import_files
from simlab.trace.measured import Measured, measured, measured_text
from simlab.trace.store import Trace, TraceWriter, open_trace

MIB = 1 << 20


def with_steps(folder: Path, **columns: list[Any]) -> Trace:
    """A trace with these rows in its tokens table, all decode steps of turn 0 unless they say otherwise."""
    n = len(next(iter(columns.values())))
    columns = {"turn": [0] * n, "phase": [1] * n, "graph": list(range(n)), "step": list(range(n))} | columns
    with TraceWriter(folder, HEADER, WIDTH) as writer:
        for graph in range(n):
            where = {name: columns[name][graph : graph + 1] for name in ("turn", "phase", "graph", "step")}
            for layer in LAYERS:
                ids = np.array([[0, 1]], np.int32)
                writer.add("routing", {**where, "layer": [layer], "pos_in_graph": [0], "router_experts": ids})
        writer.add("tokens", columns)
    return open_trace(folder)


def test_figures_by_hand(tmp_path: Path) -> None:
    """A prefill and a throw-away step are left out, and steps where a figure is unknown do not count for it."""
    trace = with_steps(
        tmp_path / "t.trace",
        turn=[-1, 0, 0, 0, 0],
        phase=[1, 0, 1, 1, 1],
        wall_ns=[9, 9, 4_000_000, None, 6_000_000],
        read_wait_ns=[9, 9, 1_000_000, 3_000_000, None],
        lookups=[9, 9, 10, 10, None],
        hits=[9, 9, 5, 10, 7],
        read_bytes=[9, 9, MIB, 0, 2 * MIB],
        substituted=[9, 9, 1, 2, 0],
    )
    assert measured(trace) == Measured(
        tok_s=200.0, wall_ms_per_token=5.0, read_wait_ms_per_token=2.0, compute_ms_per_token=None, hit_rate=0.75,
        read_mib=3.0, read_mib_per_token=1.0, window_mib_per_token=None, substituted=3, dropped=None,
    )  # fmt: skip
    text = (
        "200.00 tok/s, 2.00 ms/token waiting for reads, 75.0 % of lookups hit, 3.0 MiB read, 1.00 MiB/token, "
    )
    assert measured_text(measured(trace)) == text + "3 slots substituted"


@pytest.mark.parametrize("columns", [{"phase": [0, 0]}, {"token": [1, 2]}])
def test_nothing_measured(columns: dict[str, list[int]], tmp_path: Path) -> None:
    found = measured(with_steps(tmp_path / "t.trace", **columns))
    assert set(found) == {None}
    assert measured_text(found) == ""


def test_no_steps_at_all(tmp_path: Path) -> None:
    assert set(measured(open_trace(written(tmp_path / "t.trace", graphs=0)))) == {None}


def test_imported_metrics_are_shown_beside_a_replay_and_in_info(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_lines(tmp_path / "r.csv", route_lines()), write_lines(tmp_path / "m.csv", metrics_lines())]
    folder = import_files([str(file) for file in files], str(tmp_path / "t.trace"))
    steps = open_trace(folder).tokens.filter(pl.col("phase") == 1).collect()
    wall_ms = steps["wall_ns"].drop_nulls().to_numpy() / 1e6
    tok_s = f"{1e3 / wall_ms.mean():.2f} tok/s"
    assert main(["info", str(folder)]) == 0
    assert f"measured    {tok_s}, " in capsys.readouterr().out
    assert main(["replay", str(folder), "--budget", "2cycles", "--by", "layer"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith(f"measured when it was recorded, decode: {tok_s}")
    )
