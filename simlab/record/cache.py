"""The live expert cache: which entries are in RAM, and who leaves.

Follows engine-semantics, section 3: one lookup per unique expert of a batch, eviction at the batch's end
from the smallest key among entries the batch did not touch. The eviction policy is the same source the
replayer runs; where its key is the last position itself (`lru`), an ordered dictionary gives the same order
for less.
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from simlab.policy_check import check_policy, policy_error
from simlab.routing import eviction_key, touch_state
from simlab.types import Access, EvictionPolicy, ResolvedBudget


class BatchOutcome(NamedTuple):
    """What a batch did to the cache. Experts are ids within the batch's layer."""

    lookups: int
    hits: int
    misses: list[int]
    charged: list[tuple[int, int]]
    """(row, slot) each missed expert's read is charged to: its first slot that is not dropped."""
    evicted: list[tuple[int, int]]
    """(layer index, expert) of entries that left."""


class LiveCache:
    """Entry state as arrays over layer index * n_expert + expert.

    Args:
        entry_bytes: int64 `[n_moe_layers]`.
        policy: eviction policy; `knobs` its values.
        ordered: False keeps to the array form even where an ordered dictionary would do (for tests).
    """

    def __init__(
        self,
        entry_bytes: np.ndarray,
        n_expert: int,
        budget: ResolvedBudget,
        policy: EvictionPolicy,
        knobs: SimpleNamespace,
        ordered: bool = True,
    ) -> None:
        check_policy(policy)
        self.n_expert = n_expert
        self._entry_bytes = [int(size) for size in entry_bytes]
        self._policy, self._knobs = policy, knobs
        n = len(entry_bytes) * n_expert
        self._sizes = np.repeat(entry_bytes, n_expert)
        self._layer_of = np.repeat(np.arange(len(entry_bytes)), n_expert)
        self.resident = np.zeros(n, dtype=bool)
        self._by_layer = self.resident.reshape(len(entry_bytes), n_expert)
        self._last = np.full(n, -1, dtype=np.int64)
        self._state = {
            name: np.full(n, first, dtype=np.int64 if isinstance(first, int) else np.float64)
            for name, first in policy.state.items()
        }
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
        self.budget = budget

    def set_budget(self, budget: ResolvedBudget) -> None:
        """Another budget from the next batch on, whose end evicts the overshoot.

        Raises:
            ValueError: to or from a cache that is off; start a new session for that.
        """
        if budget.off != self.budget.off:
            raise ValueError("a cache cannot be switched on or off within a session")
        self.budget = budget

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
        evicted = self._evict(layer, touched)
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
        evicted = self._evict(layer, touched)
        self._batch += 1
        return BatchOutcome(len(touched), len(touched) - len(misses), misses, list(charged.values()), evicted)

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

    def _evict(self, layer: int, touched: set[int]) -> list[tuple[int, int]]:
        if self.budget.off:
            self._recency = OrderedDict() if self._recency is not None else None
            return []
        if self.budget.per_layer:
            over = self._used[layer] - self.budget.layer_bytes[layer]
        else:
            over = self._used_bytes - self.budget.total_bytes
        if over <= 0:
            return []
        leaving = (
            self._oldest(layer, touched, over)
            if self._recency is not None
            else self._smallest(layer, touched, over)
        )
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
        may_leave[list(touched)] = False
        if self.budget.per_layer:
            may_leave &= self._layer_of == layer
        entries = np.flatnonzero(may_leave)
        state = {name: a[entries] for name, a in self._state.items()}
        batch = np.int64(self._batch)
        key = eviction_key(np, self._policy, state, self._last[entries], batch, self._knobs)
        order = entries[np.lexsort((entries, self._last[entries], key))]
        freed = np.cumsum(self._sizes[order])
        return order[: int(np.searchsorted(freed, over)) + 1].tolist()


def _keeps_recency_order(policy: EvictionPolicy, knobs: SimpleNamespace) -> bool:
    """Whether a policy's key is the last position itself."""
    positions = np.arange(2, dtype=np.int64)
    try:
        return not policy.state and policy.key(np, {}, positions, np.int64(0), knobs) is positions
    except BaseException as error:
        raise policy_error(policy, error) from error
