"""Charts of the LRU curve and of what a cell's misses are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import polars as pl

from simlab.charts.sweeps import budget_marks
from simlab.charts.theme import (
    BLUE,
    CYCLES_TITLE,
    GREEN,
    GREY,
    HEIGHT,
    ORANGE,
    READ_TITLE,
    WIDTH,
    alt,
    data,
    finished,
    layered,
)
from simlab.charts.words import REPLAY_LABEL, model_name
from simlab.judge.misses.explain import Explanation
from simlab.judge.misses.explain_text import subtitle
from simlab.replay.curve import cliff_foot, routing_words
from simlab.types import Scope, TraceHeader

_POINTS = 2 * WIDTH
"""Steps drawn at most: two for each pixel; the JSON has all of them."""
_KINDS = {"cold": GREY, "policy": ORANGE, "budget": BLUE}
_KIND_WORDS = {
    "cold": "cold: first use",
    "policy": "policy: Belady hits it",
    "budget": "budget: Belady misses it too",
}
_HIT_TITLE = "Decode hit rate (% of lookups)"


def curve_chart(curve: pl.DataFrame, header: TraceHeader, scope: Scope) -> alt.HConcatChart:
    """Decode hit rate (%) and MiB read per decode token against the budget, in steps."""
    rows, foot = _drawn(curve), foot_cycles(header, scope)
    where = f"{REPLAY_LABEL}, LRU, {scope.replace('_', ' ')}, {routing_words(header)}"
    panels = [
        _steps(rows, field, title, foot).properties(width=WIDTH, height=HEIGHT)
        for field, title in (("hit", _HIT_TITLE), ("read", READ_TITLE))
    ]
    title = alt.Title(f"LRU at every budget, {model_name(header.model)}", subtitle=where)
    return alt.hconcat(*panels, spacing=32).properties(title=title)


def foot_cycles(header: TraceHeader, scope: Scope, k: int | None = None) -> float | None:
    """The cliff's foot in token cycles; None where there is none, in a cache per layer or with one MoE layer."""
    if scope == "per_layer" or len(header.moe_layers) < 2:
        return None
    return max(cliff_foot(header, k), 0) / header.cycle_bytes(k)


def standing_chart(explanation: Explanation, figure: Literal["hit", "read"] = "hit") -> alt.LayerChart:
    """Where the cell's budget stands on the LRU curve, and Belady there.

    Args:
        figure: decode hit rate (%), or MiB read per decode token.
    """
    e, d = explanation, explanation.decode
    cycles = e.budget.total_bytes / e.header.cycle_bytes()  # the curve's own, whatever k the cell runs
    title, scale, rates = {
        "hit": (_HIT_TITLE, 100, (d.hit_rate, d.optimum_hit_rate)),
        "read": (READ_TITLE, 1, (d.mib_per_token, d.optimum_mib_per_token)),
    }[figure]
    points = []
    # The curve runs through the cell where it is LRU's: the names stand on either side of it.
    for what, rate, dy in zip(
        ("this cell", "Belady"), rates, (12, -8) if figure == "hit" else (-8, 12), strict=True
    ):
        ends = [scale * end if math.isfinite(end) else None for end in rate.interval]
        points.append(
            {
                "cycles": cycles,
                figure: scale * rate.value,
                "low": ends[0],
                "high": ends[1],
                "what": what,
                "dy": dy,
            }
        )
    x, y = _x(), alt.Y(f"{figure}:Q").title(title).scale(zero=True)
    colour = alt.Color("what:N").scale(domain=["this cell", "Belady"], range=[BLUE, ORANGE]).legend(None)
    tooltip = [
        alt.Tooltip("what:N", title="Eviction"),
        alt.Tooltip(f"{figure}:Q", title=title, format=".4~r"),
        alt.Tooltip("low:Q", title="95 % interval from", format=".4~r"),
        alt.Tooltip("high:Q", title="to", format=".4~r"),
        alt.Tooltip("cycles:Q", title="Budget (cycles)", format=".3~r"),
    ]
    chart = alt.Chart(data(points))
    spans = chart.mark_rule(strokeWidth=2).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour)
    marks = chart.mark_circle(size=110, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip)
    names = [
        alt.Chart(data([point]))
        .mark_text(align="left", dx=9, dy=point["dy"])
        .encode(x=x, y=y, text="what:N", color=colour)
        for point in points
    ]
    scope: Scope = "per_layer" if e.budget.per_layer else "global"
    curve = _steps(_drawn(e.curve), figure, title, foot_cycles(e.header, scope))
    return finished(
        alt.LayerChart(layer=[*curve.layer, spans, marks, *names]),
        "Where this budget stands" if figure == "hit" else "What it reads there",
        f"line: LRU, {routing_words(e.header)}; bars: 95 % intervals",
    )


def explain_chart(explanation: Explanation) -> alt.HConcatChart:
    """Left: where the budget stands on the LRU curve, and Belady there. Right: misses by kind along the decode."""
    e = explanation
    return (
        alt.hconcat(standing_chart(e), along_chart(e), spacing=32)
        .resolve_scale(color="independent")
        .properties(title=alt.Title(e.verdict.kind.capitalize(), subtitle=f"{REPLAY_LABEL}; {subtitle(e)}"))
    )


def along_chart(explanation: Explanation) -> alt.Chart:
    """Misses per decode token by kind, stacked, in stretches along the decode."""
    rows = []
    for row in explanation.windows.iter_rows(named=True):
        place = {"from": row["window"], "to": row["window"] + row["tokens"]}
        rows += _stacked({kind: row[kind] / row["tokens"] for kind in _KIND_WORDS}, place)
    return (
        alt.Chart(data(rows))
        .mark_rect()
        .encode(
            x=alt.X("from:Q").title("Decode token").scale(nice=False),
            x2="to:Q",
            y=alt.Y("low:Q").title("Misses per token").scale(zero=True),
            y2="high:Q",
            color=_kind_colour(),
            tooltip=[
                alt.Tooltip("kind:N", title="Misses"),
                alt.Tooltip("part:Q", title="Per token", format=".2f"),
                alt.Tooltip("from:Q", title="From token"),
            ],
        )
        .properties(width=WIDTH, height=HEIGHT, title="What the misses are made of")
    )


def layer_chart(explanation: Explanation) -> alt.Chart:
    """Share of each MoE layer's decode lookups that miss (%), by kind, stacked."""
    rows = []
    for row in explanation.layers.iter_rows(named=True):
        lookups = max(row["lookups"], 1)
        place = {"from": row["layer"] - 0.45, "to": row["layer"] + 0.45, "layer": row["layer"]}
        rows += _stacked({kind: 100 * row[kind] / lookups for kind in _KIND_WORDS}, place)
    return (
        alt.Chart(data(rows))
        .mark_rect()
        .encode(
            x=alt.X("from:Q")
            .title("Layer of the model")
            .scale(nice=False)
            .axis(alt.Axis(tickMinStep=1, format="d")),
            x2="to:Q",
            y=alt.Y("low:Q").title("Decode misses (% of the layer's lookups)").scale(zero=True),
            y2="high:Q",
            color=_kind_colour(),
            tooltip=[
                alt.Tooltip("layer:Q", title="Layer"),
                alt.Tooltip("kind:N", title="Misses"),
                alt.Tooltip("part:Q", title="% of lookups", format=".1f"),
            ],
        )
        .properties(width=WIDTH, height=HEIGHT, title=alt.Title("Misses by layer", subtitle=REPLAY_LABEL))
    )


def _stacked(parts: Mapping[str, float], place: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per kind of miss, from where the one below ends."""
    rows, top = [], 0.0
    for kind, words in _KIND_WORDS.items():
        rows.append({**place, "kind": words, "low": top, "high": top + parts[kind], "part": parts[kind]})
        top += parts[kind]
    return rows


def _kind_colour() -> alt.Color:
    return (
        alt.Color("kind:N")
        .scale(domain=list(_KIND_WORDS.values()), range=[_KINDS[kind] for kind in _KIND_WORDS])
        .legend(alt.Legend(title=None, orient="top", labelLimit=240))
    )


def reuse_chart(explanation: Explanation) -> alt.LayerChart:
    """Decode lookups (%) by the smallest LRU cache, in token cycles, that still holds the entry; the budget marked."""
    e = explanation
    rows = []
    for r in e.reuse.iter_rows(named=True):
        last = r["to_cycles"] is None
        words = f"{r['from_cycles']:g} or more" if last else f"{r['from_cycles']:g} to {r['to_cycles']:g}"
        fits = not last and r["to_cycles"] * e.cycle_bytes <= e.budget.total_bytes
        rows.append({"cycles": words, "share": 100 * r["share"], "lookups": r["lookups"], "fits": fits})
    first = e.decode.counts["lookups"] - sum(e.reuse["lookups"])
    if e.decode.counts["lookups"]:
        share = 100 * first / e.decode.counts["lookups"]
        rows.append({"cycles": "never before", "share": share, "lookups": first, "fits": None})
    word = {True: "an LRU cache of this budget holds it", False: "it does not", None: "first use"}
    rows = [r | {"fits": word[r["fits"]]} for r in rows]
    colours = dict(zip(word.values(), (GREEN, BLUE, GREY), strict=True))
    x = alt.X("cycles:N").title("Reuse distance (token cycles)").sort(None).axis(alt.Axis(labelAngle=-40))
    y = alt.Y("share:Q").title("Decode lookups (%)").scale(zero=True)
    chart = alt.Chart(data(rows))
    bars = chart.mark_bar().encode(
        x=x,
        y=y,
        color=alt.Color("fits:N")
        .scale(domain=list(colours), range=list(colours.values()))
        .legend(alt.Legend(title=None, orient="top", labelLimit=260)),
        tooltip=[
            alt.Tooltip("cycles:N", title="Token cycles"),
            alt.Tooltip("lookups:Q", title="Lookups", format=","),
            alt.Tooltip("share:Q", title="% of lookups", format=".1f"),
        ],
    )
    texts = chart.mark_text(dy=-7, fontSize=11).encode(x=x, y=y, text=alt.Text("share:Q", format=".0f"))
    return finished(
        layered(bars, texts), "How far lookups lie from the last use", f"{REPLAY_LABEL}, what the cell ran"
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
    return alt.X("cycles:Q").title(CYCLES_TITLE).scale(zero=True)


def _steps(rows: Sequence[Mapping[str, Any]], field: str, title: str, foot: float | None) -> alt.LayerChart:
    x, y = _x(), alt.Y(f"{field}:Q").title(title).scale(zero=True)
    tooltip = [
        alt.Tooltip("cycles:Q", title="From this budget (cycles)", format=".4~r"),
        alt.Tooltip("hit:Q", title="Decode hit rate (%)", format=".2f"),
        alt.Tooltip("read:Q", title="MiB per token", format=".4~r"),
    ]
    chart = alt.Chart(data(rows))
    line = chart.mark_line(interpolate="step-after", strokeWidth=2, color=GREEN).encode(x=x, y=y)
    hover = chart.mark_circle(size=30, opacity=0).encode(x=x, y=y, tooltip=tooltip)
    return layered(*budget_marks(foot, x, at_top=field == "hit"), line, hover)
