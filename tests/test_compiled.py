"""Compiled code that is kept on disk: damage and a full disk cost a warning, never a result."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from simlab.cli import traces
from simlab.cli.main import main
from simlab.compiled import _Files, compiled
from simlab.errors import InputError, SimlabWarning
from simlab.replay import programs


def twice(x: int) -> int:
    return 2 * x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """numba's cache of `twice`, filled."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert compiled(twice)(21) == 42
    assert {file.suffix for file in tmp_path.rglob("*.nb?")} == {".nbi", ".nbc"}
    return tmp_path


def test_what_was_kept_is_used(folder: Path) -> None:
    made: Any = compiled(twice)
    assert made(21) == 42
    assert sum(made.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_is_damaged_is_compiled_anew(folder: Path, suffix: str, cut: bool) -> None:
    (file,) = folder.rglob(f"*{suffix}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data[: len(data) // 3] if cut else data)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert compiled(twice)(21) == 42
    # One flipped bit of an index may only name a file that is not there, which is no damage to anything.
    assert {str(w.message).partition(": ")[2].partition(" (")[0] for w in seen} <= {
        "compiled code there is damaged"
    }
    assert seen or (suffix == ".nbi" and not cut)
    made: Any = compiled(twice)
    assert made(21) == 42
    assert sum(made.stats.cache_hits.values()) == 1


def test_a_place_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    made = compiled(twice)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_Files, "_save_index", full)
    with pytest.warns(SimlabWarning, match=r"compiled code cannot be kept there \(No space left on device\)"):
        assert made(21) == 42


@pytest.mark.filterwarnings("default:Error writing")
def test_a_jax_cache_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: Any) -> None:
        for name in ("jit_scan", "jit_other"):
            warnings.warn(
                f"Error writing persistent compilation cache entry for '{name}': OSError: full", stacklevel=1
            )

    monkeypatch.setattr(traces, "_info", run)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/c")
    assert main(["info", "x"]) == 0
    line = "simlab: warning: compiled programs cannot be kept in /c (OSError: full); compiling them anew\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Backend 'x' is unknown. (set JAX_PLATFORMS='')")]
)
def test_a_platform_that_is_not_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "x")
    monkeypatch.setattr(programs.jax, "default_backend", refuse)
    with pytest.raises(
        InputError, match=r"^JAX_PLATFORMS=x: JAX cannot use that here.*; unset it, or set it to cpu$"
    ):
        programs.backend()
