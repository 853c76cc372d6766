"""Fidelity on another engine: counts and totals by hand, refusals, and the stand-in program run as a subprocess."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from route_files import shared

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError, RunError
from simlab.judge.fidelity.errors import COUNTED, Counts, Off, errors
from simlab.judge.fidelity.external import (
    BinaryRun,
    _as_bytes,
    _even,
    _own_replays,
    _with_totals,
    binary_counts,
    whole_mib,
)
from simlab.judge.fidelity.grid import REPLAY, WHOLE, FidelityRow, Plan
from simlab.judge.scores.ppl import Text
from simlab.judge.stats import UNKNOWN
from simlab.record.engine import EMBEDDED_MODEL
from simlab.record.external import ExternalEngine, ExternalRun
from simlab.trace.importer import import_files
from simlab.trace.store import open_trace

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
ORIGINAL = Path(__file__).resolve().parent.parent / "traces" / "original.trace"


@pytest.fixture(scope="module")
def binary(tmp_path_factory) -> Path:
    """The stand-in as a program of its own, run by this Python."""
    path = tmp_path_factory.mktemp("bin") / "stand-in"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    path.chmod(0o755)
    return path


def counts(tokens: int, **of: float) -> Counts:
    """Counts alike at every token and in two layers."""
    given = {"lookups": 8, "misses": 3, "read_bytes": 300, "slots": 8, "substituted": 0, "dropped": 0} | of
    return Counts({name: np.full((tokens, 2), given[name]) for name in COUNTED})


def test_recorded_outputs_replay_as_they_were(tmp_path):
    """The engine's own run under dropping: its counts are its summary's, and its replay from itself is exact."""
    files = [str(shared(f"engine/{name}.csv")) for name in ("route", "metrics")]
    run = ExternalRun(open_trace(import_files(files, str(tmp_path / "t.trace"))))
    (cell,) = build_cells(budgets=["3MiB"], drops=["0.75"])
    live = binary_counts(run, cell)
    words = dict(w.split("=") for w in Path(files[1]).read_text().splitlines()[-1].split()[2:])
    assert live.n_tokens == int(words["tokens"])
    assert live.of["dropped"].sum() == int(words["experts_dropped"])
    assert live.of["slots"].sum() == int(words["experts_routed"])
    (replay,) = _own_replays(run, [cell])
    for name in ("misses", "read_bytes", "lookups", "dropped"):
        np.testing.assert_array_equal(replay.of[name], live.of[name])


def test_slots_of_a_margin_are_one_number():
    """90 of 320 slots: 28.1 % live beside 25 % of the replay, no interval; parts of the text keep nothing."""
    cells = build_cells(budgets=["3MiB"], margins=["0.1"])
    replay, live = counts(10, substituted=2), counts(10, substituted=np.nan)
    off = errors([replay], [live], paired=True)
    assert np.isnan(off.substituted.error)
    assert off.miss_rate.error == 0
    plan = Plan([Text("a", []), Text("b", [])], cells)
    runs = [[BinaryRun(live, 50)], [BinaryRun(live, 40)]]
    row = FidelityRow(REPLAY, cells[0], 1.9, None, WHOLE, off)
    found = _with_totals(row, plan, runs).errors.substituted
    assert found == Off(25.0, 28.125, -3.125, UNKNOWN)
    of_text = _with_totals(dataclasses.replace(row, text="b"), plan, runs).errors.substituted
    assert of_text.live == pytest.approx(25.0)
    layer = dataclasses.replace(row, part="layer 0")
    assert _with_totals(layer, plan, runs) is layer
    unsaid = [[BinaryRun(live, 50)], [BinaryRun(live, None)]]
    assert _with_totals(row, plan, unsaid) is row


def test_both_sides_are_of_the_same_tokens(binary):
    engine = ExternalEngine(binary, EMBEDDED_MODEL)
    ours, theirs = _even(engine, counts(9), counts(10))
    assert ours.n_tokens == theirs.n_tokens == 9
    with pytest.raises(RunError, match="decoded 12 tokens of a text that the replay has 10 of"):
        _even(engine, counts(10), counts(12))


class Tokenizer:
    """Two letters that make one token where they stand together."""

    def tokenize(self, content: bytes) -> list[int]:
        return [*content.replace(b"ab", b"c")]

    def detokenize(self, tokens) -> bytes:
        return bytes(tokens)

    def windowed(self, tokens: list[int]) -> list[int]:
        return tokens


def test_a_text_is_cut_where_it_reads_back_alike():
    """Cut after `a`, the text would be read as before; after `a`, `b` it would be read as `c`."""
    made: Tokenizer = Tokenizer()
    text = Text("t", list(b"xyzab"))
    assert _as_bytes(made, text).tokens == list(b"xyza")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InputError, match="--text t: its first 10 tokens are other tokens when read as a file"
    ):
        _as_bytes(made, Text("t", list(b"abcdefghij")))  # pyright: ignore[reportArgumentType]


def test_budgets_in_whole_mib():
    header = open_trace(ORIGINAL).header
    assert [whole_mib(b, header) for b in ("1.2cycles", "2cycles", "4cycles", "0.1cycles")] == [
        "2MiB", "3MiB", "6MiB", "1MiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine-binary", "{binary}"], "wants --text or --prompt"),
        (["--engine-binary", "{binary}", "--text", "t", "--prompt", "x"], "wants --text or --prompt"),
        (["--engine-binary", "{binary}", "--prompt", "x"], "-n: goes with --prompt"),
        (
            ["--engine-binary", "{binary}", "--prompt", "x", "-n", "9", "--margin", "0.1"],
            "needs the router's scores",
        ),
        (
            ["--engine-binary", "{binary}", "--prompt", "x", "-n", "9", "--free"],
            "--free: the engine binary has no",
        ),
        (["--engine-binary", "{binary}", "--text", "t", "--keep", "d"], "--keep: the engine binary has no"),
        (["--engine-binary", "{binary}", "--text", "t", "--engine-args", "'"], "--engine-args '"),
        (["--prompt", "x", "-n", "1"], "--prompt: goes with --engine-binary; without it texts are run"),
        ([], "--text: is missing"),
    ],
)
def test_what_the_command_refuses(binary, words, said, capsys):
    assert main(["fidelity", "--budget", "3MiB", *(w.format(binary=binary) for w in words)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_stand_in_beside_replays(binary, tmp_path, capsys, monkeypatch):
    """The stand-in runs simlab's engine, so both replays agree where both are; a margin is replayed on scores only."""
    monkeypatch.delenv("STAND_IN", raising=False)
    text = tmp_path / "b.txt"
    text.write_bytes(EMBEDDED_MODEL.with_name("text-b.txt").read_bytes()[:400])
    words = ["fidelity", "--engine-binary", str(binary), "--threads", "1", "--json", "--text", str(text)]
    words += [
        "--tokens",
        "40",
        "--budget",
        "3MiB",
        "--route",
        "substitute:L=.1",
        "--route",
        "drop_cold:F=.75",
    ]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "warning" not in shown.err
    rows = json.loads(shown.out)
    whole = {(r["compared"], r["route"]): r for r in rows if r["part"] == "all" and r["text"] == "b"}
    assert set(whole) == {("L1-L2", "substitute"), ("L1-L2", "drop_cold"), ("own-L2", "drop_cold")}
    margin, of_simlab, own = whole.values()
    assert margin["substituted_points"]["live"] > 0
    assert margin["substituted_points"]["interval"] == [None, None]
    assert own["miss_rate_points"] == of_simlab["miss_rate_points"]
    assert own["dropped_points"]["live"] > 0
    for row in whole.values():
        # Later layers see what dropping and substituting changed, and 31 tokens are few.
        assert abs(row["miss_rate_points"]["error"]) < 10
    assert sum(r["compared"] == "own-L2" and r["part"].startswith("layer") for r in rows) == 8


@pytest.mark.slow
def test_the_stand_in_writes_on(binary, capsys, monkeypatch):
    """What it wrote is replayed from its own route trace, and exactly."""
    monkeypatch.delenv("STAND_IN", raising=False)
    words = [
        "fidelity",
        "--engine-binary",
        str(binary),
        "--threads",
        "1",
        "--prompt",
        "The module",
        "-n",
        "16",
    ]
    assert main([*words, "--budget", "3MiB", "--route", "original", "--json"]) == 0
    (row,) = [r for r in json.loads(capsys.readouterr().out) if r["part"] == "all" and r["text"] is None]
    assert row["compared"] == "L1-L3"
    for figure in ("miss_rate_points", "mib_per_token_percent"):
        assert row[figure]["error"] == 0
        assert row[figure]["live"] > 0
