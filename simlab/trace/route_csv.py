"""`route_trace v1`: the routing a BigMoeOnEdge engine recorded, one line per routed slot.

Read by column name; `dropped` may be missing (older files). The lines are grouped into routing rows (token x
MoE layer), batches and graphs by the rules of engine-semantics, section 4.

Padding: a line whose expert is -1 or `n_expert`, whose weight is 0 or nan and that charges no bytes is a slot
that does not exist. Any other id outside the model is refused. An expert that comes twice in one routing is
kept, with one warning: a cache walk has a rule for it.

Lines in another order than an engine's are refused (`route_order.py`).

A file cut at its end loses its last graph unless that graph is whole: its last line complete, the last MoE
layer there, with k slots, for the last token.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.csv_text import (
    EXACT,
    INT32,
    MAX_ENTRY_BYTES,
    MAX_EXPERT,
    MAX_LAYER,
    CsvText,
    Words,
    key_values,
    read_csv_text,
)
from simlab.trace.route_order import check_order, check_slots
from simlab.types import DECODE

TAG = "route_trace v1"
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
_SHAPE = {"n_layer": MAX_LAYER + 1, "n_expert": MAX_EXPERT, "n_expert_used": MAX_EXPERT}
"""Field of the model line and its largest value."""
_MAX_SUM = 1 << 62
_MANY_SLOTS, _SPARSE = 1 << 24, 64
_MAX_WEIGHT = float(np.finfo(np.float32).max)
_NO_POSITION = -1
_MODEL = re.compile(r"model=(.*?)(?:\s+arch=|$)")


@dataclass(frozen=True)
class RouteFile:
    """A read route trace. Arrays of `slots` have one item per line, arrays of `rows` one per routing row."""

    path: Path
    model: str
    arch: str
    n_layer: int
    n_expert: int
    k: int
    """Slots of the widest routing row."""
    entry_bytes: dict[int, int]
    dense_bytes: dict[int, int]
    """Both by MoE layer."""
    row_of_slot: NDArray[np.int64]
    slots: dict[str, NDArray]
    """slot, expert (-1: no such slot), weight, residency, dropped, read_bytes."""
    rows: dict[str, NDArray]
    """turn, graph, phase, step, layer, pos_in_graph."""
    cut: bool
    """Whether its end is missing."""

    @property
    def any_dropped(self) -> bool:
        """Whether any slot was dropped, so that a dropping policy ran."""
        return bool(self.slots["dropped"].any())


@dataclass(frozen=True)
class _Preamble:
    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    entry_bytes: dict[int, int]
    """0 where a layer is not streamed."""
    dense_bytes: dict[int, int]


def read_route(path: Path) -> RouteFile:
    """Read a route trace whole.

    Raises:
        InputError: the file is not a route trace of version 1, or a value in it cannot be used.
    """
    text = read_csv_text(path)
    preamble = _read_preamble(text)
    text.require(_COLUMNS)
    text, cut = _settle_tail(text, preamble)
    if not text.frame.height:
        raise InputError(f"{path}: a header without rows")
    slots, where = _read_columns(text, preamble)
    graph, starts = _segment(where, slots["slot"])
    check_slots(text, slots["slot"], starts)
    keep = _whole_graphs(path, preamble, graph, starts, where, slots, cut)
    n_lines = len(graph)
    if keep < n_lines:
        graph, starts = graph[:keep], starts[:keep]
        slots = {name: values[:keep] for name, values in slots.items()}
        where = {name: values[:keep] for name, values in where.items()}
    row_of_slot = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    rows = {name: where[name][first] for name in ("turn", "phase", "step", "layer")}
    rows["graph"] = graph[first]
    rows["pos_in_graph"] = _positions(rows)
    k = int(slots["slot"].max()) + 1
    # The tables hold k slots for every row: one absurd slot number would take memory for all of them.
    if len(first) * k > max(_MANY_SLOTS, _SPARSE * len(graph)):
        problem = f"{k - 1}, but most of the {len(first)} rows have far fewer slots"
        raise text.refuse(int(np.argmax(slots["slot"])), "slot", problem)
    moe = {layer: size for layer, size in preamble.entry_bytes.items() if size > 0}
    check_order(text, rows, first, list(moe))
    _warn_width(text, preamble, k)
    _warn_twice(text, slots["expert"], row_of_slot)
    _warn_draft(text, rows, first)
    return RouteFile(
        path=path,
        model=preamble.model,
        arch=preamble.arch,
        n_layer=preamble.n_layer,
        n_expert=preamble.n_expert,
        k=k,
        entry_bytes=moe,
        dense_bytes={layer: preamble.dense_bytes[layer] for layer in moe},
        row_of_slot=row_of_slot,
        slots=slots,
        rows=rows,
        cut=cut or keep < n_lines,
    )


# ---------------------------------------------------------------------------------------------------------
# Header lines


def _read_preamble(text: CsvText) -> _Preamble:
    path = text.path
    tag = text.comments[0][1] if text.comments else ""
    if tag != TAG:
        raise InputError(f"{path}, line 1: not a route trace, it should begin with '# {TAG}'")
    shape: dict[str, int] | None = None
    model, arch = "", ""
    entry: dict[int, int] = {}
    dense: dict[int, int] = {}
    layer_lines: list[tuple[Words, int]] = []
    for line, comment in text.comments[1:]:
        words = key_values(path, line, comment)
        if words.text("layer") is not None:
            layer = _whole(path, line, words, "layer", 0, MAX_LAYER)
            if layer in entry:
                raise words.refuse("layer", f"a second line for layer {layer}")
            entry[layer] = _whole(path, line, words, "expert_bytes", 0, MAX_ENTRY_BYTES)
            dense[layer] = words.whole("dense_bytes", 0, EXACT) or 0
            layer_lines.append((words, layer))
        elif words.text("model") is not None:
            if shape is not None:
                raise words.refuse("model", "a second model line; a file holds one run")
            shape = {name: _whole(path, line, words, name, 1, high) for name, high in _SHAPE.items()}
            found = _MODEL.search(comment)
            model, arch = (found[1] if found else ""), words.text("arch") or ""
            if shape["n_expert_used"] > shape["n_expert"]:
                raise words.refuse(
                    "n_expert_used", f"{shape['n_expert_used']} of {shape['n_expert']} experts"
                )
    if shape is None:
        raise InputError(f"{path}: field 'n_expert' is missing, there is no '# model=' line")
    for words, layer in layer_lines:
        if layer >= shape["n_layer"]:
            raise words.refuse("layer", f"{layer}, but the header says n_layer={shape['n_layer']}")
    return _Preamble(model, arch, shape["n_layer"], shape["n_expert"], shape["n_expert_used"], entry, dense)


def _whole(path: Path, line: int, words: Words, field: str, low: int, high: int) -> int:
    value = words.whole(field, low, high)
    if value is None:
        raise InputError(f"{path}, line {line}, field '{field}': is missing")
    return value


# ---------------------------------------------------------------------------------------------------------
# Rows


def _settle_tail(text: CsvText, preamble: _Preamble) -> tuple[CsvText, bool]:
    """Take the last line in if it is whole; else say that the file was cut.

    Without a newline a line may have been cut inside its last number. `expert_bytes` gives that away: it is 0
    or the layer's entry size, and no prefix of one is the other.
    """
    if text.tail is None:
        return text, False
    if len(text.tail) != len(text.columns):
        return text, True
    fields = dict(zip(text.columns, (field.strip() for field in text.tail), strict=True))
    sizes = {str(layer): str(size) for layer, size in preamble.entry_bytes.items()}
    if fields["expert_bytes"] not in ("0", sizes.get(fields["layer"])) or fields.get("dropped", "0") not in (
        "0",
        "1",
    ):
        return text, True
    return text.with_line([fields[name] for name in text.columns]), False


def _read_columns(text: CsvText, preamble: _Preamble) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    """The columns of slots and of places, checked."""
    where = {
        "turn": text.integers("turn", 0, INT32),
        "phase": text.integers("phase", 0, 1),
        "step": text.integers("step", _NO_POSITION, INT32),
        "layer": text.integers("layer", 0, preamble.n_layer - 1),
    }
    turn = where["turn"]
    if (turn[1:] < turn[:-1]).any():
        index = int(np.argmax(turn[1:] < turn[:-1])) + 1
        raise text.refuse(index, "turn", f"{turn[index]} after {turn[index - 1]}; turns only go up")
    for layer in np.unique(where["layer"]):
        if preamble.entry_bytes.get(int(layer), 0) <= 0:
            index = int(np.argmax(where["layer"] == layer))
            said = "is 0" if int(layer) in preamble.entry_bytes else "has no '# layer' line"
            raise text.refuse(
                index, "layer", f"expert_bytes of layer {layer} {said}, but rows route experts there"
            )
    slot = text.integers("slot", 0, MAX_EXPERT)
    if slot.max() >= preamble.n_expert_used:
        index = int(np.argmax(slot >= preamble.n_expert_used))
        raise text.refuse(
            index, "slot", f"{slot[index]}, but the header says n_expert_used={preamble.n_expert_used}"
        )
    expert = text.integers("expert", -(1 << 63), (1 << 63) - 1)
    weight = text.floats("weight", 0, _MAX_WEIGHT, pl.Float32)
    read_bytes = text.integers("expert_bytes", 0, MAX_ENTRY_BYTES)
    entry = np.zeros(preamble.n_layer, np.int64)
    entry[list(preamble.entry_bytes)] = list(preamble.entry_bytes.values())
    entry = entry[where["layer"]]
    if float(entry.max()) * len(entry) >= _MAX_SUM:
        index = int(np.argmax(entry))
        raise text.refuse(
            index, "layer", f"expert_bytes={entry[index]} is too large to be added up over the rows"
        )
    outside = (expert < 0) | (expert >= preamble.n_expert)
    padding = ((expert == -1) | (expert == preamble.n_expert)) & (read_bytes == 0) & ~(np.abs(weight) > 0)
    if (outside & ~padding).any():
        index = int(np.argmax(outside & ~padding))
        raise text.refuse(
            index, "expert", f"{expert[index]}, but the header says n_expert={preamble.n_expert}"
        )
    charged = (read_bytes != 0) & (read_bytes != entry)
    if charged.any():
        index = int(np.argmax(charged))
        raise text.refuse(
            index,
            "expert_bytes",
            f"{read_bytes[index]}, must be 0 or the {entry[index]} of layer {where['layer'][index]}",
        )
    slots = {
        "slot": slot,
        "expert": np.where(padding, -1, expert),
        "weight": np.where(padding, np.float32(0), weight),
        "residency": text.integers("residency", 0, 2),
        "dropped": text.integers("dropped", 0, 1).astype(bool)
        if "dropped" in text.columns
        else np.zeros(len(slot), bool),
        "read_bytes": read_bytes,
    }
    return slots, where


def _segment(where: dict[str, NDArray], slot: NDArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Graph number of every line, and which lines start a routing row."""

    def differs(values: NDArray) -> NDArray[np.bool_]:
        return np.concatenate([[True], values[1:] != values[:-1]])

    def previous(values: NDArray) -> NDArray:
        return np.concatenate([values[:1], values[:-1]])

    layer, step = where["layer"], where["step"]
    new_step = differs(step)
    # The last layer may route fewer rows than the others and not know their positions (step -1): same graph.
    narrowed = (layer > previous(layer)) & ((step == _NO_POSITION) | (previous(step) == _NO_POSITION))
    new_graph = (
        differs(where["turn"])
        | differs(where["phase"])
        | (layer < previous(layer))
        | ((where["phase"] == DECODE) & new_step & ~narrowed)
    )
    starts = new_graph | (layer != previous(layer)) | new_step | (slot <= previous(slot))
    return np.cumsum(new_graph) - 1, starts


def _whole_graphs(
    path: Path,
    preamble: _Preamble,
    graph: NDArray,
    starts: NDArray,
    where: dict[str, NDArray],
    slots: dict[str, NDArray],
    cut: bool,
) -> int:
    """Number of lines to keep: all, or those before a last graph that is not whole."""
    last = int(np.flatnonzero(graph == graph[-1])[0])
    decoded = len(np.unique(graph[where["phase"] == DECODE]))
    # A draft layer may have a size and no rows; but of few graphs only the header knows the last layer.
    moe = (layer for layer, size in preamble.entry_bytes.items() if size > 0)
    last_layer = int(where["layer"].max()) if decoded > 1 else max(moe)
    widest = int(slots["slot"].max()) + 1
    row = int(np.flatnonzero(starts)[-1])
    whole = (
        where["layer"][-1] == last_layer
        and len(graph) - row == widest
        and where["step"][-1] in (where["step"][last:].max(), _NO_POSITION)
    )
    if whole and not cut:
        return len(graph)
    kept = int(graph[-1]) + whole
    if not kept:
        raise InputError(f"{path}: cut short inside its first graph, so it holds no complete step")
    text = f"{path}: cut short at its end; using its {kept} complete graphs"
    warnings.warn(text, SimlabWarning, stacklevel=3)
    return len(graph) if whole else last


def _positions(rows: dict[str, NDArray]) -> NDArray[np.int64]:
    """Place of each routing row's token in its graph.

    From the position where a graph's rows know theirs (the last layer may route only the last token), else
    counted within the batch.
    """
    batch = np.cumsum(np.concatenate([[True], (np.diff(rows["graph"]) != 0) | (np.diff(rows["layer"]) != 0)]))
    index = np.arange(len(batch))
    first_of_batch = np.concatenate([[True], np.diff(batch) != 0])
    counted = index - np.maximum.accumulate(np.where(first_of_batch, index, 0))
    known = rows["step"] >= 0
    rising = first_of_batch | (np.diff(rows["step"], prepend=-1) > 0)
    n_graphs = int(rows["graph"][-1]) + 1
    usable = np.ones(n_graphs, bool)
    np.logical_and.at(usable, rows["graph"], known & rising)
    lowest = np.full(n_graphs, np.iinfo(np.int64).max)
    np.minimum.at(lowest, rows["graph"], rows["step"])
    return np.where(usable[rows["graph"]], rows["step"] - lowest[rows["graph"]], counted)


def _warn_width(text: CsvText, preamble: _Preamble, k: int) -> None:
    if k < preamble.n_expert_used:
        warnings.warn(
            f"{text.path}: the header says n_expert_used={preamble.n_expert_used}, the rows have {k} slots; "
            f"using {k}",
            SimlabWarning,
            stacklevel=3,
        )


def _warn_twice(text: CsvText, expert: NDArray, row_of_slot: NDArray) -> None:
    exists = np.flatnonzero(expert >= 0)
    key = row_of_slot[exists] * (1 << 20) + expert[exists]
    order = np.argsort(key, kind="stable")
    again = exists[order[1:][key[order][1:] == key[order][:-1]]]
    if len(again):
        warnings.warn(
            f"{text.path}, line {text.line_of(int(again.min()))}, field 'expert': the same expert twice in "
            f"one routing ({len(again)} slots in all); kept as it stands",
            SimlabWarning,
            stacklevel=3,
        )


def _warn_draft(text: CsvText, rows: dict[str, NDArray], line_of_row: NDArray) -> None:
    """A draft head that predicts a second token may write its rows under the number of a layer of the model."""
    starts = np.flatnonzero(np.diff(rows["graph"], prepend=-1))
    low, high, step = (
        np.minimum.reduceat(rows["layer"], starts),
        np.maximum.reduceat(rows["layer"], starts),
        np.maximum.reduceat(rows["step"], starts),
    )
    place = np.stack([rows["turn"][starts], rows["phase"][starts], step])
    again = (place[:, 1:] == place[:, :-1]).all(axis=0) & (place[1, 1:] == DECODE) & (step[1:] >= 0)
    draft = np.flatnonzero(again & (low[1:] == high[1:]) & (low[:-1] < high[:-1])) + 1
    if len(draft):
        row = starts[draft[0]]
        warnings.warn(
            f"{text.path}, line {text.line_of(int(line_of_row[row]))}, field 'layer': layer {rows['layer'][row]} "
            f"again, alone, at the step just decoded ({len(draft)} times): a draft layer under that number? kept as "
            "graphs of their own",
            SimlabWarning,
            stacklevel=3,
        )
