"""The live expert cache: which entries are in RAM, and who leaves.

Follows engine-semantics, section 3: one lookup per unique expert of a batch, eviction at the batch's end
by the policy among entries the batch did not touch. The eviction policy is the same source the replayer
runs, a key per entry or one rule over the whole cache; where its key is the last position itself (`lru`), an
ordered dictionary gives the same order for less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from simlab.cells import check_eviction, check_live, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.policy import find_eviction
from simlab.policy_check import check_policy, policy_error, wrong_value
from simlab.replay.training import Training, prepared
from simlab.routing import entry_facts, eviction_key, first_state, knob_values, settle, touch_state
from simlab.types import Access, CacheState, Cell, EvictionPolicy, ResolvedBudget, TraceHeader


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
    """Entry state as arrays over layer index * n_expert + expert.

    Args:
        entry_bytes: int64 `[n_moe_layers]`.
        policy: eviction policy; `knobs` its values.
        ordered: False keeps to the array form even where an ordered dictionary would do (for tests).
        prepared: first state of a policy that learns, arrays `[n_moe_layers, n_expert]` by name.

    Raises:
        InputError: a policy that fails its dry run, knows the future, or learns and has learned nothing.
    """

    def __init__(
        self,
        entry_bytes: np.ndarray,
        n_expert: int,
        budget: ResolvedBudget,
        policy: EvictionPolicy,
        knobs: SimpleNamespace,
        ordered: bool = True,
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
        self.n_expert = n_expert
        self._entry_bytes = [int(size) for size in entry_bytes]
        self._policy, self._knobs = policy, knobs
        n = len(entry_bytes) * n_expert
        self._sizes = np.repeat(entry_bytes, n_expert)
        self._layer_of = np.repeat(np.arange(len(entry_bytes)), n_expert)
        self.resident = np.zeros(n, dtype=bool)
        self._by_layer = self.resident.reshape(len(entry_bytes), n_expert)
        self._last = np.full(n, -1, dtype=np.int64)
        self._expert_of = np.tile(np.arange(n_expert), len(entry_bytes))
        self._state = first_state(policy.state, (n,))
        for name, values in (prepared or {}).items():
            self._state[name][:] = np.ravel(values)
        self._scalars = first_state(policy.scalars, (len(entry_bytes),))
        self._recency: OrderedDict[int, None] | None = None
        if ordered and policy.touch is None and _keeps_recency_order(policy, knobs):
            self._recency = OrderedDict()
        self._speculative = np.zeros(n, dtype=bool)
        self._n_speculative = 0
        self._coldest = -1
        self.speculative_hits = 0
        """Speculative entries that were looked up while in RAM."""
        self._used = [0] * len(entry_bytes)
        self._used_bytes = 0
        self._position = 0
        self._batch = 0
        self._layer = len(entry_bytes)
        self._pass_position = 0
        self.budget = budget

    def set_budget(self, budget: ResolvedBudget) -> None:
        """Another budget from the next batch on, whose end evicts the overshoot.

        Raises:
            ValueError: to or from a cache that is off; start a new session for that.
        """
        if budget.off != self.budget.off:
            raise ValueError("a cache cannot be switched on or off within a session")
        self.budget = budget

    @property
    def used_bytes(self) -> int:
        """Bytes of the entries that are resident."""
        return self._used_bytes

    def residency(self, layer: int) -> np.ndarray:
        """bool `[n_expert]` of one layer index, a view: what a batch decides on until it runs."""
        return self._by_layer[layer]

    def speculative(self, layer: int) -> np.ndarray:
        """bool `[n_expert]` of one layer index, a view: resident by speculation and not looked up since."""
        start = layer * self.n_expert
        return self._speculative[start : start + self.n_expert]

    def insert_speculative(self, layer: int, experts: list[int]) -> None:
        """Make entries resident at the least recent end, before the layer's batch is judged."""
        for expert in experts:
            entry = layer * self.n_expert + expert
            if self.resident[entry]:
                continue
            self.resident[entry] = self._speculative[entry] = True
            self._n_speculative += 1
            self._use(layer, self._entry_bytes[layer])
            self._coldest -= 1
            self._last[entry] = self._coldest
            if self._recency is not None:
                self._recency[entry] = None
                self._recency.move_to_end(entry, last=False)

    def _use(self, layer: int, n_bytes: int) -> None:
        self._used[layer] += n_bytes
        self._used_bytes += n_bytes

    def _run_row(self, layer: int, experts: list[int]) -> BatchOutcome | None:
        """`run_batch` for one row of distinct experts in the ordered form, for less; None where that does not hold."""
        recency, start, k = self._recency, layer * self.n_expert, len(experts)
        if recency is None or self._n_speculative or self.budget.off:
            return None
        entries = [start + expert for expert in experts]
        touched = set(entries)
        if len(touched) < k or min(experts) < 0:
            return None
        misses: list[int] = []
        charged: list[tuple[int, int]] = []
        to_end = recency.move_to_end
        for entry in entries:
            # Between batches this form holds exactly the entries that are resident.
            if entry in recency:
                to_end(entry)
            else:
                recency[entry] = None
                self.resident[entry] = True
                misses.append(entry - start)
        if misses:
            charged = [(0, experts.index(expert)) for expert in misses]
            self._use(layer, self._entry_bytes[layer] * len(misses))
        self._position += k
        evicted = self._evict(layer, touched, misses)
        self._batch += 1
        return BatchOutcome(k, k - len(misses), misses, charged, evicted)

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
        if layer <= self._layer:
            self._pass_position = self._position
        self._layer = layer
        if len(walk) == 1 and dropped is None:
            found = self._run_row(layer, walk[0].tolist())
            if found is not None:
                return found
        start, k = layer * self.n_expert, walk.shape[1]
        resident, recency, last = self.resident, self._recency, self._last
        touched: set[int] = set()
        misses: list[int] = []
        charged: dict[int, tuple[int, int]] = {}
        drops = dropped.tolist() if dropped is not None else None
        for row, experts in enumerate(walk.tolist()):
            first_seen = set()
            for slot, expert in enumerate(experts):
                if expert < 0:
                    continue
                entry = start + expert
                if entry not in touched:
                    touched.add(entry)
                    first_seen.add(expert)
                    if not resident[entry]:
                        misses.append(expert)
                    elif self._speculative[entry]:
                        self._speculative[entry] = False
                        self._n_speculative -= 1
                        self.speculative_hits += 1
                if recency is None:
                    last[entry] = self._position + row * k + slot
                else:
                    recency[entry] = None
                    recency.move_to_end(entry)
                if (
                    misses
                    and expert in first_seen
                    and expert not in charged
                    and not resident[entry]
                    and not (drops is not None and drops[row][slot])
                ):
                    charged[expert] = (row, slot)
            if self._policy.touch is not None:
                self._touch(start, layer, walk[row], weights[row], first_seen)
        self._position += walk.size
        if misses and not self.budget.off:
            for expert in misses:
                resident[start + expert] = True
            self._use(layer, self._entry_bytes[layer] * len(misses))
        evicted = self._evict(layer, touched, misses)
        self._batch += 1
        bypassed: list[int] = []
        if self._policy.bypass:
            bypassed = [e for at, e in evicted if at == layer and start + e in touched]
            evicted = [(at, e) for at, e in evicted if at != layer or start + e not in touched]
        hits = len(touched) - len(misses)
        return BatchOutcome(len(touched), hits, misses, list(charged.values()), evicted, bypassed)

    def _touch(
        self, start: int, layer: int, walk: np.ndarray, weights: np.ndarray, first_seen: set[int]
    ) -> None:
        experts = np.unique(walk[walk >= 0])
        entries = start + experts
        first = np.array([int(e) in first_seen for e in experts], dtype=bool)
        access = Access(
            position=self._last[entries],
            first=first,
            hit=first & self.resident[entries],
            weight=np.array([weights[walk == e].sum(dtype=np.float32) for e in experts], dtype=np.float32),
            batch=np.int64(self._batch),
            layer=np.int32(layer),
            expert=experts.astype(np.int32),
        )
        before = {name: a[entries] for name, a in self._state.items()}
        for name, values in touch_state(np, self._policy, before, access, self._knobs).items():
            self._state[name][entries] = values

    def _evict(self, layer: int, touched: set[int], misses: list[int]) -> list[tuple[int, int]]:
        if self.budget.off:
            self._recency = OrderedDict() if self._recency is not None else None
            return []
        if self.budget.per_layer:
            over = self._used[layer] - self.budget.layer_bytes[layer]
        else:
            over = self._used_bytes - self.budget.total_bytes
        if self._policy.evict is not None:
            leaving = self._settled(layer, touched, misses, over)
        elif over <= 0:
            return []
        elif self._recency is not None:
            leaving = self._oldest(layer, touched, over)
        else:
            leaving = self._smallest(layer, touched, over)
        found = []
        for entry in leaving:
            at, expert = divmod(entry, self.n_expert)
            if self._n_speculative and self._speculative[entry]:
                self._speculative[entry] = False
                self._n_speculative -= 1
            self.resident[entry] = False
            self._use(at, -self._entry_bytes[at])
            found.append((at, expert))
        return found

    def _oldest(self, layer: int, touched: set[int], over: int) -> list[int]:
        """Least recent entries that free `over` bytes; the touched ones are the most recent."""
        assert self._recency is not None
        leaving = []
        for entry in self._recency:
            if over <= 0 or entry in touched:
                break
            at = entry // self.n_expert
            if self.budget.per_layer and at != layer:
                continue
            leaving.append(entry)
            over -= self._entry_bytes[at]
        for entry in leaving:
            del self._recency[entry]
        return leaving

    def _smallest(self, layer: int, touched: set[int], over: int) -> list[int]:
        """Entries of smallest key, then least recent, then lower (layer, expert), that free `over` bytes."""
        may_leave = self.resident.copy()
        if not self._policy.bypass:
            may_leave[list(touched)] = False
        if self.budget.per_layer:
            may_leave &= self._layer_of == layer
        entries = np.flatnonzero(may_leave)
        state = {name: a[entries] for name, a in self._state.items()}
        state |= entry_facts(
            self._policy,
            self._layer_of[entries].astype(np.int32),
            self._expert_of[entries].astype(np.int32),
            self._last[entries] >= self._pass_position,
            self._speculative[entries],
        )
        batch = np.int64(self._batch)
        key, wrong = eviction_key(np, self._policy, state, self._last[entries], batch, self._knobs)
        if wrong is not None and wrong.any():
            entry = entries[np.argmax(wrong)]
            name = f"expert {self._expert_of[entry]} of MoE layer {self._layer_of[entry]}"
            raise wrong_value(self._policy, name, f"MoE layer {layer}")
        order = entries[np.lexsort((entries, self._last[entries], key))]
        freed = np.cumsum(self._sizes[order])
        return order[: int(np.searchsorted(freed, over)) + 1].tolist()

    def _settled(self, layer: int, touched: set[int], misses: list[int], over: int) -> list[int]:
        """Entries that a whole-cache policy lets go."""
        per_layer, start = self.budget.per_layer, layer * self.n_expert
        # A layer's cache is its stretch of the entries; nothing outside it can be touched or leave.
        part = slice(start, start + self.n_expert) if per_layer else slice(None)
        seen = np.zeros(len(self.resident), dtype=bool)
        seen[list(touched)] = True
        hit = seen.copy()
        hit[[start + expert for expert in misses]] = False
        capacity = self.budget.layer_bytes[layer] if per_layer else self.budget.total_bytes
        cache = CacheState(
            resident=self.resident[part].copy(),
            touched=seen[part],
            hit=hit[part],
            position=self._last[part],
            bytes=self._sizes[part],
            over=np.int64(over),
            capacity=np.int64(capacity),
            batch=np.int64(self._batch),
        )
        at = layer if per_layer else 0
        state = {name: a[part] for name, a in self._state.items()}
        state |= {name: a[at] for name, a in self._scalars.items()}
        leaving, after = settle(np, self._policy, cache, state, self._knobs)
        for name, a in self._state.items():
            a[part] = after[name]
        for name, a in self._scalars.items():
            a[at] = after[name]
        return (np.flatnonzero(leaving) + (start if per_layer else 0)).tolist()


def live_cache(cell: Cell, header: TraceHeader, training: Training | None) -> LiveCache:
    """The empty cache of a session under a cell.

    Raises:
        InputError: the cell is for a replay alone, or its eviction policy learns and there is no training part.
    """
    check_live(cell)
    check_eviction(cell, trained=training is not None)
    eviction = find_eviction(cell.evict)
    budget = resolve_budget(cell.budget, cell.scope, header, effective_k(cell.route, header))
    knobs = knob_values(eviction.knobs, cell.evict_knobs)
    sizes = np.array([header.entry_bytes[layer] for layer in header.moe_layers], dtype=np.int64)
    learned = None
    if eviction.prepare is not None and training is not None:
        learned = prepared(eviction, training.counts, sizes, budget, knobs)
    return LiveCache(sizes, header.n_expert, budget, eviction, knobs, prepared=learned)


def _keeps_recency_order(policy: EvictionPolicy, knobs: SimpleNamespace) -> bool:
    """Whether a policy's key is the last position itself."""
    positions = np.arange(2, dtype=np.int64)
    if policy.key is None or policy.needs:
        return False
    try:
        return not policy.state and policy.key(np, {}, positions, np.int64(0), knobs) is positions
    except BaseException as error:
        raise policy_error(policy, error) from error
