"""A route's policies on the rows of one live batch: the replay loop's own code (`live_lane.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simlab.errors import RunError
from simlab.learning import LearnedArrays, learn
from simlab.policy import find_eviction
from simlab.policy_check import check_policy
from simlab.record.live_lane import Stage, check_lane, drop_row, empty_rows, fill_row, reroute_row
from simlab.replay.choose import ALL
from simlab.replay.lanes import functions_of, make_lane, setting_of
from simlab.replay.settings import acting_steps
from simlab.scores import gate_numerators, mass_before, ranking_values, ranks_of, router_mass, router_ranking
from simlab.types import Gating, ResolvedBudget, Route, ScoreSpace, WeightRule


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
        steps = acting_steps(route)
        for step in steps:
            check_policy(step.policy)
        rerank, drop = route.reroute, route.step("drop")
        if learned is None:
            learned = learn(steps, None, n_layers, n_expert)
        needs = rerank.policy.needs if rerank is not None else frozenset[str]()
        if rerank is not None and "mass" in needs and gating is None:
            raise RunError(f"{rerank.policy.name} needs the router's gating, which is not known here")
        self._gating: Gating | None = gating
        self._space: ScoreSpace = space
        self._rule, self._needs = weight_rule, needs
        self.reranks = rerank is not None and n_expert > k and not rerank.policy.is_builtin("original")
        """Whether a rerank or swap policy may change a row; the router's own picks need no deciding."""
        self.drops = drop is not None
        """Whether a drop policy is part of the route."""
        self._rerank_policy = rerank.policy if rerank is not None else find_eviction("lru")
        self._drop_name = drop.policy.name if drop is not None else ""
        self.drops_by_score = drop is not None and "scores" in drop.policy.needs
        """Whether its drop policy looks at scores."""
        budget, lru = ResolvedBudget(0, (0,) * n_layers, per_layer=False), find_eviction("lru")
        setting = setting_of(
            steps, lru, budget,
            n_expert=n_expert, k=k, n_used=k, scores=True, weights="scores" if "weights" in needs else None,
            weight_rule=weight_rule,
            # The cache is another lane: residency is counted as it is given.
            sequential=True,
        )._replace(order=ALL)  # fmt: skip
        lane = make_lane(setting, steps, lru, {}, budget, np.ones(n_layers, np.int64), learned)
        self._stage = Stage(functions_of(steps, lru), setting, empty_rows(n_expert, k), lane)
        self._wide = np.zeros(n_expert, dtype=np.float64)

    def rerank(
        self, layer: int, scores: np.ndarray, router: np.ndarray, resident: np.ndarray
    ) -> LiveRerouted:
        """Run the rerank or swap policy on a decode batch.

        Args:
            layer: MoE layer index. scores: float32 `[rows, n_expert]`. router: int32 `[rows, k]`.
            resident: bool `[n_expert]`, the batch's snapshot.
        """
        experts = np.empty_like(router)
        reranked = substituted = 0
        addresses, rows = self._stage.addresses, self._stage.rows
        rows.decode[0] = True
        for i in range(len(router)):
            self._fill(scores[i])
            if not self._needs <= {"scores"}:
                self._fill_more(scores[i : i + 1], router[i : i + 1])
            n, n_new = reroute_row(addresses, layer, resident, router[i], experts[i])
            check_lane(self._stage, layer, self._rerank_policy)
            reranked += n
            substituted += n_new
        return LiveRerouted(experts if substituted else router, reranked, substituted)

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
        dropped = np.empty(experts.shape, dtype=bool)
        walk, applied = np.empty_like(experts), np.empty_like(weights)
        n_dropped = 0
        for i in range(len(experts)):
            if self.drops_by_score:
                self._fill(scores[i])
            n = drop_row(
                self._stage.addresses,
                layer,
                decode,
                resident,
                experts[i],
                weights[i],
                dropped[i],
                walk[i],
                applied[i],
            )
            if n < 0:
                raise RunError(f"a routing weight is NaN; {self._drop_name} cannot decide on it")
            n_dropped += n
        return LiveDropped(dropped, walk, applied) if n_dropped else None

    def _fill(self, scores: np.ndarray) -> None:
        """The row's ranking values; logarithms are NumPy's, as in a replay."""
        is_log = self._space == "prob"
        if is_log:
            # NaN is the smallest to argmin, and no comparison with it holds.
            if scores[scores.argmin()] > 0:
                np.log(scores, out=self._wide, dtype=np.float64)
            else:
                self._wide[:] = ranking_values(scores, self._space)
        fill_row(self._stage.addresses[2], scores, self._wide, is_log)

    def _fill_more(self, scores: np.ndarray, router: np.ndarray) -> None:
        """What policies beyond scores ask for, of one row."""
        rows = self._stage.rows
        if self._needs & {"rank", "mass"}:
            order = router_ranking(rows.value, router)
            rows.rank[:] = ranks_of(order)
            if "mass" in self._needs and self._gating is not None:
                rows.mass_before[:] = mass_before(router_mass(scores, self._gating), order)
        if "weights" in self._needs:
            if self._rule is None:
                raise RunError(
                    "a rerank policy that needs weights cannot run where the gate is a tensor of its own"
                )
            rows.numerator[:] = gate_numerators(scores, self._rule)
