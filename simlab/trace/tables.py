"""Long tables of routings: CSV, parquet and JSONL with one row per (token, layer), or per (token, layer, slot).

With one row per (token, layer) the experts, and where there are any the weights, scores and gate probabilities, are
lists; in CSV a list is written `3 17 5`, `3;17;5` or `"[3, 17, 5]"`, an empty one `[]`. With one row per slot
experts and weights are numbers, slots are told by a column or by the order of the rows, and a list of scores stands
in every row of a routing. `NAMES` lists what a column may be called; `columns` of the facts names any other. Rows
may come in any order: tokens are put into that of (turn, token), or of (turn, step) where only the context position
is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace import arrays
from simlab.trace.csv_text import EXACT, INT32, MAX_EXPERT, MAX_LAYER
from simlab.trace.facts import Facts
from simlab.trace.routings import Routings

MAY_BE_LISTS = ("ids", "weights", "scores", "gate_probs")
"""Columns that may hold a list per row; the others hold one number."""
NAMES: dict[str, tuple[str, ...]] = {
    **{name: arrays.NAMES[name] for name in MAY_BE_LISTS},
    "layer": ("layer", "layer_id", "layer_idx", "layer_index", "moe_layer"),
    "slot": ("slot", "rank", "topk_slot", "slot_id"),
    "index": ("token", "token_index", "token_idx", "token_pos", "tok"),
    "turn": ("turn",),
    "phase": ("phase",),
    "step": ("step", "position", "pos"),
    "graph": ("graph", "batch"),
    "token": ("token_id", "vocab_id"),
}
"""Our name of a column, and what files call it."""
WHOLE: dict[str, tuple[int, int]] = {
    "layer": (0, MAX_LAYER), "slot": (0, MAX_EXPERT), "index": (0, EXACT), "turn": (0, INT32), "phase": (0, 1),
    "step": (-1, INT32), "graph": (0, EXACT), "token": (0, INT32), "ids": (-(1 << 62), 1 << 62),
}  # fmt: skip
"""Columns of whole numbers, and from where to where each goes; the others hold floats."""
_MANY, _SPARSE = 1 << 24, 64


class Column(NamedTuple):
    """Values of a column one after the other; `lengths` says how many each row has, None for one number a row."""

    flat: NDArray
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Table:
    """The columns of a file by our names, and where a row of them stands in it."""

    path: Path
    names: Mapping[str, str]
    columns: Mapping[str, Column]
    n_rows: int
    place: Callable[[int, str], str]
    """`(row, field of the file)` to the words that name the place."""
    cut: bool = False
    """Whether the file ended inside a row, so that its last token may not be whole."""

    def refuse(self, row: int, ours: str, problem: str) -> InputError:
        """The error for one value."""
        return InputError(f"{self.place(row, self.names.get(ours, ours))}: {problem}")


def pick_columns(path: Path, found: list[str], facts: Facts) -> dict[str, str]:
    """Our names to the file's, all that a routing needs among them.

    Raises:
        InputError: a column is missing, or two could be the same.
    """
    names = arrays.pick_names(path, found, NAMES, facts, "column")
    for needed in ("ids", "layer"):
        if needed not in names:
            known = ", ".join(NAMES[needed])
            raise InputError(
                f"{path}: no column of {needed} (known are {known}); name it with --columns {needed}=NAME"
            )
    if "index" not in names and "step" not in names:
        raise InputError(f"{path}: no column says which token a row is of; name it with --columns index=NAME")
    return names


def looks_like_table(columns: list[str]) -> bool:
    """Whether a CSV heading has expert ids and layers by a name known here."""
    lower = {name.lower() for name in columns}
    return all(lower & set(NAMES[needed]) for needed in ("ids", "layer"))


def routings_of_table(table: Table, facts: Facts) -> Routings:
    """One routing per (token, layer) of a table.

    Raises:
        InputError: rows that contradict each other, with their place.
    """
    if not table.n_rows:
        raise InputError(f"{table.path}: a table without rows")
    for name, column in table.columns.items():
        if column.lengths is not None and name not in MAY_BE_LISTS:
            raise table.refuse(0, name, "is a list, must be one whole number")
    token, first = _tokens(table)
    per_token = {n: table.columns[n].flat[first] for n in arrays.PER_TOKEN if n in table.columns}
    for name, values in per_token.items():
        differs = table.columns[name].flat != values[token]
        if differs.any():
            row = int(np.argmax(differs))
            problem = (
                f"{table.columns[name].flat[row]}, but another row of the token says {values[token[row]]}"
            )
            raise table.refuse(row, name, problem)
    layer = table.columns["layer"].flat
    slotted = table.columns["ids"].lengths is None
    routing, row_of, n = _group(token, layer)
    slot = _slots(table, routing, row_of, slotted)
    experts = _matrix(table, "ids", routing, slot, n, -1).astype(np.int64)
    k = experts.shape[1]
    weights = _weights(table, routing, slot, n, k, slotted)
    layers = _layers(table, facts)
    line_of_slot: dict[tuple[int, int], int] = {}

    def where(name: str, row: int, at: int | None) -> str:
        line = int(row_of[row])
        if slotted and at is not None:
            if not line_of_slot:
                slots = enumerate(zip(routing.tolist(), slot.tolist(), strict=True))
                line_of_slot.update({place: number for number, place in slots})
            line = line_of_slot.get((row, at), line)
        return table.place(line, table.names.get(name, name))

    found = Routings(
        path=table.path,
        token=token[row_of],
        layer=layer[row_of],
        layers=layers,
        experts=experts,
        n_tokens=len(first),
        where=where,
        weights=weights,
        tokens=per_token,
        scores=_scores(table, "scores", routing, row_of),
        gate_probs=_scores(table, "gate_probs", routing, row_of),
    )
    return _without_cut_token(found, int(token[-1]), table.cut)


def _tokens(table: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token number of every row, and the first row of every token."""
    by = "index" if "index" in table.columns else "step"
    place = table.columns[by].flat
    if by == "step" and (place < 0).any():
        row = int(np.argmax(place < 0))
        raise table.refuse(row, by, "-1, and no other column says which token the row is of")
    turn = table.columns["turn"].flat if "turn" in table.columns else np.zeros(table.n_rows, np.int64)
    _, first, token = np.unique(np.stack([turn, place]), axis=1, return_index=True, return_inverse=True)
    return token.reshape(-1).astype(np.int64), first


def _group(token: NDArray, layer: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Routing number of every row, and the first row of every routing."""
    _, first, routing = np.unique(token * (MAX_LAYER + 1) + layer, return_index=True, return_inverse=True)
    return routing.reshape(-1), first, len(first)


def _slots(table: Table, routing: NDArray, row_of: NDArray, slotted: bool) -> NDArray[np.int64]:
    """Slot of every row; with lists, of every value."""
    if not slotted:
        again = np.flatnonzero(row_of[routing] != np.arange(table.n_rows))
        if len(again):
            raise _second(table, int(again[0]), "")
        lengths = table.columns["ids"].lengths
        assert lengths is not None
        return _counted(lengths)
    if "slot" not in table.columns:
        order = np.argsort(routing, kind="stable")
        slot = np.empty(table.n_rows, np.int64)
        slot[order] = _counted(np.bincount(routing))
        return slot
    slot = table.columns["slot"].flat
    key = routing * (MAX_EXPERT + 1) + slot
    order = np.argsort(key, kind="stable")
    again = order[1:][key[order][1:] == key[order][:-1]]
    if len(again):
        row = int(again.min())
        raise _second(table, row, f", slot {slot[row]}")
    return slot


def _second(table: Table, row: int, slot: str) -> InputError:
    layer = table.columns["layer"].flat[row]
    hint = "" if "turn" in table.columns else "; positions that start again need a column 'turn'"
    return table.refuse(row, "layer", f"layer {layer}{slot} of this token a second time{hint}")


def _counted(lengths: NDArray) -> NDArray[np.int64]:
    """0, 1, .. for each of some lengths, one after the other."""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _matrix(table: Table, name: str, routing: NDArray, slot: NDArray, n: int, empty: float) -> NDArray:
    column = table.columns[name]
    rows = routing if column.lengths is None else np.repeat(routing, column.lengths)
    width = int(slot.max()) + 1 if len(slot) else 0
    # The matrix has that many slots in every row: one absurd slot number would take memory for all of them.
    if n * width > max(_MANY, _SPARSE * len(slot)) or width > MAX_EXPERT:
        row = int(np.argmax(slot))
        line = row if column.lengths is None else int(np.repeat(np.arange(table.n_rows), column.lengths)[row])
        problem = f"slot {width - 1}, but most of the {n} routings have far fewer"
        raise table.refuse(line, "slot" if column.lengths is None else name, problem)
    matrix = np.full((n, width), empty, column.flat.dtype)
    matrix[rows, slot] = column.flat
    return matrix


def _weights(
    table: Table, routing: NDArray, slot: NDArray, n: int, k: int, slotted: bool
) -> NDArray[np.float32] | None:
    column = table.columns.get("weights")
    if column is None:
        return None
    ids = table.columns["ids"].lengths
    if (column.lengths is None) != slotted:
        raise table.refuse(
            0, "weights", "must be " + ("one number, as the expert is" if slotted else "a list")
        )
    if column.lengths is not None and ids is not None and (column.lengths != ids).any():
        row = int(np.argmax(column.lengths != ids))
        raise table.refuse(row, "weights", f"{column.lengths[row]} weights for {ids[row]} experts")
    matrix = _matrix(table, "weights", routing, slot, n, 0)
    assert matrix.shape[1] == k
    return matrix


def _scores(table: Table, name: str, routing: NDArray, row_of: NDArray) -> NDArray[np.float32] | None:
    column = table.columns.get(name)
    if column is None:
        return None
    if column.lengths is None:
        raise table.refuse(0, name, "one number, must be the list of all experts' scores")
    width = int(column.lengths[0])
    wrong = column.lengths != width
    if wrong.any() or not width:
        row = int(np.argmax(wrong))
        raise table.refuse(row, name, f"{column.lengths[row]} numbers, where the first row has {width}")
    matrix = column.flat.reshape(table.n_rows, width)
    if len(row_of) < table.n_rows:
        # The list stands in each row of a routing; bits are compared, because NaN is no equal of itself.
        bits = np.ascontiguousarray(matrix).view(np.uint32)
        differs = (bits != bits[row_of[routing]]).any(axis=1)
        if differs.any():
            row = int(np.argmax(differs))
            raise table.refuse(row, name, "differs from an earlier row of the same token and layer")
    return matrix[row_of]


def _layers(table: Table, facts: Facts) -> tuple[int, ...]:
    """Numbers of all layers there are, with and without rows."""
    return tuple(sorted({*np.unique(table.columns["layer"].flat).tolist(), *(facts.moe_layers or ())}))


def _without_cut_token(found: Routings, last_in_file: int, cut: bool) -> Routings:
    """Leave out a last token that a cut took layers of."""
    n_rows = np.bincount(found.token, minlength=found.n_tokens)
    last = found.n_tokens - 1
    short = False
    if last_in_file == last and last > 0 and n_rows[last] < n_rows[last - 1]:
        of_last, before = (found.layer[found.token == t] for t in (last, last - 1))
        short = bool(np.isin(of_last, before).all() and of_last.max() < before.max())
    if not cut and not short:
        return found
    if found.n_tokens == 1:
        raise InputError(f"{found.path}: cut short inside its first token, so it holds no complete step")
    text = f"{found.path}: cut short at its end; using its {last} complete tokens"
    warnings.warn(text, SimlabWarning, stacklevel=2)
    return found.only_tokens(np.arange(found.n_tokens) != last_in_file)
