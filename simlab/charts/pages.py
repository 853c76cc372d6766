"""Offline pages that carry charts.

A page is one HTML file with the charting library inside, so it draws without a network and keeps working when
a CDN is gone. It follows the reader's light or dark setting.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import polars as pl

from simlab.cells import MIB
from simlab.charts.anatomy import curve_chart, explain_chart, layer_chart, reuse_chart
from simlab.charts.grids import grid_chart
from simlab.charts.sweeps import sweep_charts
from simlab.charts.theme import MISS_TITLE, AnyChart, themed
from simlab.charts.words import REPLAY_LABEL, model_name, size_text, source_label
from simlab.cli.output import json_value
from simlab.errors import RunError
from simlab.judge.misses.explain import Explanation
from simlab.judge.misses.explain_text import Section, sections, subtitle
from simlab.types import CellNumbers, Scope

try:
    import vl_convert
except ImportError as error:
    raise RunError(
        f"pages with charts need the package '{error.name}', which is not installed: pip install 'simlab[charts]'"
    ) from error

if TYPE_CHECKING:
    from simlab.trace.store import Trace


def page(title: str, body: str, charts: Mapping[str, AnyChart]) -> str:
    """One HTML file that draws `charts` with nothing from the network.

    Args:
        body: HTML, already escaped; the chart named `x` appears in the element with id `chart-x`.
    """
    template = resources.files("simlab.charts").joinpath("page.html").read_text("utf-8")
    specs = {name: _spec(chart) for name, chart in charts.items()}
    # Inside <script>, only "</script" and "<!--" end or change what the parser reads.
    data = json.dumps(json_value(specs), allow_nan=False).replace("<", "\\u003c")
    library = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]  (its stub forgets a default)
    library = library.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return Template(template).substitute(
        title=html.escape(title), body=body, charts=data, library=library if charts else ""
    )


def _spec(chart: AnyChart) -> dict[str, Any]:
    spec: dict[str, Any] = themed(chart).to_dict()
    del spec["$schema"]  # an address, though nobody would fetch it
    return spec


def figure(name: str, caption: str) -> str:
    """The place of a chart on a page; `caption` is plain text."""
    return (
        f'<figure><div class="chart" id="chart-{html.escape(name)}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


CAPTIONS = {
    "margin": "How often a decode lookup misses the cache as the margin grows.",
    "budget": "What a larger cache is worth, policy by policy.",
    "policy": "Which policy misses least; a dot for each budget.",
    "tradeoff": "What the saved reads cost: router probability that no longer runs. Down and left is better.",
    "comparison": "Each number is a row of the table above.",
    "layers": "Decode only, layer by layer.",
    "reuse": "Decode only. What lies beyond the budget is missed, whatever LRU does.",
    "grid": "Decode only. A dark column is text that uses other experts, a dark row a layer that changes often.",
    "pareto": "Only live runs know speed and perplexity. These were traced, which costs time: a hint, no benchmark.",
}


def write_sweep_page(path: Path, numbers: Sequence[CellNumbers], trace: Trace) -> None:
    """Write one offline page with the charts of a sweep.

    Raises:
        OSError: the file cannot be written.
    """
    header = trace.header
    charts = sweep_charts(numbers)
    about = (
        f"{model_name(header.model)}: {len(header.moe_layers)} MoE layers of {header.n_expert} experts, "
        f"{header.n_expert_used} per token. Every number on this page is {source_label(numbers)}."
    )
    places = "".join(figure(name, CAPTIONS[name]) for name in charts) or (
        "<p>These cells differ in neither margin, budget nor policy, and the trace has no scores to tell displaced "
        "mass from: nothing to draw.</p>"
    )
    body = f'<h1>Sweep</h1><p class="lead">{html.escape(about)}</p><div class="figures">{places}</div>'
    path.write_text(page(f"simlab sweep: {model_name(header.model)}", body, charts), "utf-8")


def write_curve_page(path: Path, curve: pl.DataFrame, trace: Trace, scope: Scope) -> None:
    """Write one offline page with the LRU curve.

    Raises:
        OSError: the file cannot be written.
    """
    header = trace.header
    about = (
        f"{model_name(header.model)}: {len(header.moe_layers)} MoE layers of {header.n_expert} experts, "
        f"{header.n_expert_used} per token; one token cycle is {size_text(header.cycle_bytes() / MIB)} MiB "
        f"(dashed). Every number on this page is {REPLAY_LABEL}, and exact for every budget."
    )
    charts: dict[str, AnyChart] = {"curve": curve_chart(curve, header, scope)}
    body = (
        f'<h1>LRU curve</h1><p class="lead">{html.escape(about)}</p>'
        + figure("curve", "An LRU cache at every size, decode; the first steps are a budget of a few bytes.")
    )  # fmt: skip
    path.write_text(page(f"simlab curve: {model_name(header.model)}", body, charts), "utf-8")


def write_explain_page(path: Path, explanation: Explanation) -> None:
    """Write one offline page: the verdict, what it rests on, one chart, the tables.

    Raises:
        OSError: the file cannot be written.
    """
    e = explanation
    because = "".join(f"<span>{html.escape(line)}</span>" for line in e.verdict.because)
    body = [
        f"<h1>{html.escape(model_name(e.header.model))}</h1>",
        f'<p class="lead">{html.escape(subtitle(e))}. Every cache figure is {REPLAY_LABEL}.</p>',
        f'<p class="verdict"><strong>{html.escape(e.verdict.sentence)}</strong>{because}</p>',
    ]
    charts: dict[str, AnyChart] = {}
    if e.decode.counts["lookups"]:
        charts |= {
            "explain": explain_chart(e),
            "layers": layer_chart(e),
            "reuse": reuse_chart(e),
            "grid": grid_chart(e.grid, "miss_percent", "Where and when it misses", MISS_TITLE),
        }
        body.append(figure("explain", "Decode only. Bars that are mostly grey or blue: no eviction helps."))
        more = "".join(figure(name, CAPTIONS[name]) for name in ("layers", "reuse", "grid"))
        body.append(f'<div class="figures">{more}</div>')
    body += [_html(section) for section in sections(e)]
    path.write_text(page(f"simlab explain: {model_name(e.header.model)}", "\n".join(body), charts), "utf-8")


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
