"""Keeping llama.cpp's mapping of the model file away from the expert ranges.

llama.cpp maps the whole file with MAP_POPULATE and advises the kernel to read it ahead; no public parameter
turns that off on a machine with one memory node. A model larger than RAM would be read through once, and
every expert would sit in memory twice. While a model loads, libllama's own calls of `mmap` and
`posix_madvise` are therefore led through two wrappers that leave these two wishes out; the pages come in when
they are touched, and those of the experts are touched by nobody, since the engine moves their tensors away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

from simlab.errors import SimlabWarning

_MAP_POPULATE = 0x8000
_POSIX_MADV_WILLNEED = 3
_JUMP_SLOTS = {0x3E: (7, 6), 0xB7: (1026, 1025)}
"""Relocation types JUMP_SLOT and GLOB_DAT by ELF machine: x86-64 and aarch64."""
_SHT_RELA, _SHT_DYNSYM = 4, 11
_PROT_READ, _PROT_WRITE = 1, 2

_Mmap = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_Madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextlib.contextmanager
def no_read_ahead(library: Path) -> Iterator[bool]:
    """While the block runs, `library` maps files without populating them or reading them ahead.

    Yields whether that is in force; where the library's call table cannot be found, a warning says what follows.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_ssize_t
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.posix_madvise.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def map_quietly(address: int, length: int, prot: int, flags: int, fd: int, offset: int) -> int:
        found = libc.mmap(address, length, prot, flags & ~_MAP_POPULATE, fd, offset)
        if found != -1 and fd >= 0:
            # Otherwise a fault on one page reads its neighbours too, which may be experts.
            libc.madvise(found, length, mmap.MADV_RANDOM)
        return found

    def advise_quietly(address: int, length: int, advice: int) -> int:
        return 0 if advice == _POSIX_MADV_WILLNEED else libc.posix_madvise(address, length, advice)

    ours = {
        b"mmap": _Mmap(map_quietly),
        b"mmap64": _Mmap(map_quietly),
        b"posix_madvise": _Madvise(advise_quietly),
    }
    try:
        slots = _call_slots(library, set(ours))
    except (OSError, ValueError, struct.error):
        slots = {}
    if not {b"mmap", b"mmap64"} & set(slots):
        warnings.warn(
            f"{library.name}: its calls of mmap cannot be found, so it reads the whole model file once at load",
            SimlabWarning,
            stacklevel=3,
        )
        yield False
        return
    before = {slot: _write(libc, slot, _pointer(ours[name])) for name, at in slots.items() for slot in at}
    try:
        yield True
    finally:
        for slot, pointer in before.items():
            _write(libc, slot, pointer)


def _pointer(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def _write(libc: ctypes.CDLL, slot: int, pointer: int) -> int:
    """Store a pointer in a call table, which may be write-protected; returns what was there."""
    page = slot & ~(mmap.PAGESIZE - 1)
    cell = ctypes.c_size_t.from_address(slot)
    before = cell.value
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _PROT_READ | _PROT_WRITE):
        raise OSError(ctypes.get_errno() or errno.EACCES, os.strerror(ctypes.get_errno()))
    cell.value = pointer
    return before


def _call_slots(library: Path, names: set[bytes]) -> dict[bytes, list[int]]:
    """Addresses in this process of the table entries through which a loaded ELF library calls `names`."""
    base = next(
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(library)) and line.split()[2] == "00000000"
    )
    data = library.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        raise ValueError(f"{library}: not a 64-bit ELF library")
    machine = struct.unpack_from("<H", data, 18)[0]
    wanted_types = _JUMP_SLOTS.get(machine, ())
    table, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    symbols = next(s for s in sections if s[1] == _SHT_DYNSYM)
    strings = sections[symbols[6]][4]
    found: dict[bytes, list[int]] = {}
    for section in sections:
        if section[1] != _SHT_RELA:
            continue
        for at in range(section[4], section[4] + section[5], 24):
            offset, info = struct.unpack_from("<QQ", data, at)
            if info & 0xFFFFFFFF not in wanted_types:
                continue
            name_at = strings + struct.unpack_from("<I", data, symbols[4] + (info >> 32) * 24)[0]
            name = data[name_at : data.index(b"\0", name_at)]
            if name in names:
                found.setdefault(name, []).append(base + offset)
    return found
