"""The entries a recording read early, at the batches they were resident from, as its reads table says.

With a margin or a drop residency is an input, so a replay needs to know what speculation brought in and when. A
speculative read stands at the graph and layer whose batch first saw its entry (record/lookahead.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simlab.trace.store import Trace

NOTHING = -1


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
