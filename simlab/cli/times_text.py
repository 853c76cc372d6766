"""What `time` found, for reading and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from simlab.cli.output import align, cell_to_json, cell_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from simlab.judge.speed.moments import Moments
    from simlab.judge.speed.time_check import Judged, TimeCheck
    from simlab.judge.speed.time_check_live import LiveCheck
    from simlab.judge.speed.token_time import Timings
    from simlab.judge.speed.trace_time_cells import Foretold
    from simlab.judge.stats import Interval

_SIZES_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Found:
    """All that is shown of one source."""

    path: str
    io_mode: str | None
    timings: Timings
    check: TimeCheck
    latencies: pl.DataFrame | None = None
    foretold: Sequence[Foretold] = ()
    moments: Moments | None = None
    live: LiveCheck | None = None


READS_OF = {
    "direct": "direct reads, flash timings",
    "buffered": "buffered reads, not flash timings: the page cache may have answered",
    None: "direct or buffered reads, unknown which: flash timings only if direct",
}
"""What the read times are times of; buffered reads may not have touched the flash at all."""


def _plain(value: Any) -> Any:
    """Named tuples by name."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def foretold_json(f: Foretold) -> dict[str, Any]:
    """A cell foretold."""
    spread = _fields(f.spread) if f.spread is not None else None
    return _plain(_fields(f) | {"numbers": cell_to_json(f.numbers), "spread": spread})


def _live_json(check: LiveCheck) -> dict[str, Any]:
    from simlab.judge.speed.time_check_live import METHODS

    def run_json(run: Any) -> dict[str, Any]:
        return _fields(run) | {
            "from_trace": foretold_json(run.from_trace),
            "today": foretold_json(run.today),
            "live": cell_to_json(run.live),
            "constant": [interval._asdict() for interval in run.constant],
            "inside": {name: run.inside(i) for i, name in enumerate(METHODS)},
        }

    return {
        "counted_tokens": check.counted,
        "moments": _fields(check.moments),
        "kept": check.kept,
        "recorded_tok_s": check.recorded_tok_s,
        "reference_tok_s": list(check.reference_tok_s),
        "inert": list(check.inert),
        "runs": [run_json(run) for run in check.runs],
        "scored_runs": len(check.scored),
        "median_error": {METHODS[i]: check.median_error(bool(i)) for i in range(2)},
        "coverage": {
            name: _plain(check.cover(i)._asdict()) if check.scored else None for i, name in enumerate(METHODS)
        },
    }


def to_json(found: Found) -> dict[str, Any]:
    """All of it, as `--json` prints it."""
    timings, check = found.timings, found.check
    judged = [
        _fields(half) | {"scores": list(map(_fields, half.scores)), "parts": list(map(_fields, half.parts))}
        for half in check.judged
    ]
    of_trace = {
        "read_latencies": found.latencies.to_dicts() if found.latencies is not None else None,
        "cells": [foretold_json(f) for f in found.foretold],
        "moments": _fields(found.moments) if found.moments is not None else None,
        "check": _live_json(found.live) if found.live is not None else None,
    }
    return _plain(
        {
            "source": found.path,
            "tokens": timings.n,
            "tokens_left_out": timings.left_out,
            "composition": timings.composition,
            "io_mode": found.io_mode,
            "flash_timings": {"direct": True, "buffered": False}.get(found.io_mode or ""),
            "bytes_vary": timings.bytes_vary,
            "tok_s": 1e3 / check.mean_ms,
        }
        | _fields(check)
        | {"model": _fields(check.model), "judged": judged}
        | of_trace
    )


def report(found: Found) -> str:
    """All of it for reading."""
    timings, check = found.timings, found.check
    model = check.model
    unusable = f" ({timings.left_out} without a usable time left out)" if timings.left_out else ""
    lines = [
        f"{found.path}: {timings.n:,} token{'s' * (timings.n != 1)}{unusable}, {_ms(check.mean_ms)} ms each, "
        f"{1e3 / check.mean_ms:.3f} tokens/s; {timings.composition} reads; {READS_OF[found.io_mode]}",
        "",
        align([["part of the token time", "ms/token", "%", "fitted, ms"], *_part_lines(check, timings)]),
        "",
        f"The bound: {check.bound}. Without any read a token would take {_ms(check.without_reads_ms)} ms, "
        f"{1e3 / check.without_reads_ms:.3f} tokens/s"
        + (", outside what was measured." if timings.read_mib.min() > 0 else "."),
        f"In a going run {100 * model.carry:.0f} % of the error of the last tokens (memory {model.memory_tokens:g}) "
        "is carried to the next.",
    ]
    if not timings.bytes_vary:
        lines.append(
            "Every token read the same bytes: time per MiB is taken as time over bytes, and cannot be checked."
        )
    if not check.judged:
        lines.append("Too few tokens to leave a half out; nothing says how far this can be trusted.")
    for half in check.judged:
        lines += ["", _half(half, check.block)]
    if check.judged:
        lines += ["", _LEGEND]
    if found.latencies is not None and found.latencies.height:
        lines += ["", *_latency_lines(found.latencies, found.io_mode)]
    if found.foretold:
        lines += ["", *foretold_lines(found.foretold, moments=found.moments)]
    if found.live is not None:
        lines += ["", *_live_lines(found.live)]
    return "\n".join(lines)


_LEGEND = (
    "[95 % block-bootstrap intervals]. Mean, RMSE, MAE: fitted by least squares; typical MAE: by least absolute\n"
    "errors; saves: share of that row's squared error, and of its typical absolute error, that the model saves.\n"
    "Bytes and place in the run are all that a prediction knows of its token; in a going run it also knows the wall\n"
    "times of the tokens before it."
)


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _latency_lines(latencies: pl.DataFrame, io_mode: str | None) -> list[str]:
    """Latency by size and company, for the sizes read most."""
    import polars as pl

    by_size = latencies.group_by("window_bytes").agg(pl.col("reads").sum()).sort("reads", descending=True)
    shown = latencies.filter(
        pl.col("window_bytes").is_in(by_size["window_bytes"].head(_SIZES_SHOWN).to_list())
    )
    rest = (
        f"; the {_SIZES_SHOWN} commonest of {by_size.height} sizes" if by_size.height > _SIZES_SHOWN else ""
    )
    what = "not flash timings" if io_mode == "buffered" else "decode"
    columns = ("p10_us", "median_us", "p90_us", "mib_s")
    table = [["bytes", "under way", "reads", "p10 us", "median us", "p90 us", "MiB/s"]]
    for row in shown.iter_rows(named=True):
        counts = [str(row[name]) for name in ("window_bytes", "under_way", "reads")]
        table.append(counts + [f"{row[name]:.0f}" for name in columns])
    return [f"Read latency by size and reads under way at its start, {what}{rest}:", align(table)]


def _within(value: float, interval: Interval, digits: int) -> str:
    return f"{value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


_HERE = (
    "Cells foretold (decode, simulated), on this machine at another moment [95 % intervals]; ms per token:"
)


def _moments_line(moments: Moments) -> str:
    return f"In the intervals from the trace: {moments.words()}."


def foretold_lines(
    foretold: Sequence[Foretold], what: str = _HERE, moments: Moments | None = None
) -> list[str]:
    """Cells foretold, as a table under `what`, and what has to be known of it.

    Args:
        moments: how far the machine's speed is known to move, where that is in the intervals.
    """
    table = [["source", "route", "evict", "budget MiB", "MiB/token", "tokens/s", "read wait ms/token",
              "management", "of it policy", "bound"]]  # fmt: skip
    for f in foretold:
        per_token = f.numbers.decode.read_mib_per_token
        table.append(
            [
                "replay (simulated)",
                *cell_words(f.numbers),
                "-" if per_token is None else f"{per_token:.2f}",
                _within(f.tok_s, f.tok_s_interval, 3),
                _within(f.read_wait_ms, f.read_wait_interval, 2),
                f"{f.management_ms:.2f}",
                "-" if f.policy_ms is None else f"{f.policy_ms:.2f}",
                f.bound,
            ]
        )
    if any(f.spread is None for f in foretold):
        what = (
            "Cells foretold (decode, simulated) from bytes alone, as the trace has no time of every read; intervals\n"
            "are what chance does to the mean of a run this long, not what a policy changes beside the bytes:"
        )
    lines = [what, align(table)]
    if moments is not None and all(f.spread is not None for f in foretold):
        lines.append(_moments_line(moments))
    if any(f.policy_ms is None for f in foretold):
        lines.append("The policies' own time is not known here; the recorded one's is in the management.")
    return lines


def _live_lines(check: LiveCheck) -> list[str]:
    """Foretold speeds beside live ones, and what came of them."""
    from simlab.judge.speed.time_check_live import METHODS
    from simlab.judge.stats import LEVEL

    def parts(f: Foretold, live: dict[str, float]) -> str:
        told = {"compute": f.compute_ms, "management": f.management_ms, "reads": f.read_wait_ms}
        return " ".join(f"{told[name]:.2f}/{live[name]:.2f}" for name in live)

    table = [["group", "route", "evict", "budget MiB", "from the trace (simulated)", "in",
              "at today's speed (simulated)", "live", "error %", "in", "compute, management, reads",
              "bound"]]  # fmt: skip
    for run in check.runs:
        inert = check.inert[run.cell]
        yes = ["-" if inert else "yes" if run.inside(i) else "no" for i in range(2)]
        table.append(
            [
                str(run.group),
                *cell_words(run.today.numbers),
                _within(run.from_trace.tok_s, run.from_trace.tok_s_interval, 1),
                yes[0],
                _within(run.today.tok_s, run.today.tok_s_interval, 1),
                f"{run.live_tok_s:.1f}",
                inert or f"{100 * (run.today.tok_s / run.live_tok_s - 1):+.1f}",
                yes[1],
                parts(run.today, run.live_parts_ms),
                run.today.bound,
            ]
        )
    loads = [run.machine["load"] for run in check.runs if run.machine["load"] is not None]
    slowest, fastest = min(check.reference_tok_s), max(check.reference_tok_s)
    lines = [
        f"Foretold and live, tokens/s over {check.counted} decode tokens [{100 * LEVEL:.0f} % intervals]; parts in ms, "
        "foretold at today's speed / live:",
        align(table),
        f"The recorded cell: {check.recorded_tok_s:.1f} tokens/s in the trace, {slowest:.1f} to {fastest:.1f} in its "
        f"{len(check.reference_tok_s)} live runs"
        + (f"; load {min(loads):.1f} to {max(loads):.1f}." if loads else "."),
        _moments_line(check.moments),
        *(["This check is kept and counts for predictions from now on."] if check.kept else []),
    ]
    if not check.scored:
        return [*lines, "No cell is scored: all are the recorded one or inert."]
    summary = [["prediction", "median error %", "inside", "share inside %", "mean width", "interval score"]]
    for i, name in enumerate(METHODS):
        cover = check.cover(i)
        low, high = (100 * end for end in cover.share)
        summary.append(
            [
                name,
                f"{100 * check.median_error(bool(i % 2)):.1f}",
                f"{cover.held} of {cover.n}",
                f"{100 * cover.held / cover.n:.0f} [{low:.0f}, {high:.0f}]",
                f"{cover.mean_width:.1f}",
                f"{cover.mean_score:.1f}",
            ]
        )
    return [
        *lines,
        "",
        "Over the live runs of cells that are not inert; widths and mean interval scores in tokens/s, smaller is "
        "better.\nOne width: from what the predictions of the other cells were off.",
        align(summary),
    ]


def _part_lines(check: TimeCheck, timings: Timings) -> list[list[str]]:
    model, names = check.model, check.mean_parts

    def line(offset: float, slope: float) -> str:
        return f"{offset:.2f} + {slope:.4f} per MiB"

    read = line(*model.exposed)
    if model.exposed.offset < 0 < model.exposed.slope:
        read += f" above {-model.exposed.offset / model.exposed.slope:.0f} MiB, which hide behind compute"
    warm = f" + {model.warm_up:.1f} at first, over {model.warm_up_tokens:g} tokens" if model.warm_up else ""
    if timings.faults is None:
        faults = "not measured"
    else:
        faults = f"{model.fault_ms:.4f} per fault" if timings.faults.any() else "no faults"
    fitted = {
        "compute": line(*model.compute) + warm,
        "page_faults": faults,
        "management": line(*model.management) if timings.management_ms is not None else "not measured, in compute",
        "exposed_read": read,
    }  # fmt: skip
    total = sum(names.values())
    return [
        [name.replace("_", " "), f"{ms:.2f}", f"{100 * ms / total if total else 0:.1f}", fitted[name]]
        for name, ms in names.items()
    ]


def _half(half: Judged, block: int) -> str:
    """The errors on one half for reading."""

    def within(interval: Interval, form: str, scale: float = 1) -> str:
        return f"[{scale * interval.low:{form}}, {scale * interval.high:{form}}]"

    lines = [["predictor", "mean ms", "mean error %", "RMSE ms", "MAE ms", "typical MAE ms",
              "model saves MSE %", "model saves MAE %"]]  # fmt: skip
    form = ".0f" if half.mean_ms >= 100 else ".2f"
    for s in half.scores:
        saves = [
            f"{100 * share:.1f} {within(interval, '.1f', 100)}"
            for share, interval in (
                (s.model_saves_mse, s.model_saves_mse_interval),
                (s.model_saves_mae, s.model_saves_mae_interval),
            )
        ]
        lines.append(
            [
                s.predictor,
                _ms(s.mean_ms),
                f"{100 * s.mean_error:+.2f} {within(s.mean_error_interval, '+.1f', 100)}",
                f"{_ms(s.rmse_ms)} {within(s.rmse_interval, form)}",
                f"{_ms(s.mae_ms)} {within(s.mae_interval, form)}",
                f"{_ms(s.typical_mae_ms)} {within(s.typical_mae_interval, form)}",
                *(saves if s.predictor != "model" else ["-", "-"]),
            ]
        )
    parts = "; ".join(
        f"{p.part.replace('_', ' ')} {_ms(p.predicted_ms)} of {_ms(p.measured_ms)} (MAE {_ms(p.mae_ms)})"
        for p in half.parts
    )
    where = f"{half.left_out} of {block} tokens" if half.left_out.endswith("blocks") else half.left_out
    return (
        f"{where} left out: {half.tokens:,} tokens, {_ms(half.mean_ms)} ms each\n{align(lines)}\n"
        f"parts, ms predicted of measured: {parts}"
    )
