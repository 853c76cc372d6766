"""`time`: the time of a token, fitted on what an engine measured, and how far that can be trusted."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simlab.cli.options import add_json
from simlab.cli.output import align, print_json

if TYPE_CHECKING:
    from simlab.judge.stats import Interval
    from simlab.judge.time_check import Judged, TimeCheck
    from simlab.judge.token_time import Timings
    from simlab.trace.bmoe_metrics import MetricsFile


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "time",
        help="what a token's time is made of, and how well it is predicted",
        description="Fit token time = compute + page faults + management + exposed reads on a bmoe_metrics file, "
        "from each token's bytes and its place in the run, and judge it on halves of the tokens left out.",
    )
    parser.add_argument("metrics", metavar="METRICS.csv", help="a bmoe_metrics file")
    add_json(parser)
    parser.set_defaults(run=_time)


def _time(args: argparse.Namespace) -> None:
    from simlab.judge.time_check import check_time
    from simlab.judge.token_time import timings_of
    from simlab.trace.bmoe_metrics import read_metrics

    metrics = read_metrics(Path(args.metrics))
    timings = timings_of(metrics)
    check = check_time(timings)
    if args.json:
        print_json(_to_json(metrics, timings, check))
    else:
        print(_text(metrics, timings, check))


def _reads_of(metrics: MetricsFile) -> str:
    """What the read times are times of; buffered reads may not have touched the flash at all."""
    return {
        "direct": "direct reads, flash timings",
        "buffered": "buffered reads, not flash timings: the page cache may have answered",
        None: "direct or buffered reads, the file does not say: flash timings only if direct",
    }[metrics.io_mode]


def _to_json(metrics: MetricsFile, timings: Timings, check: TimeCheck) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        """Named tuples by name."""
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if hasattr(value, "_asdict"):
            return value._asdict()
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    def fields(value: Any) -> dict[str, Any]:
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

    judged = [
        fields(half) | {"scores": list(map(fields, half.scores)), "parts": list(map(fields, half.parts))}
        for half in check.judged
    ]
    found = fields(check) | {"model": fields(check.model), "judged": judged}
    return plain(
        {
            "metrics": str(metrics.path),
            "tokens": timings.n,
            "tokens_left_out": timings.left_out,
            "composition": timings.composition,
            "io_mode": metrics.io_mode,
            "bytes_vary": timings.bytes_vary,
            "tok_s": 1e3 / check.mean_ms,
        }
        | found
    )


def _text(metrics: MetricsFile, timings: Timings, check: TimeCheck) -> str:
    model = check.model
    unusable = f" ({timings.left_out} without a usable time left out)" if timings.left_out else ""
    lines = [
        f"{metrics.path}: {timings.n:,} tokens{unusable}, {check.mean_ms:.1f} ms each, "
        f"{1e3 / check.mean_ms:.3f} tokens/s; {timings.composition} reads; {_reads_of(metrics)}",
        "",
        align([["part of the token time", "ms/token", "%", "fitted, ms"], *_part_lines(check, timings)]),
        "",
        f"The bound: {check.bound}. Without any read a token would take {check.without_reads_ms:.1f} ms, "
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
    return "\n".join(lines)


_LEGEND = (
    "[95 % block-bootstrap intervals]. Mean, RMSE, MAE: fitted by least squares; typical MAE: by least absolute\n"
    "errors; saves: share of that row's squared error, and of its typical absolute error, that the model saves.\n"
    "Bytes and place in the run are all that a prediction knows of its token; in a going run it also knows the wall\n"
    "times of the tokens before it."
)


def _part_lines(check: TimeCheck, timings: Timings) -> list[list[str]]:
    model, names = check.model, check.mean_parts

    def line(offset: float, slope: float) -> str:
        return f"{offset:.2f} + {slope:.4f} per MiB"

    read = line(*model.exposed)
    if model.exposed.offset < 0 < model.exposed.slope:
        read += f" above {-model.exposed.offset / model.exposed.slope:.0f} MiB, which hide behind compute"
    warm = f" + {model.warm_up:.1f} at first, over {model.warm_up_tokens:g} tokens" if model.warm_up else ""
    fitted = {
        "compute": line(*model.compute) + warm,
        "page_faults": f"{model.fault_ms:.4f} per fault" if timings.faults is not None else "not measured",
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
                f"{s.mean_ms:.1f}",
                f"{100 * s.mean_error:+.2f} {within(s.mean_error_interval, '+.1f', 100)}",
                f"{s.rmse_ms:.1f} {within(s.rmse_interval, '.0f')}",
                f"{s.mae_ms:.1f} {within(s.mae_interval, '.0f')}",
                f"{s.typical_mae_ms:.1f} {within(s.typical_mae_interval, '.0f')}",
                *(saves if s.predictor != "model" else ["-", "-"]),
            ]
        )
    parts = "; ".join(
        f"{p.part.replace('_', ' ')} {p.predicted_ms:.1f} of {p.measured_ms:.1f} (MAE {p.mae_ms:.1f})"
        for p in half.parts
    )
    where = f"{half.left_out} of {block} tokens" if half.left_out.endswith("blocks") else half.left_out
    return (
        f"{where} left out: {half.tokens:,} tokens, {half.mean_ms:.1f} ms each\n{align(lines)}\n"
        f"parts, ms predicted of measured: {parts}"
    )
