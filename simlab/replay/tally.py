"""What a replay counts, and counters under their names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simlab.cells import MIB
from simlab.types import PhaseNumbers

COUNTERS = (
    "lookups", "hits", "misses", "cold_misses", "read_bytes", "slots", "reranked", "substituted", "dropped",
    "evictions", "rereads",
)  # fmt: skip
SUMS = ("mass_displaced", "score_regret", "agreement")


def phase_numbers(
    counters: NDArray[np.int64],
    sums: NDArray[np.float64],
    tokens: int,
    events: int,
    unknown: Collection[str],
) -> PhaseNumbers:
    """The counters of one phase under their names in the JSON contract; None: ratios of nothing, and `unknown`."""
    count = {name: int(value) for name, value in zip(COUNTERS, counters, strict=True)}
    mean = {name: float(value) / events if events else None for name, value in zip(SUMS, sums, strict=True)}
    read_mib = count.pop("read_bytes") / MIB
    numbers = PhaseNumbers(
        tokens=tokens,
        hit_rate=count["hits"] / count["lookups"] if count["lookups"] else None,
        capacity_misses=count["misses"] - count["cold_misses"],
        read_mib=read_mib,
        read_mib_per_token=read_mib / tokens if tokens else None,
        **mean,
        **count,
    )
    return replace(numbers, **dict.fromkeys(unknown))
