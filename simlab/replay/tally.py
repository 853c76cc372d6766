"""What a replay counts, and counters under their names."""

from __future__ import annotations

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
    counters: NDArray[np.int64], sums: NDArray[np.float64], tokens: int, events: int, has_scores: bool
) -> PhaseNumbers:
    """The counters of one phase under their names in the JSON contract; ratios of nothing are None."""
    count = {name: int(value) for name, value in zip(COUNTERS, counters, strict=True)}
    mean = {name: float(value) / events if events else None for name, value in zip(SUMS, sums, strict=True)}
    read_mib = count.pop("read_bytes") / MIB
    return PhaseNumbers(
        tokens=tokens,
        hit_rate=count["hits"] / count["lookups"] if count["lookups"] else None,
        capacity_misses=count["misses"] - count["cold_misses"],
        read_mib=read_mib,
        read_mib_per_token=read_mib / tokens if tokens else None,
        mass_displaced=mean["mass_displaced"] if has_scores else None,
        score_regret=mean["score_regret"] if has_scores else None,
        agreement=mean["agreement"],
        **count,
    )
