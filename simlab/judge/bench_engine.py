"""What the engine itself costs, and what reading ahead gains: `simlab bench engine`.

Everything is a comparison inside one process, interleaved, on the same token ids. The hook's time is read
from its own tally less the reads it waited for; the price of being asked about every node is a difference of
CPU time between decodes with and without a callback. Rules: engine-semantics, section 8.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simlab.cells import build_cells, resolve_budget
from simlab.errors import InputError, RunError
from simlab.judge.stats import BLOCK_TOKENS, Interval, block_bootstrap_mean
from simlab.record.asking import NodeFilter
from simlab.record.discovery import Discovery
from simlab.record.engine import EMBEDDED_MODEL, Engine, GraphResult
from simlab.record.hook import Hook, RoutingEvent, node_observer
from simlab.record.llama import EvalCallback, Llama
from simlab.record.reads import FinishedRead
from simlab.record.recorder import Recorder
from simlab.trace.store import TraceWriter
from simlab.types import DECODE, Cell

TEXT = EMBEDDED_MODEL.with_name("text-b.txt")
ROUTES = ("original", "substitute:L=.15", "drop_cold:F=.75", "substitute:L=.15+drop_cold:F=.75")
WARM, TIGHT = "100%", "2cycles"
MODES: dict[str, dict[str, Any]] = {
    "serial": {},
    "overlap": {"overlap": True},
    "next_gate:K=8": {"prefetch": "next_gate:K=8"},
    "previous_token:K=1": {"prefetch": "previous_token:K=1"},
    "overlap + next_gate:K=8": {"overlap": True, "prefetch": "next_gate:K=8"},
}
READ_BUDGET = "25%"
TARGETS_US = {64: 60.0, 256: 90.0}
"""Most a routing event may cost, reads excluded, by experts per layer (issue 3, line 6)."""
LEAST_TOKENS = 16
_SKIP = 4
"""First decode tokens of a pass: left out, they build the views."""
_N_RESAMPLES = 2000

Progress = Callable[[float], None]


class Measured(NamedTuple):
    """A median or a ratio with its 95 % interval."""

    value: float
    interval: Interval

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval)}


def bench_engine(
    model: Path | None = None,
    *,
    n_tokens: int = 128,
    repeats: int = 4,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure one model; the value that `simlab bench engine --json` prints.

    Args:
        n_tokens: tokens of the shipped text that every pass decodes.
        repeats: passes of the hook's cells; the read modes run twice as many, there and back.
        options: of the engine, `lanes`, `buffered`, `n_threads` and so on.

    Raises:
        InputError: fewer than 16 tokens, or a model the engine refuses.
        RunError: a read mode changed a logit.
    """
    path = model or EMBEDDED_MODEL
    if n_tokens < LEAST_TOKENS:
        raise InputError(f"--tokens {n_tokens}: must be {LEAST_TOKENS} or more")
    say = progress or (lambda _share: None)
    with Engine(path, **options) as engine:
        tokens = engine.tokenize(TEXT.read_bytes())[: min(n_tokens, engine.window)]
        if len(tokens) < n_tokens:
            raise InputError(f"--tokens {n_tokens}: the text and this model's context have {len(tokens)}")
        header = engine.header()
        n_layers = len(header.moe_layers)
        hooks = _hook_costs(engine, tokens, repeats, lambda share: say(0.4 * share))
    asking = _asking(path, tokens, repeats, n_layers, lambda share: say(0.4 + 0.2 * share))
    rows = []
    for cost in hooks:
        total = cost["observed_us"]["value"] + asking["callback_us"]["value"] + (cost["writing_us"] or 0.0)
        share = total * n_layers / asking["plain_step_us"]["value"]
        rows.append(cost | {"total_us": total, "share_of_plain_step": share})
    return {
        "model": path.name,
        "n_expert": header.n_expert,
        "n_expert_used": header.n_expert_used,
        "n_moe_layers": n_layers,
        "tokens": n_tokens,
        "repeats": repeats,
        "target_us": TARGETS_US.get(header.n_expert),
        "asking": asking,
        "hook": rows,
        "reads": _read_modes(path, tokens, repeats, options, lambda share: say(0.6 + 0.4 * share)),
    }


# -- the hook's own cost -------------------------------------------------------------------------------------


class _TimedWriter(TraceWriter):
    """Measures how long the files of the parts take."""

    flush_ns = 0

    def flush(self) -> None:
        began = time.perf_counter_ns()
        super().flush()
        self.flush_ns += time.perf_counter_ns() - began


class _TimedRecorder(Recorder):
    """Measures what turning events into columns takes, between graphs; the files of a part are counted apart."""

    def __init__(self, writer: _TimedWriter) -> None:
        super().__init__(writer)
        self._timed_writer = writer
        self.writing_ns = 0

    def end_graph(self, *args: Any, **named: Any) -> None:
        self._count(super().end_graph, *args, **named)

    def flush_rest(self) -> None:
        """`flush` at the end of a run; those that `end_graph` sets off are part of its time."""
        self._count(super().flush)

    def _count(self, action: Callable[..., None], *args: Any, **named: Any) -> None:
        files_ns, began = self._timed_writer.flush_ns, time.perf_counter_ns()
        action(*args, **named)
        spent = time.perf_counter_ns() - began
        self.writing_ns += spent - (self._timed_writer.flush_ns - files_ns)


def _there_and_back(n: int, repeats: int) -> Iterator[int]:
    """0 .. n-1, then n-1 .. 0, and so on: no cell always runs first."""
    for repeat in range(repeats):
        yield from range(n) if repeat % 2 == 0 else reversed(range(n))


def _hook_costs(engine: Engine, tokens: Sequence[int], repeats: int, say: Progress) -> list[dict[str, Any]]:
    """Cost of the observed nodes per routing event, for each route, cache size, and recording or not."""
    settings = [(r, b, recorded) for r in ROUTES for b in (WARM, TIGHT) for recorded in (False, True)]
    samples: list[list[np.ndarray]] = [[] for _ in settings]
    writing: list[list[float]] = [[] for _ in settings]
    releases: list[list[np.ndarray]] = [[] for _ in settings]
    counts = [dict.fromkeys(("evictions", "misses", "substituted", "dropped"), 0) for _ in settings]
    n_layers = len(engine.header().moe_layers)
    for done, i in enumerate(_there_and_back(len(settings), repeats)):
        route, budget, recorded = settings[i]
        cell = build_cells(budgets=[budget], routes=[route])[0]
        results = _pass(engine, tokens, cell, recorded, writing[i])
        graphs = [r.tally for r in results if r.plan.phase == DECODE][_SKIP:]
        if budget == WARM:
            graphs = [t for t in graphs if t.hits == t.lookups]
        samples[i].append(np.array([(t.hook_ns - t.read_wait_ns) / n_layers / 1e3 for t in graphs]))
        releases[i].append(np.array([t.release_ns / n_layers / 1e3 for t in graphs]))
        for t in graphs:
            counts[i]["misses"] += t.lookups - t.hits
            for name in ("evictions", "substituted", "dropped"):
                counts[i][name] += getattr(t, name)
        say((done + 1) / (len(settings) * repeats))
    found = []
    for (route, budget, recorded), values, written, released, counted in zip(
        settings, samples, writing, releases, counts, strict=True
    ):
        n = sum(len(v) for v in values)
        # A cell does the same work in every pass: of the passes of one token the least disturbed counts.
        best = np.min(values, axis=0)
        found.append(
            {
                "route": route,
                "budget": budget,
                "recording": recorded,
                "observed_us": _median(best).to_json(),
                "all_passes_us": float(np.median(np.concatenate(values))) if n else None,
                "release_us": float(np.median(np.concatenate(released))) if released else None,
                "writing_us": statistics.median(written) if written else None,
                "graphs": n,
                **{f"{name}_per_event": count / max(n * n_layers, 1) for name, count in counted.items()},
            }
        )
    return found


def _pass(
    engine: Engine, tokens: Sequence[int], cell: Cell, recorded: bool, writing_us: list[float]
) -> list[GraphResult]:
    """Decode the text once under a cell; with the whole model in the cache, once more before to warm it."""
    engine.start(cell)
    if cell.budget.text == WARM:
        engine.score(tokens)
    if not recorded:
        return engine.score(tokens)
    with tempfile.TemporaryDirectory() as folder:
        width = engine.header().n_expert_used
        with _TimedWriter(Path(folder) / "trace", engine.header(cell), width) as writer:
            recorder = _TimedRecorder(writer)
            results = engine.score(tokens, recorder)
            recorder.flush_rest()
    writing_us.append(recorder.writing_ns / (len(results) * len(engine.header().moe_layers)) / 1e3)
    return results


class _NoHook:
    """Whoever stops at the nodes and does nothing there."""

    hook: Hook | None = None


def _asking(path: Path, tokens: Sequence[int], repeats: int, n_layers: int, say: Progress) -> dict[str, Any]:
    """What llama.cpp's callback costs before the hook does anything, as CPU time per routing event.

    Three contexts decode every token in turns: without a callback, with one that declines every node, and
    with the engine's own, which stops at the observed nodes where no session does anything.
    """
    counted = [0]

    def count(_pointer: int, ask: bool, _user: object) -> bool:
        counted[0] += ask
        return not ask

    discovery = Discovery(path.name)
    with ExitStack() as open_models:

        def opened(callback: EvalCallback | NodeFilter | None) -> Llama:
            llama = Llama(path, n_threads=1, on_node=callback)
            open_models.callback(llama.close)
            return llama

        learner = opened(discovery)
        learner.decode([0], 0)
        nodes = discovery.result().nodes(overlap=False, inputs=False)
        # Names that no node has, and that take as long to tell.
        strangers = frozenset(f"{name}?" for name in nodes)
        learner.open_context(count)
        learner.decode([0], 0)
        learner.decode([0], 1)
        n_nodes = counted[0] // 2
        models = [
            opened(None),
            opened(NodeFilter(strangers, node_observer(_NoHook()))),
            opened(NodeFilter(nodes, node_observer(_NoHook()))),
        ]
        spent: list[np.ndarray] = []
        for repeat in range(repeats):
            cpu_ns = np.zeros((len(models), len(tokens)))
            for llama in models:
                llama.clear()
            for position, token in enumerate(tokens):
                for turn in range(len(models)):
                    i = (turn + position + repeat) % len(models)
                    began = time.thread_time_ns()
                    models[i].decode([token], position)
                    cpu_ns[i, position] = time.thread_time_ns() - began
            spent.append(cpu_ns[:, _SKIP:])
            say((repeat + 1) / repeats)
    # Of the repeats of one token the least disturbed counts.
    best = np.min(spent, axis=0) / 1e3
    return {
        "nodes_per_event": n_nodes / n_layers,
        "declining_us": _median((best[1] - best[0]) / n_layers).to_json(),
        "callback_us": _median((best[2] - best[0]) / n_layers).to_json(),
        "plain_step_us": _median(best[0]).to_json(),
    }


def _median(values: np.ndarray) -> Measured:
    """Median over tokens with a circular block-bootstrap interval."""
    n = len(values)
    if n < 2:
        return Measured(float("nan"), Interval(float("nan"), float("nan")))
    block = max(1, min(BLOCK_TOKENS, n // 8))
    starts = np.random.default_rng(0).integers(0, n, size=(_N_RESAMPLES, -(-n // block)))
    places = (starts[:, :, None] + np.arange(block)).reshape(_N_RESAMPLES, -1)[:, :n] % n
    low, high = np.percentile(np.median(values[places], axis=1), [2.5, 97.5])
    return Measured(float(np.median(values)), Interval(float(low), float(high)))


# -- overlapped reads and look-ahead -------------------------------------------------------------------------


class _Tap(Recorder):
    """Counts look-ahead instead of recording it."""

    def __init__(self) -> None:
        self.issued_bytes = self.useful_bytes = 0

    def on_batch(self, event: RoutingEvent) -> None:
        self.useful_bytes += int((event.residency == 2).sum()) * event.entry_bytes

    def on_reads(self, reads: Sequence[FinishedRead], speculative: bool) -> None:
        if speculative:
            self.issued_bytes += sum(read.slice.size for read in reads)

    def end_graph(self, *_: Any, **__: Any) -> None:
        pass


def _read_modes(
    path: Path, tokens: Sequence[int], repeats: int, options: dict[str, Any], say: Progress
) -> list[dict[str, Any]]:
    """Read wait and tokens/s of every way of reading, against serial, on the same text."""
    cell = build_cells(budgets=[READ_BUDGET], routes=["original"])[0]
    with ExitStack() as open_engines:
        engines = [open_engines.enter_context(Engine(path, **{**options, **mode})) for mode in MODES.values()]
        taps, logits = [], None
        for name, engine in zip(MODES, engines, strict=True):
            engine.start(cell)
            taps.append(tap := _Tap())
            found = np.stack([r.logits for r in engine.score(tokens, tap) if r.logits is not None])
            if logits is not None and not np.array_equal(logits, found):
                raise RunError(f"{path.name}: reading with {name} changed a logit; nothing was timed")
            logits = found if logits is None else logits
        wait: list[list[np.ndarray]] = [[] for _ in engines]
        wall: list[list[np.ndarray]] = [[] for _ in engines]
        for done, i in enumerate(_there_and_back(len(engines), 2 * repeats)):
            waited, walls = _timed(engines[i], tokens, cell)
            wait[i].append(waited)
            wall[i].append(walls)
            say((done + 1) / (len(engines) * 2 * repeats))
        header = engines[0].header()
        budget = resolve_budget(cell.budget, cell.scope, header, header.n_expert_used)
    # Of the repeats of one token the median counts.
    waits, walls = ([np.median(passes, axis=0) for passes in series] for series in (wait, wall))
    return [
        {
            "mode": name,
            "budget_bytes": budget.total_bytes,
            "logits_identical": True,
            "read_wait_ms_per_token": float(waits[i].mean()) / 1e6,
            "read_wait_ratio": ratio(waits[0], waits[i]).to_json(),
            "tok_s": 1e9 / float(walls[i].mean()),
            "tok_s_ratio": ratio(walls[i], walls[0]).to_json(),
            "issued_bytes": taps[i].issued_bytes,
            "useful_bytes": taps[i].useful_bytes,
            "wasted_bytes": taps[i].issued_bytes - taps[i].useful_bytes,
        }
        for i, name in enumerate(MODES)
    ]


def _timed(engine: Engine, tokens: Sequence[int], cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Read wait and wall time of each decode graph of one pass, in ns."""
    engine.start(cell)
    ends: list[int] = []
    results = engine.score(tokens, progress=lambda _share: ends.append(time.perf_counter_ns()))
    kept = [i for i, r in enumerate(results) if r.plan.phase == DECODE and i > 0][_SKIP:]
    waited = np.array([results[i].tally.read_wait_ns for i in kept], dtype=float)
    return waited, np.array([ends[i] - ends[i - 1] for i in kept], dtype=float)


def ratio(below: np.ndarray, above: np.ndarray) -> Measured:
    """`above / below` of two paired series' sums, with a block-bootstrap interval over tokens.

    The interval is that of the linearised ratio: the mean of `(above - ratio * below) / mean(below)`.
    """
    if len(below) < 2 or not below.sum():
        return Measured(float("nan"), Interval(float("nan"), float("nan")))
    value = float(above.sum() / below.sum())
    around = block_bootstrap_mean([(above - value * below) / below.mean()])
    return Measured(value, Interval(value + around.low, value + around.high))
