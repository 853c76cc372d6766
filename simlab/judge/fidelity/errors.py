"""How far a replay is off: signed errors of its counts against live runs of the same cells.

Three levels (policies' specification, "Fidelity levels"): L1 replays scores recorded under the original routing, with
the cache live; L2 runs the model with the same token ids forced on it; L3 lets it write freely. L1 and L2 are paired
token by token, so their difference is far better known than either. L3 writes other tokens under every cell, so it is
set beside the replay of what the model wrote under the original routing, and the two are independent.

Errors are replay minus live. Every figure of a replay is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.cells import MIB
from simlab.errors import InputError
from simlab.judge.stats import Interval, block_bootstrap_of
from simlab.replay.run import Replayer
from simlab.replay.slots import row_table
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell

Floats = NDArray[np.float64]

COUNTED = ("lookups", "misses", "read_bytes", "slots", "substituted", "dropped")
N_RESAMPLES = 2_000
"""Of the many intervals of a grid."""
N_PARTS = 4
"""Stretches of a text that errors by position are given for."""


@dataclass(frozen=True)
class Counts:
    """What a run did, int64 `[decode tokens, layers]` of each of `COUNTED`, in execution order."""

    of: Mapping[str, NDArray[np.int64]]

    @property
    def n_tokens(self) -> int:
        return len(self.of["slots"])

    def part(self, tokens: slice = slice(None), layer: int | None = None) -> Counts:
        """Some of the tokens, and of the layers one or all."""
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        return Counts({name: values[tokens, layers] for name, values in self.of.items()})


def counts_of_replays(trace: Trace, cells: Sequence[Cell], *, train: str | None = None) -> list[Counts]:
    """Replay cells, and count by decode token and layer.

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    replayer = Replayer(trace, cells, detail=True, train=train)
    while replayer.advance():
        pass
    return [
        _counts(trace, row_table(replayer, i).filter((pl.col("phase") == DECODE) & pl.col("counted")))
        for i in range(len(cells))
    ]


def counts_of_recording(trace: Trace) -> Counts:
    """The same of what a recording says happened.

    Raises:
        InputError: it lacks what was executed, holds several tokens in a decode graph, or contradicts itself.
    """
    decode = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
    names = ("router_experts", "experts", "dropped", "read_bytes")
    rows = trace.collect(
        "routing",
        trace.routing.filter(decode).select("turn", "graph", "step", "layer", "pos_in_graph", *names),
    )
    for name in names:
        if rows[name].null_count():
            raise InputError(f"{trace.path}/routing: '{name}' is unknown in some rows")
    if rows["pos_in_graph"].max() not in (0, None):
        raise InputError(
            f"{trace.path}/routing: a decode graph holds several tokens, which are not told apart"
        )
    router, experts, dropped, read = (rows[n].to_numpy().reshape(-1, trace.width) for n in names)
    kept = (experts[:, :, None] == router[:, None, :]).any(axis=2)
    exists = experts >= 0
    found = rows.select("turn", "graph", "step", "layer").with_columns(
        lookups=pl.Series((exists & ~dropped).sum(axis=1)),
        misses=pl.Series((read > 0).sum(axis=1)),
        read_bytes=pl.Series(read.sum(axis=1)),
        slots=pl.Series(exists.sum(axis=1)),
        substituted=pl.Series((exists & ~kept).sum(axis=1)),
        dropped=pl.Series(dropped.sum(axis=1)),
    )
    tokens = trace.collect(
        "tokens", trace.tokens.filter(decode).select("lookups", "substituted", "dropped").sum()
    )
    for name in tokens.columns:
        if tokens[name].item() != found[name].sum():
            raise InputError(
                f"{trace.path}: {found[name].sum()} {name} in routing, but {tokens[name].item()} in tokens"
            )
    return _counts(trace, found)


def _counts(trace: Trace, rows: pl.DataFrame) -> Counts:
    n_layers = len(trace.header.moe_layers)
    rows = rows.sort("graph", "layer", maintain_order=True)
    if rows.height % n_layers or not (rows.group_by("graph").len()["len"] == n_layers).all():
        raise InputError(f"{trace.path}/routing: some decode tokens were not routed in all {n_layers} layers")
    return Counts({name: rows[name].to_numpy().reshape(-1, n_layers) for name in COUNTED})


class Off(NamedTuple):
    """One figure of a replay beside the live one; the interval is 95 % of the error's, over blocks of tokens."""

    replay: float
    live: float
    error: float
    interval: Interval


@dataclass(frozen=True)
class Errors:
    """How far a replay was off, on one text or on several together."""

    miss_rate: Off
    """Misses per lookup in %, the error in points."""
    mib_per_token: Off
    """The error in % of the live figure."""
    substituted: Off
    """Slots in %, the error in points."""
    dropped: Off
    """Slots in %, the error in points."""


def errors(replay: Sequence[Counts], live: Sequence[Counts], *, paired: bool) -> Errors:
    """Signed errors of replays against live runs, text by text the same.

    Args:
        paired: whether both are of the same tokens.
    """
    if paired:
        for first, second in zip(replay, live, strict=True):
            if first.n_tokens != second.n_tokens:
                raise InputError(
                    f"a replay of {first.n_tokens} tokens beside a live run of {second.n_tokens}"
                )

    counts = [[run.of[name].sum(axis=1) for run in runs] for runs in (replay, live) for name in COUNTED]
    means = [np.array([np.concatenate(texts).mean()]) for texts in counts]
    intervals = block_bootstrap_of(
        counts,
        lambda *drawn: np.stack([error(*both) for error, both in _figures(drawn)]),
        drawn=None if paired else [0] * len(COUNTED) + [1] * len(COUNTED),
        n_resamples=N_RESAMPLES,
    )
    return Errors(
        *(
            Off(float(a[0]), float(b[0]), float(error(a, b)[0]), interval)
            for (error, (a, b)), interval in zip(_figures(means), intervals, strict=True)
        )
    )


def _figures(
    means: Sequence[Floats],
) -> list[tuple[Callable[[Floats, Floats], Floats], tuple[Floats, Floats]]]:
    """How each figure of `Errors` is compared, and the figure on both sides, from the means of all counts."""
    sides: list[dict[str, Floats]] = [
        dict(zip(COUNTED, means[i : i + len(COUNTED)], strict=True)) for i in (0, len(COUNTED))
    ]

    def share(over: str, under: str) -> tuple[Floats, Floats]:
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = (100 * side[over] / side[under] for side in sides)
        return first, second

    read, live_read = (side["read_bytes"] / MIB for side in sides)
    return [
        (_difference, share("misses", "lookups")),
        (_percent, (read, live_read)),
        (_difference, share("substituted", "slots")),
        (_difference, share("dropped", "slots")),
    ]


def _difference(replay: Floats, live: Floats) -> Floats:
    return replay - live


def _percent(replay: Floats, live: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return 100 * (replay / live - 1)
