"""Route traces cut at their end keep exactly their complete graphs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from route_files import ENTRY_BYTES, HEADING, route_lines, write_lines

from simlab.cli.main import main
from simlab.errors import InputError, SimlabWarning
from simlab.trace.route_csv import read_route

FIRST_ROW = route_lines().index(HEADING) + 1


@pytest.mark.parametrize("columns", [9, 10])
def test_a_cut_file_keeps_exactly_its_complete_graphs(columns: int, tmp_path: Path) -> None:
    lines = [x if x.startswith("#") else ",".join(x.split(",")[:columns]) for x in route_lines()]
    whole = read_route(write_lines(tmp_path / "whole.csv", lines))
    data = (tmp_path / "whole.csv").read_bytes()
    ends = np.cumsum([len(line) + 1 for line in lines]) - 1  # where each line's content ends
    graph_of_line = whole.rows["graph"][whole.row_of_slot]
    n_graphs = int(graph_of_line[-1]) + 1
    graph_ends = [ends[FIRST_ROW + np.flatnonzero(graph_of_line == g)[-1]] for g in range(n_graphs)]
    path = tmp_path / "cut.csv"
    for cut in range(len(data) - 1, 0, -3):
        path.write_bytes(data[:cut])
        complete = sum(end <= cut for end in graph_ends)
        if complete == 0:
            with pytest.raises(InputError):
                read_route(path)
            continue
        if cut >= graph_ends[-1]:
            route = read_route(path)
        else:
            # The file may end exactly with a graph; then nothing shows that more was to come.
            exact = any(cut in (end, end + 1) for end in graph_ends)
            if exact:
                route = read_route(path)
            else:
                with pytest.warns(SimlabWarning, match="cut short") as caught:
                    route = read_route(path)
                assert len(caught) == 1
        keep = graph_of_line < complete
        for name in ("expert", "residency", "read_bytes"):
            assert np.array_equal(route.slots[name], whole.slots[name][keep]), (cut, name)


def test_a_cut_file_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(route_lines())
    path = tmp_path / "cut.csv"
    path.write_text(text[:-25])
    assert main(["import", str(path), "--out", str(tmp_path / "t.trace")]) == 0
    assert (
        capsys.readouterr().err
        == f"simlab: warning: {path}: cut short at its end; using its 4 complete graphs\n"
    )
    header = json.loads((tmp_path / "t.trace/header.json").read_text())
    assert header["entry_bytes"] == {"0": ENTRY_BYTES, "1": ENTRY_BYTES, "2": ENTRY_BYTES}
