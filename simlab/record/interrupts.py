"""Ctrl-C and SIGTERM while llama.cpp is computing.

Python raises KeyboardInterrupt wherever it happens to be, and inside a ctypes callback that is nowhere: the
exception is printed and dropped, and a node would go on without its expert. So the signal only leaves a note
while a graph runs, and is raised when the graph is done and recorded.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class DeferredInterrupt:
    """Holds the signals that Python handles back inside the `with` block, for its end. Main thread only."""

    def __enter__(self) -> DeferredInterrupt:
        self._seen: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self._seen.append(number)

    def __exit__(self, kind: Any, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None and self._seen:
            signal.raise_signal(self._seen[0])
