"""Cutting a text or a prompt into graphs: a short prefill, then step by step (engine-semantics, section 5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from simlab.types import DECODE, PREFILL

SKIP = 8
"""Tokens of a text that form its prefill and are not scored."""


class PlannedGraph(NamedTuple):
    """Tokens `[start, stop)` of the sequence, evaluated at `first_position` of their turn."""

    turn: int
    phase: int
    start: int
    stop: int
    first_position: int
    wants_output: bool
    next_index: int | None
    """Index of the token its last position is scored on, or None."""
    every_position: bool = False
    """Whether logits of every position are wanted, not of the last only."""


def chunks(turn: int, start: int, stop: int, first_position: int, n_ubatch: int) -> Iterator[PlannedGraph]:
    """A prefill of `[start, stop)` in graphs of at most `n_ubatch` tokens; only the last asks for logits."""
    for at in range(start, stop, n_ubatch):
        end = min(at + n_ubatch, stop)
        yield PlannedGraph(turn, PREFILL, at, end, first_position + at - start, end == stop, None)


def text_graphs(n_tokens: int, window: int, n_ubatch: int) -> Iterator[PlannedGraph]:
    """Step mode over a text: windows of the context length, each a turn that starts from an empty context.

    Position p >= SKIP of a window is scored on token p + 1 of the same window, so a window of n tokens has
    n - SKIP - 1 decode graphs.
    """
    for turn, start in enumerate(range(0, n_tokens, window)):
        stop = min(start + window, n_tokens)
        skip = min(SKIP, stop - start)
        yield from chunks(turn, start, start + skip, 0, n_ubatch)
        for at in range(start + skip, stop - 1):
            yield PlannedGraph(turn, DECODE, at, at + 1, at - start, True, at + 1)


def wide_graphs(n_tokens: int, window: int) -> Iterator[PlannedGraph]:
    """Wide mode over a text: one graph holds a window's positions, as decode, so that policies are armed.

    The same windows as `text_graphs`; a window's last token, which nothing follows, is left out there and
    here. Kept to show that such a graph cannot price a policy that looks at the cache.
    """
    for turn, start in enumerate(range(0, n_tokens, window)):
        stop = min(start + window, n_tokens) - 1
        if stop > start:
            yield PlannedGraph(turn, DECODE, start, stop, 0, True, None, every_position=True)
