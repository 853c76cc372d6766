"""Look-ahead in a replay: the entries a recording read early, at the batches they were resident from.

With a margin or a drop residency is an input, so a replay needs to know what speculation brought in and
when. The trace's reads table says so: a speculative read stands at the graph and layer whose batch first saw
its entry (record/lookahead.py). A lane takes such an entry in unless it holds it already.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simlab.trace.store import Trace
from simlab.types import Array

NOTHING = -1


class Inserted(NamedTuple):
    """One layer after its speculative entries came in; `[E, W]` except `coldest` `[W]`."""

    stamps: Array
    resident: Array
    marks: Array
    """Resident by speculation and not looked up since."""
    coldest: Array
    """Stamp of the coldest entry so far: each newcomer goes below it."""


def speculative_entries(trace: Trace) -> dict[tuple[int, int], list[int]]:
    """Experts that speculation made resident, in order, by (graph, model layer) of the batch that saw them."""
    rows = trace.collect(
        "reads",
        trace.reads.filter("speculative").select("graph", "layer", "expert").unique(maintain_order=True),
    )
    found: dict[tuple[int, int], list[int]] = {}
    for graph, layer, expert in rows.iter_rows():
        found.setdefault((graph, layer), []).append(expert)
    return found


def speculative_column(
    entries: dict[tuple[int, int], list[int]],
    graph: NDArray[np.int64],
    model_layer: NDArray[np.int32],
    batch_start: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """int32 `[rows, n]`: what each batch's first row brings in, -1 elsewhere; n is 0 without look-ahead."""
    n = max((len(e) for e in entries.values()), default=0)
    column = np.full((len(graph), n), NOTHING, dtype=np.int32)
    if n:
        for row in np.flatnonzero(batch_start):
            experts = entries.get((int(graph[row]), int(model_layer[row])), [])
            column[row, : len(experts)] = experts
    return column


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
