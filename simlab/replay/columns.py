"""From a trace to the columns the replay scan reads, in NumPy, a stretch of rows at a time.

The ids of the whole trace fit in memory and are read once; the score rows, which are far larger, are read
and turned into ranking values, statistics, masses and gate numerators only for the rows asked for. Whatever
takes a logarithm, an exponential or a row-wide reduction happens here, so that the scan and the live engine,
which calls the same functions of `simlab.scores`, see the same bits (engine-semantics, section 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.errors import InputError
from simlab.replay.early_reads import speculative_column, speculative_entries
from simlab.scores import (
    gate_numerators,
    mass_before,
    ranking_values,
    ranks_of,
    router_mass,
    router_ranking,
    row_statistics,
    sorted_scores,
)
from simlab.trace.store import BLOCK_ROWS, Trace
from simlab.types import DECODE, THROW_AWAY_TURN

_SCORE_BYTES = 8 * BLOCK_ROWS + 64 * 512
"""Memory for an expert's scores: of a block that is read, and of the rows that are got ready at once."""
_LAYER_BYTES = 64
"""Of header.json, for a layer."""
_ENTRY_BYTES = 40
"""Memory of a replay for each entry, whatever it replays: when it was used last, and what stands beside that."""
WeightSource = Literal["scores", "recorded"]


@dataclass(frozen=True)
class ColumnNeeds:
    """Which columns a set of cells wants of the trace."""

    n_slots: int
    """Length of the router's list in each row; its ranking fills what lies above the recorded width."""
    scores: bool
    rank: bool
    weights: frozenset[WeightSource]
    mass_before: bool = False
    order: bool = False
    """Experts of each row by value."""
    ranking: bool = False
    """Experts of each row as the router ranks them."""


class TraceColumns:
    """The rows of a trace in execution order, ready to be cut into chunks.

    A batch is a maximal run of rows of equal (graph, layer). `layer` is an index among the MoE layers.

    Raises:
        InputError: an expert id outside the model's range, or a row without router ids, with layer and step; or a
            model of more entries than memory holds.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._plain_rows: dict[int, NDArray[np.bool_]] = {}
        self._single_rows: dict[int, bool] = {}
        self._blocks: dict[str, tuple[int, NDArray[Any]]] = {}
        self._reading = Lock()
        header = trace.header
        n_layers, n_expert = len(header.moe_layers), header.n_expert
        require_memory(
            n_layers * n_expert * _ENTRY_BYTES,
            f"{trace.path}/header.json: {n_layers} layers of {n_expert} experts",
            n_layers * _LAYER_BYTES,
        )
        wanted = ("turn", "graph", "phase", "step", "layer", "pos_in_graph", "router_experts")
        ids = trace.collect("routing", trace.routing.select(wanted))
        self.where = ids.drop("router_experts")
        if ids["router_experts"].null_count() or ids["router_experts"].explode().null_count():
            raise InputError(f"{trace.path}/routing: rows without router_experts cannot be replayed")
        recorded: NDArray[np.int32] = ids["router_experts"].to_numpy().reshape(ids.height, trace.width)
        self.recorded = recorded.astype(np.int32)
        self.model_layer = ids["layer"].to_numpy()
        self.step = ids["step"].to_numpy()
        wrong = ((recorded < -1) | (recorded >= header.n_expert)).any(axis=1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"{trace.path}/routing: router_experts {recorded[row].tolist()} at {self.place(row)}; "
                f"ids run from 0 to {header.n_expert - 1}, -1 where a slot does not exist"
            )
        self.layer = np.searchsorted(np.array(header.moe_layers), self.model_layer).astype(np.int32)
        self.decode = (ids["phase"] == DECODE).to_numpy()
        self.counted = (ids["turn"] != THROW_AWAY_TURN).to_numpy()
        graph = ids["graph"].to_numpy()
        change = (graph[1:] != graph[:-1]) | (self.layer[1:] != self.layer[:-1])
        edge = np.ones(min(len(graph), 1), bool)
        self.batch_start = np.concatenate([edge, change])
        self.batch_end = np.concatenate([change, edge])
        self.batch = np.cumsum(self.batch_start, dtype=np.int64) - 1
        # A row with a hole ran fewer experts on purpose: the router's k of that row is what it has.
        shown = self.recorded[:, : header.n_expert_used]
        n_shown = (shown >= 0).sum(axis=1)
        hidden = header.n_expert_used - shown.shape[1]
        self.router_k = np.where(n_shown == shown.shape[1], n_shown + hidden, n_shown).astype(np.int32)

    @cached_property
    def speculative(self) -> NDArray[np.int32]:
        """int32 `[rows, n]`: experts that look-ahead brought in before each batch, at its first row."""
        return speculative_column(
            speculative_entries(self.trace),
            self.where["graph"].to_numpy(),
            self.model_layer,
            self.batch_start,
        )

    def plain_rows(self, k: int) -> NDArray[np.bool_]:
        """bool `[rows]`: rows that are a batch of their own and whose first k slots name k different experts."""
        if k not in self._plain_rows:
            ids = np.sort(self.recorded[:, :k], axis=1)
            different = (ids[:, 1:] != ids[:, :-1]).all(axis=1) & (ids[:, :1] >= 0).all(axis=1)
            self._plain_rows[k] = different & self.batch_start & self.batch_end
        return self._plain_rows[k]

    def single_rows(self, k: int) -> bool:
        """Whether every decode row is a batch of its own with k different experts, or with none."""
        if k not in self._single_rows:
            none = self.batch_start & self.batch_end & (self.recorded[:, :k] < 0).all(axis=1)
            self._single_rows[k] = bool((self.plain_rows(k) | none)[self.decode].all())
        return self._single_rows[k]

    @cached_property
    def pass_start(self) -> NDArray[np.bool_]:
        """bool `[rows]`: where a pass over the layers begins, a batch of no later layer than the one before."""
        starts = np.flatnonzero(self.batch_start)
        layers = self.layer[starts]
        found = np.zeros(self.n_rows, bool)
        found[starts[:1]] = True
        found[starts[1:][layers[1:] <= layers[:-1]]] = True
        return found

    @property
    def n_rows(self) -> int:
        return self.recorded.shape[0]

    def place(self, row: int) -> str:
        """Where a row is, for error messages."""
        return f"layer {self.model_layer[row]}, step {self.step[row]} (row {row})"

    def n_events(self, decode: bool) -> int:
        """Counted routing events of one phase: rows in which the router picked any expert."""
        return int((self.counted & (self.decode == decode) & (self.router_k > 0)).sum())

    def n_tokens(self, decode: bool) -> int:
        """Distinct (graph, position) among the counted rows of one phase."""
        rows = self.where.select("graph", "pos_in_graph").filter(
            pl.Series(self.counted & (self.decode == decode))
        )
        return rows.n_unique() if rows.height else 0

    def chunk(self, start: int, stop: int, size: int, needs: ColumnNeeds) -> dict[str, NDArray[Any]]:
        """Columns of rows `start` to `stop`, padded with rows that do nothing to `size` rows.

        Returns arrays whose first axis is the row. Always: layer, decode, counted, batch, batch_start,
        batch_end, pass_start, valid, row, router `[n_slots]`, router_k. With scores: top, range, finite, and
        `[n_expert]` value, mass, regret. On demand: order, ranking, rank, mass_before, numerator `[n_expert]`,
        weight `[width]`.
        """
        cut = slice(start, stop)
        columns: dict[str, NDArray[Any]] = {
            name: getattr(self, name)[cut]
            for name in (
                "layer",
                "decode",
                "counted",
                "batch",
                "batch_start",
                "batch_end",
                "pass_start",
                "router_k",
            )
        }
        columns["valid"] = np.ones(stop - start, bool)
        columns["row"] = np.arange(start, stop, dtype=np.int64)
        columns["router"] = self.recorded[cut][:, : needs.n_slots]
        if self.speculative.shape[1]:
            columns["speculative"] = self.speculative[cut]
        if needs.scores:
            columns |= self._score_columns(start, stop, needs)
        if "recorded" in needs.weights:
            columns["weight"] = self._read("weights", start, stop).astype(np.float32)
        return {name: _padded(name, column, size) for name, column in columns.items()}

    def _read(self, column: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of a column; the block of the trace they lie in is kept, since the next rows lie there too."""
        parts = []
        for number in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
            first = number * BLOCK_ROWS
            # Groups of cells that run side by side read the same rows.
            with self._reading:
                if self._blocks.get(column, (None,))[0] != number:
                    values = self.trace.values(column, first, BLOCK_ROWS)
                    self._blocks[column] = number, values.to_numpy().reshape(len(values), -1)
                block = self._blocks[column][1]
            parts.append(block[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _score_columns(self, start: int, stop: int, needs: ColumnNeeds) -> dict[str, NDArray[Any]]:
        header = self.trace.header
        assert header.score_space is not None
        assert header.gating is not None
        require_memory(
            header.n_expert * _SCORE_BYTES, f"{self.trace.path}/routing: scores of {header.n_expert} experts"
        )
        scores = self._read("scores", start, stop)
        values = ranking_values(scores, header.score_space)
        statistics = row_statistics(values)
        columns: dict[str, NDArray[Any]] = {
            "value": values,
            "top": statistics.top,
            "range": statistics.range,
            "mass": self.masses(start, stop),
            "regret": _in_ranges(values, statistics.bottom, statistics.top, statistics.range),
        }
        columns["finite"] = np.asarray(np.isfinite(values).all(axis=1))
        if needs.order:
            columns["order"] = sorted_scores(values)[0].astype(np.uint16)
        if needs.rank or needs.ranking or needs.mass_before or needs.n_slots > self.trace.width:
            order = router_ranking(values, self.recorded[start:stop])
            columns["router"] = self._longer_lists(self.recorded[start:stop], order, needs.n_slots)
            if needs.ranking:
                columns["ranking"] = order.astype(np.uint16)
            if needs.rank:
                columns["rank"] = ranks_of(order)
            if needs.mass_before:
                # Of what was sorted, as the live engine has it before the graph gathers the gate.
                columns["mass_before"] = mass_before(router_mass(scores, header.gating), order)
        if "scores" in needs.weights:
            assert header.weight_rule is not None
            gate = self._read("gate_probs", start, stop) if self.has_gate_probs else scores
            columns["numerator"] = gate_numerators(gate, header.weight_rule)
        return columns

    def masses(self, start: int, stop: int) -> NDArray[np.float64]:
        """Share of the router's probability each expert holds, `[rows, n_expert]`: of the gate where it was recorded.

        The scores that were sorted may hold a selection bias or a mask, which are no probability.

        Raises:
            InputError: the trace does not carry the router's scores.
        """
        header = self.trace.header
        if header.gating is None or not self.trace.has_scores:
            raise InputError(f"{self.trace.path}: does not carry the router's scores")
        if not self.has_gate_probs:
            return router_mass(self._read("scores", start, stop), header.gating)
        are_logits = header.weight_rule is not None and header.weight_rule.softmax_over_selected
        return router_mass(self._read("gate_probs", start, stop), "logits" if are_logits else "softmax")

    @cached_property
    def has_gate_probs(self) -> bool:
        """Whether weights are gathered from another tensor than the sorted one."""
        return self.trace.null_count("gate_probs") == 0

    @cached_property
    def has_weights(self) -> bool:
        """Whether the trace carries applied weights."""
        return self.trace.null_count("weights") == 0

    @staticmethod
    def _longer_lists(
        recorded: NDArray[np.int32], order: NDArray[np.int64], n_slots: int
    ) -> NDArray[np.int32]:
        """The recorded ids and, in rows without a hole, those ranked after them, up to `n_slots`."""
        width = recorded.shape[1]
        if n_slots <= width:
            return recorded[:, :n_slots]
        is_pick = np.zeros(order.shape, bool)
        rows, slots = np.nonzero(recorded >= 0)
        is_pick[rows, recorded[rows, slots]] = True
        after = is_pick.sum(axis=1)[:, None] + np.arange(n_slots - width)[None]
        more = np.take_along_axis(order, np.minimum(after, order.shape[1] - 1), axis=1)
        more[(recorded < 0).any(axis=1)] = -1
        return np.concatenate([recorded, more], axis=1).astype(np.int32)


def unknown_numbers(trace: Trace) -> frozenset[str]:
    """Fields of `PhaseNumbers` that a trace does not tell, of whatever setting."""
    header = trace.header
    if not header.router_known:
        return frozenset({"mass_displaced", "score_regret", "substituted", "agreement"})
    if (trace.n_rows and not trace.has_scores) or None in (header.score_space, header.gating):
        return frozenset({"mass_displaced", "score_regret"})
    biased = header.selection_bias and trace.null_count("gate_probs") > 0
    return frozenset({"mass_displaced"} if biased else ())


def _in_ranges(
    values: NDArray[np.float32],
    bottom: NDArray[np.float32],
    top: NDArray[np.float32],
    width: NDArray[np.float32],
) -> NDArray[np.float64]:
    """Ranking values in units of their row's range, infinite ones held at its ends; 0 where there is none."""
    held = np.clip(values, bottom[:, None], top[:, None]).astype(np.float64)
    unit = width.astype(np.float64)[:, None]
    if (unit > 0).all():
        held /= unit
        return held
    return np.divide(held, unit, out=np.zeros_like(held), where=unit > 0)


def _padded(name: str, column: NDArray[Any], size: int) -> NDArray[Any]:
    """`column` filled up to `size` rows: no slots, no batch edges, nothing counted."""
    missing = size - column.shape[0]
    if missing == 0:
        return np.ascontiguousarray(column)
    nothing = -1 if name in ("router", "speculative") else 0
    filler = np.full((missing, *column.shape[1:]), nothing, column.dtype)
    return np.concatenate([column, filler])
