"""Routings read from arrays or tables, in one form, and from there to a trace's header and tables.

Whatever a dump may hold that no router says is looked for here, once for every format: padding, ids outside the
model, tokens of a profiling run, turns that are not told apart. Nothing is guessed: what is ambiguous is refused
with the option that settles it, what is odd but legal is kept with one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.trace.csv_text import INT32, MAX_EXPERT, MAX_LAYER
from simlab.trace.facts import Facts, keeps_router
from simlab.trace.routing_checks import (
    check_steps,
    leave_out_layers,
    refuse_profiling_run,
    warn,
    warn_of_missing,
    warn_of_no_prompt,
    warn_twice,
)
from simlab.trace.score_checks import best_by_score, check_scores, gate_of_logits, warn_of_weights
from simlab.types import DECODE, PREFILL, Gating, TraceHeader

_MAX_SUM = 1 << 61
_MAX_WEIGHT = float(np.finfo(np.float32).max)

Where = Callable[[str, int, int | None], str]
"""`(field, row, slot)` to the words that name the place in the file."""


@dataclass(frozen=True)
class Routings:
    """One routing per row, rows in any order; ids are as the file has them, padding and all."""

    path: Path
    token: NDArray[np.int64]
    """`[R]`: index of the token, 0 to n_tokens - 1 in the order they were evaluated."""
    layer: NDArray[np.int64]
    """`[R]`: model layer number."""
    layers: tuple[int, ...]
    """The MoE layers, ascending."""
    experts: NDArray[np.int64]
    """`[R, k]`."""
    n_tokens: int
    where: Where
    weights: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    gate_probs: NDArray[np.float32] | None = None
    """Both `[R, n_expert]`."""
    tokens: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """What is known per token, `[n_tokens]`: turn, phase, step, graph, token (vocabulary id)."""
    last_token: int | None = None
    """Vocabulary id of a token after the last routed one: sampled, but never evaluated."""
    id_limit: int | None = None
    """Largest id the file's own integer type can hold."""

    def place(self, name: str, row: int, slot: int | None = None) -> str:
        """Where a value stands, for messages."""
        return self.where(name, row, slot)

    def rows(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> Routings:
        """Some of the rows."""
        index = np.flatnonzero(keep) if keep.dtype == bool else keep
        wide = {n: getattr(self, n) for n in ("weights", "scores", "gate_probs")}
        return replace(
            self,
            token=self.token[index],
            layer=self.layer[index],
            experts=self.experts[index],
            where=lambda name, row, slot: self.where(name, int(index[row]), slot),
            **{n: None if values is None else values[index] for n, values in wide.items()},
        )

    def only_tokens(self, keep: NDArray[np.bool_]) -> Routings:
        """Some of the tokens, numbered anew."""
        number = np.cumsum(keep) - 1
        fewer = self.rows(keep[self.token])
        return replace(
            fewer,
            token=number[fewer.token],
            n_tokens=int(keep.sum()),
            tokens={name: values[keep] for name, values in self.tokens.items()},
        )


def trace_of(found: Routings, facts: Facts) -> tuple[TraceHeader, dict[str, dict[str, Any]]]:
    """The header and the columns of the tables.

    Raises:
        InputError: a fact is missing or contradicts the file, or a value cannot be used.
    """
    n_expert = _n_expert(found, facts)
    n_layer = facts.n_layer or max(found.layers) + 1
    found = _in_order(found)
    found = _skip_first(found, facts)
    found = leave_out_layers(found, facts, n_expert)
    found = _settle_padding(found, facts, n_expert)
    refuse_profiling_run(found, facts)
    warn_twice(found)
    _check_weights(found)
    gating = _score_facts(found, facts, n_expert)
    if found.scores is not None and _are_logits(facts):
        found = replace(found, gate_probs=gate_of_logits(found.scores, found.gate_probs, facts.weight_rule))
    per_token = _tokens(found, facts)
    warn_of_missing(found, per_token["phase"])
    router = _router(found, facts)
    header = _header(found, facts, n_expert, gating, n_layer)
    header = replace(header, router_known=router is not None)
    return header, {"routing": _routing(found, per_token, router), "tokens": _graphs(found, per_token)}


def _n_expert(found: Routings, facts: Facts) -> int:
    wide = found.scores if found.scores is not None else found.gate_probs
    n_expert = facts.n_expert if wide is None or facts.n_expert is not None else wide.shape[1]
    if n_expert is None:
        raise facts.refuse("n_expert", f"is missing; {found.path} does not say how many experts a layer has")
    if not 1 <= n_expert <= MAX_EXPERT:
        raise InputError(f"{found.path}: {n_expert} scores in a row; a layer has 1 to {MAX_EXPERT} experts")
    for name in ("scores", "gate_probs"):
        values = getattr(found, name)
        if values is not None and values.shape[1] != n_expert:
            said = "" if facts.n_expert is None else f", but {facts.said['n_expert']} says {n_expert}"
            raise InputError(
                f"{found.path}: {values.shape[1]} {name} in a row{said}; the model has {n_expert}"
            )
    if found.id_limit is not None and found.id_limit < n_expert - 1:
        raise InputError(
            f"{found.path}: ids are stored in a type that ends at {found.id_limit}, and of {n_expert} experts the "
            "higher ones have wrapped around; dump them as int16 or wider"
        )
    k = found.experts.shape[1]
    if not 1 <= k <= n_expert:
        raise InputError(f"{found.path}: {k} slots in a routing of {n_expert} experts")
    return n_expert


def _in_order(found: Routings) -> Routings:
    order = np.lexsort((found.layer, found.token))
    return found if (order[1:] > order[:-1]).all() else found.rows(order)


def _skip_first(found: Routings, facts: Facts) -> Routings:
    skip = facts.skip_tokens or 0
    if skip >= found.n_tokens:
        problem = f"{skip}, but {found.path} has {found.n_tokens} tokens"
        raise facts.refuse("skip_tokens", problem) if skip else InputError(f"{found.path}: holds no token")
    return found.only_tokens(np.arange(found.n_tokens) >= skip) if skip else found


def _settle_padding(found: Routings, facts: Facts, n_expert: int) -> Routings:
    """Ids with -1 for every slot that does not exist, tokens of nothing but padding left out if asked for."""
    ids = found.experts
    outside = (ids < 0) | (ids >= n_expert)
    weightless = True if found.weights is None else ~(np.abs(found.weights) > 0)
    padding = ((ids == -1) | (ids == n_expert)) & weightless
    wrong = outside & ~padding
    if wrong.any():
        row, slot = (int(i) for i in np.argwhere(wrong)[0])
        why = "" if ids[row, slot] not in (-1, n_expert) else ", an id of padding, with a weight"
        raise InputError(
            f"{found.place('ids', row, slot)}: {ids[row, slot]}{why}; ids run from 0 to {n_expert - 1}"
        )
    zeros = (ids == 0).all(axis=1) & (ids.shape[1] > 1)
    empty = padding.all(axis=1)
    # A token is padding if every one of its rows is.
    only_zeros = _all_by_token(found, zeros)
    if facts.skip_padding:
        gone = _all_by_token(found, zeros | empty)
        if gone.all():
            raise InputError(f"{found.path}: every token is padding")
        found, padding = found.only_tokens(~gone), padding[~gone[found.token]]
    elif only_zeros.any():
        row = int(np.argmax(only_zeros[found.token]))
        raise InputError(
            f"{found.place('ids', row, None)}: expert 0 in every slot of every layer ({int(only_zeros.sum())} "
            "such tokens in all), which is padding and no routing; --skip-padding leaves such tokens out"
        )
    weights = None if found.weights is None else np.where(padding, np.float32(0), found.weights)
    return replace(found, experts=np.where(padding, -1, found.experts), weights=weights)


def _all_by_token(found: Routings, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    n_rows = np.bincount(found.token, minlength=found.n_tokens)
    return (np.bincount(found.token, rows, minlength=found.n_tokens) == n_rows) & (n_rows > 0)


def _check_weights(found: Routings) -> None:
    if found.weights is None:
        return
    wrong = ~((found.weights >= 0) & (found.weights <= _MAX_WEIGHT)) & ~np.isnan(found.weights)
    if wrong.any():
        row, slot = (int(i) for i in np.argwhere(wrong)[0])
        raise InputError(
            f"{found.place('weights', row, slot)}: {found.weights[row, slot]:g}, must be 0 or more, or nan"
        )


def _score_facts(found: Routings, facts: Facts, n_expert: int) -> Gating | None:
    """Checks scores against what was said of them; the gating of the header."""
    if found.scores is None:
        if found.gate_probs is not None:
            raise InputError(f"{found.path}: has gate_probs and no scores; policies rank by scores")
        return facts.gating
    for name in ("gating", "score_space"):
        if getattr(facts, name) is None:
            words = {"gating": "softmax, sigmoid or logits", "score_space": "prob or raw"}[name]
            raise facts.refuse(name, f"is missing, and {found.path} has scores; give {words}")
    check_scores(found, facts)
    warn_of_weights(found, facts)
    # The logits of a softmax router rank as its probabilities do, and lose nothing to rounding.
    return "logits" if _are_logits(facts) else facts.gating


def _are_logits(facts: Facts) -> bool:
    return (facts.gating, facts.score_space) == ("softmax", "raw") and not facts.selection_bias


# ---------------------------------------------------------------------------------------------------------
# Tokens: turns, phases, positions, graphs


def _tokens(found: Routings, facts: Facts) -> dict[str, NDArray[np.int64]]:
    n = found.n_tokens
    step = _checked(found, "step", -1, INT32, np.arange(n))
    turn = _turns(found, facts, step)
    check_steps(found, turn, step)
    phase = _phases(found, facts, turn)
    differs = np.ones(n, bool)
    differs[1:] = (turn[1:] != turn[:-1]) | (phase[1:] != phase[:-1])
    if "graph" in found.tokens:
        given = found.tokens["graph"]
        same = np.zeros(n, bool)
        same[1:] = given[1:] == given[:-1]
        if (same & differs).any():
            token = int(np.argmax(same & differs))
            raise InputError(
                f"{found.path}: graph {given[token]} goes on at token {token}, where the turn or phase changes"
            )
        starts = ~same
    else:
        starts = differs | (phase == DECODE)
    graph = np.cumsum(starts) - 1
    pos = np.arange(n) - np.flatnonzero(starts)[graph]
    return {"turn": turn, "phase": phase, "step": step, "graph": graph, "pos_in_graph": pos}


def _checked(found: Routings, name: str, low: int, high: int, otherwise: NDArray) -> NDArray[np.int64]:
    values = found.tokens.get(name)
    if values is None:
        return otherwise.astype(np.int64)
    wrong = (values < low) | (values > high)
    if wrong.any():
        token = int(np.argmax(wrong))
        raise InputError(
            f"{found.path}, '{name}' of token {token}: {values[token]}, must be from {low} to {high}"
        )
    return values


def _turns(found: Routings, facts: Facts, step: NDArray) -> NDArray[np.int64]:
    n = found.n_tokens
    if "turn" in found.tokens:
        if facts.turns is not None:
            raise facts.refuse("turns", f"{found.path} says itself which turn a token is of")
        turn = _checked(found, "turn", 0, INT32, np.zeros(n))
        if (turn[1:] < turn[:-1]).any():
            token = int(np.argmax(turn[1:] < turn[:-1])) + 1
            raise InputError(
                f"{found.path}, 'turn' of token {token}: {turn[token]} after {turn[token - 1]}; turns only go up"
            )
        return turn
    if facts.turns is not None:
        if sum(facts.turns) != n:
            raise facts.refuse("turns", f"{sum(facts.turns)} tokens in all, but {found.path} has {n}")
        return np.repeat(np.arange(len(facts.turns)), facts.turns)
    restarts = np.zeros(n, bool)
    restarts[1:] = (step[1:] == 0) & (step[:-1] > 0)
    if restarts.any():
        warn(
            f"{found.path}: positions start again at 0 {int(restarts.sum())} times; each is taken as a new turn, "
            "through which the cache is kept"
        )
    return np.cumsum(restarts)


def _phases(found: Routings, facts: Facts, turn: NDArray) -> NDArray[np.int64]:
    n = found.n_tokens
    if "phase" in found.tokens:
        if facts.prefill is not None:
            raise facts.refuse("prefill", f"{found.path} says itself which phase a token is of")
        phase = _checked(found, "phase", PREFILL, DECODE, np.ones(n))
        if phase[0] == DECODE:
            warn_of_no_prompt(found.path, int(found.tokens.get("step", phase * 0)[0]))
        return phase
    if facts.prefill is None:
        warn(f"{found.path}: no prefill length is given (--prefill); every token is taken as a decode step")
        return np.full(n, DECODE, np.int64)
    lengths = np.array(facts.turns) if facts.turns is not None else np.unique(turn, return_counts=True)[1]
    if len(facts.prefill) != len(lengths):
        raise facts.refuse(
            "prefill", f"{len(facts.prefill)} lengths for the {len(lengths)} turns of {found.path}"
        )
    phase = np.full(n, DECODE, np.int64)
    start = 0
    for number, (length, prompt) in enumerate(zip(lengths.tolist(), facts.prefill, strict=True)):
        if prompt > length:
            raise facts.refuse("prefill", f"{prompt} tokens, but turn {number} of {found.path} has {length}")
        phase[start : start + prompt] = PREFILL
        start += length
    return phase


# ---------------------------------------------------------------------------------------------------------
# Header and tables


def _router(found: Routings, facts: Facts) -> NDArray[np.int64] | None:
    """The router's own ids; where the run rerouted, those its scores rank first, None where there are none."""
    if facts.route is None or keeps_router(facts.route):
        return found.experts
    if found.scores is None or facts.score_space is None:
        return None
    ranked = best_by_score(found.scores, facts.score_space, found.experts.shape[1])
    return np.where(found.experts >= 0, ranked, -1)


def _header(found: Routings, facts: Facts, n_expert: int, gating: Gating | None, n_layer: int) -> TraceHeader:
    k = found.experts.shape[1]
    sizes = facts.sizes("expert_bytes", found.layers, found.path)
    if sizes is None:
        raise facts.refuse(
            "expert_bytes", f"is missing; {found.path} does not say how many bytes an expert of a layer has"
        )
    if n_expert * sum(sizes.values()) >= _MAX_SUM or len(found.token) * k * max(sizes.values()) >= _MAX_SUM:
        raise facts.refuse("expert_bytes", "too large to be added up over the rows")
    if found.layers[-1] >= min(n_layer, MAX_LAYER + 1):
        raise InputError(f"{found.path}: layer {found.layers[-1]} of a model of {n_layer} layers")
    if facts.n_expert_used is not None and facts.n_expert_used != k:
        warn(f"{found.path}: routings have {k} slots, {facts.said['n_expert_used']} says "
              f"{facts.n_expert_used}; using {k}")  # fmt: skip
    return TraceHeader(
        model=facts.model,
        arch=facts.arch,
        n_layer=n_layer,
        n_expert=n_expert,
        n_expert_used=k,
        gating=gating,
        score_space=facts.score_space,
        weight_rule=facts.weight_rule,
        entry_bytes=sizes,
        dense_bytes=facts.sizes("dense_bytes", found.layers, found.path),
        selection_bias=facts.selection_bias,
        route="original" if facts.route is None else facts.route.name,
        knobs={} if facts.route is None else facts.route.knobs,
        engine=facts.engine,
        engine_version=facts.engine_version,
        cpu=facts.cpu,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _routing(
    found: Routings, per_token: Mapping[str, NDArray], router: NDArray[np.int64] | None
) -> dict[str, Any]:
    order = np.lexsort((found.token, found.layer, per_token["graph"][found.token]))
    found = found.rows(order)
    columns: dict[str, Any] = {name: values[found.token] for name, values in per_token.items()}
    experts = found.experts.astype(np.int32)
    picked = experts if router is None else router[order].astype(np.int32)
    columns |= {"layer": found.layer, "router_experts": picked, "experts": experts}
    if "token" in found.tokens:
        columns["token"] = found.tokens["token"][found.token]
    for name in ("weights", "scores", "gate_probs"):
        if getattr(found, name) is not None:
            columns[name] = getattr(found, name)
    return columns


def _graphs(found: Routings, per_token: Mapping[str, NDArray]) -> dict[str, Any]:
    """The tokens table: one row per graph, of its last token."""
    graph = per_token["graph"]
    last = np.flatnonzero(np.append(np.diff(graph) != 0, True))
    columns: dict[str, Any] = {name: per_token[name][last] for name in ("turn", "graph", "phase")}
    step = np.full(len(last), -1, np.int64)
    np.maximum.at(step, graph, per_token["step"])
    columns["step"] = step
    ids = found.tokens.get("token")
    if ids is not None:
        _checked(found, "token", 0, INT32, ids)
        following: list[int | None] = [*ids[1:].tolist(), found.last_token]
        turn = per_token["turn"]
        columns["token"] = ids[last]
        columns["next_token"] = [
            following[i] if i + 1 == len(ids) or turn[i + 1] == turn[i] else None for i in last.tolist()
        ]
    return columns
