"""Validation against another engine: a replay beside what a binary of the seed document's family did, cell by cell.

The binary's route trace says which experts ran, what was resident and what was read, not what the router had picked
and not what its cache evicted. Evictions are counted by walking its routing through a cache of ours of the same
budget, as long as that one finds the residency the trace says; where it does not, the two ran other caches, or one of
them began warm, and the numbers say so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from simlab.errors import InputError
from simlab.judge.against import recorded_series, with_intervals
from simlab.judge.measure import measure
from simlab.judge.validate import check_model
from simlab.record.cache import live_cache
from simlab.record.external import ExternalEngine, ExternalRun, Source
from simlab.replay.run import sweep
from simlab.trace.store import Trace
from simlab.types import Cell, CellNumbers, Comparison

_FREE = "free generation: its own tokens, not those of the trace"
_UNKNOWN = "agreement with the router is not known"
_ONE_FIGURE = "its perplexity is one figure of the whole text, so chance in it is not known"


def validate_external(
    trace: Trace,
    cells: Sequence[Cell],
    engine: ExternalEngine,
    source: Source,
    *,
    progress: Callable[[float], None] | None = None,
) -> list[Comparison]:
    """Replay a trace, and run its text or prompt on a binary, under each cell.

    Raises:
        InputError: the text is not the trace's, or the binary has no such cell. RunError: the binary failed.
    """
    check_source(trace, source)
    if trace.header.engine == "simlab":
        check_model(trace, engine.model)
    for cell in cells:  # before anything runs
        engine.arguments(cell, trace.header, source, Path())
    replays = sweep(trace, cells)
    lives = []
    for i, cell in enumerate(cells):
        with tempfile.TemporaryDirectory(prefix="simlab-external-") as folder:
            run = engine.run(cell, trace.header, source, Path(folder))
            live = dataclasses.replace(external_numbers(run, cell), provenance=replays[i].provenance)
            if source.text is None:
                live = dataclasses.replace(live, note=f"{live.note}; {_FREE}" if live.note else _FREE)
        lives.append(live)
        if progress is not None:
            progress((i + 1) / len(cells))
    return [Comparison(*pair) for pair in zip(replays, beside_first(lives), strict=True)]


def check_source(trace: Trace, source: Source) -> None:
    """Refuse a text or prompt that the trace was not recorded on.

    Raises:
        InputError: another text, or one that cannot be read.
    """
    if source.text is not None:
        try:
            content, option = source.text.read_bytes(), f"--text {source.text}"
        except OSError as error:
            raise InputError(f"--text {source.text}: {error.strerror}") from error
    else:
        content, option = (source.prompt or "").encode(), "--prompt"
    known = trace.header.text_hash
    if known is not None and known != hashlib.sha256(content).hexdigest():
        raise InputError(f"{option}: is not what {trace.path} was recorded on")


def external_numbers(run: ExternalRun, cell: Cell) -> CellNumbers:
    """The numbers of a binary's run under a cell; its `note` says which of them are not known."""
    tokens, strange = counted_tokens(run.trace, cell)
    trace = dataclasses.replace(run.trace, tokens=tokens.lazy())
    (numbers,) = with_intervals([measure(trace, cell)], [recorded_series(trace)])
    notes = []
    if strange:
        notes.append(
            f"another cache than one LRU of {cell.budget.text}: {strange:,} of {numbers.all.slots:,} slots found what "
            "that would not hold, or not what it would; evictions are not known"
        )
    if cell.margin:
        substituted = run.substituted
        notes.append(
            _UNKNOWN if substituted is not None else f"{_UNKNOWN}; neither are the substituted slots"
        )
        phases = {
            phase: dataclasses.replace(getattr(numbers, phase), agreement=None, substituted=substituted)
            for phase in ("decode", "all")
        }
        numbers = dataclasses.replace(numbers, decode=phases["decode"], all=phases["all"])
    if run.nll is not None:
        numbers = dataclasses.replace(numbers, ppl=math.exp(run.nll), nll=run.nll)
        notes.append(_ONE_FIGURE)
    return dataclasses.replace(numbers, note="; ".join(notes) or None)


def beside_first(live: Sequence[CellNumbers]) -> list[CellNumbers]:
    """Runs of one text with the perplexity of each over the first one's, where both are known."""
    first = live[0].nll if live else None
    return [
        n if first is None or n.nll is None else dataclasses.replace(n, ppl_ratio=math.exp(n.nll - first))
        for n in live
    ]


def counted_tokens(trace: Trace, cell: Cell) -> tuple[pl.DataFrame, int]:
    """The tokens table of an imported run with lookups, hits, dropped and evictions of every graph.

    Also slots whose residency is not that of one LRU cache of the cell's budget, begun empty; with any, evictions
    are null.
    """
    names = ("experts", "weights", "dropped", "residency", "read_bytes")
    rows = trace.collect("routing", trace.routing.select("graph", "layer", *names))
    experts, weights, dropped, residency, read = (
        rows[name].to_numpy().reshape(-1, trace.width) for name in names
    )
    header = trace.header
    cache = live_cache(cell, header, None)
    top = np.argmax(np.nan_to_num(weights, nan=-np.inf), axis=1)
    walk = np.where(dropped, np.take_along_axis(experts, top[:, None], axis=1), experts).astype(np.int32)
    graph, layer = rows["graph"].to_numpy(), rows["layer"].to_numpy()
    edges = np.flatnonzero((np.diff(graph) != 0) | (np.diff(layer) != 0)) + 1
    counts: dict[int, list[int]] = {}
    strange = 0
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(graph)], strict=True):
        batch, at = slice(start, stop), int(np.searchsorted(header.moe_layers, layer[start]))
        known = experts[batch] >= 0
        expected = cache.residency(at)[np.maximum(experts[batch], 0)]
        strange += int(((expected != (residency[batch] > 0)) & known).sum())
        found = cache.run_batch(at, walk[batch], dropped[batch], weights[batch])
        lookups = len(np.unique(experts[batch][known & ~dropped[batch]]))
        misses = int((read[batch] > 0).sum())
        moved = (
            lookups,
            lookups - misses,
            int(dropped[batch].sum()),
            len(found.evicted) + len(found.bypassed),
        )
        one = counts.setdefault(int(graph[start]), [0, 0, 0, 0])
        for i, more in enumerate(moved):
            one[i] += more
    counted = ("lookups", "hits", "dropped", "evictions")
    by_graph = pl.DataFrame(
        {"graph": list(counts), **{n: [c[i] for c in counts.values()] for i, n in enumerate(counted)}},
        schema={"graph": pl.Int64} | dict.fromkeys(counted, pl.Int64),
    )
    if strange:
        by_graph = by_graph.with_columns(evictions=pl.lit(None, pl.Int64))
    tokens = trace.collect("tokens", trace.tokens.drop(counted))
    return tokens.join(by_graph, on="graph", how="left", maintain_order="left"), strange
