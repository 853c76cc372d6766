"""How loops over arrays are compiled by numba: those of a CPU's replay (`routed_loop.py`, `shared_loop.py`).

What a loop calls lies in its own file, but for what is here: numba compiles a function that it keeps on disk anew only
if that function's file has changed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from simlab.compiled import Function, compiled

# Python's errors of division would be looked for at every one.
_HOW: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def loop(function: Function) -> Function:
    """`function`, compiled by numba when it is first called, and kept on disk."""
    return compiled(function, **_HOW)


def _lowest(_typing: Any, word: Any) -> Any:
    """One instruction, for which NumPy has no name."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))
        wide = ir.IntType(64)
        return place if place.type == wide else builder.zext(place, wide)

    return types.int64(word), generate


lowest_bit: Any = intrinsic(_lowest)
"""int64: place of the lowest bit of an unsigned word, in compiled code; of a word without one, its width."""
