"""Look-ahead: reading experts of later layers in the background before their routing is known.

A read issued at layer l for layer l + d is waited for at the top-k of layer l + d, and its entry becomes
resident there, before the batch's residency is judged, at the cold end of the cache. Only decode graphs
look ahead, and a prediction never changes what is computed unless a lossy policy looks at residency.
Rules: policies.md, prefetch policies; engine-semantics, section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from simlab.errors import InputError, RunError
from simlab.prefetch import PrefetchSpec
from simlab.record.cache import LiveCache
from simlab.record.experts import ExpertMemory
from simlab.record.ggml import F32, Tensor, rows_of
from simlab.record.reads import FinishedRead, PendingReads, ReadLanes


class LookAhead:
    """The background reads of one session.

    Args:
        layers: model layer numbers of the MoE layers. lanes: background lanes of its own.
        gates: pointers of the router weights by model layer, for `next_gate`.
    """

    def __init__(
        self,
        spec: PrefetchSpec,
        layers: Sequence[int],
        lanes: ReadLanes,
        experts: ExpertMemory,
        cache: LiveCache,
        gates: Mapping[int, int],
    ) -> None:
        self.spec = spec
        self._layers, self._lanes, self._experts, self._cache = layers, lanes, experts, cache
        self._last_run: dict[int, list[int]] = {}
        self._under_way: dict[int, tuple[list[int], PendingReads]] = {}
        self._gates: dict[int, np.ndarray] = {}
        if spec.kind == "next_gate":
            self._gates = {layers.index(layer): _gate_weights(layer, p) for layer, p in gates.items()}

    def see_input(self, at: int, x: np.ndarray) -> None:
        """The router's input float32 `[n_embd]` at a layer: predict and read the next layer's experts."""
        gate = self._gates.get(at + 1)
        if gate is not None:
            logits = gate @ x
            best = np.argsort(-logits, kind="stable")[: self.spec.depth]
            self._issue(at + 1, best.tolist())

    def see_run(self, at: int, experts: Sequence[int]) -> None:
        """The experts a layer ran, once its batch is looked up."""
        if self.spec.kind != "previous_token":
            return
        self._last_run[at] = list(dict.fromkeys(experts))
        # The first layer starts the whole reach, every later one adds the layer that comes into it.
        reach = range(1, self.spec.depth + 1) if at == 0 else (self.spec.depth,)
        for ahead in reach:
            if at + ahead < len(self._layers):
                self._issue(at + ahead, self._last_run.get(at + ahead, []))

    def _issue(self, at: int, experts: Sequence[int]) -> None:
        resident = self._cache.residency(at)
        missing = [e for e in experts if not resident[e]]
        if missing and at not in self._under_way:
            slices = [s for e in missing for s in self._experts.slices[self._layers[at], e]]
            self._under_way[at] = (missing, self._lanes.submit(slices))

    def settle(self, at: int) -> list[FinishedRead]:
        """Wait for the reads issued for a layer and make their entries resident, at the cold end.

        Raises:
            RunError: a read failed.
        """
        if at not in self._under_way:
            return []
        experts, pending = self._under_way.pop(at)
        reads = self._lanes.collect(pending)
        self._cache.insert_speculative(at, experts)
        return reads

    def abandon(self) -> None:
        """Wait for everything under way and give its pages back: nothing will look at it."""
        for at, (experts, pending) in self._under_way.items():
            # A failed read is no loss: the entry was never resident, and is given back.
            with contextlib.suppress(RunError):
                self._lanes.collect(pending)
            for expert in experts:
                self._experts.release(self._layers[at], expert)
        self._under_way = {}


def _gate_weights(layer: int, pointer: int) -> np.ndarray:
    tensor = Tensor.from_address(pointer)
    if tensor.type != F32:
        raise InputError(f"--prefetch next_gate: the gate of layer {layer} is not float32 in this model")
    return rows_of(tensor, tensor.ne[0], tensor.ne[1], tensor.nb[1], np.float32)
