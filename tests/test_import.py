"""Importing route traces, metrics and io traces: what is read, refused, and kept of a cut file."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from route_files import HEADING, route_lines, shared, write_lines

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import SimlabWarning
from simlab.trace.bmoe_metrics import read_metrics
from simlab.trace.importer import import_files
from simlab.trace.route_csv import read_route
from simlab.trace.store import Trace, open_trace

FIRST_ROW = route_lines().index(HEADING) + 1


def recorded(path: Path) -> pl.DataFrame:
    return pl.read_csv(path, comment_prefix="#")


def slot_column(trace: Trace, name: str) -> np.ndarray:
    """A per-slot column in file order, slots that do not exist left out."""
    frame = trace.routing.collect()
    exists = frame["experts"].to_numpy() >= 0
    return frame[name].to_numpy()[exists]


# ---------------------------------------------------------------------------------------------------------
# The recorded files


@pytest.fixture
def qwen(tmp_path: Path) -> Trace:
    files = [str(shared("bmoe/qwen.route.csv")), str(shared("bmoe/qwen.metrics.csv"))]
    return open_trace(import_files(files, str(tmp_path / "qwen.trace")))


def test_qwen_shape_and_header(qwen: Trace) -> None:
    assert len(slot_column(qwen, "experts")) == 44_766
    assert qwen.n_rows * 6 == 44_766
    assert len(qwen.header.moe_layers) == 48
    assert qwen.header.n_expert_used == 6
    assert qwen.header.budget_bytes == 4000 << 20
    assert qwen.header.cycle_bytes() == 822_804_480
    assert (qwen.header.route, qwen.header.gating, qwen.header.weight_rule) == (None, None, None)
    tokens = qwen.tokens.collect()
    assert tokens.filter(phase=0)["step"].to_list() == [27]
    assert tokens.filter(phase=1)["step"].to_list() == list(range(28, 156))
    prefill = qwen.routing.filter(phase=0).collect()
    assert prefill.filter(layer=0)["pos_in_graph"].to_list() == list(range(28))
    assert prefill.filter(layer=47)["pos_in_graph"].to_list() == [27]


def test_every_value_of_qwen_is_carried_over(qwen: Trace) -> None:
    file = recorded(shared("bmoe/qwen.route.csv"))
    for column, name in {"expert": "experts", "residency": "residency", "expert_bytes": "read_bytes"}.items():
        assert np.array_equal(slot_column(qwen, name), file[column].to_numpy()), name
    assert np.array_equal(slot_column(qwen, "weights"), file["weight"].to_numpy().astype(np.float32))
    assert np.array_equal(slot_column(qwen, "router_experts"), slot_column(qwen, "experts"))


def test_metrics_land_on_their_tokens(qwen: Trace) -> None:
    tokens = qwen.tokens.collect()
    metrics = recorded(shared("bmoe/qwen.metrics.csv"))
    decode = tokens.filter(phase=1)
    assert decode["wall_ns"].to_list() == [round(ms * 1e6) for ms in metrics["wall_ms"]]
    assert decode["read_wait_ns"].to_list() == [
        round(ms * 1e6) for ms in metrics["stall_ms"]
    ]  # overlap was on
    assert decode["management_ns"].to_list() == [round(ms * 1e6) for ms in metrics["mgmt_ms"]]
    assert decode["window_bytes"].to_list() == metrics["read_bytes"].to_list()
    assert decode["major_faults"].to_list() == metrics["majflt"].to_list()
    assert tokens.filter(phase=0)["wall_ns"].to_list() == [None]
    assert tokens["lookups"].null_count() == tokens.height
    by_step = (
        recorded(shared("bmoe/qwen.route.csv"))
        .filter(phase=1)
        .group_by("step")
        .agg(pl.col("expert_bytes").sum())
    )
    assert decode["read_bytes"].to_list() == by_step.sort("step")["expert_bytes"].to_list()


def test_without_metrics_nothing_beside_the_file_is_taken(tmp_path: Path) -> None:
    trace = open_trace(import_files([str(shared("bmoe/qwen.route.csv"))], str(tmp_path / "t.trace")))
    tokens = trace.tokens.collect()
    assert tokens.height == 129
    assert tokens["wall_ns"].null_count() == 129
    assert trace.header.budget_bytes is None


def test_qwen_replayed_gives_every_recorded_slot(qwen: Trace) -> None:
    from simlab.replay.slots import replay_slots

    result = replay_slots(qwen, build_cells(budgets=["4000MiB"])[0])
    file = recorded(shared("bmoe/qwen.route.csv"))
    assert result.slots["residency"].to_list() == file["residency"].to_list()
    assert result.slots["read_bytes"].to_list() == file["expert_bytes"].to_list()
    assert (result.numbers.decode.hits, result.numbers.decode.lookups) == (29_597, 36_864)


def test_nothing_recorded_is_read_back(tmp_path: Path) -> None:
    from simlab.replay.slots import replay_slots

    lines = shared("bmoe/qwen.route.csv").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("turn,")) + 1
    rows = [line.split(",") for line in lines[first:]]
    by_layer: dict[str, list[list[str]]] = {}  # within a layer, because layers differ in entry size
    for line in rows:
        by_layer.setdefault(line[3], []).append(line[7:9])
    for outcomes in by_layer.values():
        random.Random(5).shuffle(outcomes)
    shuffled = [",".join(line[:7] + by_layer[line[3]].pop()) for line in rows]
    assert shuffled != lines[first:]
    path = write_lines(tmp_path / "shuffled.csv", lines[:first] + shuffled)
    trace = open_trace(import_files([str(path)], str(tmp_path / "t.trace")))
    slots = replay_slots(trace, build_cells(budgets=["4000MiB"])[0]).slots
    file = recorded(shared("bmoe/qwen.route.csv"))
    assert slots["residency"].to_list() == file["residency"].to_list()
    assert slots["read_bytes"].to_list() == file["expert_bytes"].to_list()


def test_the_engines_drops_are_replayed(tmp_path: Path) -> None:
    """A cross-check with the C++ engine: F 0.75 at 3 MiB, 4,872 slots, 1,049 of them dropped."""
    from simlab.replay.slots import replay_slots

    files = [str(shared(f"engine/{name}.csv")) for name in ("io", "metrics", "route")]
    trace = open_trace(import_files(files, str(tmp_path / "engine.trace")))
    header = trace.header
    assert (header.route, header.knobs) == ("drop_cold", {"F": 0.75, "renorm": 1, "prefill": 0})
    assert (header.engine, header.engine_version, header.io_mode) == ("bmoe", "0.19.0", "direct")
    assert header.budget_bytes == 3 << 20
    cell = build_cells(budgets=["3MiB"], drops=["0.75"])[0]
    slots = replay_slots(trace, cell).slots
    file = recorded(shared("engine/route.csv"))
    assert slots["expert"].to_list() == file["expert"].to_list()
    assert slots["dropped"].cast(pl.Int64).to_list() == file["dropped"].to_list()
    assert slots["residency"].to_list() == file["residency"].to_list()
    assert slots["read_bytes"].to_list() == file["expert_bytes"].to_list()
    assert trace.tokens.collect()["dropped"].sum() == 1049


def test_io_trace_becomes_reads(tmp_path: Path) -> None:
    files = [str(shared("engine/route.csv")), str(shared("engine/io.csv"))]
    with pytest.warns(SimlabWarning, match="slots were dropped"):
        trace = open_trace(import_files(files, str(tmp_path / "t.trace")))
    reads, file = trace.reads.collect(), recorded(shared("engine/io.csv"))
    assert reads["window_bytes"].to_list() == file["read_bytes"].to_list()
    assert reads["latency_ns"].to_list() == file["latency_ns"].to_list()
    assert reads["projection"].to_list() == [str(p) for p in file["proj"]]
    assert reads["start_ns"].null_count() == reads.height
    assert reads["graph"].to_list() == [
        0 if p == 0 else s - 31 for p, s in zip(file["phase"], file["step"], strict=True)
    ]
    # Each missed entry was read in three projections, together the entry bytes the route trace charges.
    assert reads["req_bytes"].sum() == trace.tokens.collect()["read_bytes"].sum()
    assert (trace.header.route, trace.header.knobs) == ("drop_cold", {})


@pytest.mark.parametrize(
    ("name", "rows", "budget", "overlap"),
    [
        ("metrics-drop0", 1354, 3000 << 20, True),
        ("metrics-oldest", 256, 0, False),
        ("qwen.metrics", 128, 4000 << 20, True),
    ],
)
def test_metrics_of_every_age(name: str, rows: int, budget: int, overlap: bool) -> None:
    metrics = read_metrics(shared(f"bmoe/{name}.csv"))
    assert len(metrics.columns["step"]) == rows
    assert metrics.budget_bytes == budget
    assert metrics.overlap is overlap


# ---------------------------------------------------------------------------------------------------------
# Rules of grouping


def grouped(
    tmp_path: Path, rows: list[str], layers: int = 2, k: int = 2, n_expert: int = 8
) -> dict[str, list[int]]:
    """Graph, layer and place of each routing row of a hand-written trace."""
    preamble = route_lines(layers=layers, k=k, n_expert=n_expert)[: layers + 3]
    route = read_route(write_lines(tmp_path / "r.csv", preamble + rows))
    return {name: route.rows[name].tolist() for name in ("graph", "layer", "pos_in_graph", "step")}


def row(phase: int, step: int, layer: int, slot: int, expert: int = 0, turn: int = 0) -> str:
    return f"{turn},{phase},{step},{layer},{slot},{expert + slot},0.5,0,0,0"


def rows(*places: tuple[int, int, int], k: int = 2) -> list[str]:
    return [row(phase, step, layer, slot) for phase, step, layer in places for slot in range(k)]


def test_a_layer_that_goes_down_starts_a_graph(tmp_path: Path) -> None:
    # Two prompt chunks; the first routes no row in the last layer.
    found = grouped(
        tmp_path, rows((0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 3, 1), (1, 4, 0), (1, 4, 1))
    )
    assert found["graph"] == [0, 0, 0, 0, 0, 1, 1]
    found = grouped(
        tmp_path, rows((0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 3, 0), (0, 3, 1), (1, 4, 0), (1, 4, 1))
    )
    assert found["graph"] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert found["pos_in_graph"] == [0, 1, 1, 0, 1, 1, 0, 0]


def test_a_decode_step_is_a_graph_even_with_one_layer(tmp_path: Path) -> None:
    found = grouped(tmp_path, rows((0, 0, 0), (0, 1, 0), (1, 2, 0), (1, 3, 0)), layers=1)
    assert found["graph"] == [0, 0, 1, 2]


def test_rows_without_a_position_stay_in_their_graph(tmp_path: Path) -> None:
    found = grouped(tmp_path, rows((1, 5, 0), (1, 5, 0), (1, -1, 1), (1, 7, 0), (1, 7, 1)))
    assert found["graph"] == [0, 0, 0, 1, 1]
    assert found["pos_in_graph"] == [0, 1, 0, 0, 0]


def test_a_new_turn_starts_a_graph(tmp_path: Path) -> None:
    lines = rows((0, 0, 0), (0, 0, 1))
    lines += [row(0, 1, layer, slot, turn=1) for layer in (0, 1) for slot in (0, 1)]
    assert grouped(tmp_path, lines)["graph"] == [0, 0, 1, 1]


def test_padding_and_short_rows(tmp_path: Path) -> None:
    lines = [
        *route_lines()[:FIRST_ROW],
        "0,1,0,0,0,3,0.9,0,1000,0", "0,1,0,0,1,-1,nan,0,0,0",
        "0,1,0,1,0,2,0.9,0,1000,0",
        "0,1,0,2,0,2,nan,0,1000,0", "0,1,0,2,1,8,0,0,0,0",
    ]  # fmt: skip
    out = import_files([str(write_lines(tmp_path / "r.csv", lines))], str(tmp_path / "t.trace"))
    frame = open_trace(out).routing.collect()
    assert frame["experts"].to_list() == [[3, -1], [2, -1], [2, -1]]
    weights = frame["weights"].to_numpy()
    assert np.isnan(weights[2, 0])
    assert weights[:, 1].tolist() == [0, 0, 0]


def test_fewer_slots_than_the_header_says(tmp_path: Path) -> None:
    lines = route_lines(k=2)[:FIRST_ROW] + rows((1, 0, 0), (1, 0, 1), (1, 0, 2), k=1)
    with pytest.warns(SimlabWarning, match="n_expert_used=2, the rows have 1 slots"):
        assert read_route(write_lines(tmp_path / "r.csv", lines)).k == 1


def test_the_same_expert_twice_is_kept_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = route_lines()
    for index in (FIRST_ROW, FIRST_ROW + 2):
        fields = lines[index].split(",")
        lines[index + 1] = ",".join(
            [*lines[index + 1].split(",")[:5], fields[5], *lines[index + 1].split(",")[6:]]
        )
    write_lines(tmp_path / "r.csv", lines)
    assert main(["import", str(tmp_path / "r.csv"), "--out", str(tmp_path / "t.trace")]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"line {FIRST_ROW + 2}, field 'expert'" in err
    assert "2 slots" in err


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_quotes_column_order_and_extra_columns(tmp_path: Path, end: str) -> None:
    lines = route_lines()
    names = HEADING.split(",")
    order = [*reversed(names), "text"]
    body = []
    for line in lines[FIRST_ROW:]:
        fields = dict(zip(names, line.split(","), strict=True)) | {"text": '"a, ""b"""'}
        body.append(",".join(fields[name] for name in order))
    plain = read_route(write_lines(tmp_path / "plain.csv", lines))
    other = read_route(
        write_lines(tmp_path / "other.csv", [*lines[: FIRST_ROW - 1], ",".join(order), *body], end)
    )
    for name in plain.slots:
        assert np.array_equal(plain.slots[name], other.slots[name])


def test_nine_columns(tmp_path: Path) -> None:
    lines = route_lines()
    cut = [line if line.startswith("#") else line.rpartition(",")[0] for line in lines]
    route = read_route(write_lines(tmp_path / "r.csv", cut))
    assert not route.any_dropped
    assert np.array_equal(
        route.slots["expert"], read_route(write_lines(tmp_path / "s.csv", lines)).slots["expert"]
    )


def test_turns_of_a_session_keep_their_own_metrics(tmp_path: Path) -> None:
    route = route_lines(layers=1)[:4]
    for turn, steps in ((0, [2, 3]), (1, [6, 7])):
        route += [row(0, s, 0, slot, turn=turn) for s in (steps[0] - 2, steps[0] - 1) for slot in (0, 1)]
        route += [row(1, s, 0, slot, turn=turn) for s in steps for slot in (0, 1)]
    metrics = [
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,x,turn"
    ]
    metrics += [
        f"{s},2,{wall},1,1,0,0,0,0,0,0,0,{turn}"
        for s, wall, turn in ((1, 10, 0), (2, 20, 0), (1, 30, 1), (2, 40, 1))
    ]
    files = [str(write_lines(tmp_path / "r.csv", route)), str(write_lines(tmp_path / "m.csv", metrics))]
    tokens = open_trace(import_files(files, str(tmp_path / "t.trace"))).tokens.collect()
    assert tokens.filter(phase=1)["wall_ns"].to_list() == [10_000_000, 20_000_000, 30_000_000, 40_000_000]


# ---------------------------------------------------------------------------------------------------------
# Refusals, through the command line


def edited(line: int, field: str, value: str) -> Callable[[list[str]], list[str]]:
    """Set one field of the data line `line` (0 is the first)."""

    def edit(lines: list[str]) -> list[str]:
        fields = lines[FIRST_ROW + line].split(",")
        fields[HEADING.split(",").index(field)] = value
        lines[FIRST_ROW + line] = ",".join(fields)
        return lines

    return edit


def replaced(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line.replace(old, new) for line in lines]


def without_column(name: str) -> Callable[[list[str]], list[str]]:
    index = HEADING.split(",").index(name)

    def edit(lines: list[str]) -> list[str]:
        return [
            line if line.startswith("#") else ",".join(f for i, f in enumerate(line.split(",")) if i != index)
            for line in lines
        ]

    return edit


REFUSALS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "empty": (lambda lines: [], "empty"),
    "blank": (lambda lines: ["", ""], "empty"),
    "header only": (lambda lines: lines[:FIRST_ROW], "without rows"),
    "preamble only": (lambda lines: lines[: FIRST_ROW - 1], "column 'turn' is missing"),
    "git lfs": (
        lambda lines: ["version https://git-lfs.github.com/spec/v1", "oid sha256:00", "size 9"],
        "line 1: a Git-LFS pointer",
    ),
    "another format": (lambda lines: ["a,b", "1,2"], "line 1: not a route trace"),
    "another version": (replaced("route_trace v1", "route_trace v2"), "line 1: not a route trace"),
    "no model line": (lambda lines: [x for x in lines if "model=" not in x], "field 'n_expert'"),
    "no n_expert": (replaced(" n_expert=8", ""), "line 2, field 'n_expert'"),
    "n_expert not a number": (replaced(" n_expert=8", " n_expert=many"), "line 2, field 'n_expert'"),
    "k above n_expert": (replaced("n_expert_used=2", "n_expert_used=9"), "line 2, field 'n_expert_used'"),
    "no expert_bytes line": (lambda lines: [x for x in lines if "layer=1 " not in x], "of layer 1 has no"),
    "expert_bytes 0": (replaced("layer=1 expert_bytes=1000", "layer=1 expert_bytes=0"), "of layer 1 is 0"),
    "expert_bytes absent": (replaced("layer=1 expert_bytes=1000", "layer=1"), "line 4, field 'expert_bytes'"),
    "expert_bytes not a number": (replaced("=1000", "=1k"), "line 3, field 'expert_bytes'"),
    "expert too high": (edited(4, "expert", "9"), f"line {FIRST_ROW + 5}, field 'expert'"),
    "expert n_expert with a weight": (edited(0, "expert", "8"), f"line {FIRST_ROW + 1}, field 'expert'"),
    "expert -1 with a weight": (edited(0, "expert", "-1"), f"line {FIRST_ROW + 1}, field 'expert'"),
    "expert -2": (edited(0, "expert", "-2"), f"line {FIRST_ROW + 1}, field 'expert'"),
    "header n_expert below the rows": (replaced("n_expert=8", "n_expert=4"), "n_expert=4"),
    "more slots than the header": (replaced("n_expert_used=2", "n_expert_used=1"), "n_expert_used=1"),
    "unknown phase": (edited(3, "phase", "2"), f"line {FIRST_ROW + 4}, field 'phase'"),
    "unknown residency": (edited(3, "residency", "3"), f"line {FIRST_ROW + 4}, field 'residency'"),
    "step not a number": (edited(2, "step", "x"), "field 'step': 'x' is not a whole number"),
    "weight not a number": (edited(2, "weight", "x"), "field 'weight': 'x' is not a number"),
    "a field is empty": (edited(2, "layer", ""), f"line {FIRST_ROW + 3}, field 'layer'"),
    "negative bytes": (edited(2, "expert_bytes", "-5"), f"line {FIRST_ROW + 3}, field 'expert_bytes'"),
    "a row cut in the middle of the file": (
        lambda lines: [*lines[: FIRST_ROW + 2], "0,0,1", *lines[FIRST_ROW + 3 :]],
        f"line {FIRST_ROW + 3}, field 'layer'",
    ),
    "too many fields": (edited(2, "dropped", "0,7"), f"line {FIRST_ROW + 3}, field 11"),
    "a compute trace": (lambda lines: ["# compute_trace v1", "a,b"], "a compute trace"),
    "an io trace alone": (lambda lines: ["# io_trace v1", "a,b"], "no route trace"),
    **{f"no {n}": (without_column(n), f"column '{n}' is missing") for n in HEADING.split(",")[:-1]},
}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], out: Path, *files: Path) -> str:
    """Import, expect one line and status 2, and nothing written."""
    before = sorted(out.parent.iterdir())
    assert main(["import", *map(str, files), "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("simlab: error: ")
    assert shown.err.count("\n") == 1
    assert sorted(out.parent.iterdir()) == before
    return shown.err


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, message = REFUSALS[case]
    path = write_lines(tmp_path / "bad.csv", edit(route_lines()))
    line = refused(capsys, tmp_path / "t.trace", path)
    assert message in line
    assert str(path) in line


def test_refuses_a_missing_file_a_folder_and_a_binary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file" in refused(capsys, tmp_path / "t.trace", tmp_path / "none.csv")
    assert "cannot be read" in refused(capsys, tmp_path / "t.trace", tmp_path)
    (tmp_path / "b.csv").write_bytes(b"# route_trace v1\n\0\0\0")
    assert "binary" in refused(capsys, tmp_path / "t.trace", tmp_path / "b.csv")
    (tmp_path / "l.csv").write_bytes(
        "\n".join(route_lines()).encode().replace(b"0.6667", b"\xff\xfe") + b"\n"
    )
    assert "l.csv" in refused(capsys, tmp_path / "t.trace", tmp_path / "l.csv")


def test_refuses_two_route_traces_and_foreign_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_lines(tmp_path / "one.csv", route_lines())
    two = write_lines(tmp_path / "two.csv", route_lines())
    assert "a second route trace" in refused(capsys, tmp_path / "t.trace", one, two)
    heading = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct"
    foreign = write_lines(tmp_path / "m.csv", [heading, "1,1,1,1,1,1,1", "# summary n_prompt=900"])
    assert "not of one run" in refused(capsys, tmp_path / "t.trace", one, foreign)
    bad = write_lines(tmp_path / "n.csv", [heading, "1,1,fast,1,1,1,1"])
    assert "line 2, field 'wall_ms'" in refused(capsys, tmp_path / "t.trace", one, bad)
    other = write_lines(tmp_path / "o.csv", ["# bmoe_metrics v1", "# n_expert=9", heading, "1,1,1,1,1,1,1"])
    assert "field 'n_expert': 9" in refused(capsys, tmp_path / "t.trace", one, other)
    newer = write_lines(tmp_path / "v.csv", ["# bmoe_metrics v3", heading, "1,1,1,1,1,1,1"])
    assert "bmoe_metrics v3" in refused(capsys, tmp_path / "t.trace", one, newer)


def test_an_existing_output_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "r.csv", route_lines())
    out = tmp_path / "t.trace"
    assert main(["import", str(path), "--out", str(out)]) == 0
    capsys.readouterr()
    assert "--force" in refused(capsys, out, path)
    assert main(["import", str(path), "--out", str(out), "--force"]) == 0
    capsys.readouterr()
    # A bad file with --force leaves the old trace alone.
    bad = write_lines(tmp_path / "bad.csv", [])
    assert main(["import", str(bad), "--out", str(out), "--force"]) == 2
    assert open_trace(out).n_rows > 0


def test_an_input_is_never_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "r.csv", route_lines())
    before = path.read_bytes()
    assert main(["import", str(path), "--out", str(path), "--force"]) == 2
    assert "is one of the files to import" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: both fail inside the parquet writer."""
    path = write_lines(tmp_path / "r.csv", route_lines(decode=2000))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "from simlab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "t.trace"
    command = [sys.executable, "-c", code, "import", str(path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"simlab: error: {out}: writing the trace failed: ")
    assert done.stderr.count("\n") == 1
    with pytest.warns(SimlabWarning, match="0 complete graphs"):
        assert open_trace(out).n_rows == 0
