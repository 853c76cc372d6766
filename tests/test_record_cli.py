"""`simlab record`, `validate` and `demo` as a user meets them, and a recording that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import assert_opens_offline, chromium
from live import TEXT, THREADS

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import SimlabWarning
from simlab.judge.demo import run_demo
from simlab.replay.run import replay
from simlab.trace.store import open_trace

SIMLAB = [sys.executable, "-m", "simlab"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT[:40])
    return path


def failed(capsys, arguments):
    """Exit status 2 and exactly one line on stderr; returns it."""
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_record_then_validate(text, tmp_path, capsys):
    out = tmp_path / "t.trace"
    arguments = ["record", "--text", text, "--budget", "2cycles", "--threads", THREADS, "--out", out]
    assert main([str(a) for a in arguments]) == 0
    assert "original at 2cycles" in capsys.readouterr().out
    assert "exists already" in failed(capsys, arguments)
    assert main([str(a) for a in [*arguments, "--force"]]) == 0
    capsys.readouterr()
    command = ["validate", out, "--budget", "2cycles", "--margin", "0,0.15", "--threads", THREADS, "--json"]
    assert main([str(a) for a in command]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [(c["source"], c["margin"]) for c in cells] == [
        ("replay", 0.0), ("live", 0.0), ("replay", 0.15), ("live", 0.15),
    ]  # fmt: skip
    assert "tok_s" not in cells[0]
    assert cells[1]["tok_s"] > 0
    assert cells[1]["ppl"] > 1


def test_record_a_generation(tmp_path, capsys):
    out = tmp_path / "g.trace"
    arguments = [
        "record",
        "--prompt",
        "The module",
        "-n",
        "6",
        "--budget",
        "2cycles",
        "--margin",
        "0.1",
        "--out",
        out,
    ]
    assert main([*map(str, arguments), "--threads", str(THREADS)]) == 0
    assert open_trace(out).header.route == "substitute"
    capsys.readouterr()


def dense_gguf(path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the dev extra's gguf package is not installed")
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_models_that_cannot_be_streamed_are_one_line(text, tmp_path, capsys):
    out = tmp_path / "t.trace"

    def record(model):
        return failed(capsys, ["record", model, "--text", text, "--budget", "2cycles", "--out", out])

    dense = tmp_path / "dense.gguf"
    dense_gguf(dense)
    assert "without experts" in record(dense)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 not a model")
    assert "not a GGUF" in record(other)
    assert "no such model" in record(tmp_path / "missing.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    assert "not a readable GGUF" in record(broken)
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "word"),
    [
        (["--margin", "1.5"], "between 0 and 1"),
        (["--margin", "nan"], "between 0 and 1"),
        (["--budget", "0MiB"], "above zero"),
        (["--lanes", "9"], "between 1 and 8"),
        (["--top-k", "65"], "between 1 and"),
        (["--top-k", "64"], "has room for"),
        (["--threads", "100000"], "between 1 and 512"),
        (["--ctx", "99999999999"], "was trained for"),
        (["--budget", "off", "--margin", "0.1"], "needs a cache"),
    ],
)
def test_wrong_options_write_nothing(text, tmp_path, capsys, option, word):
    out = tmp_path / "t.trace"
    budget = [] if "--budget" in option else ["--budget", "2cycles"]
    assert word in failed(capsys, ["record", "--text", text, "--out", out, *budget, *option])
    assert not out.exists()


def test_a_text_that_is_missing_or_too_short(tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_bytes(b"x")
    out = tmp_path / "t.trace"
    for text, word in ((tmp_path / "missing.txt", "no such file"), (short, "at least 2")):
        assert word in failed(capsys, ["record", "--text", text, "--budget", "2cycles", "--out", out])
    assert not out.exists()


def test_force_never_takes_an_input(text, tmp_path, capsys):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    for arguments in (["--text", text, "--out", text], [model, "--text", text, "--out", model]):
        error = failed(capsys, ["record", *arguments, "--budget", "2cycles", "--force"])
        assert "is an input of this recording" in error
    assert model.read_bytes() == b"GGUF"
    assert text.read_bytes() == TEXT[:40]


@pytest.mark.parametrize(
    "options", [["--budget", "12/layer", "--margin", "0.3"], ["--scope", "per_layer", "--drop", "1"]]
)
def test_a_replay_with_no_options_is_of_what_was_recorded(text, tmp_path, capsys, options):
    out = tmp_path / "t.trace"
    budget = [] if "--budget" in options else ["--budget", "2cycles"]
    assert main([*map(str, ["record", "--text", text, "--out", out, *budget, *options])]) == 0
    capsys.readouterr()
    assert main(["replay", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["all"]
    tokens = open_trace(out).tokens.collect()
    for name in ("lookups", "hits", "substituted", "dropped", "evictions"):
        assert found[name] == tokens[name].sum()


def test_a_text_that_only_fills_the_prefill_says_so(tmp_path, capsys):
    text = tmp_path / "nine.txt"
    text.write_bytes(TEXT[:9])
    assert (
        main(["record", "--text", str(text), "--budget", "2cycles", "--out", str(tmp_path / "p.trace")]) == 0
    )
    assert "holds prefill only" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.31])
def test_ctrl_c_ends_a_recording_between_graphs(tmp_path, delay_s):
    text, out = tmp_path / "long.txt", tmp_path / "stopped.trace"
    text.write_bytes(TEXT)
    command = ["record", "--text", text, "--budget", "1.2cycles", "--margin", "0.1", "--out", out]
    process = subprocess.Popen(
        [*SIMLAB, *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("tokens/part-*.parquet")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    # Before it, off a terminal, only lines that say how far it was.
    *before, last = errors.splitlines()
    assert last == "simlab: interrupted"
    assert all(line.startswith("simlab: record: ") for line in before), errors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimlabWarning)
        trace = open_trace(out)
    tokens = trace.tokens.collect()
    assert 0 < tokens.height < len(TEXT)
    # Every graph that is there is whole: eight rows for each token.
    assert trace.routing.filter(phase=1).collect().height == 8 * tokens.filter(phase=1).height
    numbers = replay(trace, build_cells(budgets=["1.2cycles"], margins=["0.1"])[0])
    assert numbers.all.hits == tokens["hits"].sum()


@pytest.mark.slow
def test_kill_9_leaves_a_readable_trace(tmp_path, capsys):
    text, out = tmp_path / "long.txt", tmp_path / "killed.trace"
    text.write_bytes(TEXT)
    command = ["record", "--text", text, "--budget", "1.2cycles", "--threads", THREADS, "--out", out]
    process = subprocess.Popen(
        [*SIMLAB, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob("tokens/part-*.parquet")) and time.monotonic() < deadline:
            assert process.poll() is None, "the recording ended before it could be killed"
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert main(["info", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("did not finish") == 1
    assert "tiny-moe" in shown.out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimlabWarning)
        trace = open_trace(out)
    tokens = trace.tokens.collect()
    assert 0 < tokens.height < len(TEXT)
    numbers = replay(trace, build_cells(budgets=["1.2cycles"])[0])
    assert numbers.all.lookups == tokens["lookups"].sum()
    assert numbers.all.hits == tokens["hits"].sum()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and "//" in v]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo on few tokens, and what it said."""
    lines = []
    with pytest.warns(SimlabWarning, match="read well while the model behind them is worse"):
        return run_demo(tmp_path_factory.mktemp("demo") / "demo", lines.append, n_tokens=48), lines


@pytest.mark.slow
def test_the_report_of_the_demo_opens_offline_in_a_browser(demo):
    report = demo[0].report
    assert report.stat().st_size < 5 << 20
    with chromium() as browser:
        assert_opens_offline(browser, report, charts=report.read_text().count('class="chart"'))


@pytest.mark.slow
def test_the_demo_ends_with_a_report(demo):
    demo, lines = demo
    assert len(demo.swept) == 64
    assert len(demo.compared) >= 2
    margins = [pair.live.cell.margin for pair in demo.compared]
    assert margins[0] == 0
    page = demo.report.read_text()
    parser = _Page()
    parser.feed(page)
    assert parser.fetched == []
    assert len(lines) == 3
    baseline = demo.compared[0]
    assert baseline.live.decode.misses == baseline.replay.decode.misses == demo.recorded.decode.misses
