"""Route traces whose lines are not as an engine writes them: sorted, interleaved, turned round, doubled or cut out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from route_files import HEADING, route_lines, write_lines

from simlab.errors import InputError, SimlabWarning
from simlab.trace.route_csv import RouteFile, read_route

LINES = route_lines(decode=20)
FIRST = LINES.index(HEADING) + 1
Rows = list[list[str]]


def edited(path: Path, edit: Callable[[Rows], Rows]) -> RouteFile:
    """Read the trace with its rows changed; a row is turn, phase, step, layer, slot, ..."""
    rows = edit([line.split(",") for line in LINES[FIRST:]])
    return read_route(write_lines(path / "r.csv", [*LINES[:FIRST], *(",".join(row) for row in rows)]))


def place(row: list[str]) -> tuple[int, ...]:
    return tuple(map(int, row[:5]))


def interleaved(rows: Rows) -> Rows:
    """The layers of steps 5 and 6 by turns."""
    return sorted(rows, key=lambda r: (int(r[2]) if r[2] not in "56" else 5, int(r[1]) and int(r[3])))


def line_of(step: int, layer: int) -> int:
    """Line of the first slot of a decoded routing."""
    return next(i for i, line in enumerate(LINES, 1) if line.startswith(f"0,1,{step},{layer},"))


REFUSED: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "sorted by layer": (
        lambda rows: sorted(rows, key=lambda r: (int(r[3]), int(r[2]))),
        rf"line {FIRST + 2 * 3 + 2 * 20 + 1}, field 'step': step 0 after 22 in turn 0, and the steps of a turn go up",
    ),
    "decode sorted by layer": (
        lambda rows: sorted(rows, key=lambda r: (r[1], int(r[3]), int(r[2]))), "step 3 after 22 in turn 0"
    ),
    "steps interleaved": (interleaved, "step 5 after 6 in turn 0, and the steps of a turn go up"),
    "slots in falling order": (
        lambda rows: sorted(rows, key=lambda r: (r[1], int(r[3]) if r[1] == "0" else int(r[2]), int(r[2]), int(r[3]),
                                                 -int(r[4]))),
        rf"line {FIRST + 1}, field 'slot': slot 1 begins a routing; the slots of a routing go up from 0",
    ),
    "a step twice": (
        lambda rows: [*rows, *(r for r in rows if r[1:3] == ["1", "22"])],
        f"line {len(LINES) + 1}, field 'step': step 22 a second time in turn 0",
    ),
    "a prompt's position twice": (
        lambda rows: rows[:2] + rows, f"line {FIRST + 3}, field 'step': step 0 after 0, in one layer of a prompt"
    ),
    "a layer missing in one step": (
        lambda rows: [r for r in rows if r[1:4] != ["1", "7", "1"]],
        f"line {line_of(7, 0)}, field 'layer': the graph of step 7 has no rows of layer 1, as most graphs have",
    ),
    "the last layer missing in one step": (
        lambda rows: [r for r in rows if r[1:4] != ["1", "7", "2"]], "the graph of step 7 has no rows of layer 2"
    ),
    "a layer missing in a prompt": (
        lambda rows: [r for r in rows if (r[1], r[3]) != ("0", "1")],
        f"line {FIRST + 1}, field 'layer': the graph of step 2 has no rows of layer 1",
    ),
    "a layer missing everywhere": (
        lambda rows: [r for r in rows if r[3] != "1"], "layer 1 has expert_bytes in the header and no rows"
    ),
    "a position of a prompt missing in one layer": (
        lambda rows: [r for r in rows if r[1:4] != ["0", "1", "0"]], "layer 1 has 3 rows, layer 0 before it 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_lines_that_no_engine_writes_are_refused(case: str, tmp_path: Path) -> None:
    edit, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        edited(tmp_path, edit)


def test_a_step_missing_is_said_once(tmp_path: Path) -> None:
    line = line_of(7, 0)
    told = rf"line {line}, field 'step': 8 does not follow the step before it \(2 such places in all\)"
    with pytest.warns(SimlabWarning, match=told) as caught:
        route = edited(
            tmp_path, lambda rows: [r for r in rows if (r[1], r[2]) not in (("1", "7"), ("1", "12"))]
        )
    assert len(caught) == 1
    assert route.rows["graph"][-1] == 18


def test_a_last_layer_without_rows_is_said(tmp_path: Path) -> None:
    with pytest.warns(
        SimlabWarning, match=r"layers 2 have expert_bytes in the header and no rows \(a draft layer\?\)"
    ):
        edited(tmp_path, lambda rows: [r for r in rows if r[3] != "2"])


def test_positions_of_rejected_drafts_come_again(tmp_path: Path) -> None:
    """Two tokens decoded at once up to position 23, of which the second was rejected: position 23 again."""

    def wide(rows: Rows) -> Rows:
        last = [r for r in rows if r[1:3] == ["1", "22"]]
        both = [[*r[:2], "23", *r[3:]] for layer in "012" for _ in range(2) for r in last if r[3] == layer]
        return [*rows, *both, *([*r[:2], "23", *r[3:]] for r in last)]

    assert edited(tmp_path, wide).rows["graph"][-1] == 22
