"""The folder of a benchmark's generated traces, which goes when the run ends, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_NAME = re.compile(r"simlab-bench-(\d+)-")


@contextmanager
def scratch_folder(parent: Path | None) -> Generator[Path]:
    """A new folder under `parent` (None: the system's for temporary files), removed at the end.

    A run that is asked to terminate removes it too; what one that was killed outright left behind goes at the start
    of the next under the same parent.
    """
    base = parent or Path(tempfile.gettempdir())
    _remove_left_behind(base)
    folder = Path(tempfile.mkdtemp(prefix=f"simlab-bench-{os.getpid()}-", dir=base))
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _end)
    except ValueError:
        # Not the main thread, which alone may ask for signals.
        before = None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _remove_left_behind(base: Path) -> None:
    """Remove the folders of processes of this user that are no more."""
    for folder in base.glob("simlab-bench-*"):
        found = _NAME.match(folder.name)
        if found and folder.stat().st_uid == os.getuid() and not _lives(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        # Somebody else's may not be asked, which says that it is there.
        return not isinstance(error, ProcessLookupError)
    return True
