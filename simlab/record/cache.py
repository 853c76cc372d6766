"""The live expert cache: which entries are in RAM, and who leaves.

Follows engine-semantics, section 3: one lookup per unique expert of a batch, eviction at the batch's end
from the smallest key among entries the batch did not touch. The eviction policy is the same source the
replayer runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from simlab.types import Access, EvictionPolicy, ResolvedBudget


class BatchOutcome(NamedTuple):
    """What a batch did to the cache. Experts are ids within the batch's layer."""

    lookups: int
    hits: int
    misses: list[int]
    charged: dict[int, tuple[int, int]]
    """Per missed expert, the (row, slot) its read is charged to."""
    evicted: list[tuple[int, int]]
    """(layer index, expert) of entries that left."""


class LiveCache:
    """Entry state as arrays over layer index * n_expert + expert.

    Args:
        entry_bytes: int64 `[n_moe_layers]`.
        policy: eviction policy; `knobs` its values.
    """

    def __init__(
        self,
        entry_bytes: np.ndarray,
        n_expert: int,
        budget: ResolvedBudget,
        policy: EvictionPolicy,
        knobs: SimpleNamespace,
    ) -> None:
        self.n_expert = n_expert
        self._entry_bytes = entry_bytes
        self._policy, self._knobs = policy, knobs
        n = len(entry_bytes) * n_expert
        self._sizes = np.repeat(entry_bytes, n_expert)
        self._layer_of = np.repeat(np.arange(len(entry_bytes)), n_expert)
        self.resident = np.zeros(n, dtype=bool)
        self._last = np.full(n, -1, dtype=np.int64)
        self._state = {
            name: np.full(n, first, dtype=np.int64 if isinstance(first, int) else np.float64)
            for name, first in policy.state.items()
        }
        self._used = np.zeros(len(entry_bytes), dtype=np.int64)
        self._position = 0
        self._batch = 0
        self.budget = budget

    def set_budget(self, budget: ResolvedBudget) -> None:
        """Another budget from the next batch on; the overshoot leaves at that batch's end."""
        self.budget = budget

    def residency(self, layer: int) -> np.ndarray:
        """bool `[n_expert]` of one layer index, a copy: the snapshot a batch decides on."""
        return self.resident[layer * self.n_expert : (layer + 1) * self.n_expert].copy()

    def run_batch(
        self, layer: int, walk: np.ndarray, dropped: np.ndarray, weights: np.ndarray
    ) -> BatchOutcome:
        """Look up, insert and evict for one batch.

        Args:
            layer: MoE layer index.
            walk: int32 `[k, n]` experts after repointing, -1 where a slot does not exist.
            dropped: bool `[k, n]`.
            weights: float32 `[k, n]` applied weights.
        """
        start = layer * self.n_expert
        k, n_rows = walk.shape
        seen: set[int] = set()
        misses: list[int] = []
        charged: dict[int, tuple[int, int]] = {}
        hits = 0
        rows, drops = walk.T.tolist(), dropped.T.tolist()
        for row in range(n_rows):
            first_seen = set()
            for slot, expert in enumerate(rows[row]):
                if expert < 0:
                    continue
                entry = start + expert
                self._last[entry] = self._position + row * k + slot
                if expert not in seen:
                    seen.add(expert)
                    first_seen.add(expert)
                    if self.resident[entry]:
                        hits += 1
                    else:
                        misses.append(expert)
                if (
                    expert in first_seen
                    and expert not in charged
                    and not drops[row][slot]
                    and not self.resident[entry]
                ):
                    charged[expert] = (row, slot)
            if self._policy.touch is not None:
                self._touch(start, layer, walk[:, row], weights[:, row], first_seen)
        self._position += k * n_rows
        missed = start + np.asarray(misses, dtype=np.int64)
        touched = start + np.fromiter(seen, dtype=np.int64, count=len(seen))
        if not self.budget.off:
            self.resident[missed] = True
            self._used[layer] += int(self._entry_bytes[layer]) * len(misses)
        evicted = self._evict(layer, touched)
        self._batch += 1
        return BatchOutcome(len(seen), hits, misses, charged, evicted)

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
        assert self._policy.touch is not None
        new = self._policy.touch(
            np, {name: a[entries] for name, a in self._state.items()}, access, self._knobs
        )
        for name, values in new.items():
            self._state[name][entries] = values

    def _evict(self, layer: int, touched: np.ndarray) -> list[tuple[int, int]]:
        if self.budget.off:
            return []
        if self.budget.per_layer:
            over = int(self._used[layer]) - self.budget.layer_bytes[layer]
        else:
            over = int(self._used.sum()) - self.budget.total_bytes
        if over <= 0:
            return []
        may_leave = self.resident.copy()
        may_leave[touched] = False
        if self.budget.per_layer:
            may_leave &= self._layer_of == layer
        entries = np.flatnonzero(may_leave)
        state = {name: a[entries] for name, a in self._state.items()}
        key = self._policy.key(np, state, self._last[entries], np.int64(self._batch), self._knobs)
        # Smallest key first, then the least recent, then the lower (layer, expert).
        order = entries[np.lexsort((entries, self._last[entries], key))]
        freed = np.cumsum(self._sizes[order])
        leaving = order[: int(np.searchsorted(freed, over)) + 1]
        self.resident[leaving] = False
        np.subtract.at(self._used, self._layer_of[leaving], self._sizes[leaving])
        return [(int(e) // self.n_expert, int(e) % self.n_expert) for e in leaving]
