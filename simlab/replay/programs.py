"""The compiled programs of this process: made once, the last used kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

MOST_PROGRAMS = 64
"""A program takes some 300 memory mappings of the 65,530 that Linux gives a process; past those XLA crashes."""

_PROGRAMS: OrderedDict[Hashable, Any] = OrderedDict()
_LOCK = Lock()
"""Groups of cells run side by side."""


def compiled(key: Hashable, function: Callable[..., Any], room: tuple[int, ...] = ()) -> Any:
    """The jitted `function`, or the one kept under the same key, for arguments of one shape.

    Args:
        room: places of arguments that the function makes nothing of: arrays of its results' shapes, which are written
            over, where else memory would be asked of the system for every call.
    """
    with _LOCK:
        if key not in _PROGRAMS:
            _PROGRAMS[key] = jax.jit(function, donate_argnums=room, keep_unused=bool(room))
            while len(_PROGRAMS) > MOST_PROGRAMS:
                _, oldest = _PROGRAMS.popitem(last=False)
                oldest.clear_cache()
        _PROGRAMS.move_to_end(key)
        return _PROGRAMS[key]


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, as a call of its own inside a program, so that its results are worked out once.

    XLA's CPU compiler would else merge the work into everyone who reads the results, again and again, and into
    shapes along which it cannot use vector instructions. Elsewhere the compiler is left to itself.
    """
    if jax.default_backend() != "cpu":
        return function

    def inner(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="true"):
            return function(*arrays)

    def call(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(inner)(*arrays)

    return call
