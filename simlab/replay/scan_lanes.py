"""The cells of a replay as lanes of JAX scans: cells whose policies share their code are lanes of one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.learning import learn
from simlab.policy_check import attribute
from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.replay.future import next_use_columns, router_walk
from simlab.replay.kernel import first_carry, program
from simlab.replay.lanes import Wrong
from simlab.replay.settings import Resolved, code_key
from simlab.replay.shape import NO_ROW, ProgramShape, Tree, told_fault
from simlab.replay.side_by_side import side_by_side
from simlab.replay.training import Training
from simlab.types import Cell, EvictionPolicy, Knob, ResolvedBudget, TraceHeader

CHUNK_ROWS = 512
_EXACT_LANES = 16
"""Up to this many, lanes come in powers of two; then in multiples of it."""


def lanes_of(
    header: TraceHeader,
    cells: Sequence[Cell],
    widths: Sequence[int],
    budgets: Sequence[ResolvedBudget],
    eviction: EvictionPolicy,
) -> Tree:
    """What differs between the cells of a program, arrays with lanes last; knobs as float32 or int32."""
    return {
        "k": np.array(widths, np.int32),
        "knobs": {
            step.policy.stage: {
                attribute(name): _knob(
                    knob, [c.route.steps[place].knobs.get(name, knob.default) for c in cells]
                )
                for name, knob in step.policy.knobs.items()
            }
            for place, step in enumerate(cells[0].route.steps)
        },
        "eviction_knobs": {
            attribute(name): _knob(knob, [c.evict_knobs.get(name, knob.default) for c in cells])
            for name, knob in eviction.knobs.items()
        },
        "total_budget": np.array([b.total_bytes for b in budgets], np.int64),
        "layer_budget": np.array([b.layer_bytes for b in budgets], np.int64).T.copy(),
        "per_layer": np.array([b.per_layer for b in budgets]),
        "off": np.array([b.off for b in budgets]),
        "entry_bytes": np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64),
    }


def padded_lanes(n_cells: int) -> int:
    """Lanes to compile for: a few sizes, so that sweeps of like size share a compiled program."""
    power = 1 << (n_cells - 1).bit_length()
    return power if power <= _EXACT_LANES else -(-n_cells // _EXACT_LANES) * _EXACT_LANES


def _knob(knob: Knob, values: Sequence[float]) -> NDArray[Any]:
    return np.array(values, np.int32 if knob.integer else np.float32)


@dataclass
class Group:
    """Cells that are lanes of one program."""

    shape: ProgramShape
    indices: list[int]
    """Places of the lanes among all cells."""
    n_lanes: int
    """Lanes of the program, those after the cells' repeating the last of them."""
    n_list: int
    """Length of the router's list the program is given."""
    lanes: Tree
    carry: Tree
    own: Tree
    """Columns of its own, arrays `[all rows, ..., lanes]`: next uses, and a first pass's routing."""
    detail: list[Tree] = field(default_factory=list)
    """Per chunk, arrays `[rows, ..., lanes]`; empty unless the shape asks for detail."""


@dataclass
class Counted:
    """One cell's counts so far."""

    counters: NDArray[np.int64]
    sums: NDArray[np.float64]
    read_ahead: NDArray[np.int64] | None


class ScanLanes:
    """The same as `simlab.replay.run.LoopLanes`, by scans.

    Raises:
        InputError: a cell whose eviction policy keeps queues.
    """

    def __init__(
        self,
        columns: TraceColumns,
        cells: Sequence[Resolved],
        training: Training | None,
        has_scores: bool,
        detail: bool,
        given: Sequence[dict[str, NDArray[Any]] | None],
    ) -> None:
        self._columns, self._has_scores = columns, has_scores
        by_code: dict[tuple[Any, ...], list[int]] = {}
        for index, cell in enumerate(cells):
            if cell.eviction.kind == "queue":
                raise InputError(
                    f"--evict {cell.eviction.name}: keeps queues, which the JAX scan cannot run; leave out --backend"
                )
            kind = cell.cell.sequential, cell.twice, cell.look_ahead, cell.weights
            by_code.setdefault((code_key(cell.cell.route.steps, cell.eviction), *kind), []).append(index)
        self.groups = [
            self._group(places, [cells[i] for i in places], [given[i] for i in places], training, detail)
            for places in by_code.values()
        ]
        steps = [step for group in self.groups for step in group.shape.steps]
        self._needs = ColumnNeeds(
            n_slots=max((g.n_list for g in self.groups), default=1),
            scores=has_scores,
            rank=any("rank" in s.policy.needs for s in steps),
            weights=frozenset(g.shape.weights for g in self.groups if g.shape.weights),
            mass_before=any("mass" in s.policy.needs for s in steps),
        )

    def _group(
        self,
        indices: list[int],
        cells: list[Resolved],
        given: list[dict[str, NDArray[Any]] | None],
        training: Training | None,
        detail: bool,
    ) -> Group:
        header, one = self._columns.trace.header, cells[0]
        n_lanes = padded_lanes(len(cells))
        cells = cells + cells[-1:] * (n_lanes - len(cells))
        given = given + given[-1:] * (n_lanes - len(given))
        widths = [c.k for c in cells]
        n_slots = max(widths)
        n_list = max(n_slots, header.n_expert_used)
        shape = ProgramShape(
            steps=one.cell.route.steps,
            eviction=one.eviction,
            n_layers=len(header.moe_layers),
            n_expert=header.n_expert,
            n_slots=n_slots,
            n_expert_used=header.n_expert_used,
            scores=self._has_scores,
            weights=one.weights,
            weight_rule=header.weight_rule if self._has_scores else None,
            detail=detail,
            **one.look_ahead._asdict(),
            sequential=one.cell.sequential,
            given=one.twice,
        )
        budgets = [c.budget for c in cells]
        lanes = lanes_of(header, [c.cell for c in cells], widths, budgets, one.eviction)
        learned = {"learned": learn(shape.steps, training, shape.n_layers, shape.n_expert)}
        return Group(
            shape=shape,
            indices=indices,
            n_lanes=n_lanes,
            n_list=n_list if self._has_scores else min(n_list, self._columns.trace.width),
            lanes=jax.device_put(lanes | learned),
            carry=jax.device_put(first_carry(shape, n_lanes)),
            own=self._own_columns(shape, widths, given),
        )

    def _own_columns(
        self, shape: ProgramShape, widths: list[int], given: list[dict[str, NDArray[Any]] | None]
    ) -> Tree:
        """The columns of a group whose eviction policy knows the future."""
        columns = self._columns
        if "future" not in shape.eviction.needs or not columns.n_rows:
            return {}
        found: list[Tree] = []
        for k, fixed in zip(widths, given, strict=True):
            walk = router_walk(columns, k, self._has_scores) if fixed is None else fixed["given_walk"]
            own = dict(fixed or {}) | next_use_columns(
                walk, columns.layer, columns.batch, sequential=shape.sequential
            )
            missing = [(0, 0), (0, shape.n_slots - k)]
            for name, values in own.items():
                if name != "given_counts" and values.ndim == 2:
                    nothing = -1 if name in _IDS else 0
                    own[name] = np.pad(values, missing, constant_values=nothing)
            found.append(own)
        return {name: np.stack([own[name] for own in found], axis=-1) for name in found[0]}

    def advance(self, start: int, stop: int) -> None:
        for begin in range(start, stop, CHUNK_ROWS):
            end = min(begin + CHUNK_ROWS, stop)
            rows = self._columns.chunk(begin, end, CHUNK_ROWS, self._needs)
            side_by_side(lambda g, rows=rows, b=begin, e=end: self._scan(g, rows, b, e), self.groups)

    def _scan(self, group: Group, rows: Tree, start: int, end: int) -> None:
        own = {n: v for n, v in rows.items() if _wanted(n, group.shape)}
        own["router"] = rows["router"][:, : group.n_list]
        own |= _cut(group.own, start, end)
        group.carry, detail = program(group.shape, group.n_lanes)(group.carry, own, group.lanes)
        if detail:
            group.detail.append({name: np.asarray(x)[: end - start] for name, x in detail.items()})

    def _find(self, index: int) -> tuple[Group, int]:
        return next((g, g.indices.index(index)) for g in self.groups if index in g.indices)

    def counted(self, index: int) -> Counted:
        group, lane = self._find(index)
        ahead = group.carry.get("read_ahead")
        return Counted(
            np.asarray(group.carry["counters"])[..., lane],
            np.asarray(group.carry["sums"])[..., lane],
            None if ahead is None else np.asarray(ahead)[:, lane],
        )

    def nan_row(self, index: int) -> int:
        group, lane = self._find(index)
        return int(np.asarray(group.carry["nan_row"])[lane])

    def wrong(self, index: int) -> Wrong | None:
        """The first value of a policy that is none."""
        group, lane = self._find(index)
        code = int(np.asarray(group.carry["fault"])[lane])
        if code == NO_ROW:
            return None
        is_key, row, layer, expert = told_fault(code)
        reroute = group.shape.step("rerank") or group.shape.step("swap")
        if is_key or reroute is None:
            return Wrong(group.shape.eviction, f"expert {expert} of MoE layer {layer}", row)
        return Wrong(reroute.policy, f"expert {expert}", row)

    def detail(self, index: int) -> dict[str, NDArray[Any]]:
        group, lane = self._find(index)
        assert group.detail, "no row was replayed with detail"
        return {name: np.concatenate([d[name][..., lane] for d in group.detail]) for name in group.detail[0]}

    def state(self) -> dict[str, NDArray[Any]]:
        return {
            f"{number}{jax.tree_util.keystr(path)}": np.array(value)
            for number, group in enumerate(self.groups)
            for path, value in jax.tree_util.tree_leaves_with_path(group.carry)
        }

    def resume(self, saved: Callable[[str, NDArray[Any]], NDArray[Any]]) -> None:
        for number, group in enumerate(self.groups):

            def of_path(path: Any, empty: NDArray[Any], number: int = number) -> NDArray[Any]:
                return saved(f"{number}{jax.tree_util.keystr(path)}", empty)

            group.carry = jax.device_put(jax.tree_util.tree_map_with_path(of_path, group.carry))


_IDS = ("given_router", "given_expert", "given_walk")


def _cut(columns: Tree, start: int, stop: int) -> Tree:
    """Rows `start` to `stop`, padded with rows in which no slot is."""
    found = {}
    for name, column in columns.items():
        filler = np.full(
            (CHUNK_ROWS - (stop - start), *column.shape[1:]), -1 if name in _IDS else 0, column.dtype
        )
        found[name] = np.concatenate([column[start:stop], filler])
    return found


def _wanted(column: str, shape: ProgramShape) -> bool:
    """Whether a program reads a column that other programs of the sweep may have asked for."""
    if column in ("rank", "mass_before"):
        need = {"rank": "rank", "mass_before": "mass"}[column]
        return any(need in s.policy.needs for s in shape.steps)
    if column in ("numerator", "weight"):
        return shape.weights == {"numerator": "scores", "weight": "recorded"}[column]
    if column == "speculative":
        return shape.n_speculative > 0
    if column == "pass_start":
        return "pass" in shape.eviction.needs
    return column not in ("finite", "order", "ranking")
