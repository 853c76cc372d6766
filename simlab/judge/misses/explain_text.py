"""An explanation as words and tables, for the terminal, for a page, and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from simlab.cells import MIB, route_spec
from simlab.cli.output import align
from simlab.judge.misses.explain import Explanation, Phase, Rate

_READS, _COMPUTE, _MANAGEMENT = "waiting for reads", "compute", "cache management"
_LARGEST_PART = {
    _READS: ": fewer or earlier reads are what speeds it up",
    _COMPUTE: ": what a cache saves shows only in part",
    _MANAGEMENT: ": handling the cache costs more than it waits for",
}
_MEASURED = "Measured when the trace was recorded, not simulated."


@dataclass(frozen=True)
class Section:
    """A heading, plain lines, and a table whose first row is its heading."""

    title: str
    lines: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


def explain_text(explanation: Explanation) -> str:
    """The page for a terminal: the verdict first, then what it rests on."""
    e = explanation
    out = [
        f"{e.trace.path}: {e.header.model} ({e.header.arch})",
        subtitle(e),
        "Cache figures are replay (simulated); decode and prefill apart; [low, high] are 95 % intervals.",
        "",
        f"VERDICT: {e.verdict.kind}",
        e.verdict.sentence,
        *(f"  - {line}" for line in e.verdict.because),
    ]
    for section in sections(e):
        out += ["", section.title.upper(), *section.lines]
        if section.table:
            out.append(align(section.table))
    return "\n".join(out)


def subtitle(e: Explanation) -> str:
    """The cell in one line."""
    route = route_spec(e.cell.route)
    size = (
        "no cache"
        if e.budget.off
        else f"{e.budget.total_bytes / MIB:,.2f} MiB = {e.budget.total_bytes / e.cycle_bytes:.3g} token cycles"
    )
    return (
        f"{route}, evict {e.cell.evict_spec}, scope {e.cell.scope}, {size}, {e.decode.tokens:,} decode tokens"
    )


def sections(explanation: Explanation) -> list[Section]:
    """Everything below the verdict, in reading order."""
    e = explanation
    found = [_sizes(e), _misses(e)]
    if e.changes:
        found.append(_changes(e))
    if e.working_set.height:
        found.append(_working_set(e))
    if e.reuse.height:
        found.append(_reuse(e))
    if e.timing is not None:
        found.append(_times(e))
    else:
        found.append(Section("Time", ("The trace has no timings: reads and compute cannot be compared.",)))
    if e.layers.height:
        found.append(_layers(e))
    if e.windows.height:
        found.append(_windows(e))
    return found


def _sizes(e: Explanation) -> Section:
    header, cycle = e.header, e.cycle_bytes
    layers = len(header.moe_layers)
    lines = [
        f"One token cycle, what one token asks for: {e.top_k * layers} entries in {layers} MoE layers, {cycle:,} bytes "
        f"= {cycle / MIB:,.2f} MiB.",
        f"All experts: {header.n_expert * layers:,} entries, {header.expert_bytes / MIB:,.1f} MiB.",
    ]
    if not e.budget.off:
        total = e.budget.total_bytes
        lines.append(
            f"The budget: {total:,} bytes = {total / MIB:,.2f} MiB, {total / cycle:.3g} cycles, "
            f"{100 * total / header.expert_bytes:.3g} % of all experts."
        )
    foot = e.foot_bytes
    if e.budget.per_layer:
        lines.append(
            "The cliff: none, a cache per layer keeps its k newest entries until the layer comes round."
        )
    elif foot is None:
        lines.append("The cliff: none, with one MoE layer nothing comes between two tokens.")
    else:
        lines.append(
            "The cliff: a global LRU with the router's own routing hits nothing in one-token decode up to "
            f"{foot:,} bytes = {foot / MIB:,.2f} MiB ({foot / cycle:.3g} cycles), and climbs steeply up to one cycle."
            + ("" if e.budget.off else f" This budget is {_standing(e.budget.total_bytes, foot, cycle)}.")
        )
    return Section("Sizes", tuple(lines))


def _standing(total: int, foot: int, cycle: int) -> str:
    if total <= foot:
        return "below the climb"
    return "on the climb" if total < cycle else f"above the climb, at {total / cycle:.3g} cycles"


def _misses(e: Explanation) -> Section:
    phases = [("decode", e.decode), ("prefill", e.prefill)]

    def row(what: str, word: Any) -> tuple[str, ...]:
        return (what, *(word(phase) for _, phase in phases))

    table = (
        ("", *(name for name, _ in phases)),
        row("tokens", lambda p: f"{p.tokens:,}"),
        row("lookups", lambda p: f"{p.counts['lookups']:,}"),
        row("hits", lambda p: f"{p.counts['hits']:,}"),
        row("hit rate, %", lambda p: _percent_rate(p.hit_rate)),
        row("misses", lambda p: f"{p.counts['misses']:,}"),
        row("  cold: first use of the entry", lambda p: _of_misses(p, "cold")),
        row("  policy: Belady hits it", lambda p: _of_misses(p, "policy")),
        row("  budget: Belady misses it too", lambda p: _of_misses(p, "budget")),
        row("MiB read per token", lambda p: _rate(p.mib_per_token)),
        row("misses under Belady", lambda p: f"{p.counts['optimum_misses']:,}"),
        row("hit rate under Belady, %", lambda p: _percent_rate(p.optimum_hit_rate)),
        row("MiB read per token under Belady", lambda p: _rate(p.optimum_mib_per_token)),
    )
    lines = (
        "Belady evicts what is used again last, at the same budget, on the routing that ran; "
        + (
            "entries are of one size, so no eviction has fewer misses."
            if e.belady_is_best
            else "entries are of several sizes, so another eviction may have fewer misses."
        ),
        *(
            ["The recording read ahead: the cell's hits count what came in early, Belady's do not."]
            if e.look_ahead
            else []
        ),
    )
    return Section("Misses at this budget", lines, table)


def _changes(e: Explanation) -> Section:
    table = [("decode", "hit %", "MiB/token", "mass displaced")]
    table += [
        (c.what, _number(c.hit_rate, 100, 1), _number(c.mib_per_token, 1, 2), _number(c.mass_displaced, 1, 4))
        for c in e.changes
    ]
    lines = ["Simulated. Substitution rows keep the recorded scores; only a live run tells what they cost."]
    if not any(c.mass_displaced is not None for c in e.changes):
        lines = ["Simulated."]
        if e.cell.route.name == "original" and not e.budget.off:
            lines.append("The trace has no scores, so other routings cannot be tried on it.")
    return Section("What would change it", tuple(lines), tuple(table))


def _working_set(e: Explanation) -> Section:
    table = [("tokens", "entries", "MiB", "of the budget")]
    table += [
        (str(r["tokens"]), f"{r['entries']:.1f}", f"{r['mib']:.2f}", _number(r["of_budget"], 1, 2))
        for r in e.working_set.iter_rows(named=True)
    ]
    return Section(
        "Working set of the decode",
        ("Distinct entries that so many consecutive tokens use, mean over all such stretches.",),
        tuple(table),
    )


def _reuse(e: Explanation) -> Section:
    again = sum(e.reuse["lookups"])
    first = e.decode.counts["lookups"] - again
    table = [("cycles", "lookups", "%")]
    for r in e.reuse.iter_rows(named=True):
        upper = "" if r["to_cycles"] is None else f" to {r['to_cycles']:g}"
        table.append(
            (f"{r['from_cycles']:g}{upper or ' or more'}", f"{r['lookups']}", f"{100 * r['share']:.1f}")
        )
    table.append(("never before", str(first), _number(first / (again + first), 100, 1)))
    return Section(
        "Reuse distances of the decode",
        (
            "The smallest LRU cache, in token cycles, that would still hold the entry when it is looked up again.",
        ),
        tuple(table),
    )


def _times(e: Explanation) -> Section:
    t = e.timing
    assert t is not None
    parts = {
        _READS: t.read_wait_ms,
        _COMPUTE: t.compute_ms,
        _MANAGEMENT: t.management_ms,
    }
    lines = [
        _MEASURED + ("" if t.same_cache else " It ran at another cache size than the one explained here."),
        f"{_rate(t.wall_ms)} ms per decode token over {t.tokens:,} tokens: "
        + ", ".join(f"{name} {'unknown' if ms is None else f'{ms:.2f} ms'}" for name, ms in parts.items())
        + ".",
    ]
    share = t.read_share
    if share is not None:
        most = "any number of" if share >= 1 else f"at most {1 / (1 - share):.2f}"
        lines.append(
            f"Reads are {100 * share:.0f} % of the time: without any, this decode would be {most} times as fast."
        )
    known = {name: ms for name, ms in parts.items() if ms is not None}
    if len(known) > 1 and share is not None:
        largest = max(known, key=lambda name: known[name])
        lines.append(f"The largest part is {largest}{_LARGEST_PART[largest]}.")
    return Section("Time", tuple(lines))


def _layers(e: Explanation) -> Section:
    table = [
        ("layer", "lookups", "hit %", "Belady hit %", "cold", "policy", "budget", "median reuse, cycles")
    ]
    table += [
        (
            str(r["layer"]),
            str(r["lookups"]),
            _number(r["hit_rate"], 100, 1),
            _number(r["optimum_hit_rate"], 100, 1),
            *(str(r[kind]) for kind in ("cold", "policy", "budget")),
            _number(r["median_reuse_bytes"], 1 / e.cycle_bytes, 2),
        )
        for r in e.layers.iter_rows(named=True)
    ]
    return Section("By layer, decode", (), tuple(table))


def _windows(e: Explanation) -> Section:
    table = [("from token", "tokens", "hit %", "Belady hit %", "cold", "policy", "budget", "MiB/token")]
    table += [
        (
            str(r["window"]),
            str(r["tokens"]),
            _number(r["hit_rate"], 100, 1),
            _number(r["optimum_hit_rate"], 100, 1),
            *(str(r[kind]) for kind in ("cold", "policy", "budget")),
            f"{r['read_bytes'] / MIB / r['tokens']:.2f}",
        )
        for r in e.windows.iter_rows(named=True)
    ]
    return Section("Along the decode", (), tuple(table))


def _of_misses(phase: Phase, kind: str) -> str:
    n, misses = phase.counts[kind], phase.counts["misses"]
    return f"{n:,} ({100 * n / misses:.0f} %)" if misses else "0"


def _percent_rate(rate: Rate) -> str:
    low, high = rate.interval
    return _rate(Rate(100 * rate.value, type(rate.interval)(100 * low, 100 * high)), 1)


def _rate(rate: Rate, digits: int = 2) -> str:
    if math.isnan(rate.value):
        return "-"
    low, high = rate.interval
    spread = "" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{rate.value:.{digits}f}{spread}"


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{scale * value:.{digits}f}"


def explain_to_json(explanation: Explanation) -> dict[str, Any]:
    """The same as plain values; sizes in bytes unless a name says MiB, shares between 0 and 1."""
    e = explanation
    cell, t = e.cell, e.timing

    def phase(p: Phase) -> dict[str, Any]:
        rates = {
            name: {"value": r.value, "low": r.interval.low, "high": r.interval.high}
            for name in ("hit_rate", "optimum_hit_rate", "mib_per_token", "optimum_mib_per_token")
            for r in [getattr(p, name)]
        }
        return {"tokens": p.tokens, **p.counts, **rates}

    return {
        "source": "replay",
        "trace": str(e.trace.path),
        "model": e.header.model,
        "route": cell.route.known_name,
        "knobs": dict(cell.route.knobs),
        "top_k": e.top_k,
        "evict": cell.evict,
        "evict_knobs": dict(cell.evict_knobs),
        "scope": "per_layer" if e.budget.per_layer else "global",
        "budget_bytes": None if e.budget.off else e.budget.total_bytes,
        "budget_cycles": e.budget.total_bytes / e.cycle_bytes,
        "cycle_bytes": e.cycle_bytes,
        "cycle_entries": e.top_k * len(e.header.moe_layers),
        "cliff_foot_bytes": e.foot_bytes,
        "verdict": e.verdict._asdict(),
        "decode": phase(e.decode),
        "prefill": phase(e.prefill),
        "changes": [c._asdict() for c in e.changes],
        "working_set": e.working_set.to_dicts(),
        "reuse": e.reuse.to_dicts(),
        "by_layer": e.layers.to_dicts(),
        "along_decode": e.windows.to_dicts(),
        "timing": None
        if t is None
        else {
            "source": "live",
            "same_cache": t.same_cache,
            "tokens": t.tokens,
            "wall_ms": {"value": t.wall_ms.value, **t.wall_ms.interval._asdict()},
            "read_wait_ms": t.read_wait_ms,
            "compute_ms": t.compute_ms,
            "management_ms": t.management_ms,
            "read_share": t.read_share,
        },
    }
