"""A group of cells whose order of eviction is fixed: finds the order in NumPy and hands it to the scan of `ranked.py`.

The policy's own functions are run once for each use of an entry, whatever the number of cells: uses of different
entries do not touch each other, so the n-th uses of all entries go through `touch` together.

Shapes: `B` MoE layers, `E` experts per layer, `W` lanes, `A` accesses, a row's use of an entry, or `U` uses, a batch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import WORD, padded
from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource
from simlab.replay.programs import compiled
from simlab.replay.ranked import RankedShape, first_carry, run
from simlab.replay.recency_walk import budget_units, lane_independent, unit_of
from simlab.replay.shape import COUNTERS, ProgramShape, Tree
from simlab.routing import entry_facts, eviction_key, first_state, touch_state
from simlab.scores import applied_weights
from simlab.types import Access, ResolvedBudget

_STEPS = 1024
"""Steps of one call of a program."""


class Uses(NamedTuple):
    """What batches use, by entry and then in time; int64 `[U]`."""

    entry: NDArray[np.int64]
    """Place in `[B, E]`."""
    batch: NDArray[np.int64]
    """From the stretch's first on."""
    position: NDArray[np.int64]
    """Of the last occurrence."""
    key: NDArray[Any]


class RankedWalk:
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
        per_layer = budgets[0].per_layer
        units = (sizes // unit_of(sizes)).astype(np.int32)
        line_sizes, line_of_layer = np.unique(units, return_inverse=True)
        n_layers, n_expert = program.n_layers, program.n_expert
        n_caches = n_layers if per_layer else 1
        entries = n_expert * (n_layers // n_caches)
        # Of new ranks, a layer gets about its share of a call's, and at least those of one batch.
        share = 2 if per_layer else 1
        self._new_ranks = max(n_expert, share * -(-_STEPS * program.n_slots // n_caches))
        self._shape = RankedShape(
            n_layers=n_layers,
            n_expert=n_expert,
            n_slots=program.n_slots,
            per_layer=per_layer,
            n_lines=n_layers if per_layer else len(line_sizes),
            n_words=-(-(entries + self._new_ranks) // WORD),
        )
        self._line = (np.arange(n_layers) if per_layer else line_of_layer).astype(np.int32)
        self._cache = np.arange(n_layers) if per_layer else np.zeros(n_layers, np.int64)
        self.lanes: Tree = {
            "units": units,
            "line_units": units if per_layer else line_sizes.astype(np.int32),
            "budget": budget_units(budgets, sizes),
            "line": self._line,
        }

    def first_carry(self, n_lanes: int) -> Tree:
        """Empty caches and zero counters; what lanes share stands there once."""
        program = self._program
        entries = (program.n_layers, program.n_expert)
        return first_carry(self._shape, n_lanes) | {
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
        over = np.cumsum(self._n_steps(most)[1]) > _STEPS
        cache = self._cache[columns.layer[starts]]
        for one in np.unique(cache):
            over |= np.cumsum(np.where(cache == one, most, 0)) > self._new_ranks
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
        n_lanes = carry["used"].shape[1]
        uses, state, stamp, position = self._uses(carry, rows, start)
        order, new, old = self._ranks(carry, uses)
        given, shared = self._steps(rows, uses, new, old)
        counted = lane_independent(
            self._program, {"counters": shared[..., None], "sums": np.asarray(carry["sums"])}, rows
        )
        shape = self._shape

        def function(carry: Tree, order: Tree, rows: Tree, n: Any, shared: Any, lanes: Tree) -> Tree:
            return run(shape, carry, order, rows, n, shared, lanes)

        call = compiled((shape.key, n_lanes), function)
        moving = {name: carry[name] for name in ("resident", "used", "counters")}
        n = np.int32(len(given["layer"]))
        after = call(moving, order, padded(given, _STEPS + 1), n, counted["counters"], lanes)
        return (
            carry
            | after
            | {
                "sums": counted["sums"],
                "stamp": stamp,
                "eviction_state": state,
                "position": position,
            }
        )

    def _needs(self) -> ColumnNeeds:
        program = self._program
        wanted = program.weights if program.eviction.touch is not None else None
        weights: frozenset[WeightSource] = frozenset([wanted] if wanted else [])
        other = program.n_slots != program.n_expert_used or program.n_slots > self._columns.trace.width
        n_slots = max(program.n_slots, program.n_expert_used)
        scores = program.scores and (other or "scores" in weights)
        return ColumnNeeds(n_slots, scores=scores, rank=False, weights=weights)

    # -- the order ---------------------------------------------------------------------------------------------

    def _uses(
        self, carry: Tree, rows: Tree, start: int
    ) -> tuple[Uses, dict[str, NDArray[Any]], NDArray[np.int64], NDArray[np.int64]]:
        """What the batches use, and the policy's state, last positions and the next position after them."""
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
        position = carry["position"] + last
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
        uses = Uses(
            entry=entry[closes],
            batch=batch[closes] - (rows["batch"][0] if len(rows["batch"]) else 0),
            position=position[closes],
            key=self._key({name: v[closes] for name, v in after.items()}, entry[closes], position[closes]),
        )
        stamp = np.array(carry["stamp"]).reshape(-1)
        stamp[entry] = position
        shape = carry["stamp"].shape
        state = {name: v.reshape(shape) for name, v in state.items()}
        return uses, state, stamp.reshape(shape), np.asarray(carry["position"] + len(at))

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
        starts = np.flatnonzero(np.append(True, entry[1:] != entry[:-1]))
        turn = np.arange(len(entry)) - np.repeat(starts, np.diff(np.append(starts, len(entry))))
        by_turn = np.argsort(turn, kind="stable")
        for at in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):
            before = {name: v[entry[at]] for name, v in state.items()}
            one = Access._make(np.asarray(x)[at] if np.ndim(x) else x for x in access)
            with np.errstate(all="ignore"):
                found = touch_state(np, policy, before, one, self._knobs)
            for name, values in found.items():
                after[name][at] = values
                state[name][entry[at]] = after[name][at]
        return after

    def _key(
        self, state: dict[str, NDArray[Any]], entry: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[Any]:
        """The keys of entries in that state."""
        program, n_expert = self._program, self._program.n_expert
        nothing = np.zeros(len(entry), bool)
        layer, expert = (entry // n_expert).astype(np.int32), (entry % n_expert).astype(np.int32)
        known = state | entry_facts(program.eviction, layer, expert, nothing, nothing)
        with np.errstate(all="ignore"):
            return np.asarray(eviction_key(np, program.eviction, known, position, np.int64(0), self._knobs))

    def _ranks(self, carry: Tree, uses: Uses) -> tuple[Tree, NDArray[np.int32], NDArray[np.int32]]:
        """The order as `ranked.run` takes it, and of each use its rank and that of the one before, -1 for none."""
        shape = self._shape
        stamp = np.asarray(carry["stamp"]).reshape(-1)
        seen = np.flatnonzero(stamp >= 0)
        state = {name: np.asarray(v).reshape(-1)[seen] for name, v in carry["eviction_state"].items()}
        entry = np.concatenate([seen, uses.entry])
        position = np.concatenate([stamp[seen], uses.position])
        key = np.concatenate([self._key(state, seen, stamp[seen]), uses.key])
        cache = self._cache[entry // shape.n_expert]
        at = np.lexsort((position, key, cache))
        n_caches = shape.n_layers if shape.per_layer else 1
        counts = np.bincount(cache, minlength=n_caches)
        rank = np.empty(len(at), np.int32)
        rank[at] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        lying = np.full((n_caches, shape.n_words * WORD), -1, np.int32)
        lying[cache[: len(seen)], rank[: len(seen)]] = seen
        latest = np.full(len(stamp), -1, np.int32)
        latest[seen] = rank[: len(seen)]
        new = rank[len(seen) :]
        begins = np.ones(len(new), bool)
        begins[1:] = uses.entry[1:] != uses.entry[:-1]
        old = np.where(begins, latest[uses.entry], np.append(np.int32(-1), new[:-1])[: len(new)])
        latest[uses.entry] = new
        return {"entry": lying, "rank": latest.reshape(carry["stamp"].shape)}, new, old

    # -- the steps ---------------------------------------------------------------------------------------------

    def _steps(
        self, rows: Tree, uses: Uses, new: NDArray[np.int32], old: NDArray[np.int32]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
        """The steps of a call, and what they count alike in all lanes `[2, counters]`."""
        n_slots, bypass = self._program.n_slots, self._program.eviction.bypass
        begins = np.flatnonzero(rows["batch_start"])
        at = np.argsort(uses.batch, kind="stable")
        batch, old, new = uses.batch[at], old[at], new[at]
        n_uses = np.bincount(batch, minlength=len(begins))
        parts, taken = self._n_steps(n_uses)
        first = np.cumsum(taken) - taken
        n_steps = int(taken.sum()) + 1
        of_step = np.append(np.repeat(np.arange(len(begins)), taken), len(begins) - 1)
        place = np.arange(len(batch)) - np.repeat(np.cumsum(n_uses) - n_uses, n_uses)
        look, put = first[batch] + place // n_slots, first[batch] + parts[batch] + place // n_slots
        ranks = {}
        for name, step, rank in (("look_up", look, old), ("put", put, new)):
            ranks[name] = np.full((n_steps, n_slots), -1, np.int32)
            ranks[name][step, place % n_slots] = rank
        line = self._line[rows["layer"][begins]]
        put_line = np.zeros(n_steps, np.int32)
        put_line[put] = line[batch]
        evicts = np.zeros(n_steps, bool)
        evicts[first + parts - 1 + (parts if bypass else 0)] = True
        given = ranks | {name: rows[name][begins][of_step] for name in ("layer", "decode", "counted")}
        given |= {
            "put_line": put_line,
            "line": line[of_step],
            "cache": self._cache[given["layer"]].astype(np.int32),
            "evicts": evicts,
            "n": np.bincount(look, minlength=n_steps).astype(np.int32),
            "n_cold": np.bincount(look[old < 0], minlength=n_steps).astype(np.int32),
        }
        shared = np.zeros((2, len(COUNTERS)), np.int64)
        for phase in (0, 1):
            mine = given["counted"] & (given["decode"] == phase)
            shared[phase, COUNTERS.index("lookups")] = given["n"][mine].sum()
            shared[phase, COUNTERS.index("cold_misses")] = given["n_cold"][mine].sum()
        return given, shared
