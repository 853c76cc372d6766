"""From what a token reads to the time it takes, fitted on the timings of one run.

`token time = compute + page-fault time + management + exposed read time` (policies.md, "From misses to
seconds"). Inputs of a prediction are the bytes the token reads and its place in the run, both of which a
replay knows; never its own wall, io, stall, management, compute or faults, which are what is fitted:

- exposed read time, what compute waits for: `max(0, offset + slope * MiB)`, nothing without a read. Serial runs
  wait for all of it; in overlapped ones a negative offset is what hides behind compute.
- management, insertions and evictions: a line in MiB.
- compute: a line in MiB, since reader threads take cores and memory from it, plus a warm-up that decays over
  the run (tokens of a cold process are slower). What of it goes with page faults is told apart.

A run's slow phases are no function of what is read. `predict_going` is for a run that is under way: it adds a
share of how far the tokens *before* were off, by their measured wall times. The plain `predict` does not.

Token times are skewed: a few tokens take many times the median. A prediction aims at the mean, by least
squares, or at the median, by least absolute errors; the first is for tokens/s, the second for a typical token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.signal import lfilter

from simlab.errors import InputError
from simlab.trace.bmoe_metrics import MetricsFile

Floats = NDArray[np.float64]
Aim = Literal["mean", "median"]
Composition = Literal["serial", "overlapped"]

_MIB = 1 << 20
_CLOSE_MS = 0.5
"""Columns are written to a microsecond; more than this off and the parts are not those of the wall time."""
_SAME_BYTES = 0.01
"""Tokens whose bytes differ by less than this share of their mean say nothing of the time per MiB."""
_WARM_UPS = (32, 64, 128, 256, 512)
_MEMORIES = (1, 2, 4, 8, 16, 32)
"""Tried lengths, in tokens, of the warm-up and of the memory for the tokens before."""
_ROBUST_MS = 1.0


@dataclass(frozen=True)
class Timings:
    """The tokens of one run that can be used, in order. Float64 `[n]`, times in ms."""

    composition: Composition
    age: Floats
    """Tokens decoded in the run before this one."""
    read_mib: Floats
    wall_ms: Floats
    exposed_ms: Floats
    """Time in which compute waited for reads: io if serial, stall if overlapped."""
    management_ms: Floats | None
    """Null where it was not measured; it is then a part of compute."""
    compute_ms: Floats
    faults: Floats | None
    left_out: int
    """Tokens of the file without a usable time."""

    @property
    def n(self) -> int:
        return len(self.wall_ms)

    @property
    def bytes_vary(self) -> bool:
        """Whether a time per MiB can be told at all."""
        return _vary(self.read_mib)


def _vary(read_mib: Floats) -> bool:
    return float(np.ptp(read_mib)) > _SAME_BYTES * float(read_mib.mean())


def timings_of(metrics: MetricsFile) -> Timings:
    """What a metrics file measured per token, composed as its own columns add up.

    `compute_ms` is a residual, `wall - io - management` or `wall - stall - management` (engine-semantics,
    section 4), so the columns show which of the two ran. Where both do, the file's setting decides.

    Raises:
        InputError: no token has the times, or they add up neither way.
    """
    columns = metrics.columns

    def measured(name: str) -> Floats | None:
        """The column, with NaN for what was not measured; null if nothing was."""
        if name not in columns:
            return None
        values = np.where(columns[name] >= 0, columns[name], np.nan).astype(np.float64)
        return None if np.isnan(values).all() else values

    wall, compute, management = measured("wall_ms"), measured("compute_ms"), measured("mgmt_ms")
    waits: dict[Composition, Floats] = {}
    columns_of: dict[Composition, str] = {"serial": "io_ms", "overlapped": "stall_ms"}
    for composition, name in columns_of.items():
        values = measured(name)
        if values is not None:
            waits[composition] = values
    if metrics.overlap and "overlapped" not in waits and wall is not None and compute is not None:
        # Compute is what is left of the wall time: what it and management do not take was the stall.
        waits["overlapped"] = np.maximum(0.0, wall - compute - (0 if management is None else management))
    if wall is None or compute is None or not waits:
        raise InputError(f"{metrics.path}: no token has a wall time, a compute time and a read time")

    def off(wait: Floats) -> float:
        known = np.isfinite(wall + wait + compute) & (compute > 0)
        parts = wait + compute + (0 if management is None else management)
        gaps = np.abs(wall - parts)[known & np.isfinite(parts)]
        return float(np.median(gaps)) if len(gaps) else 0.0

    said: Composition = "overlapped" if metrics.overlap else "serial"
    chosen = min(waits, key=lambda composition: (off(waits[composition]) > _CLOSE_MS, composition != said))
    if off(waits[chosen]) > _CLOSE_MS:
        raise InputError(
            f"{metrics.path}: wall_ms is neither io + mgmt + compute nor stall + mgmt + compute, by "
            f"{min(map(off, waits.values())):.3g} ms or more in half of the tokens; its parts cannot be told apart"
        )
    usable = np.isfinite(wall + waits[chosen] + compute) & (wall > 0)
    if management is not None:
        usable &= np.isfinite(management)
    if not usable.any():
        raise InputError(f"{metrics.path}: no token has all of wall, read, management and compute time")
    faults = measured("majflt")
    return Timings(
        composition=chosen,
        age=np.flatnonzero(usable).astype(np.float64),
        read_mib=columns["read_bytes"][usable] / _MIB,
        wall_ms=wall[usable],
        exposed_ms=waits[chosen][usable],
        management_ms=None if management is None else management[usable],
        compute_ms=compute[usable],
        faults=None if faults is None else np.nan_to_num(faults[usable]),
        left_out=int((~usable).sum()),
    )


class Line(NamedTuple):
    """`offset + slope * MiB`, in ms."""

    offset: float
    slope: float

    def at(self, read_mib: Floats) -> Floats:
        return self.offset + self.slope * read_mib


class Parts(NamedTuple):
    """Predicted ms per token, float64 `[n]` each; they add up to the token's time."""

    compute: Floats
    page_faults: Floats
    management: Floats
    exposed_read: Floats


@dataclass(frozen=True)
class TimeModel:
    """What `fit` found; see the module for the formula. Times in ms."""

    aim: Aim
    composition: Composition
    exposed: Line
    management: Line
    compute: Line
    warm_up: float
    """What warm-up adds to the compute of the first token."""
    warm_up_tokens: float
    """Tokens over which it falls to 1/e."""
    fault_ms: float
    """Time of one page fault, 0 where none were measured."""
    faults: float
    """Faults of a token once the run is warm, and `warm_up_faults` more at its first."""
    warm_up_faults: float
    carry: float
    """Share of the error of the tokens before that the next repeats."""
    memory_tokens: float

    def parts(self, read_mib: Floats, age: Floats) -> Parts:
        """The parts of each token's time.

        Args:
            read_mib: MiB each token reads, `[n]`.
            age: tokens decoded in the run before it, `[n]`.
        """
        cold = np.exp(-age / self.warm_up_tokens)
        exposed = np.where(read_mib > 0, np.maximum(0.0, self.exposed.at(read_mib)), 0.0)
        return Parts(
            compute=self.compute.at(read_mib) + self.warm_up * cold,
            page_faults=self.fault_ms * (self.faults + self.warm_up_faults * cold),
            management=self.management.at(read_mib),
            exposed_read=exposed,
        )

    def predict(self, read_mib: Floats, age: Floats) -> Floats:
        """ms per token, `[n]`, from bytes and place alone; arguments as `parts`."""
        return np.sum(self.parts(read_mib, age), axis=0)

    def predict_going(self, read_mib: Floats, age: Floats, wall_ms: Floats) -> Floats:
        """The same of each token when the wall times of all tokens before it are known, and no others."""
        plain = self.predict(read_mib, age)
        return plain + self.carry * before(wall_ms - plain, self.memory_tokens)


def before(values: Floats, memory: float) -> Floats:
    """Exponentially weighted mean of the values before each one, 0 before the first; `[n]`."""
    if not len(values):
        return values
    keep = np.exp(-1 / memory)
    return np.concatenate([[0.0], lfilter([1 - keep], [1, -keep], values)[:-1]])


def fit(timings: Timings, chosen: NDArray[np.bool_] | None = None, *, aim: Aim = "mean") -> TimeModel:
    """Fit the model on some tokens of a run.

    Args:
        timings: the run. Of tokens not chosen, only wall times are looked at, as the past of later ones.
        chosen: bool `[n]`, the tokens to fit, at least one; left out, all.
        aim: what to predict of a token.
    """
    if chosen is None:
        chosen = np.ones(timings.n, dtype=bool)
    mib, age = timings.read_mib[chosen], timings.age[chosen]
    slope = mib if _vary(mib) else np.zeros_like(mib)
    exposed = _exposed_line(mib, timings.exposed_ms[chosen], aim)
    no_line = Line(0.0, 0.0)
    management = (
        no_line
        if timings.management_ms is None
        else Line(*solve([np.ones_like(mib), slope], timings.management_ms[chosen], aim)[0])
    )
    compute, tau, fault_ms, faults = _compute(slope, age, timings.compute_ms[chosen], timings, chosen, aim)
    model = TimeModel(
        aim, timings.composition, exposed, management, Line(*compute[:2]), compute[2], tau, fault_ms,
        *faults, carry=0.0, memory_tokens=1.0,
    )  # fmt: skip
    carry, memory = _memory(timings, chosen, model)
    return replace(model, carry=carry, memory_tokens=memory)


def solve(terms: list[Floats], target: Floats, aim: Aim) -> tuple[list[float], float]:
    """Coefficients of no less than zero of the terms for a target, and the loss they leave."""
    matrix = np.stack(terms, axis=1)
    scale = np.abs(matrix).max(axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1)
    if aim == "mean":
        found, loss = optimize.nnls(scaled, target)
    else:
        found, loss = _least_absolute(scaled, target)
    return [float(c) for c in np.where(scale > 0, found / np.where(scale > 0, scale, 1), 0.0)], float(loss)


def _least_absolute(matrix: Floats, target: Floats) -> tuple[Floats, float]:
    """Least absolute errors with coefficients of no less than zero, by the dual linear program.

    `min sum |y - A x|, x >= 0` is `max y z, A' z <= 0, -1 <= z <= 1`: a few constraints however many tokens.
    """
    width = matrix.shape[1]
    result = optimize.linprog(-target, A_ub=matrix.T, b_ub=np.zeros(width), bounds=(-1, 1), method="highs")
    assert result.success, result.message  # z = 0 is feasible and the bounds are finite
    return np.maximum(0.0, -result.ineqlin.marginals), -float(result.fun)


def _exposed_line(mib: Floats, exposed: Floats, aim: Aim) -> Line:
    """The line of the exposed read time. Where bytes do not vary it goes through the origin."""
    reads = mib > 0
    if not reads.any():
        return Line(0.0, 0.0)
    mib, exposed = mib[reads], exposed[reads]
    if not _vary(mib):
        middle = np.mean(exposed) if aim == "mean" else np.median(exposed)
        return Line(0.0, float(middle / mib.mean()))
    slope, offset = np.polyfit(mib, exposed, 1)
    found = optimize.least_squares(
        lambda p: np.maximum(0.0, p[0] + p[1] * mib) - exposed,
        x0=[offset, max(slope, 1e-9)],
        bounds=([-np.inf, 0.0], np.inf),
        x_scale=[max(float(exposed.mean()), 1e-6), max(float(exposed.mean() / mib.mean()), 1e-9)],
        loss="linear" if aim == "mean" else "soft_l1",
        f_scale=_ROBUST_MS,
    )
    return Line(float(found.x[0]), float(found.x[1]))


def _compute(
    slope: Floats, age: Floats, compute: Floats, timings: Timings, chosen: NDArray[np.bool_], aim: Aim
) -> tuple[list[float], float, float, tuple[float, float]]:
    """Coefficients of compute (constant, per MiB, warm-up), the warm-up's length, and what faults there are.

    The warm-up may last a quarter of the tokens at most: a longer one could not be told from a trend, and a
    trend does not carry beyond the tokens it was seen in.
    """
    one = np.ones_like(compute)
    lengths = [tau for tau in _WARM_UPS if 4 * tau <= float(np.ptp(age))]
    tried = [(solve([one, slope, np.exp(-age / tau)], compute, aim), float(tau)) for tau in lengths]
    (found, _), tau = min(
        tried, key=lambda t: t[0][1], default=(solve([one, slope, np.zeros_like(one)], compute, aim), 1.0)
    )
    faults = None if timings.faults is None else timings.faults[chosen]
    if faults is None or not faults.any() or aim == "median":  # medians of parts do not add up
        return found, tau, 0.0, (0.0, 0.0)
    cold = np.exp(-age / tau) if lengths else np.zeros_like(one)
    fault_ms = solve([one, slope, cold, faults], compute, aim)[0][3]
    steady, first = solve([one, cold], faults, aim)[0]
    rest, _ = solve([one, slope, cold], np.maximum(0.0, compute - fault_ms * faults), aim)
    return rest, tau, fault_ms, (steady, first)


def _memory(timings: Timings, chosen: NDArray[np.bool_], model: TimeModel) -> tuple[float, float]:
    """How much of the error of the tokens before the next one repeats, and over how many they are averaged."""
    error = timings.wall_ms - model.predict(timings.read_mib, timings.age)
    tried = []
    for memory in _MEMORIES:
        (carry,), loss = solve([before(error, memory)[chosen]], error[chosen], model.aim)
        tried.append((loss, min(1.0, carry), float(memory)))
    _, carry, memory = min(tried)
    return carry, memory
