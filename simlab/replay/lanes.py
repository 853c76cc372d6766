"""What differs between the cells of one program, as arrays with the lanes last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.cells import resolve_budget
from simlab.replay.shape import Tree
from simlab.types import Cell, EvictionPolicy, Knob, TraceHeader

_EXACT_LANES = 16
"""Up to this many, lanes come in powers of two; then in multiples of it."""


def lanes_of(
    header: TraceHeader, cells: Sequence[Cell], widths: Sequence[int], eviction: EvictionPolicy
) -> Tree:
    """What differs between the cells of a program, arrays with lanes last; knobs as float32 or int32."""
    budgets = [resolve_budget(c.budget, c.scope, header, k) for c, k in zip(cells, widths, strict=True)]
    return {
        "k": np.array(widths, np.int32),
        "knobs": {
            step.policy.stage: {
                name: _knob(knob, [c.route.steps[place].knobs.get(name, knob.default) for c in cells])
                for name, knob in step.policy.knobs.items()
            }
            for place, step in enumerate(cells[0].route.steps)
        },
        "eviction_knobs": {
            name: _knob(knob, [c.evict_knobs.get(name, knob.default) for c in cells])
            for name, knob in eviction.knobs.items()
        },
        "total_budget": np.array([b.total_bytes for b in budgets], np.int64),
        "layer_budget": np.array([b.layer_bytes for b in budgets], np.int64).T.copy(),
        "per_layer": np.array([b.per_layer for b in budgets]),
        "off": np.array([b.off for b in budgets]),
        "entry_bytes": np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64),
    }


def padded_lanes(n_cells: int) -> int:
    """Lanes to compile for: a few sizes, so that sweeps of like size share a compiled program."""
    power = 1 << (n_cells - 1).bit_length()
    return power if power <= _EXACT_LANES else -(-n_cells // _EXACT_LANES) * _EXACT_LANES


def _knob(knob: Knob, values: Sequence[float]) -> NDArray[Any]:
    return np.array(values, np.int32 if knob.integer else np.float32)
