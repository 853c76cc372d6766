"""The compiled programs of this process: made once, the last used kept."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from simlab.errors import InputError

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


def backend() -> str:
    """The platform that JAX runs on here: `cpu`, `gpu`, ...

    Raises:
        InputError: JAX_PLATFORMS names one that this machine or this JAX does not have.
    """
    try:
        return jax.default_backend()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # of a platform it does not know, of one it finds no device of
        named, why = os.environ.get("JAX_PLATFORMS", ""), str(error).partition(" (set JAX_")[0].rstrip(".")
        raise InputError(
            f"JAX_PLATFORMS={named}: JAX cannot use that here{why and f' ({why})'}; unset it, or set it to cpu"
        ) from error


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, as a call of its own inside a program, so that its results are worked out once.

    XLA's CPU compiler would else merge the work into everyone who reads the results, again and again, and into
    shapes along which it cannot use vector instructions. Elsewhere the compiler is left to itself.
    """
    if backend() != "cpu":
        return function

    def inner(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="true"):
            return function(*arrays)

    def call(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(inner)(*arrays)

    return call
