"""NumPy views of the tensors a routing passes through, kept from graph to graph.

llama.cpp reuses a decode graph as long as its shape holds, so a node usually lies where it lay one token
ago. A view is made once and kept with the bytes of the tensor structures it was made from; it is used again
only while those bytes are the same, which is one comparison.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import string_at
from typing import NamedTuple

import numpy as np

from simlab.errors import RunError
from simlab.record.discovery import score_tensor
from simlab.record.ggml import F32, Tensor, rows_of

_TENSOR_BYTES = ctypes.sizeof(Tensor)


class TopKView(NamedTuple):
    """The router's ids and the scores they were sorted by, as writable views into the graph."""

    structures: tuple[bytes, int, bytes]
    """Bytes of the ids' tensor, pointer and bytes of the score tensor."""
    layer: int
    ids: np.ndarray
    """int32 `[rows, k]`."""
    scores: np.ndarray
    """float32 `[rows, n_expert]`."""


class NodeViews:
    """Views by tensor pointer.

    Args:
        top_k_nodes: model layer of each top-k node, by name.
    """

    def __init__(self, top_k_nodes: Mapping[str, int], n_expert: int) -> None:
        self._layers = top_k_nodes
        self._n_expert = n_expert
        self._top_k: dict[int, TopKView] = {}
        self._weights: dict[int, tuple[bytes, np.ndarray]] = {}

    def top_k(self, pointer: int) -> TopKView | None:
        """The view of a top-k node, None if it routes no row (a prompt chunk without outputs, at the last layer).

        Raises:
            RunError: the score tensor is not float32 of one row per routed token.
        """
        kept = self._top_k.get(pointer)
        ids_bytes = string_at(pointer, _TENSOR_BYTES)
        if kept is not None:
            own, score_pointer, score_bytes = kept.structures
            if own == ids_bytes and string_at(score_pointer, _TENSOR_BYTES) == score_bytes:
                return kept
        top_k = Tensor.from_address(pointer)
        layer = self._layers[top_k.name.decode()]
        k, n_rows = top_k.ne[0], top_k.ne[1]
        if n_rows == 0:
            return None
        score_pointer = score_tensor(pointer)
        score = Tensor.from_address(score_pointer)
        if score.type != F32 or (score.ne[0], score.ne[1]) != (self._n_expert, n_rows):
            raise RunError(
                f"layer {layer}: the scores are {list(score.ne)} of type {score.type}, the routing {n_rows} rows"
            )
        self._top_k[pointer] = view = TopKView(
            (ids_bytes, score_pointer, string_at(score_pointer, _TENSOR_BYTES)),
            layer,
            # The ids are a view of the full argsort: its row stride, not k, leads from token to token.
            rows_of(top_k, k, n_rows, top_k.nb[1], np.int32),
            rows_of(score, self._n_expert, n_rows, score.nb[1], np.float32),
        )
        return view

    def weights(self, pointer: int, layer: int, k: int, n_rows: int) -> np.ndarray:
        """float32 `[rows, k]`: the last node of a layer's weight chain.

        Its layout is `[1, k, rows]` or `[k, rows]`: the same bytes in the same order, told apart only by extents.
        """
        structure = string_at(pointer, _TENSOR_BYTES)
        kept = self._weights.get(pointer)
        if kept is not None and kept[0] == structure:
            view = kept[1]
        else:
            node = Tensor.from_address(pointer)
            if node.type != F32 or node.ne[0] * node.ne[1] * node.ne[2] != k * n_rows:
                raise RunError(
                    f"layer {layer}: the weights are {list(node.ne)}, expected {k} for each of {n_rows} rows"
                )
            view = rows_of(node, k, n_rows, 4 * k, np.float32)
            self._weights[pointer] = (structure, view)
        return view
