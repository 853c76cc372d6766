"""The standard streams of a command: closed, full or broken ones cost one line and lose nothing else."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from simlab.errors import RunError


class _Out(io.FileIO):
    """Standard output whose failure is a `RunError`; what comes after it is dropped, at exit too."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if isinstance(error, BrokenPipeError):
                raise
            raise RunError(f"stdout: cannot be written: {error.strerror}") from error


class _Err(io.FileIO):
    """Standard error that drops what cannot be written: a command does not end for want of a place for its warnings."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def guard_streams() -> None:
    """Put guarded streams in place of this process's own.

    A stream that was closed gets its number back, so that no file that is opened takes it and what native code prints.
    Names that are not UTF-8 are written as they are.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number; of stdout, writing must fail
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line_buffering = os.isatty(1)
    out = io.BufferedWriter(_Out(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(out, encoding, "surrogateescape", line_buffering=line_buffering)
    err: Any = _Err(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(err, encoding, "backslashreplace", write_through=True)
