"""ggml's own structures as ctypes sees them, checked against ggml's accessors before anything relies on them.

llama-cpp-python exposes no tensor structure, and the eval callback hands over bare pointers; this module is
the only place that knows the layout. `check_layout` refuses a build whose layout differs.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from simlab.errors import RunError

LAYOUT_OF = "0.3.36"
"""The llama-cpp-python release whose `struct ggml_tensor` is written down below."""

_MAX_NAME = 64


class Tensor(ctypes.Structure):
    """`struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * _MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


NAME_OFFSET = Tensor.name.offset
_OBJECT_BYTES = 32  # sizeof(struct ggml_object), the other half of ggml_tensor_overhead()
F32 = 0
MAP_NORESERVE = 0x4000  # Linux; Python's mmap module names it from 3.13 on


def engine_missing() -> RunError:
    """The error every entry to the engine raises where the extra is not installed."""
    return RunError("the live engine is not installed; run: pip install 'simlab[engine]'")


@cache
def libraries() -> tuple[ctypes.CDLL, Any]:
    """(libggml-base, the llama_cpp low-level module)."""
    # Where ggml aborts, its one line says more than the debugger it would start.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        import llama_cpp.llama_cpp as llama
    except ImportError as error:
        raise engine_missing() from error
    base = ctypes.CDLL(str(loaded_library("libggml-base.")))
    signatures = {
        "ggml_tensor_overhead": (ctypes.c_size_t, []),
        "ggml_version": (ctypes.c_char_p, []),
        "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
        "ggml_op_desc": (ctypes.c_char_p, [ctypes.c_void_p]),
        "ggml_init": (ctypes.c_void_p, [_InitParams]),
        "ggml_free": (None, [ctypes.c_void_p]),
        "ggml_new_tensor_3d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_int64] * 3),
        "ggml_view_2d": (
            ctypes.c_void_p,
            [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_int64,
                ctypes.c_int64,
                ctypes.c_size_t,
                ctypes.c_size_t,
            ],
        ),
        "ggml_set_name": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
        "ggml_get_name": (ctypes.c_void_p, [ctypes.c_void_p]),
        "ggml_get_data": (ctypes.c_void_p, [ctypes.c_void_p]),
        "ggml_nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
        "ggml_nelements": (ctypes.c_int64, [ctypes.c_void_p]),
        "gguf_init_from_file": (ctypes.c_void_p, [ctypes.c_char_p, _GgufParams]),
        "gguf_free": (None, [ctypes.c_void_p]),
        "gguf_find_key": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_char_p]),
        "gguf_get_kv_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_val_str": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_val_u16": (ctypes.c_uint16, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_val_u32": (ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_val_i32": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_val_u64": (ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_data_offset": (ctypes.c_size_t, [ctypes.c_void_p]),
        "gguf_get_n_tensors": (ctypes.c_int64, [ctypes.c_void_p]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    return base, llama


def loaded_library(name: str) -> Path:
    """The library of llama-cpp-python of that name that this process runs.

    A wheel holds copies under several names, each with a state of its own; this is the one in use.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines if f"/{name}" in line}
    if len(loaded) != 1:
        raise RunError(
            f"llama-cpp-python {version('llama-cpp-python')} loaded {len(loaded)} libraries named {name}*, "
            "simlab needs the one; reinstall it"
        )
    return Path(loaded.pop())


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def gguf_params() -> ctypes.Structure:
    """Read metadata only."""
    return _GgufParams(True, None)


def engine_version() -> str:
    """llama-cpp-python and ggml versions, for headers and messages."""
    base, _ = libraries()
    return f"llama-cpp-python {version('llama-cpp-python')}, ggml {base.ggml_version().decode()}"


@cache
def op_codes() -> dict[str, int]:
    """ggml's operation numbers by name, asked of ggml itself: they move between releases."""
    base, _ = libraries()
    wanted = {"NONE", "VIEW", "RESHAPE", "ARGSORT", "TOP_K", "SOFT_MAX", "UNARY", "ADD", "SCALE"}
    wanted |= {"MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "SET_ROWS", "DIV"}
    found: dict[str, int] = {}
    for code in range(200):
        name = base.ggml_op_name(code).decode()
        if name == "NONE" and code > 0:
            break
        if name in wanted:
            found[name] = code
        if len(found) == len(wanted):
            break
    missing = wanted - set(found)
    if missing:
        raise RunError(f"{engine_version()}: ggml has no operation named {', '.join(sorted(missing))}")
    return found


@cache
def check_layout() -> str:
    """Compare `Tensor` with ggml's accessors; returns one line for `simlab doctor`.

    Raises:
        RunError: this build's layout differs, with both versions named.
    """
    base, _ = libraries()
    wrong: list[str] = []
    if base.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + _OBJECT_BYTES:
        wrong.append("size")
    context = base.ggml_init(_InitParams(1 << 16, None, False))
    try:
        pointer = base.ggml_new_tensor_3d(context, F32, 5, 3, 2)
        base.ggml_set_name(pointer, b"layout")
        view_pointer = base.ggml_view_2d(context, pointer, 2, 3, 20, 4)
        t, view = Tensor.from_address(pointer), Tensor.from_address(view_pointer)
        checks = {
            "name": base.ggml_get_name(pointer) == pointer + NAME_OFFSET and t.name == b"layout",
            "data": base.ggml_get_data(pointer) == t.data and t.data,
            "ne": list(t.ne) == [5, 3, 2, 1] and base.ggml_nelements(pointer) == 30,
            "nb": list(t.nb) == [4, 20, 60, 120] and base.ggml_nbytes(pointer) == 120,
            "type": t.type == F32,
            "op": base.ggml_op_desc(view_pointer) == base.ggml_op_name(view.op) == b"VIEW",
            "src": view.src[0] == pointer,
            "view_src": view.view_src == pointer and view.view_offs == 4 and view.data == t.data + 4,
        }
        wrong += [name for name, good in checks.items() if not good]
        # Widening a stride must be what the accessors see too: the engine relies on it.
        t.nb[2] += 64
        if base.ggml_nbytes(pointer) != 120 + 64:
            wrong.append("nb is not what ggml reads")
    finally:
        base.ggml_free(context)
    if wrong:
        raise RunError(
            f"tensor layout differs in {', '.join(wrong)}: simlab knows that of llama-cpp-python {LAYOUT_OF}, "
            f"installed is {engine_version()}; install llama-cpp-python=={LAYOUT_OF}"
        )
    return f"tensor layout matches ({engine_version()})"


def memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """`size` bytes at `address` as a writable buffer."""
    return (ctypes.c_char * size).from_address(address)


def rows_of(tensor: Tensor, columns: int, rows: int, row_stride: int, dtype: type) -> np.ndarray:
    """A writable NumPy view `[rows, columns]` of 4-byte elements, by the tensor's own strides, nothing copied."""
    size = row_stride * (rows - 1) + 4 * columns
    flat = np.frombuffer(memoryview(memory(tensor.data, size)), dtype=dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (row_stride, 4))
