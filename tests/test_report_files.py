"""`simlab report` from files: what belongs together, what is refused, and that its figures are those of the traces."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from route_files import route_lines

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from simlab.cells import build_cells
from simlab.cli.main import build_parser, main
from simlab.cli.options import cells_from_args
from simlab.cli.output import cell_to_json, cells_to_frame
from simlab.judge.against import (
    DecodeSeries,
    baseline,
    intervals_of,
    is_exact,
    read_saved,
    recorded_series,
    replayed_series,
    with_intervals,
)
from simlab.judge.measure import measure
from simlab.judge.report.cells_file import can_replay, numbers_of, read_cells_table, same_cell
from simlab.judge.report.commands import cell_options, train_option
from simlab.judge.report.inputs import sweeps_by_trace
from simlab.judge.report.tables import same_cells_table
from simlab.judge.stats import block_bootstrap_mean
from simlab.trace.store import open_trace
from simlab.types import Cell, CellNumbers

ROOT = Path(__file__).parent.parent
ORIGINAL, MARGIN, DROP = (
    str(ROOT / "traces" / f"{name}.trace") for name in ("original", "margin-0.15", "drop-0.75")
)
CELLS = build_cells(budgets=["2cycles"], margins=["0", "0.15"])


@pytest.fixture(scope="module")
def replays() -> list[tuple[CellNumbers, DecodeSeries]]:
    """Both cells replayed from the trace of the router's own routing."""
    return replayed_series(open_trace(ORIGINAL), CELLS)


@pytest.fixture(scope="module")
def lives() -> list[CellNumbers]:
    """The recordings of both cells, measured."""
    traces = [open_trace(ORIGINAL), open_trace(MARGIN)]
    numbers = [measure(trace, cell) for trace, cell in zip(traces, CELLS, strict=True)]
    return with_intervals(numbers, [recorded_series(trace) for trace in traces])


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, replays: list[Any], lives: list[CellNumbers]
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    numbers = [n for n, _ in replays]
    paths = {
        name: folder / name
        for name in ("sweep.parquet", "sweep.csv", "sweep.json", "old.parquet", "both.csv", "live.json")
    }
    cells_to_frame(numbers).write_parquet(paths["sweep.parquet"])
    cells_to_frame(numbers).write_csv(paths["sweep.csv"])
    cells_to_frame(numbers).drop("provenance").write_parquet(paths["old.parquet"])
    paths["sweep.json"].write_text(json.dumps([cell_to_json(n) for n in numbers]))
    named = [cells_to_frame(numbers).select(pl.lit(t).alias("trace"), pl.all()) for t in (ORIGINAL, DROP)]
    pl.concat(named).write_csv(paths["both.csv"])
    beside = [
        dataclasses.replace(live, provenance=n.provenance) for n, live in zip(numbers, lives, strict=True)
    ]
    pairs = [cell_to_json(n) for pair in zip(numbers, beside, strict=True) for n in pair]
    paths["live.json"].write_text(json.dumps(pairs))
    return {name: str(path) for name, path in paths.items()}


# ---------------------------------------------------------------------------------------------------------
# Cells beside the router's own routing


def test_a_recording_and_its_replay_have_one_series(replays: list[Any]) -> None:
    margin = replayed_series(open_trace(MARGIN), CELLS)
    for path, (_, replayed) in ((ORIGINAL, replays[0]), (MARGIN, margin[1])):
        recorded = recorded_series(open_trace(path))
        for name in DecodeSeries._fields:
            found, expected = getattr(recorded, name), getattr(replayed, name)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15, err_msg=name)
    assert recorded.mass.sum() > 0


def test_series_add_up_to_the_cell(replays: list[Any]) -> None:
    for numbers, series in replays:
        d = numbers.decode
        assert [series.lookups.sum(), series.hits.sum(), series.slots.sum()] == [d.lookups, d.hits, d.slots]
        assert series.read_mib.mean() == pytest.approx(d.read_mib_per_token)
        assert series.mass.sum() / series.events.sum() == pytest.approx(d.mass_displaced)


def test_intervals_hold_the_mean_and_are_those_of_the_bootstrap(
    lives: list[CellNumbers], replays: list[Any]
) -> None:
    for numbers in lives:
        for name, value in (
            ("hit_rate", numbers.decode.hit_rate),
            ("read_mib_per_token", numbers.decode.read_mib_per_token),
            ("substituted", (numbers.decode.substituted or 0) / numbers.decode.slots),
        ):
            low, high = numbers.intervals[name]
            assert low <= value <= high  # type: ignore[operator]
    first, other = (series for _, series in replays)
    expected = block_bootstrap_mean([first.read_mib - other.read_mib])
    assert read_saved(first, other) == pytest.approx(expected)
    saved = lives[0].decode.read_mib_per_token - lives[1].decode.read_mib_per_token  # type: ignore[operator]
    low, high = lives[1].intervals["read_mib_saved"]
    assert low < saved < high
    # Paired, it is far narrower than the two means apart.
    own = [n.intervals["read_mib_per_token"] for n in lives]
    assert high - low < 0.5 * min(b - a for a, b in own)
    assert "read_mib_saved" not in lives[0].intervals


def test_no_block_joins_two_turns(replays: list[Any]) -> None:
    series = replays[0][1]
    halves = series._replace(turn=(np.arange(len(series.turn)) >= 100).astype(np.int64))
    low, high = intervals_of(halves)["read_mib_per_token"]
    assert (low, high) == pytest.approx(block_bootstrap_mean([series.read_mib[:100], series.read_mib[100:]]))


def test_the_baseline_is_the_exact_cell_of_the_same_cache(replays: list[Any]) -> None:
    numbers = [n for n, _ in replays]
    cells = build_cells(budgets=["1cycle"], routes=["original", "drop_cold:F=0", "top_k:k=4"])
    assert [is_exact(c) for c in cells] == [True, True, False]
    assert baseline(CELLS[1], numbers) is numbers[0]
    for other in (
        {"budgets": ["3cycles"]},
        {"evicts": ["fifo"]},
        {"scope": "per_layer"},
        {"sequential": True},
    ):
        (cell,) = build_cells(**{"budgets": ["2cycles"], "margins": ["0.15"], **other})  # type: ignore[arg-type]
        assert baseline(cell, numbers) is None


# ---------------------------------------------------------------------------------------------------------
# Tables read back, and the commands that make them again


def test_cells_of_a_table_are_the_cells_that_were_replayed(files: dict[str, str], replays: list[Any]) -> None:
    for name in ("sweep.parquet", "sweep.csv", "sweep.json"):
        path = Path(files[name])
        found = numbers_of(path, read_cells_table(path))
        for numbers, (expected, _) in zip(found, replays, strict=True):
            assert same_cell(numbers.cell, expected.cell)
            assert numbers.cell.budget == expected.cell.budget
            assert numbers.decode == expected.decode
            assert numbers.all == expected.all


def test_live_cells_keep_their_intervals(files: dict[str, str], lives: list[CellNumbers]) -> None:
    path = Path(files["live.json"])
    found = numbers_of(path, read_cells_table(path))
    assert [n.intervals for n in found[1::2]] == [dict(n.intervals) for n in lives]
    assert {"ppl", "tok_s", "hit_rate", "dropped", "mass_displaced"} <= set(lives[1].intervals)


def test_a_users_policy_is_shown_and_not_replayed(files: dict[str, str], tmp_path: Path) -> None:
    cells = json.loads(Path(files["sweep.json"]).read_text())
    cells[1] |= {
        "route": "mine@my.py+drop_cold",
        "knobs": {"bonus": 2.0, "F": 0.5, "renorm": 0.0, "prefill": 0.0},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(cells))
    mine = numbers_of(path, read_cells_table(path))[1].cell
    assert [(s.policy.name, dict(s.knobs)) for s in mine.route.steps] == [
        ("mine@my.py", {"bonus": 2.0}),
        ("drop_cold", {"F": 0.5, "renorm": 0.0, "prefill": 0.0}),
    ]
    assert not can_replay(mine)
    assert cell_options([mine]) == [
        ["--budget", "2cycles", "--route", "my.py:bonus=2+drop_cold:F=0.5,renorm=0,prefill=0"]
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"route": "nonsense"}, 'cell 2: route "nonsense": there is no such routing policy'),
        ({"route": "/tmp/evil.py"}, "there is no such routing policy"),
        ({"knobs": {}}, "cell 2: substitute: its knob 'L' is missing"),
        ({"knobs": {"L": 0.1, "M": 1.0}}, "cell 2: substitute: has no knob 'M'"),
        ({"knobs": {"L": "x"}}, "no set of numbers by name"),
        ({"budget": "many"}, "cell 2: --budget many: not a budget"),
        ({"intervals": {"hit_rate": 3}}, "is no set of [low, high] by name"),
    ],
)
def test_cells_that_cannot_be_are_refused(
    changes: dict[str, Any],
    message: str,
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = json.loads(Path(files["sweep.json"]).read_text())
    cells[1] |= changes
    path = tmp_path / "x.json"
    path.write_text(json.dumps(cells))
    assert main(["report", ORIGINAL, "--sweep", str(path), "--out", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


_ROUTES = [
    "original",
    "substitute:L=.1",
    "max_rank:M=12,J=1",
    "drop_cold:F=.3",
    "substitute:L=.2+drop_cold:F=.5",
]
_EVICTS = ["lru", "fifo", "layer_lru", "lfu_decay:half_life=64"]
_LISTS = st.fixed_dictionaries(
    {
        "budgets": st.lists(st.sampled_from(["2cycles", "1000.5MiB", "25%", "12/layer"]), min_size=1, unique=True),
        "routes": st.lists(st.sampled_from(_ROUTES), min_size=1, unique=True),
        "evicts": st.lists(st.sampled_from(_EVICTS), min_size=1, unique=True),
        "scope": st.sampled_from(["global", "per_layer"]),
        "sequential": st.booleans(),
    }
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(lists=_LISTS, kept=st.integers(1, 60), margins=st.booleans())
def test_the_options_of_cells_make_these_cells_again(lists: dict[str, Any], kept: int, margins: bool) -> None:
    if margins:
        lists = {**lists, "routes": [], "margins": ["0", "0.05", "0.1234567890123"]}
    cells = build_cells(**lists)
    whole = cell_options(cells)
    for wanted, options in ((cells, whole), (cells[:kept], cell_options(cells[:kept]))):
        made: list[Cell] = []
        for words in options:
            args = build_parser().parse_args(["sweep", "t.trace", *words])
            made += cells_from_args(args)
        assert len(made) == len(wanted)
        assert all(any(same_cell(cell, other) for other in made) for cell in wanted)


def test_one_command_is_enough_for_a_grid() -> None:
    cells = build_cells(budgets=["2cycles", "4cycles"], margins=["0", ".1"], evicts=["lru", "fifo"])
    assert cell_options(cells) == [
        ["--budget", "2cycles,4cycles", "--margin", "0,0.1", "--evict", "lru,fifo"]
    ]


def test_what_was_learned_from_is_asked_for_again(replays: list[Any]) -> None:
    numbers = replays[0][0]
    for note, option in (
        (None, []),
        ("trained on 25% of decode, not counted", ["--train", "25%"]),
        ("one expert at a time; trained on other.trace", ["--train", "other.trace"]),
        ("diagnostic: trained on the tokens it is measured on", ["--train", "same"]),
        ("25% of decode not counted", ["--train", "25%"]),
    ):
        assert train_option([dataclasses.replace(numbers, note=note)]) == option


def test_a_table_of_several_traces_is_split_among_them(files: dict[str, str], replays: list[Any]) -> None:
    swept = sweeps_by_trace([files["both.csv"]], [DROP, ORIGINAL])
    expected = [n.decode for n, _ in replays]
    assert [[n.decode for n in numbers] for numbers in swept.values()] == [expected, expected]
    swept = sweeps_by_trace([files["sweep.csv"], files["sweep.json"]], [DROP, ORIGINAL])
    assert [len(numbers) for numbers in swept.values()] == [2, 2]
    assert sweeps_by_trace([], [DROP]) == {DROP: []}


def test_cells_that_all_traces_have_stand_side_by_side(replays: list[Any]) -> None:
    first = [n for n, _ in replays]
    half = dataclasses.replace(first[1], decode=dataclasses.replace(first[1].decode, hit_rate=0.5))
    html = same_cells_table({"a.trace": first, "b.trace": [half]})
    words = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", html)
    heads = [
        "Budget",
        *(f"{what}, {t}" for what in ("Hit rate (%)", "MiB per token") for t in ("a.trace", "b.trace")),
    ]
    assert words == [*heads, "2cycles", "61.8", "50.0", "0.61", "0.61"]
    assert same_cells_table({"a.trace": first}) == ""
    assert same_cells_table({"a.trace": first[:1], "b.trace": first[1:]}) == ""


# ---------------------------------------------------------------------------------------------------------
# The command


@pytest.mark.slow
def test_a_report_of_a_sweep_and_live_runs(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.html"
    words = [ORIGINAL, "--sweep", files["sweep.parquet"], "--validate", files["live.json"], "--out", str(out)]
    assert main(["report", *words]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(
        "At 2 token cycles (3.19 MiB), L = 0.15 cuts flash reads from 1.03 to 0.61 MiB per token, 0.42 ["
    )
    assert f"wrote {out}" in said.err
    page = out.read_text()
    for words in ("Replay beside live", "LRU at every budget", "Policy or working set?", "108.97 tok/s"):
        assert words in page
    repeat = page.split("<pre><code>")[1].split("</code>")[0].splitlines()
    assert repeat[0] == shlex.join(
        [
            "simlab",
            "sweep",
            ORIGINAL,
            "--budget",
            "2cycles",
            "--margin",
            "0,0.15",
            "--out",
            files["sweep.parquet"],
        ]
    )
    assert repeat[1].startswith(f"simlab validate {ORIGINAL} --budget 2cycles --margin 0,0.15 --json &gt; ")
    assert repeat[2].startswith(f"simlab report {ORIGINAL} --sweep ")
    assert main(["report", ORIGINAL, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_several_traces_stand_side_by_side(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = []
    for name, seed in (("toy", 1), ("other", 2)):
        csv = tmp_path / f"{name}.route.csv"
        csv.write_text("\n".join(route_lines(decode=30, seed=seed)) + "\n")
        traces.append(str(tmp_path / f"{name}.trace"))
        assert main(["import", str(csv), "--out", traces[-1]]) == 0
    out = tmp_path / "r.html"
    capsys.readouterr()
    assert main(["report", *traces, "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["toy.trace", "other.trace"]
    assert "At 2 token cycles (0.0114 MiB), routing as it ran, lru: " in said[0]
    page = out.read_text()
    assert "2 traces" in page
    assert "Decode hit rate (%), toy.trace" in page
    assert "does not say what budget it was recorded at" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.trace"], "none.trace: no such trace"),
        ([ORIGINAL, ORIGINAL], "the same trace is given twice"),
        ([ORIGINAL, "--sweep", "{live.json}"], "--sweep {live.json}: holds live runs; give them as --validate"),
        ([ORIGINAL, "--sweep", "{sweep.csv}", "--sweep", "{sweep.csv}"], "more tables than traces"),
        ([ORIGINAL, "--sweep", "{both.csv}"], "has cells of"),
        ([ORIGINAL, DROP, "--sweep", "{sweep.csv}"], "none of the tables is of"),
        ([ORIGINAL, "--validate", "{sweep.json}"], "is no replay with its live run next"),
        ([ORIGINAL, DROP, "--validate", "{live.json}"], "give one file for each of the 2 traces"),
        ([ORIGINAL, "--validate", "{live.json}", "--validate", "{live.json}"], "more files than traces"),
        ([ORIGINAL, "--validate", "none.json"], "none.json: no such file"),
        ([ORIGINAL, "--budget", "lots"], "--budget lots: not a budget"),
        ([DROP, "--sweep", "{sweep.parquet}"], f"--sweep: a setting: is not of {DROP} (setting recorded under "),
        ([DROP, "--sweep", "{old.parquet}"], "it is of another trace or of another version of simlab"),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_are_refused_in_one_line(
    words: list[str], message: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def filled(text: str) -> str:
        for name, path in files.items():
            text = text.replace("{" + name + "}", path)
        return text

    assert main(["report", *map(filled, words), "--out", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert filled(message) in err
    assert err.count("simlab: error: ") == 1
    assert err.count("\n") == 1 + err.count("simlab: warning: ")
    assert not (tmp_path / "r.html").exists()
