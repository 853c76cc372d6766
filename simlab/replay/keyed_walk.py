"""A group of cells that route alike and whose keys move by themselves: hands them to the scan of `keyed.py`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import padded
from simlab.replay.keyed import KeyedShape, run
from simlab.replay.programs import compiled
from simlab.replay.shape import Tree
from simlab.replay.shared_walk import STEPS, SharedWalk, Uses, of_uses


class KeyedWalk(SharedWalk):
    """Takes what `SharedWalk` does."""

    def _lay_out(self) -> None:
        program = self._program
        self._shape = KeyedShape(
            eviction=program.eviction,
            n_layers=program.n_layers,
            n_expert=program.n_expert,
            n_slots=program.n_slots,
            per_layer=self._per_layer,
        )
        self.lanes |= {"knob_values": vars(self._knobs)}

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
        known = {"stamp": carry["stamp"], "state": carry["eviction_state"]}
        entry = uses.entry.astype(np.int32)
        rows = steps | {
            "look_up": of_uses(entry, steps["look_up"], -1),
            "put": of_uses(entry, steps["put"], -1),
            "stamp": of_uses(uses.position, steps["put"], 0),
        }
        rows |= {f"state {name}": of_uses(x, steps["put"], 0) for name, x in uses.state.items()}
        filled = padded(rows, STEPS + 1)
        state = {name: filled.pop(f"state {name}") for name in uses.state}
        given: Tree = filled | {"state": state}

        def function(carry: Tree, known: Tree, rows: Tree, n: Any, shared: Any, lanes: Tree) -> Tree:
            return run(shape, carry, known, rows, n, shared, lanes)

        call = compiled((shape.key, n_lanes), function)
        return call(moving, jax.device_put(known), given, np.int32(len(steps["n"])), shared, lanes)
