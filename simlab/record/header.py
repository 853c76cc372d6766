"""What a recording says of itself: the header of its trace, and that its model was one and the same throughout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from simlab.cells import effective_k, resolve_budget
from simlab.errors import InputError, RunError
from simlab.policy import find_eviction
from simlab.record.ggml import engine_version
from simlab.record.gguf import GgufModel
from simlab.record.machine import cpu_name
from simlab.trace.provenance import run_provenance, text_digest
from simlab.types import Cell, TraceHeader


class OpenedModel:
    """A model's files as they were when they were opened."""

    def __init__(self, gguf: GgufModel) -> None:
        self._gguf, self._stat = gguf, self._look(gguf)
        self.digest = gguf.digest()

    @staticmethod
    def _look(gguf: GgufModel) -> list[tuple[int, int, int]]:
        found = [path.stat() for path in gguf.files]
        return [(f.st_ino, f.st_size, f.st_mtime_ns) for f in found]

    def check(self) -> None:
        """Refuse to go on if they are others now: in place, size, time of writing, or digest.

        Raises:
            RunError: they were written to, so that what was read of them is of no one model.
        """
        path = self._gguf.path
        try:
            changed = self._look(self._gguf) != self._stat or self._gguf.digest() != self.digest
        except (OSError, InputError) as error:
            raise RunError(f"{path}: cannot be read any more ({error}); record again") from error
        if changed:
            raise RunError(
                f"{path}: was written to while it ran, so this recording is of no one model; "
                "it is left unfinished, record again"
            )


def recording_header(
    base: TraceHeader,
    cell: Cell,
    *,
    window_bytes: Mapping[int, tuple[int, ...]],
    dense_bytes: Mapping[int, int],
    direct: bool,
    text: bytes,
    tokens: Sequence[Sequence[int]],
    train: str | None,
) -> TraceHeader:
    """The header of a recording under a cell, which has the look-ahead of the engine.

    Args:
        base: what the model alone says.
        text, tokens: as for `simlab.record.engine.Engine.header`.
        train: `Training.identity` of what policies learned from.
    """
    hashes = [s.policy.source_hash for s in cell.route.steps] + [find_eviction(cell.evict).source_hash]
    model = base.provenance.model if base.provenance is not None else None
    return replace(
        base,
        window_bytes=window_bytes,
        dense_bytes=dense_bytes,
        budget_bytes=resolve_budget(cell.budget, cell.scope, base, effective_k(cell.route, base)).total_bytes,
        budget=cell.budget.text,
        prefetch=cell.prefetch,
        route=cell.route.name,
        knobs=cell.route.knobs | {f"{cell.evict}.{n}": v for n, v in cell.evict_knobs.items()},
        evict=cell.evict,
        scope=cell.scope,
        policy_source_hash=hashlib.sha256("".join(hashes).encode()).hexdigest(),
        io_mode="direct" if direct else "buffered",
        engine="simlab",
        engine_version=engine_version(),
        cpu=cpu_name(),
        text_hash=hashlib.sha256(text).hexdigest() if text else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=run_provenance(
            base, cell, model=model, text=text_digest(tokens) if tokens else None, train=train
        ),
    )
