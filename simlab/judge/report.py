"""The report: what was run, what replay said, what the live engine measured, in one offline HTML file.

Every number stands beside its source, "replay (simulated)" or "live (measured)", because the two answer
different questions: a replay knows what a cache would have read, and nothing of speed or of quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from simlab.cells import MIB
from simlab.charts.live import comparison_chart
from simlab.charts.pages import CAPTIONS, figure, page
from simlab.charts.sweeps import sweep_charts
from simlab.charts.words import (
    LIVE_LABEL,
    REPLAY_LABEL,
    budget_label,
    rate_text,
    route_label,
    size_text,
    source_label,
)
from simlab.cli.output import write_whole
from simlab.types import Cell, CellNumbers, Comparison, TraceHeader

DASH = "–"
WIDE_MARGIN = 0.20
"""From this margin on, replies read well while the model behind them is worse."""
PPL_LIMIT = 0.05
"""The verdict names the largest cut in reads among cells within this share of more perplexity."""
MASS_LIMIT = 0.02
"""The same for a sweep without live runs: router mass displaced, as a share."""
_LONG_SWEEP = 40
_DAGGER = "†"
_CAVEATS = (
    f"{REPLAY_LABEL}: the recorded scores are replayed while cache and routing follow each cell. A changed "
    "routing would have changed later scores, and a replay does not see that; only live runs do.",
    f"{LIVE_LABEL}: speed and perplexity exist for live runs only. A hit rate is not a throughput.",
    "One text, one machine, one run of each cell: differences of a few per cent may be chance.",
    "A traced run is not a benchmark run: recording costs time. Take tokens/s here as a hint and measure "
    "speed with untraced runs in interleaved order.",
    f"{_DAGGER} Margins of {WIDE_MARGIN:.2f} and more: replies will read well while the model behind them is "
    "worse. Judge by perplexity and tasks, never by reading.",
)


def write_report(
    path: Path,
    *,
    header: TraceHeader,
    recorded: CellNumbers | None,
    sweep: Sequence[CellNumbers],
    comparisons: Sequence[Comparison],
    commands: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Write the report by a temporary file and rename.

    Args:
        header: of the trace that was replayed.
        recorded: numbers of the recording itself, where known.
        sweep: replayed cells, for the sweep table and the charts.
        comparisons: picks, replayed and run live on the same token ids.
        commands: what to type to repeat it, in order.
        notes: plain sentences shown before the caveats.

    Raises:
        RunError: the charts extra is missing, or the file cannot be written.
    """
    charts = sweep_charts(sweep, [c.replay for c in comparisons])
    figures = "".join(figure(name, CAPTIONS[name]) for name in charts)
    sections = [
        f'<h1>{escape(header.model)}</h1><p class="lead">Expert-cache policies: replay beside live runs</p>',
        _verdict_box(sweep, comparisons),
        _section("What was run", _facts(header, recorded, sweep, comparisons)),
    ]
    if comparisons:
        charts["comparison"] = comparison_chart(comparisons)
        content = _comparison_table(comparisons) + figure("comparison", CAPTIONS["comparison"])
        sections.append(_section("Replay beside live", content))
    if sweep:
        drawn = f'<div class="figures">{figures}</div>' if figures else ""
        sections.append(_section(f"The sweep, {source_label(sweep)}", drawn + _sweep_table(sweep)))
    if notes:
        sections.append(_section("Notes", _list(notes)))
    sections.append(_section("Before you believe it", _list(_CAVEATS)))
    if commands:
        lines = escape("\n".join(commands))
        sections.append(_section("To repeat it", f"<pre><code>{lines}</code></pre>"))
    text = page(f"simlab report: {header.model}", "\n".join(sections), charts)
    write_whole(path, lambda temporary: temporary.write_text(text, "utf-8"))


# ---------------------------------------------------------------------------------------------------------
# The verdict


def verdict(sweep: Sequence[CellNumbers], comparisons: Sequence[Comparison]) -> tuple[str, str]:
    """One sentence computed from the data, and how it was chosen (plain text).

    Live runs come first; a sweep alone gives a sentence that says nothing was measured.
    """
    usable = [c for c in comparisons if c.live.decode.read_mib_per_token is not None]
    pairs = [(_baseline(c.live, [b.live for b in usable]), c) for c in usable if not _exact(c.live.cell)]
    against = [(base, c) for base, c in pairs if base is not None]
    if against:
        base, best = min(against, key=lambda pair: _live_rank(*pair))
        rule = f"Of {_count(len(against), 'lossy cell')} run live: "
        if _ppl_increase(base, best.live) is None:
            rule += "the largest cut in reads; perplexity was not measured."
        elif _live_rank(base, best)[0] == 0:
            rule += f"the largest cut in reads with at most {100 * PPL_LIMIT:g} % more perplexity."
        else:
            rule += f"all cost more than {100 * PPL_LIMIT:g} % perplexity; this one costs least."
        return _live_sentence(base, best), f"{rule} {_replay_error(usable)}"
    if usable:
        live, replay = usable[0].live, usable[0].replay
        return (
            f"{_at(live)} reads {_mib(live)} MiB per token, {LIVE_LABEL}; "
            f"replay predicted {_mib(replay)} MiB.",
            "No lossy cell was run live beside the router's own routing at the same budget. "
            + _replay_error(usable),
        )
    return _sweep_verdict(sweep)


def _sweep_verdict(sweep: Sequence[CellNumbers]) -> tuple[str, str]:
    known = [n for n in sweep if n.decode.read_mib_per_token is not None]
    pairs = [(_baseline(n, known), n) for n in known if not _exact(n.cell)]
    against = [(base, n) for base, n in pairs if base is not None and n.decode.mass_displaced is not None]
    if not against:
        what = "no lossy cell to set beside the router's own routing" if known else "no numbers"
        return f"Nothing was run live, and the sweep has {what}.", ""
    base, best = min(against, key=lambda pair: _sweep_rank(*pair))
    mass = _percent(best.decode.mass_displaced, 2)
    sentence = (
        f"{_at(best)} would {_cut(base, best)} flash reads from {_mib(base)} to {_mib(best)} MiB per "
        f"token with {mass} % of the router mass displaced, {source_label([base, best])}."
    )
    if _sweep_rank(base, best)[0] == 0:
        rule = f"the largest cut with at most {100 * MASS_LIMIT:g} % of the router mass displaced"
    else:
        rule = f"every cell displaces more than {100 * MASS_LIMIT:g} % of the router mass; this one the least"
    return sentence, f"Nothing was run live. Of {_count(len(against), 'lossy cell')} of the sweep: {rule}."


def _live_rank(base: CellNumbers, pair: Comparison) -> tuple[int, float]:
    increase = _ppl_increase(base, pair.live)
    within = increase is None or increase <= PPL_LIMIT
    return (0, _read_ratio(base, pair.live)) if within else (1, increase or 0.0)


def _sweep_rank(base: CellNumbers, numbers: CellNumbers) -> tuple[int, float]:
    mass = numbers.decode.mass_displaced or 0.0
    return (0, _read_ratio(base, numbers)) if mass <= MASS_LIMIT else (1, mass)


def _live_sentence(base: CellNumbers, best: Comparison) -> str:
    increase = _ppl_increase(base, best.live)
    cost = "perplexity not measured"
    if increase is not None:
        change = f"{100 * abs(increase):.1f} % {'more' if increase > 0 else 'less'}"
        change = "unchanged" if change.startswith("0.0 ") else change
        cost = f"at {change} perplexity ({_ppl(base.ppl)} to {_ppl(best.live.ppl)})"
    return (
        f"{_at(best.live)} {_cut(base, best.live)}s flash reads from {_mib(base)} to {_mib(best.live)} MiB "
        f"per token, {LIVE_LABEL}, {cost}; replay predicted {_mib(best.replay)} MiB."
    )


def _replay_error(comparisons: Sequence[Comparison]) -> str:
    reads = [
        abs(c.replay.decode.read_mib_per_token - c.live.decode.read_mib_per_token)
        for c in comparisons
        if c.replay.decode.read_mib_per_token is not None and c.live.decode.read_mib_per_token is not None
    ]
    hits = [
        100 * abs(c.replay.decode.hit_rate - c.live.decode.hit_rate)
        for c in comparisons
        if c.replay.decode.hit_rate is not None and c.live.decode.hit_rate is not None
    ]
    if not reads or not hits:
        return ""
    return (
        f"Replay was off by at most {max(reads):.2g} MiB per token and {max(hits):.1f} points of hit "
        f"rate over {_count(len(comparisons), 'cell')} run both ways."
    )


def _exact(cell: Cell) -> bool:
    """Whether a cell runs the router's own routing."""
    return all(
        s.policy.name == "original"
        or (s.policy.name == "substitute" and s.knobs["L"] == 0)
        or (s.policy.name == "drop_cold" and s.knobs["F"] == 0)
        for s in cell.route.steps
    )


def _baseline(numbers: CellNumbers, others: Sequence[CellNumbers]) -> CellNumbers | None:
    """The exact cell at the same budget and eviction, if any."""

    def place(cell: Cell) -> tuple[object, ...]:
        return cell.budget, cell.evict, dict(cell.evict_knobs), cell.scope

    return next((o for o in others if _exact(o.cell) and place(o.cell) == place(numbers.cell)), None)


def _ppl_increase(base: CellNumbers, numbers: CellNumbers) -> float | None:
    return None if not base.ppl or numbers.ppl is None else numbers.ppl / base.ppl - 1


def _read_ratio(base: CellNumbers, numbers: CellNumbers) -> float:
    before, after = base.decode.read_mib_per_token, numbers.decode.read_mib_per_token
    return (after or 0.0) / before if before else 1.0


def _at(numbers: CellNumbers) -> str:
    return f"At {budget_label(numbers).replace('cycle', 'token cycle')}, {route_label(numbers.cell)}"


def _cut(base: CellNumbers, numbers: CellNumbers) -> str:
    return "cut" if _read_ratio(base, numbers) < 1 else "bring"


def _verdict_box(sweep: Sequence[CellNumbers], comparisons: Sequence[Comparison]) -> str:
    sentence, how = verdict(sweep, comparisons)
    more = f"<span>{escape(how)}</span>" if how else ""
    return f'<p class="verdict"><strong>{escape(sentence)}</strong>{more}</p>'


# ---------------------------------------------------------------------------------------------------------
# Parts of the page


def _facts(
    header: TraceHeader,
    recorded: CellNumbers | None,
    sweep: Sequence[CellNumbers],
    comparisons: Sequence[Comparison],
) -> str:
    known = [n for n in (recorded, *(c.live for c in comparisons), *sweep) if n is not None]
    cycle = header.cycle_bytes()
    layers = len(header.moe_layers)
    experts = f"{header.n_expert} per MoE layer, {header.n_expert_used} per token"
    budget = None
    if header.budget_bytes == 0:
        budget = "no cache"
    elif header.budget_bytes is not None:
        budget = (
            f"{size_text(header.budget_bytes / MIB)} MiB ({header.budget_bytes / cycle:.3g} token cycles)"
        )
    knobs = ", ".join(f"{name} = {value:g}" for name, value in header.knobs.items())
    route = " ".join(filter(None, [header.route, knobs])) or None
    facts = {
        "Model": f"{header.model} ({header.arch})",
        "Layers": f"{header.n_layer}, {'all' if layers == header.n_layer else layers} with experts",
        "Experts": f"{experts}; {size_text(header.expert_bytes / MIB)} MiB in all",
        "Token cycle": f"{size_text(cycle / MIB)} MiB: what one token asks for",
        "Recorded at": budget,
        "Recorded routing": route and f"{route}, evict {header.evict or '?'}",
        "Decode tokens": f"{known[0].decode.tokens:,}" if known else None,
        "I/O mode": header.io_mode,
        "CPU": header.cpu,
        "Engine": " ".join(filter(None, [header.engine, header.engine_version])) or None,
        "Created": header.created,
        "Text (hash)": header.text_hash and header.text_hash[:16],
    }
    if recorded is not None:
        source = LIVE_LABEL if recorded.source == "live" else REPLAY_LABEL
        facts["The recorded run"] = (
            f"{_percent(recorded.decode.hit_rate)} % hits, {_mib(recorded)} MiB per token, {source}"
        )
    words = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value or 'not known')}</dd></div>"
        for name, value in facts.items()
    )
    return f"<dl>{words}</dl>"


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    head = _head(
        ["#", "Cell", "Source", "Hit rate (%)", "MiB per token", "Slots substituted (%)",
         "Slots dropped (%)", "Router mass displaced (%)", "Tokens/s", "Perplexity"],
        words=("#", "Cell", "Source"),
    )  # fmt: skip
    body = []
    for number, pair in enumerate(comparisons, 1):
        cell = pair.live.cell
        where = escape(budget_label(pair.live)) + _evict(cell)
        name = (
            f'<td class="word" rowspan="2">{number}</td><th scope="rowgroup" rowspan="2">'
            f"{escape(_route(cell))}<small>{where}</small></th>"
        )
        for n, label, first in ((pair.replay, REPLAY_LABEL, name), (pair.live, LIVE_LABEL, "")):
            speed = (
                [DASH, DASH]
                if n.source == "replay"
                else [DASH if n.tok_s is None else rate_text(n.tok_s), _ppl(n.ppl)]
            )
            words = [*_decode_words(n), *speed]
            cells = "".join(f"<td>{word}</td>" for word in words)
            body.append(f'<tr class="{n.source}">{first}<td class="word">{label}</td>{cells}</tr>')
    caption = (
        f"Decode only. Speed and perplexity are known for live runs only. {_DAGGER} see the end of the page."
    )
    return (
        f'<div class="scroll"><table class="pair"><caption>{caption}</caption>{head}'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _sweep_table(sweep: Sequence[CellNumbers]) -> str:
    names = {
        "Budget": [budget_label(n) for n in sweep],
        "Routing": [_route(n.cell) for n in sweep],
        "Eviction": [n.cell.evict for n in sweep],
        "Scope": [n.cell.scope.replace("_", " ") for n in sweep],
        "Experts per token": [str(n.top_k) for n in sweep],
    }
    # What is the same in every row is said once, above the table.
    common = [f"{name.lower()} {values[0]}" for name, values in names.items() if len(set(values)) == 1]
    names = {name: values for name, values in names.items() if len(set(values)) > 1}
    numbers = ["Hit rate (%)", "MiB per token", "Slots substituted (%)", "Slots dropped (%)",
               "Router mass displaced (%)", "Cold misses", "Capacity misses"]  # fmt: skip
    body = []
    for i, n in enumerate(sweep):
        words = "".join(f'<td class="word">{escape(values[i])}</td>' for values in names.values())
        counts = [*_decode_words(n), f"{n.decode.cold_misses:,}", f"{n.decode.capacity_misses:,}"]
        body.append(f"<tr>{words}{''.join(f'<td>{w}</td>' for w in counts)}</tr>")
    opened = " open" if len(sweep) <= _LONG_SWEEP else ""
    title = ", ".join([_count(len(sweep), "cell"), "decode", source_label(sweep), *common])
    return (
        f"<details{opened}><summary>Table: {escape(title)}</summary>"
        f'<div class="scroll"><table class="compact">{_head([*names, *numbers], words=tuple(names))}'
        f"<tbody>{''.join(body)}</tbody></table></div></details>"
    )


def _decode_words(numbers: CellNumbers) -> list[str]:
    d = numbers.decode
    return [
        _percent(d.hit_rate),
        _mib(numbers),
        _percent(d.substituted / d.slots if d.slots else None),
        _percent(d.dropped / d.slots if d.slots else None),
        _percent(d.mass_displaced, 2),
    ]


def _head(names: Sequence[str], words: Sequence[str]) -> str:
    kinds = [' class="word"' if name in words else "" for name in names]
    cells = [f'<th scope="col"{k}>{escape(n)}</th>' for k, n in zip(kinds, names, strict=True)]
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _route(cell: Cell) -> str:
    wide = cell.margin is not None and cell.margin >= WIDE_MARGIN
    return route_label(cell) + (f" {_DAGGER}" if wide else "")


def _evict(cell: Cell) -> str:
    words = [cell.evict] if cell.evict != "lru" else []
    words += ["per layer"] if cell.scope == "per_layer" else []
    return escape("".join(f", {w}" for w in words))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _percent(share: float | None, digits: int = 1) -> str:
    return DASH if share is None else f"{100 * share:.{digits}f}"


def _mib(numbers: CellNumbers) -> str:
    value = numbers.decode.read_mib_per_token
    return DASH if value is None else rate_text(value)


def _ppl(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"
