"""The speed of cells foretold from a trace: each is replayed, and what its tokens read and move is given its time.

A cell's token takes what the recorded one took, changed by what the replay says is different:

- *reads*: its misses at each layer through the read model (`trace_time_reads`), in place of the recorded wait;
- *management*: so much per entry moved (a miss brings one in, an eviction gives one back), fitted on the recorded
  tokens, and the policy's own code, rehearsed (`trace_time_policy`);
- *compute*: so much per miss, fitted too, since what was just read is in no cache of the processor.

Fits are by least squares on times cut at a percentile; the share of time that pauses add is put back on the whole.
A trace without read timings of its own, an import, has the plainer model of `token_time` on its bytes instead.

An interval is for a run as long as the recorded one, on this machine at another moment. It holds the chance of the
mean of both, the machine's drift from one moment to another (`moments`; within one, what stretches of the recording
show), and a doubt that grows with what the cell changes, `DOUBTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy import optimize, stats

from simlab.cells import MIB
from simlab.errors import InputError
from simlab.judge.quality.features import features_of_replay
from simlab.judge.speed.moments import Moments, known_moments
from simlab.judge.speed.token_time import Floats, TimeModel, Timings, fit
from simlab.judge.speed.trace_time import timings_of_trace
from simlab.judge.speed.trace_time_policy import rehearsal
from simlab.judge.speed.trace_time_reads import (
    ReadModel,
    by_token,
    capped,
    fit_reads,
    latencies_of,
    misses_of,
    slices_of,
    spans_of,
)
from simlab.judge.stats import LEVEL, Interval, block_bootstrap_mean, standard_error
from simlab.replay.run import Replayer
from simlab.replay.slots import row_table
from simlab.replay.training import load_training
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, CellNumbers

DOUBTS = {"reads": 0.1, "moves": 0.25, "policy": 0.35}
"""Relative standard errors of what a cell changes in the waits, in the time per entry moved and in the policy's
own time; from checks on this project's machine (docs/time.md)."""
_DRIFT_TOKENS = 64
"""Tokens of a stretch whose level stands for that of another run."""
_LEAST_STRETCHES, _SHORTEST_STRETCH = 4, 8
"""A recording of fewer has shorter ones, and a very short one shows no drift: its intervals lack it."""
_DETAIL_BYTES = 1 << 29
"""Most that the slots of cells replayed at once may take."""
_SLOT_BYTES = 32


@dataclass(frozen=True)
class Spread:
    """Relative standard errors of a foretold mean token time, independent of each other."""

    chance: float
    """Of the means of two runs of that many tokens."""
    drift: float
    """Of the machine, between the recording and another run."""
    doubt: float
    """Of the model, for what the cell changes."""
    drift_freedom: float = math.inf
    """Degrees of freedom that the drift is known with; the others are taken for known."""

    def total(self) -> float:
        return math.sqrt(self.chance**2 + self.drift**2 + self.doubt**2)

    def half(self, more: float = 0.0) -> float:
        """Half the width of an interval of the logarithm of the mean token time.

        Student's t, its degrees of freedom by Welch and Satterthwaite: the drift's, if all of the error is drift.

        Args:
            more: one more relative standard error, independent of the others.
        """
        total = math.hypot(self.total(), more)
        share = (self.drift / total) ** 4 if total > 0 else 0.0
        freedom = self.drift_freedom / share if share > 0 else math.inf
        return float(stats.t.ppf(0.5 + LEVEL / 2, freedom)) * total


@dataclass(frozen=True)
class Foretold:
    """A cell's speed, foretold. Times in ms, means over the cell's counted decode tokens."""

    numbers: CellNumbers
    tok_s: float
    tok_s_interval: Interval
    wall_ms: float
    read_wait_ms: float
    read_wait_interval: Interval
    management_ms: float
    """With the policy's own time."""
    policy_ms: float | None
    """What of it the cell's own code takes beyond the recorded cell's; null where it is not known."""
    compute_ms: float
    """Page faults among it."""
    bound: str
    """"compute", "reads" or "management": the largest part of the mean token."""
    spread: Spread | None
    """Null where the plainer model was used."""


@dataclass(frozen=True)
class TokenWork:
    """What the decode tokens of a run had to do, in order."""

    graph: np.ndarray
    """int64 `[tokens]`."""
    misses: np.ndarray
    """int64 `[tokens, layers]`."""
    evictions: np.ndarray
    """int64 `[tokens]`."""

    @property
    def moved(self) -> Floats:
        """Entries moved, a miss and an eviction half each, `[tokens]`."""
        return (self.misses.sum(axis=1) + self.evictions) / 2

    def of(self, tokens: np.ndarray) -> TokenWork:
        """Some of the tokens, bool `[tokens]`."""
        return TokenWork(self.graph[tokens], self.misses[tokens], self.evictions[tokens])


@dataclass(frozen=True)
class Costs:
    """What the tokens of a recording took, long times cut, and what a change of their work changes. ms; `[tokens]`."""

    work: TokenWork
    wall: Floats
    """As measured, nothing cut."""
    wait: Floats
    management: Floats
    compute: Floats
    reads: ReadModel
    management_per_move: float
    compute_per_miss: float
    drift: float
    """Relative standard deviation of the machine's level: of a stretch's in the recording, or from run to run."""
    drift_freedom: float = math.inf
    """Degrees of freedom that the drift is known with."""

    def at_another_moment(self, moments: Moments) -> Costs:
        """The same with what is known of the machine from one moment to another, if the recording shows no more."""
        if self.drift > moments.share:
            return self
        return replace(self, drift=moments.share, drift_freedom=moments.freedom)

    @property
    def pauses(self) -> float:
        """Mean time as measured over that with long times cut."""
        return float(self.wall.mean() / (self.wait + self.management + self.compute).mean())

    def parts(self, work: TokenWork, policy_ms: float) -> tuple[Floats, Floats, Floats]:
        """Compute, management and read wait of the tokens of a cell, pauses put back.

        Args:
            work: tokens of the recording, or some of them, with other misses.
            policy_ms: the cell's own code per token, beyond the recorded cell's.
        """
        at = np.searchsorted(self.work.graph, work.graph)
        more_moves = work.moved - self.work.moved[at]
        more_misses = work.misses.sum(axis=1) - self.work.misses.sum(axis=1)[at]
        management = self.management[at] + self.management_per_move * more_moves + policy_ms
        compute = self.compute[at] + self.compute_per_miss * more_misses
        wait = self.reads.waits(work.misses)
        return (
            np.maximum(compute, 0.0) * self.pauses,
            np.maximum(management, 0.0) * self.pauses,
            wait * self.pauses,
        )

    def spread(self, work: TokenWork, policy_ms: float) -> Spread:
        """Relative standard errors of a cell's mean token time."""
        compute, management, wait = (float(part.mean()) for part in self.parts(work, policy_ms))
        wall = compute + management + wait
        at = np.searchsorted(self.work.graph, work.graph)
        moves = self.management_per_move * float((work.moved - self.work.moved[at]).mean())
        changes = {
            "reads": wait - float(self.reads.waits(self.work.misses[at]).mean()) * self.pauses,
            "moves": moves * self.pauses,
            "policy": policy_ms * self.pauses,
        }
        doubt = math.sqrt(sum((DOUBTS[name] * change / wall) ** 2 for name, change in changes.items()))
        errors = self.wall - np.sum(self.parts(self.work, 0.0), axis=0)
        chance = math.sqrt(2) * standard_error([errors]) / float(self.wall.mean())
        return Spread(chance, self.drift, doubt, self.drift_freedom)


def fit_costs(trace: Trace, timings: Timings) -> Costs | None:
    """What the tokens of a trace took; None where its reads have no times, or it lacks management or misses.

    Raises:
        InputError: the tables cannot be read.
    """
    found = latencies_of(trace)
    if found is None or timings.management_ms is None:
        return None
    latencies, lanes = found
    decode = trace.tokens.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN))
    tokens = trace.collect("tokens", decode.select("graph", "evictions").sort("graph"))
    graph, misses = misses_of(trace)
    if timings.left_out or tokens["evictions"].null_count() or tokens["graph"].to_list() != graph.tolist():
        return None
    work = TokenWork(graph, misses, tokens["evictions"].to_numpy())
    wait, management, compute = map(capped, (timings.exposed_ms, timings.management_ms, timings.compute_ms))
    reads = fit_reads(
        latencies, lanes, slices_of(trace, timings.composition), misses, timings.exposed_ms,
        float(compute.mean()) / misses.shape[1], timings.composition, spans_of(trace, graph),
    )  # fmt: skip
    place = np.arange(len(graph), dtype=np.float64)
    one = np.ones_like(place)

    def slope(amount: Floats, target: Floats) -> float:
        # Attention takes longer the more tokens came before: not to be taken for an effect of misses.
        return float(optimize.nnls(np.stack([one, amount, place], axis=1), target)[0][1])

    plain = Costs(
        work, timings.wall_ms, wait, management, compute, reads,
        slope(work.moved, management), slope(misses.sum(axis=1).astype(np.float64), compute), drift=0.0,
    )  # fmt: skip
    return replace(plain, drift=_drift(plain))


def _drift(costs: Costs) -> float:
    """Spread of the levels of stretches of the recording: another run is taken for another stretch.

    Levels are taken from compute and management, which every token has, about a line in the token's place.
    """
    working = costs.compute + costs.management - costs.management_per_move * costs.work.moved
    length = min(_DRIFT_TOKENS, len(working) // _LEAST_STRETCHES)
    if length < _SHORTEST_STRETCH:
        return float("nan")
    n = len(working) // length
    place = np.arange(len(working))
    level = working / np.polyval(np.polyfit(place, working, 1), place)
    stretches = level[: n * length].reshape(n, length).mean(axis=1)
    return float(stretches.std(ddof=2))


class Foreteller:
    """Foretells the speed of cells from one trace.

    Args:
        recorded: the cell the trace was recorded under; None where that is not known: policies then take the time of
            the recorded one.
        train: what policies learn from, as `--train` takes it.
        timings: the trace's, where they are at hand.

    Attributes:
        costs: what the recorded tokens took, null where the trace does not say; its drift is that of its stretches.
        later: the same for a run at another moment.
        moments: how far those are apart on the processor that recorded the trace.

    Raises:
        InputError: the trace has no token times, or its tables cannot be read.
    """

    def __init__(
        self, trace: Trace, recorded: Cell | None, *, train: str | None = None, timings: Timings | None = None
    ) -> None:
        self.timings = timings_of_trace(trace) if timings is None else timings
        self.model = fit(self.timings)
        self.costs = fit_costs(trace, self.timings)
        self.moments = known_moments(trace.header.cpu)
        self.later = self.costs.at_another_moment(self.moments) if self.costs is not None else None
        self.policy_ms = policy_times(trace, recorded, train)

    def foretell(self, replayed: Replayed) -> Foretold:
        """The speed of a cell that was replayed from the same trace, on the same machine at another moment."""
        if self.later is None:
            return _by_bytes(self.timings, self.model, replayed.numbers, replayed.tokens)
        return by_costs(self.later, replayed.numbers, replayed.work, self.policy_ms(replayed.numbers.cell))


def policy_times(
    trace: Trace, recorded: Cell | None, train: str | None = None
) -> Callable[[Cell], float | None]:
    """From a cell to the ms per token that its own code takes beyond the recorded cell's; to None where unknown.

    Args:
        recorded: the cell the trace was recorded under; None: nothing is known.
    """
    # A part of this very trace teaches a replay; the engine learns from another trace.
    elsewhere = train is not None and train != "same" and not train.endswith("%")
    training = load_training(train, trace.header) if train is not None and elsewhere else None
    rehearsed = rehearsal(trace, recorded, training) if recorded is not None else None

    def policy_ms(cell: Cell) -> float | None:
        try:
            return rehearsed.extra_ms(cell) if rehearsed is not None else None
        except InputError:
            # Only a replay can run it: it knows the future, or learns from a part of the trace.
            return None

    return policy_ms


def by_costs(
    costs: Costs,
    numbers: CellNumbers,
    work: TokenWork,
    policy_ms: float | None,
) -> Foretold:
    """A cell's speed from what a trace's tokens took."""
    extra = policy_ms or 0.0
    compute, management, wait = (float(part.mean()) for part in costs.parts(work, extra))
    wall, spread = compute + management + wait, costs.spread(work, extra)
    known = spread if math.isfinite(spread.drift) else replace(spread, drift=0.0)
    factor, wait_factor = math.exp(known.half()), math.exp(known.half(DOUBTS["reads"]))
    parts = {"compute": compute, "management": management, "reads": wait}
    return Foretold(
        numbers=numbers,
        tok_s=1e3 / wall,
        tok_s_interval=Interval(1e3 / (wall * factor), 1e3 / wall * factor),
        wall_ms=wall,
        read_wait_ms=wait,
        read_wait_interval=Interval(wait / wait_factor, wait * wait_factor),
        management_ms=management,
        policy_ms=None if policy_ms is None else policy_ms * costs.pauses,
        compute_ms=compute,
        bound=max(parts, key=parts.__getitem__),
        spread=spread,
    )


class Replayed(NamedTuple):
    """A cell as it was replayed."""

    numbers: CellNumbers
    work: TokenWork
    tokens: pl.DataFrame
    """`graph`, `read_bytes` and `age` of its counted decode tokens, in order."""
    features: pl.DataFrame | None
    """A row of `quality_features.features_of`, where it was asked for."""


def replay_work(
    trace: Trace,
    cells: Sequence[Cell],
    *,
    train: str | None = None,
    features: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Iterator[Replayed]:
    """Replay cells, some at a time.

    Raises:
        InputError: as `simlab.replay.run.replay`; `features`, and the trace carries no scores.
    """
    at_once = max(1, _DETAIL_BYTES // max(1, trace.n_rows * trace.width * _SLOT_BYTES))
    for start in range(0, len(cells), at_once):
        replayer = Replayer(trace, cells[start : start + at_once], detail=True, train=train)
        while replayer.advance():
            if progress is not None:
                share = replayer.row / max(replayer.columns.n_rows, 1)
                progress((start + share * len(replayer.cells)) / len(cells))
        numbers = replayer.numbers()
        described = features_of_replay(replayer) if features else None
        for i in range(len(replayer.cells)):
            rows = row_table(replayer, i).filter(
                (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
            )
            tokens = _tokens(rows)
            rows = rows.filter(pl.col("graph").is_in(tokens["graph"].implode()))
            of_rows = (rows["graph"].to_numpy(), rows["layer"].to_numpy())
            graph, misses = by_token(*of_rows, rows["misses"].to_numpy(), trace.header)
            _, evictions = by_token(*of_rows, rows["evictions"].to_numpy(), trace.header)
            work = TokenWork(graph, misses, evictions.sum(axis=1))
            yield Replayed(numbers[i], work, tokens, None if described is None else described[i])


def _tokens(rows: pl.DataFrame) -> pl.DataFrame:
    """`read_bytes` and `age` of every counted decode graph of a replay; a training part ages the run all the same."""
    return (
        rows.group_by("graph", maintain_order=True)
        .agg(pl.col("read_bytes").sum(), pl.col("counted").all())
        .with_columns(age=pl.int_range(pl.len()).cast(pl.Float64))
        .filter("counted")
    )


def _by_bytes(timings: Timings, model: TimeModel, numbers: CellNumbers, tokens: pl.DataFrame) -> Foretold:
    """A cell's speed from the plainer model; the intervals hold what chance does to means, and nothing else."""
    recorded = model.parts(timings.read_mib, timings.age)
    parts = model.parts(tokens["read_bytes"].to_numpy() / MIB, tokens["age"].to_numpy())
    wall, wait = float(np.sum(parts, axis=0).mean()), float(parts.exposed_read.mean())
    low, high = (wall + end for end in _noise(timings.wall_ms - np.sum(recorded, axis=0)))
    wait_noise = _noise(timings.exposed_ms - recorded.exposed_read)
    means = {
        "compute": float((parts.compute + parts.page_faults).mean()),
        "management": float(parts.management.mean()),
        "reads": wait,
    }
    return Foretold(
        numbers=numbers,
        tok_s=1e3 / wall,
        tok_s_interval=Interval(1e3 / high, 1e3 / low if low > 0 else math.inf),
        wall_ms=wall,
        read_wait_ms=wait,
        read_wait_interval=Interval(*(max(0.0, wait + end) for end in wait_noise)),
        management_ms=means["management"],
        policy_ms=None,
        compute_ms=means["compute"],
        bound=max(means, key=means.__getitem__),
        spread=None,
    )


def _noise(errors: np.ndarray) -> Interval:
    """How far the mean of one run may be from that of another: two runs' chance, independent of each other."""
    mean = float(errors.mean())
    low, high = block_bootstrap_mean([errors])
    return Interval(math.sqrt(2) * (low - mean), math.sqrt(2) * (high - mean))
