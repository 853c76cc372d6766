"""What a dump may hold that no router says: dense layers, profiling runs, doubled experts, missing rows and steps."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.facts import Facts
from simlab.types import PREFILL

if TYPE_CHECKING:
    from simlab.trace.routings import Routings

_MANY_ALIKE = 16
"""So many first tokens with one and the same routing in every layer are a profiling run, not a text."""


def leave_out_layers(found: Routings, facts: Facts, n_expert: int) -> Routings:
    """The layers that have experts: those that were named, else all that route any."""
    first = found.experts[:, 0]
    placeholder = (found.experts == first[:, None]).all(axis=1) & np.isin(first, (0, -1, n_expert))
    if found.experts.shape[1] == 1 and (found.n_tokens < _MANY_ALIKE or n_expert == 1):
        placeholder &= first != 0  # of one slot, expert 0 may well be meant
    routing = set(np.unique(found.layer[~placeholder]).tolist())
    there = set(np.unique(found.layer).tolist())
    if facts.moe_layers is None:
        layers = tuple(layer for layer in found.layers if layer in routing or layer not in there)
        if routing and there - routing:
            warn(
                f"{found.path}: {_named(there - routing)} say expert 0, or padding, in every slot of every token, as "
                "dense layers are dumped; left out (--moe-layers names those that have experts)"
            )
    else:
        layers = facts.moe_layers
        if not there & set(layers):
            raise facts.refuse("moe_layers", f"none of them is in {found.path}")
        if dense := (there - routing) & set(layers) if routing else set():
            raise facts.refuse(
                "moe_layers",
                f"{_named(dense)} of {found.path} say expert 0, or padding, in every slot of every token",
            )
        if others := routing - set(layers):
            warn(
                f"{found.path}: {_named(others)} route experts, are not among the --moe-layers, and left out"
            )
    if not routing or set(found.layers) == set(layers):
        return found
    return dataclasses.replace(found.rows(np.isin(found.layer, layers)), layers=layers)


def _named(layers: set[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, sorted(layers)))}"


def refuse_profiling_run(found: Routings, facts: Facts) -> None:
    if facts.skip_tokens is not None:
        return
    n_rows = np.bincount(found.token, minlength=found.n_tokens)
    like_first = int(np.argmin(np.append(n_rows == n_rows[0], False)))
    per_token = int(n_rows[0])
    if not per_token or like_first < _MANY_ALIKE:
        return
    ids = found.experts[: like_first * per_token].reshape(like_first, -1)
    alike = int(np.argmin(np.append((ids == ids[0]).all(axis=1), False)))
    if alike >= _MANY_ALIKE and (ids[0] >= 0).any():
        raise InputError(
            f"{found.place('ids', 0, None)}: the first {alike} tokens have one and the same routing in every "
            f"layer, as a profiling run leaves them; --skip-tokens {alike} leaves them out, 0 keeps them"
        )


def warn_twice(found: Routings) -> None:
    ids = np.sort(found.experts, axis=1)
    again = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    if again.any():
        row = int(np.argmax(again.any(axis=1)))
        warn(
            f"{found.place('ids', row, None)}: the same expert twice in one routing ({int(again.sum())} slots "
            "in all); kept as it stands"
        )


def check_steps(found: Routings, turn: NDArray[np.int64], step: NDArray[np.int64]) -> None:
    """Positions go up by one in a turn; in graphs of several tokens, of which some may be rejected, nobody knows."""
    if "step" not in found.tokens or "graph" in found.tokens:
        return
    known = (turn[1:] == turn[:-1]) & (step[1:] >= 0) & (step[:-1] >= 0)
    back = np.flatnonzero(known & (step[1:] <= step[:-1])) + 1
    if len(back):
        token = int(back[0])
        raise InputError(
            f"{found.path}, 'step' of token {token}: {step[token]} after {step[token - 1]}; the positions of a turn go "
            "up; number the turns where they start again (--turns, or 'turn')"
        )
    gap = np.flatnonzero(known & (step[1:] > step[:-1] + 1)) + 1
    if len(gap):
        token = int(gap[0])
        warn(
            f"{found.path}, 'step' of token {token}: {step[token]} after {step[token - 1]} ({len(gap)} such places in "
            "all); steps are missing, and the cache did not see them"
        )


def warn_of_missing(found: Routings, phase: NDArray[np.int64]) -> None:
    """Tokens without a routing in some layer; those of a prompt may lack the last, where only outputs are routed."""
    layers = np.unique(found.layer)
    n_rows = np.bincount(found.token, minlength=found.n_tokens)
    in_last = np.bincount(found.token, found.layer == layers[-1], minlength=found.n_tokens)
    lacking = np.where(n_rows > 0, len(layers) - n_rows - ((phase == PREFILL) & (in_last == 0)), 0)
    if lacking.any():
        token = int(np.argmax(lacking > 0))
        here = set(found.layer[found.token == token].tolist())
        lost = next(layer for layer in layers.tolist() if layer not in here)
        warn(
            f"{found.path}: token {token} has no routing of layer {lost} ({int(lacking.sum())} are missing in all); "
            "the cache did not see them"
        )


def warn_of_no_prompt(path: Path, position: int) -> None:
    """Say that a recording begins inside a text, at a position of it."""
    if position > 0:
        warn(
            f"{path}: has no prompt, its first token is at position {position}; the cache starts empty, and the first "
            "tokens miss what the prompt had brought in"
        )


def warn(text: str) -> None:
    warnings.warn(text, SimlabWarning, stacklevel=2)
