"""What a rerank policy gives every expert of a row, in RAM or not: its function run by JAX for all settings at once.

If all a policy looks at is the row's scores and whether the expert is in RAM, each expert has one value of two, and
both are known before any lane is walked. The loop of `routed_loop.py` then only chooses between them.

Shapes: `n` rows, `S` settings of the knobs, `E` experts per layer in score order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import padded
from simlab.replay.lanes import padded_lanes
from simlab.replay.programs import compiled
from simlab.replay.routes import declared
from simlab.replay.shape import Tree
from simlab.replay.shared_order import used
from simlab.routing import NO_EXPERT, decide, is_wrong, knob_values
from simlab.types import Array, Candidates, Choice, RoutingPolicy, Row, Step

_KNOWN: dict[Hashable, bool] = {}


def is_known_beforehand(step: Step) -> bool:
    """Whether a rerank policy's values of a row depend on nothing but the row and each expert's residency."""
    policy = step.policy
    if not policy.ordered or policy.state or policy.learns:
        return False
    if _code(policy) not in _KNOWN:
        _KNOWN[_code(policy)] = _depends_on_row_alone(step)
    return _KNOWN[_code(policy)]


def _code(policy: RoutingPolicy) -> Hashable:
    """Equal where the policies' code is the same, as for `code_key`."""
    knobs = tuple((name, knob.integer) for name, knob in policy.knobs.items())
    return policy.function, policy.uses_cache, knobs


def _depends_on_row_alone(step: Step) -> bool:
    flat = False

    def chosen(given: Tree) -> tuple[Array, Array]:
        nonlocal flat
        facts = given["facts"] | {"n_resident": given["n_resident"]}
        choice = _choice(step, given["experts"], facts, given["knobs"])
        flat = isinstance(choice.tier, int)
        return choice.value, jnp.asarray(choice.active)

    one, ids = np.int32(1), np.arange(3, dtype=np.int32)
    made_of = used(
        chosen,
        {
            "experts": {"value": np.zeros(3, np.float32), "expert": ids, "resident": ids > 0},
            "facts": {"k": one, "layer": one, "top": np.float32(1), "range": np.float32(1)},
            "knobs": vars(knob_values(step.policy.knobs, {})),
            "n_resident": one,
        },
    )
    return made_of is not None and not made_of["n_resident"] and flat


def _choice(step: Step, experts: Tree, facts: Tree, knobs: Tree) -> Choice:
    """What the policy makes of experts, `value`, `expert` and `resident` `[C]`, of one row."""
    nothing = jnp.zeros_like(experts["expert"])
    candidates = Candidates(rank=nothing, weight=nothing.astype(jnp.float32), **experts)
    row = Row(**{name: jnp.asarray(x) for name, x in facts.items()})
    return decide(jnp, step, declared(step, candidates), row, {}, SimpleNamespace(**knobs))[0]


def keys(
    step: Step, k: int, rows: Mapping[str, NDArray[Any]], knobs: Mapping[str, NDArray[Any]], n_rows: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.int32]]:
    """`key` and `active` of `Rows`, and `Rerouted.wrong` whatever is in RAM, for these settings and some more.

    Args:
        k: slots of a row. rows: `layer`, `top`, `range` `[n]`; `order`, `ranked` `[n, E]`, experts and their values in
            score order. knobs: by name `[S]`. n_rows: that the program is compiled for, n or more.
    """
    n = len(rows["layer"])
    given = padded({name: rows[name] for name in ("layer", "top", "range", "order", "ranked")}, n_rows)
    n_settings = len(next(iter(knobs.values()))) if knobs else 1
    # As with lanes, a few sizes share a program; nobody asks for the settings that repeat the last.
    size = padded_lanes(n_settings)
    known = {name: np.pad(v, (0, size - n_settings), "edge") for name, v in knobs.items()}
    known[""] = np.zeros(size, np.float32)

    def chosen(row: Tree, knobs: Tree) -> tuple[Array, Array, Array]:
        both = (2, row["order"].size)
        experts = {
            name: jnp.broadcast_to(row[of], both) for name, of in (("value", "ranked"), ("expert", "order"))
        }
        experts["resident"] = jnp.broadcast_to(np.array([[False], [True]]), both)
        facts = {name: row[name] for name in ("layer", "top", "range")}
        facts |= {"k": jnp.int32(k), "n_resident": jnp.int32(0)}
        choice = _choice(step, experts, facts, {name: v for name, v in knobs.items() if name})
        key = jnp.where(jnp.isnan(choice.value), -jnp.inf, choice.value)
        wrong = is_wrong(jnp, choice.value, experts["value"])
        expert = jnp.where(wrong, experts["expert"], NO_EXPERT).min().astype(jnp.int32)
        return key, jnp.broadcast_to(jnp.asarray(choice.active, bool), ()), expert

    of_settings = jax.vmap(chosen, in_axes=(None, 0))
    function = jax.vmap(of_settings, in_axes=(0, None))
    call = compiled(("routed keys", _code(step.policy), k, given["order"].shape, size), function)
    key, active, wrong = (np.asarray(x)[:n] for x in call(given, known))
    return key, active & (np.arange(size) < n_settings), wrong
