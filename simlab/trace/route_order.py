"""Whether the lines of a route trace stand in the order in which an engine writes them.

An engine writes graph by graph, in each layer by layer, in each token by token, slots from 0 up. The grouping of
`route_csv.py` rests on that: of lines that were sorted, interleaved or cut out it would make graphs that never ran.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.csv_text import CsvText
from simlab.types import DECODE

_Refuse = Callable[[int, str, str], InputError]
"""`(row, field, problem)` to the error."""
_ORDER = "lines stand as the engine wrote them: graph by graph, in each layer by layer"


class _Graphs(NamedTuple):
    """Per graph: its first row, its turn, phase, smallest and largest known step (-1: none), layers and rows of one."""

    first: NDArray[np.int64]
    turn: NDArray[np.int64]
    phase: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    n_layers: NDArray[np.int64]
    width: NDArray[np.int64]


def check_slots(text: CsvText, slot: NDArray, starts: NDArray[np.bool_]) -> None:
    """Refuse a routing whose slots do not go up from 0; both arrays have one item per line.

    Raises:
        InputError: with its line.
    """
    wrong = np.flatnonzero(starts & (slot != 0))
    if len(wrong):
        line = int(wrong[0])
        problem = f"slot {slot[line]} begins a routing; the slots of a routing go up from 0"
        raise text.refuse(line, "slot", problem)


def check_order(text: CsvText, rows: dict[str, NDArray], line_of_row: NDArray, sized: Sequence[int]) -> None:
    """Refuse rows that no engine writes in that order, and tell of steps that are not there.

    Args:
        rows: turn, graph, phase, step and layer of each routing row.
        sized: layers with a size in the header.

    Raises:
        InputError: steps that do not go up, or graphs without a layer that the others have.
    """

    def refuse(row: int, field: str, problem: str) -> InputError:
        return text.refuse(int(line_of_row[row]), field, problem)

    graph, layer, step = rows["graph"], rows["layer"], rows["step"]
    again = (np.diff(graph) == 0) & (np.diff(layer) == 0)
    prompt = again & (rows["phase"][1:] != DECODE) & (step[1:] >= 0) & (step[:-1] >= 0)
    back = np.flatnonzero(prompt & (np.diff(step) <= 0))
    if len(back):
        row = int(back[0]) + 1
        raise refuse(
            row, "step", f"step {step[row]} after {step[row - 1]}, in one layer of a prompt; {_ORDER}"
        )
    batch = np.flatnonzero(np.append(True, ~again))
    n_rows = np.diff(np.append(batch, len(graph)))
    wider = np.flatnonzero((np.diff(graph[batch]) == 0) & (np.diff(n_rows) > 0))
    if len(wider):
        at = int(wider[0])
        below, above = layer[batch[at]], layer[batch[at + 1]]
        problem = (
            f"layer {above} has {n_rows[at + 1]} rows, layer {below} before it {n_rows[at]}; rows are missing"
        )
        raise refuse(int(batch[at]), "layer", problem)
    graphs = _graphs_of(rows, batch, n_rows)
    alone = _check_steps(graphs, refuse)
    _check_layers(graphs, rows, batch, alone, sized, text, refuse)
    _warn_of_gaps(graphs, rows, prompt, text, line_of_row)


def _graphs_of(rows: dict[str, NDArray], batch: NDArray, n_rows: NDArray) -> _Graphs:
    first = np.flatnonzero(np.diff(rows["graph"], prepend=-1))
    known = np.where(rows["step"] >= 0, rows["step"], np.iinfo(np.int64).max)
    low, high = np.minimum.reduceat(known, first), np.maximum.reduceat(rows["step"], first)
    of_batch = np.searchsorted(batch, first)
    return _Graphs(
        first,
        rows["turn"][first],
        rows["phase"][first],
        np.where(high >= 0, low, -1),
        high,
        np.diff(np.append(of_batch, len(batch))),
        np.maximum.reduceat(n_rows, of_batch),
    )


def _check_steps(graphs: _Graphs, refuse: _Refuse) -> NDArray[np.bool_]:
    """Whether each graph is a draft layer's, alone at the step just decoded; refuses steps that go back."""
    known = np.flatnonzero(graphs.high >= 0)
    before, after = known[:-1], known[1:]
    alone = np.zeros(len(graphs.first), bool)
    if not len(after):
        return alone
    same_turn = graphs.turn[after] == graphs.turn[before]
    decode = (graphs.phase[after] == DECODE) & (graphs.phase[before] == DECODE)
    twice = same_turn & decode & (graphs.low[after] == graphs.high[before])
    alone[after] = twice & (graphs.n_layers[after] == 1) & (graphs.n_layers.max() > 1)
    # Of several tokens decoded at once, the last may be rejected and their positions come again.
    may_return = np.where(decode, graphs.width[before] - 1, 0)
    back = same_turn & (graphs.low[after] <= graphs.high[before] - may_return) & ~alone[after]
    if back.any():
        at = int(np.argmax(back))
        was, now = graphs.high[before[at]], graphs.low[after[at]]
        what = f"step {now} a second time" if was == now else f"step {now} after {was}"
        turn = graphs.turn[after[at]]
        problem = f"{what} in turn {turn}, and the steps of a turn go up; {_ORDER}"
        raise refuse(int(graphs.first[after[at]]), "step", problem)
    return alone


def _check_layers(
    graphs: _Graphs,
    rows: dict[str, NDArray],
    batch: NDArray[np.int64],
    alone: NDArray[np.bool_],
    sized: Sequence[int],
    text: CsvText,
    refuse: _Refuse,
) -> None:
    """Every graph has the layers that most have; one of a prompt may lack the last, where only outputs are routed."""
    of_batch, layer = rows["graph"][batch], rows["layer"][batch]
    routed, index = np.unique(layer, return_inverse=True)
    n_graphs = np.bincount(index[~alone[of_batch]], minlength=len(routed))
    usual = n_graphs > 0.5 * (~alone).sum()
    needed = usual[index]
    if usual.any():  # the last one may be missing in a prompt
        needed &= (graphs.phase[of_batch] == DECODE) | (index < np.flatnonzero(usual)[-1])
    n_usual = usual.sum() - (usual.any() & (graphs.phase != DECODE))
    short = ~alone & (np.bincount(of_batch, needed, minlength=len(alone)) < n_usual)
    if short.any():
        graph = int(np.argmax(short))
        here = set(layer[of_batch == graph].tolist())
        lost = next(one for one in routed[usual].tolist() if one not in here)
        problem = f"the graph of step {graphs.high[graph]} has no rows of layer {lost}, as most graphs have"
        raise refuse(int(graphs.first[graph]), "layer", problem)
    lacking = sorted(set(sized) - set(routed.tolist()))
    if lacking and lacking[0] < routed[-1]:
        raise InputError(f"{text.path}: layer {lacking[0]} has expert_bytes in the header and no rows")
    if lacking:
        warnings.warn(
            f"{text.path}: layers {', '.join(map(str, lacking))} have expert_bytes in the header and no rows (a draft "
            "layer?); they count in a token cycle",
            SimlabWarning,
            stacklevel=4,
        )


def _warn_of_gaps(
    graphs: _Graphs, rows: dict[str, NDArray], prompt: NDArray, text: CsvText, line_of_row: NDArray
) -> None:
    step = rows["step"]
    inside = np.flatnonzero(prompt & (np.diff(step) > 1)) + 1
    before, after = np.arange(len(graphs.first) - 1), np.arange(1, len(graphs.first))
    one_row = (graphs.phase[before] != DECODE) | (graphs.width[before] == 1)
    known = (
        (graphs.turn[before] == graphs.turn[after]) & (graphs.high[before] >= 0) & (graphs.low[after] >= 0)
    )
    between = after[known & one_row & (graphs.low[after] > graphs.high[before] + 1)]
    found = np.sort(np.concatenate([inside, graphs.first[between]]))
    if len(found):
        warnings.warn(
            f"{text.path}, line {text.line_of(int(line_of_row[found[0]]))}, field 'step': {step[found[0]]} does not "
            f"follow the step before it ({len(found)} such places in all); steps are missing, and the cache did not "
            "see them",
            SimlabWarning,
            stacklevel=4,
        )
