"""Device profiles: read back, refused, by hand, and one recording foretold from the profile of another machine."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.measure import measure
from simlab.judge.quality.law import recorded_cell
from simlab.judge.speed.device import DeviceProfile, costs_on, load_profile, profile_of
from simlab.judge.speed.moments import moments_of
from simlab.judge.speed.trace_time import read_latencies, timings_of_trace
from simlab.judge.speed.trace_time_cells import TokenWork, by_costs, fit_costs
from simlab.judge.speed.trace_time_reads import misses_of
from simlab.trace.provenance import trace_provenance
from simlab.trace.store import open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
ORIGINAL = TRACES / "original.trace"
SHIPPED = TRACES / "virtual-machine.profile.json"


def profile(**other) -> DeviceProfile:
    """One slice at a time, a millisecond each whatever its size."""
    given = {
        "device": "a phone", "model": None, "io_mode": "direct", "composition": "serial", "lanes": 1,
        "compute_ms_per_token": 40.0, "reads": ({"window_bytes": 1 << 30, "under_way": 1, "mean_us": 1000.0},),
        "compute_ms_per_miss": 0.5, "management_ms_per_token": 2.0, "management_ms_per_move": 0.25,
        "hand_over_us": 200.0, "share": 1.5, "pauses": 1.25, "drift": 0.1,
    }  # fmt: skip
    return DeviceProfile(**{**given, **other})


def work_of(trace) -> TokenWork:
    graph, misses = misses_of(trace)
    tokens = trace.tokens.filter((pl.col("phase") == 1) & (pl.col("turn") >= 0)).sort("graph").collect()
    return TokenWork(graph, misses, tokens["evictions"].to_numpy())


def test_a_cell_on_a_device_by_hand():
    """Every part from the profile: three slices an expert, one after the other."""
    trace = open_trace(ORIGINAL)
    numbers, work = measure(trace, recorded_cell(trace.header)), work_of(trace)
    found = by_costs(costs_on(profile(), trace, None), numbers, work, None)
    misses, moved = work.misses.sum(axis=1).mean(), work.moved.mean()
    batches = (work.misses > 0).sum(axis=1).mean()
    assert found.compute_ms == pytest.approx(1.25 * (40 + 0.5 * misses))
    assert found.management_ms == pytest.approx(1.25 * (2 + 0.25 * moved))
    assert found.read_wait_ms == pytest.approx(1.25 * (0.2 * batches + 1.5 * 3 * misses))
    assert found.bound == ("reads" if found.read_wait_ms > found.compute_ms else "compute")
    assert found.spread is not None
    assert found.spread.drift == 0.1
    fast = by_costs(costs_on(profile(share=0.1, hand_over_us=0.0), trace, None), numbers, work, None)
    assert fast.bound == "compute"


def test_the_shapes_of_the_trace_are_kept():
    """Compute grows along the context as it did, at the device's level; chance comes from the trace's tokens."""
    trace = open_trace(ORIGINAL)
    timed = fit_costs(trace, timings_of_trace(trace))
    assert timed is not None
    on = costs_on(profile(), trace, timed)
    assert on.compute.mean() == pytest.approx(40)
    assert np.corrcoef(on.compute, timed.compute)[0, 1] > 0.9
    assert on.pauses == pytest.approx(1.25)
    assert on.spread(work_of(trace), 0.0).chance > 0
    assert costs_on(profile(), trace, None).spread(work_of(trace), 0.0).chance == pytest.approx(0, abs=1e-12)


def test_a_trace_without_any_times():
    """Its experts are read in thirds of their bytes, in whole pages: 26,112 bytes as three windows of 16 KiB."""
    trace = open_trace(ORIGINAL)
    blind = dataclasses.replace(trace, reads=trace.reads.head(0))
    on = costs_on(profile(), blind, None)
    assert {(s.early, s.late, s.window_bytes) for s in on.reads.slices} == {(3, 0, 16384.0)}
    late = costs_on(profile(composition="overlapped"), blind, None)
    assert {(s.early, s.late) for s in late.reads.slices} == {(2, 1)}


def test_a_trace_and_its_own_profile(tmp_path):
    """The machine it was recorded on foretells the speed it had; kept and read back, the profile is the same."""
    trace = open_trace(ORIGINAL)
    timings = timings_of_trace(trace)
    timed = fit_costs(trace, timings)
    assert timed is not None
    made = profile_of(trace, timed, timings.composition, read_latencies(trace))
    numbers, work = measure(trace, recorded_cell(trace.header)), work_of(trace)
    found = by_costs(costs_on(made, trace, timed), numbers, work, None)
    assert found.wall_ms == pytest.approx(timings.wall_ms.mean(), rel=0.02)
    made.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == made
    # The one that is shipped was made in the same way, on a machine that no live check was known of.
    shipped = load_profile(SHIPPED)
    later = timed.at_another_moment(moments_of([]))
    made = profile_of(trace, later, timings.composition, read_latencies(trace))
    assert shipped.model == made.model
    for field in dataclasses.fields(DeviceProfile):
        value = getattr(shipped, field.name)
        if isinstance(value, float):
            assert value == pytest.approx(getattr(made, field.name)), field.name
    assert [dict(row) for row in shipped.reads] == [pytest.approx(dict(row)) for row in made.reads]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_profile": 2}, "is no device profile of version 1"),
        ({"lanes": None}, "field 'lanes': must be a whole number from 1"),
        ({"lanes": 2.5}, "field 'lanes': must be a whole number"),
        ({"io_mode": "cached"}, "field 'io_mode': must be direct or buffered"),
        ({"compute_ms_per_token": -1}, "field 'compute_ms_per_token': must be a number from 0"),
        ({"share": math.nan}, "field 'share': must be a number"),
        ({"share": True}, "field 'share': must be a number"),
        ({"reads": []}, "field 'reads': must list at least one size"),
        ({"reads": [3]}, "field 'reads[0]': is not an object"),
        ({"reads": [{"window_bytes": 4096, "under_way": 1}]}, "field 'reads[0].mean_us': must be a number"),
        ({"bandwidth": 3}, "field 'bandwidth': is not known"),
        ({"model": 3}, "field 'model': must be text or null"),
    ],
)
def test_profiles_that_are_refused(tmp_path, change, said):
    path = tmp_path / "p.json"
    profile().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as refused:
        load_profile(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_profile(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load_profile(tmp_path / "p.json")
    (tmp_path / "p.json").write_text('{"device_profile": 1, "device": "x"}')
    with pytest.raises(InputError, match="field 'io_mode': is missing"):
        load_profile(tmp_path / "p.json")


def test_compute_of_another_model():
    with pytest.raises(InputError, match=r"its compute is of other\.gguf"):
        costs_on(profile(model="other.gguf"), open_trace(ORIGINAL), None)
    # The file's name does not count where the digest is known.
    digest = trace_provenance(open_trace(ORIGINAL).header).model
    costs_on(profile(model="other.gguf", model_digest=digest), open_trace(ORIGINAL), None)
    with pytest.raises(
        InputError, match=r"--device: its compute: is not of the model of .* \(model another, not "
    ):
        costs_on(profile(model_digest="another"), open_trace(ORIGINAL), None)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    out = tmp_path / "p.json"
    assert main(["time", str(ORIGINAL), "--profile-out", str(out)]) == 0
    assert "108.970 tokens/s" in capsys.readouterr().out
    assert main(["time", str(ORIGINAL), "--profile-out", str(out)]) == 2
    assert "exists already; add --force" in capsys.readouterr().err
    slower = dataclasses.replace(load_profile(out), device="slow", share=10.0)
    slower.save(out)
    words = ["time", str(ORIGINAL), "--device", str(out), "--budget", "2cycles", "--margin", "0,0.15"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["device"] == "slow"
    assert found["cells"][0]["bound"] == "reads"
    assert found["cells"][0]["read_wait_ms"] > 5 * 5.22
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "Cells foretold (decode, simulated) for slow" in shown
    assert main([*words, "--check"]) == 2
    assert "--check: is of this machine" in capsys.readouterr().err
    (cell,) = build_cells(budgets=["2cycles"])
    assert found["cells"][0]["numbers"]["evict"] == cell.evict
