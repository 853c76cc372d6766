"""What a person who moves a slider asks of a trace's times: what a token's time is made of, and of other cells' tokens.

Times of the recording were measured; those of other cells are foretold from a replay, and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from simlab.charts.times import Speed
from simlab.charts.words import budget_label, route_label
from simlab.judge.measure import measure
from simlab.judge.quality.law import recorded_cell
from simlab.judge.speed.token_time import Timings
from simlab.judge.speed.trace_time_cells import Foreteller, Foretold, replay_work
from simlab.judge.stats import UNKNOWN, Interval, block_bootstrap_mean
from simlab.trace.provenance import trace_provenance
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell


def foreteller(trace: Trace) -> Foreteller:
    """What a trace's times foretell of other cells.

    Raises:
        InputError: none of its decoded tokens has a time.
    """
    recorded = recorded_cell(trace.header) if trace.header.engine == "simlab" else None
    return Foreteller(trace, recorded)


def foretold(trace: Trace, teller: Foreteller, cell: Cell) -> Foretold:
    """The speed of a cell on the recorded machine.

    Raises:
        InputError: as `simlab.replay.run.replay`.
    """
    (replayed,) = replay_work(trace, [cell])
    return teller.foretell(replayed)


def alike(trace: Trace) -> list[Trace]:
    """The traces in the same folder that are of the same model and text, this one left out."""
    header, found = trace.header, []
    for path in sorted(trace.path.parent.glob("*.trace")):
        if path.resolve() == trace.path.resolve():
            continue
        other = open_trace(path)
        a, b = trace_provenance(header), trace_provenance(other.header)
        if a.model is not None and a.text is not None and (a.model, a.text) == (b.model, b.text):
            found.append(other)
    return found


def speeds(trace: Trace, teller: Foreteller, others: Sequence[Trace]) -> list[Speed]:
    """Tokens/s of other recordings of the same text: foretold from this one, and measured when they were made.

    Raises:
        InputError: as `foretold`, or a recording does not say what it ran under.
    """
    found = []
    for other in others:
        cell = recorded_cell(other.header)
        told, live = foretold(trace, teller, cell), measure(other, cell)
        name = f"{route_label(cell)}, {budget_label(told.numbers)}"
        found.append(Speed(name, told.tok_s, told.tok_s_interval, live=False))
        if live.tok_s is not None:
            interval = Interval(*live.intervals.get("tok_s", UNKNOWN))
            found.append(Speed(name, live.tok_s, interval, live=True))
    return found


def measured_speed(timings: Timings) -> Speed:
    """Tokens/s of the recording itself, with the interval of its mean token time."""
    low, high = block_bootstrap_mean([timings.wall_ms])
    return Speed("recorded", 1e3 / float(timings.wall_ms.mean()), Interval(1e3 / high, 1e3 / low), live=True)


def measured_parts(timings: Timings) -> dict[str, float]:
    """Mean ms per decode token of each part, by the names of `simlab.charts.times.PARTS`."""
    parts = {"compute": timings.compute_ms, "waiting for reads": timings.exposed_ms}
    if timings.management_ms is not None:
        parts["cache management"] = timings.management_ms
    return {name: float(values.mean()) for name, values in parts.items()}


def foretold_parts(told: Foretold) -> dict[str, float]:
    """The same of a foretold cell."""
    return {
        "compute": told.compute_ms,
        "cache management": told.management_ms,
        "waiting for reads": told.read_wait_ms,
    }
