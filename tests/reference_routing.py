"""The routing policies of policies.md on one row, in plain Python loops, as golden values.

Written from policies.md ("Routing policies", "Exact rules where the table leaves room") alone; it shares no
code with the policies or their drivers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

f32 = np.float32


@dataclass
class ReferenceRow:
    """One token at one layer of a decode graph, as a policy of this file sees it."""

    values: list[Any]
    """float32 ranking values of all experts, NaN already -inf."""
    mass: list[float]
    recorded: list[int]
    """The recorded ids, -1 for holes."""
    router: list[int]
    """The router's experts in force."""
    weights: list[Any]
    """float32 weights of `router`."""
    resident: set[int]
    k: int
    knobs: dict[str, Any]
    learned: Any = None
    """Of this layer: `[E][E]` co-activation counts, or a sensitivity."""
    state: dict[str, Any] = field(default_factory=dict)
    """Of this layer, kept from row to row."""

    def ranked(self) -> list[int]:
        """All experts as the router ranks them."""
        picks = [e for e in self.recorded if e >= 0]
        others = [e for e in range(len(self.values)) if e not in picks]
        return picks + sorted(others, key=lambda e: (-float(self.values[e]), e))

    def finite(self, expert: int) -> bool:
        return math.isfinite(self.values[expert])


Experts = list[int] | None
"""The experts that run, in slot order; None where the policy declines the row."""


def cache_prior(row: ReferenceRow) -> Experts:
    finite = [v for v in row.values if math.isfinite(v)]
    span = f32(max(finite) - min(finite)) if finite else f32(0)
    n = row.state["n"] = row.state.get("n", 0) + 1
    mean = row.state.get("mean", f32(0))
    mean = row.state["mean"] = f32(mean + f32(f32(span - mean) / f32(n)))
    boost = f32(f32(row.knobs["lambda"]) * mean)
    if not boost > 0 or row.knobs["J"] >= row.k:
        return None
    first = row.ranked()[: row.knobs["J"]]
    boosted = {}
    for e, value in enumerate(row.values):
        raised = (e in row.resident or e in first) and row.finite(e)
        boosted[e] = f32(value + boost) if raised else value
    order = sorted(boosted, key=lambda e: (e not in first, -float(boosted[e]), e))
    return order[: len(row.router)]


def _window(row: ReferenceRow, window: list[int]) -> Experts:
    ranked = row.ranked()
    chosen = ranked[: row.knobs["J"]]
    chosen += [
        e for e in window if e not in chosen and e in row.resident and float(row.values[e]) > -math.inf
    ]
    chosen += [e for e in ranked if e not in chosen]
    return chosen[: len(row.router)]


def max_rank(row: ReferenceRow) -> Experts:
    if row.knobs["M"] <= row.knobs["J"] or row.knobs["J"] >= row.k:
        return None
    return _window(row, row.ranked()[: row.knobs["M"]])


def cum_prob(row: ReferenceRow) -> Experts:
    if not row.knobs["p"] > 0 or row.knobs["J"] >= row.k:
        return None
    window, reached = [], 0.0
    for e in row.ranked():
        if not f32(reached) < f32(row.knobs["p"]):
            break
        window.append(e)
        reached += row.mass[e]
    return _window(row, window)


def resident_only(row: ReferenceRow) -> Experts:
    at_hand = [e for e in row.resident if float(row.values[e]) > -math.inf]
    if sum(row.finite(e) for e in at_hand) < row.k:
        return None
    return sorted(at_hand, key=lambda e: (-float(row.values[e]), e))[: len(row.router)]


def _swap(row: ReferenceRow, replaced: Callable[[int], bool], better: Callable[[int, int], Any]) -> Experts:
    experts = list(row.router)
    taken: set[int] = set()
    for slot, expert in enumerate(row.router):
        if not replaced(slot):
            continue
        left = [e for e in row.resident if e not in row.router and e not in taken and row.finite(e)]
        left = [e for e in left if better(expert, e) is not None]
        if left:
            experts[slot] = min(left, key=lambda e: (better(expert, e), e))
            taken.add(experts[slot])
    return experts


def swap_on_miss(row: ReferenceRow) -> Experts:
    if not row.knobs["tau"] > 0:
        return None
    return _swap(
        row,
        lambda slot: row.router[slot] not in row.resident and bool(row.weights[slot] < f32(row.knobs["tau"])),
        lambda _, e: -float(row.values[e]),
    )


def buddy(row: ReferenceRow) -> Experts:
    if row.knobs["n"] == 0:
        return None

    def place(of: int, e: int) -> int | None:
        counts = row.learned[of]
        friends = sorted((o for o in range(len(row.values)) if o != of), key=lambda o: (-counts[o], o))
        found = friends.index(e)
        return found if found < row.knobs["n"] else None

    return _swap(row, lambda slot: row.router[slot] not in row.resident, place)


def skip_ratio(weights: list[Any], knobs: dict[str, Any], _: Any) -> list[bool]:
    threshold = f32(f32(knobs["beta"]) * max(weights))
    return [bool(w < threshold) for w in weights]


def adaptive_k(weights: list[Any], knobs: dict[str, Any], sensitivity: Any) -> list[bool]:
    factor = f32(f32(knobs["sensitivity"]) * f32(1 if sensitivity is None else sensitivity))
    dropped, lost = [False] * len(weights), 0.0
    # From the lightest on; of equal ones the later slot goes first.
    for slot in sorted(range(len(weights)), key=lambda s: (float(weights[s]), -s)):
        lost += float(weights[slot])
        if not f32(f32(lost) * factor) < f32(knobs["t"]):
            break
        dropped[slot] = True
    return dropped


REROUTES = {f.__name__: f for f in (cache_prior, max_rank, cum_prob, resident_only, swap_on_miss, buddy)}
DROPS = {f.__name__: f for f in (skip_ratio, adaptive_k)}
