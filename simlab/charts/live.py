"""Charts of live runs: beside their replay, and speed against quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from simlab.charts.theme import BLUE, GREEN, GREY, ORANGE, alt, data, finished, layered, merge_close, thinned
from simlab.charts.words import (
    LIVE_LABEL,
    REPLAY_LABEL,
    budget_label,
    percent,
    policy_label,
    prices,
    route_label,
    substituted_percent,
)
from simlab.judge.stats import Interval
from simlab.types import CellNumbers, Comparison

_SQUARE = 230
_PANELS = {
    "hit_rate": ("Hit rate (%)", lambda d: percent(d.hit_rate)),
    "read_mib_per_token": ("MiB read per token", lambda d: d.read_mib_per_token),
    "substituted": ("Slots substituted (%)", substituted_percent),
}


def comparison_chart(
    comparisons: Sequence[Comparison], intervals: Sequence[Mapping[str, Interval]] = ()
) -> alt.HConcatChart:
    """Replay against live, decode, one square per number; on the diagonal the two agree.

    Points are numbered from 1 in the order of `comparisons`; points that coincide share a label.

    Args:
        intervals: of each comparison, those of its live numbers, in the units drawn (per cent, MiB), by the
            names `hit_rate`, `read_mib_per_token` and `substituted`; missing ones are not drawn.
    """
    squares = []
    for name, (title, value) in _PANELS.items():
        rows = []
        for i, c in enumerate(comparisons):
            low, high = intervals[i].get(name, (math.nan, math.nan)) if intervals else (math.nan, math.nan)
            rows.append(
                {
                    "pick": str(i + 1),
                    "cell": f"{route_label(c.live.cell)} at {budget_label(c.live)}",
                    "replay": value(c.replay.decode),
                    "live": value(c.live.decode),
                    "low": None if math.isnan(low) else low,
                    "high": None if math.isnan(high) else high,
                }
            )
        rows = [r for r in rows if r["replay"] is not None and r["live"] is not None]
        if rows:
            squares.append(_square(title, thinned(rows)))
    said = "across: live (measured); up: replay (simulated); dashed: where they agree"
    if intervals:
        said += "; bars: 95 % intervals of the live run"
    return alt.hconcat(*squares, spacing=28).properties(
        title=alt.Title("Replay against live, decode", subtitle=said)
    )


def _square(title: str, rows: Sequence[dict[str, Any]]) -> alt.LayerChart:
    ends_of = [v for r in rows for v in (r["replay"], r["live"], r["high"]) if v is not None]
    top = max(ends_of) or 1.0
    top = 100.0 if "%" in title and top > 50 else 1.1 * top
    scale = alt.Scale(domain=[0, top], nice=True)
    x = alt.X("live:Q").title(f"{title}, live").scale(scale)
    y = alt.Y("replay:Q").title(f"{title}, replay").scale(scale)
    ends = [{"live": v, "replay": v} for v in (0.0, top)]
    diagonal = alt.Chart(data(ends)).mark_line(color=GREY, strokeDash=[4, 4], strokeWidth=1).encode(x=x, y=y)
    tooltip = [
        alt.Tooltip("cell:N", title="Cell"),
        alt.Tooltip("replay:Q", title=f"{title}: {REPLAY_LABEL}", format=".4~r"),
        alt.Tooltip("live:Q", title=f"{title}: {LIVE_LABEL}", format=".4~r"),
    ]
    known = [r for r in rows if r["low"] is not None and r["high"] is not None]
    bars = alt.Chart(data(known)).mark_rule(color=BLUE, strokeWidth=1.5, opacity=0.7)
    points = (
        alt.Chart(data(rows)).mark_circle(size=70, color=BLUE, opacity=0.9).encode(x=x, y=y, tooltip=tooltip)
    )
    extent = [{"live": top, "replay": top}]
    labels = (
        alt.Chart(data(merge_close(rows, "live", "replay", extent)))
        .mark_text(dx=9, dy=1, align="left", baseline="middle")
        .encode(x=x, y=y, text="pick:N")
    )
    span = [bars.encode(x=alt.X("low:Q").scale(scale), x2="high:Q", y=y)] if known else []
    return layered(diagonal, *span, points, labels).properties(width=_SQUARE, height=_SQUARE)


def pareto_chart(numbers: Sequence[CellNumbers]) -> alt.LayerChart:
    """Tokens/s against perplexity (`prices`) of live runs; the line joins those that no other beats in both.

    Runs without either number are left out.
    """
    known = measured_both(numbers)
    title, costs = prices(known)
    front = set(
        pareto_front([(n.tok_s or 0.0, cost[0] or 0.0) for n, cost in zip(known, costs, strict=True)])
    )
    rows = []
    for i, (n, (price, low, high)) in enumerate(zip(known, costs, strict=True)):
        slow, fast = n.intervals.get("tok_s", (None, None))
        rows.append(
            {
                "cell": policy_label(n.cell),
                "budget": budget_label(n),
                "name": f"{route_label(n.cell)}, {budget_label(n)}",
                "tok_s": n.tok_s,
                "slow": slow,
                "fast": fast,
                "price": price,
                "low": low,
                "high": high,
                "ppl": n.ppl,
                "wait": n.read_wait_ms_per_token,
                "best": "no run beats it in both" if i in front else "beaten in both",
            }
        )
    rows = thinned(sorted(rows, key=lambda r: (r["price"], -r["tok_s"])))
    best = [r for r in rows if r["best"].startswith("no")]
    x = alt.X("price:Q").title(f"{title}; lower is better").scale(zero=False, padding=16)
    y = alt.Y("tok_s:Q").title("Tokens per second").scale(zero=True)
    colour = (
        alt.Color("best:N")
        .scale(domain=["no run beats it in both", "beaten in both"], range=[GREEN, ORANGE])
        .legend(alt.Legend(title=None, orient="top", labelLimit=240))
    )
    tooltip = [
        alt.Tooltip("cell:N", title="Policy"),
        alt.Tooltip("budget:N", title="Budget"),
        alt.Tooltip("tok_s:Q", title="Tokens per second", format=".4~r"),
        alt.Tooltip("slow:Q", title="95 % interval from", format=".4~r"),
        alt.Tooltip("fast:Q", title="to", format=".4~r"),
        alt.Tooltip("ppl:Q", title="Perplexity", format=".3f"),
        alt.Tooltip("price:Q", title=title, format=".3~r"),
        alt.Tooltip("low:Q", title="95 % interval from", format=".3~r"),
        alt.Tooltip("high:Q", title="to", format=".3~r"),
        alt.Tooltip("wait:Q", title="Read wait (ms per token)", format=".3~r"),
    ]
    line = alt.Chart(data(best)).mark_line(
        interpolate="step-after", color=GREEN, strokeWidth=1.5, opacity=0.7
    )
    points = (
        alt.Chart(data(rows)).mark_circle(size=70, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip)
    )
    spans = [
        alt.Chart(data([r for r in rows if r[end] is not None]))
        .mark_rule(opacity=0.45, strokeWidth=1.5)
        .encode(color=colour, **place)
        for end, place in (
            ("slow", {"x": x, "y": alt.Y("slow:Q"), "y2": alt.Y2("fast:Q")}),
            ("low", {"x": alt.X("low:Q"), "x2": alt.X2("high:Q"), "y": y}),
        )
    ]
    names = (
        alt.Chart(data(best))
        .mark_text(align="left", dx=8, dy=10, color=GREEN)
        .encode(x=x, y=y, text="name:N")
    )
    return finished(
        layered(line.encode(x=x, y=y), *spans, points, names),
        "Speed against quality",
        f"{LIVE_LABEL}, bars: 95 % intervals; up and left is better",
    )


def measured_both(numbers: Sequence[CellNumbers]) -> list[CellNumbers]:
    """The live runs whose speed and perplexity are known."""
    return [n for n in numbers if n.source == "live" and n.tok_s is not None and n.ppl is not None]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (speed, perplexity) points that no other point beats: as fast and as good, and one of them more.

    Of equal points the first stands; in order of rising perplexity.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][1], -points[i][0]))
    front: list[int] = []
    for i in order:
        if not front or points[i][0] > points[front[-1]][0]:
            front.append(i)
    return front
