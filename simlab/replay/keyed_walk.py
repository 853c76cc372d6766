"""A group of cells that route alike and whose keys move by themselves: finds keys, for `shared_loop.py`, or orders, for
`keyed.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import padded
from simlab.replay.keyed import KeyedShape, run
from simlab.replay.keyed_order import Block, blocks, in_order, packed_keys, whole_keys, wrong_entry
from simlab.replay.programs import compiled
from simlab.replay.shape import Tree, code_key
from simlab.replay.shared_loop import LEVELS, Batches, Caches, Held, Keys, at_batches, walk_keyed
from simlab.replay.shared_order import LAST_USE
from simlab.replay.shared_walk import STEPS, SharedWalk, Uses, of_uses
from simlab.routing import entry_facts

_MOST_ORDERS = 1 << 23
"""Places in all orders of a call: 32 MiB."""
_AT_ONCE = 1 << 18
"""Keys worked out at once, which stay in a processor's cache."""


class KeyedWalk(SharedWalk):
    """Takes what `SharedWalk` does."""

    _rooms: list[Any] | None = None
    """Two arrays for keys, of which one is filled while the other is walked by."""

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
            packed, whole, key, wrong = told
            for at in block.start + np.flatnonzero(np.asarray(wrong)[: len(numbers) - block.start]):
                self._check(carry, uses, cache, int(numbers[at]), int(batch[at]))
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

    def _check(self, carry: Tree, uses: Uses, cache: int, place: int, batch: int) -> None:
        """Find the entry of a cache whose key is none at a batch, by its place in this piece and its number.

        Raises:
            InputError: an entry that was used has such a key.
        """
        mine = uses.batch <= place
        n = carry["stamp"].size // self._n_caches
        at = np.arange(cache * n, cache * n + n)
        known = {}
        pairs = {LAST_USE: (carry["stamp"], uses.position)}
        pairs |= {name: (old, uses.state[name]) for name, old in carry["eviction_state"].items()}
        for name, (old, new) in pairs.items():
            values = np.array(old).reshape(-1)
            # Of several uses of an entry the last stands.
            values[uses.entry[mine]] = new[mine]
            known[name] = values[at]
        layer, expert = (x.astype(np.int32) for x in np.divmod(at, self._program.n_expert))
        nothing = np.zeros(n, bool)
        facts = entry_facts(self._program.eviction, layer, expert, nothing, nothing)
        wrong = wrong_entry(self._program.eviction, known, facts, batch, self._knobs)
        if wrong is not None:
            raise self._refuse(int(at[wrong]), place)

    def _packed(self, block: Block, facts: Tree, batch: NDArray[np.int64]) -> Any:
        """As `packed_keys` has it."""
        policy, knobs = self._program.eviction, vars(self._knobs)

        def function(known: Tree, facts: Tree, batch: Any, bits: Any, knobs: Tree) -> Any:
            return packed_keys(policy, known, facts, batch, bits, knobs)

        call = compiled(("keys", code_key((), policy), block.known[LAST_USE].shape), function)
        return call(block.known, facts, batch, np.int32(block.bits), knobs)

    # -- by the loop -------------------------------------------------------------------------------------------

    def _loop(self, carry: Tree, uses: Uses, batches: Batches, caches: Caches) -> None:
        held = pack(caches.resident, self._n_caches)
        last = np.array(carry["stamp"]).reshape(-1)
        n = len(last) // self._n_caches
        size = max(_AT_ONCE // n, 1)
        starts = range(0, len(batches.layer), size)
        keys_from = self._whole_keys(carry, uses, batches, n, size)
        if self._rooms is None:
            self._rooms = [jnp.zeros((size, n), jnp.uint64) for _ in range(2)]
        rooms, wrong = self._rooms, [None, None]

        def walk(number: int) -> None:
            first = starts[number]
            here = min(size, len(batches.layer) - first)
            for at in first + np.flatnonzero(np.asarray(wrong[number % 2])[:here]):
                self._check(carry, uses, int(batches.cache[at]), int(at), int(batches.number[at]))
            keys = Keys(first, here, np.asarray(rooms[number % 2]), uses.entry, uses.position, last)
            walk_keyed(batches, keys, caches, held)

        for number, first in enumerate(starts):
            rooms[number % 2], wrong[number % 2] = keys_from(first, rooms[number % 2])
            # JAX works these keys out while the loop goes by those before.
            if number:
                walk(number - 1)
        walk(len(starts) - 1)
        caches.resident[:] = unpack(held, n)

    def _whole_keys(
        self, carry: Tree, uses: Uses, batches: Batches, n: int, size: int
    ) -> Callable[[int, Any], Any]:
        """A function of batches, to be asked for `size` at a time in their order: what `whole_keys` has for those from
        one on; written over a second argument, keys of an earlier time. Before it is asked for a third time, the first
        keys must have been read.
        """
        policy, n_expert = self._program.eviction, self._program.n_expert
        now = {LAST_USE: carry["stamp"], **carry["eviction_state"]}
        now = {name: np.array(v).reshape(-1) for name, v in now.items() if name in self._reads.by_key}
        new = {name: uses.position if name == LAST_USE else uses.state[name] for name in now}
        found = [{name: np.empty((size, n), v.dtype) for name, v in now.items()} for _ in range(2)]
        first_layer = (batches.cache * (self._program.n_layers // self._n_caches)).astype(np.int32)

        def function(_room: Any, known: Tree, first: Any, batch: Any, knobs: Tree) -> Any:
            return whole_keys(policy, known, first, batch, knobs, n=n, n_expert=n_expert)

        call = compiled(("whole keys", code_key((), policy), n, size, n_expert), function, room=(0,))

        def keys_from(start: int, room: Any) -> Any:
            known = found[start // size % 2]
            for name, standing in known.items():
                # Copies, whatever their bits say.
                values = (x.view(np.int64) for x in (now[name], new[name], standing))
                at_batches(batches, start, uses.entry, *values)
            here = np.minimum(np.arange(start, start + size), len(batches.layer) - 1)
            return call(room, known, first_layer[here], batches.number[here], vars(self._knobs))

        return keys_from


def pack(resident: NDArray[np.bool_], n_caches: int) -> Held:
    """What is in RAM, of `Caches.resident`."""
    n_lanes = resident.shape[1]
    of_cache = resident.reshape(n_caches, -1, n_lanes)
    missing = -of_cache.shape[1] % 64
    bits = np.packbits(np.pad(of_cache, ((0, 0), (0, missing), (0, 0))), axis=1, bitorder="little")
    return Held(
        words=np.ascontiguousarray(bits.transpose(2, 0, 1)).view("<u8").astype(np.uint64),
        n=of_cache.sum(axis=1).T.copy(),
        level=np.zeros((n_lanes, n_caches), np.int64),
        ends=np.zeros((n_caches, LEVELS), np.uint64),
    )


def unpack(held: Held, n: int) -> NDArray[np.bool_]:
    """`Caches.resident`, of caches of `n` entries."""
    bits = np.unpackbits(held.words.astype("<u8").view(np.uint8), axis=2, bitorder="little", count=n)
    return bits.transpose(1, 2, 0).reshape(-1, len(bits)).astype(bool)
