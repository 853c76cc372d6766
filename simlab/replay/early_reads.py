"""The entries a recording read early, at the batches they were resident from, as its reads table says.

With a margin or a drop residency is an input, so a replay needs to know what speculation brought in and when. A
speculative read stands at the graph and layer whose batch first saw its entry (record/lookahead.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.prefetch import parse_prefetch
from simlab.trace.store import Trace
from simlab.types import Cell, TraceHeader

NOTHING = -1


class LookAhead(NamedTuple):
    """Where a cell's look-ahead comes from: neither is none."""

    n_speculative: int = 0
    """Most entries that the rows say came in before one batch."""
    ahead: int = 0
    """Layers for which the previous token's experts are read ahead."""


def look_ahead(header: TraceHeader, n_recorded: int, cell: Cell) -> LookAhead:
    """The look-ahead of a cell over a trace that recorded `n_recorded` entries at most before one batch.

    Raises:
        InputError: it asks for predictions that the trace does not carry.
    """
    spec = parse_prefetch(cell.prefetch) if cell.prefetch is not None else None
    if spec is not None and spec.kind == "previous_token":
        return LookAhead(ahead=min(spec.depth, len(header.moe_layers)))
    if spec is not None and spec.text != header.prefetch:
        raise InputError(
            f"--prefetch {spec.text}: the trace carries no predictions of the next gate; record it with "
            f"--prefetch {spec.text}, which replays as it was"
        )
    return LookAhead(n_speculative=n_recorded)


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
