"""A trace at a URL is copied once and replays as the folder does."""

from __future__ import annotations

import shutil

import pytest
from synthetic import generate, make_header

from simlab.errors import InputError
from simlab.trace.remote import cache_folder, is_url, local_copy
from simlab.trace.store import open_trace


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return generate(make_header(), n_decode=3).write(tmp_path / "t.trace")


def test_a_folder_is_no_url(tmp_path):
    assert local_copy(str(tmp_path)) == str(tmp_path)
    assert not is_url("C:/traces/t.trace")
    assert is_url("s3://bucket/t.trace")


def test_without_fsspec_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs fsspec; pip install"):
        local_copy("s3://bucket/t.trace")


def test_a_copy_is_made_once_and_anew_for_another_recording(trace):
    pytest.importorskip("fsspec")
    url = f"file://{trace.path}/"
    first = local_copy(url)
    assert first.startswith(str(cache_folder()))
    assert open_trace(first).routing.collect().equals(trace.routing.collect())
    (trace.path / "routing").rename(trace.path / "gone")
    assert local_copy(url) == first, "what is here already is not asked for again"
    shutil.rmtree(trace.path)
    other = generate(make_header(), n_decode=4).write(trace.path)
    second = local_copy(url)
    assert second != first
    assert open_trace(second).n_rows == other.n_rows


def test_half_a_copy_is_begun_again(trace):
    pytest.importorskip("fsspec")
    target = local_copy(f"file://{trace.path}")
    shutil.rmtree(target)
    half = cache_folder() / target.rpartition("/")[2].replace(".trace", ".half")
    half.mkdir()
    (half / "rubbish").write_text("left by a copy that was killed")
    assert local_copy(f"file://{trace.path}") == target
    assert not half.exists()
    assert open_trace(target).n_rows == trace.n_rows
    assert "rubbish" not in {p.name for p in open_trace(target).path.iterdir()}


@pytest.mark.parametrize("url", ["file:///nowhere/t.trace", "nosuch://bucket/t.trace"])
def test_where_there_is_no_trace_is_one_line(url, trace):
    pytest.importorskip("fsspec")
    with pytest.raises(InputError, match="no trace there"):
        local_copy(url)
