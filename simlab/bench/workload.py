"""What is benchmarked: a generated trace of some size, and margins x budgets on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simlab.bench.generate import PREFILL_TOKENS, generate_trace
from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.trace.store import Trace
from simlab.types import Cell

LARGEST_MARGIN = 0.7
SMALLEST_SHARE, LARGEST_SHARE = 4.0, 50.0
"""Budgets, in percent of all experts: from about what one token of 256 experts asks for to half of them."""


@dataclass(frozen=True)
class Workload:
    """Sizes of a generated workload; the defaults are those of issue 6."""

    cells: int = 64
    tokens: int = 300
    layers: int = 40
    experts: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens <= PREFILL_TOKENS:
            raise InputError(f"--tokens {self.tokens}: must be {PREFILL_TOKENS + 1} or more")
        if self.experts < 2:
            raise InputError(f"--experts {self.experts}: must be 2 or more")

    @property
    def k(self) -> int:
        """Experts per token: 8, and half of the experts where there are fewer than 16."""
        return min(8, self.experts // 2)

    @property
    def events(self) -> int:
        """Routing events: tokens times layers."""
        return self.tokens * self.layers

    def generate(self, folder: Path, progress: Any = None) -> Trace:
        """Write the trace."""
        return generate_trace(
            folder,
            n_tokens=self.tokens,
            n_layers=self.layers,
            n_expert=self.experts,
            k=self.k,
            seed=self.seed,
            progress=progress,
        )

    def make_cells(self) -> list[Cell]:
        """About as many margins as budgets."""
        return grid(self.cells)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"k": self.k}


def grid(n: int) -> list[Cell]:
    """`n` cells, margins x budgets: margins from 0 to 0.7 evenly, budgets from 4 to 50 % of all experts by ratio."""
    n_budgets = max(b for b in range(1, int(n**0.5) + 1) if n % b == 0)
    margins = np.linspace(0, LARGEST_MARGIN, n // n_budgets)
    budgets = np.geomspace(SMALLEST_SHARE, LARGEST_SHARE, n_budgets)
    return build_cells(budgets=[f"{b:.6f}%" for b in budgets], margins=[f"{m:.6f}" for m in margins])


def of_original_routing(cells: Sequence[Cell]) -> list[int]:
    """Places of the cells without a margin."""
    return [place for place, cell in enumerate(cells) if not cell.margin]
