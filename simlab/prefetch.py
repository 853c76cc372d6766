"""What is read before it is asked for, as `--prefetch` names it; the engine and the replayer read it alike."""

from __future__ import annotations

from dataclasses import dataclass

from simlab.errors import InputError

KINDS = ("previous_token", "next_gate")
_MOST = 512


@dataclass(frozen=True)
class PrefetchSpec:
    """What to read ahead: `previous_token:K=1` or `next_gate:K=8`.

    previous_token: the experts that the previous token ran, at the next `K` layers.
    next_gate: the `K` best experts of the next layer's gate applied to this layer's input.
    """

    kind: str
    depth: int

    @property
    def text(self) -> str:
        return f"{self.kind}:K={self.depth}"


def parse_prefetch(text: str) -> PrefetchSpec:
    """`NAME:K=..` as `--prefetch` takes it.

    Raises:
        InputError: no such prefetch, or K out of its range.
    """
    kind, _, knob = text.partition(":")
    name, _, value = knob.partition("=")
    if kind not in KINDS:
        raise InputError(f"--prefetch {text}: no such prefetch; there are {', '.join(KINDS)}")
    if (knob and name != "K") or not (value or "1").isascii() or not (value or "1").isdecimal():
        raise InputError(f"--prefetch {text}: write {kind}:K=1, a whole number")
    depth = int(value or 1)
    if not 1 <= depth <= _MOST:
        raise InputError(f"--prefetch {text}: K must lie between 1 and {_MOST}")
    return PrefetchSpec(kind, depth)
