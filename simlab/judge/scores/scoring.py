"""What the three scores share: running cells over items, counting what each run did, resuming after a kill.

A cell is run over its items (texts, questions, problems) one after the other. Each item is recorded to a
trace of its own, measured and thrown away, so that a long score needs the disk of one item; the counts add
up to a cell's numbers. Every finished item is a line of the results file, if one is wanted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from simlab.cells import MIB, effective_k, resolve_budget, route_spec
from simlab.cli.output import align
from simlab.errors import InputError, RunError
from simlab.judge.measure import measure
from simlab.judge.stats import Interval, PairedOutcome
from simlab.locks import locked
from simlab.record.engine import Engine
from simlab.record.ggml import engine_version
from simlab.record.machine import auto_budget
from simlab.record.recorder import Recorder
from simlab.record.run import model_sizes, open_engine
from simlab.trace.provenance import OF_RUN, differing, read_provenance, run_provenance
from simlab.trace.store import Trace, open_trace
from simlab.types import (
    DECODE,
    Cell,
    CellNumbers,
    PhaseNumbers,
    Provenance,
    Route,
    Step,
    TraceHeader,
    known_fields,
)

ItemAnswer = dict[str, Any]
"""What an item gave, as JSON values; its counts are added under `counts`."""
Tick = Callable[[float], None]
"""Told the share of something that is done, 0 to 1."""
RunItem = Callable[[Engine, Recorder | None, int, Tick], ItemAnswer]
"""`(engine, recorder, item index, tick) -> answer`: run one item in the engine's session."""


# ---------------------------------------------------------------------------------------------------------
# Results that survive a kill


class Results:
    """Answers per (cell, item), in memory and, if a path is given, as lines of a JSONL file.

    The first line is the fingerprint of what was asked; a file with another one is refused. A line cut
    short by a kill is dropped, and its item runs again.
    """

    def __init__(self, path: Path | None, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self._answers: dict[tuple[int, int], ItemAnswer] = {}
        self._file, self._open = None, contextlib.ExitStack()
        if path is None:
            return
        with contextlib.ExitStack() as opened:
            try:
                # Unbuffered: what could not be written must not be tried again at the end.
                self._file = opened.enter_context(path.open("ab", buffering=0))
                opened.enter_context(locked(path, f"--resume {path}"))
                whole = self._read(path, dict(fingerprint))
                self._file.truncate(whole)
            except OSError as error:
                raise InputError(f"--resume {path}: {error.strerror}") from error
            if whole == 0:
                self._append({"fingerprint": fingerprint})
            self._open = opened.pop_all()

    def _read(self, path: Path, fingerprint: dict[str, Any]) -> int:
        """Take the finished answers in; returns the length in bytes of the whole lines."""
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if number == 1:
                    self._check(path, row["fingerprint"], fingerprint)
                else:
                    self._answers[row["cell"], row["item"]] = row["answer"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"--resume {path}: line {number} is not a line of a results file") from None
        return sum(map(len, lines))

    @staticmethod
    def _check(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(wanted))
        differ = {
            n for n in found.keys() | wanted.keys() if n != "provenance" and found.get(n) != wanted.get(n)
        }
        theirs, ours = found.get("provenance", []), wanted.get("provenance", [])
        if len(theirs) != len(ours):
            differ.add("settings")
        for a, b in zip(theirs, ours, strict=False):
            differ |= set(differing(read_provenance(a, str(path)), read_provenance(b, str(path)), OF_RUN))
        differ = sorted(differ)
        if differ:
            raise InputError(
                f"--resume {path}: holds results of another run ({', '.join(differ)} differ); name another file"
            )

    def _append(self, row: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            line = json.dumps(row).encode() + b"\n"
            while line := line[self._file.write(line) :]:
                pass
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"--resume {self.path}: writing failed: {error.strerror}") from error

    def add(self, cell: int, item: int, answer: ItemAnswer) -> None:
        """Keep the answer of a finished item."""
        self._answers[cell, item] = answer
        if self._file is not None:
            self._append({"cell": cell, "item": item, "answer": answer})

    def get(self, cell: int, item: int) -> ItemAnswer | None:
        """The answer of an item, or None where it is not finished."""
        return self._answers.get((cell, item))

    def of_cell(self, cell: int, n_items: int) -> list[ItemAnswer]:
        """The answers of a cell whose items are all finished."""
        return [self._answers[cell, item] for item in range(n_items)]

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()


def fingerprint(
    kind: str, engines: Engines, text: str, cells: Sequence[Cell], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a results file must have been made from to be continued.

    Args:
        text: digest of the items. options: of the engine and the score.
    """
    return {
        "score": kind,
        "provenance": [known_fields(engines.provenance(cell, text)) for cell in cells],
        "options": dict(options),
        "engine": engine_version(),
    }


# ---------------------------------------------------------------------------------------------------------
# Running


class Engines:
    """One engine at a time, opened again when a cell wants another top-k. Use as a context manager."""

    def __init__(self, model: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> None:
        self.model, self.options = model, dict(options)
        self._engine: Engine | None = None

    def get(self, top_k: int | None = None, step: Step | None = None) -> Engine:
        """The engine with this override of the experts per token, and the width step that asks for it."""
        if self._engine is None or self._engine.top_k != top_k:
            self.close()
            self._engine = open_engine(self.model, top_k, step, self.options)
        return self._engine

    def for_cell(self, cell: Cell) -> Engine:
        """The engine that a cell's width asks for."""
        return self.get(self.top_k(cell.route), cell.route.step("width"))

    def top_k(self, route: Route) -> int | None:
        """The experts per token that a route asks for, None where it leaves the model its own.

        Raises:
            InputError: it asks for none, or for more than there are.
        """
        return effective_k(route, self._sizes) if route.step("width") is not None else None

    @cached_property
    def _sizes(self) -> TraceHeader:
        return model_sizes(self.model)

    def provenance(self, cell: Cell, text: str) -> Provenance:
        """Of what a cell gives on items of this digest, whatever width the engine has now."""
        engine = self.get() if self._engine is None else self._engine
        train = engine.training.identity if engine.training is not None else None
        return run_provenance(engine.header(), cell, model=engine.model.digest, text=text, train=train)

    def reopen(self, **options: Any) -> None:
        """Use these options from the next engine on."""
        self.close()
        self.options |= options

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_cells(args: argparse.Namespace, engines: Engines) -> tuple[list[Cell], TraceHeader]:
    """The cells of a command line and the model's header; wrong options are refused before the model loads.

    Without `--budget`, the machine's (engine-semantics, section 3).
    """
    from simlab.cli.options import cells_from_args, warn_about_cells

    engine = engines.for_cell(cells_from_args(args, "1MiB")[0])
    header = engine.header()
    dense = sum(engine.gguf.layer_bytes(i) for i in range(header.n_layer)) - header.expert_bytes
    cells = cells_from_args(args, f"{auto_budget(header, dense).total_bytes / MIB!r}MiB")
    warn_about_cells(cells, header)
    return cells, header


def run_cells(
    engines: Engines,
    cells: Sequence[Cell],
    n_items: int,
    run_item: RunItem,
    results: Results,
    *,
    keep_cache: bool,
    warm_up: bool,
    progress: Tick | None = None,
) -> None:
    """Run every unfinished item of every cell into `results`.

    Args:
        keep_cache: the expert cache stays warm from item to item of a cell; else each starts from an empty
            one. After a kill, the last finished item is run again, uncounted, to warm the cache of an
            unfinished cell: as the session left it if that item alone fills the cache under the original
            routing, close to it otherwise.
        warm_up: a throw-away decode opens every session (engine-semantics, section 5).
        progress: told the share (0 to 1) of the items to run that is done.
    """
    left = [[i for i in range(n_items) if results.get(at, i) is None] for at in range(len(cells))]
    n_left, done = sum(map(len, left)), 0

    def tick(fraction: float) -> None:
        if progress is not None:
            progress((done + fraction) / n_left)

    # Cells of equal width together: each change opens the model again.
    for at in sorted(range(len(cells)), key=lambda c: engines.top_k(cells[c].route) or 0):
        cell, seen = cells[at], set[int]()
        for item in range(n_items):
            finished = results.get(at, item)
            if finished is None:
                engine = engines.for_cell(cell)
                opens = not keep_cache or item == left[at][0]
                if opens:
                    engine.start(cell)
                    if keep_cache and item > 0:
                        run_item(engine, None, item - 1, lambda _: None)

                def run(
                    recorder: Recorder, engine: Engine = engine, item: int = item, opens: bool = opens
                ) -> ItemAnswer:
                    if opens and warm_up and not (keep_cache and item > 0):
                        engine.throw_away_decode(recorder)
                    return run_item(engine, recorder, item, tick)

                finished = _recorded(engine, cell, run, seen)
                results.add(at, item, finished)
                done += 1
                tick(0.0)
            if keep_cache:
                seen.update(finished["counts"]["new_entries"])


def _recorded(
    engine: Engine, cell: Cell, run: Callable[[Recorder], ItemAnswer], seen: set[int]
) -> ItemAnswer:
    """Run an item under a recorder; its answer with its counts. `seen`: entries read before, not cold."""
    with tempfile.TemporaryDirectory(prefix="simlab-score-") as folder:
        path = Path(folder) / "item.trace"
        with engine.recording(cell, path) as recorder:
            answer = run(recorder)
        return answer | {"counts": counts_of(open_trace(path), cell, seen)}


# ---------------------------------------------------------------------------------------------------------
# Counting


def counts_of(trace: Trace, cell: Cell, seen: set[int]) -> dict[str, Any]:
    """The counts of one item's trace as JSON values.

    `decode` and `all` as in a cell's numbers, with cold misses only of entries not in `seen`;
    `new_entries`: the entries (layer * n_expert + expert) it was the first to read; the decode graphs'
    `wall_ns` and `read_wait_ns`.
    """
    numbers = measure(trace, cell)
    counted = pl.col("turn") >= 0
    reads = (
        trace.routing.select("turn", "phase", "layer", "experts", "read_bytes")
        .explode("experts", "read_bytes")
        .filter(pl.col("read_bytes") > 0)
        .select(
            "phase",
            counted.alias("counted"),
            entry=pl.col("layer") * trace.header.n_expert + pl.col("experts"),
        )
        .unique("entry", keep="first", maintain_order=True)
        .filter(~pl.col("entry").is_in(sorted(seen)))
        .collect()
    )
    decode = trace.tokens.filter(counted & (pl.col("phase") == DECODE))
    times = decode.select(pl.col("wall_ns", "read_wait_ns").sum()).collect()
    cold = reads.filter("counted")
    phases = {
        "decode": (numbers.decode, cold.filter(pl.col("phase") == DECODE).height),
        "all": (numbers.all, cold.height),
    }
    return {
        **{
            name: dataclasses.asdict(phase) | {"cold_misses": n_cold}
            for name, (phase, n_cold) in phases.items()
        },
        "new_entries": reads["entry"].to_list(),
        "wall_ns": int(times["wall_ns"].item()),
        "read_wait_ns": int(times["read_wait_ns"].item()),
    }


def cell_numbers(
    cell: Cell,
    header: TraceHeader,
    counts: Sequence[Mapping[str, Any]],
    provenance: Provenance,
    nll: float | None = None,
) -> CellNumbers:
    """The numbers of a cell from the counts of its items. `nll`: mean loss per scored token, in nats."""
    k = effective_k(cell.route, header)
    budget = resolve_budget(cell.budget, cell.scope, header, k)
    decode = _added([c["decode"] for c in counts], budget.off)
    wall_ns, wait_ns = (sum(c[name] for c in counts) for name in ("wall_ns", "read_wait_ns"))
    return CellNumbers(
        source="live",
        cell=cell,
        budget_mib=budget.total_bytes / MIB,
        budget_cycles=budget.total_bytes / header.cycle_bytes(k),
        top_k=k,
        decode=decode,
        all=_added([c["all"] for c in counts], budget.off),
        tok_s=1e9 * decode.tokens / wall_ns if wall_ns else None,
        wall_ms_per_token=wall_ns / 1e6 / decode.tokens if decode.tokens else None,
        read_wait_ms_per_token=wait_ns / 1e6 / decode.tokens if decode.tokens else None,
        ppl=math.exp(nll) if nll is not None else None,
        nll=nll,
        provenance=provenance,
    )


def _added(phases: Sequence[Mapping[str, Any]], off: bool) -> PhaseNumbers:
    def total(name: str) -> int:
        return sum(p[name] for p in phases)

    def mean(name: str) -> float | None:
        # Every routing event of the engine has k slots, so slots weigh as events do.
        known = [(p[name], p["slots"]) for p in phases if p[name] is not None and p["slots"]]
        weight = sum(slots for _, slots in known)
        return sum(value * slots for value, slots in known) / weight if weight else None

    tokens, lookups, hits, misses = (total(n) for n in ("tokens", "lookups", "hits", "misses"))
    cold, read_mib = total("cold_misses"), float(total("read_mib"))
    return PhaseNumbers(
        tokens=tokens,
        lookups=lookups,
        hits=hits,
        misses=misses,
        hit_rate=hits / lookups if lookups else None,
        cold_misses=cold,
        capacity_misses=misses - cold,
        read_mib=read_mib,
        read_mib_per_token=read_mib / tokens if tokens else None,
        slots=total("slots"),
        reranked=total("reranked"),
        substituted=total("substituted"),
        dropped=total("dropped"),
        evictions=total("evictions"),
        # A miss after the first is of an entry that left; with the cache off nothing ever stayed.
        rereads=0 if off else misses - cold,
        mass_displaced=mean("mass_displaced"),
        score_regret=mean("score_regret"),
        agreement=mean("agreement"),
    )


# ---------------------------------------------------------------------------------------------------------
# Words of a score's table


def cells_table(
    head: Sequence[str],
    rows: Sequence[tuple[CellNumbers, Sequence[str]]],
    texts: Sequence[str] | None = None,
) -> str:
    """Scores for reading, one line each: the cell, what it scored, what it did to the routing and read in decode.

    Its speed is that of a recorded run, which is slower than a plain one.

    Args:
        head: of the words that each row has of its score.
        texts: what each row was scored on, in front.
    """
    lines = [["route", "evict", "budget", "k", *head, *_COSTS]]
    for numbers, words in rows:
        cell = numbers.cell
        named = [route_spec(cell.route), cell.evict_spec, cell.budget.text, str(numbers.top_k)]
        lines.append([*named, *words, *_cost_words(numbers)])
    if texts is not None:
        lines = [[text, *line] for text, line in zip(["text", *texts], lines, strict=True)]
    return align(lines)


def outcome_words(interval: Interval, outcome: PairedOutcome) -> list[str]:
    """A share's interval in per cent, and what changed against the first cell: to wrong, to right, McNemar's p."""
    share = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"
    return [share, str(outcome.to_wrong), str(outcome.to_right), f"{outcome.p_value:.2g}"]


_COSTS = ("subst. %", "dropped %", "cache hit %", "MiB/token", "tok/s")


def _cost_words(numbers: CellNumbers) -> list[str]:
    d = numbers.decode
    figures = [
        (None if d.substituted is None or not d.slots else 100 * d.substituted / d.slots, ".2f"),
        (100 * d.dropped / d.slots if d.slots else None, ".2f"),
        (100 * d.hit_rate if d.hit_rate is not None else None, ".1f"),
        (d.read_mib_per_token, ".3f"),
        (numbers.tok_s, ".1f"),
    ]
    return ["-" if value is None else format(value, form) for value, form in figures]
