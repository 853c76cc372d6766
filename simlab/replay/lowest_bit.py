"""The place of a word's lowest bit, one instruction, which numba has no name for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _generated(_typing: Any, word: Any) -> Any:
    """The instruction, for a word of any width."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # Of a word without a bit, its width.
        place = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))
        wide = ir.IntType(64)
        return place if place.type == wide else builder.zext(place, wide)

    return types.int64(word), generate


lowest_bit: Any = intrinsic(_generated)
"""int64: place of the lowest bit of an unsigned word, in compiled code."""
