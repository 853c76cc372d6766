"""Settings for a trace, with what is foretold of each: tokens/s, bytes read, perplexity, and intervals.

Speeds are those of `trace_time_cells`, perplexities those of a quality law (`quality`), which has to be given: without
one a setting's cost is known as router mass displaced only, and a limit on perplexity is refused. A choice is made
on the foretold values; whether it still holds at the worse ends of the intervals is said of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simlab.cells import MIB
from simlab.errors import InputError
from simlab.judge.pick import evenly_along
from simlab.judge.quality.law import QualityModel
from simlab.judge.speed.trace_time_cells import Foreteller, Foretold, replay_work
from simlab.judge.stats import Interval, block_bootstrap_mean
from simlab.policy import find_routing
from simlab.trace.store import Trace
from simlab.types import Cell, TraceHeader

_KNOB_GRID: dict[str, tuple[str, ...]] = {
    "substitute": ("L=.05", "L=.1", "L=.15", "L=.2", "L=.3"),
    "cache_prior": ("lambda=.05", "lambda=.1", "lambda=.2"),
    "max_rank": ("M={k2},J=1", "M={k15},J=2"),
    "cum_prob": ("p=.5,J=1", "p=.8,J=1"),
    "resident_only": ("",),
    "swap_on_miss": ("tau={half}", "tau={even}"),
    "buddy": ("n=4", "n=16"),
    "top_k": ("k={most}", "k={some}"),
    "drop_cold": ("F=.5", "F=.75", "F=1"),
    "adaptive_k": ("t=.05", "t=.1"),
    "skip_ratio": ("beta=.2", "beta=.4"),
}
"""Knobs of every routing policy that a pick tries where no route is named; `{..}` depend on the model's k."""
_TOGETHER = ("substitute:L=.1+drop_cold:F=.75",)
_TRAINED = ("buddy",)


class Rise(NamedTuple):
    """Relative rise in perplexity over the original routing, 0.02 for 2 %, with its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Setting:
    """A cell and what is foretold of it; simulated."""

    foretold: Foretold
    mib_per_token: float
    """Entry bytes a decode token reads, in MiB."""
    mib_interval: Interval
    """What chance does to that mean over another stretch of the text."""
    rise: Rise | None
    """Null without a quality law."""

    @property
    def cell(self) -> Cell:
        return self.foretold.numbers.cell

    @property
    def cost(self) -> float:
        """What it costs in quality: the foretold rise in perplexity, or without a law the router mass displaced."""
        if self.rise is not None:
            return self.rise.value
        return self.foretold.numbers.decode.mass_displaced or 0.0


def default_routes(header: TraceHeader, *, scores: bool, trained: bool) -> list[str]:
    """Every routing policy at a few values of its knobs, as `--route` takes them; the original first.

    Args:
        scores: whether the trace carries the router's scores; policies that need them are left out otherwise.
        trained: whether there is a part to learn from.
    """
    k = header.n_expert_used
    words = {
        "k2": min(2 * k, header.n_expert), "k15": min(k + k // 2, header.n_expert), "half": f"{0.5 / k:.4g}",
        "even": f"{1 / k:.4g}", "most": max(1, k - k // 4), "some": max(1, k // 2),
    }  # fmt: skip
    found = ["original"]
    for name, grid in _KNOB_GRID.items():
        policy = find_routing(name)
        if (policy.needs & {"scores", "rank", "mass"} and not scores) or (name in _TRAINED and not trained):
            continue
        for knobs in grid:
            found.append(f"{name}:{knobs.format(**words)}" if knobs else name)
    return found + (list(_TOGETHER) if scores else [])


def settings_of(
    trace: Trace,
    teller: Foreteller,
    cells: Sequence[Cell],
    law: QualityModel | None,
    *,
    train: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[Setting]:
    """Replay cells and foretell each; in their order.

    Raises:
        InputError: as `replay_work`; a law, and the trace carries no scores.
    """
    found = []
    for replayed in replay_work(trace, cells, train=train, features=law is not None, progress=progress):
        read = replayed.tokens["read_bytes"].to_numpy() / MIB
        foretold = teller.foretell(replayed)
        rise = None
        if law is not None and replayed.features is not None:
            rise = rise_of(*law.predict(replayed.features)[0])
        found.append(Setting(foretold, float(read.mean()), block_bootstrap_mean([read]), rise))
    return found


def rise_of(delta: float, low: float, high: float) -> Rise:
    """A rise in nll as one in perplexity."""
    return Rise(*(math.expm1(end) for end in (delta, low, high)))


def check_law(law: QualityModel | None, asked: str) -> QualityModel:
    """Refuse to speak of perplexity without a law.

    Raises:
        InputError: there is none.
    """
    if law is None:
        raise InputError(
            f"{asked}: perplexity is not known from a trace alone; give a quality law with --calibration F.json, or "
            "--live, which calibrates one"
        )
    return law


def within_rise(settings: Sequence[Setting], most: float) -> list[Setting]:
    """Settings whose foretold rise in perplexity is at most so much, fastest first."""
    kept = [s for s in settings if s.rise is not None and s.rise.value <= most]
    return sorted(kept, key=lambda s: -s.foretold.tok_s)


def at_least(settings: Sequence[Setting], tok_s: float) -> list[Setting]:
    """Settings of at least so many foretold tokens/s, of the least cost first."""
    kept = [s for s in settings if s.foretold.tok_s >= tok_s]
    return sorted(kept, key=lambda s: (s.cost, -s.foretold.tok_s))


def pareto(settings: Sequence[Setting]) -> list[Setting]:
    """Settings that no other beats in both tokens/s and cost, by rising cost; of equals the first stands."""
    front: list[Setting] = []
    for s in sorted(settings, key=lambda s: (s.cost, -s.foretold.tok_s)):
        if not front or s.foretold.tok_s > front[-1].foretold.tok_s:
            front.append(s)
    return front


def spread_along(front: Sequence[Setting], n: int) -> list[Setting]:
    """Up to n settings of a front: both ends, and evenly in between by speed and cost, each scaled to its span."""
    points = np.array([[s.foretold.tok_s, s.cost] for s in front])
    return [front[i] for i in evenly_along(points, n)]


def surely(setting: Setting, most_rise: float | None, least_tok_s: float | None) -> bool:
    """Whether the limits hold at the worse ends of the intervals too."""
    if most_rise is not None and (setting.rise is None or setting.rise.high > most_rise):
        return False
    return least_tok_s is None or setting.foretold.tok_s_interval.low >= least_tok_s


def without_twins(settings: Sequence[Setting]) -> list[Setting]:
    """The first of settings whose replays did the same in every count: knobs that change nothing are no choice."""
    seen: dict[tuple, Setting] = {}
    for s in settings:
        numbers = s.foretold.numbers
        same = (
            replace(numbers.decode, reranked=0),
            numbers.top_k,
            s.cell.budget,
            s.cell.evict_spec,
            s.cell.scope,
        )
        seen.setdefault(same, s)
    return list(seen.values())
