"""One writer per folder: the lock that keeps two commands from writing into one place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from simlab.errors import InputError, SimlabWarning


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a folder or a file for writing while the block runs; a killed process gives it back.

    The lock is flock(2) on the thing itself, so that nothing is left beside it. Where a file system locks none, a
    warning says so.

    Args:
        what: how the user named the folder, for the message: `--out T.trace`.

    Raises:
        InputError: another writer holds it, or put another in its place.
        OSError: there is no such folder or file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking, another writer may have put a new one in place of this one.
            free = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except OSError as error:
            free = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
            if free:
                text = f"{what}: cannot be locked here ({error.strerror}); let one command at a time write it"
                warnings.warn(text, SimlabWarning, stacklevel=3)
        if not free:
            raise InputError(f"{what}: another command is writing it; wait for it, or name another")
        yield
    finally:
        os.close(descriptor)
