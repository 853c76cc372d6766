"""What a replay knows of how far a cell strays from the router, one row per cell: the inputs of a quality law.

Router mass displaced says how much was lost and not what kind: two cells that lose the same mass may differ in how
often the router's first choice goes, in how far the applied weights move, and in how long the same experts stay.
These are counted here, event by event (one decode token at one MoE layer), from the slots of a replay or from a
live recording, and averaged over the counted events.

Features, all of them means over decode events, without a unit:

- `mass`: probability of the router's picks minus that of what ran.
- `distance`: squared L1 distance between the weights the router would have applied and those applied, 0 to 4.
- `energy`: the same differences squared and added up, 0 to 2.
- `top1`: share of events in which the router's first choice did not run.
- `changed`: share of the router's picks that did not run. `dropped`: share of slots dropped.
- `undecided`: mean over the scored tokens of p (1 - p), p the probability that the recorded run gave the token that
  came; null where the trace has no losses. It belongs to the text, and is the same for all cells.
- `undecided_distance`, `undecided_distance^2`: mean over the scored tokens of p (1 - p) d and of p (1 - p) d^2, d the
  token's distance, mean over its layers: straying counts where the model wavers. Null as above.
- `kept`: share of what ran that ran for the token before too, in the same layer and turn; `kept_router` is the same of
  the router's picks.

Sources: the measures of section "What each cell reports" of the policies' specification, and the trials of issue 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.replay.run import CHUNK_ROWS, Replayer, TraceLike
from simlab.routing import knob_values
from simlab.scores import applied_weights
from simlab.trace.store import Trace, open_trace
from simlab.types import DECODE, THROW_AWAY_TURN, Cell, Route

FEATURES = ("mass", "distance", "energy", "top1", "changed", "dropped", "kept", "kept_router")
"""The features of a cell; each also comes by layer, as `<name>_by_layer`."""
UNDECIDED = ("undecided", "undecided_distance", "undecided_distance^2")
"""The features that need the losses of the recording."""
_NULLABLE: dict[str, pl.DataType] = {name: pl.Float64() for name in UNDECIDED}
_DETAIL_BYTES = 256 << 20
"""Of slots kept at once."""


@dataclass(frozen=True)
class Executed:
    """What ran in every routing row of a trace."""

    experts: NDArray[np.int32]
    """`[rows, slots]`, -1 where a slot does not exist."""
    dropped: NDArray[np.bool_]
    """`[rows, slots]`."""
    renormalised: bool
    """Whether the weights of dropped slots go to the others."""


def features_of(trace: TraceLike, cells: Sequence[Cell], *, train: str | None = None) -> pl.DataFrame:
    """Replay cells and describe each: one row per cell, in the order of `cells`.

    Columns: `tokens` (counted decode tokens), `UNDECIDED`, `FEATURES`, and each of these by layer, a list over the
    MoE layers.

    Raises:
        InputError: the trace lacks the router's scores, or as `simlab.replay.run.replay`.
    """
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    width = max(trace.width, trace.header.n_expert_used)
    at_once = max(1, _DETAIL_BYTES // max(1, trace.n_rows * width * 40))
    frames = []
    for start in range(0, len(cells), at_once):
        replayer = Replayer(trace, cells[start : start + at_once], detail=True, train=train)
        while replayer.advance():
            pass
        frames.append(features_of_replay(replayer))
    return pl.concat(frames) if frames else pl.DataFrame()


def features_of_replay(replayer: Replayer) -> pl.DataFrame:
    """As `features_of`, of a replay run to its end with `detail=True`."""
    router = _Router(replayer.columns)
    rows = []
    for index, cell in enumerate(replayer.cells):
        detail = replayer.detail(index)
        rows.append(router.describe(Executed(detail["expert"], detail["dropped"], _renormalises(cell.route))))
    return pl.DataFrame(rows, schema_overrides=_NULLABLE)


def features_of_recording(trace: TraceLike, cell: Cell) -> pl.DataFrame:
    """The same features of the run that a trace records, which ran under `cell`: one row.

    Raises:
        InputError: the trace lacks the router's scores or what was executed.
    """
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    routing = trace.collect("routing", trace.routing.select("experts", "dropped"))
    for name in routing.columns:
        if routing[name].null_count():
            raise InputError(f"{trace.path}/routing: '{name}' is unknown in some rows")
    experts, dropped = (routing[name].to_numpy().reshape(-1, trace.width) for name in routing.columns)
    ran = Executed(experts, dropped, _renormalises(cell.route))
    row = _Router(TraceColumns(trace)).describe(ran)
    return pl.DataFrame([row], schema_overrides=_NULLABLE)


def _renormalises(route: Route) -> bool:
    step = route.step("drop")
    knobs = knob_values(step.policy.knobs, step.knobs) if step is not None else SimpleNamespace()
    return bool(getattr(knobs, "renorm", 1))


class _Router:
    """The router's side of every row: what it would have run, and with which weights."""

    def __init__(self, columns: TraceColumns) -> None:
        header = columns.trace.header
        if header.gating is None or header.weight_rule is None or not columns.trace.has_scores:
            raise InputError(
                f"{columns.trace.path}: does not carry the router's scores, so what a cell does is not known"
            )
        self.columns, self.rule = columns, header.weight_rule
        self.n_expert, self.n_layers = header.n_expert, len(header.moe_layers)
        self.needs = ColumnNeeds(header.n_expert_used, scores=True, rank=False, weights=frozenset({"scores"}))
        self.before = _row_before(columns)
        self.counted = columns.counted & columns.decode & (columns.router_k > 0)
        self.undecided = _undecided(columns)

    def describe(self, ran: Executed) -> dict[str, object]:
        """Features of one cell, means over the counted decode events and over those of each layer."""
        n_rows = self.columns.n_rows
        events = {name: np.zeros(n_rows) for name in FEATURES}
        sets = {name: np.zeros((n_rows, self.n_expert), bool) for name in ("kept", "kept_router")}
        for start in range(0, n_rows, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, n_rows)
            self._differences(events, sets, ran, start, stop)
        for name, members in sets.items():
            again = (members & members[self.before]).sum(axis=1)
            events[name] = again / np.maximum(members.sum(axis=1), 1)
        # The first token of a turn has none before it.
        follows = self.counted & (self.before != np.arange(n_rows))
        layers = self.columns.layer
        found: dict[str, object] = {
            "tokens": self.columns.n_tokens(decode=True),
            **dict.fromkeys(UNDECIDED),
        }
        if self.undecided is not None:
            token, share = self.undecided
            scored = token >= 0
            layers_of = np.maximum(np.bincount(token[scored], minlength=len(share)), 1)
            distance = np.bincount(token[scored], events["distance"][scored], len(share)) / layers_of
            found |= dict(
                zip(UNDECIDED, (float((share * distance**i).mean()) for i in range(3)), strict=True)
            )
        for name, values in events.items():
            some = follows if name in sets else self.counted
            n = np.bincount(layers[some], minlength=self.n_layers)
            total = np.bincount(layers[some], weights=values[some], minlength=self.n_layers)
            found[name] = float(total.sum() / max(n.sum(), 1))
            found[f"{name}_by_layer"] = (total / np.maximum(n, 1)).tolist()
        return found

    def _differences(
        self,
        events: dict[str, NDArray[np.float64]],
        sets: dict[str, NDArray[np.bool_]],
        ran: Executed,
        start: int,
        stop: int,
    ) -> None:
        """Fill rows `start` to `stop` of the features by event and of the sets of experts."""
        chunk = self.columns.chunk(start, stop, stop - start, self.needs)
        cut = slice(start, stop)
        router = np.where(
            np.arange(self.needs.n_slots) < chunk["router_k"][:, None],
            chunk["router"][:, : self.needs.n_slots],
            -1,
        )
        runs = (ran.experts[cut] >= 0) & ~ran.dropped[cut]
        executed = np.where(runs, ran.experts[cut], -1)
        wanted = self._weights(chunk["numerator"], router, router >= 0, renormalise=True)
        applied = self._weights(chunk["numerator"], ran.experts[cut], runs, renormalise=ran.renormalised)
        moved = self._by_expert(executed, applied) - self._by_expert(router, wanted)
        in_router = self._by_expert(router, router >= 0) > 0
        in_run = self._by_expert(executed, runs) > 0
        sets["kept"][cut], sets["kept_router"][cut] = in_run, in_router
        n_router = np.maximum(chunk["router_k"], 1)
        n_slots = np.maximum((ran.experts[cut] >= 0).sum(axis=1), 1)
        events["mass"][cut] = np.where(in_router, chunk["mass"], 0.0).sum(axis=1) - np.where(
            in_run, chunk["mass"], 0.0
        ).sum(axis=1)
        events["distance"][cut] = np.abs(moved).sum(axis=1) ** 2
        events["energy"][cut] = (moved**2).sum(axis=1)
        first = np.maximum(router[:, :1], 0)
        events["top1"][cut] = ~np.take_along_axis(in_run, first, axis=1)[:, 0]
        events["changed"][cut] = (in_router & ~in_run).sum(axis=1) / n_router
        events["dropped"][cut] = ran.dropped[cut].sum(axis=1) / n_slots

    def _weights(
        self,
        numerators: NDArray[np.float32],
        experts: NDArray[np.int32],
        runs: NDArray[np.bool_],
        *,
        renormalise: bool,
    ) -> NDArray[np.float64]:
        """Applied weights `[rows, slots]` of a selection of which `runs` slots are not dropped."""
        exists = experts >= 0
        picked = np.take_along_axis(numerators, np.maximum(experts, 0), axis=1)
        weights = applied_weights(np, picked.T, exists.T, self.rule).T.astype(np.float64)
        kept = np.where(runs, weights, 0.0)
        if not renormalise or bool((runs == exists).all()):
            return kept
        total, left = weights.sum(axis=1, keepdims=True), kept.sum(axis=1, keepdims=True)
        return kept * np.divide(total, left, out=np.ones_like(left), where=left > 0)

    def _by_expert(
        self, experts: NDArray[np.int32], values: NDArray[np.float64] | NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Values of slots added up at their experts, `[rows, n_expert]`; slots of expert -1 are left out."""
        rows, slots = np.nonzero(experts >= 0)
        summed = np.zeros((len(experts), self.n_expert))
        np.add.at(summed, (rows, experts[rows, slots]), values[rows, slots])
        return summed


def _undecided(columns: TraceColumns) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Per routing row the place of its token among those that were scored, -1 for others, and p (1 - p) of these.

    None where no token was scored.
    """
    scored = (pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN) & pl.col("nll").is_not_null()
    losses = columns.trace.collect(
        "tokens", columns.trace.tokens.filter(scored).select("turn", "step", "nll")
    ).with_row_index("token")
    if not losses.height:
        return None
    p = np.exp(-losses["nll"].to_numpy())
    rows = columns.where.select("turn", "step").join(
        losses, on=["turn", "step"], how="left", maintain_order="left"
    )
    return rows["token"].cast(pl.Int64).fill_null(-1).to_numpy(), p * (1 - p)


def _row_before(columns: TraceColumns) -> NDArray[np.int64]:
    """Per row, the row before it in the same layer and turn; itself where there is none."""
    turn = columns.where["turn"].to_numpy()
    order = np.lexsort((np.arange(columns.n_rows), turn, columns.layer))
    before = np.arange(columns.n_rows)
    same = (turn[order][1:] == turn[order][:-1]) & (columns.layer[order][1:] == columns.layer[order][:-1])
    before[order[1:][same]] = order[:-1][same]
    return before
