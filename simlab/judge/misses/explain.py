"""Policy or working set? What limits a decode at one cache setting, with the numbers it rests on.

Everything about the cache is a replay's and simulated; only `Timing` was measured, when the trace was
recorded. Decode and prefill are never added up. Rates carry 95 % intervals, a block bootstrap over decode
tokens: how far the rate moves along this text, not what another text would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.cells import MIB, effective_k, parse_route, resolve_budget
from simlab.judge.misses.anatomy import (
    Anatomy,
    along_decode,
    anatomy,
    by_layer,
    counts,
    decode_tokens,
    reuse_distribution,
    working_set,
)
from simlab.judge.misses.grids import miss_grid
from simlab.judge.stats import UNKNOWN, Interval, block_bootstrap_mean
from simlab.replay.columns import TraceColumns
from simlab.replay.curve import cliff_foot, curve_of, routing_words
from simlab.replay.lookups import Lookups, find_lookups, original_ids, reuse_bytes
from simlab.replay.run import TraceLike, sweep
from simlab.trace.measured import mean_of_known
from simlab.trace.store import Trace, open_trace
from simlab.types import DECODE, Cell, ResolvedBudget, TraceHeader

Kind = Literal["no decode", "no cache", "nothing", "cold", "cliff", "policy", "working set"]
MARGINS = ("0.05", "0.1", "0.15")
"""Margins tried to say what routing could do: below the ones whose cost no longer shows in the text."""


class Rate(NamedTuple):
    """A mean or a share with its interval; NaN where there is nothing to tell."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Phase:
    """One phase of the cell. `counts` are those of `simlab.judge.misses.anatomy.counts`."""

    tokens: int
    counts: dict[str, int]
    hit_rate: Rate
    optimum_hit_rate: Rate
    mib_per_token: Rate
    optimum_mib_per_token: Rate


@dataclass(frozen=True)
class Timing:
    """Mean milliseconds per decode token, measured by the engine that recorded the trace."""

    tokens: int
    wall_ms: Rate
    read_wait_ms: float | None
    compute_ms: float | None
    management_ms: float | None
    same_cache: bool
    """Whether the recording ran at the budget that is explained."""

    @property
    def read_share(self) -> float | None:
        """Share of a token's time spent waiting for reads."""
        if self.read_wait_ms is None or not self.wall_ms.value > 0:
            return None
        return min(1.0, self.read_wait_ms / self.wall_ms.value)


class Change(NamedTuple):
    """One thing that could be done instead, and the decode numbers a replay gives for it."""

    what: str
    hit_rate: float | None
    mib_per_token: float | None
    mass_displaced: float | None = None


class Verdict(NamedTuple):
    """What limits the decode."""

    kind: Kind
    sentence: str
    because: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Everything `simlab explain` says about one cell. Frames are described in `simlab.judge.misses.anatomy`."""

    trace: Trace
    cell: Cell
    budget: ResolvedBudget
    top_k: int
    decode: Phase
    prefill: Phase
    layers: pl.DataFrame
    windows: pl.DataFrame
    grid: pl.DataFrame
    """Decode misses by stretch of tokens and layer (`simlab.judge.misses.grids.miss_grid`)."""
    reuse: pl.DataFrame
    working_set: pl.DataFrame
    curve: pl.DataFrame
    """LRU with the router's own routing at every budget, in the cell's scope (`simlab.lru_curve`)."""
    changes: list[Change]
    timing: Timing | None
    verdict: Verdict
    look_ahead: bool
    """Whether the recording read ahead: the cell's hits count those entries, Belady and the curve have none."""

    @property
    def header(self) -> TraceHeader:
        return self.trace.header

    @property
    def belady_is_best(self) -> bool:
        """Whether no eviction can have fewer misses than Belady."""
        return _one_size(self.header, self.budget)

    @property
    def cycle_bytes(self) -> int:
        return self.header.cycle_bytes(self.top_k)

    @property
    def foot_bytes(self) -> int | None:
        """Largest budget without a decode hit under a global LRU; None where there is no cliff."""
        return None if self.budget.per_layer else _foot(self.header, self.top_k)


def explain(
    trace: TraceLike,
    cell: Cell,
    *,
    progress: Callable[[float], None] | None = None,
    train: str | None = None,
) -> Explanation:
    """Take one cell of a trace apart.

    Args:
        progress: called now and then with the share of the work done.
        train: what policies that learn do so from, as `--train` takes it.

    Raises:
        InputError: as `simlab.judge.misses.anatomy.anatomy`.
    """
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    header = trace.header
    k = effective_k(cell.route, header)
    budget = resolve_budget(cell.budget, cell.scope, header, k)
    margins = _margin_cells(trace, cell, budget)
    share = 0.5 if margins else 1.0

    def first_part(done: float) -> None:
        if progress is not None:
            progress(share * done)

    found = anatomy(trace, cell, progress=first_part, train=train)
    columns = found.columns
    turns = _turns_of_tokens(columns, found.n_tokens)
    decode = _decode_phase(found, turns)
    prefill = _prefill_phase(found)
    router = Router(columns)
    curve = curve_of(columns, "per_layer" if budget.per_layer else "global")
    layers, windows = by_layer(found.decode), along_decode(found.decode, found.n_tokens)
    changes = _changes(cell, budget, decode, router, curve)
    if margins:

        def second_part(done: float) -> None:
            if progress is not None:
                progress(share + (1 - share) * done)

        for numbers in sweep(trace, margins, progress=second_part, train=train):
            d = numbers.decode
            what = f"substitution, L = {numbers.cell.margin:g}"
            changes.append(Change(what, d.hit_rate, d.read_mib_per_token, d.mass_displaced))
    timing = _timing(trace, budget)
    used = working_set(found, None if budget.off else budget.total_bytes)
    return Explanation(
        trace=trace,
        cell=found.numbers.cell,
        budget=budget,
        top_k=k,
        decode=decode,
        prefill=prefill,
        layers=layers,
        windows=windows,
        grid=miss_grid(found.decode),
        reuse=reuse_distribution(found.decode, header.cycle_bytes(k)),
        working_set=used,
        curve=curve,
        changes=changes,
        timing=timing,
        verdict=judge(cell, budget, header.cycle_bytes(k), _foot(header, k), decode, used, router),
        look_ahead=columns.speculative.shape[1] > 0,
    )


# ---------------------------------------------------------------------------------------------------------
# The router's own routing under LRU


class Router:
    """Decode lookups of the router's own routing, and how many of them LRU hits in any cache."""

    def __init__(self, columns: TraceColumns) -> None:
        self.columns = columns
        lookups = find_lookups(columns, original_ids(columns))
        self._reuse = {
            False: reuse_bytes(columns, lookups, "global"),
            True: reuse_bytes(columns, lookups, "per_layer"),
        }
        self.lookups: Lookups = lookups
        self._mine = (columns.counted & columns.decode)[lookups.row]
        self.tokens = columns.n_tokens(decode=True)

    def lru(self, budget: ResolvedBudget) -> tuple[float | None, float | None]:
        """Decode hit rate and MiB per decode token."""
        reuse = self._reuse[budget.per_layer][self._mine]
        layer, size = self.lookups.layer[self._mine], self.lookups.size[self._mine]
        limit = np.array(budget.layer_bytes)[layer] if budget.per_layer else budget.total_bytes
        hit = (reuse <= limit) & (not budget.off)
        n = len(hit)
        read = float(size[~hit].sum()) / MIB
        return (float(hit.sum()) / n if n else None), (read / self.tokens if self.tokens else None)


def _scaled(budget: ResolvedBudget, by: float) -> ResolvedBudget:
    return ResolvedBudget(
        int(budget.total_bytes * by), tuple(int(b * by) for b in budget.layer_bytes), budget.per_layer
    )


def _changes(
    cell: Cell, budget: ResolvedBudget, decode: Phase, router: Router, curve: pl.DataFrame
) -> list[Change]:
    """What other evictions, scopes and budgets come to, this cell first."""

    def known(rate: Rate) -> float | None:
        return None if math.isnan(rate.value) else rate.value

    changes = [Change("this cell", known(decode.hit_rate), known(decode.mib_per_token))]
    if budget.off or not decode.counts["lookups"]:
        return changes
    changes.append(
        Change(
            "Belady on what ran (knows the future)",
            known(decode.optimum_hit_rate),
            known(decode.optimum_mib_per_token),
        )
    )
    own = f"LRU, {routing_words(router.columns.trace.header)}"
    if cell.evict != "lru" or cell.route.name != "original":
        changes.append(Change(f"{own}, same cache", *router.lru(budget)))
    if not budget.per_layer:
        n = len(budget.layer_bytes)
        apart = ResolvedBudget(budget.total_bytes, (budget.total_bytes // n,) * n, per_layer=True)
        changes.append(Change(f"{own}, one cache per layer", *router.lru(apart)))
    for factor in (1.5, 2.0):
        if budget.total_bytes < curve["budget_bytes"][-1]:
            changes.append(
                Change(f"{own}, {factor:g} times the budget", *router.lru(_scaled(budget, factor)))
            )
    if cell.route.name == "original":
        enough = curve.filter(pl.col("decode_hits") >= decode.counts["optimum_hits"])
        if enough.height and enough["budget_bytes"][0] > budget.total_bytes:
            step = enough.row(0, named=True)
            changes.append(
                Change(
                    f"{own}, at {step['budget_mib']:,.1f} MiB ({step['budget_cycles']:.2f} cycles), "
                    "where it hits as often as Belady here",
                    step["decode_hit_rate"],
                    step["decode_read_mib_per_token"],
                )
            )
    return changes


def _margin_cells(trace: Trace, cell: Cell, budget: ResolvedBudget) -> list[Cell]:
    """Cells of some margins at the same cache, where the trace can tell and the cell leaves the routing alone."""
    header = trace.header
    known = trace.has_scores and None not in (header.score_space, header.gating)
    if not known or budget.off or cell.route.name != "original":
        return []
    routes = [parse_route(f"substitute:L={margin}") for margin in MARGINS]
    return [replace(cell, route=route) for route in routes]


def _foot(header: TraceHeader, k: int) -> int | None:
    return max(cliff_foot(header, k), 0) if len(header.moe_layers) > 1 else None


# ---------------------------------------------------------------------------------------------------------
# Phases, rates, times


def _turns_of_tokens(columns: TraceColumns, n_tokens: int) -> NDArray[np.int64]:
    """int64 `[n_tokens]`: the turn of each decode token."""
    token = decode_tokens(columns)
    turns = np.zeros(n_tokens, np.int64)
    turns[token[token >= 0]] = columns.where["turn"].to_numpy()[token >= 0]
    return turns


def rate(numerator: NDArray, denominator: NDArray, turns: NDArray[np.int64]) -> Rate:
    """The ratio of two sums over tokens with a block-bootstrap interval; no block joins two turns.

    The interval is that of the mean of the ratio, linearised.
    """
    values = linearised(numerator, denominator)
    if values is None:
        return Rate(math.nan, UNKNOWN)
    series = [values[turns == turn] for turn in np.unique(turns)]
    return Rate(float(numerator.sum()) / float(denominator.sum()), block_bootstrap_mean(series))


def linearised(numerator: NDArray, denominator: NDArray) -> NDArray[np.float64] | None:
    """float64 `[tokens]`, `r + (a - r b) / mean(b)`: its mean is the ratio r of the sums; None for a sum of zero."""
    total = float(denominator.sum())
    if not total:
        return None
    ratio = float(numerator.sum()) / total
    return ratio + (numerator - ratio * denominator) / (total / len(denominator))


def _decode_phase(found: Anatomy, turns: NDArray[np.int64]) -> Phase:
    own, n = found.decode, found.n_tokens
    token, size = own["token"].to_numpy(), own["bytes"].to_numpy()
    one = np.ones(n)

    def per_token(weight: NDArray) -> NDArray:
        return np.bincount(token, weights=weight, minlength=n)

    def rates(hit: NDArray[np.bool_]) -> tuple[Rate, Rate]:
        lookups = per_token(np.ones(len(token)))
        return rate(per_token(hit), lookups, turns), rate(per_token(size * ~hit) / MIB, one, turns)

    hits, reads = rates(own["hit"].to_numpy())
    best_hits, best_reads = rates(own["optimum_hit"].to_numpy())
    return Phase(n, counts(own), hits, best_hits, reads, best_reads)


def _prefill_phase(found: Anatomy) -> Phase:
    """Prefill comes in a few wide batches, too few to resample: no intervals."""
    n = found.numbers.all.tokens - found.n_tokens
    own = counts(found.prefill)

    def share(part: float, whole: float) -> Rate:
        return Rate(part / whole if whole else math.nan, UNKNOWN)

    return Phase(
        n,
        own,
        share(own["hits"], own["lookups"]),
        share(own["optimum_hits"], own["lookups"]),
        share(own["read_bytes"] / MIB, n),
        share(own["optimum_read_bytes"] / MIB, n),
    )


def _timing(trace: Trace, budget: ResolvedBudget) -> Timing | None:
    names = ("wall_ns", "read_wait_ns", "compute_ns", "management_ns")
    rows = trace.tokens.filter((pl.col("turn") >= 0) & (pl.col("phase") == DECODE))
    tokens = trace.collect("tokens", rows.select("turn", *names).filter(pl.col("wall_ns").is_not_null()))
    if not tokens.height:
        return None
    wall = tokens["wall_ns"].to_numpy() / 1e6
    return Timing(
        tokens=tokens.height,
        wall_ms=rate(wall, np.ones(len(wall)), tokens["turn"].to_numpy().astype(np.int64)),
        read_wait_ms=mean_of_known(tokens["read_wait_ns"], 1e6),
        compute_ms=mean_of_known(tokens["compute_ns"], 1e6),
        management_ms=mean_of_known(tokens["management_ns"], 1e6),
        same_cache=trace.header.budget_bytes == budget.total_bytes,
    )


# ---------------------------------------------------------------------------------------------------------
# The verdict


def _one_size(header: TraceHeader, budget: ResolvedBudget) -> bool:
    """Whether the entries of a cache are of one size, which a layer's are."""
    return budget.per_layer or len(set(header.entry_bytes.values())) == 1


def judge(
    cell: Cell,
    budget: ResolvedBudget,
    cycle: int,
    foot: int | None,
    decode: Phase,
    used: pl.DataFrame,
    router: Router,
) -> Verdict:
    """What limits the decode: the largest of three parts of its misses, or the cliff where it stands on it.

    The parts are cold misses, what Belady would save (`misses - optimum_misses`), and the rest, which Belady
    misses too. They add up to all misses; the second can be negative when entries differ in size.
    """
    c = decode.counts
    if not c["lookups"]:
        return Verdict("no decode", "This trace has no decode: there is nothing to limit.", ())
    if budget.off:
        return Verdict("no cache", "No cache: every expert a token asks for is read.", ())
    if not c["misses"]:
        return Verdict("nothing", "No decode lookup misses: the cache limits nothing.", ())
    gain, rest = c["misses"] - c["optimum_misses"], c["optimum_misses"] - c["cold"]
    name = "LRU" if cell.evict == "lru" else cell.evict

    def part(n: int) -> str:
        return f"{n:,} of {c['misses']:,} decode misses ({100 * n / c['misses']:.0f} %)"

    evidence = [
        f"{part(c['cold'])} are cold: the first use of their entry, which no eviction and no budget avoids.",
        f"{part(rest)} Belady has too: at this budget even knowing the future makes no room for them.",
        f"{part(gain)} are the policy's: Belady, at the same budget, would not have them.",
    ]
    if not budget.per_layer and foot is not None and budget.total_bytes < cycle and cell.evict == "lru":
        n = len(budget.layer_bytes)
        apart, _ = router.lru(ResolvedBudget(budget.total_bytes, (budget.total_bytes // n,) * n, True))
        where = "at or below" if budget.total_bytes <= foot else "above"
        evidence.insert(
            0,
            f"The budget is {where} the foot of the cliff, {foot / MIB:,.2f} MiB (one cycle minus k entries of "
            "the largest layer), under which a global LRU with the router's own routing hits nothing.",
        )
        if gain > 0 or (apart or 0) > decode.hit_rate.value:
            return Verdict(
                "cliff",
                f"Budget below one token cycle: a global LRU evicts an entry before its layer comes round again. "
                f"It hits {_percent(decode.hit_rate.value)}; Belady at the same budget "
                f"{_percent(decode.optimum_hit_rate.value)}, LRU with one cache per layer {_percent(apart)}. "
                "Give it a cycle, or split it by layer.",
                tuple(evidence),
            )
    widest = used.filter(pl.col("mib") * MIB <= budget.total_bytes)
    fits = int(widest["tokens"][-1]) if widest.height else 0
    if fits == decode.tokens:
        evidence.append("All the decode uses would fit in the budget.")
    else:
        mean = used.filter(pl.col("tokens") > fits).row(0, named=True)
        evidence.append(
            f"{mean['tokens']} tokens use {mean['entries']:,.0f} distinct entries, {mean['mib']:,.1f} MiB, on "
            f"average: {mean['of_budget']:.2f} times the budget" + (f"; {fits} still fit." if fits else ".")
        )
    largest = max(c["cold"], gain, rest)
    if largest == c["cold"]:
        return Verdict(
            "cold",
            f"Cold start: {part(c['cold'])} are the first use of their entry. Only a longer run, a cache "
            "that starts warm or reading ahead changes that.",
            tuple(evidence),
        )
    if largest == gain:
        return Verdict(
            "policy",
            f"Policy: with the same budget and routing Belady would hit {gain:,} of the {c['misses']:,} lookups "
            f"{name} misses ({100 * gain / c['misses']:.0f} %). A better eviction can win part of that; how much "
            "without knowing the future, only trying tells.",
            tuple(evidence),
        )
    return Verdict(
        "working set",
        f"Working set: {part(rest)} are of entries used before that even Belady cannot keep at this budget; "
        "against those only a larger budget helps, or routing that prefers what is resident. "
        f"Belady would win {'nothing' if gain <= 0 else part(gain)}; "
        + (
            "no eviction could win more."
            if _one_size(router.columns.trace.header, budget)
            else "as entries are of several sizes, what eviction could win at most is not known."
        ),
        tuple(evidence),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f} %"
