"""A group of cells under LRU: cuts the trace into stretches of batches and hands them to the scan of `recency.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import WORD, Stretch, finite_words, padded, score_order, stretches, walked
from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource
from simlab.replay.devices import placed, spread
from simlab.replay.programs import compiled
from simlab.replay.recency import WINDOW_WORDS, RecencyShape, first_carry, renumbered, run
from simlab.replay.shape import COUNTERS, ProgramShape, Tree, first_counts
from simlab.replay.tally import lane_independent
from simlab.replay.units import budget_units, unit_of
from simlab.types import DECODE, PREFILL, ResolvedBudget

_BATCHES = {"routed": 512, "narrow": 512, "wide": 16}
"""Batches in one call of a program."""


class RecencyWalk:
    """The walk of a group's lanes through their caches.

    Args:
        sizes: bytes of an entry of each MoE layer.
    """

    def __init__(
        self,
        columns: TraceColumns,
        program: ProgramShape,
        budgets: Sequence[ResolvedBudget],
        sizes: NDArray[np.int64],
    ) -> None:
        self._columns = columns
        self._program = program
        per_layer = budgets[0].per_layer
        unit = unit_of(sizes)
        units = (sizes // unit).astype(np.int32)
        line_sizes, line_of_layer = np.unique(units, return_inverse=True)
        n_caches = program.n_layers if per_layer else 1
        # Places below this are what a renumbering hands out.
        self._first_place = program.n_expert * (1 if per_layer else program.n_layers)
        room = max(_BATCHES["narrow"] * program.n_slots, _BATCHES["wide"] * program.n_expert)
        n_words = -(-(self._first_place + 2 * room) // WORD) + WINDOW_WORDS + program.n_expert // WORD + 1
        self._last_place = self._first_place + 2 * room
        self._shape = RecencyShape(
            program=program,
            n_slots=program.n_slots,
            routed=False,
            per_layer=per_layer,
            n_lines=program.n_layers if per_layer else len(line_sizes),
            n_words=n_words,
        )
        self._line_of_layer = line_of_layer.astype(np.int32)
        self.lanes: Tree = {
            "units": units,
            "line_units": units if per_layer else line_sizes.astype(np.int32),
            "budget": budget_units(budgets, sizes),
        }
        self._routes = any(s.policy.stage != "width" for s in program.steps)
        # Phases in which no lane changes the routing, and what is counted of them, which is not on the devices.
        self._phases = (PREFILL,) if self._routes else (PREFILL, DECODE)
        alike = first_counts(1)
        self._alike: Tree = {name: alike[name] for name in ("counters", "sums")}
        # Next free place of each cache; none is known before a carry is renumbered.
        self._next = np.full(n_caches, self._first_place)

    def first_carry(self, n_lanes: int) -> Tree:
        """An empty cache and zero counters."""
        return first_carry(self._shape, n_lanes)

    def resumed(self, carry: Tree) -> Tree:
        """A carry that was saved, ready to go on from."""
        counts = {name: np.array(carry[name]) for name in ("counters", "sums")}
        slots = COUNTERS.index("slots")
        for phase in self._phases:
            self._alike["counters"][phase, slots] = counts["counters"][phase, slots, :1]
            self._alike["sums"][phase] = counts["sums"][phase, :, :1]
            counts["counters"][phase, slots] = counts["sums"][phase] = 0
        return self._renumbered(carry | counts)

    def whole(self, carry: Tree) -> Tree:
        """The counters and sums of a carry with what all lanes have alike, which is counted here."""
        counters, sums = np.array(carry["counters"]), np.array(carry["sums"])
        for phase in self._phases:
            counters[phase] += self._alike["counters"][phase]
            sums[phase] = self._alike["sums"][phase]
        return carry | {"counters": counters, "sums": sums}

    def advance(self, carry: Tree, lanes: Tree, start: int, stop: int) -> Tree:
        """The carry after rows `start` to `stop`, which hold whole batches."""
        carry = placed(carry, carry["used"].shape[1])
        # From NumPy they go where they are wanted; from one device by a program of its own for every shape.
        lanes = jax.tree.map(np.asarray, lanes)
        for stretch in stretches(self._columns, self._program.n_slots, self._routes, start, stop):
            first = stretch.rows.start + np.flatnonzero(self._columns.batch_start[stretch.rows])
            n_batches = _BATCHES[stretch.kind]
            for at in range(0, len(first), n_batches):
                starts = first[at : at + n_batches]
                end = first[at + n_batches] if at + n_batches < len(first) else stretch.rows.stop
                piece = Stretch(stretch.kind, slice(int(starts[0]), int(end)))
                carry = self._walk(carry, lanes, piece, starts)
        return carry

    def _walk(self, carry: Tree, lanes: Tree, piece: Stretch, starts: NDArray[np.int64]) -> Tree:
        """One call of a program: the batches that begin at rows `starts`."""
        columns, program = self._columns, self._program
        routed, wide = piece.kind == "routed", piece.kind == "wide"
        rows = columns.chunk(
            piece.rows.start, piece.rows.stop, piece.rows.stop - piece.rows.start, self._needs(routed)
        )
        n_slots = program.n_expert if wide else program.n_slots
        if routed:
            given = self._routed_columns(rows)
        else:
            self._alike = lane_independent(program, self._alike, rows)
            lists = rows["router"][:, : program.n_slots]
            lists = walked(lists, starts - piece.rows.start, n_slots) if wide else lists
            at = starts - piece.rows.start
            given = {"experts": lists} | {name: rows[name][at] for name in ("layer", "decode", "counted")}
        n_places = (given["experts"] >= 0).sum(axis=1) if wide else np.full(len(starts), n_slots)
        carry, base = self._places(carry, given["layer"], n_places)
        given |= {"base": base, "line": self._line_of_layer[given["layer"]]}
        shape = dataclasses.replace(self._shape, n_slots=n_slots, routed=routed)
        n_lanes = carry["used"].shape[1]

        def function(carry: Tree, rows: Tree, n: Any, lanes: Tree) -> Tree:
            return run(shape, carry, rows, n, lanes)

        call = compiled((shape.key, n_lanes), spread(function, n_lanes))
        return call(carry, padded(given, _BATCHES[piece.kind]), np.int32(len(starts)), lanes)

    def _needs(self, routed: bool) -> ColumnNeeds:
        program = self._program
        weights: frozenset[WeightSource] = frozenset([program.weights] if routed and program.weights else [])
        fewer = program.n_slots != program.n_expert_used
        scores = program.scores and (routed or fewer or program.n_slots > self._columns.trace.width)
        n_slots = max(program.n_slots, program.n_expert_used)
        return ColumnNeeds(n_slots, scores=scores, rank=False, weights=weights)

    def _routed_columns(self, rows: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Columns of single rows that lanes route, as far as the policies look at them."""
        names = ("layer", "decode", "counted", "valid", "row", "router", "router_k")
        of_scores = ("top", "range", "mass", "regret", "numerator", "weight")
        given = {name: rows[name] for name in (*names, *of_scores) if name in rows}
        if "value" in rows and any("scores" in step.policy.needs for step in self._program.steps):
            given["order"], given["ranked"] = score_order(rows["value"])
        if "value" in rows and self._program.step("drop") is not None:
            given["value"] = rows["value"]
        if "order" in given:
            given["finite"] = finite_words(given["ranked"])
        return given

    def _places(
        self, carry: Tree, layers: NDArray[np.int32], n_places: NDArray[np.int64]
    ) -> tuple[Tree, NDArray[np.int32]]:
        """The first place of each batch in its cache's walk; renumbers the carry's where they would not suffice."""
        cache = layers if self._shape.per_layer else np.zeros_like(layers)
        taken = np.zeros(len(layers), np.int64)
        total = np.zeros(len(self._next), np.int64)
        for one in np.unique(cache):
            mine = cache == one
            taken[mine] = np.cumsum(n_places[mine]) - n_places[mine]
            total[one] = n_places[mine].sum()
        if (self._next + total > self._last_place).any():
            carry = self._renumbered(carry)
        base = self._next[cache] + taken
        self._next = self._next + total
        return carry, base.astype(np.int32)

    def _renumbered(self, carry: Tree) -> Tree:
        shape, line_of_layer = self._shape, jnp.asarray(self._line_of_layer)
        n_lanes = carry["used"].shape[1]

        def function(carry: Tree, _rows: Tree, _n: Any, _lanes: Tree) -> Tree:
            return renumbered(shape, carry, line_of_layer)

        call = compiled(("renumber", shape.key, n_lanes), spread(function, n_lanes))
        self._next = np.full_like(self._next, self._first_place)
        return call(placed(carry, n_lanes), {}, np.int32(0), {})
