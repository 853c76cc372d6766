"""Files that are written beside their place and renamed into it."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import polars as pl
import pytest

from simlab.cli.output import write_frame
from simlab.errors import RunError
from simlab.files import replacing

SIMLAB = Path(__file__).parent.parent / "simlab"


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    mask = os.umask(0o022)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask

    def fail_halfway() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise EOFError

    with pytest.raises(EOFError):
        fail_halfway()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name once written, and under today's, were it ever guessed."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    path = tmp_path / "table.csv"
    (tmp_path / f".table.csv.{os.getpid()}.tmp").symlink_to(theirs)
    write_frame(path, pl.DataFrame({"a": [1]}))
    assert theirs.read_text() == "theirs"
    assert path.read_text() == "a\n1\n"
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".simlab-guessed.tmp").symlink_to(theirs)
    with pytest.raises(RunError, match=r"table\.csv: writing failed: File exists"):
        write_frame(path, pl.DataFrame({"a": [2]}))
    assert theirs.read_text() == "theirs"
    assert path.read_text() == "a\n1\n"


def test_every_rename_over_a_file_goes_by_one_helper() -> None:
    renames = {
        p.relative_to(SIMLAB).as_posix()
        for p in SIMLAB.rglob("*.py")
        if re.search(r"os\.(replace|rename)\(", p.read_text())
    }
    assert renames == {"files.py"}
