"""Device profiles: what reads, moves and compute take on a device, and a trace's cells foretold for it.

A profile is a small JSON file (docs/time.md has the format). `profile_of` makes one from a recorded trace;
`costs_on` puts the tokens of any trace on that device: their misses and moves come from a replay, their times from
the profile alone. Of the trace's own times only two shapes are kept, where it has them: how compute grows along the
context, and how far single tokens are off, which is what an interval is made of.

The compute of a profile is that of one model at one number of threads. A profile of another model carries its
latencies, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from simlab.errors import InputError
from simlab.judge.speed.token_time import Composition, Floats
from simlab.judge.speed.trace_time_cells import Costs, TokenWork
from simlab.judge.speed.trace_time_reads import Latencies, ReadModel, Slices, slices_of
from simlab.record.reads import PAGE
from simlab.trace.json_text import read_json
from simlab.trace.provenance import check, trace_provenance
from simlab.trace.store import Trace
from simlab.types import DECODE, THROW_AWAY_TURN, Provenance, TraceHeader

VERSION = 1
_MOST = 1e9
"""Of every number in a profile: none is a time of days."""
_PROJECTIONS = 3
"""Gate, up and down, where a trace does not show how its experts are read."""


@dataclass(frozen=True)
class DeviceProfile:
    """What a device takes. Fields are those of the file; times in ms unless their name says us."""

    device: str
    model: str | None
    """The model its compute and management are of, as its file is called; null: any."""
    io_mode: Literal["direct", "buffered"]
    composition: Composition
    lanes: int
    compute_ms_per_token: float
    """Of a token that reads nothing."""
    reads: tuple[Mapping[str, float], ...]
    """`window_bytes`, `under_way`, `mean_us` of each size and company; more fields are for people."""
    compute_ms_per_miss: float = 0.0
    management_ms_per_token: float = 0.0
    """Of a token that moves no entry."""
    management_ms_per_move: float = 0.0
    """Of an entry read and another given back."""
    hand_over_us: float = 0.0
    """Of a batch that reads anything."""
    share: float = 1.0
    """Of the composed read times."""
    hidden_ms: float = 0.0
    """Compute of a layer that down projections hide behind, overlapped."""
    waking_us: float = 0.0
    """More for every doubling of the layers since the last that read."""
    pauses: float = 1.0
    """Mean token time with pauses over that without."""
    drift: float = 0.0
    """Relative standard deviation of the level from run to run."""
    model_digest: str | None = None
    """Of that model (`Provenance.model`), which counts where it is known; its file's name where it is not."""

    @property
    def latencies(self) -> Latencies:
        found: dict[int, dict[int, float]] = {}
        for row in self.reads:
            found.setdefault(int(row["window_bytes"]), {})[int(row["under_way"])] = float(row["mean_us"])
        return Latencies(found)

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        fields = {"device_profile": VERSION} | {k: v for k, v in asdict(self).items() if k != "reads"}
        path.write_text(json.dumps(fields | {"reads": [dict(row) for row in self.reads]}, indent=1) + "\n")


_NUMBERS = {
    "compute_ms_per_token", "compute_ms_per_miss", "management_ms_per_token", "management_ms_per_move",
    "hand_over_us", "share", "hidden_ms", "waking_us", "pauses", "drift",
}  # fmt: skip
_REQUIRED = ("device", "io_mode", "lanes", "compute_ms_per_token", "reads")


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile.

    Raises:
        InputError: no such file, not a profile, or a field that is missing, unknown or out of its range.
    """
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"--device {error}") from error
    if not isinstance(found, dict) or found.pop("device_profile", None) != VERSION:
        raise InputError(f"--device {path}: is no device profile of version {VERSION}")
    for name in _REQUIRED:
        if name not in found:
            raise InputError(f"--device {path}, field '{name}': is missing")
    for name in found:
        if name not in DeviceProfile.__dataclass_fields__:
            raise InputError(f"--device {path}, field '{name}': is not known")
    found: dict[str, Any] = {"model": None, "composition": "serial"} | found
    for name in _NUMBERS & set(found):
        found[name] = _number(path, name, found[name], 0.0)
    for name, legal in (("io_mode", ("direct", "buffered")), ("composition", ("serial", "overlapped"))):
        if found[name] not in legal:
            raise InputError(f"--device {path}, field '{name}': must be {' or '.join(legal)}")
    for name in ("model", "model_digest"):
        if not isinstance(found.get(name), str | None):
            raise InputError(f"--device {path}, field '{name}': must be text or null")
    found["lanes"] = int(_number(path, "lanes", found["lanes"], 1, whole=True))
    if not isinstance(found["reads"], list) or not found["reads"]:
        raise InputError(f"--device {path}, field 'reads': must list at least one size")
    rows = []
    for i, row in enumerate(found["reads"]):
        place = f"reads[{i}]"
        if not isinstance(row, dict):
            raise InputError(f"--device {path}, field '{place}': is not an object")
        checked = dict(row)
        for name in ("window_bytes", "under_way", "mean_us"):
            whole = name != "mean_us"
            checked[name] = _number(path, f"{place}.{name}", row.get(name), 1 if whole else 0.0, whole=whole)
        rows.append(checked)
    found["reads"] = tuple(rows)
    return DeviceProfile(**found)


def _number(path: Path, name: str, value: Any, low: float, *, whole: bool = False) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= _MOST
    if not good or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"--device {path}, field '{name}': must be {kind} from {low:g} to {_MOST:g}")
    return value


def profile_of(
    trace: Trace, costs: Costs, composition: Composition, read_rows: pl.DataFrame
) -> DeviceProfile:
    """The profile of the machine a trace was recorded on.

    Args:
        costs: of `fit_costs`.
        read_rows: `window_bytes`, `under_way`, `reads`, `p10_us`, `median_us` and `p90_us`, as
            `trace_time.read_latencies` gives them; what is foretold goes by the means of `costs`.
    """
    means = costs.reads.latencies.microseconds
    reads = [
        {
            "window_bytes": row["window_bytes"],
            "under_way": row["under_way"],
            "mean_us": round(means[row["window_bytes"]][row["under_way"]], 2),
            **{name: round(row[name], 2) for name in ("p10_us", "median_us", "p90_us")},
            "reads": row["reads"],
        }
        for row in read_rows.iter_rows(named=True)
        if row["under_way"] in means.get(row["window_bytes"], {})
    ]
    misses = costs.work.misses.sum(axis=1)
    return DeviceProfile(
        device=trace.header.cpu or "unknown processor",
        model=trace.header.model,
        io_mode=trace.header.io_mode or "buffered",
        composition=composition,
        lanes=costs.reads.lanes,
        compute_ms_per_token=_at_least_zero(costs.compute - costs.compute_per_miss * misses),
        reads=tuple(reads),
        compute_ms_per_miss=costs.compute_per_miss,
        management_ms_per_token=_at_least_zero(
            costs.management - costs.management_per_move * costs.work.moved
        ),
        management_ms_per_move=costs.management_per_move,
        hand_over_us=1e3 * costs.reads.hand_over_ms,
        share=costs.reads.share,
        hidden_ms=costs.reads.hidden_ms,
        waking_us=1e3 * costs.reads.waking_ms,
        pauses=costs.pauses,
        drift=costs.drift if math.isfinite(costs.drift) else 0.0,
        model_digest=trace_provenance(trace.header).model,
    )


def _at_least_zero(values: Floats) -> float:
    return max(0.0, float(values.mean()))


def costs_on(profile: DeviceProfile, trace: Trace, timed: Costs | None) -> Costs:
    """What the tokens of a trace cost on a device, if they did nothing; `Costs.parts` adds what they do.

    Args:
        timed: the trace's own costs, for the shapes named above; None where it has no times.

    Raises:
        InputError: the profile's compute is of another model.
    """
    of_trace = trace_provenance(trace.header)
    if profile.model_digest is not None and of_trace.model is not None:
        check(
            Provenance(profile.model_digest), of_trace, ("model",), "--device: its compute",
            f"the model of {trace.path}", "measure that model on the device",
        )  # fmt: skip
    elif profile.model is not None and profile.model != trace.header.model:
        raise InputError(
            f"--device: its compute is of {profile.model}, the trace is of {trace.header.model}; measure that model on "
            "the device, set compute_ms_per_token and model"
        )
    decode = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)
    graph = trace.collect("routing", trace.routing.filter(decode).select(pl.col("graph").unique().sort()))
    n, layers = graph.height, len(trace.header.moe_layers)
    nothing = TokenWork(
        graph["graph"].to_numpy(), np.zeros((n, layers), dtype=np.int64), np.zeros(n, dtype=np.int64)
    )
    shape, off = np.ones(n), np.ones(n)
    if timed is not None and np.array_equal(timed.work.graph, nothing.graph):
        shape = _mean_one(timed.compute - timed.compute_per_miss * timed.work.misses.sum(axis=1))
        off = _mean_one(timed.wall / np.maximum(np.sum(timed.parts(timed.work, 0.0), axis=0), 1e-9))
    compute = profile.compute_ms_per_token * shape
    management = np.full(n, profile.management_ms_per_token)
    wall = profile.pauses * (compute + management)
    reads = ReadModel(
        profile.latencies, profile.lanes, _slices(trace, profile.composition), profile.hand_over_us / 1e3,
        profile.share, profile.hidden_ms, profile.waking_us / 1e3,
    )  # fmt: skip
    return Costs(
        nothing, wall * off * float(wall.mean() / (wall * off).mean()), np.zeros(n), management, compute, reads,
        profile.management_ms_per_move, profile.compute_ms_per_miss, profile.drift,
    )  # fmt: skip


def _mean_one(values: Floats) -> Floats:
    mean = float(values.mean())
    return values / mean if mean > 0 else np.ones_like(values)


def _slices(trace: Trace, composition: Composition) -> tuple[Slices, ...]:
    """How an expert of each layer is read: as the trace shows it, else a third of its bytes each, in whole pages."""
    try:
        return slices_of(trace, composition)
    except InputError:
        header: TraceHeader = trace.header
        late = int(composition == "overlapped")
        return tuple(
            Slices(
                _PROJECTIONS - late,
                late,
                (math.ceil(header.entry_bytes[layer] / _PROJECTIONS / PAGE) + 1) * PAGE,
            )
            for layer in header.moe_layers
        )
