"""`bmoe_metrics`: what a BigMoeOnEdge engine measured per decoded token.

Versions 1 and 2 have `# key=value` lines above the table; the oldest files have neither those nor the later
columns. A `# summary key=value ...` line stands below it once the run finished.
Spec: engine-semantics, section 4.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simlab.errors import InputError, SimlabWarning
from simlab.trace.csv_text import key_values, read_csv_text

OLDEST_HEADING = "step,steps,wall_ms"
TAG = "bmoe_metrics"
_VERSIONS = ("v1", "v2")
_REQUIRED = ("step", "wall_ms", "io_ms", "compute_ms", "read_bytes")
_NUMBERS = ("wall_ms", "io_ms", "compute_ms", "stall_ms", "mgmt_ms", "cache_hit_pct", "cache_budget_mib")
_COUNTS = {"step": 0, "read_bytes": 0, "majflt": None, "turn": None}
"""Column and its smallest value."""
_NUMERIC_SETTINGS = ("cache_mb", "drop_cold_frac", "drop_renorm", "drop_prefill")
_MIB = 1 << 20


@dataclass(frozen=True)
class MetricsFile:
    """A read metrics file. `columns` has one item per decoded token: counts int64, times float64 in ms."""

    path: Path
    settings: dict[str, str]
    summary: dict[str, str]
    columns: dict[str, NDArray]

    @property
    def n_prompt(self) -> int | None:
        """Prompt tokens of the run, null without a summary."""
        return int(self.summary["n_prompt"]) if self.summary.get("n_prompt", "").isdigit() else None

    @property
    def n_expert(self) -> int | None:
        """Experts per layer of the model, null where the file does not say."""
        return int(self.settings["n_expert"]) if self.settings.get("n_expert", "").isdigit() else None

    @property
    def engine_version(self) -> str | None:
        return self.settings.get("engine")

    @property
    def io_mode(self) -> str | None:
        return {"1": "direct", "0": "buffered"}.get(self.settings.get("o_direct", ""))

    @property
    def overlap(self) -> bool:
        """Whether reads ran beside compute. Files without the setting show it by a stall that is not zero."""
        if "overlap" in self.settings:
            return self.settings["overlap"] != "0"
        return "stall_ms" in self.columns and bool((self.columns["stall_ms"] > 0).any())

    @property
    def read_wait_ms(self) -> NDArray[np.float64]:
        """Time per token in which compute waited for reads."""
        return (
            self.columns["stall_ms"] if self.overlap and "stall_ms" in self.columns else self.columns["io_ms"]
        )

    @property
    def budget_bytes(self) -> int | None:
        """Cache size of the run; 0 with the cache off, null where the file does not say."""
        for word in (self.summary.get("cache_budget_MiB"), _last(self.columns.get("cache_budget_mib"))):
            if word is not None and float(word) > 0:
                return round(float(word) * _MIB)
        if float(self.settings.get("cache_mb", 0)) > 0:
            return round(float(self.settings["cache_mb"]) * _MIB)
        hit_pct = self.columns.get("cache_hit_pct")
        return 0 if hit_pct is not None and len(hit_pct) and bool((hit_pct < 0).all()) else None

    @property
    def drop_knobs(self) -> dict[str, float] | None:
        """Knobs of `drop_cold` the run had, empty when dropping was off, null where the file does not say."""
        if "drop_cold_frac" not in self.settings:
            return None
        threshold = float(self.settings["drop_cold_frac"])
        if threshold <= 0:
            return {}
        renorm, prefill = self.settings.get("drop_renorm", "1"), self.settings.get("drop_prefill", "0")
        return {"F": threshold, "renorm": int(renorm), "prefill": int(prefill)}


def _last(values: NDArray | None) -> float | None:
    return float(values[-1]) if values is not None and len(values) else None


def read_metrics(path: Path) -> MetricsFile:
    """Read a metrics file of any version.

    Raises:
        InputError: not a metrics file, or a value in it cannot be used.
    """
    text = read_csv_text(path)
    settings: dict[str, str] = {}
    summary: dict[str, str] = {}
    for line, comment in text.comments:
        if comment.startswith("summary"):
            summary = key_values(comment)
        elif comment.startswith(TAG):
            if comment.removeprefix(TAG).strip() not in _VERSIONS:
                raise InputError(
                    f"{path}, line {line}: '{comment}', this simlab reads {TAG} {' and '.join(_VERSIONS)}"
                )
        else:
            settings |= key_values(comment)
    for name, words in (*((n, settings) for n in _NUMERIC_SETTINGS), ("cache_budget_MiB", summary)):
        if name in words:
            try:
                float(words[name])
            except ValueError:
                raise InputError(f"{path}, field '{name}': '{words[name]}' is not a number") from None
    for column in _REQUIRED:
        if column not in text.columns:
            raise InputError(f"{path}: column '{column}' is missing")
    if not text.frame.height:
        raise InputError(f"{path}: a heading without rows")
    if text.tail is not None:
        warnings.warn(f"{path}: cut short at its end; its last line is left out", SimlabWarning, stacklevel=3)
    columns: dict[str, NDArray] = {n: text.floats(n) for n in _NUMBERS if n in text.columns}
    columns |= {n: text.integers(n, low) for n, low in _COUNTS.items() if n in text.columns}
    return MetricsFile(path, settings, summary, columns)
