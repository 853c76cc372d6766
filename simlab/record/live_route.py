"""A route's policies on the rows of one live batch, with NumPy: the engine's side of `simlab.routing`.

A decode graph has one row, so that case carries no row axis: candidates are `[n_expert]` and everything per
row is a scalar. Several rows (a wide graph) come as `[n_expert, rows]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from simlab.errors import RunError
from simlab.learning import LearnedArrays, learn
from simlab.policy_check import check_policy
from simlab.record.one_row import after_drop, best_of, finite_values
from simlab.routing import decide, drop, drop_armed, knob_values, lighter_sums, rerank, swap, take_top
from simlab.scores import (
    applied_weights,
    gate_numerators,
    mass_before,
    ranking_values,
    ranks_of,
    router_mass,
    router_ranking,
    row_statistics,
)
from simlab.types import (
    Array,
    Candidates,
    Gating,
    LearnedValues,
    Route,
    Row,
    ScoreSpace,
    Step,
    WeightRule,
)

_NO_SCORE = np.float32(0)


class LiveRerouted(NamedTuple):
    """Executed ids int32 `[rows, k]` (the router's own array where nothing changed) and what it took."""

    experts: np.ndarray
    reranked: int
    substituted: int


class LiveDropped(NamedTuple):
    """Dropped slots, the ids the cache walks, and the weights the matmuls apply; all `[rows, k]`."""

    dropped: np.ndarray
    walk: np.ndarray
    applied: np.ndarray


class LiveRoute:
    """One route with its knobs and its per-layer state.

    Args:
        k: experts per token in force. `weight_rule` None where weights cannot be rebuilt from the scores,
            `gating` None where it is not known.
        learned: what `simlab.learning.learn` gave for this route, None: what it gives without training.

    Raises:
        InputError: a policy is not what its contract says, or must learn and did not.
        RunError: a policy needs what cannot be known here.
    """

    def __init__(
        self,
        route: Route,
        k: int,
        n_expert: int,
        n_layers: int,
        space: ScoreSpace,
        weight_rule: WeightRule | None,
        gating: Gating | None = None,
        learned: LearnedArrays | None = None,
    ) -> None:
        for step in route.steps:
            check_policy(step.policy)
        self._rerank, self._drop = route.reroute, route.step("drop")
        if learned is None:
            learned = learn(route.steps, None, n_layers, n_expert)
        self._learned = {stage: _by_layer(of_stage, n_layers) for stage, of_stage in learned.items()}
        if self._rerank is not None and "mass" in self._rerank.policy.needs and gating is None:
            raise RunError(f"{self._rerank.policy.name} needs the router's gating, which is not known here")
        self._gating: Gating | None = gating
        self._knobs = {s.policy.stage: knob_values(s.policy.knobs, s.knobs) for s in route.steps}
        self._states: dict[str, list[dict[str, Array]]] = {
            s.policy.stage: [{n: np.float32(v) for n, v in s.policy.state.items()} for _ in range(n_layers)]
            for s in route.steps
        }
        self._k, self._rule = np.int32(k), weight_rule
        self._space: ScoreSpace = space
        self._experts = np.arange(n_expert, dtype=np.int32)
        self._zeros = np.zeros(n_expert, dtype=np.float32)
        self._no_rank = np.zeros(n_expert, dtype=np.int32)
        self._layer_ids = [np.int32(i) for i in range(n_layers)]
        self._slots, self._no_slots = np.arange(k, dtype=np.int32), np.zeros(k, dtype=np.float32)
        self._values, self._left = np.zeros((2, n_expert), dtype=np.float32)
        self._ends = np.zeros(2, dtype=np.float32)
        self._wide = np.zeros(n_expert, dtype=np.float64)
        self._by_scores = self._rerank is not None and (
            self._rerank.policy.stage == "rerank"
            and self._rerank.policy.needs == {"scores"}
            and self._rerank.policy.uses_cache
            and not self._rerank.policy.learns
        )
        self._unseen = np.zeros(n_expert, dtype=bool)
        # The router's own picks need no deciding.
        self.reranks = (
            self._rerank is not None and n_expert > k and not self._rerank.policy.is_builtin("original")
        )

    @property
    def drops(self) -> bool:
        """Whether a drop policy is part of the route."""
        return self._drop is not None

    @property
    def drops_by_score(self) -> bool:
        """Whether its drop policy looks at scores."""
        return self._drop is not None and "scores" in self._drop.policy.needs

    # -- rerank ---------------------------------------------------------------------------------------------

    def rerank(
        self, layer: int, scores: np.ndarray, router: np.ndarray, resident: np.ndarray
    ) -> LiveRerouted:
        """Run the rerank or swap policy on a decode batch.

        Args:
            layer: MoE layer index. scores: float32 `[rows, n_expert]`. router: int32 `[rows, k]`.
            resident: bool `[n_expert]`, the batch's snapshot.
        """
        step = self._rerank
        assert step is not None
        # A policy with state sees rows one after the other, as the replayer's scan does; a swap walks slots.
        if (step.policy.state or step.policy.stage == "swap") and len(scores) > 1:
            parts = [
                self.rerank(layer, scores[i : i + 1], router[i : i + 1], resident) for i in range(len(scores))
            ]
            return LiveRerouted(
                np.concatenate([p.experts for p in parts]),
                sum(p.reranked for p in parts),
                sum(p.substituted for p in parts),
            )
        one = None
        if self._by_scores and len(router) == 1:
            one = self._finite_row(layer, scores[0], resident)
        candidates, row = one or self._candidates(step, layer, scores, router, resident)
        knobs, state = self._knobs[step.policy.stage], self._states[step.policy.stage][layer]
        if step.policy.stage == "swap":
            found = self._swap_row(step, candidates, row, scores, router, resident, knobs, state)
        elif len(router) == 1:
            found = self._rerank_row(step, candidates, row, router, knobs, state)
        else:
            armed = np.ones(len(router), dtype=bool)
            found = rerank(np, step, knobs, candidates, row, router.T, armed, state, len(candidates.expert))
            found = LiveRerouted(
                np.ascontiguousarray(found.experts.T, dtype=np.int32),
                int(found.reranked.sum()),
                int(found.substituted.sum()),
            )
        return found if found.substituted else found._replace(experts=router)

    def _rerank_row(
        self,
        step: Step,
        candidates: Candidates,
        row: Row,
        router: np.ndarray,
        knobs: SimpleNamespace,
        state: dict,
    ) -> LiveRerouted:
        """`simlab.routing.rerank` on one row whose slots all exist, which is every decode step, for less."""
        choice, new_state = decide(np, step, candidates, row, state, knobs)
        self._states["rerank"][int(row.layer)] = new_state
        if not choice.active:
            return LiveRerouted(router, 0, 0)
        k = router.shape[1]
        if type(choice.tier) is int:
            picked = np.empty((1, k), dtype=np.int32)
            return LiveRerouted(picked, k, best_of(choice.value, router[0], self._left, picked[0]))
        picked = take_top(np, choice.value, choice.tier, candidates.expert, k)
        substituted = len(set(picked.tolist()).difference(router[0].tolist()))
        return LiveRerouted(picked[None], k, substituted)

    def _swap_row(
        self,
        step: Step,
        candidates: Candidates,
        row: Row,
        scores: np.ndarray,
        router: np.ndarray,
        resident: np.ndarray,
        knobs: SimpleNamespace,
        state: dict,
    ) -> LiveRerouted:
        """A swap policy on one row; the driver knows what is resident even where the policy does not ask."""
        usable = np.isfinite(ranking_values(scores, self._space)[0])
        candidates = candidates._replace(resident=resident)
        found = swap(np, step, knobs, candidates, row, router[0], usable, np.True_, state)
        self._states["swap"][int(row.layer)] = found.state
        return LiveRerouted(found.experts[None], int(found.reranked), int(found.substituted))

    def _finite_row(
        self, layer: int, scores: np.ndarray, resident: np.ndarray
    ) -> tuple[Candidates, Row] | None:
        """`_candidates` of a row of finite ranking values for a policy of scores alone, for less; None for others."""
        ranked, values, ends = scores, self._values, self._ends
        if self._space == "prob":
            # NaN is the smallest to argmin, and no comparison with it holds.
            if not scores[scores.argmin()] > 0:
                return None
            ranked = self._wide
            ranked[:] = scores
            np.log(ranked, ranked)
        if not finite_values(ranked, values, ends):
            return None
        top = ends[0]
        n_resident = np.int32(np.count_nonzero(resident))
        return (
            Candidates(values, self._experts, self._no_rank, resident, self._zeros),
            Row(self._k, self._layer_ids[layer], top, top - ends[1], n_resident),
        )

    def _candidates(
        self, step: Step, layer: int, scores: np.ndarray, router: np.ndarray, resident: np.ndarray
    ) -> tuple[Candidates, Row]:
        needs, n_rows = step.policy.needs, len(scores)
        values = ranking_values(scores, self._space) if needs & {"scores", "rank", "mass"} else None
        rank = mass = None
        if values is not None and needs & {"rank", "mass"}:
            order = router_ranking(values, router)
            rank = ranks_of(order) if "rank" in needs else None
            if "mass" in needs and self._gating is not None:
                mass = mass_before(router_mass(scores, self._gating), order)
        weight = self._own_weights(scores, router) if "weights" in needs else None
        values = values if "scores" in needs else None

        def of(column: np.ndarray | None, otherwise: np.ndarray) -> np.ndarray:
            return self._along(otherwise, n_rows) if column is None else _columns(column)

        candidates = Candidates(
            value=of(values, self._zeros),
            expert=self._along(self._experts, n_rows),
            rank=of(rank, self._no_rank),
            resident=self._along(resident if step.policy.uses_cache else self._unseen, n_rows),
            weight=of(weight, self._zeros),
            mass=0.0 if mass is None else _columns(mass),
            learned=self._learned_by(step, layer, router, n_rows),
        )
        return candidates, self._row(step, layer, values, resident, n_rows)

    def _learned_by(self, step: Step, layer: int, experts: np.ndarray, n_rows: int) -> LearnedValues:
        """What a policy learned of this layer; `experts` `[rows, k]` are the slots'."""
        if not step.policy.learns:
            return LearnedValues()
        found: dict[str, Any] = {}
        for name, values in self._learned[step.policy.stage][layer].items():
            per = step.policy.learns[name].per
            if per == "pair":
                found[name] = values[experts[0]]
            elif per == "expert" and step.policy.stage == "drop":
                found[name] = _columns(values[experts])
            else:
                found[name] = values if per == "layer" else self._along(values, n_rows)
        return LearnedValues(**found)

    def _row(
        self, step: Step, layer: int, values: np.ndarray | None, resident: np.ndarray, n_rows: int
    ) -> Row:
        at, zero = self._layer_ids[layer], _NO_SCORE
        if not step.policy.uses_cache:
            resident = self._unseen
        if n_rows == 1:
            if values is None:
                return Row(self._k, at, zero, zero, np.int32(np.count_nonzero(resident)))
            top, span, _ = row_statistics(values[0])
            n_resident = np.count_nonzero(np.isfinite(values[0]) & resident)
            return Row(self._k, at, top, span, np.int32(n_resident))
        zeros = np.zeros(n_rows, dtype=np.float32)
        top, span = zeros, zeros
        n_resident = np.full(n_rows, np.count_nonzero(resident))
        if values is not None:
            top, span, _ = row_statistics(values)
            n_resident = np.count_nonzero(np.isfinite(values) & resident, axis=1)
        return Row(np.full(n_rows, self._k), np.full(n_rows, at), top, span, n_resident.astype(np.int32))

    @staticmethod
    def _along(column: np.ndarray, n_rows: int) -> np.ndarray:
        return column if n_rows == 1 else np.broadcast_to(column[:, None], (len(column), n_rows))

    def _own_weights(self, scores: np.ndarray, router: np.ndarray) -> np.ndarray:
        """`[rows, n_expert]`: the weights of the router's own picks, rebuilt; the graph has not made them yet."""
        if self._rule is None:
            raise RunError(
                "a rerank policy that needs weights cannot run where the gate is a tensor of its own"
            )
        numerators = np.take_along_axis(gate_numerators(scores, self._rule), router, axis=1)
        found = np.zeros_like(scores)
        # A row whose picks all weigh nothing has no weights: NaN, as in the graph.
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = applied_weights(np, numerators.T, router.T >= 0, self._rule)
        np.put_along_axis(found, router, weights.T, axis=1)
        return found

    # -- drop -----------------------------------------------------------------------------------------------

    def drop(
        self,
        layer: int,
        scores: np.ndarray,
        experts: np.ndarray,
        weights: np.ndarray,
        resident: np.ndarray,
        decode: bool,
    ) -> LiveDropped | None:
        """Run the drop policy on a batch; None where it drops nothing.

        Args:
            experts: int32 `[rows, k]`, after substitution. weights: float32 `[rows, k]`, as the graph made them.

        Raises:
            RunError: a weight is NaN.
        """
        step = self._drop
        assert step is not None
        knobs, n_rows = self._knobs["drop"], len(experts)
        if n_rows == 1 and step.policy.needs <= {"weights", "lighter"}:
            return self._drop_row(step, layer, experts, weights, resident, decode)
        if np.isnan(weights).any():
            raise RunError(f"a routing weight is NaN; {step.policy.name} cannot decide on it")
        values = ranking_values(scores, self._space) if "scores" in step.policy.needs else None
        of_slots = (
            np.take_along_axis(values, experts, axis=1) if values is not None else np.zeros_like(weights)
        )
        slots = Candidates(
            value=_columns(of_slots),
            expert=_columns(experts),
            rank=self._along(np.arange(experts.shape[1], dtype=np.int32), n_rows),
            resident=_columns((resident if step.policy.uses_cache else self._unseen)[experts]),
            weight=_columns(weights),
            learned=self._learned_by(step, layer, experts, n_rows),
        )
        row = self._row(step, layer, values, resident, n_rows)
        armed = drop_armed(np, step, knobs, np.bool_(decode) if n_rows == 1 else np.full(n_rows, decode))
        found = drop(np, step, knobs, slots, row, armed, self._states["drop"][layer])
        self._states["drop"][layer] = found.state
        dropped = _rows(found.dropped)
        if not dropped.any():
            return None
        return LiveDropped(dropped, _rows(found.walk), _after_drop(weights, dropped, knobs))

    def _drop_row(
        self,
        step: Step,
        layer: int,
        experts: np.ndarray,
        weights: np.ndarray,
        resident: np.ndarray,
        decode: bool,
    ) -> LiveDropped | None:
        """`simlab.routing.drop` on one row whose slots all exist, for a policy of weights alone, for less."""
        weight, at_slots, knobs = weights[0], experts[0], self._knobs["drop"]
        # The first NaN is the largest to argmax.
        top = int(weight.argmax())
        if weight[top] != weight[top]:
            raise RunError(f"a routing weight is NaN; {step.policy.name} cannot decide on it")
        if not drop_armed(np, step, knobs, np.bool_(decode)):
            return None
        learned = self._learned_by(step, layer, experts, 1)
        at_hand = resident[at_slots] if step.policy.uses_cache else self._unseen[at_slots]
        slots = Candidates(self._no_slots, at_slots, self._slots, at_hand, weight, learned=learned)
        row = self._row(step, layer, None, resident, 1)
        if "weights" in step.policy.needs:
            row = row._replace(heaviest=weight[top])
        if "lighter" in step.policy.needs:
            slots = slots._replace(lighter=lighter_sums(np, weight))
        choice, new_state = decide(np, step, slots, row, self._states["drop"][layer], knobs)
        self._states["drop"][layer] = new_state
        flags = choice.drop.tolist()
        flags[top] = False
        if True not in flags:
            return None
        dropped = np.array(flags)
        walk, applied = np.empty_like(experts), np.empty_like(weights)
        renormalise = bool(getattr(knobs, "renorm", 1))
        after_drop(weight, at_slots, dropped, top, renormalise, walk[0], applied[0])
        return LiveDropped(dropped[None], walk, applied)


def _by_layer(learned: Mapping[str, np.ndarray], n_layers: int) -> list[dict[str, Any]]:
    """What a policy learned, for each layer; read-only, so that no policy writes into it."""
    for values in learned.values():
        values.flags.writeable = False
    return [{name: values[layer] for name, values in learned.items()} for layer in range(n_layers)]


def _columns(rows: np.ndarray) -> np.ndarray:
    """`[rows, n]` as a policy sees it: `[n]` for one row, else `[n, rows]`."""
    return rows[0] if len(rows) == 1 else rows.T


def _rows(columns: np.ndarray) -> np.ndarray:
    """The other way."""
    return columns[None] if columns.ndim == 1 else columns.T


def _after_drop(weights: np.ndarray, dropped: np.ndarray, knobs: SimpleNamespace) -> np.ndarray:
    """The weights `[rows, k]` after dropping: zeros, and the survivors scaled back to the old total."""
    applied = np.where(dropped, np.float32(0), weights)
    if not getattr(knobs, "renorm", 1):
        return applied
    # Accumulating adds in slot order, each sum rounded, which a reduction need not.
    total = np.add.accumulate(weights, axis=1)[:, -1]
    kept = np.add.accumulate(applied, axis=1)[:, -1]
    scaled = dropped.any(axis=1) & (kept > 0)
    factor = np.where(scaled, total / np.where(scaled, kept, 1), 1).astype(np.float32)
    return applied * factor[:, None]
