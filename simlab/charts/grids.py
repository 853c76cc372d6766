"""Charts of where and when: stretches of tokens by layer, and the experts whose part in the routing changed."""

from __future__ import annotations

import polars as pl

from simlab.charts.theme import BLUE, HEAT, HEIGHT, ORANGE, alt, data, finished
from simlab.charts.words import REPLAY_LABEL

_MOST_EXPERTS = 24


def grid_chart(
    grid: pl.DataFrame, value: str, title: str, legend: str, source: str = REPLAY_LABEL
) -> alt.Chart:
    """Layers up, decode tokens across, a value as colour.

    Args:
        grid: a row per stretch of tokens and layer: `token` (its first), `tokens`, `layer` and the value,
            at most `MOST_ROWS` of them (`simlab.judge.grids.grid`).
        value: name of the column drawn.
        legend: what it is, with its unit.
    """
    rows = [
        {"from": r["token"], "to": r["token"] + r["tokens"], "layer": r["layer"], "value": r[value]}
        for r in grid.iter_rows(named=True)
    ]
    n_layers = grid["layer"].n_unique()
    return finished(
        alt.Chart(data(rows))
        .mark_rect()
        .encode(
            x=alt.X("from:Q").title("Decode token").scale(nice=False),
            x2="to:Q",
            y=alt.Y("layer:O")
            .title("Layer of the model")
            .sort("descending")
            .axis(alt.Axis(labelOverlap=True)),
            color=alt.Color("value:Q")
            .scale(scheme=HEAT, domainMin=0)
            .legend(
                alt.Legend(
                    title=legend, orient="top", gradientLength=180, gradientThickness=10, titleLimit=360
                )
            ),
            tooltip=[
                alt.Tooltip("layer:O", title="Layer"),
                alt.Tooltip("from:Q", title="From token"),
                alt.Tooltip("to:Q", title="Before token"),
                alt.Tooltip("value:Q", title=legend, format=".3~r"),
            ],
        ),
        title,
        source,
        height=max(100, min(HEIGHT, 26 * n_layers)),
    )


def expert_chart(changed: pl.DataFrame) -> alt.Chart:
    """The experts with most changes: times brought in (right) and left out (left) against the router's own routing.

    Args:
        changed: as `simlab.judge.misses.grids.changed_experts` gives it.
    """
    shown = changed.head(_MOST_EXPERTS)
    kinds = {"brought_in": "ran, not picked by the router", "left_out": "picked by the router, did not run"}
    rows = []
    for r in shown.iter_rows(named=True):
        for kind, sign in (("brought_in", 1), ("left_out", -1)):
            name = f"layer {r['layer']}, expert {r['expert']}"
            rows.append({"expert": name, "kind": kinds[kind], "times": r[kind], "drawn": sign * r[kind]})
    few = f"; the {shown.height} most changed of {changed.height:,}" if shown.height < changed.height else ""
    return finished(
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            y=alt.Y("expert:N").title(None).sort(list(dict.fromkeys(r["expert"] for r in rows))),
            x=alt.X("drawn:Q")
            .title("Decode rows: left out (left), brought in (right)")
            .axis(alt.Axis(labelExpr="abs(datum.value)", tickMinStep=1)),
            color=alt.Color("kind:N")
            .scale(domain=list(kinds.values()), range=[BLUE, ORANGE])
            .legend(alt.Legend(title=None, orient="top", columns=1, labelLimit=260)),
            tooltip=[
                alt.Tooltip("expert:N", title="Expert"),
                alt.Tooltip("kind:N", title="What"),
                alt.Tooltip("times:Q", title="Decode rows", format=","),
            ],
        ),
        "Experts that changed",
        REPLAY_LABEL + few,
        height=max(60, 18 * shown.height),
    )
