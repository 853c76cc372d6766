"""A group of cells that route alike: finds in NumPy what the lanes share, and hands it to a scan of what they do not.

The policy's own functions are run once for each use of an entry, whatever the number of cells: uses of different
entries do not touch each other, so the n-th uses of all entries go through `touch` together.

Shapes: `B` MoE layers, `E` experts per layer, `W` lanes, `A` accesses, a row's use of an entry, or `U` uses, a batch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource
from simlab.replay.shape import COUNTERS, ProgramShape, Tree, first_counts
from simlab.replay.tally import lane_independent
from simlab.replay.units import budget_units, unit_of
from simlab.routing import first_state, touch_state
from simlab.scores import applied_weights
from simlab.types import Access, ResolvedBudget

STEPS = 1024
"""Steps of one call of a program."""


class Uses(NamedTuple):
    """What batches use, by entry and then in time; int64 `[U]`."""

    entry: NDArray[np.int64]
    """Place in `[B, E]`."""
    batch: NDArray[np.int64]
    """From the stretch's first on."""
    position: NDArray[np.int64]
    """Of the last occurrence."""
    state: dict[str, NDArray[Any]]
    """The policy's, after the use."""
    is_first: NDArray[np.bool_]
    """Whether the entry has not been used before."""


class SharedWalk(ABC):
    """The walk of a group's lanes through their caches.

    Args:
        sizes: bytes of an entry of each MoE layer. knobs: the eviction policy's, the same in all lanes.
        foretold: next uses of every slot, arrays `[rows, K, 1]`, where the policy wants them.
    """

    def __init__(
        self,
        columns: TraceColumns,
        program: ProgramShape,
        budgets: Sequence[ResolvedBudget],
        sizes: NDArray[np.int64],
        knobs: SimpleNamespace,
        foretold: Mapping[str, NDArray[np.int64]],
    ) -> None:
        self._columns, self._program, self._knobs, self._foretold = columns, program, knobs, foretold
        n_layers, n_expert = program.n_layers, program.n_expert
        self._per_layer = budgets[0].per_layer
        self._n_caches = n_layers if self._per_layer else 1
        self._cache = np.arange(n_layers) if self._per_layer else np.zeros(n_layers, np.int64)
        # Of what a call uses, a layer gets about its share, and at least that of one batch.
        share = 2 if self._per_layer else 1
        self._most_uses = max(n_expert, share * -(-STEPS * program.n_slots // self._n_caches))
        self._most_batches = STEPS
        units = (sizes // unit_of(sizes)).astype(np.int32)
        self.lanes: Tree = {"units": units, "budget": budget_units(budgets, sizes)}
        self._lay_out()

    @abstractmethod
    def _lay_out(self) -> None:
        """Set the scan's shape, and add to `lanes` what it reads beside."""

    def first_carry(self, n_lanes: int) -> Tree:
        """Empty caches and zero counters; what lanes share stands there once."""
        program = self._program
        entries = (program.n_layers, program.n_expert)
        return {
            "resident": np.zeros((*entries, n_lanes), bool),
            "used": np.zeros((self._n_caches, n_lanes), np.int32),
            **first_counts(n_lanes),
            "stamp": np.full(entries, -1, np.int64),
            "eviction_state": first_state(program.eviction.state, entries),
            "position": np.zeros((), np.int64),
        }

    def resumed(self, carry: Tree) -> Tree:
        """A carry that was saved, ready to go on from."""
        return carry

    def advance(self, carry: Tree, lanes: Tree, start: int, stop: int) -> Tree:
        """The carry after rows `start` to `stop`, which hold whole batches."""
        while start < stop:
            end = self._piece(start, stop)
            carry = self._walk(carry, lanes, start, end)
            start = end
        return carry

    def _piece(self, start: int, stop: int) -> int:
        """Where the rows of a call that begins at `start` end: as many batches as fit it."""
        columns, n_slots = self._columns, self._program.n_slots
        starts = start + np.flatnonzero(columns.batch_start[start:stop])
        n_rows = np.diff(np.append(starts, stop))
        # No batch uses more entries than its rows have slots, or than a layer has experts.
        most = np.minimum(n_rows * n_slots, self._program.n_expert)
        over = (np.cumsum(self._n_steps(most)[1]) > STEPS) | (np.arange(len(most)) >= self._most_batches)
        cache = self._cache[columns.layer[starts]]
        for one in np.unique(cache):
            over |= np.cumsum(np.where(cache == one, most, 0)) > self._most_uses
        at = int(np.argmax(over)) if over.any() else len(starts)
        return int(starts[max(at, 1)]) if max(at, 1) < len(starts) else stop

    def _n_steps(self, n_uses: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps in which batches look up what they use, and how many they take in all."""
        parts = np.maximum(-(-n_uses // self._program.n_slots), 1)
        # What a batch puts in last goes with the first look-up of the next, unless it may leave at once.
        return parts, 2 * parts - (0 if self._program.eviction.bypass else 1)

    def _walk(self, carry: Tree, lanes: Tree, start: int, stop: int) -> Tree:
        """One call of a program."""
        rows = self._columns.chunk(start, stop, stop - start, self._needs())
        uses, known = self._uses(carry, rows, start)
        given, counters = self._steps(rows, uses)
        shared = {"counters": counters[..., None], "sums": np.asarray(carry["sums"])}
        shared = lane_independent(self._program, shared, rows)
        moving = {name: carry[name] for name in ("resident", "used", "counters")}
        after = self._call(carry, moving, uses, given, shared["counters"], lanes)
        return carry | known | after | {"sums": shared["sums"]}

    @abstractmethod
    def _call(
        self,
        carry: Tree,
        moving: Tree,
        uses: Uses,
        steps: Tree,
        shared: NDArray[np.int64],
        lanes: Tree,
    ) -> Tree:
        """`moving`, the part of the carry that differs by lane, after the steps, and counts of `shared` added."""

    def _needs(self) -> ColumnNeeds:
        program = self._program
        wanted = program.weights if program.eviction.touch is not None else None
        weights: frozenset[WeightSource] = frozenset([wanted] if wanted else [])
        other = program.n_slots != program.n_expert_used or program.n_slots > self._columns.trace.width
        n_slots = max(program.n_slots, program.n_expert_used)
        scores = program.scores and (other or "scores" in weights)
        return ColumnNeeds(n_slots, scores=scores, rank=False, weights=weights)

    # -- what is used ------------------------------------------------------------------------------------------

    def _uses(self, carry: Tree, rows: Tree, start: int) -> tuple[Uses, Tree]:
        """What the batches use, and the part of the carry that lanes share after them."""
        program, n_expert = self._program, self._program.n_expert
        ids = rows["router"][:, : program.n_slots]
        row, slot = np.nonzero(ids >= 0)
        entry = rows["layer"][row].astype(np.int64) * n_expert + ids[row, slot]
        at = np.argsort(entry, kind="stable")
        entry, row = entry[at], row[at]
        # An access is all of a row's slots that run the entry.
        ends = np.ones(len(entry), bool)
        ends[:-1] = (entry[1:] != entry[:-1]) | (row[1:] != row[:-1])
        access = np.cumsum(ends) - ends
        weight = np.zeros(int(ends.sum()), np.float32)
        np.add.at(weight, access, self._weights(rows, ids)[np.nonzero(ids >= 0)][at])
        entry, row, last = entry[ends], row[ends], at[ends]
        batch = rows["batch"][row]
        same = entry[1:] == entry[:-1]
        first = np.ones(len(entry), bool)
        first[1:] = ~same | (batch[1:] != batch[:-1])
        closes = np.append(first[1:], True)[: len(entry)]
        # An array of JAX's would have NumPy's work done by programs of its own for every shape.
        position = int(carry["position"]) + last
        told = {name: column[start + row, slot[last], 0] for name, column in self._foretold.items()}
        state = {name: np.array(v).reshape(-1) for name, v in carry["eviction_state"].items()}
        after = self._touched(
            state,
            entry,
            Access(
                position=position,
                first=first,
                hit=np.zeros(len(entry), bool),
                weight=weight,
                batch=batch,
                layer=rows["layer"][row],
                expert=(entry % n_expert).astype(np.int32),
                **told,
            ),
        )
        stamp = np.array(carry["stamp"]).reshape(-1)
        uses = Uses(
            entry=entry[closes],
            batch=batch[closes] - rows["batch"][0],
            position=position[closes],
            state={name: v[closes] for name, v in after.items()},
            is_first=first_of(entry[closes]) & (stamp[entry[closes]] < 0),
        )
        stamp[entry] = position
        shape = carry["stamp"].shape
        known = {
            "stamp": stamp.reshape(shape),
            "eviction_state": {name: v.reshape(shape) for name, v in state.items()},
            "position": np.asarray(int(carry["position"]) + len(at)),
        }
        return uses, known

    def _weights(self, rows: Tree, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 `[rows, K]`: the weights applied; NaN where the trace does not tell, zeros where none is wanted."""
        program = self._program
        if program.eviction.touch is None:
            return np.zeros(ids.shape, np.float32)
        if program.weights == "recorded":
            return rows["weight"][:, : program.n_slots]
        if program.weights == "scores":
            assert program.weight_rule is not None
            numerators = np.take_along_axis(rows["numerator"], np.maximum(ids, 0), axis=1)
            return applied_weights(np, numerators.T, ids.T >= 0, program.weight_rule).T
        return np.full(ids.shape, np.nan, np.float32)

    def _touched(
        self, state: dict[str, NDArray[Any]], entry: NDArray[np.int64], access: Access
    ) -> dict[str, NDArray[Any]]:
        """The state after each access, `[A]`; `state`, by entry, is brought up to date."""
        policy = self._program.eviction
        after = {name: np.empty(len(entry), v.dtype) for name, v in state.items()}
        if policy.touch is None or not len(entry):
            return {name: state[name][entry] for name in state}
        starts = np.flatnonzero(first_of(entry))
        turn = np.arange(len(entry)) - np.repeat(starts, np.diff(np.append(starts, len(entry))))
        by_turn = np.argsort(turn, kind="stable")
        entry = entry[by_turn]
        in_turns = Access._make(np.asarray(x)[by_turn] if np.ndim(x) else x for x in access)
        found = {name: np.empty_like(v) for name, v in after.items()}
        ends = np.cumsum(np.bincount(turn)).tolist()
        for at in map(slice, [0, *ends[:-1]], ends):
            before = {name: v[entry[at]] for name, v in state.items()}
            one = Access._make(x[at] if np.ndim(x) else x for x in in_turns)
            with np.errstate(all="ignore"):
                new = touch_state(np, policy, before, one, self._knobs)
            for name, values in new.items():
                found[name][at] = values
                state[name][entry[at]] = found[name][at]
        for name, values in found.items():
            after[name][by_turn] = values
        return after

    # -- the steps ---------------------------------------------------------------------------------------------

    def _steps(self, rows: Tree, uses: Uses) -> tuple[Tree, NDArray[np.int64]]:
        """The steps of a call, and what they count alike in all lanes `[2, counters]`.

        `look_up` and `put` hold places of uses, -1 where none; scans say what they want of them.
        """
        n_slots, bypass = self._program.n_slots, self._program.eviction.bypass
        begins = np.flatnonzero(rows["batch_start"])
        at = np.argsort(uses.batch, kind="stable")
        batch = uses.batch[at]
        n_uses = np.bincount(batch, minlength=len(begins))
        parts, taken = self._n_steps(n_uses)
        first = np.cumsum(taken) - taken
        n_steps = int(taken.sum()) + 1
        of_step = np.append(np.repeat(np.arange(len(begins)), taken), len(begins) - 1)
        place = np.arange(len(batch)) - np.repeat(np.cumsum(n_uses) - n_uses, n_uses)
        look, put = first[batch] + place // n_slots, first[batch] + parts[batch] + place // n_slots
        given: Tree = {name: rows[name][begins][of_step] for name in ("layer", "decode", "counted", "batch")}
        for name, step in (("look_up", look), ("put", put)):
            given[name] = np.full((n_steps, n_slots), -1, np.int64)
            given[name][step, place % n_slots] = at
        evicts = np.zeros(n_steps, bool)
        evicts[first + parts - 1 + (parts if bypass else 0)] = True
        given |= {
            "cache": self._cache[given["layer"]].astype(np.int32),
            "evicts": evicts,
            "n": np.bincount(look, minlength=n_steps).astype(np.int32),
            "n_cold": np.bincount(look[uses.is_first[at]], minlength=n_steps).astype(np.int32),
        }
        shared = np.zeros((2, len(COUNTERS)), np.int64)
        for phase in (0, 1):
            mine = given["counted"] & (given["decode"] == phase)
            shared[phase, COUNTERS.index("lookups")] = given["n"][mine].sum()
            shared[phase, COUNTERS.index("cold_misses")] = given["n_cold"][mine].sum()
        return given, shared


def first_of(entry: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where each entry's uses begin, among uses by entry."""
    begins = np.ones(len(entry), bool)
    begins[1:] = entry[1:] != entry[:-1]
    return begins


def of_uses(values: NDArray[Any], places: NDArray[np.int64], nothing: Any) -> NDArray[Any]:
    """Values of uses at their places in steps, `nothing` where a step has none."""
    return np.append(values, np.asarray(nothing, values.dtype))[places]
