"""The time model of a trace: its tokens and reads by hand, and cells foretold against what was recorded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from synthetic import make_header

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.speed.trace_time import read_latencies, timings_of_trace
from simlab.judge.speed.trace_time_cells import Foreteller, replay_work
from simlab.trace.store import Trace, TraceWriter, open_trace

ORIGINAL = Path(__file__).resolve().parent.parent / "traces" / "original.trace"
MS, MIB = 1_000_000, 1 << 20


def made(folder: Path, *, wait=(30, 50, 0), graphs=(0, 1, 2), io_mode="direct", **columns) -> Trace:
    """A prefill graph, two tokens of 100 ms that read, and one of 20 ms that reads nothing.

    The reads of graph 1 are under way from 0 to 30 ms, one alone, then two; those of graph 2 from 100 to 150.
    """
    header = dataclasses.replace(make_header(), io_mode=io_mode)
    n = 4
    tokens = {
        "turn": [0] * n,
        "graph": [9 if g is None else g for g in (0, *(g + 1 for g in graphs))],
        "phase": [0, 1, 1, 1],
        "step": list(range(n)),
        "wall_ns": [500 * MS, 100 * MS, 100 * MS, 20 * MS],
        "compute_ns": [1] * n,
        "read_wait_ns": [9 * MS, *(w * MS for w in wait)],
        "management_ns": [1 * MS, 10 * MS, 20 * MS, 5 * MS],
        "read_bytes": [7, 3 * MIB, 4 * MIB, 0],
    }
    reads = {
        "turn": [0] * 4, "graph": [0, 1, 1, 2], "phase": [0, 1, 1, 1], "step": [0, 1, 1, 2], "layer": [0] * 4,
        "window_bytes": [MIB] * 4, "start_ns": np.array([0, 0, 10, 100]) * MS,
        "latency_ns": np.array([900, 20, 20, 50]) * MS,
    }  # fmt: skip
    with TraceWriter(folder, header, 4) as writer:
        writer.add("tokens", {**tokens, **columns})
        writer.add("reads", reads)
    return open_trace(folder)


def test_timings_by_hand(tmp_path):
    timings = timings_of_trace(made(tmp_path / "t.trace"))
    assert timings.composition == "serial"
    assert timings.wall_ms.tolist() == [100, 100, 20]
    assert timings.exposed_ms.tolist() == [30, 50, 0]
    assert timings.compute_ms.tolist() == pytest.approx([60, 30, 15])
    assert timings.read_mib.tolist() == [3, 4, 0]
    assert timings.age.tolist() == [0, 1, 2]
    assert timings.faults is None


def test_reads_beside_compute_are_overlapped(tmp_path):
    trace = made(tmp_path / "t.trace", wait=(5, 7, 0))
    assert timings_of_trace(trace).composition == "overlapped"


def test_tokens_without_a_time_are_left_out(tmp_path):
    trace = made(tmp_path / "t.trace", wall_ns=[1, None, 100 * MS, 20 * MS], major_faults=[0, 1, 2, 3])
    timings = timings_of_trace(trace)
    assert (timings.left_out, timings.age.tolist()) == (1, [1, 2])
    assert timings.faults is not None
    assert timings.faults.tolist() == [2, 3]
    none = made(tmp_path / "none.trace", wall_ns=[None] * 4)
    with pytest.raises(InputError, match="no decoded token has wall_ns"):
        timings_of_trace(none)


def test_tokens_that_share_a_graph_are_refused(tmp_path):
    with pytest.raises(InputError, match="share a decode graph"):
        timings_of_trace(made(tmp_path / "t.trace", graphs=(0, 0, 1)))


def test_latencies_by_hand(tmp_path):
    """Prefill reads are left out; of the others the second starts while the first is under way."""
    found = read_latencies(made(tmp_path / "t.trace"))
    assert found.select("window_bytes", "under_way", "reads", "median_us").rows() == [
        (MIB, 1, 2, 35_000.0),
        (MIB, 2, 1, 20_000.0),
    ]
    assert found["mib_s"].to_list() == pytest.approx([1 / 0.035, 2 / 0.02])


def test_latencies_against_a_slow_count():
    trace = open_trace(ORIGINAL)
    reads = trace.reads.filter(pl.col("phase") == 1).collect()
    start = reads["start_ns"].to_numpy()
    end = start + reads["latency_ns"].to_numpy()
    some = np.arange(0, len(start), 97)
    alive = (start[None, :] <= start[some, None]) & (end[None, :] > start[some, None])
    assert alive.sum(axis=1).max() <= 4  # the engine's lanes
    found = read_latencies(trace)
    assert found["reads"].sum() == reads.height
    assert found["under_way"].max() == 4
    for window, count in found.select("window_bytes", "under_way").rows():
        of_size = alive.sum(axis=1)[reads["window_bytes"].to_numpy()[some] == window]
        share = found.filter(pl.col("window_bytes") == window)
        here = share.filter(pl.col("under_way") == count)["reads"].item() / share["reads"].sum()
        assert (of_size == count).mean() == pytest.approx(here, abs=0.12)


def test_buffered_reads_are_no_flash_timings(tmp_path, capsys):
    trace = made(tmp_path / "t.trace", io_mode="buffered")
    assert main(["time", str(trace.path)]) == 0
    out = capsys.readouterr().out
    assert "buffered reads, not flash timings" in out
    assert "under way at its start, not flash timings" in out
    assert main(["time", str(trace.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flash_timings"] is False


def test_cell_options_need_a_trace(tmp_path, capsys):
    path = tmp_path / "m.csv"
    path.write_text("step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct\n1,1,100,30,70,1048576,0\n")
    assert main(["time", str(path), "--top-k", "2"]) == 2
    assert "--top-k: needs a trace" in capsys.readouterr().err


def without_read_times(folder: Path) -> Trace:
    """The recorded trace as an import would have it: every token's times, but none of its reads."""
    trace = open_trace(ORIGINAL)
    with TraceWriter(folder, trace.header, trace.width) as writer:
        for name in ("routing", "tokens"):
            table = getattr(trace, name).collect()
            writer.add(name, {column: table[column] for column in table.columns})
    return open_trace(folder)


@pytest.mark.slow
def test_cells_foretold_from_bytes_alone(tmp_path, capsys):
    """The recorded cell comes out as it was recorded, and fewer reads are faster by what they take."""
    trace = without_read_times(tmp_path / "t.trace")
    teller = Foreteller(trace, None)
    timings, model = teller.timings, teller.model
    cells = build_cells(budgets=["2cycles"], margins=["0", "0.15"])
    same, less = map(teller.foretell, replay_work(trace, cells))
    assert same.spread is None
    assert same.wall_ms == pytest.approx(timings.wall_ms.mean())
    assert same.read_wait_ms == pytest.approx(timings.exposed_ms.mean())
    assert same.tok_s == pytest.approx(1e3 / same.wall_ms)
    assert same.tok_s_interval.low < same.tok_s < same.tok_s_interval.high
    mib = [f.numbers.decode.read_mib_per_token for f in (same, less)]
    assert mib[0] is not None
    assert mib[1] is not None
    slope = model.exposed.slope + model.management.slope + model.compute.slope
    # Exact but for tokens that read nothing: they wait for nothing.
    assert same.wall_ms - less.wall_ms == pytest.approx(slope * (mib[0] - mib[1]), rel=0.02)
    words = ["time", str(trace.path), "--budget", "2cycles", "--margin", "0,0.15"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["tok_s"] for cell in shown] == pytest.approx([same.tok_s, less.tok_s])
    assert [cell["numbers"]["margin"] for cell in shown] == [0, 0.15]
    assert main(words) == 0
    assert "from bytes alone" in capsys.readouterr().out
    # A training part ages the run but is not foretold.
    (part,) = replay_work(trace, cells[:1], train="50%")
    found = teller.foretell(part)
    teller.model = dataclasses.replace(model, warm_up=100.0, warm_up_tokens=50.0)
    slower = teller.foretell(part)
    n = found.numbers.decode.tokens
    assert 100 < n < timings.n
    ages = np.arange(timings.n - n, timings.n)
    assert model.warm_up == 0
    assert slower.wall_ms - found.wall_ms == pytest.approx(100 * np.exp(-ages / 50).mean())


def test_a_check_needs_cells(capsys):
    assert main(["time", str(ORIGINAL), "--check"]) == 2
    assert "--check: runs cells live; name some" in capsys.readouterr().err
