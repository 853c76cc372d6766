"""Look-ahead in a replay: a lane takes the entries of `simlab.replay.early_reads` in unless it holds them already."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from simlab.types import Array


class Inserted(NamedTuple):
    """One layer after its speculative entries came in; `[E, W]` except `coldest` `[W]`."""

    stamps: Array
    resident: Array
    marks: Array
    """Resident by speculation and not looked up since."""
    coldest: Array
    """Stamp of the coldest entry so far: each newcomer goes below it."""


def insert(
    experts: Array, stamps: Array, resident: Array, marks: Array, coldest: Array, off: Array
) -> Inserted:
    """Bring entries of one layer in at the cold end, one below the other.

    Args:
        experts: int32 `[n]`, -1 for none. stamps, resident, marks: `[E, W]`. coldest, off: `[W]`.
    """
    named = experts[:, None] == jnp.arange(stamps.shape[0], dtype=jnp.int32)  # [n, E]
    new = named[..., None] & ~resident & ~off  # [n, E, W]
    place = jnp.cumsum(new.any(axis=1), axis=0)  # [n, W]
    stamp = coldest - (new * place[:, None]).sum(axis=0)
    arrives = new.any(axis=0)
    return Inserted(
        jnp.where(arrives, stamp, stamps),
        resident | arrives,
        marks | arrives,
        coldest - place[-1],
    )
