"""A sweep killed half-way goes on from its finished groups, to the same table; a changed one is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import generate, make_header

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.cli.output import cells_from_frame, cells_to_frame
from simlab.errors import InputError, SimlabWarning
from simlab.replay.groups import Group, check, merged, run_here, split
from simlab.replay.parts import Parts, describe
from simlab.replay.run import sweep
from simlab.trace.store import open_trace

OPTIONS = ["--budget", "6/layer,8/layer,10/layer", "--margin", "0,.1", "--evict", "lru,lfu"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "t.trace"
    return generate(make_header(), n_decode=12).write(folder)


@pytest.fixture(scope="module")
def cells():
    return build_cells(budgets=["6/layer", "8/layer", "10/layer"], margins=["0", ".1"], evicts=["lru", "lfu"])


@pytest.fixture(scope="module")
def numbers(trace, cells):
    return sweep(trace, cells)


# -- groups --------------------------------------------------------------------------------------------------


@given(st.integers(1, 13), st.integers(1, 3))
@settings(deadline=None)
def test_groups_hold_every_cell_of_every_trace_once_and_no_more_than_they_may(size, n_traces):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simlab.replay.groups._sensible", lambda *_: 100)
        cells = build_cells(
            budgets=["2cycles", "3cycles"], margins=["0", ".1"], evicts=["lru", "lfu", "belady"]
        )
        groups = split([None] * n_traces, cells, size)  # type: ignore[list-item]
    held = sorted((g.trace, place) for g in groups for place in g.places)
    assert held == [(t, p) for t in range(n_traces) for p in range(len(cells))]
    assert max(len(g.places) for g in groups) <= size


def test_a_small_sweep_is_one_group_and_a_long_one_is_not(trace, cells):
    assert len(split([trace], cells)) == 1
    long = dataclasses.replace(trace, n_rows=100_000_000)
    many = build_cells(budgets=["2cycles"], margins=[str(i / 200) for i in range(200)])
    assert [len(g.places) for g in split([long], many)] == [64, 64, 64, 8]
    # A future under a lossy routing keeps columns for every row and cell.
    foretold = [dataclasses.replace(c, evict="belady") for c in many]
    assert max(len(g.places) for g in split([long], foretold)) == 1


def test_groups_give_what_one_pass_gives(trace, cells, numbers):
    groups = split([trace], cells, 5)
    assert len(groups) > 2
    shares = []
    ran = list(run_here([trace], cells, groups, progress=shares.append))
    assert merged(ran[::-1], 1, len(cells)) == [numbers]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_later_group_is_refused_before_the_first_one_runs(trace, cells):
    check([trace], cells, None)
    blind = dataclasses.replace(trace, header=dataclasses.replace(trace.header, gating=None))
    with pytest.raises(InputError, match="substitute needs the router's scores"):
        check([blind], cells, None)


def test_numbers_survive_the_table(cells, numbers):
    assert cells_from_frame(cells_to_frame(numbers), cells) == numbers


# -- parts ---------------------------------------------------------------------------------------------------


def run_cli(trace, out, *more):
    return main(["sweep", str(trace.path), *OPTIONS, "--out", str(out), "--group", "3", *more])


def half_done(trace, cells, out):
    """The folder of a sweep of which two groups are finished."""
    groups = split([trace], cells, 3)
    with Parts(out, describe([trace], cells, None), groups, force=False) as parts:
        for group, found in run_here([trace], cells, groups[:2]):
            parts.save(group, found)
    return parts.folder


def test_finished_groups_are_not_redone(trace, cells, numbers, tmp_path, capsys, monkeypatch):
    out = tmp_path / "s.parquet"
    folder = half_done(trace, cells, out)
    again = []

    def counted(trace, some, **options):
        again.append(len(some))
        return sweep(trace, some, **options)

    monkeypatch.setattr("simlab.replay.groups.sweep", counted)
    # Groups stay as they were begun, whatever --group says now.
    assert run_cli(trace, out, "--group", "1") == 0
    assert again == [3, 3]
    assert "2 of 4 groups of cells are done" in capsys.readouterr().err
    assert pl.read_parquet(out).equals(cells_to_frame(numbers))
    assert not folder.exists()


def test_a_damaged_part_is_run_again_and_said(trace, cells, numbers, tmp_path):
    out = tmp_path / "s.parquet"
    folder = half_done(trace, cells, out)
    (folder / "group-00001.parquet").write_bytes(b"PAR1 torn")
    (folder / ".simlab-0123456789abcdef.tmp").write_bytes(b"half")
    groups = split([trace], cells, 3)
    with Parts(out, describe([trace], cells, None), groups, force=False) as parts:
        with pytest.warns(SimlabWarning, match="group-00001.parquet: cannot be read"):
            assert parts.load(groups[1], [cells[i] for i in groups[1].places]) is None
        assert parts.load(groups[0], [cells[i] for i in groups[0].places]) == [
            numbers[i] for i in groups[0].places
        ]
    assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))


def test_another_sweep_is_refused_in_one_line(trace, cells, tmp_path, capsys):
    out = tmp_path / "s.parquet"
    folder = half_done(trace, cells, out)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert run_cli(trace, out, "--prefetch", "previous_token:K=1") == 2
    assert "the cell options have changed" in capsys.readouterr().err
    assert run_cli(trace, out, "--train", "50%") == 2
    assert "--train has changed" in capsys.readouterr().err
    other = generate(make_header(), n_decode=12, seed=5).write(tmp_path / "other.trace")
    assert run_cli(other, out) == 2
    error = capsys.readouterr().err
    assert "the trace has changed" in error
    assert len(error.strip().splitlines()) == 1
    assert before == {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    # A copy of the same recording is the same recording.
    shutil.copytree(trace.path, tmp_path / "copy.trace")
    assert run_cli(open_trace(tmp_path / "copy.trace"), out) == 0
    # --force replaces the parts of another sweep, and goes on with its own.
    half_done(trace, cells, out.with_name("f.parquet"))
    assert run_cli(other, out.with_name("f.parquet"), "--force") == 0
    assert pl.read_parquet(tmp_path / "f.parquet").equals(cells_to_frame(sweep(other, cells)))


def test_a_manifest_of_something_else_is_refused(trace, tmp_path, capsys):
    folder = tmp_path / "s.parquet.parts"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"other": 1}))
    assert run_cli(trace, tmp_path / "s.parquet") == 2
    assert "is not of simlab sweep" in capsys.readouterr().err


def test_two_sweeps_do_not_share_a_folder(trace, cells, tmp_path):
    out = tmp_path / "s.parquet"
    words, groups = describe([trace], cells, None), [Group(0, tuple(range(len(cells))))]
    with (
        Parts(out, words, groups, force=False),
        pytest.raises(InputError, match="another command is writing it"),
    ):
        Parts(out, words, groups, force=True)
    Parts(out, words, groups, force=False).__exit__()


def test_what_somebody_else_put_into_the_folder_stays(trace, cells, tmp_path):
    folder = half_done(trace, cells, tmp_path / "s.parquet")
    (folder / "notes.txt").write_text("mine")
    assert run_cli(trace, tmp_path / "s.parquet") == 0
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_several_traces_are_one_table_with_their_names(trace, cells, numbers, tmp_path, capsys):
    other = generate(make_header(), n_decode=12, seed=5).write(tmp_path / "other.trace")
    out = tmp_path / "s.parquet"
    words = ["sweep", str(trace.path), str(other.path), *OPTIONS]
    assert main([*words, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    table = pl.read_parquet(out)
    assert table.columns[0] == "trace"
    for name, expected in ((str(trace.path), numbers), (str(other.path), sweep(other, cells))):
        mine = table.filter(pl.col("trace") == name).drop("trace")
        assert mine.equals(cells_to_frame(expected))
        assert [t["decode"]["hits"] for t in told if t["trace"] == name] == [n.decode.hits for n in expected]
    assert main([*words, "--chart", str(tmp_path / "c.html")]) == 2
    assert "--chart: shows one trace" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_started_again(trace, cells, numbers, tmp_path):
    """A real process, SIGKILL, and the same command line again."""
    out = tmp_path / "s.parquet"
    words = ["sweep", str(trace.path), *OPTIONS, "--out", str(out), "--group", "2"]
    command = [sys.executable, "-c", "from simlab.cli.main import entry; entry()", *words]
    folder = Path(f"{out}.parts")
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(list(folder.glob("group-*.parquet"))) < 2:
            assert killed.poll() is None, "ended before it could be killed"
            assert time.monotonic() < deadline, "no group finished"
            time.sleep(0.005)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    finished = {p.name: p.stat().st_mtime_ns for p in folder.glob("group-*.parquet")}
    assert 2 <= len(finished) < 6
    assert not out.exists()
    # What is finished is linked elsewhere, since the folder goes when the table is whole.
    for name in finished:
        os.link(folder / name, tmp_path / name)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{len(finished)} of 6 groups of cells are done" in done.stderr
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in finished} == finished
    assert pl.read_parquet(out).equals(cells_to_frame(numbers))
    assert not folder.exists()
