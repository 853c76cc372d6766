"""Lanes spread over the devices there are: the cores of a CPU, or accelerators. Lanes never need each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from simlab.replay.shape import Tree

_AXIS = "lanes"
_CPUS = "jax_num_cpu_devices"
_FEWEST = 8
"""Lanes below which a device spends its time on the steps and not on the lanes."""
_SHARED = frozenset({"units", "line_units", "entry_bytes", "learned"})
"""What all lanes of a group read alike."""


def offer_cores() -> None:
    """Let JAX see every core as a device, unless it has started or was told otherwise."""
    told = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    try:
        if getattr(jax.config, _CPUS) < 0 and not told:
            jax.config.update(_CPUS, len(os.sched_getaffinity(0)))
    except (AttributeError, RuntimeError):
        # Not Linux, or JAX has started: the devices are what they are.
        return


def n_parts(n_lanes: int) -> int:
    """Devices that lanes are spread over: as many as divide them evenly and still have `_FEWEST` each."""
    able = range(2, len(jax.local_devices()) + 1)
    return max((n for n in able if n_lanes % n == 0 and n_lanes // n >= _FEWEST), default=1)


def _of_lanes(tree: Any) -> Any:
    return jax.tree.map(lambda x: PartitionSpec(*[None] * (np.ndim(x) - 1), _AXIS), tree)


def _mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[:n]), (_AXIS,))


def placed(carry: Tree, n_lanes: int) -> Tree:
    """A carry where `spread` wants it; elsewhere it would be moved, and the program compiled, once more."""
    n = n_parts(n_lanes)
    if n == 1:
        return jax.device_put(carry)
    mesh = _mesh(n)

    def put(x: Any, spec: PartitionSpec) -> Any:
        wanted = NamedSharding(mesh, spec)
        # By way of NumPy, since moving what lies on one device would be a program of its own for every shape.
        return x if getattr(x, "sharding", None) == wanted else jax.device_put(np.asarray(x), wanted)

    return jax.tree.map(put, carry, _of_lanes(carry))


def spread(function: Callable[..., Tree], n_lanes: int) -> Callable[..., Tree]:
    """`function(carry, rows, n, lanes) -> carry`, each device with its share of the lanes, an array's last axis."""
    n = n_parts(n_lanes)
    if n == 1:
        return function
    mesh, everywhere = _mesh(n), PartitionSpec()

    def run(carry: Tree, rows: Tree, n_batches: Any, lanes: Tree) -> Tree:
        split = {
            name: jax.tree.map(lambda _: everywhere, x) if name in _SHARED else _of_lanes(x)
            for name, x in lanes.items()
        }
        call = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(_of_lanes(carry), everywhere, everywhere, split),
            out_specs=_of_lanes(carry),
            check_vma=False,
        )
        return call(carry, rows, n_batches, lanes)

    return run
