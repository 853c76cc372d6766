"""Budgets in bytes, and bytes counted in int32: in the unit that all entries' sizes are multiples of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simlab.types import ResolvedBudget

_LARGEST = 2**30


def unit_of(sizes: NDArray[np.int64]) -> int:
    """Bytes that all entry sizes are multiples of."""
    return int(np.gcd.reduce(sizes))


def budget_bytes(budgets: Sequence[ResolvedBudget]) -> NDArray[np.int64]:
    """int64 `[lanes, caches]`: what each cache may hold."""
    return np.array([b.layer_bytes if b.per_layer else [b.total_bytes] for b in budgets], np.int64)


def budget_units(budgets: Sequence[ResolvedBudget], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 `[caches, lanes]`: what each cache may hold, in units; without a cache more than there is."""
    budget = np.minimum(budget_bytes(budgets).T // unit_of(sizes), _LARGEST).astype(np.int32)
    return np.where(np.array([b.off for b in budgets]), np.int32(_LARGEST), budget)


def can_count(sizes: NDArray[np.int64], n_expert: int) -> bool:
    """Whether all experts' bytes, in their common unit, can be counted in int32."""
    return int(sizes.sum()) // unit_of(sizes) * n_expert < _LARGEST
