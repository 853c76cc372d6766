"""Errors of replays for reading and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from simlab.charts.words import route_label
from simlab.cli.output import align
from simlab.judge.fidelity.errors import Off
from simlab.judge.fidelity.grid import FidelityRow
from simlab.judge.fidelity.speed import SpeedRow

LEGEND = (
    "L1: a replay of the text's recording under the original routing, simulated. L2: live, the same tokens forced.\n"
    "L3: live, the model writes; the replay beside it is of what it wrote under the original routing. set: a replay\n"
    "on scores from between recordings (--recorded). L2-L2: a second live run in the replay's place (--again), which\n"
    "says what chance does. Errors are replay minus live, decode only, with 95 % intervals over blocks of 32 tokens."
)
_KINDS: dict[str, Callable[[FidelityRow], bool]] = {
    "text": lambda row: row.text is not None,
    "layer": lambda row: row.part.startswith("layer"),
    "position": lambda row: row.part.startswith("tokens"),
}
"""Rows that `--by` prints."""


def fidelity_text(rows: Sequence[FidelityRow], speeds: Sequence[SpeedRow], by: str | None) -> str:
    """A table of all cells, one by text, layer or position if asked for, and one of speeds if there are any."""
    parts = [_table(rows)]
    if by is not None:
        parts.append(f"by {by}\n" + _parts_table([row for row in rows if _KINDS[by](row)]))
    if speeds:
        parts.append(_speed_table(speeds))
    return "\n\n".join([*parts, LEGEND])


def fidelity_json(rows: Sequence[FidelityRow], speeds: Sequence[SpeedRow]) -> list[dict[str, Any]]:
    """Every row as JSON values, those of speeds last."""
    return [_row_json(row) for row in rows] + [_speed_json(row) for row in speeds]


def _row_json(row: FidelityRow) -> dict[str, Any]:
    cell = row.cell

    def off(value: Off) -> dict[str, Any]:
        return {
            "replay": value.replay,
            "live": value.live,
            "error": value.error,
            "interval": list(value.interval),
        }

    return {
        "compared": row.compared,
        "route": cell.route.name,
        "knobs": dict(cell.route.knobs),
        "margin": cell.margin,
        "drop": cell.drop,
        "evict": cell.evict,
        "scope": cell.scope,
        "budget_cycles": row.budget_cycles,
        "text": row.text,
        "part": row.part,
        "miss_rate_points": off(row.errors.miss_rate),
        "mib_per_token_percent": off(row.errors.mib_per_token),
        "substituted_points": off(row.errors.substituted),
        "dropped_points": off(row.errors.dropped),
    }


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _off_words(off: Off, form: str) -> list[str]:
    if not math.isfinite(off.error):
        return [_number(off.replay, form), _number(off.live, form), "-"]
    interval = f"[{_number(off.interval.low, '+.2f')}, {_number(off.interval.high, '+.2f')}]"
    return [_number(off.replay, form), _number(off.live, form), f"{off.error:+.2f} {interval}"]


def _words(row: FidelityRow) -> list[str]:
    return [row.compared, f"{row.budget_cycles:.1f}", route_label(row.cell)]


def _table(rows: Sequence[FidelityRow]) -> str:
    """A line per cell: all texts together, and the text it is furthest off on."""
    lines = [["compared", "cycles", "route", "miss % replay", "live", "error, points", "worst text",
              "MiB/token replay", "live", "error, %", "worst text", "subst. % replay", "live", "error, points",
              "dropped, points"]]  # fmt: skip
    whole = [row for row in rows if row.text is None and row.part == "all"]
    for row in whole:
        same = [
            r.errors for r in rows if r.text is not None and r.compared == row.compared and r.cell == row.cell
        ]

        def worst(name: str, same: Sequence[Any] = same) -> str:
            found = [getattr(e, name).error for e in same if math.isfinite(getattr(e, name).error)]
            return f"{max(found, key=abs):+.2f}" if found else "-"

        e = row.errors
        lines.append(
            [
                *_words(row),
                *_off_words(e.miss_rate, ".2f"),
                worst("miss_rate"),
                *_off_words(e.mib_per_token, ".3f"),
                worst("mib_per_token"),
                *_off_words(e.substituted, ".2f"),
                _number(e.dropped.error, "+.2f"),
            ]
        )
    return align(lines)


def _speed_table(rows: Sequence[SpeedRow]) -> str:
    """A line per cell, and the state of the machine that its runs began in."""
    lines = [["budget", "route", "runs", "tok/s foretold (simulated)", "live", "error, %", "machine's speed aside, %",
              "load", "free MiB", "MHz"]]  # fmt: skip
    for row in rows:
        state = [run.machine for run in row.runs]
        lines.append(
            [
                row.cell.budget.text,
                route_label(row.cell),
                str(len(row.runs)),
                f"{row.foretold_tok_s:.1f}",
                f"{row.live_tok_s:.1f}",
                f"{row.error_from_trace:+.1f}",
                f"{row.error:+.1f} [{row.interval.low:+.1f}, {row.interval.high:+.1f}]",
                *(_number(_median(state, name), ".1f") for name in ("load", "available_mib", "cpu_mhz")),
            ]
        )
    return align(lines)


def _median(states: Sequence[dict[str, float | None]], name: str) -> float:
    known = sorted(value for state in states if (value := state.get(name)) is not None)
    return known[len(known) // 2] if known else math.nan


def _speed_json(row: SpeedRow) -> dict[str, Any]:
    return {
        "compared": "tok_s",
        "route": row.cell.route.name,
        "knobs": dict(row.cell.route.knobs),
        "budget": row.cell.budget.text,
        "live_tok_s": row.live_tok_s,
        "foretold_tok_s": row.foretold_tok_s,
        "error_percent": row.error,
        "interval": list(row.interval),
        "error_from_trace_percent": row.error_from_trace,
        "runs": [{"live_tok_s": run.live_tok_s, "machine": run.machine} for run in row.runs],
    }


def _parts_table(rows: Sequence[FidelityRow]) -> str:
    lines = [["compared", "cycles", "route", "part", "miss %, points", "MiB/token, %", "subst. %, points"]]
    for row in rows:
        e = row.errors
        errors = [_off_words(off, ".2f")[2] for off in (e.miss_rate, e.mib_per_token, e.substituted)]
        lines.append([*_words(row), row.text or row.part, *errors])
    return align(lines)
