"""The gates: does the streamed model compute what plain llama.cpp does, and do the lossy knobs act where they should?

Table and claims: engine-semantics, section 6. Logits are compared bit for bit; greedy text would be a weak
witness. A gate about a lossy knob also asks for a counter above zero, so that it cannot pass by doing nothing,
and the sabotage check shows that the comparison sees one overwritten slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from simlab.cells import build_cells, parse_budget, resolve_budget
from simlab.errors import InputError, RunError, SimlabError
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.gguf import read_gguf
from simlab.record.hook import RoutingEvent
from simlab.record.llama import Llama
from simlab.record.plan import SKIP, PlannedGraph, chunks
from simlab.record.reads import FinishedRead
from simlab.scores import ranking_values
from simlab.types import DECODE, Budget

CLAIMS = {
    "G1": "streamed, cache off == plain llama.cpp",
    "G2": "streamed, small LRU == cache off",
    "G5a": "previous_token:K=1, overlapped reads == plain",
    "G5b": "next_gate:K=k, overlapped reads == plain",
    "G6": "G1 with buffered reads",
    "G7": "G2 with buffered reads",
    "S1": "generations in one session == plain",
    "S2": "the same, the budget made small for one == plain",
    "S3": "the same, the budget one byte for one == plain",
    "G8a": "F = 1e-6 == undropped",
    "G8b": "F = 1, in prefill too, on a thrashing cache generates",
    "G8c": "k = 1: F = 1 == undropped",
    "G8d": "L = 1e-6 == unsubstituted",
    "G8e": "L = 1 generates",
    "SAB": "one slice overwritten with zeros is seen",
}
"""What each gate claims, in the order of the table. S3's byte stands for 0: that would switch the cache off,
which a session refuses; at one byte every batch evicts all others, which is the same to the experts. No logit shows
ids read without their stride where the first rows of a prefill name every expert, hence the count of misread rows."""
_AHEAD = {"G5a": "previous_token:K=1", "G5b": "next_gate:K={k}"}
"""Look-ahead of the gates about reading early."""
COUNTERS = ("lookups", "hits", "reranked", "substituted", "dropped", "evictions")
N_TOKENS = 24  # of context, what the gates need
_INERT = 1e-6
"""A margin and a threshold that are armed and change nothing, where no two scores tie."""
_SMALL, _ROOMY, _THRASHING, _WHOLE = "1.2cycles", "2cycles", "0.5cycles", "100%"

Evaluate = Callable[[PlannedGraph, Sequence[int]], np.ndarray | None]
_BETWEEN = {"S1": parse_budget(_WHOLE), "S2": parse_budget(_THRASHING), "S3": Budget("bytes", 1, "1 byte")}
_LOSSY: dict[str, tuple[str, str, Sequence[str], Sequence[str]]] = {
    "G8a": (_SMALL, f"drop_cold:F={_INERT}", ["differing", "dropped"], ["lookups", "misses"]),
    "G8b": (_THRASHING, "drop_cold:F=1,prefill=1", ["not finite", "spared"], ["dropped"]),
    "G8c": (_SMALL, "drop_cold:F=1", ["differing", "dropped"], ["lookups", "misses"]),
    "G8d": (_SMALL, f"substitute:L={_INERT}", ["differing", "substituted"], ["reranked"]),
    "G8e": (_ROOMY, "substitute:L=1", ["not finite"], ["substituted"]),
}
"""Budget and route of the gates about knobs, the counters that must be 0 and those that must be above it."""


@dataclass(frozen=True)
class GateResult:
    """One gate on one model.

    `passed` is None where the gate cannot be run on the model; `note` then says why, and else what was not met.
    `counts`: the `COUNTERS` of the gate's session, `logits` compared and how many were `differing`; `misread` rows
    have other ids than the best scored; `droppable` slots are those an armed F = 1 drops, `spared` ones stayed;
    `tied` slots are substituted by a margin as small as the scores' own rounding, and are no `substituted` ones.
    """

    gate: str
    claim: str
    passed: bool | None
    counts: Mapping[str, int]
    note: str = ""


class _Text(NamedTuple):
    """A prompt, what is decoded after it (None: the greedy token), and plain llama.cpp's logits `[graphs, n_vocab]`."""

    prompt: Sequence[int]
    following: Sequence[int | None]
    plain: np.ndarray


def run_gates(
    model: Path | None = None, *, progress: Callable[[float], None] | None = None, **engine_options: Any
) -> list[GateResult]:
    """Run every gate on a model; None for the embedded one.

    Args:
        progress: is told the share done, 0 to 1.
        engine_options: as `simlab.Engine` takes them, without `top_k`. The plain model gets the same threads,
            context and graph size.

    Raises:
        SimlabError: the engine refuses the model, or its context is too short. What fails later fails its gate.
    """
    path, found = model or EMBEDDED_MODEL, dict[str, GateResult]()

    def check(gates: Sequence[str], run: Callable[[], Sequence[GateResult]]) -> None:
        try:
            results = run()
        except SimlabError as error:
            results = [GateResult(gate, CLAIMS[gate], False, {}, str(error)) for gate in gates]
        found.update({result.gate: result for result in results})
        if progress is not None:
            progress(len(found) / len(CLAIMS))

    with Engine(path, **engine_options) as engine:
        texts = _run_plain(engine, engine_options.get("n_threads"))
        bench = _Bench(engine, texts)
        check(["G1", "G2"], lambda: bench.streamed("G1", "G2"))
        for gate in _BETWEEN:
            check([gate], lambda g=gate: [bench.generations(g)])
        for gate in ("G8a", "G8b", "G8d", "G8e"):
            check([gate], lambda g=gate: [bench.lossy(g)])
        check(["SAB"], lambda: [bench.sabotage()])

    def reopened(run: Callable[[_Bench], list[GateResult]], **changes: Any) -> list[GateResult]:
        with Engine(path, **engine_options | changes) as engine:
            return run(_Bench(engine, texts))

    for gate in _AHEAD:
        check([gate], lambda g=gate: [_ahead(g, path, engine_options, texts)])
    check(["G6", "G7"], lambda: reopened(lambda b: b.streamed("G6", "G7"), buffered=True))
    check(["G8c"], lambda: reopened(lambda b: [b.lossy("G8c")], top_k=1))
    return [found[gate] for gate in CLAIMS]


def _ahead(gate: str, path: Path, engine_options: dict[str, Any], texts: Sequence[_Text]) -> GateResult:
    """G5a, G5b: the experts are read before they are routed to, on an engine of its own."""
    gguf = read_gguf(path)
    prefetch = _AHEAD[gate].format(k=gguf.n_expert_used)
    try:
        with Engine(path, **engine_options | {"overlap": True, "prefetch": prefetch}) as engine:
            return _Bench(engine, texts).ahead(gate)
    except InputError as error:
        # The model opened without look-ahead, so this is about what look-ahead needs of it.
        return GateResult(gate, CLAIMS[gate], None, {}, f"not applicable: {error}")


def _run_plain(engine: Engine, n_threads: int | None) -> list[_Text]:
    """A text to force and two prompts to continue, as plain llama.cpp does: fully resident, without a callback."""
    if engine.window < N_TOKENS:
        raise RunError(f"{engine.gguf.path}: a context of {engine.window} tokens; the gates need {N_TOKENS}")
    plain = Llama(engine.gguf.path, n_ctx=engine.n_ctx, n_ubatch=engine.n_ubatch, n_threads=n_threads)

    def evaluate(plan: PlannedGraph, tokens: Sequence[int]) -> np.ndarray | None:
        return plain.decode(tokens, plan.first_position, plan.wants_output)

    try:
        walk = _token_walk(plain, 2 * SKIP)
        one, two = walk[:SKIP], walk[SKIP:]
        texts = []
        # Forced tokens come twice, so that a small cache has something to hit.
        for prompt, following in ((one, np.repeat(two, 2).tolist()), (one, [None] * 6), (two, [None] * 6)):
            plain.clear()
            texts.append(_Text(prompt, following, _decode(evaluate, prompt, following, plain.n_ubatch)))
        return texts
    finally:
        plain.close()


def _token_walk(plain: Llama, n: int) -> list[int]:
    """A fixed pseudo-random walk (MINSTD) over the vocabulary's ordinary tokens: those that write something."""
    state, tokens = 1, list[int]()
    for _ in range(1000 * n):
        state = state * 48271 % 0x7FFFFFFF
        token = state % plain.n_vocab
        if not plain.ends_generation(token) and plain.detokenize([token]):
            tokens.append(token)
            if len(tokens) == n:
                return tokens
    raise RunError(f"hardly one of its vocabulary's {plain.n_vocab} tokens writes text")


def _decode(
    evaluate: Evaluate, prompt: Sequence[int], following: Sequence[int | None], n_ubatch: int
) -> np.ndarray:
    """A prompt as prefill, then one token per graph; an end of text is a token like any other."""
    plans = chunks(0, 0, len(prompt), 0, n_ubatch)
    logits = [row for p in plans if (row := evaluate(p, prompt[p.start : p.stop])) is not None]
    for at, given in enumerate(following, len(prompt)):
        token = given if given is not None else int(np.argmax(logits[-1]))
        row = evaluate(PlannedGraph(0, DECODE, at, at + 1, at, True, None), [token])
        assert row is not None
        logits.append(row)
    return np.stack(logits)


class _Session:
    """A session of an engine under one cell, and its counters."""

    def __init__(self, engine: Engine, budget: str, route: str = "original", margin: float = 0.0) -> None:
        top_ks = [str(engine.top_k)] if engine.top_k else []
        engine.start(build_cells(budgets=[budget], routes=[route], top_ks=top_ks)[0])
        self._engine = engine
        self._margin = margin
        self._n_logits = 0
        self.n_untied: int | None = None
        """Rows of logits before the first tie that `margin` broke."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._listener: Any = SimpleNamespace(
            on_batch=self._examine, on_reads=self._count_reads, end_graph=lambda *_, **__: None
        )

    def _evaluate(self, plan: PlannedGraph, tokens: Sequence[int]) -> np.ndarray | None:
        result = self._engine.run_graph(plan, tokens, None, self._listener)
        self.counts.update({name: getattr(result.tally, name) for name in COUNTERS})
        self.counts["misses"] = self.counts["lookups"] - self.counts["hits"]
        self._n_logits += result.logits is not None
        return result.logits

    def _count_reads(self, reads: Sequence[FinishedRead], speculative: bool) -> None:
        """Count what look-ahead read."""
        self.counts["read ahead"] += len(reads) if speculative else 0

    def _examine(self, event: RoutingEvent, *_: object) -> None:
        """Count rows whose ids are not the best scored, and the slots F = 1 drops in the words of section 2."""
        scores, weights = event.scores, event.weights
        picked = np.sort(np.take_along_axis(scores, event.router_experts, axis=1), axis=1)
        best = np.sort(scores, axis=1)[:, -picked.shape[1] :]
        light = (weights < np.float32(1) / np.float32(weights.shape[1])) & (event.residency == 0)
        light[np.arange(len(weights)), weights.argmax(axis=1)] = False
        self.counts["misread"] += int(np.count_nonzero((picked != best).any(axis=1)))
        self.counts["droppable"] += int(np.count_nonzero(light))
        if self._margin and (tied := self._tied(event)):
            self.counts["tied"] += tied
            self.counts["substituted"] -= tied
            self.n_untied = self._n_logits if self.n_untied is None else self.n_untied

    def _tied(self, event: RoutingEvent) -> int:
        """Slots whose new expert scores as much less than the router's last as the margin adds, or an ulp more."""
        values = ranking_values(event.scores, self._engine.routing.score_space).astype(np.float64)
        finite = np.isfinite(values)
        top = np.where(finite, values, -np.inf).max(axis=1)
        bottom = np.where(finite, values, np.inf).min(axis=1)
        ulp = np.spacing(np.where(finite, np.abs(values), 0).max(axis=1).astype(np.float32))
        added = self._margin * (top - bottom) + ulp
        last = np.take_along_axis(values, event.router_experts, axis=1).min(axis=1)
        new = (event.experts[:, :, None] != event.router_experts[:, None, :]).all(axis=2)
        with np.errstate(invalid="ignore"):  # two experts at -inf
            behind = last[:, None] - np.take_along_axis(values, event.experts, axis=1)
        return int(np.count_nonzero(new & (behind <= added[:, None])))

    def decode(self, text: _Text) -> np.ndarray:
        """Logits of a text from an empty context."""
        self._engine.forget_context()
        return _decode(self._evaluate, text.prompt, text.following, self._engine.n_ubatch)

    def compare(self, logits: np.ndarray, expected: np.ndarray, name: str = "differing") -> None:
        """Count what differs bit for bit, NaN and the sign of zero included."""
        differing = np.count_nonzero(logits.view(np.uint32) != expected.view(np.uint32))
        self.counts.update({"logits": logits.size, name: int(differing)})

    def judge(self, gate: str, none: Sequence[str], some: Sequence[str], unmet: str = "") -> GateResult:
        """Passed where no row was misread, the counters of `none` are 0 and those of `some` above it.

        Args:
            unmet: why a counter of `some` cannot rise on this model; one that is 0 is then no fault.
        """
        broken = [f"{name} {self.counts[name]}, not 0" for name in ("misread", *none) if self.counts[name]]
        idle = [f"{name} 0, not above" for name in some if not self.counts[name]]
        if idle and not broken and unmet:
            return GateResult(gate, CLAIMS[gate], None, dict(self.counts), f"not applicable: {unmet}")
        ties = (
            f"{self.counts['tied']} slots tied; logits compared before the first"
            if self.counts["tied"]
            else ""
        )
        note = "; ".join(filter(None, (*broken, *idle, ties)))
        return GateResult(gate, CLAIMS[gate], not broken + idle, dict(self.counts), note)


class _Bench:
    """The gates of one opened engine."""

    def __init__(self, engine: Engine, texts: Sequence[_Text]) -> None:
        self._engine = engine
        self._forced, self._first, self._second = texts
        self._k = engine.top_k or engine.gguf.n_expert_used

    @cached_property
    def _original(self) -> tuple[_Session, np.ndarray]:
        """The router's own routing on the small cache."""
        session = _Session(self._engine, _SMALL)
        return session, session.decode(self._forced)

    def streamed(self, off_gate: str, small_gate: str) -> list[GateResult]:
        """G1 and G2, or G6 and G7 on a buffered engine."""
        off = _Session(self._engine, "off")
        reference = off.decode(self._forced)
        off.compare(reference, self._forced.plain)
        small, logits = self._original
        small.compare(logits, reference)
        cache = self._engine.cache
        fits = cache.used_bytes <= cache.budget.total_bytes
        unmet = f"a cache of {_SMALL} holds every expert that was routed" if fits else ""
        return [
            off.judge(off_gate, none=["differing", "hits"], some=["lookups"]),
            small.judge(small_gate, none=["differing"], some=["hits", "evictions"], unmet=unmet),
        ]

    def ahead(self, gate: str) -> GateResult:
        """G5a, G5b: a cache that loses everything from token to token, which look-ahead fills, and a small one."""
        if len(self._engine.header().moe_layers) == 1:
            reason = "not applicable: one layer has experts, there is none to look ahead to"
            return GateResult(gate, CLAIMS[gate], None, {}, reason)
        session, text = _Session(self._engine, _THRASHING), self._forced
        session.compare(session.decode(text), text.plain)
        session.counts["hits by look-ahead"] = self._engine.cache.speculative_hits
        small = _Session(self._engine, _SMALL)
        small.compare(small.decode(text), text.plain)
        session.counts.update(small.counts)
        return session.judge(gate, none=["differing"], some=["read ahead", "hits by look-ahead"])

    def generations(self, gate: str) -> GateResult:
        """S1 to S3: three generations, the middle one at the gate's own budget."""
        session, cache = _Session(self._engine, _WHOLE), self._engine.cache
        first, second, whole = self._first, self._second, cache.budget
        other = resolve_budget(_BETWEEN[gate], "global", self._engine.header(), self._k)
        found = [session.decode(first)]
        cache.set_budget(other)
        found.append(session.decode(second))
        cache.set_budget(whole)
        session.counts["hits in the last"] -= session.counts["hits"]
        found.append(session.decode(first))
        session.counts["hits in the last"] += session.counts["hits"]
        session.compare(np.concatenate(found), np.concatenate([t.plain for t in (first, second, first)]))
        moved = ["evictions"] if other != whole else []
        one_batch = len(self._engine.header().moe_layers) == 1 and self._engine.gguf.n_expert == self._k
        unmet = "every batch routes every expert there is, none can leave" if one_batch else ""
        return session.judge(gate, none=["differing"], some=["hits in the last", *moved], unmet=unmet)

    def lossy(self, gate: str) -> GateResult:
        """G8a to G8e: an inert knob beside the router's own routing, or one at its end that still generates."""
        if reason := self._obstacle(gate):
            return GateResult(gate, CLAIMS[gate], None, {}, f"not applicable: {reason}")
        budget, route, none, some = _LOSSY[gate]
        session = _Session(self._engine, budget, route, margin=_INERT if gate == "G8d" else 0.0)
        if "differing" in none:
            logits = session.decode(self._forced)[: session.n_untied]
            session.compare(logits, self._original[1][: session.n_untied])
            return session.judge(gate, none, some)
        c = session.counts
        c["not finite"] = int(np.count_nonzero(~np.isfinite(session.decode(self._first))))
        c["spared"] = c["droppable"] - c["dropped"]
        if gate == "G8b" and not c["droppable"] and not c["dropped"]:
            reason = "not applicable: no cold slot weighs less than 1/k"
            return GateResult(gate, CLAIMS[gate], None, dict(c), reason)
        return session.judge(gate, none, some)

    def _obstacle(self, gate: str) -> str:
        """Why a gate says nothing about this model; empty where it does."""
        n_expert = self._engine.gguf.n_expert
        if gate in ("G8a", "G8b") and self._k == 1:
            return "k is 1, and the top slot is never dropped"
        if gate in ("G8d", "G8e") and n_expert <= self._k:
            return f"all {n_expert} experts are routed, none is left to substitute"
        return ""

    def sabotage(self) -> GateResult:
        """SAB: all that was routed stays cached, and is compared before and after one slice turns to zeros."""
        session, text = _Session(self._engine, _WHOLE), self._forced
        session.compare(session.decode(text), text.plain, "differing before")
        experts, first_layer = self._engine.experts, self._engine.header().moe_layers[0]
        entry = first_layer, int(np.flatnonzero(self._engine.cache.residency(0))[0])
        experts.overwrite(*entry, bytes(experts.slices[entry][0].size))
        session.compare(session.decode(text), text.plain)
        return session.judge("SAB", none=["differing before"], some=["differing"])
