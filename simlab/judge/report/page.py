"""The report: what was run, what replay said, what the live engine measured, in one offline HTML file.

Every number stands beside its source, "replay (simulated)" or "live (measured)", because the two answer
different questions: a replay knows what a cache would have read, and nothing of speed or of quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import polars as pl

from simlab.cells import MIB
from simlab.charts.anatomy import curve_chart, explain_chart
from simlab.charts.live import comparison_chart, measured_both, pareto_chart
from simlab.charts.pages import CAPTIONS, figure, page
from simlab.charts.sweeps import sweep_charts
from simlab.charts.theme import AnyChart
from simlab.charts.words import LIVE_LABEL, REPLAY_LABEL, model_name, size_text, source_label
from simlab.cli.output import write_whole
from simlab.judge.misses.explain import Explanation
from simlab.judge.misses.explain_text import Section, sections
from simlab.judge.report.tables import (
    DAGGER,
    WIDE_MARGIN,
    bullets,
    comparison_table,
    facts_list,
    same_cells_table,
    section,
    side_by_side,
    sweep_table,
    table,
)
from simlab.judge.report.verdict import (
    DASH,
    Chosen,
    Verdict,
    live_verdict,
    percent_text,
    sweep_verdict,
    trace_verdict,
)
from simlab.judge.stats import Interval
from simlab.replay.curve import at_budget, landmarks
from simlab.trace.measured import Measured, measured_text
from simlab.types import CellNumbers, Comparison, Scope, TraceHeader

_SHARED_CYCLES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Budgets at which the curves of several traces are set side by side."""
_CAVEATS = (
    f"{REPLAY_LABEL}: the recorded scores are replayed while cache and routing follow each cell. A changed "
    "routing would have changed later scores, and a replay does not see that; only live runs do.",
    f"{LIVE_LABEL}: speed and perplexity exist for live runs only. A hit rate is not a throughput.",
    "One text, one machine, one run of each cell: differences of a few per cent may be chance. Intervals say how far a "
    "figure moves along this text.",
    "A traced run is not a benchmark run: recording costs time. Take tokens/s here as a hint and measure "
    "speed with untraced runs in interleaved order.",
    f"{DAGGER} Margins of {WIDE_MARGIN:.2f} and more: replies will read well while the model behind them is "
    "worse. Judge by perplexity and tasks, never by reading.",
)


@dataclass(frozen=True)
class TraceReport:
    """What is to be told of one trace; everything but the first three may be left out."""

    name: str
    """What the reader knows it by, its path."""
    header: TraceHeader
    tokens: Mapping[str, int]
    """Evaluated tokens: "prefill" and "decode"."""
    measured: Measured | None = None
    """Figures of the recording itself."""
    sweep: Sequence[CellNumbers] = ()
    chosen: Chosen | None = None
    """The cell the sweep speaks for (`simlab.judge.report.verdict.sweep_choice`), with intervals where known."""
    comparisons: Sequence[Comparison] = ()
    """Cells replayed and run live on the same token ids."""
    curve: pl.DataFrame | None = None
    """`simlab.lru_curve` in `curve_scope`."""
    curve_scope: Scope = "global"
    explanation: Explanation | None = None


def write_report(
    path: Path, traces: Sequence[TraceReport], *, commands: Sequence[str], notes: Sequence[str] = ()
) -> None:
    """Write the report by a temporary file and rename.

    Args:
        traces: one or more; more are set side by side.
        commands: what to type to repeat it, in order.
        notes: plain sentences shown before the caveats.

    Raises:
        RunError: the charts extra is missing, or the file cannot be written.
    """
    text = report_text(traces, commands=commands, notes=notes)
    write_whole(path, lambda temporary: temporary.write_text(text, "utf-8"))


def report_text(traces: Sequence[TraceReport], *, commands: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The page; as `write_report`."""
    title = model_name(traces[0].header.model) if len(traces) == 1 else f"{len(traces)} traces"
    charts: dict[str, AnyChart] = {}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_lead(traces))}</p>',
        *(_verdict_box(one, several=len(traces) > 1) for one in traces),
        section("What was run", _facts(traces)),
    ]
    for place, one in enumerate(traces):
        where = f", {one.name}" if len(traces) > 1 else ""
        key = f"-{place}" if place else ""
        if one.comparisons:
            parts.append(section(f"Replay beside live{where}", _comparisons(one, key, charts)))
        if one.sweep:
            parts.append(section(f"The sweep, {source_label(one.sweep)}{where}", _sweep(one, key, charts)))
    if shared := same_cells_table({one.name: one.sweep for one in traces if one.sweep} or {"": ()}):
        parts.append(section("The sweeps side by side", shared))
    if curves := _curves(traces, charts):
        parts.append(section(f"LRU at every budget, {REPLAY_LABEL}", curves))
    for place, one in enumerate(traces):
        if one.explanation is not None:
            where = f", {one.name}" if len(traces) > 1 else ""
            parts.append(
                section(f"Policy or working set?{where}", _explanation(one.explanation, f"-{place}", charts))
            )
    if notes:
        parts.append(section("Notes", bullets(notes)))
    parts.append(section("Before you believe it", bullets(_CAVEATS)))
    if commands:
        lines = escape("\n".join(commands))
        parts.append(section("To repeat it", f"<pre><code>{lines}</code></pre>"))
    return page(f"simlab report: {title}", "\n".join(parts), charts)


def _lead(traces: Sequence[TraceReport]) -> str:
    if any(one.comparisons for one in traces):
        return "Expert-cache policies: replay beside live runs"
    return f"Expert-cache policies. Cache figures are {REPLAY_LABEL}"


def verdict(one: TraceReport) -> Verdict:
    """The one sentence on a trace: from live runs, else from lossy cells of the sweep, else from the trace alone."""
    if (found := live_verdict(one.comparisons)) is not None:
        return found
    if one.chosen is None and one.explanation is not None:
        return trace_verdict(one.explanation)
    return sweep_verdict(one.sweep, one.chosen)


def _verdict_box(one: TraceReport, *, several: bool) -> str:
    sentence, how = verdict(one)
    name = f"<span>{escape(one.name)}</span>" if several else ""
    more = f"<span>{escape(how)}</span>" if how else ""
    return f'<p class="verdict">{name}<strong>{escape(sentence)}</strong>{more}</p>'


# ---------------------------------------------------------------------------------------------------------
# Sections


def _facts(traces: Sequence[TraceReport]) -> str:
    if len(traces) == 1:
        return facts_list({"Trace": traces[0].name} | _trace_facts(traces[0]))
    return side_by_side({one.name: _trace_facts(one) for one in traces})


def _trace_facts(one: TraceReport) -> dict[str, str | None]:
    header, tokens = one.header, one.tokens
    cycle = header.cycle_bytes()
    layers = len(header.moe_layers)
    experts = f"{header.n_expert} per MoE layer, {header.n_expert_used} per token"
    budget = None
    if header.budget_bytes == 0:
        budget = "no cache"
    elif header.budget_bytes is not None:
        budget = (
            f"{size_text(header.budget_bytes / MIB)} MiB ({header.budget_bytes / cycle:.3g} token cycles)"
        )
    knobs = ", ".join(f"{name} = {value:g}" for name, value in header.knobs.items())
    route = " ".join(filter(None, [header.route, knobs])) or (None if header.router_known else "unknown")
    ran = measured_text(one.measured) if one.measured is not None else ""
    return {
        "Model": f"{header.model} ({header.arch})",
        "Layers": f"{header.n_layer}, {'all' if layers == header.n_layer else layers} with experts",
        "Experts": f"{experts}; {size_text(header.expert_bytes / MIB)} MiB in all",
        "Token cycle": f"{size_text(cycle / MIB)} MiB: what one token asks for",
        "Tokens": f"{tokens['prefill']:,} prefill, {tokens['decode']:,} decode",
        "Recorded at": budget,
        "Recorded routing": route and f"{route}, evict {header.evict or '?'}",
        "The recorded run, decode": f"{ran}, {LIVE_LABEL}" if ran else None,
        "I/O mode": header.io_mode,
        "CPU": header.cpu,
        "Engine": " ".join(filter(None, [header.engine, header.engine_version])) or None,
        "Created": header.created,
        "Text (hash)": header.text_hash and header.text_hash[:16],
    }


def _comparisons(one: TraceReport, key: str, charts: dict[str, AnyChart]) -> str:
    charts[f"comparison{key}"] = comparison_chart(one.comparisons, _drawn_intervals(one.comparisons))
    figures = figure(f"comparison{key}", CAPTIONS["comparison"])
    lives = measured_both([c.live for c in one.comparisons])
    if len(lives) > 1:
        charts[f"pareto{key}"] = pareto_chart(lives)
        figures += figure(f"pareto{key}", CAPTIONS["pareto"])
    return comparison_table(one.comparisons) + figures


def _drawn_intervals(comparisons: Sequence[Comparison]) -> list[dict[str, Interval]]:
    """The live runs' intervals in the units of the chart."""
    scales = {"hit_rate": 100, "read_mib_per_token": 1, "substituted": 100}
    return [
        {
            name: Interval(*(scales[name] * end for end in ends))
            for name, ends in pair.live.intervals.items()
            if name in scales
        }
        for pair in comparisons
    ]


def _sweep(one: TraceReport, key: str, charts: dict[str, AnyChart]) -> str:
    found = sweep_charts(one.sweep, [c.replay for c in one.comparisons])
    charts |= {f"{name}{key}": chart for name, chart in found.items()}
    figures = "".join(figure(f"{name}{key}", CAPTIONS[name]) for name in found)
    return (f'<div class="figures">{figures}</div>' if figures else "") + sweep_table(one.sweep)


def _curves(traces: Sequence[TraceReport], charts: dict[str, AnyChart]) -> str:
    drawn = [(place, one) for place, one in enumerate(traces) if one.curve is not None]
    html = []
    for place, one in drawn:
        assert one.curve is not None
        name = f"curve-{place}"
        charts[name] = curve_chart(one.curve, one.header, one.curve_scope)
        html.append(figure(name, f"{one.name}: an LRU cache of every size, decode, exact."))
    if len(drawn) == 1:
        html.append(_landmarks(drawn[0][1]))
    elif drawn:
        html.append(_shared_budgets([one for _, one in drawn]))
    return "".join(html)


def _landmarks(one: TraceReport) -> str:
    assert one.curve is not None
    rows = []
    for mark in landmarks(one.curve, one.header, one.curve_scope):
        step = at_budget(one.curve, mark.budget_bytes)
        rate, read = step["decode_hit_rate"], step["decode_read_mib_per_token"]
        rows.append(
            [
                mark.what,
                f"{step['budget_cycles']:.3f}",
                f"{step['budget_mib']:,.2f}",
                percent_text(rate, 2),
                DASH if read is None else f"{read:,.2f}",
            ]
        )
    return table(["Budget", "Token cycles", "MiB", "Decode hit rate (%)", "MiB per token"], rows)


def _shared_budgets(traces: Sequence[TraceReport]) -> str:
    rows = []
    for cycles in _SHARED_CYCLES:
        steps = [
            at_budget(one.curve, int(cycles * one.header.cycle_bytes()))
            for one in traces
            if one.curve is not None
        ]
        rates = [percent_text(step["decode_hit_rate"], 2) for step in steps]
        rows.append([f"{cycles:g}", *rates])
    head = ["Token cycles", *(f"Decode hit rate (%), {one.name}" for one in traces)]
    return table(head, rows, words=0)


def _explanation(e: Explanation, key: str, charts: dict[str, AnyChart]) -> str:
    because = bullets([e.verdict.sentence, *e.verdict.because])
    html = [because]
    if e.decode.counts["lookups"]:
        charts[f"explain{key}"] = explain_chart(e)
        html.append(
            figure(f"explain{key}", "Decode only. Bars that are mostly grey or blue: no eviction helps.")
        )
    details = "".join(_details(part) for part in sections(e))
    html.append(f"<details><summary>All figures of simlab explain</summary>{details}</details>")
    return "".join(html)


def _details(part: Section) -> str:
    html = "".join(f"<p>{escape(line)}</p>" for line in part.lines)
    return section(part.title, html + (table(part.table[0], part.table[1:]) if part.table else ""))
