"""The JSON of mixture-of-experts fingerprints: per decoded token and layer the experts chosen and their shares.

    {"router_data": [{"token_146": {"layer_0": {"selected_experts": [..], "selected_probs": [..]}, ...}}, ...], ...}

One object per token, its number the position in the context. Only decoded tokens are in it, and the last sampled one
has no routing. Probabilities are those after the top k, so they are weights, not scores. The file names no model:
experts per layer and entry bytes come as facts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from simlab.errors import InputError
from simlab.trace.csv_text import INT32, MAX_LAYER
from simlab.trace.facts import Facts
from simlab.trace.reading import shown
from simlab.trace.routings import Routings
from simlab.trace.table_files import column_of
from simlab.trace.tables import Column, Table, routings_of_table
from simlab.types import DECODE

_ROUTER_DATA, _EXPERTS, _SHARES = "router_data", "selected_experts", "selected_probs"
_NUMBERED = re.compile(r"(token|layer)_([0-9]{1,9})")


def is_fingerprint(content: Any) -> bool:
    """Whether parsed JSON has the shape of one."""
    return isinstance(content, dict) and isinstance(content.get(_ROUTER_DATA), list)


def read_fingerprint(path: Path, content: Any, facts: Facts) -> Routings:
    """The routings of a fingerprint.

    Raises:
        InputError: a token or layer that is not of that shape, with its place.
    """
    if facts.columns:
        raise facts.refuse("columns", f"{path} is a fingerprint, whose fields have fixed names")
    places: list[str] = []
    index: list[int] = []
    layer: list[int] = []
    step: list[int] = []
    routings: list[dict[str, Any]] = []
    last = -1
    for number, entry in enumerate(content[_ROUTER_DATA]):
        at = f"{path}, {_ROUTER_DATA}[{number}]"
        if not isinstance(entry, dict) or len(entry) != 1:
            raise InputError(f"{at}: {shown(entry)}, must be an object of one token")
        name, layers = next(iter(entry.items()))
        position = _number(at, name, "token", INT32)
        if position <= last:
            raise InputError(f"{at}: '{name}' after token_{last}; positions only go up")
        last = position
        if not isinstance(layers, dict) or not layers:
            raise InputError(f"{at}.{name}: {shown(layers)}, must be an object of layers")
        for key, routing in layers.items():
            places.append(f"{at}.{name}.{key}")
            layer.append(_number(f"{at}.{name}", key, "layer", MAX_LAYER))
            if not isinstance(routing, dict) or _EXPERTS not in routing:
                raise InputError(f"{places[-1]}: field '{_EXPERTS}' is missing")
            index.append(number)
            step.append(position)
            routings.append(routing)
    if not routings:
        raise InputError(f"{path}: field '{_ROUTER_DATA}' holds no token")
    names = {"ids": _EXPERTS, "index": "token", "layer": "layer", "step": "token", "phase": "token"}
    if any(_SHARES in routing for routing in routings):
        names["weights"] = _SHARES

    def place(row: int, field: str) -> str:
        return f"{places[row]}, field '{field}'"

    columns = {
        "index": Column(np.array(index, np.int64)),
        "layer": Column(np.array(layer, np.int64)),
        "step": Column(np.array(step, np.int64)),
        "phase": Column(np.full(len(index), DECODE, np.int64)),
    }
    for ours, theirs in names.items():
        if ours in ("ids", "weights"):
            columns[ours] = column_of([routing.get(theirs) for routing in routings], ours, theirs, place)
    if columns["ids"].lengths is None:
        raise InputError(f"{place(0, _EXPERTS)}: must be a list of experts")
    return routings_of_table(Table(path, names, columns, len(index), place), facts)


def _number(at: str, name: str, word: str, high: int) -> int:
    match = _NUMBERED.fullmatch(name)
    if not match or match[1] != word or int(match[2]) > high:
        raise InputError(f"{at}: field {shown(name)}, must be {word}_0, {word}_1, ... up to {high}")
    return int(match[2])
