"""The trace folder: written in parts, readable after a kill, checked on open."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from route_files import route_lines

from simlab.cli.main import main
from simlab.errors import InputError, RunError, SimlabWarning
from simlab.trace import store
from simlab.trace.header import read_header
from simlab.trace.info import trace_info
from simlab.trace.store import TraceWriter, open_trace, prepare_folder
from simlab.types import TraceHeader, WeightRule

N_EXPERT, WIDTH, LAYERS = 4, 2, (1, 3)
HEADER = TraceHeader(
    model="m.gguf", arch="toy", n_layer=4, n_expert=N_EXPERT, n_expert_used=WIDTH,
    gating="softmax", score_space="prob", weight_rule=WeightRule(scale=2.5), entry_bytes={1: 100, 3: 120},
    dense_bytes={1: 7, 3: 9}, window_bytes={1: (1, 2, 3, 4), 3: (5, 6, 7, 8)}, budget_bytes=400,
    route="substitute", knobs={"L": 0.15}, evict="lru", scope="global",
)  # fmt: skip


def add_graph(writer: TraceWriter, graph: int, tokens_table: bool = True) -> None:
    """One decode graph of one token."""
    where = {"turn": [0], "graph": [graph], "phase": [1], "step": [graph]}
    for layer in LAYERS:
        writer.add(
            "routing",
            {
                **where, "layer": [layer], "pos_in_graph": [0],
                "scores": np.full((1, N_EXPERT), 0.25, np.float32),
                "router_experts": np.array([[0, 1]], np.int32), "experts": np.array([[2, 1]], np.int32),
                "weights": np.array([[0.5, 0.5]], np.float32),
            },
        )  # fmt: skip
    if tokens_table:
        writer.add("tokens", {**where, "wall_ns": [1000]})


def written(folder: Path, graphs: int = 3) -> Path:
    with TraceWriter(folder, HEADER, WIDTH) as writer:
        for graph in range(graphs):
            add_graph(writer, graph)
            writer.flush()
    return folder


def change_header(folder: Path, **changes: Any) -> None:
    """Edit on purpose: without the digest that tells of it, unless the digest is what is given."""
    path = folder / "header.json"
    fields = json.loads(path.read_text()) | {"header_sha256": "remove"} | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v != "remove"}))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "t.trace"))
    assert trace.header == HEADER
    assert (trace.width, trace.n_rows, trace.has_scores) == (WIDTH, 6, True)
    frame = trace.routing.collect()
    assert frame["layer"].to_list() == [1, 3] * 3
    assert frame["experts"].to_list() == [[2, 1]] * 6
    assert frame["gate_probs"].null_count() == 6
    assert trace.reads.collect().height == 0
    assert trace.tokens.collect()["wall_ns"].to_list() == [1000] * 3


@pytest.mark.parametrize("kept_bytes", [0, 32 << 20])
def test_scores_are_decoded_once_or_in_part_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """Those of a short trace are kept, those of a long one are not; one row without any, and it carries none."""
    monkeypatch.setattr(store, "_KEPT_BYTES", kept_bytes)
    asked: list[str] = []
    collect = store.Trace.collect

    def counted(self: store.Trace, table: str, frame: pl.LazyFrame) -> pl.DataFrame:
        asked.append(table)
        return collect(self, table, frame)

    monkeypatch.setattr(store.Trace, "collect", counted)
    rng = np.random.default_rng(1)
    scores = rng.random((8, N_EXPERT), np.float32)
    for number, missing in enumerate((False, True)):
        with TraceWriter(tmp_path / f"{number}.trace", HEADER, WIDTH) as writer:
            for graph, row in enumerate(scores):
                where = {"turn": [0], "graph": [graph], "phase": [1], "step": [graph], "layer": [1]}
                given = {"scores": row[None]} if not missing or graph != 5 else {}
                writer.add("routing", where | given | {"router_experts": np.array([[0, 1]], np.int32)})
                writer.flush()
        trace = open_trace(tmp_path / f"{number}.trace")
        asked.clear()
        assert trace.has_scores is not missing
        for start, n in ((0, 3), (3, 4), (6, 9)):
            found = trace.values("scores", start, n)
            expected = [None if missing and i == 5 else row.tolist() for i, row in enumerate(scores)]
            assert found.to_list() == expected[start : start + n]
        assert len(asked) == (1 if kept_bytes else 4)
        assert trace.values("router_experts", 6, 9).to_list() == [[0, 1]] * 2


def test_an_empty_trace_opens(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "t.trace", graphs=0))
    assert (trace.n_rows, trace.has_scores) == (0, False)
    assert trace_info(trace.path)["last_step"] is None


def test_a_killed_recording_keeps_its_complete_graphs(tmp_path: Path) -> None:
    folder = tmp_path / "t.trace"
    writer = TraceWriter(folder, HEADER, WIDTH)
    for graph in range(3):
        add_graph(writer, graph, tokens_table=graph < 2)
        writer.flush()
    # Killed here: no close, graph 2 has no row in the tokens table, and half a part lies about.
    (folder / "routing/.simlab-03.tmp").write_bytes(b"PAR1 half")
    (folder / ".simlab-00.tmp").write_text("{")
    with pytest.warns(SimlabWarning, match="did not finish; using its 2 complete graphs"):
        trace = open_trace(folder)
    assert not trace.header.complete
    assert trace.n_rows == 4
    assert trace.routing.collect()["graph"].max() == 1


def test_a_recording_killed_before_its_first_graph(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t.trace", HEADER, WIDTH)
    with pytest.warns(SimlabWarning, match="0 complete graphs"):
        assert open_trace(tmp_path / "t.trace").n_rows == 0


def test_a_failed_run_leaves_a_readable_trace(tmp_path: Path) -> None:
    def run() -> None:
        with TraceWriter(tmp_path / "t.trace", HEADER, WIDTH) as writer:
            add_graph(writer, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    with pytest.warns(SimlabWarning, match="1 complete graphs"):
        assert open_trace(tmp_path / "t.trace").n_rows == 2


def test_a_full_disk_is_one_line_and_what_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t.trace"
    writer = TraceWriter(folder, HEADER, WIDTH)
    add_graph(writer, 0)
    writer.flush()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    add_graph(writer, 1)
    with pytest.raises(RunError, match="No space left on device"):
        writer.flush()
    monkeypatch.undo()
    with pytest.warns(SimlabWarning, match="1 complete graphs"):
        assert open_trace(folder).n_rows == 2


# ---------------------------------------------------------------------------------------------------------
# Refusals


def test_rows_that_differ_from_the_promise(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    part = folder / "routing/part-000001.parquet"
    part.unlink()
    with pytest.raises(
        InputError, match=r"t.trace/routing/part-000001.parquet: is missing, though header.json"
    ):
        open_trace(folder)
    change_header(folder, part_sha256="remove")
    with pytest.raises(InputError, match=r"t.trace/routing: 4 rows, header.json promises 6"):
        open_trace(folder)


def test_a_missing_column(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    for part in (folder / "routing").iterdir():
        pl.read_parquet(part).drop("weights").write_parquet(part)
    with pytest.raises(
        InputError, match=r"t.trace/routing/part-00000.\.parquet: column 'weights' is missing"
    ):
        open_trace(folder)


def test_a_column_of_another_type(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    for part in (folder / "tokens").iterdir():
        pl.read_parquet(part).with_columns(pl.col("step").cast(pl.Float32)).write_parquet(part)
    with pytest.raises(
        InputError, match=r"t.trace/tokens/part-.*: column 'step' is Float32, should be Int64"
    ):
        open_trace(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entry_bytes": {"1": 100}}, "entry_bytes has no layer 3"),
        ({"entry_bytes": {"1": 100, "3": 0}}, "entry_bytes of layer 3 is 0"),
        ({"entry_bytes": {}}, "entry_bytes lists no MoE layer"),
        ({"entry_bytes": "remove"}, "field 'entry_bytes' is missing"),
        ({"n_expert": "remove"}, "field 'n_expert' is missing"),
        ({"schema_version": 99}, "schema_version 99"),
        ({"n_expert_used": 9}, "n_expert_used 9 of n_expert 4"),
        ({"weight_rule": {"magic": 1}}, "field 'weight_rule.magic': unknown"),
    ],
)
def test_headers_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = written(tmp_path / "t.trace")
    change_header(folder, **changes)
    with pytest.raises(InputError, match=message) as caught:
        open_trace(folder)
    assert "header.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\x01"])
def test_a_header_that_is_not_json(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path / "t.trace")
    (folder / "header.json").write_text(text)
    with pytest.raises(InputError, match=r"header.json: (not|the file is empty)"):
        open_trace(folder)


def test_a_header_of_bytes_that_are_not_text(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    (folder / "header.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError, match=r"header.json: not JSON"):
        open_trace(folder)


def test_no_trace_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such trace"):
        open_trace(tmp_path / "none.trace")
    with pytest.raises(InputError, match=r"it holds no header.json"):
        open_trace(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a trace"):
        open_trace(tmp_path / "file")


def test_an_unknown_header_field_is_left_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    change_header(folder, future={"x": 1})
    assert read_header(folder).header == HEADER


def test_force_replaces_traces_only(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    with pytest.raises(InputError, match="--force"):
        prepare_folder(folder, force=False)
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("years of work")
    with pytest.raises(InputError, match="not a trace"):
        prepare_folder(other, force=True)
    assert (other / "chapter.tex").exists()
    prepare_folder(folder, force=True)
    assert not folder.exists()


def test_force_never_removes_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "thesis.txt"
    plain.write_text("years of work")
    with pytest.raises(InputError, match="is not a trace folder"):
        prepare_folder(plain, force=True)
    (tmp_path / "r.csv").write_text("".join(line + "\n" for line in route_lines()))
    assert main(["import", str(tmp_path / "r.csv"), "--out", str(plain), "--force"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert plain.read_text() == "years of work"
    folder = written(tmp_path / "t.trace")
    for stranger in (folder / "notes.txt", folder / "tokens/notes.txt"):
        stranger.write_text("mine")
        with pytest.raises(InputError, match="not a trace"):
            prepare_folder(folder, force=True)
        assert stranger.read_text() == "mine"
        stranger.unlink()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InputError, match="is not a trace folder"):
        prepare_folder(tmp_path / "link", force=True)
    # What a kill leaves behind is a trace's own.
    (folder / "header.json").rename(folder / ".simlab-00.tmp")
    (folder / "tokens/.simlab-09.tmp").write_bytes(b"PAR1")
    assert not prepare_folder(folder, force=True).exists()
    # What an interrupted removal leaves has its header, and what was killed while it was made has no parts.
    with pytest.MonkeyPatch.context() as patch:
        removed: list[Path] = []

        def interrupted(path: Path, **_: object) -> None:
            removed.append(path)
            if len(removed) == 2:
                raise KeyboardInterrupt
            real(path)

        real = shutil.rmtree
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_folder(written(folder), force=True)
    assert not prepare_folder(folder, force=True).exists()
    (folder / "routing").mkdir(parents=True)
    assert not prepare_folder(folder, force=True).exists()
    (tmp_path / "empty").mkdir()
    assert not prepare_folder(tmp_path / "empty", force=True).exists()


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("out", ["r.csv/x", "none/x", "y" * 300])
def test_an_output_that_cannot_be_made(
    out: str, force: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.csv").write_text("".join(line + "\n" for line in route_lines()))
    assert main(["import", str(tmp_path / "r.csv"), "--out", str(tmp_path / out), *force]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"simlab: error: --out {tmp_path / out}: ")
    assert shown.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_full_from_the_start_leaves_nothing(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new/t.trace"
    if there:
        folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))

    def full(path: Path, text: str) -> int:
        path.write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(RunError, match="No space left on device; nothing was written"):
            TraceWriter(folder, HEADER, WIDTH)
    assert sorted(tmp_path.rglob("*")) == before
    assert open_trace(written(folder)).n_rows == 6


def test_parts_out_of_order(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    parts = sorted((folder / "routing").iterdir())
    parts[0].rename(folder / "routing/part-000007.parquet")
    change_header(folder, part_sha256="remove")
    with pytest.raises(InputError, match=r"t.trace/routing: column 'graph' goes down at row 4"):
        open_trace(folder)


@pytest.mark.parametrize("column", ["turn", "graph", "phase", "step", "layer"])
def test_a_row_of_no_known_place(column: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    part = folder / "routing/part-000001.parquet"
    frame = pl.read_parquet(part)
    frame.with_columns(pl.lit(None, frame.schema[column]).alias(column)).write_parquet(part)
    with pytest.raises(InputError, match=f"t.trace/routing: column '{column}': 2 rows have none"):
        open_trace(folder)


def test_a_phase_there_is_not(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    part = folder / "routing/part-000001.parquet"
    pl.read_parquet(part).with_columns(phase=pl.lit(7, pl.Int8)).write_parquet(part)
    with pytest.raises(InputError, match=r"t.trace/routing: column 'phase'"):
        open_trace(folder)


def test_a_writer_never_mixes_two_traces(tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    with pytest.raises(InputError, match="holds a trace already"):
        TraceWriter(folder, HEADER, WIDTH)
    assert open_trace(folder).n_rows == 6


# ---------------------------------------------------------------------------------------------------------
# info


def test_info_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "t.trace")
    info = trace_info(folder)
    assert info["cycle_bytes"] == WIDTH * (100 + 120)
    assert info["budget_cycles"] == 400 / 440
    assert (info["graphs"], info["decode_tokens"], info["prefill_tokens"], info["turns"]) == (3, 3, 0, 1)
    assert (info["first_step"], info["last_step"], info["score_coverage_pct"]) == (0, 2, 100.0)
    assert (info["entry_bytes_min"], info["entry_bytes_max"]) == (100, 120)
    assert any("below one token cycle" in line for line in info["warnings"])
    assert main(["info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(info))
    assert main(["info", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "substitute (L=0.15), lru, global" in text
    assert "440 bytes" in text


def test_info_leaves_the_throw_away_turn_out(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", HEADER, WIDTH) as writer:
        where = {"turn": [-1], "graph": [0], "phase": [0], "step": [0], "layer": [1], "pos_in_graph": [0]}
        writer.add("routing", {**where, "router_experts": np.array([[0, 1]], np.int32)})
        add_graph(writer, 1)
    info = trace_info(tmp_path / "t.trace")
    assert (info["graphs"], info["prefill_tokens"], info["turns"], info["rows"]) == (1, 0, 1, 3)


def test_info_of_an_unfinished_recording_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = TraceWriter(tmp_path / "t.trace", HEADER, WIDTH)
    add_graph(writer, 0)
    writer.flush()
    assert main(["info", str(tmp_path / "t.trace")]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("simlab: warning: ")
    assert "NOT complete" in shown.out


@pytest.mark.parametrize("command", ["info", "curve"])
def test_commands_that_need_no_jax(command: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    code = "import sys; from simlab.cli.main import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
