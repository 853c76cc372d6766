"""`simlab ppl`: the perplexity of texts under each cell, with what separates it from the first cell.

Step mode decodes token by token, so that the cache is in the state decode leaves it in. Wide mode
evaluates a window in one graph, as perplexity is commonly taken; every position of a layer is then routed
before any expert of it is read, the cache holds what earlier layers left, and a policy that looks at it
acts on far fewer slots. It is there to show that. Rules: engine-semantics, section 5.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simlab.errors import InputError
from simlab.judge.scores.scoring import (
    Engines,
    ItemAnswer,
    Results,
    Tick,
    cell_numbers,
    cells_table,
    fingerprint,
    open_cells,
    run_cells,
)
from simlab.judge.stats import Interval, block_bootstrap_mean, paired_difference
from simlab.record.engine import Engine
from simlab.record.llama import log_probability
from simlab.record.plan import SKIP, wide_graphs
from simlab.record.recorder import Recorder
from simlab.trace.provenance import text_digest
from simlab.types import Cell, CellNumbers, Provenance, TraceHeader

LEAST_TOKENS = SKIP + 2
"""Below this nothing is scored."""


class Text(NamedTuple):
    """A text to score."""

    name: str
    tokens: list[int]


@dataclass(frozen=True)
class Perplexity:
    """One cell on one text, or on all of them."""

    numbers: CellNumbers
    """`nll` and `ppl` are over the scored tokens."""
    text: str | None
    """None: all texts together, each token weighing the same."""
    wide: bool
    losses: list[np.ndarray]
    """Per text, float64 `[scored tokens]`: nats per token."""
    hit_rate: float
    """Share of scored tokens that were the model's first choice."""
    nll_interval: Interval
    difference: float
    """Mean of this cell's losses minus the first cell's, token by token, in nats."""
    difference_interval: Interval


def score_texts(
    engines: Engines,
    cells: Sequence[Cell],
    texts: Sequence[Text],
    *,
    wide: bool = False,
    results: Results | None = None,
    progress: Tick | None = None,
) -> list[Perplexity]:
    """Score every text under every cell, each from an empty cache and a throw-away decode.

    Returns one entry per cell and text, cells outermost; with several texts one more per cell, for all.
    Differences are against the first cell.

    Raises:
        InputError: a text with fewer than 10 tokens, or a graph too small for a wide window.
    """
    for text in texts:
        if len(text.tokens) < LEAST_TOKENS:
            raise InputError(
                f"--text {text.name}: has {len(text.tokens)} tokens, at least {LEAST_TOKENS} are needed "
                f"to score one"
            )

    def run(engine: Engine, recorder: Recorder | None, item: int, tick: Tick) -> ItemAnswer:
        losses, hits = (_wide if wide else _step)(engine, texts[item].tokens, recorder, tick)
        return {"losses": losses, "hits": hits}

    header = engines.for_cell(cells[0]).header()
    results = results or Results(None, {})
    run_cells(engines, cells, len(texts), run, results, keep_cache=False, warm_up=True, progress=progress)
    answers = [results.of_cell(at, len(texts)) for at in range(len(cells))]
    groups: list[tuple[str | None, list[int]]] = [(t.name, [i]) for i, t in enumerate(texts)]
    if len(texts) > 1:
        groups.append((None, list(range(len(texts)))))
    return [
        _perplexity(
            engines.provenance(cell, text_digest([texts[i].tokens for i in chosen])),
            cell,
            header,
            name,
            wide,
            [of_cell[i] for i in chosen],
            [answers[0][i] for i in chosen],
        )
        for cell, of_cell in zip(cells, answers, strict=True)
        for name, chosen in groups
    ]


def _step(
    engine: Engine, tokens: Sequence[int], recorder: Recorder | None, tick: Tick
) -> tuple[list[float], list[bool]]:
    losses, hits = [], []
    for result in engine.score(tokens, recorder, tick):
        if result.nll is not None:
            assert result.logits is not None
            assert result.plan.next_index is not None
            losses.append(result.nll)
            hits.append(int(np.argmax(result.logits)) == tokens[result.plan.next_index])
    return losses, hits


def _wide(
    engine: Engine, tokens: Sequence[int], recorder: Recorder | None, tick: Tick
) -> tuple[list[float], list[bool]]:
    losses, hits = [], []
    for plan in wide_graphs(len(tokens), engine.window):
        engine.forget_context()
        logits = engine.run_graph(plan, tokens[plan.start : plan.stop], None, recorder).logits
        assert logits is not None
        for row, following in zip(logits[SKIP:], tokens[plan.start + SKIP + 1 :], strict=False):
            losses.append(-log_probability(row, following))
            hits.append(int(np.argmax(row)) == following)
        tick(plan.stop / len(tokens))
    return losses, hits


def _perplexity(
    provenance: Provenance,
    cell: Cell,
    header: TraceHeader,
    name: str | None,
    wide: bool,
    answers: Sequence[ItemAnswer],
    first: Sequence[ItemAnswer],
) -> Perplexity:
    losses = [np.array(a["losses"]) for a in answers]
    hits = [hit for a in answers for hit in a["hits"]]
    difference, interval = paired_difference([np.array(a["losses"]) for a in first], losses)
    return Perplexity(
        cell_numbers(
            cell, header, [a["counts"] for a in answers], provenance, float(np.concatenate(losses).mean())
        ),
        name,
        wide,
        losses,
        sum(hits) / len(hits),
        block_bootstrap_mean(losses),
        difference,
        interval,
    )


# ---------------------------------------------------------------------------------------------------------
# The command


def to_json(score: Perplexity) -> dict[str, Any]:
    """A cell in the contract's form, with the keys of this score."""
    from simlab.cli.output import cell_to_json, json_value

    added = {
        "mode": "wide" if score.wide else "step",
        "text": score.text,
        "scored_tokens": sum(map(len, score.losses)),
        "next_token_hit_rate": score.hit_rate,
        "nll_interval": score.nll_interval,
        "nll_difference": score.difference,
        "nll_difference_interval": score.difference_interval,
        "ppl_ratio": math.exp(score.difference),
        "ppl_ratio_interval": [math.exp(x) for x in score.difference_interval],
    }
    return cell_to_json(score.numbers) | json_value(added)


def score_table(scores: Sequence[Perplexity]) -> str:
    """Scores for reading, one line each."""
    rows = []
    for s in scores:
        low, high = s.difference_interval
        words = [
            f"{math.exp(s.numbers.nll or 0.0):.3f}",
            f"{100 * s.hit_rate:.1f}",
            f"{s.difference:+.4f}",
            f"{low:+.4f} to {high:+.4f}",
            f"{math.exp(s.difference):.4f}",
            f"{math.exp(low):.4f} to {math.exp(high):.4f}",
        ]
        rows.append((s.numbers, words))
    head = ["ppl", "next-token hit %", "nll difference", "95 %", "ppl ratio", "95 %"]
    several = len({s.text for s in scores}) > 1
    return cells_table(head, rows, [s.text or "all" for s in scores] if several else None)


def read_texts(paths: Sequence[str], engine: Engine) -> list[Text]:
    """The texts of files, tokenised by the vocabulary's own rule.

    Raises:
        InputError: a file that cannot be read, or is named twice.
    """
    texts = []
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"--text {path}: is named twice")
        try:
            texts.append(Text(path, engine.windowed(engine.tokenize(Path(path).read_bytes()))))
        except OSError as error:
            raise InputError(f"--text {path}: {error.strerror}") from error
    return texts


def widen(engines: Engines, texts: Sequence[Text], ubatch: int | None) -> None:
    """Make the engine's graphs long enough for the longest window of these texts.

    Raises:
        InputError: `--ubatch` asks for shorter ones.
    """
    window = engines.get().window
    longest = min(window, max(len(t.tokens) for t in texts))
    if ubatch is not None and ubatch < longest:
        raise InputError(
            f"--ubatch {ubatch}: --wide needs {longest} or more here, a graph holds a whole window "
            "(--ctx makes windows shorter)"
        )
    engines.reopen(n_ubatch=max(longest, ubatch or 0))


def ppl_command(args: argparse.Namespace) -> None:
    """`simlab ppl`."""
    from simlab.cli.options import engine_options
    from simlab.cli.output import Progress, print_json

    options = engine_options(args)
    with Engines(args.model, options) as engines:
        cells, _ = open_cells(args, engines)
        texts = read_texts(args.text, engines.for_cell(cells[0]))
        if args.wide:
            widen(engines, texts, args.ubatch)
        digest = text_digest([t.tokens for t in texts])
        asked = fingerprint("ppl", engines, digest, cells, {**options, "wide": args.wide})
        with Results(args.resume, asked) as results, Progress("ppl") as progress:
            scores = score_texts(engines, cells, texts, wide=args.wide, results=results, progress=progress)
    if args.json:
        print_json([to_json(s) for s in scores])
    else:
        print(score_table(scores))
