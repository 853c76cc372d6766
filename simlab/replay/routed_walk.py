"""A group of cells under LRU whose lanes route by themselves, on a CPU: hands rows to the loop of `routed_loop.py`.

Lanes are dealt out in tiles, and tiles to as many threads as JAX has devices.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from simlab.policy_check import wrong_value
from simlab.replay.batches import sorted_scores, stretches, walked
from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.replay.lanes import padded_lanes
from simlab.replay.routed_keys import keys
from simlab.replay.routed_loop import APART, TILE, TOLD, Caches, Limits, walk_rows
from simlab.replay.routed_rows import Rows, by_rank, compare_keys
from simlab.replay.shape import COUNTERS, SUMS, ProgramShape, Tree, first_counts
from simlab.replay.side_by_side import side_by_side
from simlab.replay.tally import lane_independent
from simlab.replay.units import budget_bytes
from simlab.routing import NO_EXPERT
from simlab.types import DECODE, PREFILL, ResolvedBudget

_MOST_ROWS = 512
"""Rows prepared in one go."""
_LEAST_ROWS = 8
"""Of these as many, whatever they take: below, it is calling that takes the time."""
_MOST_KEYS = 1 << 22
"""Keys of them, of all settings: 16 MiB."""
_FEWEST = 4
"""Lanes below which a tile spends its time on what it does once for all of them."""


class RoutedWalk:
    """The walk of a group's lanes through their caches. The carry has the lanes first, and is changed in place.

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
        self._columns, self._program = columns, program
        per_layer = budgets[0].per_layer
        n_layers = program.n_layers
        n_slots = max(program.n_slots, program.n_expert_used)
        self._needs = ColumnNeeds(n_slots, scores=True, rank=False, weights=frozenset())
        self._limits = Limits(
            budget=budget_bytes(budgets),
            off=np.array([b.off for b in budgets]),
            entry_bytes=sizes,
            cache_of_layer=np.arange(n_layers) if per_layer else np.zeros(n_layers, np.int64),
            n_expert=program.n_expert,
        )
        other = program.n_slots != program.n_expert_used or program.n_slots > columns.trace.width
        self._list_needs = dataclasses.replace(self._needs, scores=other)
        self.lanes: Tree = {}

    def first_carry(self, n_lanes: int) -> Tree:
        """An empty cache and zero counters."""
        program, tiles = self._program, self._tiles(n_lanes)
        n_caches = self._limits.budget.shape[1]
        caches = Caches.first(len(tiles), len(tiles[0]), n_caches, program.n_layers, program.n_expert)
        counts = first_counts(n_lanes)
        return caches._asdict() | {name: counts[name] for name in ("counters", "sums")}

    def resumed(self, carry: Tree) -> Tree:
        """A carry that was saved, ready to go on from."""
        return {name: np.array(x) for name, x in carry.items()}

    def advance(self, carry: Tree, lanes: Tree, start: int, stop: int) -> Tree:
        """The carry after rows `start` to `stop`, which hold whole batches."""
        caches = Caches._make(carry[name] for name in Caches._fields)
        for stretch in stretches(self._columns, self._program.n_slots, True, start, stop):
            if stretch.kind == "routed":
                self._walk_routed(caches, carry, lanes, stretch.rows)
            else:
                self._walk_lists(caches, carry, stretch.rows)
        return carry

    def _walk_routed(self, caches: Caches, carry: Tree, lanes: Tree, rows: slice) -> None:
        program, n_lanes = self._program, carry["sums"].shape[2]
        knobs, setting = _settings(lanes["knobs"]["rerank"], n_lanes)
        size = _MOST_KEYS // (2 * program.n_expert * padded_lanes(int(setting.max()) + 1))
        size = min(max(size, _LEAST_ROWS), _MOST_ROWS)
        pieces = [slice(at, min(at + size, rows.stop)) for at in range(rows.start, rows.stop, size)]
        tiles, n_threads = self._tiles(n_lanes), jax.local_device_count()
        counts = [_apart((len(tile), len(TOLD)), np.int64) for tile in tiles]
        sums = [_apart((len(tile), len(SUMS)), np.float64) for tile in tiles]
        for tile, mine in zip(tiles, sums, strict=True):
            mine[:] = carry["sums"][DECODE][:, tile].T

        def walk(number: int, given: Rows) -> None:
            mine, sizes = caches.of_tile(number), (program.n_slots, program.n_expert_used)
            tile = tiles[number]
            walk_rows(mine, self._limits, given, setting, tile, *sizes, counts[number], sums[number])

        with ThreadPoolExecutor(n_threads, thread_name_prefix="replay") as pool:
            waiting = deque(pool.submit(self._prepared, piece, knobs, size) for piece in pieces[:n_threads])
            for number in range(len(pieces)):
                given = waiting.popleft().result()
                walking = [pool.submit(walk, tile, given) for tile in range(len(tiles))]
                # Who is done walking first prepares rows to come.
                for piece in pieces[number + n_threads : number + n_threads + 1]:
                    waiting.append(pool.submit(self._prepared, piece, knobs, size))
                for one in walking:
                    one.result()
        self._add(carry, DECODE, counts)
        for tile, mine in zip(tiles, sums, strict=True):
            carry["sums"][DECODE][:, tile] = mine.T

    def _prepared(self, piece: slice, knobs: dict[str, NDArray[Any]], size: int) -> Rows:
        """Rows as the loop takes them."""
        program, k = self._program, self._program.n_slots
        step = program.step("rerank")
        assert step is not None
        rows = self._columns.chunk(piece.start, piece.stop, piece.stop - piece.start, self._needs)
        rows["order"], rows["ranked"] = sorted_scores(rows["value"])
        key, active, wrong = keys(step, k, rows, knobs, size)
        expert = rows["order"].astype(np.uint16)
        router_rank, mass, regret = by_rank(expert, rows["router"], rows["mass"], rows["regret"])
        active &= (rows["router"][:, :1] >= 0) & (k < program.n_expert)
        wrong = np.where(active, wrong, NO_EXPERT).min(axis=1)
        if (wrong < NO_EXPERT).any():
            row = int(np.argmax(wrong < NO_EXPERT))
            raise wrong_value(step.policy, f"expert {wrong[row]}", self._columns.place(piece.start + row))
        reach, before, is_plain = compare_keys(key, active, expert, k)
        return Rows(
            layer=rows["layer"],
            counted=rows["counted"],
            slots=np.where(rows["router"][:, 0] >= 0, k, 0),
            router=rows["router"],
            router_k=rows["router_k"],
            router_rank=router_rank,
            expert=expert,
            key=key,
            active=active,
            reach=reach,
            before=before,
            is_plain=is_plain,
            mass=mass,
            regret=regret,
        )

    def _walk_lists(self, caches: Caches, carry: Tree, rows: slice) -> None:
        columns, program, n_lanes = self._columns, self._program, carry["sums"].shape[2]
        starts = rows.start + np.flatnonzero(columns.batch_start[rows])
        tiles, setting, sums = self._tiles(n_lanes), np.zeros(n_lanes, np.int64), np.zeros((0, 3))
        counts = [_apart((len(tile), len(TOLD)), np.int64) for tile in tiles]

        def walk(tile: int, lists: Rows) -> None:
            walk_rows(
                caches.of_tile(tile), self._limits, lists, setting, tiles[tile], 0, 0, counts[tile], sums
            )

        # Cut where a batch begins.
        edges = [*starts[::_MOST_ROWS].tolist(), rows.stop]
        for start, stop in pairwise(edges):
            given = columns.chunk(start, stop, stop - start, self._list_needs)
            first = np.flatnonzero(given["batch_start"])
            experts = walked(given["router"][:, : program.n_slots], first, program.n_expert)
            lists = Rows.of_lists(given["layer"][first], given["counted"][first], experts)
            side_by_side(partial(walk, lists=lists), range(len(tiles)), jax.local_device_count())
            carry |= lane_independent(program, carry, given)
        self._add(carry, PREFILL, counts)

    def _add(self, carry: Tree, phase: int, counts: list[NDArray[np.int64]]) -> None:
        """Counts of a walk by tile, and what follows from them."""
        for tile, mine in zip(self._tiles(carry["sums"].shape[2]), counts, strict=True):
            told = dict(zip(TOLD, mine.T, strict=True))
            told["slots"] = told["lookups"] if phase == DECODE else 0
            told["misses"] = told["lookups"] - told["hits"]
            told["rereads"] = np.where(self._limits.off[tile], 0, told["misses"] - told["cold_misses"])
            for name, values in told.items():
                carry["counters"][phase, COUNTERS.index(name), tile] += values

    def _tiles(self, n_lanes: int) -> list[NDArray[np.int64]]:
        """Which lanes each tile has, as many in all, on every device one at least if that leaves them some lanes."""
        n = max(-(-n_lanes // TILE), min(jax.local_device_count(), n_lanes // _FEWEST), 1)
        # Every so manieth, since neighbours are alike and some take longer than others.
        return [np.arange(first, n_lanes, n) for first in range(n)]


def _apart(shape: tuple[int, int], dtype: type) -> NDArray[Any]:
    """Zeros in cache lines of their own: cores that write to the same one wait for each other."""
    return np.zeros((shape[0] + 2 * APART, shape[1]), dtype)[APART:-APART]


def _settings(knobs: Tree, n_lanes: int) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """The different settings of knobs, by name `[S]`, and which one each lane has."""
    lanes = {name: np.asarray(values) for name, values in knobs.items()}
    rows = list(zip(*(values.tolist() for values in lanes.values()), strict=True)) or [()] * n_lanes
    first: dict[tuple[float, ...], int] = {}
    for lane, row in enumerate(rows):
        first.setdefault(row, lane)
    places = {row: place for place, row in enumerate(first)}
    return (
        {name: values[list(first.values())] for name, values in lanes.items()},
        np.array([places[row] for row in rows], np.int64),
    )
