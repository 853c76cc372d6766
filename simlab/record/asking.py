"""The eval callback's asking half, compiled: which graph nodes to stop at.

llama.cpp asks before every node of every graph, some sixty times per MoE layer, and stops at two of them. A question
answered in Python costs more than the layer's routing, so numba compiles the answer, a look at the node's name; only
the nodes that were asked for come back to Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from simlab.record.ggml import NAME_OFFSET, Tensor

Observer = Callable[[int], bool]
"""A node's tensor pointer, to whether the graph goes on."""

_WORD = 8
_NAME_WORDS = Tensor.name.size // _WORD
_FIRST_WORD = NAME_OFFSET // _WORD
assert NAME_OFFSET % _WORD == 0, "names are compared eight bytes at a time"

_observers: dict[int, Observer] = {}
"""By the address of their table of names: compiled code cannot hold a Python object."""


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.c_int64)
def _observe(pointer: int, table: int) -> bool:
    return _observers[table](pointer)


class NodeFilter:
    """Stops at the nodes of these names and hands each, once computed, to `observer`.

    `function` and `user_data` are what llama.cpp takes; they live as long as this object, which must outlive the
    context. `observer` must not raise: the exception would be lost in the C frames above it. A name counts up to its
    final NUL: behind it lies what is left of an earlier, longer name of the node.
    """

    def __init__(self, names: frozenset[str], observer: Observer) -> None:
        texts = [name.encode() + b"\0" for name in sorted(names)]
        rows = b"".join(_padded(text) + _padded(b"\xff" * len(text)) for text in texts)
        self._table = np.concatenate([[np.uint64(len(texts))], np.frombuffer(rows, np.uint64)])
        self.function: int = _compiled().address
        self.user_data = self._table.ctypes.data
        _observers[self.user_data] = observer

    def close(self) -> None:
        """Forget the observer."""
        _observers.pop(self.user_data, None)


def _padded(text: bytes) -> bytes:
    return text.ljust(_NAME_WORDS * _WORD, b"\0")


@cache
def _compiled() -> Any:
    """The callback as machine code, once a process: bool (tensor, ask, table)."""
    # Not at the top: commands that record nothing do without numba's second to start.
    from numba import carray, cfunc, types  # pyright: ignore[reportPrivateImportUsage]

    observe, first, n_words = _observe, _FIRST_WORD, _NAME_WORDS
    words = types.CPointer(types.uint64)

    @cfunc(types.boolean(words, types.boolean, words))
    def on_node(tensor: Any, ask: Any, table: Any) -> Any:
        node = carray(tensor, (first + n_words,))
        n_names = carray(table, (1,))[0]
        names = carray(table, (1 + 2 * n_names * n_words,))
        if not ask:
            return observe(node.ctypes.data, names.ctypes.data)
        for i in range(n_names):
            text = 1 + 2 * i * n_words
            mask = text + n_words
            word = 0
            while word < n_words and (node[first + word] ^ names[text + word]) & names[mask + word] == 0:
                word += 1
            if word == n_words:
                return True
        return False

    return on_node
