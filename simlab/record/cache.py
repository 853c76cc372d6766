"""The live expert cache: which entries are in RAM, and who leaves. It is a lane of the replay loop.

Follows engine-semantics, section 3: one lookup per unique expert of a batch, eviction at the batch's end by the
policy among entries the batch did not touch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from simlab.cells import check_eviction, check_live, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.policy import find_eviction
from simlab.policy_check import check_policy
from simlab.record.live_lane import Stage, check_lane, empty_rows, run_batch
from simlab.replay.cache_loop import BATCH_POSITION, bring_in
from simlab.replay.compiled import loop, ref
from simlab.replay.lanes import functions_of, make_lane, setting_of
from simlab.replay.training import Training, prepared
from simlab.routing import knob_values
from simlab.types import Cell, EvictionPolicy, ResolvedBudget, TraceHeader


class BatchOutcome(NamedTuple):
    """What a batch did to the cache. Experts are ids within the batch's layer."""

    lookups: int
    hits: int
    misses: list[int]
    charged: list[tuple[int, int]]
    """(row, slot) each missed expert's read is charged to: its first slot that is not dropped."""
    evicted: list[tuple[int, int]]
    """(layer index, expert) of entries that left."""
    bypassed: list[int] = []  # noqa: RUF012  (never changed)
    """The batch's own experts that do not stay: they leave once it has run."""


class LiveCache:
    """One cache of a session.

    Args:
        entry_bytes: int64 `[n_moe_layers]`. k: experts per token in force.
        policy: eviction policy; `knobs` its values by name.
        prepared: first state of a policy that learns, arrays `[n_moe_layers, n_expert]` by name.

    Raises:
        InputError: a policy that fails its dry run, knows the future, or learns and has learned nothing.
    """

    def __init__(
        self,
        entry_bytes: np.ndarray,
        n_expert: int,
        k: int,
        budget: ResolvedBudget,
        policy: EvictionPolicy,
        knobs: Mapping[str, float],
        prepared: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        check_policy(policy)
        if "future" in policy.needs:
            raise InputError(
                f"policy {policy.name}: knows the future, which a live cache does not; replay it"
            )
        if policy.prepare is not None and prepared is None:
            raise InputError(
                f"policy {policy.name}: learns from a training part, which this cache was not given"
            )
        self.n_expert, self.budget, self._policy = n_expert, budget, policy
        self._functions = functions_of((), policy)
        setting = setting_of(
            (), policy, budget, n_expert=n_expert, k=k, n_used=k, scores=False, weights=None, weight_rule=None
        )
        lane = make_lane(setting, (), policy, knobs, budget, np.asarray(entry_bytes, np.int64), {}, prepared)
        self._stage = Stage(self._functions, setting, empty_rows(n_expert, k), lane)
        self._lane = lane
        self.resident = lane.resident
        self._by_layer = lane.resident.reshape(len(entry_bytes), n_expert)
        self._marks = lane.marks.reshape(len(entry_bytes), n_expert)
        self._none = np.zeros((1, k), dtype=bool)
        self._misses = np.zeros(n_expert, dtype=np.int64)
        self._charged = np.zeros((n_expert, 2), dtype=np.int64)
        self._layer, self._number = len(entry_bytes), 0

    @property
    def speculative_hits(self) -> int:
        """Speculative entries that were looked up while in RAM."""
        return int(self._lane.read_ahead[1])

    def set_budget(self, budget: ResolvedBudget) -> None:
        """Another budget from the next batch on, whose end evicts the overshoot.

        Raises:
            ValueError: to or from a cache that is off, or of another scope; start a new session for that.
        """
        if (budget.off, budget.per_layer) != (self.budget.off, self.budget.per_layer):
            raise ValueError("a cache cannot be switched on or off, or change its scope, within a session")
        self.budget = budget
        self._lane.limit[:] = budget.layer_bytes if budget.per_layer else [budget.total_bytes]

    @property
    def used_bytes(self) -> int:
        """Bytes of the entries that are resident."""
        return int(self._lane.used.sum())

    def residency(self, layer: int) -> np.ndarray:
        """bool `[n_expert]` of one layer index, a view: what a batch decides on until it runs."""
        return self._by_layer[layer]

    def speculative(self, layer: int) -> np.ndarray:
        """bool `[n_expert]` of one layer index, a view: resident by speculation and not looked up since."""
        return self._marks[layer]

    def insert_speculative(self, layer: int, experts: list[int]) -> None:
        """Make entries resident at the least recent end, before the layer's batch is judged."""
        _bring_in(
            self._functions,
            self._stage.setting,
            self._lane,
            layer,
            np.array(experts, dtype=np.int64),
            self._number,
        )

    def run_batch(
        self, layer: int, walk: np.ndarray, dropped: np.ndarray | None, weights: np.ndarray
    ) -> BatchOutcome:
        """Look up, insert and evict for one batch.

        Args:
            layer: MoE layer index.
            walk: int32 `[rows, k]` experts after repointing, -1 where a slot does not exist.
            dropped: bool `[rows, k]`, None if nothing was.
            weights: float32 `[rows, k]` applied weights.
        """
        begins, self._layer = layer <= self._layer, layer
        if dropped is None:
            dropped = self._none if len(walk) == 1 else np.zeros(walk.shape, dtype=bool)
        lookups, n_misses, n_charged, n_evicted = run_batch(
            self._stage.addresses, layer, begins, self._number, np.ascontiguousarray(walk),
            np.ascontiguousarray(dropped), np.ascontiguousarray(weights), self._misses, self._charged,
        )  # fmt: skip
        check_lane(self._stage, layer, self._policy)
        self._number += 1
        misses = self._misses[:n_misses].tolist()
        charged = [(r, slot) for r, slot in self._charged[:n_charged].tolist()]
        evicted = [divmod(e, self.n_expert) for e in self._lane.victims[:n_evicted].tolist()]
        if not self._policy.bypass:
            return BatchOutcome(lookups, lookups - n_misses, misses, charged, evicted)
        own = self._lane.stamp >= self._lane.numbers[BATCH_POSITION]
        bypassed = [e for at, e in evicted if own[at * self.n_expert + e]]
        evicted = [(at, e) for at, e in evicted if not own[at * self.n_expert + e]]
        return BatchOutcome(lookups, lookups - n_misses, misses, charged, evicted, bypassed)


@loop
def _bring_in(functions, setting, its_lane, layer, experts, number):
    s, lane = ref(setting), ref(its_lane)
    for i in range(experts.shape[0]):
        lane.any_marks[0] += bring_in(functions.key, s, lane, layer, experts[i], number)


def live_cache(cell: Cell, header: TraceHeader, training: Training | None) -> LiveCache:
    """The empty cache of a session under a cell.

    Raises:
        InputError: the cell is for a replay alone, or its eviction policy learns and there is no training part.
    """
    check_live(cell)
    check_eviction(cell, trained=training is not None)
    eviction, k = find_eviction(cell.evict), effective_k(cell.route, header)
    budget = resolve_budget(cell.budget, cell.scope, header, k)
    sizes = np.array([header.entry_bytes[layer] for layer in header.moe_layers], dtype=np.int64)
    learned = None
    if eviction.prepare is not None and training is not None:
        knobs = knob_values(eviction.knobs, cell.evict_knobs)
        learned = prepared(eviction, training.counts, sizes, budget, knobs)
    return LiveCache(sizes, header.n_expert, k, budget, eviction, cell.evict_knobs, prepared=learned)
