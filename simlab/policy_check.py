"""Whether a policy does what its contract says: a dry run on tiny arrays, and its failures as one line.

What a policy returns is checked here once, before its first use; what only shows on real rows is reported
by whoever calls it, through `policy_error`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from simlab.errors import InputError
from simlab.types import (
    Access,
    CacheState,
    Candidates,
    Choice,
    EvictionPolicy,
    LearnedValues,
    Policy,
    RoutingPolicy,
    Row,
)


def one_line(error: BaseException) -> str:
    """An exception's type and message on one line of at most some 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def policy_error(policy: Policy, error: BaseException) -> InputError:
    """What a policy's function raised as the one line that names it; Ctrl-C is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, InputError):
        return error
    functions = [policy.function, policy.train if isinstance(policy, RoutingPolicy) else policy.touch]
    files = {f.__code__.co_filename for f in functions if hasattr(f, "__code__")}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    where = f"{policy.name}, line {frames[-1].lineno}" if frames else policy.name
    kinds = {c.__name__ for c in type(error).__mro__}
    if "TracerBoolConversionError" in kinds or "truth value of an array" in str(error):
        what = "branches on a value (if, and, or, not, min, max, in); use xp.where, &, |, ~, xp.minimum"
    elif "TracerArrayConversionError" in kinds:
        what = "calls NumPy itself; use xp, which is NumPy live and jax.numpy in a replay"
    elif kinds & {"ConcretizationTypeError", "TracerIntegerConversionError"} or "Python scalar" in str(error):
        what = "makes a Python number of an array; keep to xp and arrays"
    elif isinstance(error, AttributeError) and isinstance(error.obj, LearnedValues):
        known = ", ".join(policy.learns if isinstance(policy, RoutingPolicy) else ()) or "nothing"
        what = f"asks for candidates.learned.{error.name}, which it does not declare; it learns {known}"
    elif isinstance(error, AttributeError) and isinstance(error.obj, SimpleNamespace):
        known = ", ".join(policy.knobs) or "none"
        what = f"asks for knob '{error.name}', which it does not declare; it declares {known}"
    else:
        what = f"raised {one_line(error)}"
    return InputError(f"policy {where}: {what}")


class WrongValueError(InputError):
    """A policy's value is NaN, or +inf though nothing it was given is."""


def wrong_value(policy: Policy, entry: str, place: str) -> WrongValueError:
    """The error that names the policy, whose value it is, and where it was made."""
    what = "value" if isinstance(policy, RoutingPolicy) else "key"
    return WrongValueError(
        f"policy {policy.name}: its {what} of {entry} is NaN or +inf at {place}; only -inf may be"
    )


_PROBES = 8
"""Times a policy is asked the same: a flipped coin is found out but for 1 in 128."""
_CHECKED: set[tuple[Any, ...]] = set()


def check_policy(policy: Policy) -> None:
    """Run a policy with NumPy on four candidates and check what it returns, every time; once per process.

    Raises:
        InputError: it raised, returned something else than its contract says, or not the same again.
    """
    if isinstance(policy, RoutingPolicy):
        declared = (tuple(policy.state), policy.needs, tuple(policy.learns.items()), policy.ordered)
        key = (policy.function, policy.stage, *declared)
    else:
        key = (policy.function, policy.touch, tuple(policy.state), tuple(policy.scalars), policy.needs)
    if key in _CHECKED:
        return
    import numpy as np

    try:
        with np.errstate(all="ignore"):
            first = _answers(policy)
            if not all(_same(first, _answers(policy)) for _ in range(_PROBES - 1)):
                raise _bad(
                    policy,
                    "answers differently when it is asked the same again; it must go by its arguments alone, "
                    "not by chance, time or what it kept",
                )
    except BaseException as error:
        raise policy_error(policy, error) from error
    _CHECKED.add(key)


def _answers(policy: Policy) -> list[Any]:
    """All a policy returns in a dry run."""
    if isinstance(policy, EvictionPolicy):
        return _try_eviction(policy)
    return [_try_routing(policy, rows) for rows in ([()] if policy.stage == "width" else [(), (2,)])]


def _same(one: Any, other: Any) -> bool:
    import numpy as np

    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is other or np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind in "fc")


def _try_routing(policy: RoutingPolicy, lanes: tuple[int, ...]) -> Any:
    """One row where `lanes` is empty, as in a live decode; several rows at once otherwise."""
    import numpy as np

    from simlab.routing import knob_values

    k, shape = 2, (4, *lanes)

    def column(need: str | None, values: Any, dtype: Any) -> Any:
        values = values if need is None or need in policy.needs else [0] * 4
        array = np.resize(np.repeat(np.array(values, dtype), shape[1] if lanes else 1), shape)
        # Live, what a policy is given may be the engine's own memory.
        array.flags.writeable = False
        return array

    def learned(per: str) -> Any:
        ones = np.ones({"layer": lanes, "expert": shape, "pair": (k, *shape)}[per], np.float32)
        return ones[()]

    def of_row(value: float, dtype: Any) -> Any:
        return np.full(lanes, value, dtype)[()]

    candidates = Candidates(
        value=column("scores", [0.5, 0.25, -1, -3], np.float32),
        expert=column(None, range(4), np.int32),
        rank=column("rank" if policy.stage == "rerank" else None, range(4), np.int32),
        resident=column(None, [0, 1, 0, 1] if policy.uses_cache else [0] * 4, bool),
        weight=column("weights", [0.5, 0.25, 0.125, 0.125], np.float32),
        mass=column("mass", [0, 0.5, 0.75, 0.875], np.float32),
        lighter=column("lighter", [1, 0.5, 0.25, 0.125], np.float32),
        learned=LearnedValues(**{name: learned(one.per) for name, one in policy.learns.items()}),
    )
    row = Row(
        of_row(k, np.int32),
        of_row(0, np.int32),
        of_row(0.5, np.float32),
        of_row(3.5, np.float32),
        of_row(2 if policy.uses_cache else 0, np.int32),
        of_row(0.5, np.float32),
    )
    state = {name: of_row(value, np.float32) for name, value in policy.state.items()}
    returned = policy.function(np, candidates, row, state, knob_values(policy.knobs, {}))
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Choice):
        raise _bad(policy, f"must return (Choice(...), state), not {_described(returned)}")
    choice, new_state = returned
    if policy.stage == "width":
        _check_value(policy, "Choice(k=...)", choice.k, "iu", "a whole number", lanes)
    elif policy.stage == "rerank":
        _check_value(policy, "Choice(value=...)", choice.value, "fiub", "numbers", shape)
        _check_value(policy, "Choice(tier=...)", choice.tier, "iub", "whole numbers", shape)
        _check_value(policy, "Choice(active=...)", choice.active, "b", "bool, one per row", lanes)
        if policy.ordered:
            # Three of them, but two are in RAM: what a policy makes of all others alike may then be picked.
            wider = policy.function(
                np, candidates, row._replace(k=of_row(3, np.int32)), state, knob_values(policy.knobs, {})
            )[0]
            if not _is_ordered(choice, shape, strictly=False) or (
                np.any(wider.active) and not _is_ordered(wider, shape, strictly=True)
            ):
                raise _bad(
                    policy,
                    "is declared ordered, but does not put the higher of two scores first, or makes them one",
                )
    elif policy.stage == "swap":
        _check_value(policy, "Choice(replace=...)", choice.replace, "b", "bool", shape)
        by_slot = np.ndim(choice.value) > len(shape)
        _check_value(
            policy, "Choice(value=...)", choice.value, "fiub", "numbers", (k, *shape) if by_slot else shape
        )
        _check_value(policy, "Choice(active=...)", choice.active, "b", "bool, one per row", lanes)
    else:
        _check_value(policy, "Choice(drop=...)", choice.drop, "b", "bool", shape)
    if policy.state:
        _check_new_state(policy, "the state it returns", new_state, lanes)
    return choice, new_state if policy.state else None


def _is_ordered(choice: Choice, shape: tuple[int, ...], *, strictly: bool) -> bool:
    """Whether of four candidates, best first, two places apart alike in residency, the better comes first.

    Args:
        strictly: also where both are at -inf, which is where a policy puts what must not be picked.
    """
    import numpy as np

    ranked = [np.broadcast_to(x, shape) for x in (choice.tier, choice.value)]
    (tier, lower_tier), (value, lower_value) = ((x[:2], x[2:]) for x in ranked)
    first = (tier > lower_tier) | ((tier == lower_tier) & (value > lower_value))
    shut_out = (tier == lower_tier) & (value == lower_value) & np.isneginf(value)
    return bool(np.all(first if strictly else first | shut_out))


def _try_eviction(policy: EvictionPolicy) -> list[Any]:
    import numpy as np

    from simlab.routing import entry_facts, first_state, knob_values

    position, batch, knobs = np.array([3, 1, 7, 5]), np.int64(4), knob_values(policy.knobs, {})
    state, expert = first_state(policy.state, (4,)), np.arange(4, dtype=np.int32)
    answers: list[Any] = []
    if policy.key is not None:
        facts = entry_facts(policy, np.int32(0), expert, position > 5, position > 9)
        key = policy.key(np, state | facts, position, batch, knobs)
        _check_value(policy, "the key it returns", key, "iuf", "int64 or float64", (4,))
        answers.append(key)
    if policy.touch is not None:
        first = np.array([True, True, False, True])
        weight = np.full(4, 0.25, np.float32)
        access = Access(position, first, first & (expert > 0), weight, batch, np.int32(0), expert)
        answers.append(policy.touch(np, state, access, knobs))
        _check_new_state(policy, "what touch returns", answers[-1], (4,))
    if policy.evict is not None:
        answers += [_try_whole_cache(policy, ()), _try_whole_cache(policy, (2,))]
    return answers


def _try_whole_cache(policy: EvictionPolicy, lanes: tuple[int, ...]) -> Any:
    """A cache of four entries of 10 bytes, of which the last one's batch brought it 10 bytes over budget."""
    import numpy as np

    from simlab.routing import first_state, knob_values

    def column(values: list[Any], dtype: Any) -> Any:
        return (
            np.repeat(np.array(values, dtype), lanes[0]).reshape(-1, *lanes)
            if lanes
            else np.array(values, dtype)
        )

    cache = CacheState(
        resident=column([1, 1, 1, 1, 0], bool),
        touched=column([0, 0, 0, 1, 0], bool),
        hit=column([0] * 5, bool),
        position=column([3, 1, 5, 7, 2], np.int64),
        bytes=column([10] * 5, np.int64),
        over=np.full(lanes, 10, np.int64)[()],
        capacity=np.full(lanes, 30, np.int64)[()],
        batch=np.int64(4),
    )
    state = first_state(policy.state, (5, *lanes)) | first_state(policy.scalars, lanes)
    assert policy.evict is not None
    returned = policy.evict(np, cache, dict(state), knob_values(policy.knobs, {}))
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _bad(policy, f"must return (leaving, state), not {_described(returned)}")
    leaving, new_state = returned
    _check_value(policy, "the entries that leave", leaving, "b", "bool", cache.resident.shape)
    leaves = np.broadcast_to(leaving, cache.resident.shape) & cache.resident
    if not policy.bypass and (leaves & cache.touched).any():
        raise _bad(
            policy, "evicts an entry of the batch itself; leave out cache.touched, or declare bypass=True"
        )
    if ((leaves * cache.bytes).sum(axis=0) < cache.over).any():
        raise _bad(policy, "leaves the cache above its budget though entries could go; free cache.over bytes")
    names = {**policy.state, **policy.scalars}
    if not isinstance(new_state, Mapping) or set(new_state) != set(names):
        listed = ", ".join(names) or "nothing"
        raise _bad(
            policy,
            f"the state it returns must be a dict of what it declared ({listed}), not {_described(new_state)}",
        )
    for name, value in new_state.items():
        shape = (5, *lanes) if name in policy.state else lanes
        _check_value(policy, f"the state it returns: '{name}'", value, "fiub", "numbers", shape)
    return returned


def _check_new_state(policy: Policy, what: str, new: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(new, Mapping) or set(new) != set(policy.state):
        names = ", ".join(policy.state) or "nothing"
        raise _bad(policy, f"{what} must be a dict of what it declared ({names}), not {_described(new)}")
    for name, value in new.items():
        _check_value(policy, f"{what}: '{name}'", value, "fiub", "numbers", shape)


def _check_value(
    policy: Policy, what: str, value: Any, kinds: str, words: str, shape: tuple[int, ...]
) -> None:
    """Refuse what is not a number or NumPy array of these dtype kinds that broadcasts to `shape`."""
    import numpy as np

    if value is None or not isinstance(value, (np.ndarray, np.generic, int, float)):
        raise _bad(policy, f"{what} must be {words}, not {_described(value)}")
    array = np.asarray(value)
    if array.dtype.kind not in kinds:
        raise _bad(policy, f"{what} must be {words}, not {array.dtype}")
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise _bad(policy, f"{what} has shape {array.shape} where its inputs have {shape}")


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, Choice):
        return "a Choice alone"
    return "None" if value is None else f"a {type(value).__name__}"


def _bad(policy: Policy, text: str) -> InputError:
    return InputError(f"policy {policy.name}: {text}")
