"""A group of cells whose order of eviction is fixed: finds the order in NumPy, for the scan of `ranked.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import WORD, padded
from simlab.replay.programs import compiled
from simlab.replay.ranked import RankedShape, run
from simlab.replay.shape import Tree
from simlab.replay.shared_walk import STEPS, SharedWalk, Uses, first_of, of_uses
from simlab.routing import entry_facts, eviction_key


class RankedWalk(SharedWalk):
    """Takes what `SharedWalk` does."""

    def _lay_out(self) -> None:
        program = self._program
        n_layers, units = program.n_layers, self.lanes["units"]
        line_sizes, line_of_layer = np.unique(units, return_inverse=True)
        entries = program.n_expert * (n_layers // self._n_caches)
        self._shape = RankedShape(
            n_layers=n_layers,
            n_expert=program.n_expert,
            n_slots=program.n_slots,
            per_layer=self._per_layer,
            n_lines=n_layers if self._per_layer else len(line_sizes),
            n_words=-(-(entries + self._most_uses) // WORD),
        )
        self._line = (np.arange(n_layers) if self._per_layer else line_of_layer).astype(np.int32)
        self.lanes |= {
            "line_units": units if self._per_layer else line_sizes.astype(np.int32),
            "line": self._line,
        }

    def _call(
        self,
        carry: Tree,
        moving: Tree,
        uses: Uses,
        steps: Tree,
        shared: NDArray[np.int64],
        lanes: Tree,
    ) -> Tree:
        order, new, old = self._ranks(carry, uses)
        shape, n_lanes = self._shape, carry["used"].shape[1]
        layer_of_use = of_uses(uses.entry // shape.n_expert, steps["put"].max(axis=1), 0)
        rows = {name: x for name, x in steps.items() if name != "batch"} | {
            "look_up": of_uses(old, steps["look_up"], -1),
            "put": of_uses(new, steps["put"], -1),
            "line": self._line[steps["layer"]],
            "put_line": self._line[layer_of_use],
        }

        def function(carry: Tree, order: Tree, rows: Tree, n: Any, shared: Any, lanes: Tree) -> Tree:
            return run(shape, carry, order, rows, n, shared, lanes)

        call = compiled((shape.key, n_lanes), function)
        return call(moving, order, padded(rows, STEPS + 1), np.int32(len(rows["n"])), shared, lanes)

    def _ranks(self, carry: Tree, uses: Uses) -> tuple[Tree, NDArray[np.int32], NDArray[np.int32]]:
        """The order as `ranked.run` takes it, and of each use its rank and that of the one before, -1 for none."""
        shape = self._shape
        stamp = np.asarray(carry["stamp"]).reshape(-1)
        seen = np.flatnonzero(stamp >= 0)
        state = {name: np.asarray(v).reshape(-1)[seen] for name, v in carry["eviction_state"].items()}
        entry = np.concatenate([seen, uses.entry])
        position = np.concatenate([stamp[seen], uses.position])
        key = np.concatenate(
            [self._key(state, seen, stamp[seen]), self._key(uses.state, uses.entry, uses.position)]
        )
        cache = self._cache[entry // shape.n_expert]
        at = np.lexsort((position, key, cache))
        n_caches = self._n_caches
        counts = np.bincount(cache, minlength=n_caches)
        rank = np.empty(len(at), np.int32)
        rank[at] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        lying = np.full((n_caches, shape.n_words * WORD), -1, np.int32)
        lying[cache[: len(seen)], rank[: len(seen)]] = seen
        latest = np.full(len(stamp), -1, np.int32)
        latest[seen] = rank[: len(seen)]
        new = rank[len(seen) :]
        old = np.where(
            first_of(uses.entry), latest[uses.entry], np.append(np.int32(-1), new[:-1])[: len(new)]
        )
        latest[uses.entry] = new
        return {"entry": lying, "rank": latest.reshape(carry["stamp"].shape)}, new, old

    def _key(
        self, state: dict[str, NDArray[Any]], entry: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[Any]:
        """The keys of entries in that state."""
        program, n_expert = self._program, self._program.n_expert
        nothing = np.zeros(len(entry), bool)
        layer, expert = (entry // n_expert).astype(np.int32), (entry % n_expert).astype(np.int32)
        known = state | entry_facts(program.eviction, layer, expert, nothing, nothing)
        with np.errstate(all="ignore"):
            return np.asarray(eviction_key(np, program.eviction, known, position, np.int64(0), self._knobs))
