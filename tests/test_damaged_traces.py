"""Parts of a trace that are damaged, edited, or from a tool that writes no SHA-256: read, or refused by their name."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fuzz_traces import part_damaged
from test_trace_store import HEADER, WIDTH, add_graph, change_header, written

from simlab.cli.main import main
from simlab.errors import InputError, SimlabWarning
from simlab.scores import gate_numerators, ranking_values, router_mass
from simlab.trace import parts
from simlab.trace.header import read_header
from simlab.trace.store import TraceWriter, open_trace
from simlab.types import WeightRule

ROOT = Path(__file__).resolve().parent.parent
PART = "t.trace/routing/part-000001.parquet"


def no_child(*_: Any) -> None:
    raise AssertionError("a child process was asked")


def test_a_part_as_it_was_written_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "t.trace")
    listed = read_header(folder).part_sha256
    assert set(listed) == {f"{p.parent.name}/{p.name}" for p in folder.rglob("*.parquet")}
    monkeypatch.setattr(parts, "probe_parquet", no_child)
    assert open_trace(folder).n_rows == 6


@pytest.mark.parametrize("table", ["routing", "tokens"])
def test_any_damaged_byte_is_told(table: str, tmp_path: Path) -> None:
    """Refused where it cannot be read, warned of where it can."""
    folder = written(tmp_path / "t.trace")
    part = folder / table / "part-000001.parquet"
    whole = part.read_bytes()
    rng = random.Random(table)
    refused = 0
    for _ in range(40):
        damaged = part_damaged(rng, whole)
        part.write_bytes(damaged)
        if damaged == whole:
            continue
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                open_trace(folder)
            except InputError as error:
                assert f"{folder}/{table}" in str(error)  # noqa: PT017
                refused += 1
                continue
        assert [str(w.message).partition(":")[0] for w in told] == [str(part)]
    assert refused > 10
    part.write_bytes(whole)
    assert open_trace(folder).n_rows == 6


@pytest.mark.parametrize("content", [b"", b"not parquet at all", b"PAR1", b"PAR1\0\0\0\0PAR1", "cut", "page"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_part_that_cannot_be_read(
    content: bytes | str, listed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "t.trace")
    if not listed:
        change_header(folder, part_sha256="remove")
    part = tmp_path / PART
    whole = part.read_bytes()
    page = whole.find(b"\x28\xb5\x2f\xfd") + 4  # behind the first word of a zstd page
    damaged = {"cut": whole[:200], "page": whole[:page] + b"\xff" * 8 + whole[page + 8 :]}
    part.write_bytes(content if isinstance(content, bytes) else damaged[content])
    for words in (["info"], ["replay", "--budget", "1cycles"], ["curve"]):
        assert main([words[0], str(folder), *words[1:]]) == 2
        shown = capfd.readouterr().err
        assert shown.startswith(f"simlab: error: {part}: not a readable parquet file: "), shown
        assert shown.count("\n") == 1


def test_a_part_that_is_no_file(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    part = tmp_path / PART
    part.unlink()
    for make in (part.mkdir, lambda: os.mkfifo(part), lambda: part.symlink_to("nowhere")):
        make()
        with pytest.raises(InputError, match=f"{PART}: not a file"):
            open_trace(folder)
        part.rmdir() if part.is_dir() else part.unlink()


def test_an_edited_part_is_used_and_told_of(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    for name in ("part-000000", "part-000001"):
        part = folder / f"routing/{name}.parquet"
        pl.read_parquet(part).with_columns(token=pl.lit(7, pl.Int32)).write_parquet(part)
    with pytest.warns(
        SimlabWarning, match=r"part-000000.parquet \(and 1 other parts\): not what was recorded"
    ):
        trace = open_trace(folder)
    assert trace.routing.collect()["token"].to_list() == [7, 7, 7, 7, None, None]
    # Who edits on purpose takes the SHA-256 out.
    change_header(folder, part_sha256=None)
    assert open_trace(folder).n_rows == 6


def test_parts_of_an_unfinished_recording_are_read_in_a_child_first(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.trace", HEADER, WIDTH)
    add_graph(writer, 0)
    writer.flush()
    with pytest.warns(SimlabWarning, match="1 complete graphs"):
        assert open_trace(writer.folder).n_rows == 2
    part = writer.folder / "tokens/part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"tokens/part-000000.parquet: not a readable parquet file"):
        open_trace(writer.folder)


def test_a_signalling_nan_is_a_nan() -> None:
    """Found by the search: NumPy warned of it, in two lines on stderr."""
    bits = np.array([[0x7FA00000, 0x3E000000, 0x3F000000]], np.uint32)
    gate = bits.view(np.float32)
    assert ranking_values(gate, "prob")[0, 0] == ranking_values(gate, "raw")[0, 0] == -np.inf
    for gating in ("softmax", "sigmoid", "logits"):
        mass = router_mass(gate, gating)
        assert mass[0, 0] == 0
        assert mass.sum() == pytest.approx(1)
    for rule in (WeightRule(), WeightRule(softmax_over_selected=True)):
        assert np.isnan(gate_numerators(gate, rule)).tolist() == [[True, False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--no-sha256"]])
def test_no_damage_ends_a_command_without_a_word(more: list[str]) -> None:
    """The search runs in a child, so that an abort of a reader fails this test and not the tests."""
    words = [sys.executable, str(ROOT / "tests/fuzz_traces.py"), str(ROOT / "traces/original.trace"), *more]
    done = subprocess.run(
        [*words, "--examples", "50"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "0 failures" in done.stdout
