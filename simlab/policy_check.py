"""Whether a policy does what its contract says: a dry run on tiny arrays, and its failures as one line.

What a policy returns is checked here once, before its first use; what only shows on real rows is reported
by whoever calls it, through `policy_error`.
"""

from __future__ import annotations

import keyword
import traceback
from types import SimpleNamespace
from typing import Any

from simlab.errors import InputError
from simlab.types import (
    Access,
    Candidate,
    Entry,
    EvictionPolicy,
    LearnedValues,
    Policy,
    Rerank,
    RoutingPolicy,
    Row,
    Swap,
)


def one_line(error: BaseException) -> str:
    """An exception's type and message on one line of at most some 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def attribute(knob: str) -> str:
    """A knob's name as an attribute: one that is a word of Python's own has `_` behind it."""
    return knob + "_" if keyword.iskeyword(knob) else knob


def policy_error(policy: Policy, error: BaseException) -> InputError:
    """What a policy's function raised as the one line that names it; Ctrl-C is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, InputError):
        return error
    routing = isinstance(policy, RoutingPolicy)
    functions = [policy.function, *([policy.train, policy.update] if routing else [policy.touch])]
    files = {f.__code__.co_filename for f in functions if hasattr(f, "__code__")}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    where = f"{policy.name}, line {frames[-1].lineno}" if frames else policy.name
    kinds = {c.__name__ for c in type(error).__mro__}
    if "TracerBoolConversionError" in kinds or "truth value of an array" in str(error):
        what = "branches on a value (if, and, or, not, min, max, in); use &, |, ~ and simlab.xp's where and minimum"
    elif "TracerArrayConversionError" in kinds:
        what = "calls NumPy itself; use simlab.xp"
    elif kinds & {"ConcretizationTypeError", "TracerIntegerConversionError"} or "Python scalar" in str(error):
        what = "makes a Python number of its input; keep to operators and simlab.xp"
    elif isinstance(error, AttributeError) and isinstance(error.obj, LearnedValues):
        known = ", ".join(policy.learns if isinstance(policy, RoutingPolicy) else ()) or "nothing"
        what = f"asks for candidate.learned.{error.name}, which it does not declare; it learns {known}"
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
    """Run a policy with NumPy on four candidates or entries and check what it returns, every time; once per process.

    A queue policy is checked by compiling it, before its first use.

    Raises:
        InputError: it raised, returned something else than its contract says, or not the same again.
    """
    declared = (policy.function, tuple(policy.state), policy.needs)
    if isinstance(policy, RoutingPolicy):
        key = (*declared, policy.stage, policy.update, tuple(policy.learns.items()), policy.ordered)
    else:
        key = (*declared, policy.touch, policy.kind)
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


def _answers(policy: Policy) -> Any:
    """All a policy returns in a dry run; a queue policy has none without being compiled."""
    if isinstance(policy, RoutingPolicy):
        return _try_routing(policy)
    return _try_eviction(policy) if policy.kind != "queue" else ()


def _same(one: Any, other: Any) -> bool:
    import numpy as np

    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    return one is other or np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind in "fc")


def _try_routing(policy: RoutingPolicy) -> Any:
    import numpy as np

    from simlab.routing import knob_values

    knobs = knob_values(policy.knobs, {})
    if policy.stage == "width":
        k = policy.function(np.int32(2), knobs)
        _check_value(policy, "the k it returns", k, "iu", "a whole number", ())
        return k

    def column(need: str | None, values: Any, dtype: Any) -> Any:
        array = np.array(values if need is None or need in policy.needs else [0] * 4, dtype)
        array.flags.writeable = False
        return array

    candidate = Candidate(
        value=column("scores", [0.5, 0.25, -1, -3], np.float32),
        expert=column(None, range(4), np.int32),
        rank=column("rank" if policy.stage != "drop" else None, range(4), np.int32),
        resident=column(None, [0, 1, 0, 1] if policy.uses_cache else [0] * 4, bool),
        weight=column("weights", [0.5, 0.25, 0.125, 0.125], np.float32),
        mass=column("mass", [0, 0.5, 0.75, 0.875], np.float32),
        lighter=column("lighter", [1, 0.5, 0.25, 0.125], np.float32),
        learned=LearnedValues(**{name: column(None, [1] * 4, np.float32) for name in policy.learns}),
    )
    row = Row(
        np.int32(2), np.int32(0), np.float32(0.5), np.float32(3.5), np.int32(2 if policy.uses_cache else 0),
        np.float32(0.5),
    )  # fmt: skip
    state = tuple(np.float32(value) for value in policy.state.values())
    if policy.update is not None:
        state = policy.update(row, state, knobs)
        _check_state(policy, "what update returns", state, ())
    found = policy.function(candidate, row, state, knobs)
    if policy.stage == "drop":
        _check_value(policy, "what it returns", found, "b", "bool", (4,))
        return found, state
    kind = Rerank if policy.stage == "rerank" else Swap
    if not isinstance(found, kind):
        raise _bad(policy, f"must return {kind.__name__}({', '.join(kind._fields)}), not {_described(found)}")
    name = kind.__name__
    _check_value(policy, f"{name}.value", found.value, "fiub", "numbers", (4,))
    _check_value(policy, f"{name}.active", found.active, "b", "bool, one per row", ())
    if isinstance(found, Swap):
        _check_value(policy, f"{name}.replace", found.replace, "b", "bool", (4,))
        return tuple(found), state
    _check_value(policy, f"{name}.tier", found.tier, "iub", "whole numbers", (4,))
    if policy.ordered:
        # Candidates two places apart are alike in residency, and the last two are none of the router's two picks.
        tier, value = (np.broadcast_to(x, (4,)) for x in (found.tier, found.value))
        behind = (tier[:2] < tier[2:]) | ((tier[:2] == tier[2:]) & (value[:2] < value[2:]))
        if behind.any():
            raise _bad(policy, "is declared ordered, but puts the lower of two scores first")
    return tuple(found), state


def _try_eviction(policy: EvictionPolicy) -> Any:
    import numpy as np

    from simlab.routing import first_state, knob_values

    knobs, expert = knob_values(policy.knobs, {}), np.arange(4, dtype=np.int32)
    state = tuple(first_state(policy.state, (4,)).values())
    position, batch, none = np.array([3, 1, 7, 5]), np.int64(4), np.zeros(4, bool)
    if policy.touch is not None:
        first = np.array([True, True, False, True])
        weight = np.full(4, 0.25, np.float32)
        access = Access(position, first, first & (expert > 0), weight, batch, np.int32(0), expert)
        state = policy.touch(state, access, knobs)
        _check_state(policy, "what touch returns", state, (4,))
    key = policy.function(Entry(position, np.int32(0), expert, none, none, batch), state, knobs)
    _check_value(policy, "the key it returns", key, "iuf", "a number", (4,))
    if policy.kind == "static":
        later = Entry(position, np.int32(0), expert, ~none, ~none, batch + 40)
        if not np.array_equal(
            np.broadcast_to(key, (4,)), np.broadcast_to(policy.function(later, state, knobs), (4,))
        ):
            raise _bad(policy, "is declared static, but its key changes with entry.batch; declare it dynamic")
    return key, state


def _check_state(policy: Policy, what: str, new: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(new, tuple) or len(new) != len(policy.state):
        names = ", ".join(policy.state) or "nothing"
        raise _bad(policy, f"{what} must be a tuple of what it declared ({names}), not {_described(new)}")
    for name, value in zip(policy.state, new, strict=True):
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
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _bad(policy: Policy, text: str) -> InputError:
    return InputError(f"policy {policy.name}: {text}")
