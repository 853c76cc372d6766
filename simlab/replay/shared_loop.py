"""What the loops compiled by numba have in common that walk shared routes where JAX's device is the CPU itself.

XLA's programs for a CPU spend most of their time on handing out small pieces of work, of which a walk has many; a
loop has none. `ranked_loop.py` and `keyed_loop.py` do what `ranked.py` and `keyed.py` do, to the entry. A lane's
cache is a bit per place, in words of 64.

Shapes: `B` MoE layers, `E` experts per layer, `C` caches, `W` lanes, `P` batches, `U` uses in the order of the walk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

WORD_64 = 64
"""Places of a word."""
PHASES = 3
"""Prefill, decode, and what is not counted."""
HITS, EVICTIONS, READ_BYTES = range(3)
N_COUNTS = 3


class Batches(NamedTuple):
    """What is walked."""

    begins: NDArray[np.int64]
    """`[P + 1]`: where the uses of each begin, and where the last ones end."""
    number: NDArray[np.int64]
    """`[P]`: of each since the start of the run."""
    layer: NDArray[np.int64]
    """`[P]`."""
    cache: NDArray[np.int64]
    """`[P]`: which of the caches it goes to."""
    phase: NDArray[np.int64]
    """`[P]`: of `PHASES`."""


class Caches(NamedTuple):
    """What lanes walk with, and what they come to."""

    units: NDArray[np.int32]
    """`[B * E]`: units of each entry."""
    least_units: NDArray[np.int32]
    """`[C]`: units of the smallest entry of each cache."""
    entry_bytes: NDArray[np.int64]
    """`[B]`."""
    budget: NDArray[np.int32]
    """`[C, W]`: units a cache may hold."""
    off: NDArray[np.bool_]
    """`[W]`: lanes without a cache."""
    bypass: bool
    """Whether what a batch uses may leave at its end."""
    resident: NDArray[np.bool_]
    """`[B * E, W]`: what is in RAM; brought up to date."""
    used: NDArray[np.int32]
    """`[C, W]`: units in use; brought up to date."""
    counts: NDArray[np.int64]
    """`[PHASES, N_COUNTS, W]`: `HITS`, `EVICTIONS` and `READ_BYTES`; added to."""


def _lowest(typing: Any, word: Any) -> Any:
    """The place of the lowest bit of a word that is not zero: one instruction, for which NumPy has no name."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


lowest: Any = intrinsic(_lowest)
