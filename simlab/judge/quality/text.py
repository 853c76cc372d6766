"""A quality law and its verdicts for reading and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from simlab.charts.words import route_label
from simlab.cli.output import align
from simlab.judge.quality.check import JudgedRun, Perfect, Verdict, level, verdict
from simlab.judge.quality.law import LEVEL
from simlab.judge.quality.runs import Quality, is_margin

_LEGEND = (
    "Errors are in standard errors of the live difference, which is itself known no better: with a perfect law the\n"
    "median would be 0.67 and the 90th percentile 1.64. bias: median of foretold minus live, in the same unit. held:\n"
    f"share of the {LEVEL:.0%} intervals that hold the live difference, with Wilson's 95 % interval. score: mean\n"
    "interval score in nats, smaller is better. Texts judged were never fitted on."
)


_SETS: dict[str, Callable[[JudgedRun], bool]] = {
    "margins": lambda run: is_margin(run.cell),
    "margins left out": lambda run: is_margin(run.cell) and not run.calibrated,
    "other policies": lambda run: not is_margin(run.cell),
}
"""Sets of runs that verdicts are given for."""
_BUDGET = "budgets left out"


def verdicts(found: Quality, apart: Sequence[JudgedRun]) -> list[tuple[str, Verdict]]:
    """What became of every form on every set of runs that there is, best 90th percentile first."""
    sets = {name: [run for run in found.judged if chosen(run)] for name, chosen in _SETS.items()}
    sets[_BUDGET] = [run for run in apart if is_margin(run.cell)]
    told = []
    for name, runs in sets.items():
        forms = dict.fromkeys(run.form for run in runs)
        of_set = [verdict([run for run in runs if run.form == form]) for form in forms]
        told += [(name, v) for v in sorted(of_set, key=lambda v: v.percentile_90)]
    return told


def quality_text(found: Quality, apart: Sequence[JudgedRun]) -> str:
    """The law, the verdicts on every form, and every run beside what the law's form foretold of it."""
    model = found.model
    terms = " + ".join(f"{value:.4g} x {name}" for name, value in model.coefficients.items())
    parts = [
        f"law, simulated: {model.form}, nats per token = {terms}\n"
        f"fitted on {model.calibrated_on} live runs; its own error is {100 * model.relative_spread:.0f} % of the rise"
    ]
    if found.judged:
        kept = [run for run in found.judged if run.form == model.form]
        parts.append(_verdict_table(verdicts(found, apart)) + "\n" + _LEGEND)
        parts.append(_text_table(kept, found.perfect))
        parts.append(_run_table(kept))
    else:
        parts.append("one text leaves none to judge on: give two or more")
    return "\n\n".join(parts)


def _verdict_table(told: Sequence[tuple[str, Verdict]]) -> str:
    lines = [["judged on", "form", "runs", "median", "90th percentile", "bias", "held %", "95 %", "score"]]
    for name, v in told:
        share = v.held.share
        lines.append(
            [
                name,
                v.form,
                str(v.runs),
                f"{v.median:.2f}",
                f"{v.percentile_90:.2f}",
                f"{v.bias:+.2f}",
                f"{100 * v.held.held / v.held.n:.0f}",
                f"{100 * share.low:.0f} to {100 * share.high:.0f}",
                f"{v.held.mean_score:.4f}",
            ]
        )
    return align(lines)


def _by_text(kept: Sequence[JudgedRun]) -> list[tuple[str, Verdict, float]]:
    """Of the margins of each text: verdict, and live rises as a share of what was foretold."""
    margins = [run for run in kept if is_margin(run.cell)]
    texts = {
        name: [run for run in margins if run.text == name] for name in dict.fromkeys(r.text for r in margins)
    }
    return [(name, verdict(runs), level(runs)) for name, runs in texts.items()]


def _text_table(kept: Sequence[JudgedRun], best: Perfect | None) -> str:
    lines = [["margins of", "runs", "median", "90th percentile", "bias", "held %", "live / foretold"]]
    for name, v, share in _by_text(kept):
        lines.append(
            [
                name,
                str(v.runs),
                f"{v.median:.2f}",
                f"{v.percentile_90:.2f}",
                f"{v.bias:+.2f}",
                f"{100 * v.held.held / v.held.n:.0f}",
                f"{share:.2f}",
            ]
        )
    said = align(lines)
    if best is not None:
        a, b = best.median_interval, best.percentile_90_interval
        said += (
            f"\nif the law were true: median {best.median:.2f} [{a.low:.2f}, {a.high:.2f}], 90th percentile "
            f"{best.percentile_90:.2f} [{b.low:.2f}, {b.high:.2f}], fitted on as many texts (simulated)"
        )
    return said


def _run_table(judged: Sequence[JudgedRun]) -> str:
    lines = [["text", "budget", "route", "fitted on", "live nats", "standard error", "foretold (simulated)",
              f"{LEVEL:.0%} interval", "held"]]  # fmt: skip
    for run in judged:
        lines.append(
            [
                run.text,
                run.cell.budget.text,
                route_label(run.cell),
                "other texts" if run.calibrated else "never",
                f"{run.delta_nll:+.4f}",
                f"{run.standard_error:.4f}",
                f"{run.predicted:+.4f}",
                f"{run.low:+.4f} to {run.high:+.4f}",
                "yes" if run.low <= run.delta_nll <= run.high else "no",
            ]
        )
    return align(lines)


def quality_json(found: Quality, apart: Sequence[JudgedRun]) -> dict[str, Any]:
    """The law, the verdicts and every judged run as JSON values."""

    def of_run(run: JudgedRun) -> dict[str, Any]:
        said = {
            "route": run.cell.route.name,
            "knobs": dict(run.cell.route.knobs),
            "budget": run.cell.budget.text,
        }
        return said | {name: value for name, value in vars(run).items() if name != "cell"}

    def of_verdict(name: str, v: Verdict) -> dict[str, Any]:
        return {
            "judged_on": name, "form": v.form, "runs": v.runs, "median": v.median,
            "percentile_90": v.percentile_90, "bias": v.bias, "held": v.held.held,
            "held_interval": list(v.held.share), "mean_interval_score": v.held.mean_score,
        }  # fmt: skip

    return {
        "law": asdict(found.model),
        "verdicts": [of_verdict(name, v) for name, v in verdicts(found, apart)],
        "by_text": [
            {**of_verdict("margins", v), "text": name, "live_by_foretold": share}
            for name, v, share in _by_text([run for run in found.judged if run.form == found.model.form])
        ],
        "if_true": found.perfect._asdict() if found.perfect is not None else None,
        "runs": [of_run(run) for run in found.judged],
        "budgets_left_out": [of_run(run) for run in apart],
    }
