"""Replaying a trace under cells: what would the cache have read, and which experts would have run.

The scores stay those of the recording while the cache, and with it the routing, follows each cell (fidelity level L1
of policies.md). All cells go through one pass over the rows, by the compiled loop (`loop.py`), a thread per core, or
with `backend="jax"` by one scan (`scan.py`), whose lanes are the cells that share their policies' code.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.cells import MIB, check_cache, check_eviction
from simlab.errors import InputError
from simlab.learning import learn
from simlab.policy_check import check_policy, wrong_value
from simlab.replay.cache_loop import NAN_ROW
from simlab.replay.choose import BY_RANKING, BY_VALUE
from simlab.replay.columns import ColumnNeeds, TraceColumns, unknown_numbers
from simlab.replay.future import NOTE, given_columns, next_use_columns, router_walk
from simlab.replay.lanes import (  # fmt: skip
    KEPT,
    NO_ROW,
    Wrong,
    as_column,
    as_rows,
    functions_of,
    make_detail,
    make_lane,
    setting_of,
    with_columns,
    wrong_of,
)
from simlab.replay.loop import Detail, make_room, walk
from simlab.replay.settings import Resolved, resolve
from simlab.replay.side_by_side import side_by_side
from simlab.replay.tally import COUNTERS, SUMS, phase_numbers
from simlab.replay.training import Training, load_training, prepared
from simlab.routing import knob_values
from simlab.trace.provenance import setting_provenance
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, CellNumbers

Backend = Literal["loop", "jax"]

_ENTRY_BYTES = 96
"""Of a lane's arrays, by entry: some ten of 8 bytes."""
CHUNK_ROWS = 2048
"""Rows prepared at once for all lanes."""

TraceLike = Trace | str | os.PathLike[str]


def replay(
    trace: TraceLike, cell: Cell, *, train: str | None = None, backend: Backend = "loop"
) -> CellNumbers:
    """Replay a trace under one cell; `train` is what `--train` takes.

    Raises:
        InputError: the trace lacks what a policy of the cell needs, or holds what cannot be replayed.
    """
    return sweep(trace, [cell], train=train, backend=backend)[0]


def sweep(
    trace: TraceLike,
    cells: Sequence[Cell],
    *,
    progress: Callable[[float], None] | None = None,
    train: str | None = None,
    backend: Backend = "loop",
) -> list[CellNumbers]:
    """Replay a trace under many cells in one pass; results in the order of `cells`.

    Args:
        progress: called now and then with the share of the rows done.
        train: what policies that learn do so from, as `--train` takes it (`training.py`).
        backend: "loop", or "jax" for the scan, which accelerators take.
    """
    replayer = Replayer(trace, cells, train=train, backend=backend)
    while replayer.advance():
        if progress is not None:
            progress(replayer.row / max(replayer.columns.n_rows, 1))
    return replayer.numbers()


class Counted(Protocol):
    """What one cell's replay has come to so far."""

    counters: NDArray[np.int64]
    """`[2, 11]`: by phase, `COUNTERS`."""
    sums: NDArray[np.float64]
    read_ahead: NDArray[np.int64] | None


class Replayer:
    """A replay that can stop between any two batches, hand out its state as arrays, and go on from it.

    Args:
        detail: keep every slot of every row (for `slots.py`; memory grows with rows x cells).
        train: what policies that learn do so from, as `--train` takes it; rows of this trace they learn from
            run and are not counted.
        backend: "loop" or "jax".
    """

    def __init__(
        self,
        trace: TraceLike,
        cells: Sequence[Cell],
        *,
        detail: bool = False,
        train: str | None = None,
        backend: Backend = "loop",
    ) -> None:
        self.trace = trace if isinstance(trace, Trace) else open_trace(trace)
        self.cells = list(cells)
        self.columns = TraceColumns(self.trace)
        self.training = load_training(train, self.trace.header, self.columns) if train is not None else None
        if self.training is not None and self.training.uncounted is not None:
            self.columns.counted = self.columns.counted & ~self.training.uncounted
        # Rows below `first_row` were replayed before this object was made.
        self.row = self.first_row = 0
        header = self.trace.header
        # A trace without rows lacks nothing.
        carries = self.columns.n_rows == 0 or self.trace.has_scores
        self.has_scores = carries and None not in (header.score_space, header.gating)
        self._unknown = unknown_numbers(self.trace)
        for cell in self.cells:
            check_cache(cell.route, cell.budget)
            check_eviction(cell, trained=self.training is not None)
            for step in cell.route.steps:
                check_policy(step.policy)
        self.resolved = [
            resolve(cell, self.columns, has_scores=self.has_scores, detail=detail) for cell in self.cells
        ]
        self._require_room(detail)
        given = [
            self._first_pass(cell, train) if r.twice else None
            for cell, r in zip(cells, self.resolved, strict=True)
        ]
        arguments = (self.columns, self.resolved, self.training, self.has_scores, detail, given)
        if backend == "jax":
            from simlab.replay.scan_lanes import ScanLanes

            self._lanes: LoopLanes | ScanLanes = ScanLanes(*arguments)
        else:
            self._lanes = LoopLanes(*arguments)

    def _require_room(self, detail: bool) -> None:
        """Refuse more settings than memory holds caches, or, with detail, slots of."""
        header, n = self.trace.header, len(self.cells)
        entries = len(header.moe_layers) * header.n_expert
        slots = max((r.k for r in self.resolved), default=1)
        per_row = 22 * slots + 8 * (len(COUNTERS) + len(SUMS)) if detail else 0
        require_memory(
            n * (entries * _ENTRY_BYTES + self.columns.n_rows * per_row),
            f"{self.trace.path}: {n} setting{'s' * (n != 1)} of {entries} entries, {self.columns.n_rows} rows",
        )

    def _first_pass(self, cell: Cell, train: str | None) -> dict[str, NDArray[Any]]:
        """The routing that `lru` runs, on which a policy that knows the future is then run."""
        first = Replayer(
            self.trace, [dataclasses.replace(cell, evict="lru", evict_knobs={})], detail=True, train=train
        )
        while first.advance():
            pass
        return given_columns(first.detail(0))

    def advance(self, n_rows: int | None = None) -> bool:
        """Replay `n_rows` further rows and the batch they end in; False, and nothing done, at the trace's end.

        Raises:
            InputError: a drop policy met a weight that is NaN, or a policy made a value of NaN, or of +inf from
                finite input.
        """
        columns = self.columns
        stop = min(self.row + (n_rows or CHUNK_ROWS), columns.n_rows)
        if self.row == stop:
            return False
        stop += int(np.argmax(columns.batch_end[stop - 1 :]))
        self._lanes.advance(self.row, stop)
        for index, resolved in enumerate(self.resolved):
            step = resolved.cell.route.step("drop")
            row = self._lanes.nan_row(index) if step is not None else NO_ROW
            if row != NO_ROW:
                raise InputError(
                    f"{self.trace.path}/routing: a weight is NaN at {columns.place(row)}; "
                    f"{step.policy.name if step else ''} cannot tell which slots are light"
                )
            if (wrong := self._lanes.wrong(index)) is not None:
                raise wrong_value(wrong.policy, wrong.of, columns.place(wrong.row))
        self.row = stop
        return True

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything a later `from_state` needs, as arrays that `numpy.savez` can write."""
        return {"row": np.array(self.row), **self._lanes.state()}

    @classmethod
    def from_state(
        cls,
        trace: TraceLike,
        cells: Sequence[Cell],
        state: Mapping[str, NDArray[Any]],
        *,
        detail: bool = False,
        train: str | None = None,
        backend: Backend = "loop",
    ) -> Replayer:
        """Go on where `state` was taken, with the same trace, cells and backend.

        Raises:
            InputError: the state is of other cells or of another model.
        """
        replayer = cls(trace, cells, detail=detail, train=train, backend=backend)
        replayer.row = replayer.first_row = int(state["row"])

        other = InputError("the saved state of a replay belongs to other cells or another model")
        if set(state) != set(replayer.state()):
            raise other

        def saved(name: str, empty: NDArray[Any]) -> NDArray[Any]:
            found = state[name]
            if found.shape != empty.shape or found.dtype != empty.dtype:
                raise other
            return found

        replayer._lanes.resume(saved)
        return replayer

    def numbers(self) -> list[CellNumbers]:
        """The counters of every cell over the rows replayed so far; tokens and events are the trace's."""
        columns = self.columns
        tokens = [columns.n_tokens(decode) for decode in (False, True)]
        events = [columns.n_events(decode) for decode in (False, True)]
        return [self._cell_numbers(index, tokens, events) for index in range(len(self.cells))]

    def detail(self, cell: int) -> dict[str, NDArray[Any]]:
        """What happened in the rows since `first_row`, by name (`simlab.replay.loop.Detail`)."""
        return self._lanes.detail(cell)

    def _cell_numbers(self, index: int, tokens: list[int], events: list[int]) -> CellNumbers:
        resolved, counted = self.resolved[index], self._lanes.counted(index)
        budget, counters, sums = resolved.budget, counted.counters, counted.sums
        header = self.trace.header
        route = dataclasses.replace(resolved.cell.route, router_known=header.router_known)
        return CellNumbers(
            source="replay",
            cell=dataclasses.replace(resolved.cell, route=route),
            budget_mib=budget.total_bytes / MIB,
            budget_cycles=budget.total_bytes / self.trace.header.cycle_bytes(resolved.k),
            top_k=resolved.k,
            decode=phase_numbers(counters[1], sums[1], tokens[1], events[1], self._unknown),
            all=phase_numbers(
                counters.sum(axis=0), sums.sum(axis=0), sum(tokens), sum(events), self._unknown
            ),
            read_ahead=_read_ahead(counted.read_ahead),
            note=self._note(resolved),
            provenance=setting_provenance(
                header, resolved.cell, self.training.identity if self.training is not None else None
            ),
        )

    def _note(self, resolved: Resolved) -> str | None:
        """What a reader of a cell's numbers has to know."""
        cell, training = resolved.cell, self.training
        notes = []
        if cell.sequential:
            notes.append("one expert at a time")
        if resolved.twice:
            notes.append(NOTE)
        learns = "training" in resolved.eviction.needs or any(s.policy.learns for s in cell.route.steps)
        if not self.trace.header.router_known:
            notes.append("of the routing that ran; the trace does not hold what the router picked")
        if training is not None and learns:
            notes.append(training.note)
        elif training is not None and training.uncounted is not None:
            notes.append(f"{training.text} of decode not counted")
        return "; ".join(notes) or None


def _read_ahead(counts: NDArray[np.int64] | None) -> dict[str, float] | None:
    """What look-ahead read, as `CellNumbers.read_ahead` has it; None for a setting without."""
    if counts is None:
        return None
    issued, useful, read_bytes, useful_bytes = (int(n) for n in counts)
    return {
        "issued": issued,
        "useful": useful,
        "read_mib": read_bytes / MIB,
        "wasted_mib": (read_bytes - useful_bytes) / MIB,
    }


class _Counted:
    def __init__(self, counters: Any, sums: Any, read_ahead: Any) -> None:
        self.counters, self.sums, self.read_ahead = counters, sums, read_ahead


class LoopLanes:
    """The cells of a replay as lanes of the compiled loop; arguments as `Replayer` makes them."""

    def __init__(
        self,
        columns: TraceColumns,
        cells: Sequence[Resolved],
        training: Training | None,
        has_scores: bool,
        detail: bool,
        given: Sequence[dict[str, NDArray[Any]] | None],
    ) -> None:
        self._columns, self._cells, self._keeps = columns, cells, detail
        header = columns.trace.header
        sizes = np.array([header.entry_bytes[layer] for layer in header.moe_layers], np.int64)
        learned: dict[Any, Any] = {}
        self._settings, self._functions, self._lanes = [], [], []
        for cell, fixed in zip(cells, given, strict=True):
            steps, eviction = cell.steps, cell.eviction
            setting = setting_of(
                steps, eviction, cell.budget,
                n_expert=header.n_expert, k=cell.k, n_used=header.n_expert_used,
                scores=has_scores, weights=cell.weights, weight_rule=header.weight_rule if has_scores else None,
                sequential=cell.cell.sequential, given=fixed is not None, detail=detail, ahead=cell.look_ahead.ahead,
            )  # fmt: skip
            policies = tuple(step.policy.function for step in steps)
            if policies not in learned:
                learned[policies] = learn(steps, training, len(sizes), header.n_expert)
            first = None
            if eviction.prepare is not None:
                assert training is not None
                knobs = knob_values(eviction.knobs, cell.cell.evict_knobs)
                first = prepared(eviction, training.counts, sizes, cell.budget, knobs)
            self._settings.append(setting)
            self._functions.append(functions_of(steps, eviction))
            self._lanes.append(
                make_lane(
                    setting,
                    steps,
                    eviction,
                    cell.cell.evict_knobs,
                    cell.budget,
                    sizes,
                    learned[policies],
                    first,
                )
            )
        self._own = self._own_columns(given, has_scores)
        self._details: list[list[Detail]] = [[] for _ in cells]
        self._needs = ColumnNeeds(
            n_slots=max((max(c.k, header.n_expert_used) for c in cells), default=1)
            if has_scores
            else min(max((c.k for c in cells), default=1), columns.trace.width),
            scores=has_scores,
            rank=any(s.route_rank for s in self._settings),
            weights=frozenset(c.weights for c in cells if c.weights),
            mass_before=any(s.route_mass for s in self._settings),
            order=any(s.order == BY_VALUE for s in self._settings),
            ranking=any(s.order == BY_RANKING for s in self._settings),
        )

    def _own_columns(
        self, given: Sequence[dict[str, NDArray[Any]] | None], has_scores: bool
    ) -> list[dict[str, NDArray[Any]]]:
        """Columns of all rows that lanes do not share: next uses, and a first pass's routing."""
        found: list[dict[str, NDArray[Any]]] = []
        by_k: dict[tuple[int, bool], dict[str, NDArray[Any]]] = {}
        batches = self._columns.layer, self._columns.batch
        for cell, fixed in zip(self._cells, given, strict=True):
            own = dict(fixed or {})
            if "future" in cell.eviction.needs and self._columns.n_rows:
                if fixed is not None:
                    own |= next_use_columns(fixed["given_walk"], *batches, sequential=cell.cell.sequential)
                else:
                    key = cell.k, cell.cell.sequential
                    if key not in by_k:
                        by_k[key] = next_use_columns(
                            router_walk(self._columns, cell.k, has_scores), *batches, sequential=key[1]
                        )
                    own |= by_k[key]
            found.append({name: as_column(name, values) for name, values in own.items()})
        return found

    def advance(self, start: int, stop: int) -> None:
        while start < stop:
            end = min(start + CHUNK_ROWS, stop)
            # The loop takes whole batches.
            end += int(np.argmax(self._columns.batch_end[end - 1 :]))
            self._walk(start, end)
            start = end

    def _walk(self, begin: int, end: int) -> None:
        rows = as_rows(self._columns.chunk(begin, end, end - begin, self._needs))

        def one(index: int) -> None:
            own = {name: values[begin:end] for name, values in self._own[index].items()}
            setting = self._settings[index]
            if self._cells[index].look_ahead.n_speculative == 0 and rows.speculative.shape[1]:
                own["speculative"] = np.zeros((end - begin, 0), np.int32)
            detail = make_detail(end - begin if self._keeps else 0, setting.n_slots)
            walk(
                self._functions[index], setting, with_columns(rows, own), self._lanes[index], make_room(setting),
                detail, 0, end - begin, begin,
            )  # fmt: skip
            if self._keeps:
                self._details[index].append(detail)

        side_by_side(one, range(len(self._lanes)))

    def counted(self, index: int) -> Counted:
        lane, ahead = self._lanes[index], any(self._cells[index].look_ahead)
        return _Counted(lane.counters, lane.sums, lane.read_ahead if ahead else None)

    def nan_row(self, index: int) -> int:
        return int(self._lanes[index].numbers[NAN_ROW])

    def wrong(self, index: int) -> Wrong | None:
        """The first value of a policy that is none."""
        cell = self._cells[index]
        return wrong_of(
            self._lanes[index].numbers, cell.cell.route, cell.eviction, self._settings[index].n_expert
        )

    def detail(self, index: int) -> dict[str, NDArray[Any]]:
        parts = self._details[index] or [make_detail(0, self._settings[index].n_slots)]
        return {name: np.concatenate([getattr(p, name) for p in parts]) for name in Detail._fields}

    def state(self) -> dict[str, NDArray[Any]]:
        return {
            f"{number}.{name}": getattr(lane, name).copy()
            for number, lane in enumerate(self._lanes)
            for name in KEPT
        }

    def resume(self, saved: Callable[[str, NDArray[Any]], NDArray[Any]]) -> None:
        for number, lane in enumerate(self._lanes):
            for name in KEPT:
                array = getattr(lane, name)
                array[...] = saved(f"{number}.{name}", array)
