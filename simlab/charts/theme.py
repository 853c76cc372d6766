"""One look for every chart: sizes, colours, and the parts charts share.

Colours that must differ between a light and a dark background (text, axes, grid) are left to the page or the
notebook; those set here are legible on both, and told apart with any common colour vision. A chart carries
its own rows and no more than `MOST_ROWS` of them: whoever has more draws sums, steps or every n-th.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from simlab.errors import RunError

try:
    import altair as alt
except ImportError as error:
    raise RunError(
        f"charts need the package '{error.name}', which is not installed: pip install 'simlab[charts]'"
    ) from error

AnyChart = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart
Shaped = TypeVar("Shaped", alt.Chart, alt.LayerChart)
Drawn = TypeVar("Drawn", bound=AnyChart)

MOST_ROWS = 5000
"""Rows one data set of a chart may hold."""
WIDTH, HEIGHT = 360, 290
NOTEBOOK_WIDTH = 340
"""Two charts with their labels beside each other on a page of 1,280 pixels."""
LABEL_GAP_PX = 15
"""Between two labels that stand below one another."""

RAMP = ("#a02fe4", "#3ea1e9", "#2c7557", "#df790f")
"""Purple, blue, green, orange, from the smallest cache to the largest; legible on white and on black."""
PURPLE, BLUE, GREEN, ORANGE = RAMP
GREY = "#8a929c"
HEAT = "blues"
"""Of shares and counts in cells of a grid."""

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 8},
    "legend": {"titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12},
    "title": {"anchor": "start", "fontSize": 15, "subtitleFontSize": 12, "offset": 14},
    "text": {"fontSize": 12},
}
"""Vega-Lite configuration without colours; a page adds those of its background, a notebook its theme's."""

MARGIN_TITLE = "Margin L (share of the token's score range)"
CYCLES_TITLE = "Cache budget (token cycles)"
MISS_TITLE = "Decode miss rate (% of lookups)"
READ_TITLE = "Read from flash (MiB per decode token)"
MASS_TITLE = "Router mass displaced (% of a routing event's probability)"


def themed(chart: Drawn) -> Drawn:
    """The chart with the look that all share."""
    return chart.configure(**CONFIG)


def in_notebook(chart: Shaped) -> Shaped:
    """The same for notebooks, whose theme colours titles and axes; grid and labels suit a light and a dark one."""
    axis = {**CONFIG["axis"], "gridColor": f"{GREY}40", "domainColor": GREY, "tickColor": GREY}
    config: dict[str, Any] = CONFIG | {"axis": axis, "text": {**CONFIG["text"], "color": GREY}}
    return chart.properties(width=NOTEBOOK_WIDTH).configure(**config)


def data(rows: Sequence[Mapping[str, Any]]) -> alt.Data:
    """Rows inside the chart itself.

    Raises:
        ValueError: more than `MOST_ROWS`, which the caller has to bring down.
    """
    if len(rows) > MOST_ROWS:
        raise ValueError(f"{len(rows)} rows in a chart, at most {MOST_ROWS}")
    return alt.Data(values=[dict(row) for row in rows])


def thinned(rows: Sequence[Any], most: int | None = None) -> list[Any]:
    """At most `most` (left out: `MOST_ROWS`) of the rows, evenly spread, both ends among them."""
    n, most = len(rows), MOST_ROWS if most is None else most
    if n <= most:
        return list(rows)
    return [rows[round(i * (n - 1) / (most - 1))] for i in range(most)]


def layered(*charts: alt.Chart) -> alt.LayerChart:
    """Charts on top of one another, the first at the bottom."""
    return alt.LayerChart(layer=list(charts))


def finished(chart: Shaped, title: str, subtitle: str, width: int = WIDTH, height: int = HEIGHT) -> Shaped:
    """The chart at its size, with title and subtitle; a screen reader is told the title."""
    titled = alt.Title(title, subtitle=subtitle)
    return chart.properties(width=width, height=height, title=titled, description=title)


def by_size(field: str, rows: Sequence[Mapping[str, Any]]) -> alt.Color:
    """Colour of a field whose rows have a `size`: along the ramp from the smallest to the largest."""
    domain = list(dict.fromkeys(r[field] for r in sorted(rows, key=lambda r: (r["size"], r[field]))))
    steps = max(len(domain) - 1, 1)
    colours = [ramp(i / steps) for i in range(len(domain))]
    return alt.Color(f"{field}:N").scale(domain=domain, range=colours).legend(None)


def ramp(place: float) -> str:
    """The colour at 0 (first) to 1 (last) of the ramp."""
    part, between = divmod(place * (len(RAMP) - 1), 1)
    stops = [RAMP[min(int(part) + i, len(RAMP) - 1)] for i in (0, 1)]
    low, high = ([int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops)
    return "#" + "".join(f"{round(a + (b - a) * between):02x}" for a, b in zip(low, high, strict=True))


def end_labels(
    rows: Sequence[Mapping[str, Any]], value: str, x: alt.X, y: alt.Y, colour: alt.Color
) -> tuple[alt.Chart, alt.Chart]:
    """The name of each series right of the plot, and a thin line to it from the series' last point.

    Args:
        rows: with `series` and the field `value`, in drawing order.
    """
    last = {r["series"]: dict(r) for r in rows}
    ends = sorted(last.values(), key=lambda r: r[value])
    top = max((r[value] for r in rows), default=0.0)
    gap = top * min(LABEL_GAP_PX / HEIGHT, 1 / max(len(ends), 1))
    place = -gap
    for end in ends:
        place = end["label_y"] = max(end[value], place + gap)
    chart = alt.Chart(data(ends))
    # The word "width" is this plot's own; the signal of that name is that of all charts that are joined.
    leaders = chart.mark_rule(strokeWidth=1, strokeDash=[2, 2], opacity=0.8, x2Offset=22).encode(
        x=x, y=y, x2=alt.value("width"), y2="label_y:Q", color=colour
    )
    names = chart.mark_text(align="left", baseline="middle", dx=26).encode(
        x=alt.value("width"), y="label_y:Q", text="series:N", color=colour
    )
    return leaders, names


def merge_close(
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
