"""A group of cells that route alike and whose keys move by themselves: finds keys and orders, for `keyed.py` or `keyed_loop.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import padded
from simlab.replay.keyed import KeyedShape, run
from simlab.replay.keyed_loop import Keys, at_batches, held, unpack, walk_keyed
from simlab.replay.keyed_order import Block, blocks, in_order, packed_keys, whole_keys
from simlab.replay.programs import compiled
from simlab.replay.shape import Tree, code_key
from simlab.replay.shared_loop import Batches, Caches
from simlab.replay.shared_order import LAST_USE, reads
from simlab.replay.shared_walk import STEPS, SharedWalk, Uses, of_uses
from simlab.routing import entry_facts

_MOST_ORDERS = 1 << 23
"""Places in all orders of a call: 32 MiB."""
_AT_ONCE = 1 << 18
"""Keys worked out at once, which stay in a processor's cache."""


class KeyedWalk(SharedWalk):
    """Takes what `SharedWalk` does."""

    def _lay_out(self) -> None:
        program = self._program
        self._shape = KeyedShape(
            n_layers=program.n_layers,
            n_expert=program.n_expert,
            n_slots=program.n_slots,
            per_layer=self._per_layer,
        )
        self._most_batches = min(max(_MOST_ORDERS // self._shape.n_places, 1), STEPS)
        # Finding the first of an order is cheaper than all of it, and mostly one of them is in RAM.
        self._n_parts = 1

    def _call(
        self,
        carry: Tree,
        moving: Tree,
        uses: Uses,
        steps: Tree,
        shared: NDArray[np.int64],
        lanes: Tree,
    ) -> Tree:
        shape, n_lanes = self._shape, carry["used"].shape[1]
        begins = np.flatnonzero(np.diff(steps["batch"], prepend=-1))
        entry = uses.entry.astype(np.int32)
        rows = {name: x for name, x in steps.items() if name != "batch"} | {
            "look_up": of_uses(entry, steps["look_up"], -1),
            "put": of_uses(entry, steps["put"], -1),
            "order": np.searchsorted(begins, np.arange(len(steps["batch"])), side="right").astype(np.int32)
            - 1,
        }
        n, rows = np.int32(len(rows["n"])), padded(rows, STEPS + 1)

        def function(
            carry: Tree, order: Any, parts: Any, rows: Tree, n: Any, shared: Any, lanes: Tree
        ) -> Any:
            return run(shape, carry, order, parts, rows, n, shared, lanes)

        call = compiled((shape.key, n_lanes), function)
        while True:
            parts = np.int32(self._n_parts)
            order = self._orders(carry, uses, steps["batch"][begins], steps["layer"][begins])
            after, sufficed = call(moving, order, parts, rows, n, shared, lanes)
            if parts == shape.n_parts or bool(sufficed):
                return after
            self._n_parts = min(2 * self._n_parts, shape.n_parts)

    def _orders(
        self, carry: Tree, uses: Uses, batch: NDArray[np.int64], layer: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """`order` as `keyed.run` takes it, for batches of these numbers and layers."""
        shape = self._shape
        found = np.empty((self._most_batches, shape.n_places), np.int32)
        found[:, shape.of_cache :] = shape.nowhere
        n = min(self._n_parts * shape.at_once, shape.of_cache)
        caches = layer if self._per_layer else np.zeros_like(layer)
        for cache in np.unique(caches).tolist():
            mine = np.flatnonzero(caches == cache)
            found[mine, :n] = self._of_cache(carry, uses, cache, mine, batch[mine], n)
        return found

    def _of_cache(
        self,
        carry: Tree,
        uses: Uses,
        cache: int,
        numbers: NDArray[np.int64],
        batch: NDArray[np.int64],
        n_first: int,
    ) -> NDArray[np.int32]:
        """The first of one cache's orders, int32 `[P, n_first]`, at batches of these places in the call."""
        n = self._shape.of_cache
        first = cache * n
        here = (uses.entry >= first) & (uses.entry < first + n)
        at = np.flatnonzero(here)
        entry, of_batch = uses.entry[at] - first, np.searchsorted(numbers, uses.batch[at])
        mine = slice(first, first + n)
        known = {LAST_USE: np.asarray(carry["stamp"]).reshape(-1)[mine]}
        known |= {name: np.asarray(v).reshape(-1)[mine] for name, v in carry["eviction_state"].items()}
        new = {LAST_USE: uses.position[at]} | {name: v[at] for name, v in uses.state.items()}
        layer, expert = (
            x.astype(np.int32) for x in np.divmod(np.arange(first, first + n), self._shape.n_expert)
        )
        nothing = np.zeros(n, bool)
        facts = entry_facts(self._program.eviction, layer, expert, nothing, nothing)
        found = np.empty((len(numbers), n_first), np.int32)

        def sort(block: Block, told: Any) -> None:
            packed, whole, key = told
            rest = None if bool(whole) else np.asarray(key)
            order = in_order(np.asarray(packed), rest, block.entry, block.bits, n_first)
            mine = found[block.start :]
            mine[: len(order)] = first + order[: len(mine)]

        waiting = None
        size = max(_AT_ONCE // n, 1)
        for block in blocks(known, of_batch, entry, new, len(numbers), size):
            of_block = np.minimum(np.arange(block.start, block.start + size), len(numbers) - 1)
            told = self._packed(block, facts, batch[of_block])
            # JAX works these keys out while NumPy sorts those before.
            if waiting is not None:
                sort(*waiting)
            waiting = block, told
        if waiting is not None:
            sort(*waiting)
        return found

    def _packed(self, block: Block, facts: Tree, batch: NDArray[np.int64]) -> Any:
        """As `packed_keys` has it."""
        policy, knobs = self._program.eviction, vars(self._knobs)

        def function(known: Tree, facts: Tree, batch: Any, bits: Any, knobs: Tree) -> Any:
            return packed_keys(policy, known, facts, batch, bits, knobs)

        call = compiled(("keys", code_key((), policy), block.known[LAST_USE].shape), function)
        return call(block.known, facts, batch, np.int32(block.bits), knobs)

    # -- by the loop -------------------------------------------------------------------------------------------

    def _loop(self, carry: Tree, uses: Uses, batches: Batches, caches: Caches) -> None:
        bits = held(caches.resident, self._n_caches)
        n = len(caches.resident) // self._n_caches
        last = np.array(carry["stamp"]).reshape(-1)
        size, waiting = max(_AT_ONCE // n, 1), None

        def walk(first: int, key: Any) -> None:
            here = min(size, len(batches.layer) - first)
            keys = Keys(first, here, np.asarray(key), uses.entry, uses.position, last)
            walk_keyed(batches, keys, caches, bits)

        # JAX works these keys out while the loop goes by those before.
        for block in self._whole_keys(carry, uses, batches, n, size):
            if waiting is not None:
                walk(*waiting)
            waiting = block
        if waiting is not None:
            walk(*waiting)
        unpack(bits, caches.resident)

    def _whole_keys(
        self, carry: Tree, uses: Uses, batches: Batches, n: int, size: int
    ) -> Iterator[tuple[int, Any]]:
        """The first of some batches, and uint64 `[size, n]`, their keys as `whole_keys` has them."""
        policy, n_layers, n_expert = self._program.eviction, self._program.n_layers, self._program.n_expert
        known = reads(policy)
        assert known is not None
        now = {LAST_USE: carry["stamp"], **carry["eviction_state"]}
        # Copies of bits, whatever they say.
        now = {name: np.array(v).reshape(-1).view(np.int64) for name, v in now.items() if name in known.by_key}
        new = {LAST_USE: uses.position, **uses.state}
        new = {name: new[name].view(np.int64) for name in now}
        dtype = {name: np.asarray(v).dtype for name, v in carry["eviction_state"].items()}

        def function(known: Tree, first: Any, batch: Any, knobs: Tree) -> Any:
            return whole_keys(policy, known, first, batch, knobs, n=n, n_expert=n_expert)

        call = compiled(("whole keys", code_key((), policy), n, size, n_expert), function)
        first_layer = (batches.cache * (n_layers // self._n_caches)).astype(np.int32)
        for start in range(0, len(batches.layer), size):
            here = np.minimum(np.arange(start, start + size), len(batches.layer) - 1)
            n_here = min(size, len(batches.layer) - start)
            # Each time new ones, since JAX may still read those before.
            found = {name: np.empty((size, n), np.int64) for name in now}
            for name, standing in found.items():
                at_batches(batches, start, n_here, now[name], uses.entry, new[name], standing)
            found = {name: v.view(dtype.get(name, np.int64)) for name, v in found.items()}
            yield start, call(found, first_layer[here], batches.number[here], vars(self._knobs))
