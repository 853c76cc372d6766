"""Charts of many cells: along margins, along budgets, by policy, and reads against what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simlab.charts.theme import (
    BLUE,
    CYCLES_TITLE,
    GREY,
    HEIGHT,
    MARGIN_TITLE,
    MASS_TITLE,
    MISS_TITLE,
    READ_TITLE,
    AnyChart,
    alt,
    by_size,
    data,
    end_labels,
    finished,
    layered,
    merge_close,
    thinned,
)
from simlab.charts.words import (
    budget_label,
    margin_of,
    percent,
    policy_label,
    prices,
    route_label,
    series_labels,
    source_label,
    substituted_percent,
)
from simlab.types import CellNumbers, Comparison

_MOST_LINES = 12
"""Lines that can be told apart and named at their ends."""
_MOST_POLICIES = 40
_POLICY_PX = 20

_BUDGETS = alt.Legend(title=None, symbolOpacity=1, labelLimit=200, orient="top", columns=2)
_TOOLTIP = [
    alt.Tooltip("budget:N", title="Budget"),
    alt.Tooltip("route:N", title="Routing"),
    alt.Tooltip("evict:N", title="Eviction"),
    alt.Tooltip("miss:Q", title="Decode miss rate (%)", format=".1f"),
    alt.Tooltip("read:Q", title="MiB per token", format=".4~r"),
    alt.Tooltip("substituted:Q", title="Slots substituted (%)", format=".1f"),
    alt.Tooltip("mass:Q", title="Mass displaced (%)", format=".2f"),
]


def _row(numbers: CellNumbers, series: str) -> dict[str, Any]:
    d = numbers.decode
    return {
        "series": series,
        "budget": budget_label(numbers),
        "route": route_label(numbers.cell),
        "evict": numbers.cell.evict_spec,
        "policy": policy_label(numbers.cell),
        "margin": margin_of(numbers.cell),
        "cycles": numbers.budget_cycles,
        "miss": None if d.hit_rate is None else 100 * (1 - d.hit_rate),
        "read": d.read_mib_per_token,
        "substituted": substituted_percent(d),
        "mass": percent(d.mass_displaced),
        "size": numbers.budget_mib,
    }


def _rows(numbers: Sequence[CellNumbers]) -> list[dict[str, Any]]:
    """A row per cell, its series named along margins, from the smallest cache up."""
    rows = [_row(n, s) for n, s in zip(numbers, series_labels(numbers), strict=True)]
    return sorted(rows, key=lambda r: (r["size"], r["series"]))


def _few_lines(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The rows of at most `_MOST_LINES` series, evenly taken, and what to say if that is not all of them."""
    series = list(dict.fromkeys(r["series"] for r in rows))
    drawn = set(thinned(series, _MOST_LINES))
    said = f"; {len(drawn)} of {len(series)} lines drawn" if len(drawn) < len(series) else ""
    return [r for r in rows if r["series"] in drawn], said


def subtitle(numbers: Sequence[CellNumbers]) -> str:
    """Where the numbers come from, and over how many tokens."""
    tokens = {n.decode.tokens for n in numbers}
    return source_label(numbers) + (f", {tokens.pop():,} decode tokens" if len(tokens) == 1 else "")


def margin_chart(
    numbers: Sequence[CellNumbers], *, chosen: float | None = None, pick: str | None = None
) -> alt.LayerChart:
    """Decode miss rate (%) against the margin L, one line per budget, named at its end.

    A cell of the router's own routing stands at L = 0; cells of other routes without a margin are left out.

    Args:
        chosen: a margin to mark.
        pick: name of a selection by a click on a point, with the field `margin`.
    """
    found = {(r["series"], r["margin"]): r for r in reversed(_rows(numbers))}
    rows = [r for r in reversed(found.values()) if r["margin"] is not None and r["miss"] is not None]
    rows, few = _few_lines(rows)
    rows.sort(key=lambda r: (r["size"], r["series"], r["margin"]))
    ticks = sorted({r["margin"] for r in rows})
    axis = alt.Axis(values=ticks, format=".3~r", labelOverlap=True)
    x = alt.X("margin:Q").title(MARGIN_TITLE).axis(axis)
    y = alt.Y("miss:Q").title(MISS_TITLE).scale(zero=True)
    colour = by_size("series", rows)
    lines = alt.Chart(data(rows)).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    points = (
        alt.Chart(data(rows)).mark_circle(size=55, opacity=1).encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    if pick is not None:
        selection = alt.selection_point(name=pick, fields=["margin"], nearest=True)
        points = points.add_params(selection)
    marks = [] if chosen is None else _marked(rows, chosen, x, y)
    return finished(
        layered(*marks, lines, points, *end_labels(rows, "miss", x, y, colour)),
        "Decode miss rate against margin, by cache budget",
        subtitle(numbers) + few,
    )


def _marked(rows: Sequence[Mapping[str, Any]], margin: float, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """A line at a margin, and rings around the points there."""
    there = [r for r in rows if abs(r["margin"] - margin) < 1e-9]
    rule = alt.Chart(data([{"margin": margin}])).mark_rule(color=GREY, strokeWidth=1.5).encode(x=x)
    rings = alt.Chart(data(there)).mark_point(size=190, filled=False, strokeWidth=2, color=GREY)
    return [rule, rings.encode(x=x, y=y)] if there else [rule]


def budget_chart(numbers: Sequence[CellNumbers], *, foot_cycles: float | None = None) -> alt.LayerChart:
    """Decode miss rate (%) against the budget in token cycles, one line per routing and eviction.

    Args:
        foot_cycles: end of the cliff, the largest budget at which a global LRU hits nothing in decode
            (`simlab.replay.curve.cliff_foot` over the token cycle); left out, only one cycle is marked.
    """
    names = series_labels(numbers, "budget")
    rows = [_row(n, name) for n, name in zip(numbers, names, strict=True) if n.cell.budget.kind != "off"]
    rows = list({(r["series"], r["cycles"]): r for r in rows if r["miss"] is not None}.values())
    rows.sort(key=lambda r: (-1.0 if r["margin"] is None else r["margin"], r["series"]))
    order = {name: place for place, name in enumerate(dict.fromkeys(r["series"] for r in rows))}
    rows, few = _few_lines([r | {"size": order[r["series"]]} for r in rows])
    rows.sort(key=lambda r: (r["size"], r["cycles"]))
    x = alt.X("cycles:Q").title(CYCLES_TITLE).scale(zero=True)
    y = alt.Y("miss:Q").title(MISS_TITLE).scale(zero=True)
    colour = by_size("series", rows)
    lines = alt.Chart(data(rows)).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    points = (
        alt.Chart(data(rows)).mark_circle(size=55, opacity=1).encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    return finished(
        layered(*budget_marks(foot_cycles, x), lines, points, *end_labels(rows, "miss", x, y, colour)),
        "Decode miss rate against cache budget, by policy",
        subtitle(numbers) + few,
    )


def budget_marks(foot_cycles: float | None, x: alt.X, *, at_top: bool = False) -> list[alt.Chart]:
    """Dashed lines at one token cycle and, where it lies apart from that, at the end of the cliff, both named."""
    at_one = alt.Chart(data([{"cycles": 1.0, "mark": "one cycle"}]))
    foot = alt.Chart(data([{"cycles": foot_cycles, "mark": "end of the cliff"}])) if foot_cycles else None
    marks = []
    # Names of lines close by would cover each other: the foot's stands left of its line, the cycle's right.
    for chart, left in ((foot, True), (at_one, False)):
        if chart is not None:
            tooltip = [alt.Tooltip("mark:N", title="Mark"), alt.Tooltip("cycles:Q", format=".3~r")]
            marks.append(chart.mark_rule(strokeDash=[4, 4], color=GREY).encode(x=x, tooltip=tooltip))
            name = chart.mark_text(
                angle=270,
                align="right" if at_top else "left",
                baseline="bottom" if left else "top",
                dx=-4 if at_top else 4,
                dy=-3 if left else 3,
                color=GREY,
                fontSize=11,
            )
            marks.append(name.encode(x=x, y=alt.value(0 if at_top else HEIGHT), text="mark:N"))
    return marks


def policy_chart(numbers: Sequence[CellNumbers]) -> alt.LayerChart:
    """Decode miss rate (%) of each policy, routing and eviction together, best first; a dot per budget."""
    rows = [r for r in _rows(numbers) if r["miss"] is not None]
    best: dict[str, float] = {}
    for r in rows:
        best[r["policy"]] = min(r["miss"], best.get(r["policy"], r["miss"]))
    names = sorted(best, key=lambda name: (best[name], name))
    shown = names[:_MOST_POLICIES]
    few = f"; the {len(shown)} best of {len(names)} policies" if len(shown) < len(names) else ""
    rows = thinned([r for r in rows if r["policy"] in set(shown)])
    x = alt.X("miss:Q").title(MISS_TITLE).scale(zero=True)
    y = (
        alt.Y("policy:N")
        .title(None)
        .sort(shown)
        .axis(alt.Axis(labelLimit=320, domain=False, ticks=False, grid=True))
    )
    colour = by_size("budget", rows).legend(_BUDGETS)
    points = (
        alt.Chart(data(rows)).mark_circle(size=80, opacity=1).encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    ends = (
        alt.Chart(data(rows))
        .mark_rule(color=GREY, opacity=0.6)
        .encode(x="min(miss):Q", x2="max(miss):Q", y=y)
    )
    return finished(
        layered(ends, points),
        "Decode miss rate by policy",
        subtitle(numbers) + few,
        height=max(60, _POLICY_PX * len(shown)),
    )


def tradeoff_chart(
    numbers: Sequence[CellNumbers], picks: Sequence[CellNumbers] = (), rings: str = "cells run live"
) -> alt.LayerChart:
    """MiB read per decode token against router mass displaced (%), by budget.

    Picks are ringed and numbered from 1. Lines join cells that differ in the margin alone. Cells whose
    mass is unknown are left out.

    Args:
        rings: what the picks are.
    """

    def known(row: Mapping[str, Any]) -> bool:
        return row["mass"] is not None and row["read"] is not None

    found = [r for r in _rows(numbers) if known(r)]
    rows = thinned(found)
    few = f"; {len(rows):,} of {len(found):,} cells drawn" if len(rows) < len(found) else ""
    numbered = [_rows([n])[0] | {"pick": str(i)} for i, n in enumerate(picks, 1)]
    ringed = [r for r in numbered if known(r)]
    x = alt.X("mass:Q").title(MASS_TITLE).axis(alt.Axis(tickCount=7))
    y = alt.Y("read:Q").title(READ_TITLE).scale(zero=True)
    colour = by_size("budget", rows + ringed).legend(_BUDGETS)
    joined = [r for r in rows if r["margin"] is not None]
    lines = (
        alt.Chart(data(joined))
        .mark_line(strokeWidth=1.5, opacity=0.6)
        .encode(x=x, y=y, color=colour, detail="series:N", order="margin:Q")
    )
    points = (
        alt.Chart(data(rows)).mark_circle(size=55, opacity=1).encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    circles = (
        alt.Chart(data(ringed))
        .mark_point(size=230, filled=False, strokeWidth=2)
        .encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    names = (
        alt.Chart(data(merge_close(ringed, "mass", "read", rows)))
        .mark_text(dx=9, dy=-11, align="left", fontWeight="bold")
        .encode(x=x, y=y, text="pick:N")
    )
    return finished(
        layered(lines, points, *[circles, names][: min(len(ringed), 2)]),
        "Flash reads against router mass displaced",
        subtitle(numbers) + few + (f"; ringed: {rings}" if ringed else ""),
    )


def price_chart(priced: Sequence[Comparison], *, chosen: float | None = None) -> alt.LayerChart:
    """MiB read per decode token, simulated, against what live runs of the same cells measured of perplexity (`prices`).

    Args:
        priced: cells of one budget, replayed, and run live with their perplexity known.
        chosen: a margin to mark.
    """
    known = [c for c in priced if c.live.ppl is not None and c.replay.decode.read_mib_per_token is not None]
    title, costs = prices([c.live for c in known])
    rows = [
        _row(c.replay, "") | {"price": price, "low": low, "high": high, "ppl": c.live.ppl}
        for c, (price, low, high) in zip(known, costs, strict=True)
    ]
    x = alt.X("price:Q").title(title).scale(zero=False, padding=14)
    y = alt.Y("read:Q").title(READ_TITLE).scale(zero=True)
    tooltip = [
        *_TOOLTIP,
        alt.Tooltip("ppl:Q", title="Perplexity, measured", format=".3f"),
        alt.Tooltip("price:Q", title=title, format=".3~r"),
        alt.Tooltip("low:Q", title="95 % interval from", format=".3~r"),
        alt.Tooltip("high:Q", title="to", format=".3~r"),
    ]
    chart = alt.Chart(data(rows))
    bars = alt.Chart(data([r for r in rows if r["low"] is not None])).mark_rule(
        color=BLUE, opacity=0.6, strokeWidth=2
    )
    lines = chart.mark_line(strokeWidth=1.5, color=BLUE).encode(x=x, y=y, order="margin:Q")
    points = chart.mark_circle(size=60, opacity=1, color=BLUE).encode(x=x, y=y, tooltip=tooltip)
    names = chart.mark_text(align="left", dx=8, dy=-8, color=BLUE).encode(x=x, y=y, text="route:N")
    there = [
        r for r in rows if chosen is not None and r["margin"] is not None and abs(r["margin"] - chosen) < 1e-9
    ]
    rings = alt.Chart(data(there)).mark_point(size=190, filled=False, strokeWidth=2, color=GREY)
    return finished(
        layered(
            bars.encode(x=alt.X("low:Q"), x2="high:Q", y=y),
            lines,
            points,
            names,
            *([rings.encode(x=x, y=y)] if there else []),
        ),
        "Flash reads against perplexity",
        f"reads: {source_label([c.replay for c in known])}; perplexity: live (measured), 95 % intervals",
    )


def sweep_charts(numbers: Sequence[CellNumbers], picks: Sequence[CellNumbers] = ()) -> dict[str, AnyChart]:
    """The charts a sweep has the numbers for, by name, those of `simlab.charts.pages.CAPTIONS`.

    `margin` for two margins or more, `budget` for a policy at two budgets or more, `policy` for two policies
    that differ in more than the margin, `tradeoff` where the mass is known.
    """
    charts: dict[str, AnyChart] = {}
    known = [n for n in numbers if n.decode.hit_rate is not None]
    if len({margin_of(n.cell) for n in known} - {None}) > 1:
        charts["margin"] = margin_chart(known)
    budgets: dict[str, set[float]] = {}
    for n in known:
        if n.cell.budget.kind != "off":
            budgets.setdefault(policy_label(n.cell), set()).add(n.budget_cycles)
    if any(len(found) > 1 for found in budgets.values()):
        charts["budget"] = budget_chart(known)
    if len({(n.cell.evict_spec, n.cell.scope, _other_steps(n)) for n in known}) > 1:
        charts["policy"] = policy_chart(known)
    if any(n.decode.mass_displaced is not None for n in numbers):
        charts["tradeoff"] = tradeoff_chart(numbers, picks)
    return charts


def _other_steps(numbers: CellNumbers) -> tuple[Any, ...]:
    """What a cell's routing does beside a margin."""
    return tuple(
        (s.policy.name, tuple(s.knobs.items()))
        for s in numbers.cell.route.steps
        if not (s.policy.is_builtin("substitute") or s.policy.is_builtin("original"))
    )
