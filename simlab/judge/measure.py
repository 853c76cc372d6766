"""The numbers of a recorded run, from what its trace says happened: the live side of every comparison.

Nothing is replayed here. Counters come from the recorded residency, reads and tokens; router mass and
regret from the recorded scores and the ids that ran, with the replayer's own columns and reductions, so
that a difference between replay and live is a difference in what happened.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import polars as pl

from simlab.cells import MIB, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.judge.stats import block_bootstrap_mean
from simlab.replay.columns import ColumnNeeds, TraceColumns, unknown_numbers
from simlab.replay.run import CHUNK_ROWS
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, CellNumbers, PhaseNumbers

_BY_SPECULATION = 2
"""In `residency`: in RAM because it was read ahead, and not looked up since."""


def measure(trace: Trace, cell: Cell, rows: pl.DataFrame | None = None) -> CellNumbers:
    """The numbers of the run a trace records, which ran under `cell`.

    Args:
        rows: `row_counts` of the trace, where they are known already.

    Raises:
        InputError: the trace lacks what was executed (`experts`, `residency`, `read_bytes`).
    """
    header = trace.header
    k = effective_k(cell.route, header)
    budget = resolve_budget(cell.budget, cell.scope, header, k)
    rows = row_counts(trace) if rows is None else rows
    tokens = trace.collect("tokens", trace.tokens.filter(pl.col("turn") != THROW_AWAY_TURN))
    decode_tokens = tokens.filter(pl.col("phase") == DECODE)
    wall_ns = decode_tokens["wall_ns"].drop_nulls().to_numpy()
    losses = decode_losses(trace)["nll"].to_numpy()
    mean_nll = float(losses.mean()) if len(losses) else None
    waits_ms = decode_tokens["read_wait_ns"].drop_nulls().to_numpy() / 1e6
    wall_ms = block_bootstrap_mean([wall_ns / 1e6])
    nll = block_bootstrap_mean([losses])
    intervals = {
        "tok_s": (1e3 / wall_ms.high, 1e3 / wall_ms.low),
        "wall_ms_per_token": wall_ms,
        "read_wait_ms_per_token": block_bootstrap_mean([waits_ms]),
        "ppl": (math.exp(nll.low), math.exp(nll.high)),
        "nll": nll,
    }
    return CellNumbers(
        source="live",
        cell=cell,
        budget_mib=budget.total_bytes / MIB,
        budget_cycles=budget.total_bytes / header.cycle_bytes(k),
        top_k=k,
        decode=_phase(trace, rows.filter("decode"), decode_tokens, budget.off),
        all=_phase(trace, rows, tokens, budget.off),
        tok_s=1e9 / float(wall_ns.mean()) if len(wall_ns) else None,
        wall_ms_per_token=float(wall_ns.mean()) / 1e6 if len(wall_ns) else None,
        read_wait_ms_per_token=float(waits_ms.mean()) if len(waits_ms) else None,
        ppl=math.exp(mean_nll) if mean_nll is not None else None,
        nll=mean_nll,
        read_ahead=_read_ahead(trace),
        intervals={name: (low, high) for name, (low, high) in intervals.items() if math.isfinite(low)},
        provenance=header.provenance,
    )


def decode_losses(trace: Trace) -> pl.DataFrame:
    """`turn`, `step`, `next_token` and `nll` (nats) of every decoded token whose next token is known, in order."""
    scored = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN) & pl.col("nll").is_not_null()
    return trace.collect("tokens", trace.tokens.filter(scored).select("turn", "step", "next_token", "nll"))


def row_counts(trace: Trace) -> pl.DataFrame:
    """Every counted routing row of a recording: what it read for the first time and again, and how far it strayed.

    Columns: `turn, graph, step, pos_in_graph, decode`; counts `slots, misses, cold, read_bytes, events` (1 where the
    router picked any expert); `mass, regret, agreement` against the router's routing, the first two 0 without scores.

    Raises:
        InputError: the trace lacks what was executed.
    """
    routing = trace.collect("routing", trace.routing.select("experts", "dropped", "read_bytes"))
    for name in routing.columns:
        if routing[name].null_count():
            raise InputError(
                f"{trace.path}/routing: '{name}' is unknown in some rows, this run cannot be measured"
            )
    columns, width = TraceColumns(trace), trace.width
    experts = routing["experts"].to_numpy().reshape(-1, width)
    dropped = routing["dropped"].to_numpy().reshape(-1, width)
    read = routing["read_bytes"].to_numpy().reshape(-1, width)
    entry = np.where(read > 0, columns.layer[:, None].astype(np.int64) * trace.header.n_expert + experts, -1)
    first_seen = np.zeros(entry.shape, dtype=bool)
    _, first = np.unique(entry, return_index=True)
    first_seen.reshape(-1)[first] = True
    cold = first_seen & (read > 0)
    mass, regret, agreement = _strayed(trace, columns, experts, (experts >= 0) & ~dropped)
    found = {
        "decode": columns.decode,
        "slots": (experts >= 0).sum(axis=1),
        "misses": (read > 0).sum(axis=1),
        "cold": cold.sum(axis=1),
        "read_bytes": read.sum(axis=1),
        "events": (columns.router_k > 0).astype(np.int64),
        "mass": mass,
        "regret": regret,
        "agreement": agreement,
    }
    where = columns.where.select("turn", "graph", "step", "pos_in_graph")
    return where.with_columns(pl.Series(name, values) for name, values in found.items()).filter(
        columns.counted
    )


def _read_ahead(trace: Trace) -> dict[str, float] | None:
    """What look-ahead read in decode, as `CellNumbers.read_ahead` has it; None for a run without."""
    decode = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
    entry = ("graph", "layer", "expert")
    read = trace.collect("reads", trace.reads.filter(decode & pl.col("speculative")).select(entry).unique())
    if trace.header.prefetch is None and not read.height:
        return None
    lists = (pl.col("experts", "residency", "dropped").arr.to_list(),)
    slots = trace.routing.filter(decode).select("graph", "layer", *lists)
    slots = slots.explode("experts", "residency", "dropped").rename({"experts": "expert"})
    hit = (pl.col("residency") == _BY_SPECULATION) & ~pl.col("dropped")
    used = trace.collect("routing", slots.filter(hit).select(entry).unique())

    def mib(entries: pl.DataFrame) -> float:
        return sum(trace.header.entry_bytes[layer] for layer in entries["layer"]) / MIB

    return {
        "issued": read.height,
        "useful": used.height,
        "read_mib": mib(read),
        "wasted_mib": mib(read) - mib(used),
    }


def _strayed(
    trace: Trace, columns: TraceColumns, experts: np.ndarray, runs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass displaced, score regret and agreement of every row."""
    n_used, has_scores = trace.header.n_expert_used, trace.has_scores
    needs = ColumnNeeds(max(n_used, trace.width), scores=has_scores, rank=False, weights=frozenset())
    mass, regret, agreement = np.zeros((3, columns.n_rows))
    for start in range(0, columns.n_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, columns.n_rows)
        chunk = columns.chunk(start, stop, stop - start, needs)
        router, ran = chunk["router"][:, :n_used], np.where(runs[start:stop], experts[start:stop], -1)
        both = (ran[:, :, None] == router[:, None, :]).any(axis=2) & (ran >= 0)
        agreement[start:stop] = both.sum(axis=1) / np.maximum(chunk["router_k"], 1)
        if has_scores:
            for found, share in ((mass, chunk["mass"]), (regret, chunk["regret"])):
                found[start:stop] = _lost(share, router, ran)
    return mass, regret, agreement


def _lost(share: np.ndarray, router: np.ndarray, ran: np.ndarray) -> np.ndarray:
    """Sum of a share over the router's picks minus that over what ran, slot by slot: 0 where nothing changed."""

    def of(ids: np.ndarray) -> np.ndarray:
        picked = np.where(
            ids >= 0, np.take_along_axis(share, np.maximum(ids, 0).astype(np.int64), axis=1), 0.0
        )
        return np.pad(picked, ((0, 0), (0, n - ids.shape[1])))

    n = max(router.shape[1], ran.shape[1])
    return (of(router) - of(ran)).sum(axis=1)


def _phase(trace: Trace, rows: pl.DataFrame, tokens: pl.DataFrame, off: bool) -> PhaseNumbers:
    n_tokens = rows.select("decode", "graph", "pos_in_graph").n_unique() if rows.height else 0
    events = int(rows["events"].sum())
    total = {
        name: int(tokens[name].sum())
        for name in ("lookups", "hits", "reranked", "substituted", "dropped", "evictions")
    }
    misses, cold = int(rows["misses"].sum()), int(rows["cold"].sum())
    if misses != total["lookups"] - total["hits"]:
        raise InputError(
            f"{trace.path}: {misses} reads in routing, but {total['lookups'] - total['hits']} misses in tokens"
        )
    read_mib = int(rows["read_bytes"].sum()) / MIB

    def mean(name: str) -> float | None:
        return float(rows[name].sum()) / events if events else None

    numbers = PhaseNumbers(
        tokens=n_tokens,
        lookups=total["lookups"],
        hits=total["hits"],
        misses=misses,
        hit_rate=total["hits"] / total["lookups"] if total["lookups"] else None,
        cold_misses=cold,
        capacity_misses=misses - cold,
        read_mib=read_mib,
        read_mib_per_token=read_mib / n_tokens if n_tokens else None,
        slots=int(rows["slots"].sum()),
        reranked=total["reranked"],
        substituted=total["substituted"],
        dropped=total["dropped"],
        evictions=total["evictions"],
        # A miss after the first can only be of an entry that left; with the cache off nothing ever stayed.
        rereads=0 if off else misses - cold,
        mass_displaced=mean("mass"),
        score_regret=mean("regret"),
        agreement=mean("agreement"),
    )
    return dataclasses.replace(numbers, **dict.fromkeys(unknown_numbers(trace)))
