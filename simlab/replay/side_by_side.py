"""The same done to several things in threads: XLA, NumPy and compiled loops let go of Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(function: Callable[[T], R], things: Sequence[T], n_threads: int | None = None) -> list[R]:
    """`function` of each thing, in order; what it raises comes from the first thing it raises at.

    Args:
        n_threads: left out, as many as there are cores.
    """
    n = min(len(things), n_threads or os.cpu_count() or 1)
    if n < 2:
        return [function(thing) for thing in things]
    with ThreadPoolExecutor(n, thread_name_prefix="replay") as pool:
        return list(pool.map(function, things))
