"""Ctrl-C while llama.cpp is computing.

Python raises KeyboardInterrupt wherever it happens to be, and inside a ctypes callback that is nowhere: the
exception is printed and dropped, and a node would go on without its expert. So the signal only leaves a note
while a graph runs, and is raised when the graph is done and recorded.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class DeferredInterrupt:
    """Holds SIGINT back inside the `with` block and raises KeyboardInterrupt at its end. Main thread only."""

    def __enter__(self) -> DeferredInterrupt:
        self._seen = False
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _number: int, _frame: Any) -> None:
        self._seen = True

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)
            if self._seen and kind is None:
                raise KeyboardInterrupt
