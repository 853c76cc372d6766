"""Tables and lists of the report, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from simlab.charts.words import (
    LIVE_LABEL,
    REPLAY_LABEL,
    budget_label,
    count_text,
    rate_text,
    route_label,
    source_label,
)
from simlab.judge.report.verdict import DASH, mib_text, percent_text, ppl_text
from simlab.types import Cell, CellNumbers, Comparison

WIDE_MARGIN = 0.20
"""From this margin on, replies read well while the model behind them is worse."""
DAGGER = "†"
_LONG_SWEEP = 40
_NUMBERS = (
    "Hit rate (%)", "MiB per token", "Slots substituted (%)", "Slots dropped (%)", "Router mass displaced (%)",
)  # fmt: skip
_INTERVALS = (
    ("hit_rate", 100, 1), ("read_mib_per_token", 1, 2), ("substituted", 100, 1), ("dropped", 100, 1),
    ("mass_displaced", 100, 2),
)  # fmt: skip
"""Of the same columns: the name of the interval, its scale and decimals."""


def section(title: str, content: str) -> str:
    """A heading with what stands under it; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def bullets(lines: Sequence[str]) -> str:
    """Plain lines as a list."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def facts_list(facts: Mapping[str, str | None]) -> str:
    """Names and what they are; None is not known."""
    words = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value or 'not known')}</dd></div>"
        for name, value in facts.items()
    )
    return f"<dl>{words}</dl>"


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: int = 1,
    caption: str = "",
    kind: str = "compact",
) -> str:
    """Plain words as a table.

    Args:
        words: columns from the left that hold words, not numbers.
        caption: plain text below.
    """

    def cell(place: int, word: str) -> str:
        return f"<td{_word(place < words)}>{escape(word)}</td>"

    body = "".join(f"<tr>{''.join(cell(i, w) for i, w in enumerate(row))}</tr>" for row in rows)
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table class="{kind}">{said}{_head(head, words)}<tbody>{body}</tbody></table></div>'


def _head(names: Sequence[str], words: int) -> str:
    cells = [f'<th scope="col"{_word(i < words)}>{escape(n)}</th>' for i, n in enumerate(names)]
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _word(is_word: bool) -> str:
    return ' class="word"' if is_word else ""


def side_by_side(facts: Mapping[str, Mapping[str, str | None]]) -> str:
    """The facts of several traces, a column each."""
    names = list(dict.fromkeys(name for one in facts.values() for name in one))
    rows = [[name, *(one.get(name) or "not known" for one in facts.values())] for name in names]
    return table(["", *facts], rows, words=1 + len(facts), kind="facts")


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Replay and live run of each cell, one below the other, live figures with their intervals."""
    head = _head(["#", "Cell", "Source", *_NUMBERS, "Tokens/s", "Perplexity", "Perplexity / first"], 3)
    body = []
    for number, pair in enumerate(comparisons, 1):
        cell = pair.live.cell
        where = escape(budget_label(pair.live)) + _evict(cell)
        name = (
            f'<td class="word" rowspan="2">{number}</td><th scope="rowgroup" rowspan="2">'
            f"{escape(_route(cell))}<small>{where}</small></th>"
        )
        for n, label, first in ((pair.replay, REPLAY_LABEL, name), (pair.live, LIVE_LABEL, "")):
            cells = "".join(f"<td>{word}</td>" for word in (*_with_intervals(n), *_live_words(n)))
            body.append(f'<tr class="{n.source}">{first}<td class="word">{label}</td>{cells}</tr>')
    caption = (
        "Decode only. Small: 95 % intervals, block bootstraps over tokens. Speed and perplexity are known for live "
        f"runs only; perplexity over that of the first cell is paired token by token. {DAGGER} see the end of the page."
    )
    return (
        f'<div class="scroll"><table class="pair"><caption>{escape(caption)}</caption>{head}'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _with_intervals(numbers: CellNumbers) -> list[str]:
    """The decode numbers as HTML, intervals small below where they are known."""
    found = []
    for word, (name, scale, digits) in zip(decode_words(numbers), _INTERVALS, strict=True):
        found.append(escape(word) + _small(numbers, name, f".{digits}f", scale))
    return found


def _bracketed(numbers: CellNumbers) -> list[str]:
    """The decode numbers as plain words, intervals in brackets where they are known."""
    found = []
    for word, (name, scale, digits) in zip(decode_words(numbers), _INTERVALS, strict=True):
        low, high = numbers.intervals.get(name, (0.0, 0.0))
        known = f" [{scale * low:.{digits}f}, {scale * high:.{digits}f}]" if low < high else ""
        found.append(word + known)
    return found


def _small(numbers: CellNumbers, name: str, form: str, scale: float = 1) -> str:
    """An interval as HTML, or nothing where it is not known or has no width."""
    ends = numbers.intervals.get(name, (0.0, 0.0))
    low, high = (format(scale * end, form) for end in ends)
    return f"<small>{low} to {high}</small>" if ends[0] < ends[1] else ""


def _live_words(n: CellNumbers) -> list[str]:
    if n.source == "replay":
        return [DASH, DASH, DASH]
    ratio = DASH if n.ppl_ratio is None else f"{n.ppl_ratio:.4f}"
    return [
        (DASH if n.tok_s is None else rate_text(n.tok_s)) + _small(n, "tok_s", ".3g"),
        ppl_text(n.ppl) + _small(n, "ppl", ".4g"),
        ratio + _small(n, "ppl_ratio", ".4f"),
    ]


def sweep_table(sweep: Sequence[CellNumbers]) -> str:
    """The cells of a sweep; what is the same in every row is said once, above the table."""
    names = _settings(sweep)
    common = [f"{name.lower()} {v[0]}" for name, v in names.items() if len(set(v)) == 1 and v[0]]
    names = {name: values for name, values in names.items() if len(set(values)) > 1}
    rows = [
        [
            *(values[i] for values in names.values()),
            *_bracketed(n),
            f"{n.decode.cold_misses:,}",
            f"{n.decode.capacity_misses:,}",
        ]
        for i, n in enumerate(sweep)
    ]
    title = ", ".join([count_text(len(sweep), "cell"), "decode", source_label(sweep), *common])
    body = table([*names, *_NUMBERS, "Cold misses", "Capacity misses"], rows, words=len(names))
    return _folded(f"Table: {title}", body, open_=len(sweep) <= _LONG_SWEEP)


def same_cells_table(sweeps: Mapping[str, Sequence[CellNumbers]]) -> str:
    """Hit rate and MiB per token of the cells that every trace has, a column per trace each; or nothing."""

    def setting(cell: Cell) -> tuple[str, ...]:
        return cell.budget.text, _route(cell), cell.evict_spec, cell.scope.replace("_", " ")

    by_setting = [{setting(n.cell): n for n in sweep} for sweep in sweeps.values()]
    shared = [key for key in by_setting[0] if all(key in other for other in by_setting)]
    if not shared or len(by_setting) < 2:
        return ""
    names = ("Budget", "Routing", "Eviction", "Scope")
    differ = [i for i in range(len(names)) if len({key[i] for key in shared}) > 1] or [0]
    head = [names[i] for i in differ]
    head += [f"{what}, {trace}" for what in _NUMBERS[:2] for trace in sweeps]
    rows = []
    for key in shared:
        cells = [cells[key] for cells in by_setting]
        rates = [percent_text(n.decode.hit_rate) for n in cells]
        rows.append([*(key[i] for i in differ), *rates, *map(mib_text, cells)])
    source = source_label([n for sweep in sweeps.values() for n in sweep])
    title = f"Table: the same {count_text(len(shared), 'cell')} on each trace, decode, {source}"
    return _folded(title, table(head, rows, words=len(differ)), open_=len(rows) <= _LONG_SWEEP)


def _settings(sweep: Sequence[CellNumbers]) -> dict[str, list[str]]:
    return {
        "Budget": [budget_label(n) for n in sweep],
        "Routing": [_route(n.cell) for n in sweep],
        "Eviction": [n.cell.evict_spec for n in sweep],
        "Scope": [n.cell.scope.replace("_", " ") for n in sweep],
        "Experts per token": [str(n.top_k) for n in sweep],
        "Note": [n.note or "" for n in sweep],
    }


def _folded(title: str, content: str, *, open_: bool) -> str:
    return f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>{content}</details>"


def decode_words(numbers: CellNumbers) -> list[str]:
    """The decode numbers of a cell in the order of the tables."""
    d = numbers.decode
    return [
        percent_text(d.hit_rate),
        mib_text(numbers),
        percent_text(None if d.substituted is None or not d.slots else d.substituted / d.slots),
        percent_text(d.dropped / d.slots if d.slots else None),
        percent_text(d.mass_displaced, 2),
    ]


def _route(cell: Cell) -> str:
    wide = cell.margin is not None and cell.margin >= WIDE_MARGIN
    return route_label(cell) + (f" {DAGGER}" if wide else "")


def _evict(cell: Cell) -> str:
    words = [cell.evict_spec] if cell.evict != "lru" else []
    words += ["per layer"] if cell.scope == "per_layer" else []
    return escape("".join(f", {w}" for w in words))
