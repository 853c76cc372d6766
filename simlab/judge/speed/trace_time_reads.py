"""How long a batch waits for its reads: latencies by size and company, put together as the engine reads.

The slices of a batch's missing experts go over the reader lanes in turn, each to the lane that is free first. With L
lanes and n >= L slices that takes n / L times what a read of that size takes among as many others; reads end at times
of their own, so there are no rounds. Serial reading waits for all of it. Overlapped reading waits for gate and up, and
for the down projections only as far as they outlast the compute in between (engine-semantics, section 3):

    serial      T(gate, up, down)
    overlapped  T(gate, up) + max(0, T(gate, up, down) - T(gate, up) - hidden)

Latencies are means over the reads of a recording, long ones capped (`capped`). What the waits of its tokens are beside
the composed times is fitted: a share of the composed time (the slowest is not the mean), a hand-over per batch that
reads (threads are woken and waited for), and, reading serially, more for every doubling of the layers since the last
that read: lanes and device that have rested are slower to begin, and a cell that misses less rests more. On this
project's machine a single miss took 0.12 ms right after another batch and 0.22 ms two milliseconds later.

Shapes: `N` batches (one token at one MoE layer each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from scipy import optimize

from simlab.errors import InputError
from simlab.judge.speed.token_time import Composition, Floats
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, TraceHeader

CAP = 97.5
"""Percentile above which a single time is taken for an accident of the machine, and cut down to it."""
_HIDDEN = np.linspace(0.0, 1.0, 9)
"""Tried shares of a layer's compute behind which the down projections hide."""


def capped(values: Floats, percentile: float = CAP) -> Floats:
    """Values with those above a percentile of them set to it: a mean that one pause of 90 ms does not move."""
    return np.minimum(values, np.percentile(values, percentile)) if len(values) else values


@dataclass(frozen=True)
class Latencies:
    """Mean latency of one read by the bytes asked of the device and the reads then under way, itself among them.

    Of a size between two that are known it is interpolated in the bytes; beyond them it grows or falls with the
    bytes at the bandwidth of the last two, or of the one there is. Beyond the company known, latency grows in
    proportion to it: a device that brings in no more is shared.
    """

    microseconds: Mapping[int, Mapping[int, float]]
    """By bytes and reads under way."""

    def at(self, window_bytes: float, under_way: int) -> float:
        """us of a read of so many bytes among so many, interpolated."""
        sizes = sorted(self.microseconds)
        known = [self._in_company(size, under_way) for size in sizes]
        if len(sizes) == 1:
            return known[0] * (window_bytes / sizes[0] if window_bytes > sizes[0] else 1.0)
        right = min(max(int(np.searchsorted(sizes, window_bytes)), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (known[right] - known[right - 1]) / (high - low)
        if window_bytes < low:
            return known[right - 1]
        return max(known[right - 1] + slope * (window_bytes - low), min(known))

    def _in_company(self, size: int, under_way: int) -> float:
        """us at a known size."""
        by_company = self.microseconds[size]
        counts = sorted(by_company)
        if under_way > counts[-1]:
            return by_company[counts[-1]] * under_way / counts[-1]
        return float(np.interp(under_way, counts, [by_company[c] for c in counts]))

    def composed_ms(self, window_bytes: float, slices: int, lanes: int) -> float:
        """ms that so many slices of one size take over the lanes, `T` above."""
        if not slices:
            return 0.0
        return self.at(window_bytes, min(slices, lanes)) * max(1.0, slices / lanes) / 1e3


@dataclass(frozen=True)
class Slices:
    """What one missing expert of a layer is read in."""

    early: int
    """Slices that its layer waits for before it computes."""
    late: int
    """Slices that may come while gate and up are computed; 0 when reading serially."""
    window_bytes: float
    """Mean bytes of one, as asked of the device."""


@dataclass(frozen=True)
class ReadModel:
    """What batches wait for their reads, in ms.

    `hand_over + waking * log2(layers since the last that read) + share * T`.
    """

    latencies: Latencies
    lanes: int
    slices: tuple[Slices, ...]
    """Of each MoE layer, in order."""
    hand_over_ms: float
    share: float
    hidden_ms: float
    """Compute of a layer behind which its down projections hide; 0 when reading serially."""
    waking_ms: float = 0.0

    def slowed(self, ratio: float) -> ReadModel:
        """All of it taking so many times as long."""
        return replace(
            self,
            share=self.share * ratio,
            hand_over_ms=self.hand_over_ms * ratio,
            waking_ms=self.waking_ms * ratio,
        )

    def waits(self, misses: np.ndarray) -> Floats:
        """ms each token waits, `[tokens]`, from its misses at each layer, int `[tokens, layers]`, tokens in order."""
        table = self.hand_over_ms * (np.arange(int(misses.max(initial=0)) + 1) > 0)[None, :] + self.share * (
            _composed(self.latencies, self.lanes, self.slices, int(misses.max(initial=0)), self.hidden_ms)
        )
        rested = np.log2(layers_since_read(misses)) * (misses > 0)
        return (table[np.arange(misses.shape[1])[None, :], misses] + self.waking_ms * rested).sum(axis=1)


def layers_since_read(misses: np.ndarray) -> np.ndarray:
    """Layers from the last one that read to each, 1 where that is the one before; int `[tokens, layers]`.

    Args:
        misses: int `[tokens, layers]`, tokens in order; the layer before the first is taken to have read.
    """
    place = np.arange(misses.size)
    last = np.maximum.accumulate(np.where(misses.ravel() > 0, place, -1))
    return (place - np.concatenate([[-1], last[:-1]])).reshape(misses.shape)


def _composed(
    latencies: Latencies, lanes: int, slices: Sequence[Slices], most: int, hidden_ms: float
) -> Floats:
    """`T` of every layer for 0 to `most` missing experts, `[layers, most + 1]`."""
    found = np.zeros((len(slices), most + 1))
    for layer, s in enumerate(slices):
        for n in range(1, most + 1):
            early = latencies.composed_ms(s.window_bytes, n * s.early, lanes)
            both = latencies.composed_ms(s.window_bytes, n * (s.early + s.late), lanes)
            found[layer, n] = early + max(0.0, both - early - hidden_ms)
    return found


def latencies_of(trace: Trace) -> tuple[Latencies, int] | None:
    """Mean latencies of a trace's decode reads, and how many lanes they came over; None where it has no times."""
    known = pl.all_horizontal(pl.col("window_bytes", "start_ns", "latency_ns").is_not_null())
    reads = trace.collect(
        "reads", trace.reads.filter((pl.col("phase") == DECODE) & known & ~pl.col("speculative"))
    )
    if not reads.height:
        return None
    micro = capped(reads["latency_ns"].to_numpy() / 1e3)
    company = reads_under_way(reads)
    size = reads["window_bytes"].to_numpy()
    found: dict[int, dict[int, float]] = {}
    for window in np.unique(size).tolist():
        for count in np.unique(company[size == window]).tolist():
            chosen = (size == window) & (company == count)
            found.setdefault(window, {})[count] = float(micro[chosen].mean())
    return Latencies(found), int(reads["lane"].n_unique())


def reads_under_way(reads: pl.DataFrame) -> np.ndarray:
    """int `[reads]`: reads under way when each started, itself among them, from `start_ns` and `latency_ns`."""
    start, latency = reads["start_ns"].to_numpy(), reads["latency_ns"].to_numpy()
    # Of those that started no later, all that had not ended: clocks of one recording, so over graphs too.
    begun = np.searchsorted(np.sort(start), start, side="right")
    ended = np.searchsorted(np.sort(start + latency), start, side="right")
    return begun - ended


def slices_of(trace: Trace, composition: Composition) -> tuple[Slices, ...]:
    """What an expert of each MoE layer is read in, from the reads of a trace.

    Raises:
        InputError: no read of any layer is known.
    """
    reads = trace.collect("reads", trace.reads.filter(~pl.col("speculative")))
    by_layer: dict[int, Slices] = {}
    for (layer,), part in reads.group_by("layer", maintain_order=True):
        projections = part["projection"].unique().to_list()
        late = int("down" in projections and len(projections) > 1 and composition == "overlapped")
        window = part["window_bytes"].mean()
        if isinstance(window, (int, float)):
            by_layer[int(str(layer))] = Slices(len(projections) - late, late, float(window))
    if not by_layer:
        raise InputError(f"{trace.path}/reads: holds no read of a known size")
    header: TraceHeader = trace.header
    somewhere = next(iter(by_layer.values()))
    return tuple(by_layer.get(layer, somewhere) for layer in header.moe_layers)


def misses_of(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Graph numbers of the counted decode tokens, int64 `[tokens]`, and their misses, int64 `[tokens, layers]`.

    Raises:
        InputError: the trace does not say what was read.
    """
    rows = trace.collect(
        "routing",
        trace.routing.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)).select(
            "graph", "layer", "read_bytes"
        ),
    )
    if rows["read_bytes"].null_count():
        raise InputError(
            f"{trace.path}/routing: 'read_bytes' is unknown in some rows, so what was read is too"
        )
    missed = (rows["read_bytes"].to_numpy().reshape(len(rows), trace.width) > 0).sum(axis=1)
    return by_token(rows["graph"].to_numpy(), rows["layer"].to_numpy(), missed, trace.header)


def by_token(
    graph: np.ndarray, layer: np.ndarray, counted: np.ndarray, header: TraceHeader
) -> tuple[np.ndarray, np.ndarray]:
    """Graph numbers in order, and what was counted in each of their rows added up by layer, `[graphs, layers]`."""
    graphs, at = np.unique(graph, return_inverse=True)
    column = np.searchsorted(header.moe_layers, layer)
    found = np.zeros((len(graphs), len(header.moe_layers)), dtype=np.int64)
    np.add.at(found, (at, column), counted)
    return graphs, found


def fit_reads(
    latencies: Latencies,
    lanes: int,
    slices: tuple[Slices, ...],
    misses: np.ndarray,
    wait_ms: Floats,
    layer_compute_ms: float,
    composition: Composition,
    spans_ms: Floats | None = None,
) -> ReadModel:
    """The hand-over, the share and the waking that tell the waits of recorded tokens, `wait_ms` `[tokens]`, best.

    Args:
        misses: int `[tokens, layers]` of the same tokens.
        layer_compute_ms: mean compute of a layer: the most that overlapped reads can hide behind.
        spans_ms: `[tokens, layers]`, of `spans_of`. Reading serially a batch waits for its span and a hand-over, and
            single batches tell far better than whole tokens, nearly all of which read in as many layers.
    """
    batches = (misses > 0).sum(axis=1).astype(np.float64)
    if composition == "serial" and spans_ms is not None:
        return _fit_spans(latencies, lanes, slices, misses, capped(wait_ms), spans_ms)
    tries = []
    for hidden in _HIDDEN * layer_compute_ms if composition == "overlapped" else (0.0,):
        table = _composed(latencies, lanes, slices, int(misses.max(initial=0)), float(hidden))
        total = table[np.arange(misses.shape[1])[None, :], misses].sum(axis=1)
        (hand_over, share), loss = optimize.nnls(np.stack([batches, total], axis=1), capped(wait_ms))
        tries.append((float(loss), float(hand_over), float(share), float(hidden)))
    _, hand_over, share, hidden = min(tries)
    return ReadModel(latencies, lanes, slices, hand_over, share, hidden)


def _fit_spans(
    latencies: Latencies,
    lanes: int,
    slices: tuple[Slices, ...],
    misses: np.ndarray,
    wait_ms: Floats,
    spans_ms: Floats,
) -> ReadModel:
    """The same from the spans of batches; what tokens waited beyond them belongs to the hand-over."""
    known = (misses > 0) & np.isfinite(spans_ms)
    table = _composed(latencies, lanes, slices, int(misses.max(initial=0)), 0.0)
    composed = table[np.broadcast_to(np.arange(misses.shape[1]), misses.shape)[known], misses[known]]
    rested = np.log2(layers_since_read(misses)[known])
    spans = capped(spans_ms[known])
    (within, waking, share), _ = optimize.nnls(
        np.stack([np.ones_like(spans), rested, composed], axis=1), spans
    )
    beyond = (float(wait_ms.sum()) - float(spans.mean()) * int((misses > 0).sum())) / int((misses > 0).sum())
    return ReadModel(
        latencies, lanes, slices, max(0.0, float(within) + beyond), float(share), 0.0, float(waking)
    )


def spans_of(trace: Trace, graph: np.ndarray) -> Floats:
    """ms from the first start to the last end of a batch's reads, `[graphs, layers]`; NaN where it has none.

    Args:
        graph: int `[graphs]`, ascending.
    """
    ends = pl.col("start_ns") + pl.col("latency_ns")
    spans = trace.collect(
        "reads",
        trace.reads.filter(
            (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN) & ~pl.col("speculative")
        )
        .group_by("graph", "layer")
        .agg(ms=(ends.max() - pl.col("start_ns").min()) / 1e6),
    ).filter(pl.col("graph").is_in(graph.tolist()))
    found = np.full((len(graph), len(trace.header.moe_layers)), np.nan)
    at = np.searchsorted(graph, spans["graph"].to_numpy())
    found[at, np.searchsorted(trace.header.moe_layers, spans["layer"].to_numpy())] = spans["ms"].to_numpy()
    return found
