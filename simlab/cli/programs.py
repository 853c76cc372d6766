"""Compiled programs are kept from one command to the next, in JAX's own compilation cache.

A variable that JAX reads and the user has set stands as it is: `JAX_COMPILATION_CACHE_DIR` names another folder,
`JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

_LEAST_S = "0.1"
"""Programs that compile faster are not worth a file."""


def keep_programs() -> None:
    """Say where, before JAX is imported; nothing where the folder cannot be written."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "simlab" / "programs" / processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _LEAST_S)


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """A name for what the processor can do: machine code of another one must not be taken from a shared home."""
    try:
        with file.open() as lines:
            found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        found = ""
    return f"{zlib.crc32(found.encode()):08x}"
