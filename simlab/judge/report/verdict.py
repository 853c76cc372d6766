"""The report's first sentence: computed from the data, with its interval, and how it was chosen.

Live runs come before replays. A sentence on a replay says that it is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from simlab.cells import MIB
from simlab.charts.words import (
    LIVE_LABEL,
    REPLAY_LABEL,
    budget_label,
    count_text,
    rate_text,
    route_label,
    size_text,
    source_label,
)
from simlab.judge.against import baseline, is_exact
from simlab.judge.misses.explain import Explanation, Rate
from simlab.judge.misses.explain_text import subtitle
from simlab.types import CellNumbers, Comparison

DASH = "–"
PPL_LIMIT = 0.05
"""The verdict names the largest cut in reads among cells within this share of more perplexity."""
MASS_LIMIT = 0.02
"""The same for a sweep without live runs: router mass displaced, as a share."""


class Verdict(NamedTuple):
    """Plain text."""

    sentence: str
    how: str
    """How the sentence was chosen, and what it rests on."""


class Chosen(NamedTuple):
    """A lossy cell beside the router's own routing in the same cache."""

    base: CellNumbers
    best: CellNumbers


def live_verdict(comparisons: Sequence[Comparison]) -> Verdict | None:
    """The verdict on live runs; None where none has a number to state."""
    usable = [c for c in comparisons if c.live.decode.read_mib_per_token is not None]
    against = [
        (base, c)
        for c in usable
        if not is_exact(c.live.cell) and (base := baseline(c.live.cell, [o.live for o in usable])) is not None
    ]
    error = _replay_error(usable)
    if against:
        first = comparisons[0].live
        base, best = min(against, key=lambda pair: _live_rank(*pair))
        rule = f"Of {count_text(len(against), 'lossy cell')} run live: "
        if _ppl_increase(base, best.live) is None:
            rule += "the largest cut in reads; perplexity was not measured."
        elif _live_rank(base, best)[0] == 0:
            rule += f"the largest cut in reads with at most {100 * PPL_LIMIT:g} % more perplexity."
        else:
            rule += f"all cost more than {100 * PPL_LIMIT:g} % perplexity; this one costs least."
        return Verdict(_live_sentence(base, best, first), _joined(rule, error, _BRACKETS))
    if usable:
        live, replay = usable[0].live, usable[0].replay
        sentence = (
            f"{_at(live)} reads {_read(live)} MiB per token, {LIVE_LABEL}; replay predicted {mib_text(replay)} "
            "MiB."
        )
        alone = "No lossy cell was run live beside the router's own routing at the same budget."
        return Verdict(sentence, _joined(alone, error, _BRACKETS))
    return None


def sweep_choice(sweep: Sequence[CellNumbers]) -> Chosen | None:
    """The lossy cell a sweep speaks for, with its baseline: the largest cut within `MASS_LIMIT`, or the least mass."""
    against = [
        Chosen(base, n)
        for n in sweep
        if n.decode.read_mib_per_token is not None and n.decode.mass_displaced is not None
        if not is_exact(n.cell) and (base := baseline(n.cell, sweep)) is not None
    ]
    return min(against, key=lambda chosen: _sweep_rank(*chosen), default=None)


def sweep_verdict(sweep: Sequence[CellNumbers], chosen: Chosen | None) -> Verdict:
    """The verdict on a sweep alone.

    Args:
        chosen: from `sweep_choice`, with intervals where they are known.
    """
    if chosen is None:
        known = any(n.decode.read_mib_per_token is not None for n in sweep)
        what = "no lossy cell to set beside the router's own routing" if known else "no numbers"
        return Verdict(f"Nothing was run live, and the sweep has {what}.", "")
    base, best = chosen
    mass = _percent_of(best, "mass_displaced", best.decode.mass_displaced, 2)
    sentence = (
        f"{_at(best)} would {_cut(base, best)} flash reads from {mib_text(base)} to {mib_text(best)} MiB per token"
        f"{_saved(base, best)}, with {mass} of the router mass displaced, {source_label([base, best])}."
    )
    if _sweep_rank(base, best)[0] == 0:
        rule = f"the largest cut with at most {100 * MASS_LIMIT:g} % of the router mass displaced"
    else:
        rule = f"every cell displaces more than {100 * MASS_LIMIT:g} % of the router mass; this one the least"
    lossy = sum(not is_exact(n.cell) and baseline(n.cell, sweep) is not None for n in sweep)
    how = f"Nothing was run live. Of {count_text(lossy, 'lossy cell')} of the sweep: {rule}."
    return Verdict(sentence, _joined(how, _BRACKETS if best.intervals else _NO_INTERVALS))


def trace_verdict(explanation: Explanation) -> Verdict:
    """The verdict on a trace of which nothing but the one cell of an explanation was replayed."""
    e = explanation
    if not e.decode.counts["lookups"]:
        return Verdict(e.verdict.sentence, subtitle(e))
    size, cycles = e.budget.total_bytes / MIB, e.budget.total_bytes / e.cycle_bytes
    where = "Without a cache" if e.budget.off else f"At {cycles:.3g} token cycles ({size_text(size)} MiB)"
    sentence = (
        f"{where}, {route_label(e.cell)}, {e.cell.evict_spec}: {_rate(e.decode.hit_rate, ' %', 100)} of decode "
        f"lookups hit and {_rate(e.decode.mib_per_token, ' MiB')} are read per token, {REPLAY_LABEL}."
    )
    return Verdict(f"{sentence} {e.verdict.sentence}", _BRACKETS)


_BRACKETS = (
    "In brackets: 95 % intervals, block bootstraps over this text's decode tokens; another text differs more."
)
_NO_INTERVALS = (
    "No interval: the two cells cannot be replayed here token by token, being of a policy in a user's file."
)


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _live_rank(base: CellNumbers, pair: Comparison) -> tuple[int, float]:
    increase = _ppl_increase(base, pair.live)
    within = increase is None or increase <= PPL_LIMIT
    return (0, _read_ratio(base, pair.live)) if within else (1, increase or 0.0)


def _sweep_rank(base: CellNumbers, numbers: CellNumbers) -> tuple[int, float]:
    mass = numbers.decode.mass_displaced or 0.0
    return (0, _read_ratio(base, numbers)) if mass <= MASS_LIMIT else (1, mass)


def _live_sentence(base: CellNumbers, best: Comparison, first: CellNumbers) -> str:
    increase = _ppl_increase(base, best.live)
    cost = "perplexity not measured"
    if increase is not None:
        interval = ""
        # Streaming changes no logit: the router's own routing has one perplexity, whatever the cache.
        if is_exact(first.cell) and "ppl_ratio" in best.live.intervals:
            low, high = (100 * (end - 1) for end in best.live.intervals["ppl_ratio"])
            interval = f" [{low:+.1f}, {high:+.1f}]"
        cost = f"perplexity {100 * increase:+.1f} %{interval} ({ppl_text(base.ppl)} to {ppl_text(best.live.ppl)})"
    return (
        f"{_at(best.live)} {_cut(base, best.live)}s flash reads from {mib_text(base)} to {mib_text(best.live)} MiB per "
        f"token{_saved(base, best.live)}, {LIVE_LABEL}, {cost}; replay predicted {mib_text(best.replay)} MiB."
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
        f"rate over {count_text(len(comparisons), 'cell')} run both ways."
    )


def _ppl_increase(base: CellNumbers, numbers: CellNumbers) -> float | None:
    return None if not base.ppl or numbers.ppl is None else numbers.ppl / base.ppl - 1


def _read_ratio(base: CellNumbers, numbers: CellNumbers) -> float:
    before, after = base.decode.read_mib_per_token, numbers.decode.read_mib_per_token
    return (after or 0.0) / before if before else 1.0


def _at(numbers: CellNumbers) -> str:
    return f"At {budget_label(numbers).replace('cycle', 'token cycle')}, {route_label(numbers.cell)}"


def _cut(base: CellNumbers, numbers: CellNumbers) -> str:
    return "cut" if _read_ratio(base, numbers) < 1 else "bring"


def _saved(base: CellNumbers, numbers: CellNumbers) -> str:
    """`, 2.44 [2.31, 2.57] less`, or nothing where the interval is not known."""
    saved = numbers.intervals.get("read_mib_saved")
    if saved is None:
        return ""
    less = (base.decode.read_mib_per_token or 0.0) - (numbers.decode.read_mib_per_token or 0.0)
    return f", {less:.2f} [{saved[0]:.2f}, {saved[1]:.2f}] less"


def _read(numbers: CellNumbers) -> str:
    interval = numbers.intervals.get("read_mib_per_token")
    return mib_text(numbers) + (f" [{rate_text(interval[0])}, {rate_text(interval[1])}]" if interval else "")


def _percent_of(numbers: CellNumbers, name: str, value: float | None, digits: int) -> str:
    interval = numbers.intervals.get(name)
    words = f" [{100 * interval[0]:.{digits}f}, {100 * interval[1]:.{digits}f}]" if interval else ""
    return f"{percent_text(value, digits)} %{words}"


def _rate(rate: Rate, unit: str, scale: float = 1) -> str:
    value, (low, high) = rate
    digits = 1 if scale == 100 else 2
    interval = f" [{scale * low:,.{digits}f}, {scale * high:,.{digits}f}]" if math.isfinite(low) else ""
    return f"{scale * value:,.{digits}f}{unit}{interval}"


# ---------------------------------------------------------------------------------------------------------
# Words that the tables share


def percent_text(share: float | None, digits: int = 1) -> str:
    """A share in per cent, a dash where it is unknown."""
    return DASH if share is None else f"{100 * share:.{digits}f}"


def mib_text(numbers: CellNumbers) -> str:
    """MiB read per decode token."""
    value = numbers.decode.read_mib_per_token
    return DASH if value is None else rate_text(value)


def ppl_text(value: float | None) -> str:
    """A perplexity, digits by its size."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"
