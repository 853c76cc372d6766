"""Charts of the LRU curve and of what a cell's misses are made of, and the pages that carry them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from simlab.cells import MIB
from simlab.judge.charts import REPLAY_LABEL, AnyChart, alt, figure, page, size_text
from simlab.judge.explain import Explanation
from simlab.judge.explain_text import Section, sections, subtitle
from simlab.trace.store import Trace
from simlab.types import Scope, TraceHeader

_WIDTH, _HEIGHT = 430, 290
_POINTS = 2 * _WIDTH
"""Steps drawn at most: two for each pixel; the JSON has all of them."""
_BLUE, _ORANGE, _GREY, _GREEN = "#3d83d9", "#dd8a1e", "#8a929c", "#1c9e78"
_KINDS = {"cold": _GREY, "policy": _ORANGE, "budget": _BLUE}
_KIND_WORDS = {
    "cold": "cold: first use",
    "policy": "policy: Belady hits it",
    "budget": "budget: Belady misses it too",
}
_CYCLES = "Cache budget (token cycles)"


def curve_chart(curve: pl.DataFrame, header: TraceHeader, scope: Scope) -> alt.HConcatChart:
    """Decode hit rate (%) and MiB read per decode token against the budget, in steps."""
    rows = _drawn(curve)
    where = f"{REPLAY_LABEL}, LRU, {scope.replace('_', ' ')}, the router's own routing"
    panels = [
        _steps(rows, "hit", "Decode hit rate (% of lookups)").properties(width=_WIDTH, height=_HEIGHT),
        _steps(rows, "read", "Read from flash (MiB per decode token)").properties(
            width=_WIDTH, height=_HEIGHT
        ),
    ]
    title = alt.Title(f"LRU at every budget, {header.model}", subtitle=where)
    return alt.hconcat(*panels, spacing=32).properties(title=title)


def explain_chart(explanation: Explanation) -> alt.HConcatChart:
    """Left: where the budget stands on the LRU curve, and Belady there. Right: misses by kind along the decode."""
    e = explanation
    cycles = e.budget.total_bytes / e.header.cycle_bytes()  # the curve's own, whatever k the cell runs
    points = [
        {"cycles": cycles, "hit": 100 * rate.value, "what": what}
        for what, rate in (("this cell", e.decode.hit_rate), ("Belady", e.decode.optimum_hit_rate))
    ]
    x, y = _x(), alt.Y("hit:Q").title("Decode hit rate (% of lookups)").scale(zero=True)
    colour = alt.Color("what:N").scale(domain=["this cell", "Belady"], range=[_BLUE, _ORANGE]).legend(None)
    tooltip = [
        alt.Tooltip("what:N", title="Eviction"),
        alt.Tooltip("hit:Q", title="Decode hit rate (%)", format=".1f"),
        alt.Tooltip("cycles:Q", title="Budget (cycles)", format=".3~r"),
    ]
    data = alt.Chart(_data(points))
    marks = data.mark_circle(size=110, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip)
    names = data.mark_text(align="left", dx=9, dy=-8).encode(x=x, y=y, text="what:N", color=colour)
    curve = _steps(_drawn(e.curve), "hit", "Decode hit rate (% of lookups)")
    left = alt.LayerChart(layer=[*curve.layer, marks, names]).properties(
        width=_WIDTH,
        height=_HEIGHT,
        title=alt.Title("Where this budget stands", subtitle="line: LRU with the router's own routing"),
    )
    return (
        alt.hconcat(left, _along(e), spacing=32)
        .resolve_scale(color="independent")
        .properties(title=alt.Title(e.verdict.kind.capitalize(), subtitle=f"{REPLAY_LABEL}; {subtitle(e)}"))
    )


def _along(e: Explanation) -> alt.Chart:
    rows = []
    for row in e.windows.iter_rows(named=True):
        top = 0.0
        for kind, words in _KIND_WORDS.items():
            misses = row[kind] / row["tokens"]
            rows.append(
                {
                    "from": row["window"],
                    "to": row["window"] + row["tokens"],
                    "kind": words,
                    "low": top,
                    "high": top + misses,
                    "misses": misses,
                }
            )
            top += misses
    colour = (
        alt.Color("kind:N")
        .scale(domain=list(_KIND_WORDS.values()), range=[_KINDS[kind] for kind in _KIND_WORDS])
        .legend(alt.Legend(title=None, orient="top", labelLimit=240))
    )
    return (
        alt.Chart(_data(rows))
        .mark_rect()
        .encode(
            x=alt.X("from:Q").title("Decode token").scale(nice=False),
            x2="to:Q",
            y=alt.Y("low:Q").title("Misses per token").scale(zero=True),
            y2="high:Q",
            color=colour,
            tooltip=[
                alt.Tooltip("kind:N", title="Misses"),
                alt.Tooltip("misses:Q", title="Per token", format=".2f"),
                alt.Tooltip("from:Q", title="From token"),
            ],
        )
        .properties(width=_WIDTH, height=_HEIGHT, title="What the misses are made of")
    )


def _drawn(curve: pl.DataFrame) -> list[dict[str, Any]]:
    """The steps worth a pixel, from a budget of next to nothing to a little beyond the last."""
    budgets = curve["budget_cycles"].to_numpy()
    wanted = np.linspace(budgets[0], budgets[-1], _POINTS)
    places = np.unique(np.searchsorted(budgets, wanted, side="right") - 1)
    hit, read = (curve[f"decode_{name}"].to_list() for name in ("hit_rate", "read_mib_per_token"))
    rows = [
        {"cycles": float(budgets[i]), "hit": None if hit[i] is None else 100 * hit[i], "read": read[i]}
        for i in places
    ]
    return [*rows, rows[-1] | {"cycles": 1.05 * float(budgets[-1])}]


def _x() -> alt.X:
    return alt.X("cycles:Q").title(_CYCLES).scale(zero=True)


def _steps(rows: Sequence[Mapping[str, Any]], field: str, title: str) -> alt.LayerChart:
    x, y = _x(), alt.Y(f"{field}:Q").title(title).scale(zero=True)
    tooltip = [
        alt.Tooltip("cycles:Q", title="From this budget (cycles)", format=".4~r"),
        alt.Tooltip("hit:Q", title="Decode hit rate (%)", format=".2f"),
        alt.Tooltip("read:Q", title="MiB per token", format=".4~r"),
    ]
    data = alt.Chart(_data(rows))
    line = data.mark_line(interpolate="step-after", strokeWidth=2, color=_GREEN).encode(x=x, y=y)
    hover = data.mark_circle(size=30, opacity=0).encode(x=x, y=y, tooltip=tooltip)
    cycle = (
        alt.Chart(_data([{"cycles": 1.0}]))
        .mark_rule(strokeDash=[4, 4], color=_GREY)
        .encode(x=x, tooltip=alt.value("one token cycle"))
    )
    return alt.LayerChart(layer=[cycle, line, hover])


def _data(rows: Sequence[Mapping[str, Any]]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])


# ---------------------------------------------------------------------------------------------------------
# Pages


def write_curve_page(path: Path, curve: pl.DataFrame, trace: Trace, scope: Scope) -> None:
    """Write one offline page with the LRU curve.

    Raises:
        OSError: the file cannot be written.
    """
    header = trace.header
    about = (
        f"{header.model}: {len(header.moe_layers)} MoE layers of {header.n_expert} experts, "
        f"{header.n_expert_used} per token; one token cycle is {size_text(header.cycle_bytes() / MIB)} MiB "
        f"(dashed). Every number on this page is {REPLAY_LABEL}, and exact for every budget."
    )
    charts: dict[str, AnyChart] = {"curve": curve_chart(curve, header, scope)}
    body = (
        f'<h1>LRU curve</h1><p class="lead">{html.escape(about)}</p>'
        + figure("curve", "An LRU cache at every size, decode; the first steps are a budget of a few bytes.")
    )  # fmt: skip
    path.write_text(page(f"simlab curve: {header.model}", body, charts), "utf-8")


def write_explain_page(path: Path, explanation: Explanation) -> None:
    """Write one offline page: the verdict, what it rests on, one chart, the tables.

    Raises:
        OSError: the file cannot be written.
    """
    e = explanation
    because = "".join(f"<span>{html.escape(line)}</span>" for line in e.verdict.because)
    body = [
        f"<h1>{html.escape(e.header.model)}</h1>",
        f'<p class="lead">{html.escape(subtitle(e))}. Every cache figure is {REPLAY_LABEL}.</p>',
        f'<p class="verdict"><strong>{html.escape(e.verdict.sentence)}</strong>{because}</p>',
    ]
    charts: dict[str, AnyChart] = {}
    if e.decode.counts["lookups"]:
        charts["explain"] = explain_chart(e)
        body.append(figure("explain", "Decode only. Bars that are mostly grey or blue: no eviction helps."))
    body += [_html(section) for section in sections(e)]
    path.write_text(page(f"simlab explain: {e.header.model}", "\n".join(body), charts), "utf-8")


def _html(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in section.lines]
    if section.table:
        head, *rows = section.table
        cells = "".join(f'<th scope="col">{html.escape(word)}</th>' for word in head)
        body = "".join(
            "<tr>" + "".join(_cell(i, word) for i, word in enumerate(row)) + "</tr>" for row in rows
        )
        parts.append(
            f'<div class="scroll"><table class="compact"><thead><tr>{cells}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
    return f"<section>{''.join(parts)}</section>"


def _cell(place: int, word: str) -> str:
    kind = ' class="word"' if place == 0 else ""
    return f"<td{kind}>{html.escape(word)}</td>"
