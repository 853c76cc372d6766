"""A group of cells that route alike: finds once what the lanes share, and hands it to a walk of what they do not.

The walk is a scan of XLA's (`ranked.py`, `keyed.py`), or on a CPU a compiled loop (`shared_loop.py`).

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

from simlab.errors import InputError
from simlab.policy_check import wrong_value
from simlab.replay.accesses import Accesses, find_accesses
from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource
from simlab.replay.shape import COUNTERS, ProgramShape, Tree, first_counts
from simlab.replay.shared_loop import EVICTIONS, HITS, N_COUNTS, PHASES, READ_BYTES, Batches, Caches
from simlab.replay.shared_order import reads
from simlab.replay.tally import lane_independent
from simlab.replay.units import budget_units, unit_of
from simlab.routing import first_state, touch_state
from simlab.scores import applied_weights
from simlab.types import Access, ResolvedBudget

STEPS = 1024
"""Steps of one call of a scan's program."""
LOOP_ROWS = 1 << 14
"""Rows that a loop walks at once, and those of the batch they end in."""


class Uses(NamedTuple):
    """What batches use, in the order of the walk; `[U]`."""

    entry: NDArray[np.int64]
    """Place in `[B, E]`."""
    batch: NDArray[np.int64]
    """From the stretch's first on."""
    begins: NDArray[np.int64]
    """Where each batch's uses begin, and where the last ones end."""
    before: NDArray[np.int64]
    """The use of the same entry before this one, -1 for none in the stretch."""
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
        loops: whether the compiled loop walks; else the scan.
    """

    def __init__(
        self,
        columns: TraceColumns,
        program: ProgramShape,
        budgets: Sequence[ResolvedBudget],
        sizes: NDArray[np.int64],
        knobs: SimpleNamespace,
        foretold: Mapping[str, NDArray[np.int64]],
        loops: bool,
    ) -> None:
        self._columns, self._program, self._knobs, self._foretold = columns, program, knobs, foretold
        self._loops, self._sizes = loops, sizes
        known = reads(program.eviction)
        assert known is not None
        self._reads = known
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
        if not loops:
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
        if self._loops:
            end = min(start + LOOP_ROWS, stop)
            return end + int(np.argmax(columns.batch_end[end - 1 :]))
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

    def _refuse(self, entry: int, batch: int) -> InputError:
        """What is raised where the key of an entry is none, for a batch of the piece under way."""
        layer, expert = divmod(entry, self._program.n_expert)
        row = int(np.searchsorted(self._columns.batch, self._first_batch + batch))
        name = f"expert {expert} of MoE layer {layer}"
        return wrong_value(self._program.eviction, name, self._columns.place(row))

    def _n_steps(self, n_uses: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps in which batches look up what they use, and how many they take in all."""
        parts = np.maximum(-(-n_uses // self._program.n_slots), 1)
        # What a batch puts in last goes with the first look-up of the next, unless it may leave at once.
        return parts, 2 * parts - (0 if self._program.eviction.bypass else 1)

    def _walk(self, carry: Tree, lanes: Tree, start: int, stop: int) -> Tree:
        """The carry after rows that fit one call."""
        self._first_batch = int(self._columns.batch[start])
        rows = self._columns.chunk(start, stop, stop - start, self._needs())
        uses, known = self._uses(carry, rows, start)
        shared = {"counters": self._shared_counts(rows, uses), "sums": np.asarray(carry["sums"])}
        shared = lane_independent(self._program, shared, rows)
        if self._loops:
            after = self._looped(carry, rows, uses, shared["counters"], lanes)
        else:
            moving = {name: carry[name] for name in ("resident", "used", "counters")}
            after = self._call(carry, moving, uses, self._steps(rows, uses), shared["counters"], lanes)
        return carry | known | after | {"sums": shared["sums"]}

    def _looped(self, carry: Tree, rows: Tree, uses: Uses, shared: NDArray[np.int64], lanes: Tree) -> Tree:
        """What differs by lane, after the loop."""
        at = np.flatnonzero(rows["batch_start"])
        layer, off = rows["layer"][at].astype(np.int64), np.array(lanes["off"])
        phase = np.where(rows["counted"][at], rows["decode"][at], PHASES - 1)
        batches = Batches(uses.begins, rows["batch"][at], layer, self._cache[layer], phase)
        n_lanes, shape = len(off), carry["resident"].shape
        caches = Caches(
            units=np.repeat(self.lanes["units"], self._program.n_expert),
            least_units=self.lanes["units"].reshape(self._n_caches, -1).min(axis=1),
            entry_bytes=self._sizes,
            budget=np.ascontiguousarray(self.lanes["budget"]),
            off=off,
            bypass=self._program.eviction.bypass,
            resident=np.array(carry["resident"]).reshape(-1, n_lanes),
            used=np.array(carry["used"]),
            counts=np.zeros((PHASES, N_COUNTS, n_lanes), np.int64),
        )
        self._loop(carry, uses, batches, caches)
        counted = caches.counts[: PHASES - 1]
        misses = shared[:, COUNTERS.index("lookups")] - counted[:, HITS]
        count = {
            "hits": counted[:, HITS],
            "misses": misses,
            "read_bytes": counted[:, READ_BYTES],
            "evictions": counted[:, EVICTIONS],
            "rereads": np.where(off, 0, misses - shared[:, COUNTERS.index("cold_misses")]),
        }
        counters = np.asarray(carry["counters"]) + shared
        for name, values in count.items():
            counters[:, COUNTERS.index(name)] += values
        return {"resident": caches.resident.reshape(shape), "used": caches.used, "counters": counters}

    @abstractmethod
    def _loop(self, carry: Tree, uses: Uses, batches: Batches, caches: Caches) -> None:
        """Walk the lanes of `caches`, which are brought up to date, by the compiled loop."""

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
        wanted = program.weights if "weight" in self._reads.of_access else None
        weights: frozenset[WeightSource] = frozenset([wanted] if wanted else [])
        other = program.n_slots != program.n_expert_used or program.n_slots > self._columns.trace.width
        n_slots = max(program.n_slots, program.n_expert_used)
        scores = program.scores and (other or "scores" in weights)
        return ColumnNeeds(n_slots, scores=scores, rank=False, weights=weights)

    # -- what is used ------------------------------------------------------------------------------------------

    def _uses(self, carry: Tree, rows: Tree, start: int) -> tuple[Uses, Tree]:
        """What the batches use, and the part of the carry that lanes share after them."""
        program = self._program
        ids = rows["router"][:, : program.n_slots]
        found = find_accesses(ids, rows["layer"], rows["batch_start"], program.n_layers, program.n_expert)
        # An array of JAX's would have NumPy's work done by programs of its own for every shape.
        position = int(carry["position"]) + found.place
        stamp = np.array(carry["stamp"]).reshape(-1)
        state = {name: np.array(v).reshape(-1) for name, v in carry["eviction_state"].items()}
        after = self._touched(state, found, position, rows, start)
        entry = found.entry[found.closing]
        uses = Uses(
            entry=entry,
            batch=np.repeat(np.arange(len(found.begins) - 1), np.diff(found.begins)),
            begins=found.begins,
            before=found.before,
            position=position[found.closing],
            state={name: v[found.closing] for name, v in after.items()},
            is_first=(found.before < 0) & (stamp[entry] < 0),
        )
        # Of several uses of an entry the last stands.
        stamp[entry] = uses.position
        shape = carry["stamp"].shape
        known = {
            "stamp": stamp.reshape(shape),
            "eviction_state": {name: v.reshape(shape) for name, v in state.items()},
            "position": np.asarray(int(carry["position"]) + found.n_slots),
        }
        return uses, known

    def _weight(self, rows: Tree, found: Accesses, expert: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 `[A]`: the weights of an access's slots, added up; zeros where none is wanted."""
        weight = np.zeros(len(expert), np.float32)
        if "weight" not in self._reads.of_access:
            return weight
        ids = rows["router"][:, : self._program.n_slots]
        weights = self._weights(rows, ids)
        for slot in range(ids.shape[1]):
            is_mine = ids[found.row, slot] == expert
            weight += np.where(is_mine, weights[found.row, slot], np.float32(0))
        return weight

    def _weights(self, rows: Tree, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 `[rows, K]`: the weights applied; NaN where the trace does not tell."""
        program = self._program
        if program.weights == "recorded":
            return rows["weight"][:, : program.n_slots]
        if program.weights == "scores":
            assert program.weight_rule is not None
            numerators = np.take_along_axis(rows["numerator"], np.maximum(ids, 0), axis=1)
            return applied_weights(np, numerators.T, ids.T >= 0, program.weight_rule).T
        return np.full(ids.shape, np.nan, np.float32)

    def _touched(
        self,
        state: dict[str, NDArray[Any]],
        found: Accesses,
        position: NDArray[np.int64],
        rows: Tree,
        start: int,
    ) -> dict[str, NDArray[Any]]:
        """The state after each access, `[A]`; `state`, by entry, is brought up to date."""
        policy, entry = self._program.eviction, found.entry
        if policy.touch is None or not len(entry):
            return {name: v[entry] for name, v in state.items()}
        expert = (entry % self._program.n_expert).astype(np.int32)
        access = Access(
            position=position,
            first=found.first,
            hit=np.zeros(len(entry), bool),
            weight=self._weight(rows, found, expert),
            batch=rows["batch"][found.row],
            layer=rows["layer"][found.row],
            expert=expert,
            **{name: column[start + found.row, found.slot, 0] for name, column in self._foretold.items()},
        )
        # What rests on nothing that earlier accesses left behind is found for all at once.
        turn = found.turn if self._reads.by_touch else np.zeros_like(found.turn)
        in_turns, turns = np.argsort(turn, kind="stable"), np.cumsum(np.bincount(turn)).tolist()
        entry = entry[in_turns]
        access = Access._make(x[in_turns] if np.ndim(x) else x for x in access)
        after = {name: np.empty(len(entry), v.dtype) for name, v in state.items()}
        with np.errstate(all="ignore"):
            for at in map(slice, [0, *turns[:-1]], turns):
                mine = entry[at]
                before = {name: v[mine] for name, v in state.items()}
                one = Access._make(x[at] if np.ndim(x) else x for x in access)
                for name, values in touch_state(np, policy, before, one, self._knobs).items():
                    after[name][at] = values
                    state[name][mine] = after[name][at]
        by_access = {name: np.empty_like(v) for name, v in after.items()}
        for name, values in after.items():
            by_access[name][in_turns] = values
        return by_access

    def _shared_counts(self, rows: Tree, uses: Uses) -> NDArray[np.int64]:
        """int64 `[2, counters, 1]`: by phase what batches count alike in all lanes."""
        at = np.flatnonzero(rows["batch_start"])
        n = np.diff(uses.begins)
        n_cold = np.bincount(uses.batch[uses.is_first], minlength=len(at))
        shared = np.zeros((2, len(COUNTERS), 1), np.int64)
        for phase in (0, 1):
            mine = rows["counted"][at] & (rows["decode"][at] == phase)
            shared[phase, COUNTERS.index("lookups")] = n[mine].sum()
            shared[phase, COUNTERS.index("cold_misses")] = n_cold[mine].sum()
        return shared

    # -- the steps ---------------------------------------------------------------------------------------------

    def _steps(self, rows: Tree, uses: Uses) -> Tree:
        """The steps of a call of a scan.

        `look_up` and `put` hold places of uses, -1 where none; scans say what they want of them.
        """
        n_slots, bypass = self._program.n_slots, self._program.eviction.bypass
        begins = np.flatnonzero(rows["batch_start"])
        batch, n_uses = uses.batch, np.diff(uses.begins)
        parts, taken = self._n_steps(n_uses)
        first = np.cumsum(taken) - taken
        n_steps = int(taken.sum()) + 1
        of_step = np.append(np.repeat(np.arange(len(begins)), taken), len(begins) - 1)
        place = np.arange(len(batch)) - uses.begins[batch]
        look, put = first[batch] + place // n_slots, first[batch] + parts[batch] + place // n_slots
        given: Tree = {name: rows[name][begins][of_step] for name in ("layer", "decode", "counted", "batch")}
        for name, step in (("look_up", look), ("put", put)):
            given[name] = np.full((n_steps, n_slots), -1, np.int64)
            given[name][step, place % n_slots] = np.arange(len(batch))
        evicts = np.zeros(n_steps, bool)
        evicts[first + parts - 1 + (parts if bypass else 0)] = True
        given |= {
            "cache": self._cache[given["layer"]].astype(np.int32),
            "evicts": evicts,
            "n": np.bincount(look, minlength=n_steps).astype(np.int32),
            "n_cold": np.bincount(look[uses.is_first], minlength=n_steps).astype(np.int32),
        }
        return given


def of_uses(values: NDArray[Any], places: NDArray[np.int64], nothing: Any) -> NDArray[Any]:
    """Values of uses at their places in steps, `nothing` where a step has none."""
    return np.append(values, np.asarray(nothing, values.dtype))[places]
