"""Charts of cells, and offline pages that carry them.

A chart is an Altair object, ready for a notebook. A page is one HTML file with the charting library inside,
so it draws without a network and keeps working when a CDN is gone. Colours that must differ between a light
and a dark background (text, axes, grid) are left to the page; those set here are legible on both.

Words: a *variant* is everything of a cell but its margin and its budget; a *series* is the cells that differ
in nothing but the margin, drawn as one line.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from simlab.cli.output import json_value
from simlab.errors import RunError
from simlab.types import Cell, CellNumbers, Comparison, PhaseNumbers

try:
    import altair as alt
    import vl_convert
except ImportError as error:
    raise RunError(
        f"charts need the package '{error.name}', which is not installed: pip install 'simlab[charts]'"
    ) from error

if TYPE_CHECKING:
    from simlab.trace.store import Trace

AnyChart = alt.LayerChart | alt.HConcatChart

REPLAY_LABEL = "replay (simulated)"
LIVE_LABEL = "live (measured)"

_RAMP = ("#8558c8", "#3d83d9", "#1c9e78", "#dd8a1e")
"""Purple, blue, green, orange, from the smallest cache to the largest; legible on white and on black."""
_GREY = "#8a929c"
_WIDTH, _HEIGHT = 370, 290
_SQUARE = 230
_LABEL_GAP_PX = 15
_MARGIN_TITLE = "Margin L (share of the token's score range)"
_MASS_TITLE = "Router mass displaced (% of a routing event's probability)"
_READ_TITLE = "Read from flash (MiB per decode token)"


# ---------------------------------------------------------------------------------------------------------
# Words for a cell


def budget_label(numbers: CellNumbers) -> str:
    """A budget as written and in the other unit: `2 cycles (3.2 MiB)`, `2000 MiB (2.5 cycles)`."""
    budget = numbers.cell.budget
    mib = f"{size_text(numbers.budget_mib)} MiB"
    return {
        "off": "no cache",
        "bytes": f"{mib} ({numbers.budget_cycles:.3g} cycles)",
        "cycles": f"{budget.amount:g} cycle{'' if budget.amount == 1 else 's'} ({mib})",
        "per_layer": f"{budget.amount:g} per layer ({mib})",
        "fraction": f"{100 * budget.amount:g} % of experts ({mib})",
    }[budget.kind]


def route_label(cell: Cell) -> str:
    """A route for reading: `L = 0.15`, `L = 0.15, drop F = 0.75`, `original routing`."""
    words = []
    for step in cell.route.steps:
        name, knobs = step.policy.name, dict(step.knobs)
        if name == "original":
            continue
        if name == "substitute":
            words.append(f"L = {knobs['L']:g}")
            continue
        changed = {k: v for k, v in knobs.items() if k not in step.policy.knobs or v != _default(step, k)}
        shown = {k: v for i, (k, v) in enumerate(knobs.items()) if i == 0 or k in changed}
        title = {"drop_cold": "drop"}.get(name, name)
        words.append(" ".join([title, ", ".join(f"{k} = {v:g}" for k, v in shown.items())]).strip())
    return ", ".join(words) or "original routing"


def rate_text(value: float) -> str:
    """MiB per token, tokens per second: decimals by size, so that a column of like numbers lines up."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f}"


def size_text(value: float) -> str:
    """MiB of a size that was chosen, three digits without trailing zeros: `2,000`, `3.19`, `8`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def source_label(numbers: Sequence[CellNumbers]) -> str:
    """Where numbers come from, simulated or measured."""
    sources = {n.source for n in numbers}
    words = [w for s, w in (("replay", REPLAY_LABEL), ("live", LIVE_LABEL)) if s in sources]
    return " and ".join(words) or REPLAY_LABEL


def _default(step: Any, knob: str) -> float:
    return step.policy.knobs[knob].default


def _variant(numbers: CellNumbers) -> tuple[str, ...]:
    cell = numbers.cell
    steps = tuple(
        f"{s.policy.name} " + " ".join(f"{k}={v:g}" for k, v in s.knobs.items())
        for s in cell.route.steps
        if s.policy.name not in ("substitute", "original", "top_k")
    )
    knobs = "".join(f" {k}={v:g}" for k, v in cell.evict_knobs.items())
    return (cell.evict + knobs, cell.scope.replace("_", " "), f"k = {numbers.top_k}", ", ".join(steps))


def _series_labels(numbers: Sequence[CellNumbers]) -> list[str]:
    """The name of each cell's series: its budget, and of its variant what is not the same everywhere."""
    variants = [_variant(n) for n in numbers]
    differs = [len(set(column)) > 1 for column in zip(*variants, strict=True)]
    return [
        ", ".join([budget_label(n), *(word for word, d in zip(v, differs, strict=True) if d and word)])
        for n, v in zip(numbers, variants, strict=True)
    ]


def _margin(cell: Cell) -> float | None:
    return 0.0 if cell.route.name == "original" else cell.margin


def _substituted(phase: PhaseNumbers) -> float | None:
    return 100 * phase.substituted / phase.slots if phase.slots else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


# ---------------------------------------------------------------------------------------------------------
# Charts


def _rows(numbers: Sequence[CellNumbers]) -> list[dict[str, Any]]:
    rows = []
    for n, series in zip(numbers, _series_labels(numbers), strict=True):
        d = n.decode
        rows.append(
            {
                "series": series,
                "budget": budget_label(n),
                "route": route_label(n.cell),
                "margin": _margin(n.cell),
                "miss": None if d.hit_rate is None else 100 * (1 - d.hit_rate),
                "read": d.read_mib_per_token,
                "substituted": _substituted(d),
                "mass": _percent(d.mass_displaced),
                "size": n.budget_mib,
            }
        )
    return sorted(rows, key=lambda r: (r["size"], r["series"]))


_TOOLTIP = [
    alt.Tooltip("budget:N", title="Budget"),
    alt.Tooltip("route:N", title="Routing"),
    alt.Tooltip("miss:Q", title="Decode miss rate (%)", format=".1f"),
    alt.Tooltip("read:Q", title="MiB per token", format=".4~r"),
    alt.Tooltip("substituted:Q", title="Slots substituted (%)", format=".1f"),
    alt.Tooltip("mass:Q", title="Mass displaced (%)", format=".2f"),
]


def _layer(*charts: alt.Chart) -> alt.LayerChart:
    return alt.LayerChart(layer=list(charts))


def margin_chart(numbers: Sequence[CellNumbers]) -> alt.LayerChart:
    """Decode miss rate (%) against the margin L, one line per budget, named at its end.

    A cell of the router's own routing stands at L = 0; cells of other routes without a margin are left out.
    """
    found = {(r["series"], r["margin"]): r for r in reversed(_rows(numbers))}
    rows = [r for r in reversed(found.values()) if r["margin"] is not None and r["miss"] is not None]
    rows.sort(key=lambda r: (r["size"], r["series"], r["margin"]))
    ticks = sorted({r["margin"] for r in rows})
    axis = alt.Axis(values=ticks, format=".3~r", labelOverlap=True)
    x = alt.X("margin:Q").title(_MARGIN_TITLE).axis(axis)
    y = alt.Y("miss:Q").title("Decode miss rate (% of lookups)").scale(zero=True)
    colour = _colour("series", rows)
    lines = alt.Chart(_data(rows)).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    points = (
        alt.Chart(_data(rows))
        .mark_circle(size=55, opacity=1)
        .encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    return _finish(
        _layer(lines, points, *_end_labels(rows, x, y, colour)),
        "Decode miss rate against margin, by cache budget",
        _subtitle(numbers),
    )


def tradeoff_chart(numbers: Sequence[CellNumbers], picks: Sequence[CellNumbers]) -> alt.LayerChart:
    """MiB read per decode token against router mass displaced (%), by budget.

    Picks are ringed and numbered from 1. Lines join cells that differ in the margin alone. Cells whose
    mass is unknown are left out.
    """

    def known(row: Mapping[str, Any]) -> bool:
        return row["mass"] is not None and row["read"] is not None

    rows = [r for r in _rows(numbers) if known(r)]
    numbered = [_rows([n])[0] | {"pick": str(i)} for i, n in enumerate(picks, 1)]
    ringed = [r for r in numbered if known(r)]
    x = alt.X("mass:Q").title(_MASS_TITLE).axis(alt.Axis(tickCount=7))
    y = alt.Y("read:Q").title(_READ_TITLE).scale(zero=True)
    colour = _colour("budget", rows + ringed).legend(
        alt.Legend(title="Cache budget", symbolOpacity=1, labelLimit=220)
    )
    joined = [r for r in rows if r["margin"] is not None]
    lines = (
        alt.Chart(_data(joined))
        .mark_line(strokeWidth=1.5, opacity=0.6)
        .encode(x=x, y=y, color=colour, detail="series:N", order="margin:Q")
    )
    points = (
        alt.Chart(_data(rows))
        .mark_circle(size=55, opacity=1)
        .encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    rings = (
        alt.Chart(_data(ringed))
        .mark_point(size=230, filled=False, strokeWidth=2)
        .encode(x=x, y=y, color=colour, tooltip=_TOOLTIP)
    )
    names = (
        alt.Chart(_data(_merge_close(ringed, "mass", "read", rows)))
        .mark_text(dx=9, dy=-11, align="left", fontWeight="bold")
        .encode(x=x, y=y, text="pick:N")
    )
    return _finish(
        _layer(lines, points, *([rings, names] if ringed else [])),
        "Flash reads against router mass displaced",
        _subtitle(numbers) + ("; rings: cells run live" if ringed else ""),
    )


def comparison_chart(comparisons: Sequence[Comparison]) -> alt.HConcatChart:
    """Replay against live, decode, one square per number; on the diagonal the two agree.

    Points are numbered from 1 in the order of `comparisons`; points that coincide share a label.
    """
    panels = [
        ("Hit rate (%)", lambda d: _percent(d.hit_rate)),
        ("MiB read per token", lambda d: d.read_mib_per_token),
        ("Slots substituted (%)", _substituted),
    ]
    squares = []
    for title, value in panels:
        rows = [
            {
                "pick": str(i),
                "cell": f"{route_label(c.live.cell)} at {budget_label(c.live)}",
                "replay": value(c.replay.decode),
                "live": value(c.live.decode),
            }
            for i, c in enumerate(comparisons, 1)
        ]
        rows = [r for r in rows if r["replay"] is not None and r["live"] is not None]
        if rows:
            squares.append(_square(title, rows))
    chart = alt.hconcat(*squares, spacing=28)
    return chart.properties(
        title=alt.Title(
            "Replay against live, decode",
            subtitle="across: live (measured); up: replay (simulated); dashed: where they agree",
        )
    )


def _square(title: str, rows: Sequence[dict[str, Any]]) -> alt.LayerChart:
    top = max(max(r["replay"], r["live"]) for r in rows) or 1.0
    top = 100.0 if "%" in title and top > 50 else 1.1 * top
    scale = alt.Scale(domain=[0, top], nice=True)
    x = alt.X("live:Q").title(f"{title}, live").scale(scale)
    y = alt.Y("replay:Q").title(f"{title}, replay").scale(scale)
    ends = [{"live": v, "replay": v} for v in (0.0, top)]
    diagonal = (
        alt.Chart(_data(ends)).mark_line(color=_GREY, strokeDash=[4, 4], strokeWidth=1).encode(x=x, y=y)
    )
    tooltip = [
        alt.Tooltip("cell:N", title="Cell"),
        alt.Tooltip("replay:Q", title=f"{title}: {REPLAY_LABEL}", format=".4~r"),
        alt.Tooltip("live:Q", title=f"{title}: {LIVE_LABEL}", format=".4~r"),
    ]
    points = (
        alt.Chart(_data(rows))
        .mark_circle(size=70, color=_RAMP[1], opacity=0.9)
        .encode(x=x, y=y, tooltip=tooltip)
    )
    extent = [{"live": top, "replay": top}]
    labels = (
        alt.Chart(_data(_merge_close(rows, "live", "replay", extent)))
        .mark_text(dx=9, dy=1, align="left", baseline="middle")
        .encode(x=x, y=y, text="pick:N")
    )
    return _layer(diagonal, points, labels).properties(width=_SQUARE, height=_SQUARE)


def _data(rows: Sequence[Mapping[str, Any]]) -> alt.Data:
    return alt.Data(values=[dict(r) for r in rows])


def _colour(field: str, rows: Sequence[Mapping[str, Any]]) -> alt.Color:
    domain = list(dict.fromkeys(r[field] for r in sorted(rows, key=lambda r: (r["size"], r[field]))))
    steps = max(len(domain) - 1, 1)
    colours = [_ramp(i / steps) for i in range(len(domain))]
    return alt.Color(f"{field}:N").scale(domain=domain, range=colours).legend(None)


def _ramp(place: float) -> str:
    """The colour at 0 (first) to 1 (last) of the ramp."""
    part, between = divmod(place * (len(_RAMP) - 1), 1)
    stops = [_RAMP[min(int(part) + i, len(_RAMP) - 1)] for i in (0, 1)]
    low, high = ([int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops)
    return "#" + "".join(f"{round(a + (b - a) * between):02x}" for a, b in zip(low, high, strict=True))


def _end_labels(
    rows: Sequence[Mapping[str, Any]], x: alt.X, y: alt.Y, colour: alt.Color
) -> tuple[alt.Chart, alt.Chart]:
    """The name of each series right of the plot, and a thin line to it from the series' last point."""
    last = {r["series"]: dict(r) for r in rows}
    ends = sorted(last.values(), key=lambda r: r["miss"])
    top = max((r["miss"] for r in rows), default=0.0)
    gap = top * min(_LABEL_GAP_PX / _HEIGHT, 1 / max(len(ends), 1))
    place = -gap
    for end in ends:
        place = end["label_y"] = max(end["miss"], place + gap)
    chart = alt.Chart(_data(ends))
    leaders = chart.mark_rule(strokeWidth=1, strokeDash=[2, 2], opacity=0.8).encode(
        x=x, y=y, x2=alt.value(_WIDTH + 22), y2="label_y:Q", color=colour
    )
    names = chart.mark_text(align="left", baseline="middle").encode(
        x=alt.value(_WIDTH + 26), y="label_y:Q", text="series:N"
    )
    return leaders, names


def _merge_close(
    rows: Sequence[dict[str, Any]], x: str, y: str, extent: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows with the numbers in `pick` joined where points lie within 3 % of the axes of one another."""
    width = max((r[x] for r in [*extent, *rows]), default=0.0)
    height = max((r[y] for r in [*extent, *rows]), default=0.0)
    merged: list[dict[str, Any]] = []
    for row in rows:
        for other in merged:
            if abs(other[x] - row[x]) <= 0.03 * width and abs(other[y] - row[y]) <= 0.03 * height:
                other["pick"] += f", {row['pick']}"
                break
        else:
            merged.append(dict(row))
    return merged


def _subtitle(numbers: Sequence[CellNumbers]) -> str:
    tokens = {n.decode.tokens for n in numbers}
    return source_label(numbers) + (f", {tokens.pop():,} decode tokens" if len(tokens) == 1 else "")


def _finish(chart: alt.LayerChart, title: str, subtitle: str) -> alt.LayerChart:
    return chart.properties(width=_WIDTH, height=_HEIGHT, title=alt.Title(title, subtitle=subtitle))


# ---------------------------------------------------------------------------------------------------------
# Pages


def page(title: str, body: str, charts: Mapping[str, AnyChart]) -> str:
    """One HTML file that draws `charts` with nothing from the network.

    Args:
        body: HTML, already escaped; the chart named `x` appears in the element with id `chart-x`.
    """
    template = resources.files("simlab.judge").joinpath("report_page.html").read_text("utf-8")
    specs = {name: _spec(chart) for name, chart in charts.items()}
    # Inside <script>, only "</script" and "<!--" end or change what the parser reads.
    data = json.dumps(json_value(specs), allow_nan=False).replace("<", "\\u003c")
    library = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]  (its stub forgets a default)
    library = library.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return Template(template).substitute(
        title=html.escape(title), body=body, charts=data, library=library if charts else ""
    )


def _spec(chart: AnyChart) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    del spec["$schema"]  # an address, though nobody would fetch it
    return spec


def figure(name: str, caption: str) -> str:
    """The place of a chart on a page; `caption` is plain text."""
    return (
        f'<figure><div class="chart" id="chart-{html.escape(name)}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def sweep_charts(numbers: Sequence[CellNumbers], picks: Sequence[CellNumbers] = ()) -> dict[str, AnyChart]:
    """The charts a sweep has the numbers for, by name: `margin`, `tradeoff`."""
    charts: dict[str, AnyChart] = {}
    if any(_margin(n.cell) is not None and n.decode.hit_rate is not None for n in numbers):
        charts["margin"] = margin_chart(numbers)
    if any(n.decode.mass_displaced is not None for n in numbers):
        charts["tradeoff"] = tradeoff_chart(numbers, picks)
    return charts


CAPTIONS = {
    "margin": "How often a decode lookup misses the cache as the margin grows.",
    "tradeoff": "What the saved reads cost: router probability that no longer runs. Down and left is better.",
    "comparison": "Each number is a row of the table above.",
}


def write_sweep_chart(path: Path, numbers: Sequence[CellNumbers], trace: Trace) -> None:
    """Write one offline page with the charts of a sweep.

    Raises:
        OSError: the file cannot be written.
    """
    header = trace.header
    charts = sweep_charts(numbers)
    about = (
        f"{header.model}: {len(header.moe_layers)} MoE layers of {header.n_expert} experts, "
        f"{header.n_expert_used} per token. Every number on this page is {source_label(numbers)}."
    )
    places = "".join(figure(name, CAPTIONS[name]) for name in charts) or (
        "<p>None of these cells has a margin, and the trace has no scores to tell displaced mass from: "
        "nothing to draw.</p>"
    )
    body = f'<h1>Sweep</h1><p class="lead">{html.escape(about)}</p><div class="figures">{places}</div>'
    path.write_text(page(f"simlab sweep: {header.model}", body, charts), "utf-8")
