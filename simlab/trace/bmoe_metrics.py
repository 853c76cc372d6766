"""`bmoe_metrics`: what a BigMoeOnEdge engine measured per decoded token.

Versions 1 and 2 have `# key=value` lines above the table; the oldest files have neither those nor the later
columns. A `# summary key=value ...` line stands below it once the run finished.
Spec: engine-semantics, section 4.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.csv_text import EXACT, INT32, MAX_EXPERT, IoMode, Words, key_values, read_csv_text

OLDEST_HEADING = "step,steps,wall_ms"
TAG = "bmoe_metrics"
_VERSIONS = ("v1", "v2")
_REQUIRED = ("step", "wall_ms", "io_ms", "compute_ms", "read_bytes")
_MIB = 1 << 20
MS = 1_000_000
"""Nanoseconds in a millisecond."""
_TIME = (-float(EXACT // MS), float(EXACT // MS))
_SIZE_MIB = (-1.0, float(EXACT // _MIB))
"""Smallest and largest value; below zero, and nan for a time, mean that it was not measured."""
_TIMES = ("wall_ms", "io_ms", "compute_ms", "stall_ms", "mgmt_ms")
_COUNTS = {"step": (0, INT32), "read_bytes": (0, EXACT), "majflt": (-1, EXACT), "turn": (-1, INT32)}


@dataclass(frozen=True)
class MetricsFile:
    """A read metrics file. `columns` has one item per decoded token: counts int64, times float64 in ms.

    What the file does not say is null: `n_prompt`, the prompt tokens of the run; `n_expert`, the experts per
    layer of the model; `budget_bytes`, the cache size of the run, 0 with the cache off; `drop_knobs`, the
    knobs of `drop_cold` the run had, empty when dropping was off; `n_substituted`, its substituted slots;
    `speculative_mib`, what it read ahead.
    """

    path: Path
    line_of: Callable[[int], int]
    """Line of a row of the columns."""
    columns: dict[str, NDArray]
    overlap: bool
    """Whether reads ran beside compute."""
    n_prompt: int | None
    n_expert: int | None
    budget_bytes: int | None
    drop_knobs: dict[str, float] | None
    n_substituted: int | None
    speculative_mib: float | None
    finished: bool
    """Whether the run came to its end, so that no row is missing."""
    engine_version: str | None
    io_mode: IoMode | None

    @property
    def read_wait_ms(self) -> NDArray[np.float64]:
        """Time per token in which compute waited for reads."""
        return (
            self.columns["stall_ms"] if self.overlap and "stall_ms" in self.columns else self.columns["io_ms"]
        )


def _last(values: NDArray | None) -> float | None:
    return float(values[-1]) if values is not None and len(values) else None


def _overlap(settings: Words, columns: dict[str, NDArray]) -> bool:
    """Files without the setting show it by a stall that is not zero."""
    said = settings.whole("overlap", 0, INT32)
    if said is not None:
        return said != 0
    return "stall_ms" in columns and bool((columns["stall_ms"] > 0).any())


def _budget_bytes(settings: Words, summary: Words, columns: dict[str, NDArray]) -> int | None:
    said = (
        summary.number("cache_budget_MiB", *_SIZE_MIB),
        _last(columns.get("cache_budget_mib")),
        settings.number("cache_mb", *_SIZE_MIB),
    )
    for size in said:
        if size is not None and size > 0:
            return round(size * _MIB)
    hit_pct = columns.get("cache_hit_pct")
    return 0 if hit_pct is not None and len(hit_pct) and bool((hit_pct < 0).all()) else None


def _drop_knobs(settings: Words) -> dict[str, float] | None:
    threshold = settings.number("drop_cold_frac", 0, 1)
    renorm, prefill = settings.whole("drop_renorm", 0, 1), settings.whole("drop_prefill", 0, 1)
    if threshold is None:
        return None
    if threshold == 0:
        return {}
    return {"F": threshold, "renorm": 1 if renorm is None else renorm, "prefill": prefill or 0}


def read_metrics(path: Path) -> MetricsFile:
    """Read a metrics file of any version.

    Raises:
        InputError: not a metrics file, or a value in it cannot be used.
    """
    text = read_csv_text(path)
    settings, summary = Words(path, {}), Words(path, {})
    for line, comment in text.comments:
        if comment.startswith("summary"):
            summary = key_values(path, line, comment)
        elif comment.startswith(TAG):
            if comment.removeprefix(TAG).strip() not in _VERSIONS:
                raise InputError(
                    f"{path}, line {line}: '{comment}', this simlab reads {TAG} {' and '.join(_VERSIONS)}"
                )
        else:
            settings = Words(path, settings.words | key_values(path, line, comment).words)
    text.require(_REQUIRED)
    if not text.frame.height:
        raise InputError(f"{path}: a heading without rows")
    if text.tail is not None:
        warnings.warn(f"{path}: cut short at its end; its last line is left out", SimlabWarning, stacklevel=3)
    columns: dict[str, NDArray] = {n: text.floats(n, *_TIME) for n in _TIMES if n in text.columns}
    if "cache_hit_pct" in text.columns:
        columns["cache_hit_pct"] = text.floats("cache_hit_pct", -1, 100)
    if "cache_budget_mib" in text.columns:
        columns["cache_budget_mib"] = text.floats("cache_budget_mib", *_SIZE_MIB, nan=False)
    columns |= {n: text.integers(n, *limits) for n, limits in _COUNTS.items() if n in text.columns}
    planned = text.integers("steps", -1, INT32) if "steps" in text.columns else columns["step"] + 1
    return MetricsFile(
        path=path,
        line_of=text.line_of,
        columns=columns,
        overlap=_overlap(settings, columns),
        n_prompt=summary.whole("n_prompt", 0, INT32),
        n_expert=settings.whole("n_expert", 1, MAX_EXPERT),
        budget_bytes=_budget_bytes(settings, summary, columns),
        drop_knobs=_drop_knobs(settings),
        n_substituted=summary.whole("experts_substituted", 0, EXACT),
        speculative_mib=summary.number("spec_read_MiB", *_SIZE_MIB),
        finished=text.tail is None and (bool(summary.words) or bool(columns["step"][-1] == planned[-1])),
        engine_version=settings.text("engine"),
        io_mode=settings.io_mode(),
    )
