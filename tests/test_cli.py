"""The command line: what it prints where, its exit statuses, its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from route_files import route_lines, write_lines
from test_trace_store import change_header

from simlab import __version__
from simlab.cells import MIB
from simlab.cli import about, traces
from simlab.cli.main import build_parser, main
from simlab.cli.output import Progress, cell_to_json, cells_to_frame, json_value, table
from simlab.errors import RunError
from simlab.policy import builtin_policies
from simlab.types import Budget, Cell, CellNumbers, PhaseNumbers, Route

CELL_KEYS = [
    "source", "route", "knobs", "margin", "drop", "top_k", "evict", "evict_knobs", "scope",
    "sequential", "prefetch", "budget", "budget_mib", "budget_cycles", "decode", "all",
    "provenance",
]  # fmt: skip
PHASE_KEYS = [
    "tokens", "lookups", "hits", "misses", "hit_rate", "cold_misses", "capacity_misses", "read_mib",
    "read_mib_per_token", "slots", "reranked", "substituted", "dropped", "evictions", "rereads",
    "mass_displaced", "score_regret", "agreement",
]  # fmt: skip

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A trace of 3 layers, k 2, whose token cycle is 6,000 bytes; recorded budget unknown."""
    path = write_lines(tmp_path / "toy.csv", route_lines())
    assert main(["import", str(path), "--out", str(tmp_path / "toy.trace"), "--route", "original"]) == 0
    return tmp_path / "toy.trace"


@pytest.fixture
def toy_with_budget(toy: Path) -> Path:
    change_header(toy, budget_bytes=9000)
    return toy


def error_line(argv: list[str], capsys: Captured, status: int = 2) -> str:
    """Run a failing command: the one line it leaves on stderr."""
    capsys.readouterr()
    assert main(argv) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("simlab: ")
    assert shown.err.count("\n") == 1
    return shown.err


# ---------------------------------------------------------------------------------------------------------
# The program


def test_help_is_instant_and_light() -> None:
    code = (
        "import sys; from simlab.cli.main import main; status = main(['--help']);"
        "print(status, [m for m in ('jax', 'polars', 'numpy', 'scipy') if m in sys.modules])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for command in ("demo", "record", "import", "info", "replay", "sweep", "validate", "policies", "doctor"):
        assert f"    {command} " in done.stdout
    # 0.2 s on an idle machine; the bound is for a busy one.
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "command", ["demo", "record", "import", "info", "replay", "sweep", "validate", "policies", "doctor"]
)
def test_every_command_has_help(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: simlab {command}" in capsys.readouterr().out


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"simlab {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["info"], "T.trace"),
        (["info", "none.trace"], "none.trace: no such trace"),
        (["info", "x", "--jso"], "--jso"),
        (["import", "a.csv"], "--out"),
        (["replay", "x", "--overlap"], "--overlap"),
        (["record", "--out", "t"], "--text --prompt"),
        (["record", "--out", "t", "--text", "a", "--prompt", "b"], "not allowed"),
        (["record", "--out", "t", "--prompt", "b"], "-n: is missing"),
        (["record", "--out", "t", "--text", "a", "-n", "3"], "-n: goes with --prompt"),
        (["record", "--out", "t", "--text", "a", "--lanes", "9"], "--lanes: 9 must be between 1 and 8"),
        (["record", "--out", "t", "--text", "a", "--lanes", "x"], "--lanes: 'x' is not a whole number"),
        (["record", "--out", "t", "--text", "a", "--threads", "0"], "--threads: 0 must be 1 or more"),
        (["record", "--out", "t", "--text", __file__, "--budget", "1MiB", "--sequential"], "--sequential"),
        (["record", "--out", "t", "--text", "a", "--margin", ".1,.2"], "--margin: '.1,.2' is a list"),
        (["replay", "x", "--scope", "half"], "--scope"),
        (["sweep", "x", "--margin", ".1,,.2"], "--margin: '.1,,.2' has an empty value"),
    ],
)
def test_bad_command_lines(argv: list[str], message: str, capsys: Captured) -> None:
    assert message in error_line(argv, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--budget: is missing"),
        (["--budget", "0MiB"], "--budget 0MiB: must be above zero"),
        (["--budget", "lots"], "2000MiB, 2.5cycles, 48/layer, 25% or off"),
        (["--budget", "1MiB,2MiB"], "--budget: '1MiB,2MiB' is a list"),
        (["--budget", "1MiB", "--margin", "nan"], "--margin nan: substitute:L must lie between 0 and 1"),
        (["--budget", "1MiB", "--margin", "1.5"], "--margin 1.5: substitute:L must lie between 0 and 1"),
        (["--budget", "1MiB", "--margin", "-0.1"], "--margin -0.1: substitute:L must lie between 0 and 1"),
        (["--budget", "1MiB", "--drop", "2"], "--drop 2: drop_cold:F must lie between 0 and 1"),
        (["--budget", "1MiB", "--drop", "x"], "--drop: 'x' is not a number"),
        (["--budget", "1MiB", "--top-k", "9"], "--top-k 9: must lie between 1 and this model's 8 experts"),
        (["--budget", "1MiB", "--top-k", "0"], "--top-k 0: top_k:k must lie between 1 and 512"),
        (["--budget", "1MiB", "--evict", "belady9"], "--evict belady9: no such eviction policy"),
        (["--budget", "1MiB", "--route", "original", "--route", "drop_cold"], "--route: one value here"),
        (["--budget", "off", "--drop", ".5"], "--budget off: drop_cold needs a cache"),
        (["--budget", "1MiB", "--margin", ".1"], "scores"),
        (["--budget", "1MiB", "--slots", "s.csv"], "--slots s.csv: the name must end in .parquet"),
        (["--budget", "1MiB", "--slots", "no/such/s.parquet"], "there is no folder no/such"),
    ],
)
def test_bad_cells(options: list[str], message: str, toy: Path, capsys: Captured) -> None:
    assert message in error_line(["replay", str(toy), *options], capsys)


def test_debug_anywhere_shows_the_traceback(capsys: Captured) -> None:
    for argv in (["--debug", "info", "none.trace"], ["info", "none.trace", "--debug"]):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback")
        assert err.endswith("simlab: error: none.trace: no such trace\n")


@pytest.mark.parametrize(
    ("failure", "status", "line"),
    [
        (RunError("it broke"), 1, "simlab: error: it broke\n"),
        (KeyboardInterrupt(), 130, "simlab: interrupted\n"),
        (ValueError("a\nb"), 1, "simlab: internal error: ValueError: a b (run again with --debug)\n"),
    ],
)
def test_every_failure_is_one_line(
    failure: BaseException, status: int, line: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise failure

    monkeypatch.setattr(traces, "_info", fail)
    assert error_line(["info", "x"], capsys, status) == line


def test_a_closed_pipe_is_quiet(toy: Path) -> None:
    command = f"{sys.executable} -m simlab.cli.main policies | true"
    code = (
        "from simlab.cli.main import entry; import sys; sys.argv = ['simlab', 'policies', '--json']; entry()"
    )
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$0" | true', code], capture_output=True, text=True
    )
    assert done.stderr == "", command


def test_record_options_as_parsed() -> None:
    args = build_parser().parse_args(
        [
            "record",
            "--out",
            "t",
            "--text",
            "f",
            "--budget",
            "3MiB",
            "--margin",
            ".1",
            "--buffered",
            "--ctx",
            "64",
        ]
    )
    assert (args.model, args.out, args.text, args.prompt, args.n) == (None, "t", "f", None, None)
    assert (args.budget, args.margin, args.drop, args.scope) == (["3MiB"], [".1"], None, None)
    assert (args.lanes, args.buffered, args.threads, args.ctx, args.ubatch) == (4, True, None, 64, None)
    args = build_parser().parse_args(
        ["validate", "t", "m.gguf", "--budget", "1MiB,2MiB", "--route", "a", "--route", "b"]
    )
    assert (args.model, args.budget, args.route) == ("m.gguf", ["1MiB", "2MiB"], ["a", "b"])


# ---------------------------------------------------------------------------------------------------------
# replay and sweep


def test_replay_json_is_the_contract(toy: Path, capsys: Captured) -> None:
    assert main(["replay", str(toy), "--budget", "9e-3MiB", "--json"]) == 0
    shown = capsys.readouterr()
    cell = json.loads(shown.out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert list(cell) == CELL_KEYS
    assert list(cell["decode"]) == list(cell["all"]) == PHASE_KEYS
    assert (cell["source"], cell["route"], cell["knobs"], cell["margin"]) == ("replay", "original", {}, None)
    assert cell["decode"]["tokens"] == 4
    assert cell["decode"]["slots"] == 4 * 3 * 2
    assert cell["all"]["hits"] + cell["all"]["misses"] == cell["all"]["lookups"]
    assert cell["budget_mib"] == int(9e-3 * MIB) / MIB


def test_the_recorded_budget_is_the_default(toy_with_budget: Path, capsys: Captured) -> None:
    assert main(["replay", str(toy_with_budget), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    cell = json.loads(shown.out)
    assert cell["budget_mib"] == 9000 / MIB
    # The toy file was written with a plain-Python LRU of nine entries.
    rows = [line.split(",") for line in route_lines() if line[0] == "0"]
    assert cell["all"]["read_mib"] * MIB == sum(int(row[8]) for row in rows)


def test_replay_for_reading_says_simulated(toy_with_budget: Path, capsys: Captured) -> None:
    assert main(["replay", str(toy_with_budget), "--by", "layer"]) == 0
    out = capsys.readouterr().out
    assert "replay (simulated)" in out
    assert "layer" in out.splitlines()[3]


@pytest.mark.parametrize(("by", "n"), [("layer", 3), ("token", 4)])
def test_replay_by(by: str, n: int, toy_with_budget: Path, capsys: Captured) -> None:
    assert main(["replay", str(toy_with_budget), "--by", by, "--json"]) == 0
    cell = json.loads(capsys.readouterr().out)
    assert len(cell[f"by_{by}"]) == n
    assert sum(row["hits"] for row in cell[f"by_{by}"]) == cell["decode"]["hits"]


def test_a_bench_without_a_word_measures_both(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("simlab.cli.bench._replay", lambda args: ({"cells": args.cells}, "loops"))
    monkeypatch.setattr("simlab.cli.bench._engine", lambda args: ({"tokens": args.tokens}, "hook"))
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"replay": {"cells": 64}, "engine": {"tokens": 128}}
    assert main(["bench"]) == 0
    assert capsys.readouterr().out == "loops\n\nhook\n"
    assert main(["bench", "--json", "engine", "--tokens", "16"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tokens": 16}


def test_replay_with_look_ahead_and_intervals(toy_with_budget: Path, capsys: Captured) -> None:
    argv = ["replay", str(toy_with_budget), "--prefetch", "previous_token:K=1", "--intervals"]
    assert main([*argv, "--json"]) == 0
    cell = json.loads(capsys.readouterr().out)
    assert cell["prefetch"] == "previous_token:K=1"
    assert set(cell["read_ahead"]) == {"issued", "useful", "read_mib", "wasted_mib"}
    low, high = cell["intervals"]["hit_rate"]
    assert low <= cell["decode"]["hit_rate"] <= high
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "95 %" in out
    assert "read ahead (previous_token:K=1)" in out
    assert main(["replay", str(toy_with_budget), "--prefetch", "next_gate:K=1"]) == 2
    assert "carries no predictions" in capsys.readouterr().err
    assert main(["explain", str(toy_with_budget), "--prefetch", "previous_token:K=1"]) == 2
    assert capsys.readouterr().err.startswith("simlab: error: --prefetch: explain")


def test_replay_slots(toy_with_budget: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "s.parquet"
    argv = ["replay", str(toy_with_budget), "--slots", str(out)]
    assert main(argv) == 0
    frame = pl.read_parquet(out)
    wanted = ["turn", "graph", "phase", "step", "layer", "slot", "router_expert", "expert", "weight",
              "residency", "dropped", "read_bytes"]  # fmt: skip
    assert frame.columns == wanted
    rows = [line.split(",") for line in route_lines() if line[0] == "0"]
    assert frame["residency"].to_list() == [int(row[7]) for row in rows]
    assert frame["read_bytes"].to_list() == [int(row[8]) for row in rows]
    assert "--slots" in error_line(argv, capsys)
    assert main([*argv, "--force"]) == 0
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".csv", ".parquet", ".trace"]


def test_sweep_json_and_tables(toy: Path, tmp_path: Path, capsys: Captured) -> None:
    argv = ["sweep", str(toy), "--budget", "1cycle,2cycles", "--drop", ".5,1", "--json"]
    outs = [tmp_path / "s.parquet", tmp_path / "s.csv"]
    for out in outs:
        capsys.readouterr()
        assert main([*argv, "--out", str(out)]) == 0
        assert "--out" in error_line([*argv, "--out", str(out)], capsys)
    assert main(argv) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [(c["budget_cycles"], c["drop"]) for c in cells] == [(1, 0.5), (1, 1), (2, 0.5), (2, 1)]
    frame = pl.read_parquet(outs[0])
    for column, value in {"drop": "drop", "top_k": "top_k"}.items():
        assert frame[column].to_list() == [c[value] for c in cells]
    for phase in ("decode", "all"):
        for key in PHASE_KEYS:
            assert frame[f"{phase}_{key}"].to_list() == [c[phase][key] for c in cells]
    assert [json.loads(text) for text in frame["knobs"]] == [c["knobs"] for c in cells]
    assert pl.read_csv(outs[1]).height == 4
    assert "--out s.txt" in error_line([*argv, "--out", "s.txt"], capsys)
    (tmp_path / "c.html").write_text("old")
    assert "--chart" in error_line([*argv, "--chart", str(tmp_path / "c.html")], capsys)


def test_warnings_are_one_line_each(toy: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["sweep", str(toy), "--budget", "0.5cycles,0.7cycles,2cycles", "--drop", ".5"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "--budget 0.5cycles, 0.7cycles: below one token cycle" in lines[0]
    assert "dropping at k = 2" in lines[1]


def test_a_high_margin_says_what_it_costs(toy: Path, capsys: Captured) -> None:
    text = "replies will read well while the model behind them is worse"
    capsys.readouterr()
    for margin, said in (("0.19", 0), ("0.2", 1), ("0.1,0.3,0.6", 1)):
        main(["sweep", str(toy), "--budget", "2cycles", "--margin", margin])
        assert capsys.readouterr().err.count(text) == said


# ---------------------------------------------------------------------------------------------------------
# Numbers as output


def numbers(**changes: Any) -> CellNumbers:
    phase = PhaseNumbers(
        tokens=0, lookups=0, hits=0, misses=0, hit_rate=None, cold_misses=0, capacity_misses=0,
        read_mib=0.0, read_mib_per_token=float("nan"), slots=0, reranked=0, substituted=0, dropped=0,
        evictions=0, rereads=0, mass_displaced=float("inf"), score_regret=None, agreement=None,
    )  # fmt: skip
    cell = Cell(Route(), Budget("off", 0.0, "off"))
    fields: dict[str, Any] = {
        "source": "replay",
        "budget_mib": 0.0,
        "budget_cycles": 0.0,
        "top_k": 8,
        **changes,
    }
    return CellNumbers(cell=cell, decode=phase, all=phase, **fields)


def test_json_never_holds_nan() -> None:
    cell = cell_to_json(numbers())
    assert cell["decode"]["read_mib_per_token"] is None
    assert cell["all"]["mass_displaced"] is None
    json.dumps(cell, allow_nan=False)
    assert json_value([{"a": (float("nan"), 1.5)}]) == [{"a": [None, 1.5]}]


def test_live_fields_only_where_they_exist() -> None:
    assert "ppl" not in cell_to_json(numbers())
    live = cell_to_json(numbers(source="live", ppl=2.5, tok_s=10.0))
    assert (live["ppl"], live["tok_s"], "nll" in live) == (2.5, 10.0, False)
    frame = cells_to_frame([numbers(), numbers(source="live", ppl=2.5)])
    assert frame["ppl"].to_list() == [None, 2.5]
    assert frame["all_hit_rate"].dtype == pl.Float64
    text = table([numbers(), numbers(source="live", ppl=2.5)])
    assert "replay (simulated)" in text
    assert "live" in text
    assert "2.500" in text


def test_an_empty_sweep_has_a_schema() -> None:
    assert cells_to_frame([]).schema["decode_hits"] == pl.Int64


def test_progress_is_for_terminals_and_long_runs(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("sweep") as progress:
        clock[0] = 1.0
        progress(0.1)
        assert capsys.readouterr().err == ""
        clock[0] = 10.0
        progress(0.25)
        assert capsys.readouterr().err == "\rsweep: 25 %, about 30 s left"
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
        clock[0] = 20.0
        progress(0.5)
        assert capsys.readouterr().err == ""
        clock[0] = 900.0
        progress(0.9)
        assert capsys.readouterr().err == "simlab: sweep: 90 %, about 100 s left\n"
        clock[0] = 1800.0
        progress(1.0)
        assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------------------------------------
# policies and doctor


def test_policies(capsys: Captured) -> None:
    assert main(["policies", "--json"]) == 0
    found = {p["name"]: p for p in json.loads(capsys.readouterr().out)}
    assert set(found) == set(builtin_policies())
    assert found["substitute"]["knobs"]["L"]["high"] == 1
    assert found["substitute"]["needs"] == ["scores"]
    assert (found["drop_cold"]["stage"], found["lru"]["kind"]) == ("drop", "eviction")
    assert all(p["source"] and p["what"] for p in found.values())
    assert main(["policies"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} (" in out for name in found)


def test_doctor(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "_ENGINE_MODULE", "no_such_engine")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "pip install 'simlab[engine]'" in out
    for word in (
        "python",
        "numpy",
        "jax devices",
        "memory",
        "cores",
        "reads, temp folder",
        "reads, this folder",
        "generated code",
    ):
        assert word in out


def test_direct_reads_say_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert about.direct_reads(tmp_path).startswith(("direct", "buffered only"))
    assert "no file can be written" in about.direct_reads(tmp_path / "none")
    monkeypatch.setattr("simlab.record.reads.not_direct", lambda _: "is refused here (x)")
    assert about.direct_reads(tmp_path) == "buffered only: O_DIRECT is refused here (x)"
    assert list(tmp_path.iterdir()) == []
