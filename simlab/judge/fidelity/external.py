"""`simlab fidelity --engine-binary`: replays beside runs of a program of the BigMoeOnEdge family.

A route trace says which experts ran and with which weights, and carries no scores. So a cell is replayed

- on simlab's own recording of the text under the original routing, which has the scores that a margin needs (L1), and
- where it needs none, on what the binary itself routed under the original routing (`OWN`): the same program on both
  sides, so that what is left is the replay's error and no difference between two engines.

Both stand beside the binary's run of the same text, its tokens forced (L2). A prompt that the binary continues freely
(L3) is only replayed on its own run: what it wrote is not known as tokens, so nothing else could be.

The router's picks under a margin are not in a route trace either. What the binary says of its substituted slots is one
number of the whole run: it is shown, and has no interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from simlab.cells import MIB
from simlab.errors import InputError, RunError
from simlab.judge.against import is_exact
from simlab.judge.external import counted_tokens
from simlab.judge.fidelity.errors import Counts, Off, counts_of_recording, counts_of_replays
from simlab.judge.fidelity.grid import FREE, REPLAY, WHOLE, FidelityRow, Plan, compare, original_cell
from simlab.judge.fidelity.runs import RunStore
from simlab.judge.scores.ppl import Text
from simlab.judge.scores.scoring import Tick
from simlab.judge.stats import UNKNOWN
from simlab.record.engine import Engine
from simlab.record.external import ExternalEngine, ExternalRun, Source
from simlab.types import Cell, TraceHeader

OWN = "own-L2"
"""What is compared: a replay of the binary's own route trace, with forced tokens."""
LEGEND = (
    "Live: runs of the engine binary. own: a replay of the binary's own route trace under the original routing; the\n"
    "other replays are of simlab's recording of the text. Substituted slots are the binary's own count, without an\n"
    "interval."
)
_MOST_TRIMMED = 8
"""Tokens given up at a text's end until its bytes are read back as the same tokens."""
_UNEVEN = 1
"""Tokens by which two engines may differ in where they stop: the last one has nothing to be scored on."""


@dataclass(frozen=True)
class BinaryRun:
    """What a run of the binary did."""

    counts: Counts
    substituted: int | None
    """Decode slots, all together; null where it did not say."""


def run_texts(
    plan: Plan, store: RunStore, binary: ExternalEngine, folder: Path, progress: Tick | None = None
) -> list[FidelityRow]:
    """Record every text, run the binary on it under each cell, replay, and compare.

    Args:
        plan: its texts and cells; no set, no free runs.
        folder: an existing one, for the texts as files and for what the binary writes.

    Raises:
        InputError: the binary has no such cell, or a text cannot be given to it. RunError: the binary failed.
    """
    own_cell = original_cell(plan.cells[0])
    header = store.engines.get().header()
    for cell in plan.cells:  # before anything runs
        binary.arguments(cell, header, Source(text=folder), folder)
    texts = [_as_bytes(store.engines.get(), text) for text in plan.texts]
    plan = replace(plan, texts=texts)
    say = progress or (lambda _share: None)
    (bases,) = store.record(texts, [own_cell], lambda share: say(0.2 * share))
    live: list[list[BinaryRun]] = []
    own_replays, of_simlab = [], []
    plain = [i for i, cell in enumerate(plan.cells) if not _needs_scores(cell)]
    for i, (text, base) in enumerate(zip(texts, bases, strict=True)):
        file = folder / f"{text.name}.txt"
        file.write_bytes(store.engines.get().detokenize(text.tokens))
        of_simlab.append(counts_of_replays(base, plan.cells))
        tick = _share(say, 0.2 + 0.8 * i / len(texts), 0.8 / len(texts))
        first, runs = _run_cells(
            binary, own_cell, plan.cells, header, Source(text=file), folder / text.name, tick
        )
        live.append(runs)
        own_replays.append(_own_replays(first, [plan.cells[c] for c in plain]))
    rows = []
    for compared, places, replays in ((REPLAY, range(len(plan.cells)), of_simlab), (OWN, plain, own_replays)):
        by_cell = [
            [_even(binary, replays[t][at], live[t][c].counts) for t in range(len(texts))]
            for at, c in enumerate(places)
        ]
        ours = [[pair[0] for pair in of_cell] for of_cell in by_cell]
        theirs = [[pair[1] for pair in of_cell] for of_cell in by_cell]
        rows += compare(compared, plan, places, ours, theirs, bases[0])
    return [_with_totals(row, plan, live) for row in rows]


def run_prompt(
    cells: Sequence[Cell],
    binary: ExternalEngine,
    header: TraceHeader,
    source: Source,
    folder: Path,
    progress: Tick | None = None,
) -> list[FidelityRow]:
    """Let the binary continue a prompt under each cell, beside replays of what it wrote under the original routing.

    Raises:
        InputError: a cell needs scores, or the binary does not have it. RunError: the binary failed.
    """
    for cell in cells:
        if _needs_scores(cell):
            raise InputError(
                f"--route {cell.route.name}: needs the router's scores, and the route trace of what the binary writes "
                "carries none; give a --text in place of --prompt"
            )
        binary.arguments(cell, header, source, folder)
    first, runs = _run_cells(
        binary,
        original_cell(cells[0]),
        cells,
        header,
        source,
        folder / "prompt",
        progress or (lambda _share: None),
    )
    replays = [[counts] for counts in _own_replays(first, cells)]
    plan = Plan([Text("prompt", [])], cells)
    return compare(FREE, plan, range(len(cells)), replays, [[run.counts] for run in runs], first.trace)


def whole_mib(cycles: str, header: TraceHeader) -> str:
    """A budget in token cycles as the nearest whole MiB, as the binary takes it, at least one."""
    n = float(cycles.removesuffix("cycles")) * header.cycle_bytes() / MIB
    return f"{max(1, round(n))}MiB"


def binary_counts(run: ExternalRun, cell: Cell) -> Counts:
    """Counts of a binary's run; substituted slots of single tokens are NaN under a margin.

    Raises:
        InputError: as `counts_of_recording`.
    """
    tokens, _ = counted_tokens(run.trace, cell)
    trace = replace(run.trace, tokens=tokens.lazy().with_columns(substituted=pl.lit(0, pl.Int64)))
    counts = counts_of_recording(trace)
    if not _needs_scores(cell):
        return counts
    unknown = np.full(counts.of["slots"].shape, np.nan)
    return Counts({**counts.of, "substituted": unknown})


def _needs_scores(cell: Cell) -> bool:
    """Of the cells that the binary has: whether a margin is armed."""
    return bool(cell.margin)


def _as_bytes(engine: Engine, text: Text) -> Text:
    """A text that another tokenizer run reads back as the same tokens: its end given up where it would not.

    Raises:
        InputError: it does not, whatever is given up.
    """
    for cut in range(_MOST_TRIMMED):
        tokens = text.tokens[: len(text.tokens) - cut]
        if engine.windowed(engine.tokenize(engine.detokenize(tokens))) == list(tokens):
            return Text(text.name, tokens)
    raise InputError(
        f"--text {text.name}: its first {len(text.tokens)} tokens are other tokens when read as a file of their own; "
        "ask for another number of --tokens"
    )


def _share(say: Tick, start: float, part: float) -> Tick:
    return lambda share: say(start + part * share)


def _run_cells(
    binary: ExternalEngine,
    own_cell: Cell,
    cells: Sequence[Cell],
    header: TraceHeader,
    source: Source,
    folder: Path,
    tick: Tick,
) -> tuple[ExternalRun, list[BinaryRun]]:
    """The binary's run under the original routing, and what it did under each cell."""

    def run(cell: Cell, name: str) -> ExternalRun:
        place = folder / name
        place.mkdir(parents=True)
        return binary.run(cell, header, source, place)

    first, found = run(own_cell, "original"), []
    for i, cell in enumerate(cells):
        tick((i + 1) / (len(cells) + 1))
        done = first if cell == own_cell else run(cell, str(i))
        found.append(BinaryRun(binary_counts(done, cell), done.substituted))
    tick(1.0)
    return first, found


def _own_replays(own: ExternalRun, cells: Sequence[Cell]) -> list[Counts]:
    """Replays of the binary's own route trace; a margin of nothing is the original routing, and needs no scores."""
    asked = [original_cell(cell) if is_exact(cell) else cell for cell in cells]
    return counts_of_replays(own.trace, asked) if asked else []


def _even(binary: ExternalEngine, replay: Counts, live: Counts) -> tuple[Counts, Counts]:
    """Both over the same tokens.

    Raises:
        RunError: they are of different texts.
    """
    n = min(replay.n_tokens, live.n_tokens)
    if max(replay.n_tokens, live.n_tokens) - n > _UNEVEN:
        raise RunError(
            f"{binary.binary}: decoded {live.n_tokens} tokens of a text that the replay has {replay.n_tokens} of; it "
            "reads the text as other tokens, or began to score elsewhere"
        )
    return replay.part(slice(n)), live.part(slice(n))


def _with_totals(row: FidelityRow, plan: Plan, live: Sequence[Sequence[BinaryRun]]) -> FidelityRow:
    """A row of whole texts with the binary's own count of substituted slots, where it gave one."""
    place = plan.cells.index(row.cell)
    if row.part != WHOLE or not _needs_scores(row.cell):
        return row
    runs = [of[place] for of, text in zip(live, plan.texts, strict=True) if row.text in (None, text.name)]
    if any(run.substituted is None for run in runs):
        return row
    slots = sum(int(run.counts.of["slots"].sum()) for run in runs)
    share = 100 * sum(run.substituted or 0 for run in runs) / slots
    known = row.errors.substituted.replay
    off = Off(known, share, known - share, UNKNOWN)
    return replace(row, errors=replace(row.errors, substituted=off))
