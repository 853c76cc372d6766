"""Writing a file that nobody sees half of."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".simlab-*.tmp"
"""Pattern of the names that `replacing` writes under; a killed process leaves such a file behind."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` for the block to fill, which then takes the place of `path`; gone if it fails.

    Its name cannot be guessed and it did not exist before, so that no link planted there is written through.

    Raises:
        OSError: it cannot be made or renamed.
    """
    temporary = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
