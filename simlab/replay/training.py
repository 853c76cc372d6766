"""What policies may learn before they run: the router's picks over a training part of a trace.

`--train 25%` learns from the first quarter of the decode tokens, which every cell of the run still walks but
does not count; `--train OTHER.trace` from the decode tokens of another recording of the same model;
`--train same` from the very tokens that are measured, which is a diagnostic and labelled as one. Only decode
rows of counted turns teach, and only the router's own picks, so that what is learned does not depend on a
cell. Spec: policies.md, `static_pin`, `buddy`, `adaptive_k`.

Shapes: `B` MoE layers, `E` experts per layer, `R` rows learned from.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError
from simlab.policy_check import policy_error
from simlab.replay.columns import TraceColumns
from simlab.routing import first_state
from simlab.trace.provenance import check, folder_digest, trace_provenance
from simlab.trace.store import Trace, open_trace
from simlab.types import EvictionPolicy, ResolvedBudget, TraceHeader

_SHARE = re.compile(r"^(?P<amount>[0-9]*\.?[0-9]+)%$")
FORMS = "25%, OTHER.trace or same"
_STRETCH = 4096
"""Rows whose scores are held at once."""


@dataclass(frozen=True)
class Training:
    """Rows of a trace that policies may learn from."""

    text: str
    """What `--train` was given."""
    columns: TraceColumns
    """The trace they are of; `columns.trace` reads its scores."""
    rows: NDArray[np.bool_]
    """bool `[rows of that trace]`: which are learned from."""
    own: bool
    """Whether that trace is the one being replayed."""

    @property
    def diagnostic(self) -> bool:
        """Whether what is learned from is measured too."""
        return self.text == "same"

    @cached_property
    def identity(self) -> str:
        """What was learned from, for a provenance: `text`, or the digest of another trace."""
        return self.text if self.own else folder_digest(self.columns.trace.path)[:16]

    @property
    def note(self) -> str:
        """A few words for the cells of a run that trains."""
        if self.diagnostic:
            return "diagnostic: trained on the tokens it is measured on"
        return f"trained on {self.text}" + (" of decode, not counted" if self.own else "")

    @property
    def uncounted(self) -> NDArray[np.bool_] | None:
        """bool `[rows]` of the replayed trace that no counter may include; None if there are none."""
        return self.rows if self.own and not self.diagnostic else None

    @cached_property
    def layer(self) -> NDArray[np.int32]:
        """int32 `[R]`: MoE layer index of each row."""
        return self.columns.layer[self.rows]

    @cached_property
    def router(self) -> NDArray[np.int32]:
        """int32 `[R, k]`: the router's picks, best first, -1 where a slot does not exist."""
        return self.columns.recorded[self.rows, : self.columns.trace.header.n_expert_used]

    @cached_property
    def mass(self) -> NDArray[np.float64]:
        """float64 `[R, E]`: share of the router's probability each expert holds.

        Raises:
            InputError: the trace does not carry the router's scores.
        """
        found = [np.empty((0, self.columns.trace.header.n_expert))]
        for start in range(0, self.columns.n_rows, _STRETCH):
            stop = min(start + _STRETCH, self.columns.n_rows)
            if self.rows[start:stop].any():
                found.append(self.columns.masses(start, stop)[self.rows[start:stop]])
        return np.concatenate(found)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64 `[B, E]`: batches in which the router picked the expert, once per batch."""
        header = self.columns.trace.header
        row, slot = np.nonzero(self.router >= 0)
        entry = self.layer[row].astype(np.int64) * header.n_expert + self.router[row, slot]
        n = len(header.moe_layers) * header.n_expert
        seen = np.unique(self.columns.batch[self.rows][row] * n + entry)
        return np.bincount(seen % n, minlength=n).reshape(len(header.moe_layers), header.n_expert)

    @cached_property
    def coactivation(self) -> NDArray[np.int64]:
        """int64 `[B, E, E]`: rows that picked both experts; on the diagonal, rows that picked the one."""
        header = self.columns.trace.header
        n_layers, n_expert = len(header.moe_layers), header.n_expert
        picked = np.zeros((len(self.layer), n_expert), np.float64)
        row, slot = np.nonzero(self.router >= 0)
        picked[row, self.router[row, slot]] = 1
        # Counts are far below 2^53, so that float64 products, which are fast, are exact.
        found = [picked[self.layer == i].T @ picked[self.layer == i] for i in range(n_layers)]
        return np.array(found).reshape(n_layers, n_expert, n_expert).astype(np.int64)


def load_training(text: str, header: TraceHeader, columns: TraceColumns | None = None) -> Training:
    """What `--train TEXT` names.

    Args:
        header: of the trace that is replayed or the model that is run, whose sizes another trace must have.
        columns: the trace that is replayed; None live, where only another trace can teach.

    Raises:
        InputError: not one of the forms, no token to learn from or none left, or a trace of another model.
    """
    share = _SHARE.match(text)
    if (share or text == "same") and columns is None:
        raise InputError(f"--train {text}: a live run has no trace of its own to learn from; name one")
    if text == "same":
        assert columns is not None
        return _checked(Training(text, columns, columns.decode & columns.counted, own=True))
    if share:
        assert columns is not None
        return _checked(
            Training(text, columns, _first_tokens(text, float(share["amount"]), columns), own=True)
        )
    if not os.path.isdir(text):
        raise InputError(f"--train {text}: not a share and no such trace; write {FORMS}")
    other = open_trace(text)
    _check_sizes(text, other, header)
    check(
        other.header.provenance,
        trace_provenance(header),
        ("model",),
        f"--train {text}",
        "the model that is replayed or run",
        "learn from a trace of that model",
    )
    learned = TraceColumns(other)
    return _checked(Training(text, learned, learned.decode & learned.counted, own=False))


def prepared(
    policy: EvictionPolicy,
    counts: NDArray[np.int64],
    entry_bytes: NDArray[np.int64],
    budget: ResolvedBudget,
    knobs: SimpleNamespace,
) -> dict[str, NDArray[Any]]:
    """First state `[B, E]` of an eviction policy that learns: its `prepare` on each cache of a budget.

    Args:
        counts: int64 `[B, E]`, as `Training.counts`. entry_bytes: int64 `[B]`.

    Raises:
        InputError: `prepare` failed, in one line that names the policy.
    """
    assert policy.prepare is not None
    sizes = np.repeat(entry_bytes[:, None], counts.shape[1], axis=1)
    caches = [(slice(None), budget.total_bytes)]
    if budget.per_layer:
        caches = [(slice(at, at + 1), limit) for at, limit in enumerate(budget.layer_bytes)]
    state = first_state(policy.state, counts.shape)
    for layers, capacity in caches:
        try:
            found = policy.prepare(counts[layers].ravel(), sizes[layers].ravel(), capacity, knobs)
            for name in policy.state:
                state[name][layers] = np.reshape(found[name], counts[layers].shape)
        except BaseException as error:
            raise policy_error(policy, error) from error
    return state


def _first_tokens(text: str, percent: float, columns: TraceColumns) -> NDArray[np.bool_]:
    """bool `[rows]`: the rows of the first `percent` of the counted decode tokens."""
    if not 0 < percent < 100:
        raise InputError(f"--train {text}: must lie above 0% and below 100%")
    rows = columns.decode & columns.counted
    graph = columns.where["graph"].to_numpy().astype(np.int64)
    token = (graph << 32) + columns.where["pos_in_graph"].to_numpy()
    names, number = np.unique(token[rows], return_inverse=True)
    n = int(len(names) * percent / 100)
    if n == 0:
        raise InputError(f"--train {text}: comes to no decode token; the trace has {len(names)}")
    taught = np.zeros(len(rows), bool)
    taught[rows] = number < n
    return taught


def _check_sizes(text: str, trace: Trace, header: TraceHeader) -> None:
    theirs = trace.header
    for name, a, b in (
        ("n_expert", theirs.n_expert, header.n_expert),
        ("n_expert_used", theirs.n_expert_used, header.n_expert_used),
        ("MoE layers", list(theirs.moe_layers), list(header.moe_layers)),
    ):
        if a != b:
            raise InputError(f"--train {text}: is of another model: {name} {a}, here {b}")


def _checked(training: Training) -> Training:
    if not training.rows.any():
        raise InputError(f"--train {training.text}: has no decode tokens to learn from")
    return training
