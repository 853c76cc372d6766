"""Another engine: its command line, its failures, recorded outputs, and a stand-in program run as a subprocess."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from live import with_interval
from route_files import shared

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError, RunError
from simlab.judge.external import external_numbers
from simlab.judge.measure import measure
from simlab.judge.validate import planned_graphs, run_live
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.external import ExternalEngine, ExternalRun, Source, _has_rows, _loss, _substituted
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


def engine(binary: Path, **options) -> ExternalEngine:
    return ExternalEngine(binary, EMBEDDED_MODEL, **options)


def one(budget: str = "3MiB", **other):
    return build_cells(budgets=[budget], **other)[0]


def test_a_command_line_by_hand(binary, tmp_path):
    header = open_trace(ORIGINAL).header
    made = engine(binary, threads=2, lanes=3, n_ctx=256, overlap=True, more=["--force-cache"])
    cell = one(margins=["0.15"], drops=["0.75"])
    words = made.arguments(cell, header, Source(prompt="Once", n=9), tmp_path)
    assert words == [
        "-m", str(EMBEDDED_MODEL), "-t", "2", "--io-threads", "3", "-c", "256", "--overlap", "--force-cache",
        "--moe-stream", "--cache-mb", "3", "--expert-substitute", "0.15", "--drop-cold-experts", "0.75",
        "--route-trace", str(tmp_path / "route.csv"), "--csv", str(tmp_path / "metrics.csv"), "-p", "Once", "-n", "9",
    ]  # fmt: skip
    plain = engine(binary).arguments(one(margins=["0"]), header, Source(text=Path("t.txt")), tmp_path)
    assert plain[:5] == ["-m", str(EMBEDDED_MODEL), "--moe-stream", "--cache-mb", "3"]
    assert plain[-3:] == ["--ppl", "t.txt", "--ppl-step"]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (
            lambda: one("2cycles"),
            "comes to 3.19 MiB, and the engine binary takes whole MiB of one cache; write 3MiB",
        ),
        (lambda: one("off", routes=["original"]), "streams through a cache"),
        (lambda: one("8/layer"), "whole MiB of one cache"),
        (lambda: one(evicts=["lfu"]), "one global lru cache and no other"),
        (lambda: one(scope="per_layer"), "one global lru cache and no other"),
        (lambda: one(routes=["resident_only"]), "--route resident_only: the engine binary runs substitute"),
        (lambda: one(routes=["drop_cold:F=.5,renorm=0"]), "with renorm=1,prefill=0"),
    ],
)
def test_cells_it_does_not_have(binary, tmp_path, cell, said):
    with pytest.raises(InputError) as refused:
        engine(binary).arguments(cell(), open_trace(ORIGINAL).header, Source(prompt="x", n=1), tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("status", "stand-in: ended with status 3: loading no such tensor"),
        ("killed", "stand-in: was ended by SIGKILL, and said nothing"),
        ("silent", "stand-in: ended well but wrote no route trace"),
        ("rubbish", "stand-in: wrote what cannot be read: "),
    ],
)
def test_failures_are_one_line(binary, tmp_path, monkeypatch, how, said):
    monkeypatch.setenv("STAND_IN", how)
    with pytest.raises(RunError) as failure:
        engine(binary).run(one(), open_trace(ORIGINAL).header, Source(prompt="x", n=1), tmp_path)
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_program_in_the_current_folder(binary, tmp_path, monkeypatch):
    """`./name` loses its dot as a path, and is no name of the search path all the same."""
    monkeypatch.setenv("STAND_IN", "status")
    monkeypatch.chdir(binary.parent)
    with pytest.raises(RunError, match="ended with status 3"):
        engine(Path("./stand-in")).run(one(), open_trace(ORIGINAL).header, Source(prompt="x", n=1), tmp_path)


def test_programs_that_are_none(tmp_path):
    nothing = tmp_path / "nothing"
    with pytest.raises(InputError, match="no such file"):
        engine(nothing)
    nothing.write_text("text")
    with pytest.raises(InputError, match="not executable"):
        engine(nothing)
    nothing.chmod(0o755)
    nothing.write_bytes(b"\x7fELF rubbish")
    with pytest.raises(RunError, match="cannot be started"):
        engine(nothing).run(one(), open_trace(ORIGINAL).header, Source(prompt="x", n=1), tmp_path)


def test_recorded_outputs(tmp_path):
    """Counted from the engine's own files; the totals are those of its summary line."""
    files = [str(shared(f"engine/{name}.csv")) for name in ("route", "metrics")]
    trace = open_trace(import_files(files, str(tmp_path / "t.trace")))
    numbers = external_numbers(ExternalRun(trace, 1.25), one(drops=["0.75"]))
    words = dict(w.split("=") for w in Path(files[1]).read_text().splitlines()[-1].split()[2:])
    assert numbers.all.evictions == int(words["evictions"])
    assert numbers.all.rereads == int(words["rereads"])
    assert numbers.decode.dropped == int(words["experts_dropped"])
    assert numbers.all.hit_rate == pytest.approx(float(words["cache_hit_pct"]) / 100, abs=5e-4)
    assert numbers.tok_s == pytest.approx(float(words["tok/s"]), rel=1e-3)
    assert numbers.ppl == pytest.approx(math.exp(1.25))
    assert numbers.note == "its perplexity is one figure of the whole text, so chance in it is not known"
    low, speed, high = with_interval(numbers, "tok_s")
    assert low < speed < high
    assert set(numbers.intervals) >= {"hit_rate", "read_mib_per_token"}
    other = external_numbers(ExternalRun(trace), one("2MiB", drops=["0.75"]))
    assert other.note is not None
    assert "another cache than one LRU of 2MiB" in other.note
    assert (other.decode.misses, other.decode.evictions) == (numbers.decode.misses, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine-binary", "nowhere", "--prompt", "x", "-n", "1"], "--engine-binary nowhere: no such file"),
        (["--engine-binary", "{binary}"], "wants the --text or the --prompt"),
        (["--engine-binary", "{binary}", "--prompt", "x"], "-n: goes with --prompt"),
        (["--engine-binary", "{binary}", "--prompt", "x", "-n", "1", "--buffered"], "has no such option"),
        (["--engine-binary", "{binary}", "--prompt", "x", "-n", "1"], "is not what"),
        (["--engine-binary", "{binary}", "--text", "nowhere.txt"], "--text nowhere.txt: No such file"),
        (["--prompt", "x"], "--prompt: goes with --engine-binary"),
    ],
)
def test_what_the_command_refuses(binary, words, said, capsys):
    words = [w.format(binary=binary) for w in words]
    assert main(["validate", str(ORIGINAL), "--budget", "3MiB", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_stand_in_beside_the_replay(binary, tmp_path, capsys, monkeypatch):
    """What comes back through the program and its files is what the engine did, count for count."""
    monkeypatch.delenv("STAND_IN", raising=False)
    text = tmp_path / "text.txt"
    text.write_bytes(EMBEDDED_MODEL.with_name("text-b.txt").read_bytes()[:40])
    cell = one()
    with Engine(n_threads=1) as own:
        content = text.read_bytes()
        own.record_text(own.tokenize(content), cell, tmp_path / "base.trace", text=content)
    trace = open_trace(tmp_path / "base.trace")
    words = [
        "validate",
        str(trace.path),
        "--engine-binary",
        str(binary),
        "--text",
        str(text),
        "--threads",
        "1",
    ]
    assert main([*words, "--budget", "3MiB", "--margin", "0,0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [n["source"] for n in found] == ["replay", "live", "replay", "live"]
    assert found[1]["note"] == "its perplexity is one figure of the whole text, so chance in it is not known"
    assert found[3]["note"] == f"agreement with the router is not known; {found[1]['note']}"
    assert found[3]["ppl_ratio"] == pytest.approx(found[3]["ppl"] / found[1]["ppl"])
    assert found[1]["ppl_ratio"] == 1
    margin = one(margins=["0.2"])
    with Engine(n_threads=1) as own:
        alone = measure(run_live(own, planned_graphs(trace), margin, tmp_path / "alone.trace"), margin)
    for live, expected in ((found[1], measure(trace, cell)), (found[3], alone)):
        for name in (
            "tokens",
            "lookups",
            "hits",
            "cold_misses",
            "evictions",
            "substituted",
            "read_mib",
            "slots",
        ):
            assert live["decode"][name] == pytest.approx(getattr(expected.decode, name)), name
        assert live["ppl"] == pytest.approx(expected.ppl, rel=1e-5)
        assert "tok_s" not in live
    assert found[0]["decode"]["misses"] == found[1]["decode"]["misses"]


@pytest.mark.parametrize(
    ("said", "nll"),
    [
        (
            "loading\nppl: 4.2352  nll: 1.44344  next-token hits: 219/332 (66.0%)  9.10 s\nppl-policy: 0/9 r",
            1.44344,
        ),
        ("ppl: 2.0\nperplexity = 4\n", math.log(4)),
        ("the text says perplexity 12 somewhere", None),
        ("ppl-policy: 3/9 routed experts dropped, 0/0 reranked slots substituted\n", None),
        ("ppl: 0.0000", None),
        ("", None),
    ],
)
def test_the_loss_it_says(said, nll):
    assert _loss(said) == (None if nll is None else pytest.approx(nll))


def test_the_substituted_slots_it_says(tmp_path):
    """Of the last summary of the metrics; a text that is scored has none, and a line of the output instead."""
    metrics = tmp_path / "m.csv"
    assert _substituted(metrics, "") is None
    said = "ppl-policy: 4/96 routed experts dropped, 29669/106240 reranked slots substituted\n"
    assert _substituted(metrics, said) == 29669
    heading = "# bmoe_metrics v2\nstep,steps,wall_ms\n"
    metrics.write_text(heading)
    assert not _has_rows(metrics)
    metrics.write_text(
        heading + "1,1,2\n# summary experts_substituted=5\n# summary tokens=1 experts_substituted=7\n"
    )
    assert _has_rows(metrics)
    assert _substituted(metrics, "") == 7
    assert not _has_rows(tmp_path / "nothing")
