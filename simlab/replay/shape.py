"""What is compiled into a replay program, apart from what is data along its lanes, and its first counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simlab.replay.columns import WeightSource
from simlab.replay.settings import code_key
from simlab.replay.tally import COUNTERS, SUMS
from simlab.types import Array, EvictionPolicy, Stage, Step, WeightRule

# Byte counts pass 2^31 at 2 GiB, where int32 would wrap without a word.
jax.config.update("jax_enable_x64", True)

Tree = dict[str, Any]

NO_ROW = np.iinfo(np.int64).max
"""In `nan_row` and `fault`: none so far."""


def at_layer(x: Array, layer: Array) -> Array:
    """`x[layer]`."""
    return lax.dynamic_index_in_dim(x, layer, 0, keepdims=False, allow_negative_indices=False)


def put(x: Array, of_layer: Array, layer: Array) -> Array:
    """`x` with `of_layer` at `layer`."""
    return lax.dynamic_update_index_in_dim(x, of_layer, layer, 0, allow_negative_indices=False)


def first_counts(n_lanes: int) -> Tree:
    """Counters and sums before the first row, by phase (prefill, decode)."""
    return {
        "counters": np.zeros((2, len(COUNTERS), n_lanes), np.int64),
        "sums": np.zeros((2, len(SUMS), n_lanes), np.float64),
        # First row in which an existing slot's weight is NaN.
        "nan_row": np.full(n_lanes, NO_ROW, np.int64),
        # First value of a policy that is none, as `fault` has it.
        "fault": np.full(n_lanes, NO_ROW, np.int64),
    }


def fault(is_key: bool, row: Array, layer: Array, expert: Array) -> Array:
    """int64, in the order of rows: where a policy's value is none (`simlab.routing.is_wrong`)."""
    return (jnp.int64(row) << 32) | (is_key << 31) | (jnp.int64(layer) << 16) | expert


def told_fault(code: int) -> tuple[bool, int, int, int]:
    """What `fault` was made of."""
    return bool(code >> 31 & 1), code >> 32, code >> 16 & 0x7FFF, code & 0xFFFF


def in_phase(row: Tree) -> Array:
    """bool `[2, 1, 1]`: the phase a row is counted in, if in any."""
    return row["counted"] & (jnp.arange(2) == row["decode"])[:, None, None]


@dataclass(frozen=True, eq=False)
class ProgramShape:
    """All that is compiled in: policy code, sizes, which inputs a trace gives. Everything else is data."""

    steps: tuple[Step, ...]
    """One step per stage; their knobs are ignored."""
    eviction: EvictionPolicy
    n_layers: int
    n_expert: int
    n_slots: int
    n_expert_used: int
    """The router's own k, against which mass, regret and agreement are taken."""
    scores: bool
    weights: WeightSource | None
    """Where weights come from: "scores", "recorded", or None where nothing wants them."""
    weight_rule: WeightRule | None
    detail: bool
    """Whether each row's slots and counters come out as well."""
    n_speculative: int = 0
    """Most entries that, as the rows say, look-ahead brings in before one batch."""
    ahead: int = 0
    """Layers for which the previous token's experts are read ahead; the rows then bring in nothing."""
    sequential: bool = False
    """Whether every slot is a batch of its own to the cache."""
    given: bool = False
    """Whether rows carry each lane's routing, of a first pass, which then stands."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        sizes = (self.n_layers, self.n_expert, self.n_slots, self.n_expert_used, self.n_speculative)
        code = code_key(self.steps, self.eviction)
        modes = (self.detail, self.sequential, self.given, self.ahead)
        return (code, sizes, self.scores, self.weights, self.weight_rule, modes)

    @property
    def looks_ahead(self) -> bool:
        return self.n_speculative > 0 or self.ahead > 0

    def step(self, stage: Stage) -> Step | None:
        return next((s for s in self.steps if s.policy.stage == stage), None)
