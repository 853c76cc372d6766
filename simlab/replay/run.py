"""Replaying a trace under cells: what would the cache have read, and which experts would have run.

The scores stay those of the recording while the cache, and with it the routing, follows each cell (fidelity
level L1 of policies.md). All cells go through one pass over the rows; cells whose policies share their code
are lanes of one compiled program (`kernel.py`), run over stretches of `CHUNK_ROWS` rows.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.cells import MIB, check_cache, check_eviction, effective_k, resolve_budget
from simlab.errors import InputError
from simlab.learning import learn
from simlab.policy import find_eviction
from simlab.policy_check import check_policy, wrong_value
from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource, unknown_numbers
from simlab.replay.devices import offer_cores
from simlab.replay.early_reads import look_ahead
from simlab.replay.future import (
    NOTE,
    cut,
    executed_columns,
    follows_router,
    next_use_columns,
    router_walks,
)
from simlab.replay.kernel import first_carry, program
from simlab.replay.lanes import lanes_of, padded_lanes
from simlab.replay.programs import backend
from simlab.replay.recency_walk import RecencyWalk
from simlab.replay.shape import COUNTERS, NO_ROW, SUMS, ProgramShape, Tree, code_key, told_fault
from simlab.replay.side_by_side import side_by_side
from simlab.replay.speculation import told
from simlab.replay.tally import phase_numbers
from simlab.replay.training import load_training, prepared
from simlab.replay.walks import Walk, acting_steps, is_looped, kind_of_walk, make_walk
from simlab.routing import knob_values
from simlab.trace.provenance import setting_provenance
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers, Route

offer_cores()

CHUNK_ROWS = 512
_CELL_CHUNKS = 512
"""Chunks times cells that are replayed at once, so that progress shows and walks still seldom wait for each other."""

TraceLike = Trace | str | os.PathLike[str]


def replay(trace: TraceLike, cell: Cell, *, train: str | None = None) -> CellNumbers:
    """Replay a trace under one cell; `train` is what `--train` takes.

    Raises:
        InputError: the trace lacks what a policy of the cell needs, or holds what cannot be replayed.
    """
    return sweep(trace, [cell], train=train)[0]


def sweep(
    trace: TraceLike,
    cells: Sequence[Cell],
    *,
    progress: Callable[[float], None] | None = None,
    train: str | None = None,
) -> list[CellNumbers]:
    """Replay a trace under many cells in one pass; results in the order of `cells`.

    Args:
        progress: called now and then with the share of the rows done.
        train: what policies that learn do so from, as `--train` takes it (`training.py`).
    """
    replayer = Replayer(trace, cells, train=train)
    while replayer.advance():
        if progress is not None:
            progress(replayer.row / max(replayer.columns.n_rows, 1))
    return replayer.numbers()


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
    detail: list[Tree]
    """Per chunk, arrays `[rows, ..., lanes]`; empty unless the shape asks for detail."""
    foretold: Tree
    """Columns of its own, arrays `[all rows, ..., lanes]`: next uses, and a first pass's routing."""
    walk: Walk | None
    """The faster scan, where the group can take it."""

    @property
    def whole_carry(self) -> Tree:
        """The carry with all that was counted."""
        return self.walk.whole(self.carry) if isinstance(self.walk, RecencyWalk) else self.carry


class Replayer:
    """A replay that can stop between any two rows, hand out its state as arrays, and go on from it.

    Args:
        detail: keep every slot of every row (for `slots.py`; memory grows with rows x lanes).
        plain: use the scan that holds for every policy (`kernel.py`), even where LRU has a faster one.
        loops: walk by compiled loops where JAX runs on a CPU; else by the scans that accelerators take.
        train: what policies that learn do so from, as `--train` takes it; rows of this trace they learn from
            run and are not counted.
    """

    def __init__(
        self,
        trace: TraceLike,
        cells: Sequence[Cell],
        *,
        detail: bool = False,
        plain: bool = False,
        loops: bool = True,
        train: str | None = None,
    ) -> None:
        self.trace = trace if isinstance(trace, Trace) else open_trace(trace)
        self.cells = list(cells)
        self._plain = plain or detail
        self._loops = loops and backend() == "cpu"
        self.columns = TraceColumns(self.trace)
        self._look_ahead = partial(look_ahead, self.trace.header, self.columns.speculative.shape[1])
        self.training = load_training(train, self.trace.header, self.columns) if train is not None else None
        if self.training is not None and self.training.uncounted is not None:
            self.columns.counted = self.columns.counted & ~self.training.uncounted
        # Rows below `first_row` were replayed before this object was made.
        self.row = self.first_row = 0
        header = self.trace.header
        # A trace without rows lacks nothing.
        self._carries_scores = self.columns.n_rows == 0 or self.trace.has_scores
        self.has_scores = self._carries_scores and None not in (header.score_space, header.gating)
        self._unknown = unknown_numbers(self.trace)
        for cell in self.cells:
            check_cache(cell.route, cell.budget)
            check_eviction(cell, trained=self.training is not None)
            for step in cell.route.steps:
                check_policy(step.policy)
        by_code: dict[tuple[Any, ...], list[int]] = {}
        for index, cell in enumerate(self.cells):
            eviction = find_eviction(cell.evict)
            twice = "future" in eviction.needs and not follows_router(cell.route)
            kind = (cell.sequential, twice, self._look_ahead(cell), *self._fast_kind(cell))
            code = (code_key(cell.route.steps, eviction), *kind)
            by_code.setdefault(code, []).append(index)
        self.groups = [self._group(indices, detail) for indices in by_code.values()]
        self._needs = ColumnNeeds(
            n_slots=max((g.n_list for g in self.groups), default=1),
            scores=self.has_scores,
            rank=any("rank" in s.policy.needs for g in self.groups for s in g.shape.steps),
            weights=frozenset(g.shape.weights for g in self.groups if g.shape.weights),
            mass_before=any("mass" in s.policy.needs for g in self.groups for s in g.shape.steps),
        )

    def advance(self, n_rows: int | None = None) -> bool:
        """Replay `n_rows` further rows and the batch they end in; False, and nothing done, at the trace's end.

        Args:
            n_rows: left out, some 1,000, and more where the cells are few.

        Raises:
            InputError: a drop policy met a weight that is NaN; at the trace's end at the latest: a policy made a value
                that is none (`simlab.routing.is_wrong`).
        """
        columns = self.columns
        n_rows = n_rows or CHUNK_ROWS * min(max(_CELL_CHUNKS // max(len(self.cells), 1), 2), 8)
        stop = min(self.row + n_rows, columns.n_rows)
        if self.row == stop:
            return False
        stop += int(np.argmax(columns.batch_end[stop - 1 :]))
        side_by_side(partial(self._walk, stop=stop), [g for g in self.groups if g.walk is not None])
        plain = [group for group in self.groups if group.walk is None]
        for start in range(self.row, stop, CHUNK_ROWS) if plain else ():
            end = min(start + CHUNK_ROWS, stop)
            rows = self.columns.chunk(start, end, CHUNK_ROWS, self._needs)
            side_by_side(partial(self._scan, rows=rows, start=start, end=end), plain)
        self.row = stop
        if stop == columns.n_rows:
            for group in self.groups:
                self._check_values(group)
        return True

    def _walk(self, group: Group, stop: int) -> None:
        assert group.walk is not None
        group.carry = group.walk.advance(group.carry, group.lanes, self.row, stop)
        self._check_weights(group)

    def _scan(self, group: Group, rows: Tree, start: int, end: int) -> None:
        own = {n: v for n, v in rows.items() if _wanted(n, group.shape)}
        own["router"] = rows["router"][:, : group.n_list]
        if "pass" in group.shape.eviction.needs:
            own["pass_start"] = cut({"": self.columns.pass_start}, start, end, CHUNK_ROWS)[""]
        own |= cut(group.foretold, start, end, CHUNK_ROWS)
        group.carry, detail = program(group.shape, group.n_lanes)(group.carry, own, group.lanes)
        if detail:
            group.detail.append({name: np.asarray(x)[: end - start] for name, x in detail.items()})
        self._check_weights(group)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything a later `from_state` needs, as arrays that `numpy.savez` can write."""
        arrays = {"row": np.array(self.row)}
        for number, group in enumerate(self.groups):
            for path, value in jax.tree_util.tree_leaves_with_path(group.whole_carry):
                arrays[f"{number}{jax.tree_util.keystr(path)}"] = np.array(value)
        return arrays

    @classmethod
    def from_state(
        cls,
        trace: TraceLike,
        cells: Sequence[Cell],
        state: Mapping[str, NDArray[Any]],
        *,
        detail: bool = False,
        plain: bool = False,
        train: str | None = None,
    ) -> Replayer:
        """Go on where `state` was taken, with the same trace and cells.

        Raises:
            InputError: the state is of other cells or of another model.
        """
        replayer = cls(trace, cells, detail=detail, plain=plain, train=train)
        replayer.row = replayer.first_row = int(state["row"])
        for number, group in enumerate(replayer.groups):

            def saved(path: Any, empty: NDArray[Any], number: int = number) -> NDArray[Any]:
                found = state.get(f"{number}{jax.tree_util.keystr(path)}")
                if found is None or found.shape != empty.shape or found.dtype != empty.dtype:
                    raise InputError("the saved state of a replay belongs to other cells or another model")
                return found

            carry = jax.tree_util.tree_map_with_path(saved, group.carry)
            group.carry = jax.device_put(carry) if group.walk is None else group.walk.resumed(carry)
        return replayer

    def numbers(self) -> list[CellNumbers]:
        """The counters of every cell over the rows replayed so far; tokens and events are the trace's."""
        found: dict[int, CellNumbers] = {}
        columns = self.columns
        tokens = [columns.n_tokens(decode) for decode in (False, True)]
        events = [columns.n_events(decode) for decode in (False, True)]
        for group in self.groups:
            carry = group.whole_carry
            counters, sums = np.asarray(carry["counters"]), np.asarray(carry["sums"])
            for lane, index in enumerate(group.indices):
                counted = counters[..., lane], sums[..., lane]
                numbers = self._cell_numbers(index, *counted, tokens, events)
                found[index] = dataclasses.replace(numbers, read_ahead=told(carry, lane))
        return [found[index] for index in range(len(self.cells))]

    def _cell_numbers(
        self,
        index: int,
        counters: NDArray[np.int64],
        sums: NDArray[np.float64],
        tokens: list[int],
        events: list[int],
    ) -> CellNumbers:
        cell, header = self.cells[index], self.trace.header
        k = effective_k(cell.route, header)
        budget = resolve_budget(cell.budget, cell.scope, header, k)
        route = dataclasses.replace(cell.route, router_known=header.router_known)
        return CellNumbers(
            source="replay",
            cell=dataclasses.replace(cell, route=route),
            budget_mib=budget.total_bytes / MIB,
            budget_cycles=budget.total_bytes / header.cycle_bytes(k),
            top_k=k,
            decode=phase_numbers(counters[1], sums[1], tokens[1], events[1], self._unknown),
            all=phase_numbers(
                counters.sum(axis=0), sums.sum(axis=0), sum(tokens), sum(events), self._unknown
            ),
            note=self._note(cell),
            provenance=setting_provenance(
                header, cell, self.training.identity if self.training is not None else None
            ),
        )

    def _note(self, cell: Cell) -> str | None:
        """What a reader of a cell's numbers has to know."""
        needs, training = find_eviction(cell.evict).needs, self.training
        notes = []
        if cell.sequential:
            notes.append("one expert at a time")
        if "future" in needs and not follows_router(cell.route):
            notes.append(NOTE)
        learns = "training" in needs or any(s.policy.learns for s in cell.route.steps)
        if not self.trace.header.router_known:
            notes.append("of the routing that ran; the trace does not hold what the router picked")
        if training is not None and learns:
            notes.append(training.note)
        elif training is not None and training.uncounted is not None:
            notes.append(f"{training.text} of decode not counted")
        return "; ".join(notes) or None

    def _group(self, indices: list[int], detail: bool) -> Group:
        header = self.trace.header
        cells = [self.cells[i] for i in indices]
        fast = self._fast_kind(cells[0])
        looped = bool(fast) and is_looped(fast[0], self._loops)
        if not looped:
            cells += cells[-1:] * (padded_lanes(len(cells)) - len(cells))
        eviction = find_eviction(cells[0].evict)
        widths = [effective_k(c.route, header) for c in cells]
        for cell, k in zip(cells, widths, strict=True):
            self._check_scores(cell.route, k)
        n_slots = max(widths)
        n_list = max(n_slots, header.n_expert_used)
        shape = ProgramShape(
            steps=acting_steps(cells[0].route) if fast else cells[0].route.steps,
            eviction=eviction,
            n_layers=len(header.moe_layers),
            n_expert=header.n_expert,
            n_slots=n_slots,
            n_expert_used=header.n_expert_used,
            scores=self.has_scores,
            weights=self._weight_source(cells[0].route, min(widths), detail or eviction.touch is not None),
            weight_rule=header.weight_rule if self.has_scores else None,
            detail=detail,
            **self._look_ahead(cells[0])._asdict(),
            sequential=cells[0].sequential,
            executed="future" in eviction.needs and not follows_router(cells[0].route),
        )
        self._require_room(shape, len(cells), fast[0] if fast else None)
        # Lanes that take a faster scan and know the future have one walk in common.
        n_walks = 1 if fast else len(cells)
        foretold = self._foretold(shape, cells[:n_walks], np.array(widths[:n_walks], np.int32))
        walk = None
        if fast:
            budgets = [
                resolve_budget(c.budget, c.scope, header, k) for c, k in zip(cells, widths, strict=True)
            ]
            walk = make_walk(
                fast[0],
                self.columns,
                shape,
                budgets,
                self._entry_bytes,
                knob_values(eviction.knobs, cells[0].evict_knobs),
                foretold,
                loops=self._loops,
            )
        carry = walk.first_carry(len(cells)) if walk is not None else first_carry(shape, len(cells))
        if eviction.prepare is not None:
            assert self.training is not None
            for lane, (cell, k) in enumerate(zip(cells, widths, strict=True)):
                budget = resolve_budget(cell.budget, cell.scope, header, k)
                knobs = knob_values(eviction.knobs, cell.evict_knobs)
                for name, values in prepared(
                    eviction, self.training.counts, self._entry_bytes, budget, knobs
                ).items():
                    carry["eviction_state"][name][..., lane] = values
        return Group(
            shape=shape,
            indices=indices,
            n_lanes=len(cells),
            n_list=n_list if self.has_scores else min(n_list, self.trace.width),
            lanes=jax.device_put(
                lanes_of(header, cells, widths, eviction)
                | self._learned(shape)
                | (walk.lanes if walk is not None else {})
            ),
            carry=carry if looped else jax.device_put(carry),
            detail=[],
            foretold={} if fast else foretold,
            walk=walk,
        )

    def _require_room(self, shape: ProgramShape, n_lanes: int, kind: str | None) -> None:
        """Refuse more settings than memory holds caches, or, with detail, slots of."""
        entries = shape.n_layers * shape.n_expert
        # The scan of any policy takes its state and gives it back; where lanes share an order they share the rest too.
        per_entry = {None: 2 * (9 + 8 * len(shape.eviction.state)), "fixed": 2, "moving": 2}.get(kind, 24)
        per_row = 2 * (22 * shape.n_slots + 8 * (len(COUNTERS) + len(SUMS))) if shape.detail else 0
        require_memory(
            n_lanes * (entries * per_entry + self.columns.n_rows * per_row),
            f"{self.trace.path}: {n_lanes} setting{'s' * (n_lanes != 1)} of {entries} entries, "
            f"{self.columns.n_rows} rows",
        )

    @cached_property
    def _entry_bytes(self) -> NDArray[np.int64]:
        """int64 `[B]`: bytes of an entry of each MoE layer."""
        header = self.trace.header
        return np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64)

    def _fast_kind(self, cell: Cell) -> tuple[Any, ...]:
        """What the cells of a group must share to take a faster walk; empty for those that cannot."""
        if self._plain or any(self._look_ahead(cell)):
            return ()
        return kind_of_walk(cell, self.columns, self._entry_bytes, loops=self._loops)

    def _learned(self, shape: ProgramShape) -> Tree:
        """What the routing policies of a group learned: one for all its lanes."""
        return {"learned": learn(shape.steps, self.training, shape.n_layers, shape.n_expert)}

    def _foretold(self, shape: ProgramShape, cells: Sequence[Cell], widths: NDArray[np.int32]) -> Tree:
        """The columns of a group whose eviction policy knows the future; a lossy routing is run for it first."""
        if "future" not in shape.eviction.needs or not self.columns.n_rows:
            return {}
        columns: Tree = {}
        if shape.executed:
            first = Replayer(
                self.trace,
                [dataclasses.replace(cell, evict="lru", evict_knobs={}) for cell in cells],
                detail=True,
                train=self.training.text if self.training is not None else None,
            )
            while first.advance():
                pass
            (group,) = first.groups
            told = {name: np.concatenate([d[name] for d in group.detail]) for name in group.detail[0]}
            columns = executed_columns(told, COUNTERS)
            walks = columns["executed_walk"]
        else:
            walks = router_walks(self.columns, widths, self.has_scores)
        batches = self.columns.layer, self.columns.batch
        return columns | next_use_columns(walks, *batches, sequential=shape.sequential)

    def _check_scores(self, route: Route, k: int) -> None:
        """Refuse what cannot be known without scores, and widths the model does not have."""
        header, path = self.trace.header, self.trace.path
        if k > header.n_expert:
            raise InputError(f"{path}: {k} experts per token, but the model has {header.n_expert} in a layer")
        if self.has_scores:
            return
        asks = [s.policy.name for s in route.steps if s.policy.needs & {"scores", "rank", "mass"}]
        if k > self.trace.width:
            asks.append(f"{k} experts per token, above the recorded {self.trace.width},")
        if asks and not self._carries_scores:
            raise InputError(
                f"{path}: {asks[0]} needs the router's scores, which this trace does not carry; "
                "record it with simlab record"
            )
        if asks:
            missing = "score_space" if header.score_space is None else "gating"
            raise InputError(
                f"{path}/header.json: {asks[0]} needs the router's scores, but field '{missing}' is null"
            )

    def _weight_source(self, route: Route, least_k: int, wanted: bool) -> WeightSource | None:
        """Where the weights of a route's experts come from; refuses a drop whose weights cannot be known."""
        header, path = self.trace.header, self.trace.path
        asking = next(
            (s.policy.name for s in route.steps if s.policy.stage == "drop" or "weights" in s.policy.needs),
            None,
        )
        if asking is None and not wanted:
            return None
        if self.has_scores and header.weight_rule is not None:
            return "scores"
        reroute, rule = route.reroute, header.weight_rule
        shares = rule is None or rule.normalise or rule.softmax_over_selected
        if self.has_scores:
            problem = "the weight rule, which header.json lacks"
        elif reroute is not None and not reroute.policy.is_builtin("original"):
            problem = f"the weights of the experts {reroute.policy.name} picks"
        elif least_k < self.trace.width and shares:
            problem = f"the weights of a narrower routing than the recorded {self.trace.width} experts"
        elif not self.columns.has_weights:
            problem = "the experts' weights"
        else:
            return "recorded"
        if asking is None:
            return None
        raise InputError(
            f"{path}: {asking} needs {problem}, which this trace does not carry; record it with simlab record"
        )

    def _check_weights(self, group: Group) -> None:
        step = group.shape.step("drop")
        if step is None:
            # Looking would wait for the device, which goes on while the next rows are prepared.
            return
        row = int(np.asarray(group.carry["nan_row"]).min())
        if row != NO_ROW:
            raise InputError(
                f"{self.trace.path}/routing: a weight is NaN at {self.columns.place(row)}; "
                f"{step.policy.name} cannot tell which slots are light"
            )

    def _check_values(self, group: Group) -> None:
        """Refuse what a scan's policies made; loops look where they make it."""
        code = int(np.asarray(group.carry.get("fault", NO_ROW)).min())
        if code == NO_ROW:
            return
        is_key, row, layer, expert = told_fault(code)
        reroute = group.shape.step("rerank") or group.shape.step("swap")
        policy = group.shape.eviction if is_key or reroute is None else reroute.policy
        name = f"expert {expert} of MoE layer {layer}" if is_key else f"expert {expert}"
        raise wrong_value(policy, name, self.columns.place(row))


def _wanted(column: str, shape: ProgramShape) -> bool:
    """Whether a program reads a column that other programs of the sweep may have asked for."""
    if column in ("rank", "mass_before"):
        need = {"rank": "rank", "mass_before": "mass"}[column]
        return any(need in s.policy.needs for s in shape.steps)
    if column in ("numerator", "weight"):
        return shape.weights == {"numerator": "scores", "weight": "recorded"}[column]
    return True
