"""However a command ends, it says so in one line, and leaves nothing half done."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from simlab.cli import signals
from simlab.errors import RunError, Terminated
from simlab.judge.scores.scoring import Results

_TRACE = Path(__file__).parents[1] / "traces/original.trace"
_SIMLAB = f"{sys.executable} -c 'from simlab.cli.main import entry; entry()'"


def shell(command: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command line in which SIMLAB stands for the command."""
    done = subprocess.run(["bash", "-c", command.replace("SIMLAB", _SIMLAB)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("SIMLAB policies >&-", (1, "", "simlab: error: stdout: cannot be written: Bad file descriptor\n")),
        (
            "SIMLAB policies >/dev/full",
            (1, "", "simlab: error: stdout: cannot be written: No space left on device\n"),
        ),
        ("SIMLAB info none.trace 2>&-", (2, "", "")),
        ("SIMLAB info none.trace 2>/dev/full", (2, "", "")),
        (
            "SIMLAB info $'\\xff.trace'",
            (
                2,
                "",
                "simlab: error: \\udcff.trace: is not UTF-8; rename the file, or link to it by another name\n",
            ),
        ),
    ],
)
def test_streams_and_names_that_cannot_be_used(command: str, expected: tuple[int, str, str]) -> None:
    assert shell(command) == expected


# -- signals ----------------------------------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[None]:
    """The handlers of a command, for a while."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signals.raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_waits_for_the_end_of_fragile_code(number: int, kind: type, handled: None) -> None:
    fragile = types.ModuleType("numba.core.something")
    exec("def run(act, done):\n    act()\n    for i in range(1000): done.append(i)", fragile.__dict__)
    done: list[int] = []

    def run() -> None:
        fragile.run(lambda: signal.raise_signal(number), done)
        done.clear()

    with pytest.raises(kind) as raised:
        run()
    assert type(raised.value) is kind
    assert len(done) == 1000


_DURING_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from simlab.cli.main import entry
sys.argv = ["simlab", "replay", {trace!r}, "--budget", "2cycles"]
entry()
"""


@pytest.mark.parametrize(
    ("number", "module", "status", "word"),
    [
        (signal.SIGINT, "simlab.cli.options", 130, "interrupted"),
        (signal.SIGTERM, "jaxlib", 143, "terminated"),
    ],
)
def test_a_signal_while_packages_load(number: int, module: str, status: int, word: str) -> None:
    code = _DURING_IMPORT.format(number=int(number), module=module, trace=str(_TRACE))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"simlab: {word}\n")


_DURING_SCORE = """
import os, signal, sys
from simlab.judge.scores import scoring
scoring.counts_of = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
from simlab.cli.main import entry
entry()
"""


@pytest.mark.slow
def test_a_terminated_score_leaves_no_temporary_folder(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of some words")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ["ppl", "--text", str(text), "--budget", "2cycles"]
    done = subprocess.run(
        [sys.executable, "-c", _DURING_SCORE, *words],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (143, "simlab: terminated\n")
    assert list(temporary.iterdir()) == []


# -- a full disk ------------------------------------------------------------------------------------------


def test_a_full_disk_under_resume_loses_no_finished_item(tmp_path: Path) -> None:
    path, asked = tmp_path / "r.jsonl", {"score": "ppl"}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run() -> None:
        with Results(path, asked) as results:
            results.add(0, 0, {"x": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
            results.add(0, 1, {"x": 2})

    try:
        with pytest.raises(RunError, match=r"^--resume .*r.jsonl: writing failed: File too large"):
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with Results(path, asked) as results:
        assert results.get(0, 0) == {"x": 1}
        assert results.get(0, 1) is None
        results.add(0, 1, {"x": 2})
    with Results(path, asked) as results:
        assert results.get(0, 1) == {"x": 2}
