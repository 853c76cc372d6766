"""A chart as an SVG picture, for pages that run no scripts: a README, a slide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import vl_convert

from simlab.charts.sweeps import sweep_charts
from simlab.charts.theme import AnyChart, themed
from simlab.errors import InputError
from simlab.types import CellNumbers

_BORDER_PX = 14


def write_sweep_picture(path: Path, numbers: Sequence[CellNumbers]) -> None:
    """Write the first chart of a sweep's page, on white.

    Raises:
        InputError: the cells differ in nothing that a chart shows.
        OSError: the file cannot be written.
    """
    charts = sweep_charts(numbers)
    if not charts:
        raise InputError("--chart: the cells differ in neither margin, budget nor policy: nothing to draw")
    path.write_text(svg_text(next(iter(charts.values()))), "utf-8")


def svg_text(chart: AnyChart) -> str:
    """A chart as SVG, on white: a picture cannot follow the reader's light or dark setting."""
    spec = themed(chart).to_dict() | {"background": "white", "padding": _BORDER_PX}
    return vl_convert.vegalite_to_svg(spec)  # pyright: ignore[reportCallIssue]  (its stub forgets defaults)
