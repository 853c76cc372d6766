"""A trace between traces: scores blended event by event from recordings of the same tokens under different cells.

A substituted expert changes the hidden state, and so every later score. Where the same token ids were recorded under
several margins, each (token, layer) has one row of scores per recording, and the rows in between are close to what a
margin in between would record. What is written is an ordinary trace of the original routing: scores, the router's
picks and weights from them, and the first recording's tokens without times. It was never run, and its header says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.scores import applied_weights, gate_numerators, ranking_values, router_ranking
from simlab.trace.provenance import check, trace_provenance
from simlab.trace.store import BLOCK_ROWS, Trace, TraceWriter, open_trace
from simlab.types import Provenance, TraceHeader

ENGINE = "simlab blend"
"""What a blended trace names as its engine, so that nothing takes it for a recording."""
_WHERE = ("turn", "graph", "phase", "step", "layer", "pos_in_graph", "token")
_TOKENS = ("turn", "graph", "phase", "step", "token", "next_token")
_ALIKE = ("n_expert", "n_expert_used", "gating", "score_space", "weight_rule", "entry_bytes")


def check_same_events(traces: Sequence[Trace]) -> None:
    """Refuse traces that are not recordings of one model on the same tokens, cut into the same graphs.

    Raises:
        InputError: they differ, or one lacks the router's scores or token ids.
    """
    first = traces[0]
    places = None
    for trace in traces:
        check(
            trace.header.provenance,
            trace_provenance(first.header),
            ("model", "text"),
            str(trace.path),
            f"the model and text of {first.path}",
            "a set is of one model and one text",
        )
        differing = [n for n in _ALIKE if getattr(trace.header, n) != getattr(first.header, n)]
        if differing:
            raise InputError(
                f"{trace.path}: differs from {first.path} in {', '.join(differing)}; a set is of one model"
            )
        if not trace.has_scores or trace.header.score_space is None or trace.header.weight_rule is None:
            raise InputError(f"{trace.path}: does not carry the router's scores, so it cannot be blended")
        found = trace.collect("routing", trace.routing.select(_WHERE))
        if places is None:
            places = found
        elif not found.equals(places):
            raise InputError(
                f"{trace.path}: is not of the same tokens and graphs as {first.path}; record the same text"
            )


def blend(traces: Sequence[Trace], shares: Sequence[float], out: Path) -> Trace:
    """Write the trace that lies between `traces`, and open it.

    Args:
        traces: recordings that `check_same_events` let pass.
        shares: of each, at least zero, adding up to 1.
        out: a new trace folder.

    Scores of a softmax are blended as logits and made a softmax again; others as they are. Where one of them is
    not finite, that of the largest share stands.
    """
    first = traces[0]
    width = first.header.n_expert_used
    with TraceWriter(out, _header(first.header, traces, shares), width) as writer:
        for start in range(0, first.n_rows, BLOCK_ROWS):
            writer.add("routing", _rows(traces, shares, start, width))
        tokens = first.collect("tokens", first.tokens.select(_TOKENS))
        writer.add("tokens", {name: tokens[name] for name in _TOKENS})
    return open_trace(out)


def _header(header: TraceHeader, traces: Sequence[Trace], shares: Sequence[float]) -> TraceHeader:
    """The first recording's, without what was not run."""
    of = header.provenance or Provenance()
    parts = ", ".join(f"{share:g} {t.path.name}" for t, share in zip(traces, shares, strict=True))
    return replace(
        header, route=None, knobs={}, policy_source_hash=None, prefetch=None, io_mode=None, cpu=None,
        engine=ENGINE, engine_version=parts, provenance=replace(of, policy=f"{ENGINE}: {parts}", budget=None),
    )  # fmt: skip


def _rows(traces: Sequence[Trace], shares: Sequence[float], start: int, width: int) -> dict[str, object]:
    """Columns of `BLOCK_ROWS` routing rows."""
    first, header = traces[0], traces[0].header
    wanted = (*_WHERE, "scores", "gate_probs", "router_experts")
    blocks = [
        trace.collect("routing", trace.routing.select(wanted).slice(start, BLOCK_ROWS)) for trace in traces
    ]
    assert header.weight_rule is not None
    assert header.score_space is not None
    is_softmax = header.gating == "softmax" and header.score_space == "prob"

    def of(name: str) -> NDArray[np.float32]:
        rows = np.stack([b[name].to_numpy().reshape(b.height, -1) for b in blocks]).astype(np.float64)
        return _softmax_between(rows, shares) if is_softmax else _between(rows, shares)

    scores = of("scores")
    has_gate = blocks[0]["gate_probs"].null_count() == 0
    gate = of("gate_probs") if has_gate else scores
    recorded = blocks[0]["router_experts"].to_numpy().reshape(-1, first.width)
    exists = (recorded >= 0)[:, :width]
    ranked = router_ranking(ranking_values(scores, header.score_space), np.empty((len(scores), 0), np.int32))
    experts = np.where(exists, ranked[:, :width], -1).astype(np.int32)
    numerators = np.take_along_axis(gate_numerators(gate, header.weight_rule), np.maximum(experts, 0), axis=1)
    weights = applied_weights(np, numerators.T, exists.T, header.weight_rule).T
    return {
        **{name: blocks[0][name] for name in _WHERE},
        "scores": scores,
        **({"gate_probs": gate} if has_gate else {}),
        "router_experts": experts,
        "weights": weights.astype(np.float32),
    }


def _between(rows: NDArray[np.float64], shares: Sequence[float]) -> NDArray[np.float32]:
    """Blended values `[rows, experts]` of `[traces, rows, experts]`."""
    heaviest = rows[int(np.argmax(shares))]
    with np.errstate(invalid="ignore"):
        mixed = np.tensordot(np.asarray(shares, dtype=np.float64), rows, axes=1)
    return np.where(np.isfinite(rows).all(axis=0), mixed, heaviest).astype(np.float32)


def _softmax_between(rows: NDArray[np.float64], shares: Sequence[float]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.log(rows)
    mixed = _between(logits, shares).astype(np.float64)
    p = np.exp(mixed)
    return (p / p.sum(axis=1, keepdims=True)).astype(np.float32)
