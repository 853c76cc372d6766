"""Ctrl-C and SIGTERM of a command: an exception, but never in the middle of what would not survive one."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from simlab.errors import Terminated

_FRAGILE = ("importlib._bootstrap", "jax", "jaxlib", "numba", "llvmlite", "polars", "simlab.record.llama")
"""Modules whose C++ calls Python back, where an exception out of nowhere ends the process or is lost, and imports,
which it would leave half done for what follows."""
_pending = signal.SIGINT


def raise_on_signals() -> None:
    """From here on SIGINT raises KeyboardInterrupt and SIGTERM `Terminated`, once no fragile code runs any more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handle)


def ignore_signals() -> None:
    """The command is done: nothing may interrupt its end."""
    sys.setprofile(None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    global _pending
    _pending = signal.Signals(number)
    # Python shows a profiler every call and return: the first outside of fragile code is the place to stop at.
    sys.setprofile(_stop)
    _stop(frame)


def _stop(frame: FrameType | None, *_: object) -> None:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_FRAGILE):
            return
        frame = frame.f_back
    sys.setprofile(None)
    raise Terminated if _pending == signal.SIGTERM else KeyboardInterrupt
