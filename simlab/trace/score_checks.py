"""Scores held against what was said of them, and against the ids and weights beside them.

Dumps carry fields called logits that hold probabilities, ids of a run under another policy, and weights of another
rule. Whatever contradicts itself is refused; what merely differs from the plain top k is told once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.scores import applied_weights, gate_numerators, ranking_values, router_ranking
from simlab.trace.facts import Facts, keeps_router
from simlab.types import ScoreSpace, WeightRule

if TYPE_CHECKING:
    from simlab.trace.routings import Routings

_ROUNDING = 0.02
"""How far sums of half-precision probabilities, and weights of them, are off."""
_ROWS_AT_ONCE = 1 << 14


def check_scores(found: Routings, facts: Facts) -> None:
    """Refuse scores that are not what `gating` and `score_space` say.

    Raises:
        InputError: probabilities outside 0 to 1, logits that are probabilities, scores that are not numbers of
            any router.
    """
    assert found.scores is not None
    routed = found.experts.max(axis=1) >= 0  # -1 where there is no expert
    alike = n_seen = n_odd = 0
    first_odd = 0
    for start, stop in _stretches(len(found.token)):
        scores, rows = found.scores[start:stop], routed[start:stop]
        if facts.score_space == "prob":
            _check_probabilities(found, scores, rows, start)
        else:
            finite = np.isfinite(scores)
            held = np.where(finite, scores, 0).astype(np.float64)
            like = ((held >= 0) & (held <= 1)).all(axis=1) & (np.abs(held.sum(axis=1) - 1) <= _ROUNDING)
            alike += int((like & rows).sum())
            n_seen += int(rows.sum())
            if facts.gating == "softmax" and np.isposinf(scores).any():
                raise InputError(f"{_at(found, np.isposinf(scores), start)}: inf among logits of a softmax")
        odd = _is_not_the_best(found, facts, start, stop)
        if odd.any() and not n_odd:
            first_odd = start + int(np.argmax(odd))
        n_odd += int(odd.sum())
    if n_seen and found.scores.shape[1] > 1 and alike >= 0.99 * n_seen:
        raise InputError(
            f"{found.place('scores', 0)}: every row is of 0 to 1 and sums to 1, so these are probabilities, "
            f"but {facts.said['score_space']} says raw; say prob"
        )
    if n_odd and (facts.route is None or keeps_router(facts.route)):
        warnings.warn(
            f"{found.place('ids', first_odd)}: the experts are not the best of the row's scores ({n_odd} of "
            f"{len(found.token)} rows): routed by groups, recorded under a policy, or scores of something else?",
            SimlabWarning,
            stacklevel=2,
        )
    _check_gate(found, facts)


def _check_probabilities(found: Routings, scores: NDArray, rows: NDArray, start: int) -> None:
    # A mask may say -inf or 0, and NaN ranks last; everything else is a share of 1.
    wrong = ((scores < 0) & (scores != -np.inf)) | (scores > 1 + _ROUNDING)
    wrong &= rows[:, None]
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise InputError(
            f"{found.place('scores', start + row)}: {scores[row, column]:g} for expert {column} is no "
            "probability; if these are logits, or sigmoid scores with a bias, say --score-space raw"
        )
    total = np.where(np.isfinite(scores), scores, 0).astype(np.float64).sum(axis=1)
    over = (total > 1 + _ROUNDING) & rows
    if over.any():
        row = int(np.argmax(over))
        raise InputError(
            f"{found.place('scores', start + row)}: the row sums to {total[row]:.4g}, above 1, so these are not "
            "the probabilities of a softmax; sigmoid scores are --gating sigmoid --score-space raw"
        )


def _is_not_the_best(found: Routings, facts: Facts, start: int, stop: int) -> NDArray[np.bool_]:
    assert found.scores is not None
    assert facts.score_space is not None
    values = ranking_values(found.scores[start:stop], facts.score_space)
    ids = found.experts[start:stop]
    exists = ids >= 0
    rows, slots = np.nonzero(exists)
    chosen = np.where(exists, np.take_along_axis(values, np.maximum(ids, 0), axis=1), np.inf)
    others = values.copy()
    others[rows, ids[rows, slots]] = -np.inf
    return (others.max(axis=1) > chosen.min(axis=1)) & exists.any(axis=1)


def _check_gate(found: Routings, facts: Facts) -> None:
    assert found.scores is not None
    gate = found.gate_probs
    if gate is not None:
        wrong = ~(gate >= 0) & ~np.isnan(gate) | (gate == np.inf)
        if wrong.any():
            raise InputError(f"{_at(found, wrong, 0, 'gate_probs')}: below 0 or infinite, and no gate is")
        over = gate > 1 + _ROUNDING
        if over.any() and not (facts.weight_rule is not None and facts.weight_rule.softmax_over_selected):
            raise InputError(
                f"{_at(found, over, 0, 'gate_probs')}: above 1, and no gate is; are these logits?"
            )
    elif facts.selection_bias and facts.weight_rule is not None:
        raise facts.refuse(
            "weight_rule", "weights are not made of biased scores; give gate_probs too, or no rule"
        )
    elif facts.gating == "sigmoid" and not facts.selection_bias:
        finite = np.where(np.isfinite(found.scores), found.scores, 0)
        outside = (finite < 0) | (finite > 1)
        if outside.any():
            raise InputError(
                f"{_at(found, outside, 0)}: outside 0 to 1, so it is a logit, or a selection bias is in it; give the "
                "sigmoid's output, or gate_probs (without the bias) too, or say --selection-bias"
            )


def warn_of_weights(found: Routings, facts: Facts) -> None:
    """Say once if the weights beside the scores are not those the rule makes of them."""
    rule = facts.weight_rule
    if found.weights is None or found.scores is None or rule is None:
        return
    n_off, first, example = 0, 0, (0.0, 0.0)
    for start, stop in _stretches(len(found.token)):
        scores = found.scores[start:stop]
        gate = found.gate_probs[start:stop] if found.gate_probs is not None else scores
        if found.gate_probs is None and (facts.gating, facts.score_space) == ("softmax", "raw"):
            gate = scores if rule.softmax_over_selected else softmax(scores)
        ids = found.experts[start:stop]
        exists = ids >= 0
        with np.errstate(all="ignore"):  # what cannot be rebuilt compares as nan, which is not off
            numerators = np.take_along_axis(gate_numerators(gate, rule), np.maximum(ids, 0), axis=1)
            rebuilt = applied_weights(np, numerators.T, exists.T, rule).T
            off = (np.abs(rebuilt - found.weights[start:stop]) > _ROUNDING * rule.scale) & exists
        if off.any() and not n_off:
            row, slot = (int(i) for i in np.argwhere(off)[0])
            first = start + row
            example = (float(found.weights[first, slot]), float(rebuilt[row, slot]))
        n_off += int(off.any(axis=1).sum())
    if n_off:
        warnings.warn(
            f"{found.place('weights', first)}: {example[0]:.4g}, where the weight rule makes {example[1]:.4g} of "
            f"the scores ({n_off} of {len(found.token)} rows); replays that reroute use the rule",
            SimlabWarning,
            stacklevel=2,
        )


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities of finite logits along the last axis, in float64 and rounded once; -inf is 0, NaN stays."""
    finite = np.isfinite(logits)
    held = np.where(finite, logits, -np.inf).astype(np.float64)
    top = held.max(axis=-1, keepdims=True)
    power = np.exp(held - np.where(np.isfinite(top), top, 0))
    total = power.sum(axis=-1, keepdims=True)
    shares = np.divide(power, total, out=np.zeros_like(power), where=total > 0)
    return np.where(np.isnan(logits), np.float32("nan"), shares.astype(np.float32))


def best_by_score(scores: NDArray[np.float32], space: ScoreSpace, k: int) -> NDArray[np.int64]:
    """The `k` experts of each row that rank first, ties to the lower id."""
    none = np.empty((len(scores), 0), np.int32)
    parts = [
        router_ranking(ranking_values(scores[start:stop], space), none[start:stop])[:, :k]
        for start, stop in _stretches(len(scores))
    ]
    return np.concatenate(parts)


def gate_of_logits(
    logits: NDArray[np.float32], given: NDArray[np.float32] | None, rule: WeightRule | None
) -> NDArray[np.float32] | None:
    """What the weights of a softmax router are made of, where its logits were dumped."""
    if given is not None or rule is None or rule.softmax_over_selected:
        return given
    parts = [softmax(logits[start:stop]) for start, stop in _stretches(len(logits))]
    return np.concatenate(parts)


def _stretches(n: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, _ROWS_AT_ONCE):
        yield start, min(start + _ROWS_AT_ONCE, n)


def _at(found: Routings, wrong: NDArray[np.bool_], start: int, name: str = "scores") -> str:
    row, column = (int(i) for i in np.argwhere(wrong)[0])
    return f"{found.place(name, start + row)}, expert {column}"
