"""Compiled programs are kept between commands, where the user lets them."""

from __future__ import annotations

import os

import pytest

from simlab.cli import programs


@pytest.fixture
def environment(monkeypatch, tmp_path):
    monkeypatch.setattr(programs.os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    return programs.os.environ


def of_jax(environment):
    return {name: value for name, value in environment.items() if name.startswith("JAX_")}


def test_a_folder_of_this_processor_is_made_and_named(environment, tmp_path):
    programs.keep_programs()
    folder = tmp_path / "simlab" / "programs" / programs.processor()
    assert folder.is_dir()
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert float(environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]) < 1


def test_what_the_user_set_stands(environment, tmp_path):
    environment["JAX_COMPILATION_CACHE_DIR"] = "elsewhere"
    programs.keep_programs()
    assert of_jax(environment) == {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named_for_jax_to_warn_of(environment, tmp_path):
    (tmp_path / "simlab").write_text("in the way")
    programs.keep_programs()
    assert of_jax(environment)["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path / "simlab"))


def test_programs_used_least_lately_go_first(tmp_path):
    for age, name in enumerate(("new", "read_lately", "old", "oldest")):
        (tmp_path / name).write_bytes(bytes(100))
        at = 1_000_000 - 1000 * age
        os.utime(tmp_path / name, (at + 5000 if name == "read_lately" else at, at))
    programs.bound(tmp_path, 400)
    assert len(list(tmp_path.iterdir())) == 4
    programs.bound(tmp_path, 250)
    assert {file.name for file in tmp_path.iterdir()} == {"new", "read_lately"}
    programs.bound(tmp_path / "missing", 0)


def test_the_kept_programs_are_bounded(environment, tmp_path, monkeypatch):
    programs.keep_programs()
    folder = tmp_path / "simlab" / "programs" / programs.processor()
    (folder / "program-cache").write_bytes(bytes(10))
    programs.keep_programs()
    assert (folder / "program-cache").exists()
    del environment["JAX_COMPILATION_CACHE_DIR"]
    monkeypatch.setattr(programs, "MOST_BYTES", 9)
    programs.keep_programs()
    assert not any(folder.iterdir())


def test_processors_differ_by_their_flags(tmp_path):
    names = set()
    for number, flags in enumerate(("sse2 avx2", "sse2 avx2 avx512f")):
        file = tmp_path / str(number)
        file.write_text(f"processor : 0\nflags : {flags}\n\nprocessor : 1\nflags : {flags}\n")
        names.add(programs.processor(file))
    assert len(names) == 2
    assert len(programs.processor(tmp_path / "missing")) == 8
    assert os.sep not in programs.processor()
