"""A trace is whole, or it is refused by the name of what is missing, foreign or contradicts the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_trace_store import HEADER, WIDTH, add_graph, change_header, written

from simlab.errors import InputError, SimlabWarning
from simlab.trace.header import read_header
from simlab.trace.store import TraceWriter, open_trace

SHIPPED = Path(__file__).resolve().parent.parent / "traces/original.trace"


def killed(folder: Path, graphs: int = 5, silent: int | None = None) -> Path:
    """An unfinished recording, a part of every table for each graph; graph `silent` read nothing."""
    writer = TraceWriter(folder, HEADER, WIDTH)
    for graph in range(graphs):
        add_graph(writer, graph, tokens_table=False)
        where = {"turn": [0], "graph": [graph], "phase": [1], "step": [graph]}
        if graph != silent:
            writer.add("reads", {**where, "layer": [1], "expert": [2], "window_bytes": [4096]})
        writer.add("tokens", {**where, "window_bytes": [0 if graph == silent else 4096]})
        writer.flush()
    return folder


# ---------------------------------------------------------------------------------------------------------
# Parts


@pytest.mark.parametrize("table", ["routing", "reads", "tokens"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_part_missing_in_the_middle_is_refused(table: str, number: int, tmp_path: Path) -> None:
    part = killed(tmp_path / "t.trace") / table / f"part-{number:06d}.parquet"
    part.unlink()
    with pytest.raises(InputError, match=f"^{part}: is missing; graph {number} and 0 others of 5 are not there"):
        open_trace(tmp_path / "t.trace")


@pytest.mark.parametrize("table", ["routing", "reads", "tokens"])
def test_parts_missing_at_the_end_are_a_cut_end(table: str, tmp_path: Path) -> None:
    folder = killed(tmp_path / "t.trace")
    for number in (3, 4):
        (folder / f"{table}/part-{number:06d}.parquet").unlink()
    with pytest.warns(SimlabWarning, match="did not finish; using its 3 complete graphs"):
        trace = open_trace(folder)
    assert trace.routing.collect()["graph"].unique().to_list() == [0, 1, 2]
    assert trace.reads.collect().height == trace.tokens.collect().height == 3


def test_a_flush_without_reads_is_no_missing_part(tmp_path: Path) -> None:
    folder = killed(tmp_path / "t.trace", silent=2)
    assert not (folder / "reads/part-000002.parquet").exists()
    with pytest.warns(SimlabWarning, match="using its 5 complete graphs"):
        assert open_trace(folder).reads.collect().height == 4


# ---------------------------------------------------------------------------------------------------------
# The header beside the tables


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_expert_used": 4},
            "field 'n_expert_used': 4 experts per token under route original, but the routing table has 8 slots per "
            r"row \(routing_width\)",
        ),
        (
            {"route": "top_k", "knobs": {"k": 6}},
            "field 'n_expert_used': 6 experts per token under route top_k, but the routing table has 8 slots",
        ),
        (
            {"entry_bytes": {str(layer): 1 for layer in range(8)}, "budget": None},
            "field 'entry_bytes': 1 bytes for layer 0, but the routing table charges reads of 26112 bytes there",
        ),
        (
            {"budget_bytes": 3342335},
            "field 'budget': 2cycles comes to 3342336 bytes for this model, but budget_bytes is 3342335",
        ),
        ({"budget": "two"}, "field 'budget': --budget two: not a budget"),
    ],
)
def test_a_header_that_contradicts_the_tables(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = shutil.copytree(SHIPPED, tmp_path / "t.trace")
    change_header(folder, **changes)
    with pytest.raises(InputError, match=f"t.trace/header.json: {message}"):
        open_trace(folder)


def test_a_narrower_routing_than_the_model_s_is_no_contradiction(tmp_path: Path) -> None:
    """Recorded under `--top-k 6` of 8, its budget two cycles of 6 experts each."""
    with TraceWriter(tmp_path / "t.trace", read_header(SHIPPED).header, 6) as writer:
        writer.add("routing", {"turn": [0], "graph": [0], "phase": [1], "step": [0], "layer": [0],
                               "router_experts": np.arange(6, dtype=np.int32)[None]})  # fmt: skip
    change_header(
        tmp_path / "t.trace", route="top_k+substitute", knobs={"k": 6, "L": 0.1}, budget_bytes=2 * 6 * 8 * 26112
    )
    assert open_trace(tmp_path / "t.trace").width == 6


def test_a_header_that_was_edited_is_told_of(tmp_path: Path) -> None:
    """What no table says: the router's function, and so every mass and weight that is computed from the scores."""
    folder = written(tmp_path / "t.trace")
    header = folder / "header.json"
    fields = json.loads(header.read_text())
    header.write_text(json.dumps(dict(reversed(fields.items()))))
    assert open_trace(folder).header == HEADER, "another order and layout of the same fields"
    change_header(folder, gating="sigmoid", header_sha256=fields["header_sha256"])
    with pytest.warns(SimlabWarning, match=f"^{header}: not what was recorded, its header_sha256 differs"):
        assert open_trace(folder).header.gating == "sigmoid"
    change_header(folder)
    assert open_trace(folder).header.gating == "sigmoid", "who edits on purpose takes the digest out"


# ---------------------------------------------------------------------------------------------------------
# Links, and paths that leave the folder


@pytest.mark.parametrize("name", ["header.json", "routing", "routing/part-000001.parquet"])
def test_a_link_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    elsewhere = tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(InputError, match=f"^{folder / name}.*: a link to {elsewhere}.*, which is not in the trace"):
        open_trace(folder)


def test_links_inside_the_folder_or_into_its_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot of Hugging Face's cache is nothing but links to the blobs beside it."""
    cache = tmp_path / "datasets--a--b"
    folder = written(cache / "snapshots/0123/t.trace")
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        file.rename(cache / f"blobs/{number}")
        file.symlink_to(cache / f"blobs/{number}")
    assert open_trace(folder).n_rows == 6
    (tmp_path / "by_link").symlink_to(folder)
    assert open_trace(tmp_path / "by_link").n_rows == 6


@pytest.mark.parametrize("name", ["routing/../../x.parquet", "/etc/passwd", "routing/part-1.parquet/.."])
def test_a_part_listed_under_another_path_is_refused(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "t.trace")
    change_header(folder, part_sha256={name: "0"})
    with pytest.raises(InputError, match=r"header.json: field 'part_sha256': .* is no part of a table"):
        open_trace(folder)
