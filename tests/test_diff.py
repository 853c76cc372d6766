"""`simlab diff`: nothing of what differs is missed, the first of it is named, and what is alike is called so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import generate, make_header

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.cli.output import cell_to_json, cells_to_frame
from simlab.judge.diff import DECIDED, PLACE, diff, diff_text, trace_slots
from simlab.replay.slots import replay_slots
from simlab.trace.store import open_trace
from simlab.types import CellNumbers, PhaseNumbers

ROOT = Path(__file__).parent.parent
ORIGINAL = ROOT / "traces" / "original.trace"


@pytest.fixture(scope="module")
def slots() -> pl.DataFrame:
    return trace_slots(open_trace(ROOT / "traces" / "margin-0.15.trace")).head(2000)


@pytest.fixture(scope="module")
def cells() -> list[CellNumbers]:
    """Six cells with numbers of no replay: what is compared need not make sense."""
    made = build_cells(budgets=["1.5cycles", "3cycles"], margins=["0", ".1", ".3"])
    return [
        CellNumbers("replay", cell, 1.5 * i, 0.5 * i, 4, _phase(i), _phase(7 * i))
        for i, cell in enumerate(made, 1)
    ]


def _phase(seed: int) -> PhaseNumbers:
    fields = dataclasses.fields(PhaseNumbers)
    made: dict[str, Any] = {
        f.name: seed + i if str(f.type).startswith("int") else seed / (i + 1) for i, f in enumerate(fields)
    }
    return PhaseNumbers(**made)


def put(folder: Path, name: str, frame: pl.DataFrame) -> Path:
    path = folder / name
    frame.write_parquet(path)
    return path


def test_a_recording_and_its_own_replay_are_alike(tmp_path: Path) -> None:
    recorded = open_trace(ORIGINAL)
    replayed = replay_slots(recorded, build_cells(budgets=["2cycles"])[0]).slots
    found = diff(ORIGINAL, put(tmp_path, "s.parquet", replayed))
    assert found.same
    assert found.heights == (replayed.height, replayed.height) == (2033 * 8,) * 2
    assert found.not_compared == ()


def test_a_trace_is_the_slot_table_that_a_plain_loop_makes_of_it() -> None:
    recorded = open_trace(ROOT / "traces" / "drop-0.75.trace")
    expected = []
    for row in recorded.routing.collect().iter_rows(named=True):
        for slot, router in enumerate(row["router_experts"]):
            if router < 0:
                continue
            decided = [row[n][slot] for n in ("experts", "weights", "residency", "dropped", "read_bytes")]
            expected.append((*(row[n] for n in PLACE[:-1]), slot, router, *decided))
    found = trace_slots(recorded)
    assert found.columns == [*PLACE, *DECIDED]
    assert found.rows() == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_was_changed_is_what_is_found(slots: pl.DataFrame, tmp_path: Path, data: st.DataObject) -> None:
    names = ["expert", "weight", "residency", "read_bytes", "router_expert", "dropped"]
    places = st.integers(0, slots.height - 1)
    changes = data.draw(st.dictionaries(st.sampled_from(names), st.sets(places, min_size=1, max_size=3)))
    changed = slots
    for name, rows in changes.items():
        values = changed[name].to_list()
        for row in rows:
            if name == "dropped":
                values[row] = not values[row]
            elif name == "weight":
                values[row] = float(np.nextafter(np.float32(values[row]), np.float32(2)))
            else:
                values[row] += 1
        changed = changed.with_columns(pl.Series(name, values, dtype=changed[name].dtype))
    found = diff(put(tmp_path, "a.parquet", slots), put(tmp_path, "b.parquet", changed))
    assert found.same == (not changes)
    assert found.differing == {name: len(rows) for name, rows in changes.items()}
    if changes:
        first = min(min(rows) for rows in changes.values())
        assert found.first is not None
        assert found.first.where["slot_number"] == first
        assert set(found.first.columns) == {name for name, rows in changes.items() if first in rows}
        assert found.first.where["layer"] == slots["layer"][first]


def test_a_table_that_ends_early_is_not_the_same(slots: pl.DataFrame, tmp_path: Path) -> None:
    a, b = put(tmp_path, "a.parquet", slots), put(tmp_path, "b.parquet", slots.head(50))
    found = diff(a, b)
    assert (found.same, found.first, found.heights) == (False, None, (slots.height, 50))
    assert f"{a} has {slots.height:,} slots, {b} 50" in diff_text(str(a), str(b), found)


def test_what_only_one_knows_is_named_and_left_out(tmp_path: Path) -> None:
    trace = generate(make_header(), seed=3, n_decode=20).write(tmp_path / "t.trace")
    known = trace_slots(trace).with_columns(pl.lit(1).cast(pl.Int32).alias("expert"), weight=0.5, residency=1)
    known = known.with_columns(dropped=pl.lit(False), read_bytes=0)
    found = diff(trace.path, put(tmp_path, "b.parquet", known))
    assert found.not_compared == ("expert", "weight", "residency", "dropped", "read_bytes")
    assert found.first is None


def test_two_traces_differ_in_scores_and_header_too(tmp_path: Path) -> None:
    made = generate(make_header(), seed=3, n_decode=20)
    a = made.write(tmp_path / "a.trace")
    row = 31
    made.rows[row]["scores"] = made.rows[row]["scores"].copy()
    made.rows[row]["scores"][5] += 1
    made.header = make_header(gating="sigmoid")
    b = made.write(tmp_path / "b.trace")
    found = diff(a.path, b.path)
    assert found.first is None
    assert found.header == {"gating": ("softmax", "sigmoid")}
    assert found.first_row is not None
    assert found.first_row.where["row_number"] == row
    assert found.first_row.columns["scores"][0].startswith("expert 5: ")
    assert not found.same
    other = generate(make_header(n_expert=8), seed=3, n_decode=20).write(tmp_path / "c.trace")
    assert diff(a.path, other.path).first_row.columns["scores"] == ("16 values", "8 values")  # type: ignore[union-attr]


def test_cells_are_matched_by_setting_whatever_their_order(cells: list[CellNumbers], tmp_path: Path) -> None:
    frame = cells_to_frame(cells)
    a = put(tmp_path, "a.parquet", frame)
    assert diff(a, put(tmp_path, "b.parquet", frame.reverse())).same
    frame.write_csv(tmp_path / "c.csv")
    assert diff(a, tmp_path / "c.csv").same
    (tmp_path / "d.json").write_text(json.dumps([cell_to_json(n) for n in reversed(cells)]))
    assert diff(a, tmp_path / "d.json").same


def test_counts_differ_by_one_and_means_by_more_than_a_last_digit(
    cells: list[CellNumbers], tmp_path: Path
) -> None:
    frame = cells_to_frame(cells)
    a = put(tmp_path, "a.parquet", frame)
    mean = pl.col("decode_mass_displaced")
    near = frame.with_columns(mean * (1 + 2e-16))
    assert diff(a, put(tmp_path, "near.parquet", near)).same
    row = pl.int_range(pl.len()) == 4
    far = frame.with_columns(pl.when(row).then(mean + 1e-6).otherwise(mean))
    count = pl.col("decode_hits")
    far = far.with_columns(pl.when(pl.int_range(pl.len()) >= 4).then(count + 1).otherwise(count))
    found = diff(a, put(tmp_path, "far.parquet", far))
    assert found.first is not None
    assert found.first.where["cell_number"] == 4
    assert set(found.first.columns) == {"decode_mass_displaced", "decode_hits"}
    assert found.differing == {"decode_mass_displaced": 1, "decode_hits": 2}


def test_cells_that_only_one_has_are_named(cells: list[CellNumbers], tmp_path: Path) -> None:
    a = put(tmp_path, "a.parquet", cells_to_frame(cells[:4]))
    b = put(tmp_path, "b.parquet", cells_to_frame(cells[1:]))
    found = diff(a, b)
    assert not found.same
    assert [len(one) for one in found.only] == [1, 2]
    assert found.only[0][0]["knobs"] == '{"L": 0.0}'
    text = diff_text("a", "b", found)
    assert "only in a: 1 cells" in text
    # The same cell twice is two cells.
    twice = put(tmp_path, "twice.parquet", cells_to_frame([*cells[:4], cells[0]]))
    assert [len(one) for one in diff(a, twice).only] == [0, 1]


def test_the_command(
    cells: list[CellNumbers], slots: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = put(tmp_path, "a.parquet", cells_to_frame(cells))
    b = put(tmp_path, "b.parquet", cells_to_frame(cells[1:]))
    s = put(tmp_path, "s.parquet", slots)
    assert main(["diff", str(a), str(a)]) == 0
    assert "no difference in 6 cells" in capsys.readouterr().out
    assert main(["diff", str(a), str(b), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["cells"], len(found["only_a"])) == (False, [6, 5], 1)
    assert main(["diff", str(ORIGINAL), str(ROOT / "traces" / "margin-0.15.trace"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["header"]["route"] == ["original", "substitute"]
    assert found["first"]["graph"] == 1
    assert main(["diff", str(a), str(s)]) == 2
    assert capsys.readouterr().err == f"simlab: error: {a} holds cells, {s} slots: they cannot be compared\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.parquet", b"PAR1 no more", "cannot be read as parquet"),
        ("x.csv", b"a,b\n1,2\n", "has no column 'source'"),
        ("x.json", b"[]", "holds no cells"),
        ("x.json", b"{", "not JSON"),
        ("x.json", b'[{"route": "original"}]', "cell 1: is no cell with its numbers"),
        ("x.txt", b"words", "neither .parquet, .csv nor JSON"),
        ("x.json", b"", "the file is empty"),
        ("none.json", None, "no such file"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(
    name: str, content: bytes | None, message: str, cells: list[CellNumbers], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    a = put(tmp_path, "a.parquet", cells_to_frame(cells))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["diff", str(a), str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("decode.hits", "many", "field 'decode_hits': \"many\" is not a whole number"),
        ("decode.hits", 1.5, "field 'decode_hits': 1.5 is not a whole number"),
        ("decode.hits", True, "field 'decode_hits': true is not a whole number"),
        ("scope", "local", "field 'scope': \"local\" is not global or per_layer"),
        ("budget", None, "field 'budget': is missing"),
        ("knobs", 3, "field 'knobs': is missing, or holds no knobs by name"),
        ("decode.hits", 1 << 70, "out of range"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    field: str,
    value: Any,
    message: str,
    cells: list[CellNumbers],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [cell_to_json(n) for n in cells]
    *path, last = field.split(".")
    target = made[2]
    for part in path:
        target = target[part]
    target[last] = value
    (tmp_path / "x.json").write_text(json.dumps(made))
    assert main(["diff", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_wrong_word_in_a_csv_is_named_by_its_line(
    cells: list[CellNumbers], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = cells_to_frame(cells).with_columns(pl.col("decode_hits").cast(pl.String))
    frame = frame.with_columns(
        pl.when(pl.int_range(pl.len()) == 3)
        .then(pl.lit("x"))
        .otherwise(pl.col("decode_hits"))
        .alias("decode_hits")
    )
    frame.write_csv(tmp_path / "x.csv")
    assert main(["diff", str(tmp_path / "x.csv"), str(tmp_path / "x.csv")]) == 2
    assert "x.csv, line 5, field 'decode_hits': \"x\" is not a whole number" in capsys.readouterr().err
