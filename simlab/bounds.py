"""Whether there is memory for what is about to be allocated: asked before it is, by everything whose size a file or an
option decides. What a file claims to hold costs its author nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from simlab.errors import InputError

_GIB = 1 << 30
_SMALL = 64 << 20
"""Not worth a look at what is free."""
_EMPTY = 500
_OPTION = "SIMLAB_MEMORY_GIB"


def require_memory(n_bytes: int, what: str, of: int | None = None) -> None:
    """Refuse what takes more than half of the memory that is free, or more than `SIMLAB_MEMORY_GIB` where that is set.

    Half, since an estimate counts the large arrays and not everything, and others run on the machine too.

    Args:
        n_bytes: the most that will be held at once, worked out from sizes. what: file, field or option, and the size.
        of: bytes on disk that it comes from. Over a GiB, 500 times as much is refused on any machine: a slot of a
            routing takes tens of bytes of memory, and packed well under one bit of a file only if nothing was routed.

    Raises:
        InputError: there is not as much.
    """
    if n_bytes <= _SMALL:
        return
    takes = f"{what}: takes {n_bytes / _GIB:.1f} GiB of memory"
    text = os.environ.get(_OPTION)
    if text:
        try:
            allowed = int(float(text) * _GIB)
        except (ValueError, OverflowError):
            raise InputError(f"{_OPTION}={text}: must be a number of GiB") from None
        if n_bytes > allowed:
            raise InputError(f"{takes}, more than {_OPTION}={text} allows")
        return
    if of is not None and n_bytes > max(_GIB, _EMPTY * of):
        raise InputError(
            f"{takes}, {n_bytes // max(of, 1)} times what is on disk, which no routing of a model does; "
            f"{_OPTION}=N allows N GiB"
        )
    free = available_memory_bytes()
    if free is not None and n_bytes > free // 2:
        raise InputError(
            f"{takes}, more than half of the {free / _GIB:.1f} GiB that are free; {_OPTION}=N allows N GiB"
        )


def available_memory_bytes() -> int | None:
    """Memory this process can still have without swapping: the least of what the machine has available, what its
    control groups leave, and what its own limit of address space does. None where the system says nothing.
    """
    known = [n for n in (_meminfo(), *_control_groups(), _address_space()) if n is not None]
    return max(min(known), 0) if known else None


def _meminfo() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _address_space() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError):
        return limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limit


def _control_groups(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """What each control group of this process with a limit leaves, those above it included; of versions 1 and 2."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version_1 = "memory" in controllers.split(",")
        if controllers and not version_1:
            continue
        base = root / "memory" if version_1 else root
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if version_1
            else ("memory.max", "memory.current")
        )
        total = "total_" if version_1 else ""
        files = {f"{total}active_file", f"{total}inactive_file"}
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            # "max" is no number, and the top has no such files. Cached pages of files are given back when asked for.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text()) for name in names)
                stat = [row.split() for row in (folder / "memory.stat").read_text().splitlines()]
                yield limit - used + sum(int(n) for name, n in stat if name in files)
