"""Choosing a few cells worth a live run: points along the trade-off of misses against router mass displaced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simlab.types import CellNumbers


def trade_off_front(numbers: Sequence[CellNumbers]) -> list[int]:
    """Indices of the cells that no other cell beats in both decode misses and mass displaced, by rising mass.

    Cells whose mass is unknown are left out; of cells equal in both, the first stands.
    """
    known = [i for i, n in enumerate(numbers) if n.decode.mass_displaced is not None]
    known.sort(key=lambda i: (numbers[i].decode.mass_displaced, numbers[i].decode.misses))
    front: list[int] = []
    for i in known:
        if not front or numbers[i].decode.misses < numbers[front[-1]].decode.misses:
            front.append(i)
    return front


def pick_along(numbers: Sequence[CellNumbers], n: int) -> list[int]:
    """Indices of up to `n` cells spread along the front: both ends, and evenly in between.

    Distance is measured along the front with misses and mass each scaled to its span, so that the picks
    spread over what one pays as well as over what one gets.
    """
    front = trade_off_front(numbers)
    points = np.array(
        [[numbers[i].decode.misses, numbers[i].decode.mass_displaced] for i in front], dtype=np.float64
    )
    return [front[c] for c in evenly_along(points, n)]


def evenly_along(points: np.ndarray, n: int) -> list[int]:
    """Indices of up to n points of a line `[points, 2]`: both ends, and evenly in between.

    Each axis is scaled to its span.
    """
    if len(points) <= n:
        return list(range(len(points)))
    span = np.ptp(points, axis=0)
    steps = np.abs(np.diff(points, axis=0)) / np.where(span > 0, span, 1)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(steps[:, 0], steps[:, 1]))])
    return sorted({int(np.abs(along - w).argmin()) for w in np.linspace(0.0, along[-1], n)})
