"""Words for cells and numbers, shared by charts, tables and pages; nothing here draws.

A *variant* is everything of a cell but its margin and its budget; a *series* is the cells that differ in
nothing but what a chart's axis shows, drawn as one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal

from simlab.types import Cell, CellNumbers, PhaseNumbers, Step

REPLAY_LABEL = "replay (simulated)"
LIVE_LABEL = "live (measured)"


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
    words = [] if cell.route.router_known else ["routing as it ran"]
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


def model_name(model: str) -> str:
    """A model's name without the folders before it: a phone's recording names it by the whole path there."""
    return PurePosixPath(model).name


def rate_text(value: float) -> str:
    """MiB per token, tokens per second: decimals by size, so that a column of like numbers lines up."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f}"


def size_text(value: float) -> str:
    """MiB of a size that was chosen, three digits without trailing zeros: `2,000`, `3.19`, `8`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def count_text(number: int, noun: str) -> str:
    """`1 cell`, `2,000 cells`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def source_label(numbers: Sequence[CellNumbers]) -> str:
    """Where numbers come from, simulated or measured."""
    sources = {n.source for n in numbers}
    words = [w for s, w in (("replay", REPLAY_LABEL), ("live", LIVE_LABEL)) if s in sources]
    return " and ".join(words) or REPLAY_LABEL


def series_labels(numbers: Sequence[CellNumbers], along: Literal["margin", "budget"] = "margin") -> list[str]:
    """The name of each cell's series on an axis of margins or of budgets: of what differs, what it is.

    Along margins a series is named by its budget and by the parts of its variant that are not the same
    everywhere; along budgets by such parts alone, its routing among them.
    """
    variants = [_variant(n, along) for n in numbers]
    differs = [len(set(column)) > 1 for column in zip(*variants, strict=True)]
    labels = []
    for n, variant in zip(numbers, variants, strict=True):
        words = [word for word, d in zip(variant, differs, strict=True) if d and word]
        if along == "margin":
            words = [budget_label(n), *words]
        labels.append(", ".join(words) or f"{route_label(n.cell)}, {n.cell.evict_spec}")
    return labels


def policy_label(cell: Cell) -> str:
    """Routing and eviction in one line: `L = 0.15, lru`."""
    scope = ", per layer" if cell.scope == "per_layer" else ""
    return f"{route_label(cell)}, {cell.evict_spec}{scope}"


def prices(runs: Sequence[CellNumbers]) -> tuple[str, list[tuple[float | None, float | None, float | None]]]:
    """What live runs cost in perplexity, with the ends of its interval, and what that is.

    The increase over the first cell's (%), paired token by token, where all runs have it; else the perplexity itself,
    whose interval is that of the text and much wider.
    """
    paired = all(n.ppl_ratio is not None for n in runs)
    name = "ppl_ratio" if paired else "ppl"
    title = "Perplexity, increase over the first cell's (%)" if paired else "Perplexity"

    def price(value: float | None) -> float | None:
        return value if value is None or not paired else 100 * (value - 1)

    found = []
    for n in runs:
        low, high = n.intervals.get(name, (None, None))
        found.append((price(getattr(n, name)), price(low), price(high)))
    return title, found


def margin_of(cell: Cell) -> float | None:
    """Where a cell stands on an axis of margins: the router's own routing at 0, other routes nowhere."""
    return 0.0 if cell.route.name == "original" else cell.margin


def substituted_percent(phase: PhaseNumbers) -> float | None:
    """Share of the slots that substitution changed."""
    if phase.substituted is None or not phase.slots:
        return None
    return 100 * phase.substituted / phase.slots


def percent(value: float | None) -> float | None:
    """A share in per cent."""
    return None if value is None else 100 * value


def _default(step: Step, knob: str) -> float:
    return step.policy.knobs[knob].default


def _variant(numbers: CellNumbers, along: Literal["margin", "budget"]) -> tuple[str, ...]:
    cell = numbers.cell
    if along == "budget":
        route = route_label(cell)
    else:
        route = ", ".join(
            f"{s.policy.name} " + " ".join(f"{k}={v:g}" for k, v in s.knobs.items())
            for s in cell.route.steps
            if s.policy.name not in ("substitute", "original", "top_k")
        )
    # Slots of one bounded by the layer are another cache than one bounded as a whole, whatever its bytes.
    return (cell.evict_spec, cell.scope.replace("_", " "), f"k = {numbers.top_k}", route)
