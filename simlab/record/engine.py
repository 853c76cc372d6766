"""The live engine: a GGUF model on llama.cpp whose experts are streamed from disk through a cache we own."""

from __future__ import annotations

import contextlib
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simlab.cells import effective_k, parse_budget, resolve_budget
from simlab.errors import InputError, RunError, SimlabWarning
from simlab.learning import learn
from simlab.policy_check import WrongValueError
from simlab.prefetch import parse_prefetch
from simlab.record.asking import NodeFilter
from simlab.record.cache import LiveCache, live_cache
from simlab.record.discovery import Discovery
from simlab.record.experts import ExpertMemory
from simlab.record.ggml import check_layout
from simlab.record.gguf import read_gguf
from simlab.record.header import OpenedModel, recording_header
from simlab.record.hook import NODE_PREFIX, GraphTally, Hook, node_observer
from simlab.record.interrupts import DeferredInterrupt
from simlab.record.live_route import LiveRoute
from simlab.record.llama import Llama, log_probability
from simlab.record.lookahead import LookAhead
from simlab.record.machine import check_top_k, default_threads
from simlab.record.plan import PlannedGraph, chunks, text_graphs
from simlab.record.reads import ReadLanes
from simlab.record.recorder import GraphPlace, Recorder
from simlab.record.trial import try_loading
from simlab.replay.training import load_training
from simlab.trace.store import TraceWriter
from simlab.types import DECODE, PREFILL, THROW_AWAY_TURN, Cell, Provenance, TraceHeader

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "data" / "tiny-moe-q8_0.gguf"
_LANES = range(1, 9)


@dataclass(frozen=True)
class GraphResult:
    """One evaluated graph.

    `logits` float32 `[n_vocab]` of its last token, `[tokens, n_vocab]` where the plan wants every position,
    None where none was asked for.
    """

    plan: PlannedGraph
    logits: np.ndarray | None
    nll: float | None
    tally: GraphTally


class Engine:
    """A model opened for streaming. Use as a context manager.

    Args:
        model: a GGUF file, the first shard if split; None for the embedded model.
        top_k: experts per token instead of the model's own (llama.cpp's expert_used_count override).
        lanes: reader threads, 1 to 8. `buffered` reads through the page cache instead of O_DIRECT.
        n_threads, n_ctx, n_ubatch: llama.cpp's; the context defaults to what the model was trained for.
        overlap: read down projections while gate and up are computed.
        prefetch: look-ahead, `previous_token:K=1` or `next_gate:K=8`; read by a background lane of its own.
        train: a trace of this model that policies learn from (`--train`).

    Raises:
        InputError: not a model this engine can stream. RunError: llama.cpp failed, or its layout is unknown.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        top_k: int | None = None,
        lanes: int = 4,
        buffered: bool = False,
        n_threads: int | None = None,
        n_ctx: int | None = None,
        n_ubatch: int = 512,
        overlap: bool = False,
        prefetch: str | None = None,
        train: str | None = None,
    ) -> None:
        if lanes not in _LANES:
            raise InputError(f"--lanes {lanes}: must lie between 1 and 8")
        self.prefetch = parse_prefetch(prefetch) if prefetch is not None else None
        check_layout()
        self.gguf = read_gguf(Path(model) if model is not None else EMBEDDED_MODEL)
        self.model = OpenedModel(self.gguf)
        if top_k is not None:
            check_top_k(top_k, self.gguf)
        self.top_k = top_k
        self._graph = 0
        self.hook: Hook | None = None
        self._lanes: ReadLanes | None = None
        self._ahead_lanes: ReadLanes | None = None
        self.gguf.read_dense_ahead()
        try_loading(self.gguf.path, self.gguf.files)
        discovery = Discovery(self.gguf.path.name)
        self._llama = Llama(
            self.gguf.path,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads or default_threads(self.gguf),
            n_expert_used=top_k,
            arch=self.gguf.arch,
            on_node=discovery,
            read_ahead=False,
        )
        try:
            # The throw-away graph: expert tensors and the weight chain show themselves, on empty experts.
            try:
                self._llama.decode([0], 0)
            finally:
                discovery.restore()
            self.routing = discovery.result()
            late = overlap and self._check_overlap()
            inputs = self.prefetch is not None and self.prefetch.kind == "next_gate"
            if inputs and not self.routing.gates:
                raise InputError(f"--prefetch: {self.gguf.path.name} has no router node to look ahead from")
            self._llama.open_context(NodeFilter(self.routing.nodes(late, inputs), node_observer(self)))
            self._experts = ExpertMemory(self.gguf, self.routing.experts)
            self._lanes = ReadLanes(self.gguf.files, lanes, not buffered, background=late)
            if self.prefetch is not None:
                self._ahead_lanes = ReadLanes(
                    self.gguf.files, 1, self._lanes.direct, background=True, first_lane=lanes
                )
            self.training = load_training(train, self.header()) if train is not None else None
        except BaseException:
            self.close()
            raise

    # -- the model ------------------------------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """Tokens of context."""
        return self._llama.n_ctx

    @property
    def n_ubatch(self) -> int:
        """Largest number of tokens in one graph."""
        return self._llama.n_ubatch

    @property
    def window(self) -> int:
        """Tokens of a text scored before the context starts anew."""
        return min(self._llama.n_ctx_train, self.n_ctx)

    @property
    def cache(self) -> LiveCache:
        """The session's expert cache."""
        return self._cache

    @property
    def experts(self) -> ExpertMemory:
        """The engine's expert memory."""
        return self._experts

    def tokenize(self, text: bytes | str) -> list[int]:
        """Token ids of a text."""
        return self._llama.tokenize(text.encode() if isinstance(text, str) else text)

    @property
    def bos(self) -> int | None:
        """The token that the vocabulary puts before a text, None where it puts none."""
        return self._llama.bos

    def windowed(self, tokens: Sequence[int]) -> list[int]:
        """A text's tokens as `score` takes them: where the vocabulary adds a BOS, one at the head of every window."""
        if self.bos is None:
            return list(tokens)
        body = tokens[1:] if tokens and tokens[0] == self.bos else tokens
        starts = range(0, len(body), self.window - 1)
        return [t for at in starts for t in (self.bos, *body[at : at + self.window - 1])]

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a token sequence."""
        return self._llama.detokenize(tokens)

    def header(
        self, cell: Cell | None = None, text: bytes = b"", tokens: Sequence[Sequence[int]] = ()
    ) -> TraceHeader:
        """The header of a recording of this model under a cell.

        Args:
            text: the bytes recorded. tokens: the ids run, one sequence a prompt, and of a generation how many to make;
                () where that is not said.
        """
        assert self._lanes is not None
        g, entry_bytes = self.gguf, self._experts.entry_bytes
        base = TraceHeader(
            model=g.path.name,
            arch=g.arch,
            n_layer=g.n_layer,
            n_expert=g.n_expert,
            n_expert_used=g.n_expert_used,
            gating=self.routing.gating,
            score_space=self.routing.score_space,
            weight_rule=self.routing.weight_rule,
            entry_bytes=entry_bytes,
            provenance=Provenance(model=self.model.digest),
        )
        if cell is None:
            return base
        return recording_header(
            base,
            replace(cell, prefetch=self.prefetch.text if self.prefetch is not None else None),
            window_bytes={i: self._experts.window_bytes(i, self._lanes.direct) for i in entry_bytes},
            dense_bytes={i: g.layer_bytes(i) - g.n_expert * entry_bytes.get(i, 0) for i in range(g.n_layer)},
            direct=self._lanes.direct,
            text=text,
            tokens=tokens,
            train=self.training.identity if self.training is not None else None,
        )

    def _check_overlap(self) -> bool:
        """Whether every layer has a node between gate and up and the down projection that can be stopped at."""
        stops = {i for name, i in self.routing.down_nodes.items() if name.encode().startswith(NODE_PREFIX)}
        if stops >= set(self.routing.experts):
            return True
        warnings.warn(
            f"{self.gguf.path.name}: its down projections have no node to wait at; reading serially, without --overlap",
            SimlabWarning,
            stacklevel=3,
        )
        return False

    # -- running --------------------------------------------------------------------------------------------

    def start(self, cell: Cell) -> None:
        """Begin a session under a cell: empty cache, empty context, graphs counted from 0.

        Raises:
            InputError: the cell's top-k is not the one the engine was opened with.
        """
        assert self._lanes is not None
        header = self.header()
        k = effective_k(cell.route, header)
        if k != (self.top_k or header.n_expert_used):
            raise InputError(
                f"this engine was opened with top-k {self.top_k or header.n_expert_used}, the cell asks for {k}"
            )
        for layer, expert in self._experts.slices:
            self._experts.release(layer, expert)
        self._cache = live_cache(cell, header, self.training)
        rule = None if self.routing.separate_gate else self.routing.weight_rule
        route = LiveRoute(
            cell.route,
            k,
            header.n_expert,
            len(header.moe_layers),
            self.routing.score_space,
            rule,
            header.gating,
            learn(cell.route.steps, self.training, len(header.moe_layers), header.n_expert),
        )
        ahead = None
        if self.prefetch is not None and self._ahead_lanes is not None:
            if self._cache.budget.off:
                raise InputError("--prefetch: needs a cache to read ahead into; --budget off has none")
            ahead = LookAhead(
                self.prefetch,
                header.moe_layers,
                self._ahead_lanes,
                self._experts,
                self._cache,
                self.routing.gates,
            )
        self.hook = Hook(self.routing, header, self._experts, self._lanes, self._cache, route, ahead)
        self._graph = 0
        self._budget_moved = False
        self.forget_context()

    def set_budget(self, budget: str) -> None:
        """Another budget from the next batch on, within the session: `--budget` forms, of the scope it has.

        Raises:
            InputError: not a budget, or one that switches the cache on or off.
        """
        scope = "per_layer" if self._cache.budget.per_layer else "global"
        resolved = resolve_budget(
            parse_budget(budget), scope, self.header(), self.top_k or self.gguf.n_expert_used
        )
        if resolved.off != self._cache.budget.off:
            raise InputError(
                f"--budget {budget}: a session's cache cannot be switched on or off; start another"
            )
        self._cache.set_budget(resolved)
        self._budget_moved = True

    def throw_away_decode(self, recorder: Recorder | None = None) -> None:
        """Decode token 0 as a prefill and forget it: warms the expert cache before a score (section 5).

        Recorded as turn -1, which a replay walks and no counter includes.
        """
        self.forget_context()
        self.run_graph(PlannedGraph(THROW_AWAY_TURN, PREFILL, 0, 1, 0, True, None), [0], None, recorder)
        self.forget_context()

    def score(
        self, tokens: Sequence[int], recorder: Recorder | None = None, progress: Any = None
    ) -> list[GraphResult]:
        """Teacher-forced step mode over a text (engine-semantics, section 5); logits are kept only for nll."""
        plans = list(text_graphs(len(tokens), self.window, self._llama.n_ubatch))
        results, turn = [], None
        for done, plan in enumerate(plans):
            if plan.turn != turn:
                self.forget_context()
                turn = plan.turn
            following = tokens[plan.next_index] if plan.next_index is not None else None
            results.append(self.run_graph(plan, tokens[plan.start : plan.stop], following, recorder))
            if progress is not None:
                progress((done + 1) / len(plans))
        return results

    def generate(
        self,
        prompt: Sequence[int],
        n: int,
        recorder: Recorder | None = None,
        turn: int = 0,
        progress: Any = None,
        until: Callable[[Sequence[int]], bool] | None = None,
        keep_context: bool = False,
    ) -> list[int]:
        """Greedy generation: the prompt as prefill, then up to `n` decoded tokens; returns those tokens.

        The expert cache of the session stays. `keep_context` keeps the KV state too: the prompt follows what
        was decoded before, as the next turn of a conversation. `until` is asked after each token, with all
        tokens made so far; True ends the generation.
        """
        first = self._n_past if keep_context else 0
        if first + len(prompt) + n > self.n_ctx:
            raise InputError(
                f"{first + len(prompt)} prompt tokens and {n} more do not fit a context of {self.n_ctx}; raise --ctx"
            )
        if not prompt:
            raise InputError("--prompt: has no tokens")
        if not keep_context:
            self.forget_context()
        result = None
        for plan in chunks(turn, 0, len(prompt), first, self._llama.n_ubatch):
            result = self.run_graph(plan, prompt[plan.start : plan.stop], None, recorder)
        assert result is not None
        assert result.logits is not None
        made: list[int] = []
        for i in range(n):
            token = int(np.argmax(result.logits))
            if self._llama.ends_generation(token):
                break
            made.append(token)
            if until is not None and until(made):
                break
            position = first + len(prompt) + i
            plan = PlannedGraph(turn, DECODE, position, position + 1, position, True, None)
            result = self.run_graph(plan, [token], None, recorder)
            assert result.logits is not None
            if progress is not None:
                progress((i + 1) / n)
        return made

    def forget_context(self) -> None:
        """Clear the KV state; the expert cache stays."""
        self._llama.clear()
        self._n_past = 0

    def run_graph(
        self,
        plan: PlannedGraph,
        tokens: Sequence[int],
        next_token: int | None,
        recorder: Recorder | None = None,
    ) -> GraphResult:
        """Evaluate one graph under the session's cell.

        Raises:
            RunError: a read failed, or llama.cpp refused the graph; no logit of it is returned.
        """
        hook = self.hook
        if hook is None:
            raise RunError("no session is open; call Engine.start(cell)")
        if recorder is not None and self._budget_moved:
            raise RunError("a recording has one budget, and this session's was moved; start another session")
        with DeferredInterrupt():
            return self._run_graph(hook, plan, tokens, next_token, recorder)

    def _run_graph(
        self,
        hook: Hook,
        plan: PlannedGraph,
        tokens: Sequence[int],
        next_token: int | None,
        recorder: Recorder | None,
    ) -> GraphResult:
        hook.on_batch = recorder.on_batch if recorder is not None else None
        hook.on_reads = recorder.on_reads if recorder is not None else None
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        began = time.perf_counter_ns()
        hook.begin_graph(plan.phase)
        before = time.perf_counter_ns()
        try:
            logits = self._llama.decode(tokens, plan.first_position, plan.wants_output, plan.every_position)
        except RunError:
            if hook.error is None:
                raise
            logits = None
        decode_ns = time.perf_counter_ns() - before
        if hook.error is not None:
            # The cache holds entries that were never read: this session is over.
            error, self.hook = hook.error, None
            hook.abandon()
            if isinstance(error, WrongValueError):
                raise InputError(f"{error}, in the graph from position {plan.first_position}") from error
            raise error
        hook.end_graph()
        nll = hit = None
        if logits is not None and next_token is not None:
            nll, hit = -log_probability(logits, next_token), int(np.argmax(logits)) == next_token
        wall_ns = time.perf_counter_ns() - began
        if recorder is not None:
            positions = range(plan.first_position, plan.first_position + len(tokens))
            recorder.end_graph(
                GraphPlace(plan.turn, self._graph, plan.phase, positions, tokens),
                hook.tally,
                wall_ns=wall_ns,
                compute_ns=decode_ns - hook.tally.hook_ns,
                major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
                next_token=next_token,
                nll=nll,
                hit=hit,
            )
        self._graph += 1
        self._n_past = plan.first_position + len(tokens)
        return GraphResult(plan, logits, nll, hook.tally)

    @contextlib.contextmanager
    def recording(
        self, cell: Cell, out: Path, *, text: bytes = b"", tokens: Sequence[Sequence[int]] = ()
    ) -> Iterator[Recorder]:
        """A recorder of this session into a new trace folder, which is complete if the block and the model hold.

        Args:
            text, tokens: as for `header`.

        Raises:
            RunError: the model's files were written to; the trace is then not complete.
        """
        with TraceWriter(
            out, self.header(cell, text, tokens), effective_k(cell.route, self.header())
        ) as writer:
            recorder = Recorder(writer)
            try:
                yield recorder
            finally:
                recorder.flush()
            self.model.check()

    def record_text(
        self, tokens: Sequence[int], cell: Cell, out: Path, *, text: bytes = b"", progress: Any = None
    ) -> None:
        """Record a teacher-forced decode of a text into a new trace folder."""
        self.start(cell)
        with self.recording(cell, out, text=text, tokens=[tokens]) as recorder:
            self.score(tokens, recorder, progress)

    def record_generation(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        cell: Cell,
        out: Path,
        *,
        text: bytes = b"",
        keep_context: bool = False,
        progress: Any = None,
    ) -> list[list[int]]:
        """Record a session of greedy generations, a turn per prompt, into a new trace; returns the tokens made.

        The expert cache stays from turn to turn, and with `keep_context` the KV state does.
        """
        self.start(cell)
        made = []
        with self.recording(cell, out, text=text, tokens=[*prompts, [n]]) as recorder:
            for turn, prompt in enumerate(prompts):
                kept = keep_context and turn > 0
                made.append(self.generate(prompt, n, recorder, turn, progress, keep_context=kept))
        return made

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        if self.hook is not None:
            self.hook.abandon()
        self.hook = None
        if self._ahead_lanes is not None:
            self._ahead_lanes.close()
            self._ahead_lanes = None
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        if getattr(self, "_experts", None) is not None:
            self._experts.restore()
        self._llama.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
