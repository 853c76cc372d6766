"""Live validation: the token ids of a trace, run again on the engine under each cell, beside the replay.

The replay keeps the recorded scores although substituted experts change the hidden state and so the later
scores; only a live run knows. Every cell gets a live run of its own with an empty cache, teacher-forced on
the same ids with the same cuts between graphs, and its numbers come from its own recording.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.cells import effective_k
from simlab.errors import InputError, RunError
from simlab.judge.against import DecodeSeries, recorded_series, with_intervals
from simlab.judge.measure import decode_losses, measure, row_counts
from simlab.judge.stats import paired_difference
from simlab.prefetch import parse_prefetch
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.gguf import read_gguf
from simlab.record.plan import PlannedGraph
from simlab.replay.run import TraceLike, sweep
from simlab.trace.provenance import check, differing
from simlab.trace.store import Trace, open_trace
from simlab.types import PREFILL, THROW_AWAY_TURN, Cell, CellNumbers, Comparison, Provenance


def validate(
    trace: TraceLike,
    cells: Sequence[Cell],
    model: str | Path | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    **engine_options: Any,
) -> list[Comparison]:
    """Replay a trace and run its token ids live, under each cell.

    Args:
        model: the GGUF the trace was recorded with; None for the embedded model.
        engine_options: as `Engine` takes them (lanes, buffered, n_threads, n_ctx, n_ubatch).

    Raises:
        InputError: the trace carries no token ids, or was recorded with another model.
    """
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    check_live(trace, model)
    graphs = planned_graphs(trace)
    cells, replays = _replayed(trace, cells, engine_options.get("prefetch"), engine_options.get("train"))
    lives: dict[int, CellNumbers] = {}
    losses: dict[int, NDArray[np.float64]] = {}
    series: dict[int, DecodeSeries] = {}
    order = sorted(range(len(cells)), key=lambda i: effective_k(cells[i].route, trace.header))
    engine, opened_k = None, None
    try:
        for done, i in enumerate(order):
            step = cells[i].route.step("width")
            k = effective_k(cells[i].route, trace.header) if step else None
            if engine is None or k != opened_k:
                if engine is not None:
                    engine.close()
                engine, opened_k = Engine(model, top_k=k, **engine_options), k
            with tempfile.TemporaryDirectory(prefix="simlab-live-") as folder:
                live = run_live(engine, graphs, cells[i], Path(folder) / "live.trace")
                rows = row_counts(live)
                lives[i], series[i] = measure(live, cells[i], rows), recorded_series(live, rows)
                lives[i] = replace(
                    lives[i], provenance=replays[i].provenance, note=compare_with_recording(trace, live)
                )
                losses[i] = decode_losses(live)["nll"].to_numpy()
            if progress is not None:
                progress((done + 1) / len(cells))
    finally:
        if engine is not None:
            engine.close()
    places = range(len(cells))
    beside = with_intervals(
        [_beside_first(lives[i], losses[0], losses[i]) for i in places], [series[i] for i in places]
    )
    return [Comparison(replays[i], beside[i]) for i in places]


def _replayed(
    trace: Trace, cells: Sequence[Cell], prefetch: str | None, train: str | None
) -> tuple[list[Cell], list[CellNumbers]]:
    """The cells as they run, with the look-ahead of the engine, and their replays."""
    if prefetch is None:
        return list(cells), sweep(trace, cells, train=train)
    spec = parse_prefetch(prefetch)
    ahead = [replace(cell, prefetch=spec.text) for cell in cells]
    if spec.kind == "previous_token" or spec.text == trace.header.prefetch:
        return ahead, sweep(trace, ahead, train=train)
    note = f"without the look-ahead of the live run: the trace was not recorded with {spec.text}"
    plain = zip(ahead, sweep(trace, cells, train=train), strict=True)
    noted = [replace(n, cell=cell, note="; ".join(filter(None, (n.note, note)))) for cell, n in plain]
    return ahead, noted


def _beside_first(live: CellNumbers, first: NDArray[np.float64], losses: NDArray[np.float64]) -> CellNumbers:
    """A live run with its perplexity over the first cell's on the same tokens, where there is any to compare."""
    if not len(losses):
        return live
    difference, (low, high) = paired_difference([first], [losses])
    intervals = {**live.intervals}
    if math.isfinite(low):
        intervals["ppl_ratio"] = math.exp(low), math.exp(high)
    ratio = math.exp(difference) if math.isfinite(difference) else None
    return replace(live, ppl_ratio=ratio, intervals=intervals)


def planned_graphs(trace: Trace) -> list[tuple[PlannedGraph, list[int], int | None]]:
    """The graphs of a recording, each with its token ids and the id its last position is scored on.

    The ids are those of its first MoE layer, which routes every token of a graph.
    """
    first = trace.header.moe_layers[0]
    counted = trace.routing.filter((pl.col("layer") == first) & (pl.col("turn") != THROW_AWAY_TURN))
    rows = trace.collect("routing", counted.select("turn", "graph", "phase", "step", "token"))
    if rows.is_empty() or rows["token"].null_count() or (rows["token"] < 0).any():
        raise InputError(
            f"{trace.path}/routing: carries no token ids, so it cannot be run live; record it with simlab record"
        )
    following = dict(trace.collect("tokens", trace.tokens.select("graph", "next_token")).iter_rows())
    groups = rows.group_by("graph", maintain_order=True).agg(
        pl.col("turn", "phase").first(), pl.col("step").first(), pl.col("token")
    )
    planned, at = [], 0
    found = list(groups.iter_rows(named=True))
    for row, after in zip(found, [*found[1:], None], strict=True):
        n = len(row["token"])
        # Of a prompt in chunks only the last asks for logits, and so for the last layer.
        more = (
            after is not None and row["phase"] == after["phase"] == PREFILL and row["turn"] == after["turn"]
        )
        plan = PlannedGraph(row["turn"], row["phase"], at, at + n, row["step"], not more, None)
        planned.append((plan, row["token"], following.get(row["graph"])))
        at += n
    return planned


def run_live(
    engine: Engine,
    graphs: Sequence[tuple[PlannedGraph, list[int], int | None]],
    cell: Cell,
    out: Path,
) -> Trace:
    """Run planned graphs under a cell into a new trace, and open it."""
    engine.start(cell)
    with engine.recording(cell, out) as recorder:
        turn = None
        for plan, tokens, following in graphs:
            # A turn that goes on at a later position kept the context of the one before.
            if plan.turn != turn and plan.first_position == 0:
                engine.forget_context()
            turn = plan.turn
            engine.run_graph(plan, tokens, following, recorder)
    return open_trace(out)


def check_live(trace: Trace, model: str | os.PathLike[str] | None) -> None:
    """Refuse a trace whose tokens and graphs cannot be run again on this model.

    Raises:
        InputError: it is of another model, or simlab did not record it.
    """
    if trace.header.engine != "simlab":
        raise InputError(
            f"{trace.path}: was not recorded by simlab, so its token ids and graphs are not known"
        )
    check_model(trace, Path(model) if model is not None else EMBEDDED_MODEL)


def check_model(trace: Trace, model: Path) -> None:
    """Refuse a recording of another model, whatever the files are called.

    Raises:
        InputError: it is of another model, or `model` is none that simlab can read.
    """
    check(
        trace.header.provenance,
        Provenance(model=read_gguf(model).digest()),
        ("model",),
        str(trace.path),
        f"the model {model}",
        f"give the one it was recorded with, then called {trace.header.model}",
    )


def compare_with_recording(trace: Trace, live: Trace) -> str | None:
    """A live run of a trace's tokens beside the recording, if both ran under one setting: ids should be the same.

    Returns a note for the run's numbers where another processor or llama.cpp picked other experts.

    Raises:
        RunError: they differ although processor and llama.cpp are the same.
    """
    a, b = trace.header, live.header
    if a.provenance is None or b.provenance is None or a.provenance.policy is None:
        return None
    if differing(a.provenance, b.provenance, ("policy", "budget")):
        return None

    def ids(of: Trace) -> NDArray[np.int32]:
        counted = of.routing.filter(pl.col("turn") != THROW_AWAY_TURN).select("experts")
        return of.collect("routing", counted).to_series().to_numpy().reshape(-1, of.width)

    recorded, ran = ids(trace), ids(live)
    n = min(len(recorded), len(ran))  # a recording may have been cut short within its last graph
    share = float((recorded[:n] != ran[:n]).mean()) if n else 0.0
    if share == 0:
        return None
    text = f"the recording ran other experts in {100 * share:.2f} % of slots under this very setting"
    if (a.cpu, a.engine_version) == (b.cpu, b.engine_version):
        raise RunError(
            f"{trace.path}: {text}, on the same processor and llama.cpp; trace or model is damaged: record again"
        )
    return f"{text} ({a.cpu}, {a.engine_version}; here {b.cpu}, {b.engine_version})"


def validate_command(args: argparse.Namespace) -> None:
    """`simlab validate`."""
    from simlab.cli.options import cells_from_args, engine_options, warn_about_cells
    from simlab.cli.output import Progress, cell_to_json, print_json, table

    trace = open_trace(args.trace)
    cells = cells_from_args(args, recorded=trace.header)
    warn_about_cells(cells, trace.header)
    with Progress("validate") as progress:
        compared = validate(trace, cells, args.model, progress=progress, **engine_options(args))
    numbers = [n for pair in compared for n in (pair.replay, pair.live)]
    if args.json:
        print_json([cell_to_json(n) for n in numbers])
    else:
        print(table(numbers))
