"""What routing policies learn before they run: called once, checked, as float32 arrays per layer.

The replayer lays them along its lanes (`replay/routes.py`), the engine along its one row
(`record/live_route.py`); both take them from here.

Shapes: `B` MoE layers, `E` experts per layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.errors import InputError
from simlab.policy_check import policy_error
from simlab.types import RoutingPolicy, Stage, Step

LearnedArrays = Mapping[Stage, Mapping[str, NDArray[np.float32]]]
"""By stage and name: `[B]`, `[B, E]` or `[B, E, E]`."""


def learn(steps: Iterable[Step], training: Any, n_layers: int, n_expert: int) -> LearnedArrays:
    """What the policies of a route learned, by stage.

    Args:
        training: a `simlab.replay.training.Training`, or None: then the values declared for that.

    Raises:
        InputError: a policy must learn and there is nothing to learn from, or `train` failed or returned
            something else than declared.
    """
    return {s.policy.stage: _learned(s.policy, training, n_layers, n_expert) for s in steps}


def _learned(
    policy: RoutingPolicy, training: Any, n_layers: int, n_expert: int
) -> dict[str, NDArray[np.float32]]:
    if policy.train is None:
        return {}
    shapes = {
        name: {"layer": (n_layers,), "expert": (n_layers, n_expert), "pair": (n_layers, n_expert, n_expert)}[
            one.per
        ]
        for name, one in policy.learns.items()
    }
    for name, shape in shapes.items():
        require_memory(4 * math.prod(shape), f"policy {policy.name}: '{name}' of shape {list(shape)}")
    if training is None:
        lacking = [name for name, one in policy.learns.items() if one.untrained is None]
        if lacking:
            raise InputError(
                f"{policy.name} learns '{lacking[0]}' from a part of a trace; "
                "give one with --train 25%, --train OTHER.trace or --train same"
            )
        return {
            name: np.broadcast_to(np.float32(one.untrained), shapes[name])
            for name, one in policy.learns.items()
        }
    try:
        found = policy.train(training)
        if not isinstance(found, Mapping) or set(found) != set(policy.learns):
            given = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            names = ", ".join(policy.learns)
            raise InputError(
                f"policy {policy.name}: what train returns must be a dict of {names}, not {given or 'nothing'}"
            )
        arrays = {name: np.ascontiguousarray(found[name], np.float32) for name in policy.learns}
    except BaseException as error:
        raise policy_error(policy, error) from error
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise InputError(
                f"policy {policy.name}: what train returns: '{name}' has shape {array.shape}, "
                f"declared per {policy.learns[name].per} it must have {shapes[name]}"
            )
        if np.isnan(array).any():
            raise InputError(f"policy {policy.name}: what train returns: '{name}' holds NaN")
    return arrays
