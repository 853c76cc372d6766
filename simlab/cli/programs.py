"""Compiled programs are kept from one command to the next, in JAX's own compilation cache.

JAX bounds that cache only with another package installed, and refuses to run without it: it is bounded here.
A variable that JAX reads and the user has set stands as it is: `JAX_COMPILATION_CACHE_DIR` names another folder,
`JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

_LEAST_S = "0.1"
"""Programs that compile faster are not worth a file."""
MOST_BYTES = 1 << 30
"""Most that the kept programs may take; those used least lately go."""


def keep_programs() -> None:
    """Say where, before JAX is imported; of a folder that cannot be written JAX warns once it has what to keep."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "simlab" / "programs" / processor()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    bound(folder, MOST_BYTES)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _LEAST_S)


def bound(folder: Path, most_bytes: int) -> None:
    """Remove the files of a folder that were used least lately, until the rest take at most `most_bytes`.

    Other commands may be at work in it: a file that is gone is no matter, and a removed program is compiled anew.
    """
    known = []
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(OSError):
                found = file.stat()
                # A file system that notes no reading still notes when it was written.
                known.append((max(found.st_atime, found.st_mtime), found.st_size, file.path))
    left = sum(size for _, size, _ in known)
    for _, size, path in sorted(known):
        if left <= most_bytes:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        left -= size


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """A name for what the processor can do: machine code of another one must not be taken from a shared home."""
    try:
        with file.open() as lines:
            found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        found = ""
    return f"{zlib.crc32(found.encode()):08x}"
