"""Validation against another engine: a replay beside what a binary of the seed document's family did, cell by cell.

The binary's route trace says which experts ran, what was resident and what was read, not what the router had picked
and not what its cache evicted. Evictions are counted by walking its routing through a cache of ours of the same
budget, as long as that one finds the residency the trace says; where it does not, the two ran other caches, or one of
them began warm, and the numbers say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from simlab.errors import InputError
from simlab.judge.against import recorded_series, with_intervals
from simlab.judge.measure import measure
from simlab.record.cache import live_cache
from simlab.record.engine import EMBEDDED_MODEL
from simlab.record.external import ExternalEngine, ExternalRun, Source
from simlab.replay.run import sweep
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers, Comparison

_FREE = "free generation: its own tokens, not those of the trace"
_UNKNOWN = "agreement with the router is not known"


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
    for cell in cells:  # before anything runs
        engine.arguments(cell, trace.header, source, Path())
    replays = sweep(trace, cells)
    compared = []
    for i, cell in enumerate(cells):
        with tempfile.TemporaryDirectory(prefix="simlab-external-") as folder:
            run = engine.run(cell, trace.header, source, Path(folder))
            live = external_numbers(run, cell)
            if source.text is None:
                live = dataclasses.replace(live, note=f"{live.note}; {_FREE}" if live.note else _FREE)
        compared.append(Comparison(replays[i], live))
        if progress is not None:
            progress((i + 1) / len(cells))
    return compared


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
        substituted = _whole(run.summary, "experts_substituted")
        notes.append(
            _UNKNOWN if substituted is not None else f"{_UNKNOWN}; neither are the substituted slots"
        )
        phases = {
            phase: dataclasses.replace(getattr(numbers, phase), agreement=None, substituted=substituted or 0)
            for phase in ("decode", "all")
        }
        numbers = dataclasses.replace(numbers, decode=phases["decode"], all=phases["all"])
    if run.ppl is not None and run.ppl > 0:
        numbers = dataclasses.replace(numbers, ppl=run.ppl, nll=math.log(run.ppl))
    return dataclasses.replace(numbers, note="; ".join(notes) or None)


def _whole(summary: dict[str, str], name: str) -> int | None:
    try:
        return int(summary[name])
    except (KeyError, ValueError):
        return None


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


def external_command(args: argparse.Namespace) -> None:
    """`simlab validate --engine-binary`."""
    from simlab.cli.options import cells_from_args, warn_about_cells
    from simlab.cli.output import Progress, cell_to_json, print_json, table

    for name in ("buffered", "prefetch", "ubatch", "train"):
        if getattr(args, name):
            raise InputError(f"--{name}: the engine binary has no such option")
    if (args.text is None) == (args.prompt is None):
        raise InputError("--engine-binary: wants the --text or the --prompt that the trace was recorded on")
    if (args.prompt is None) != (args.n is None):
        raise InputError("-n: goes with --prompt, which needs it: the number of tokens to generate")
    try:
        more = shlex.split(args.engine_args or "")
    except ValueError as error:
        raise InputError(f"--engine-args {args.engine_args}: {error}") from error
    trace = open_trace(args.trace)
    cells = cells_from_args(args, recorded=trace.header)
    warn_about_cells(cells, trace.header)
    engine = ExternalEngine(
        args.engine_binary, args.model or EMBEDDED_MODEL, threads=args.threads, lanes=args.lanes, n_ctx=args.ctx,
        overlap=args.overlap, more=more,
    )  # fmt: skip
    source = Source(Path(args.text) if args.text is not None else None, args.prompt, args.n or 0)
    with Progress("validate") as progress:
        compared = validate_external(trace, cells, engine, source, progress=progress)
    numbers = [n for pair in compared for n in (pair.replay, pair.live)]
    if args.json:
        print_json([cell_to_json(n) for n in numbers])
    else:
        print(table(numbers))
