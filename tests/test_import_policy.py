"""A route trace holds what ran: of which policy, somebody has to say; and metrics are of the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from route_files import metrics_lines, route_lines, write_lines

import simlab
from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError, SimlabWarning
from simlab.judge.misses.explain import explain
from simlab.judge.report.inputs import report_of_files
from simlab.judge.report.page import verdict
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, open_trace

Captured = pytest.CaptureFixture[str]


def imported(folder: Path, route: list[str], *more: list[str], spec: str | None = None) -> Trace:
    files = [
        str(write_lines(folder / name, lines))
        for name, lines in zip(("r.csv", "m.csv"), (route, *more), strict=False)
    ]
    return open_trace(import_files(files, str(folder / "t.trace"), True, {"route": spec}))


def printed(capsys: Captured, *words: str) -> Any:
    """What a command prints; JSON parsed."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    out = capsys.readouterr().out
    return json.loads(out) if "--json" in words else out


def test_without_a_word_the_routing_is_unknown_everywhere(tmp_path: Path, capsys: Captured) -> None:
    trace = imported(tmp_path, route_lines())
    path = str(trace.path)
    assert (trace.header.route, trace.header.router_known) == (None, False)
    assert printed(capsys, "info", path, "--json")["route"] is None
    assert "policy      unknown\n" in printed(capsys, "info", path)
    budget = ("--budget", "1.5cycles")
    slots = tmp_path / "slots.parquet"
    found = printed(capsys, "replay", path, *budget, "--by", "layer", "--slots", str(slots), "--json")
    assert pl.read_parquet(slots)["router_expert"].null_count() == found["all"]["slots"]
    assert "no difference in 38 slots" in printed(capsys, "diff", str(slots), str(slots))
    assert found["route"] is None
    assert found["note"] == "of the routing that ran; the trace does not hold what the router picked"
    for of in (found["decode"], found["all"], *found["by_layer"]):
        assert (of["substituted"], of["agreement"]) == (None, None)
    assert found["decode"]["dropped"] == 0
    lines = printed(capsys, "replay", path, *budget).splitlines()
    assert lines[1].split()[2] == "unknown"
    assert "1.000" not in lines[1]
    assert printed(capsys, "curve", path, "--json")["route"] is None
    assert "LRU, global, executed routing, replay" in printed(capsys, "curve", path)
    assert printed(capsys, "explain", path, *budget, "--json")["route"] is None
    text = printed(capsys, "explain", path, *budget)
    assert "\nunknown, evict lru" in text
    assert "LRU, executed routing, 2 times the budget" in text
    assert "router's own routing, " not in text


def test_an_unknown_routing_goes_through_a_table_and_back(tmp_path: Path, capsys: Captured) -> None:
    from simlab.judge.report.cells_file import numbers_of, read_cells_table

    trace = imported(tmp_path, route_lines())
    words = ("sweep", str(trace.path), "--budget", "1.5cycles", "--drop", "0,.5")
    found = printed(capsys, *words, "--json")
    assert [cell["route"] for cell in found] == ["drop_cold", "drop_cold"]
    assert printed(capsys, *words).count("unknown+drop_cold:F=") == 2
    expected = simlab.sweep(trace, build_cells(budgets=["1.5cycles", "2cycles"]))
    for name in ("s.parquet", "s.csv", "s.json"):
        file = tmp_path / name
        out = ("--json",) if name == "s.json" else ("--out", str(file))
        said = printed(capsys, "sweep", str(trace.path), "--budget", "1.5cycles,2cycles", *out)
        if name == "s.json":
            file.write_text(json.dumps(said))
        back = numbers_of(file, read_cells_table(file))
        assert [n.decode for n in back] == [n.decode for n in expected]
        assert [n.cell.route.router_known for n in back] == [False, False]
        page = tmp_path / "page.html"
        assert main(["report", str(trace.path), "--sweep", str(file), "--out", str(page), "--force"]) == 0
        assert "routing as it ran" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("spec", "known"),
    [("original", True), ("drop_cold:F=0", True), ("top_k:k=2", True), ("substitute:L=.15", False)],
)
def test_a_stated_route_is_the_recorded_one(spec: str, known: bool, tmp_path: Path, capsys: Captured) -> None:
    path = write_lines(tmp_path / "r.csv", route_lines())
    out = tmp_path / "t.trace"
    assert main(["import", str(path), "--out", str(out), "--route", spec]) == 0
    header = open_trace(out).header
    assert (header.route, header.router_known) == (spec.partition(":")[0], known)
    assert header.knobs.get("L") == (None if known else 0.15)
    # What ran is replayed as it ran, whatever made it.
    found = printed(capsys, "replay", str(out), "--budget", "1.5cycles", "--json")
    assert found["decode"]["agreement"] == (1.0 if known else None)
    assert found["route"] == (spec.partition(":")[0] if known else None)


def test_a_count_of_substituted_slots_says_it_too(tmp_path: Path) -> None:
    def metrics(n: int) -> list[str]:
        *lines, summary = metrics_lines()
        return [*lines, f"{summary} experts_substituted={n}"]

    assert imported(tmp_path, route_lines(), metrics(0)).header.route == "original"
    assert imported(tmp_path, route_lines(), metrics(0)).header.router_known
    assert imported(tmp_path, route_lines(), metrics(3)).header.route is None
    with pytest.raises(InputError, match=r"--route original: .*m.csv says 3 slots were substituted"):
        imported(tmp_path, route_lines(), metrics(3), spec="original")


def test_a_stated_route_that_the_files_contradict(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(InputError, match=r"--route drop_cold: .*m.csv says drop_cold was off"):
        imported(tmp_path, route_lines(), metrics_lines(), spec="drop_cold:F=.5")
    with pytest.raises(InputError, match=r"--route top_k: k is 1, but .*r.csv has 2 slots"):
        imported(tmp_path, route_lines(), spec="top_k:k=1")
    with pytest.raises(InputError, match="--route nothing: no such routing policy"):
        imported(tmp_path, route_lines(), spec="nothing")
    *lines, last = route_lines()
    dropped = [*lines, last.rpartition(",")[0] + ",1"]
    with pytest.raises(
        InputError, match=r"--route original: .*r.csv has dropped slots; add what dropped them"
    ):
        imported(tmp_path, dropped, spec="original")
    header = imported(tmp_path, dropped, spec="drop_cold:F=.5").header
    assert (header.route, header.knobs["F"], header.router_known) == ("drop_cold", 0.5, True)
    sidecar = tmp_path / "ids.json"
    sidecar.write_text('{"route": "original"}')
    (tmp_path / "ids.npy").write_bytes(b"\x93NUMPY")
    assert main(["import", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "o.trace")]) == 2
    assert f"{sidecar}: field 'route': no file says what code to run" in capsys.readouterr().err


def test_a_report_explains_at_the_imported_budget(tmp_path: Path) -> None:
    """The metrics give bytes, not words: without them the report took two cycles, and told of another cache."""
    trace = imported(tmp_path, route_lines(decode=12), metrics_lines(decode=12))
    assert (trace.header.budget, trace.header.budget_bytes) == (None, 3 << 20)
    made = report_of_files([str(trace.path)], [], [])
    assert made.notes == []
    own = made.traces[0].explanation
    assert own is not None
    assert own.budget.total_bytes == 3 << 20
    expected = explain(trace, build_cells(budgets=["3MiB"])[0]).verdict
    assert own.verdict == expected
    assert expected.sentence in verdict(made.traces[0]).sentence


# -- metrics of another run --------------------------------------------------------------------------------------


def changed(row: int, **fields: str) -> Callable[[list[str]], list[str]]:
    """The metrics with fields of one row changed."""

    def edit(lines: list[str]) -> list[str]:
        heading = next(i for i, line in enumerate(lines) if line.startswith("step,"))
        names, found = lines[heading].split(","), lines[heading + row].split(",")
        lines[heading + row] = ",".join(fields.get(n, v) for n, v in zip(names, found, strict=True))
        return lines

    return edit


FOREIGN: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "another prompt": (
        lambda lines: [line.replace("n_prompt=3", "n_prompt=4") for line in lines],
        r"field 'n_prompt': 4, but .*r.csv decodes from position 3",
    ),
    "fewer tokens": (
        lambda lines: [*lines[:8], lines[-1]], r"field 'step': 3 decoded tokens, but .*r.csv has 4"
    ),
    "more tokens": (
        lambda lines: [*lines[:9], lines[8].replace("4,4,", "5,4,", 1), lines[-1]],
        r"field 'step': 5 decoded tokens, but .*r.csv has 4",
    ),
    "fewer bytes than were charged": (
        changed(2, read_bytes="1"), r"line 7, field 'read_bytes': 1, but .*r.csv charges 4000 bytes at that step"
    ),
    "more bytes than windows have": (changed(2, read_bytes="900000"), r"line 7, field 'read_bytes': 900000, but"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_metrics_of_another_run_are_refused(case: str, tmp_path: Path) -> None:
    edit, message = FOREIGN[case]
    with pytest.raises(InputError, match=message + r".*; the two are not of one run"):
        imported(tmp_path, route_lines(), edit(metrics_lines()))


def test_metrics_beside_a_file_that_was_cut(tmp_path: Path) -> None:
    """A run that did not end may have written more of the one than of the other."""
    with pytest.warns(SimlabWarning) as caught:
        trace = imported(tmp_path, route_lines()[:-1], metrics_lines())
    assert [str(w.message).partition(": ")[2][:38] for w in caught] == [
        "cut short at its end; using its 4 comp", "1 of its 4 steps are not in " + str(tmp_path)[:10]
    ]  # fmt: skip
    assert trace.tokens.collect()["wall_ns"].drop_nulls().len() == 3
    unfinished = [line.replace(",4,10.5", ",99,10.5") for line in metrics_lines()[:-2]]
    assert imported(tmp_path, route_lines(), unfinished).tokens.collect()["wall_ns"].drop_nulls().len() == 3
    # Look-ahead reads more than was missed.
    more = changed(2, read_bytes="900000")(metrics_lines())
    ahead = [*more[:-1], f"{more[-1]} spec_read_MiB=1.5"]
    assert imported(tmp_path, route_lines(), ahead).n_rows > 0
