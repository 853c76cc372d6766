"""One writer per folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_trace_store import HEADER, WIDTH

from simlab.errors import InputError, SimlabWarning
from simlab.locks import locked
from simlab.trace.store import TraceWriter, open_trace, prepare_folder

_HOLD = """
import pathlib, sys, simlab.locks
with simlab.locks.locked(pathlib.Path(sys.argv[1]), "x"):
    print(flush=True), input()
"""


def test_another_process_is_kept_out_until_it_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with (
            pytest.raises(InputError, match=r"^--keep D: another command is writing it"),
            locked(tmp_path, "--keep D"),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked(tmp_path, "--keep D"):
        assert list(tmp_path.iterdir()) == []


def test_a_folder_put_in_place_while_locking_is_not_the_one_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()

    def replaced(*_: int) -> None:
        folder.rename(tmp_path / "old")
        folder.mkdir()

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(InputError, match="another command is writing it"), locked(folder, "--out t"):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.warns(SimlabWarning, match=r"cannot be locked here \(No locks available\)"),
        locked(tmp_path, "x"),
    ):
        pass


def test_force_leaves_a_running_recording_alone(tmp_path: Path) -> None:
    folder = tmp_path / "t.trace"
    with TraceWriter(folder, HEADER, WIDTH):
        with pytest.raises(InputError, match=r"^--out .*t.trace: another command is writing it"):
            prepare_folder(folder, force=True)
        with pytest.raises(InputError, match="another command is writing it"):
            TraceWriter(folder, HEADER, WIDTH)
    assert open_trace(folder).header.complete
    assert not prepare_folder(folder, force=True).exists()


def test_a_recording_that_failed_gives_its_folder_free(tmp_path: Path) -> None:
    folder = tmp_path / "t.trace"
    with pytest.raises(ZeroDivisionError), TraceWriter(folder, HEADER, WIDTH):
        raise ZeroDivisionError
    assert not prepare_folder(folder, force=True).exists()
