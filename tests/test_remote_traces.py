"""A trace at a URL is copied once and replays as the folder does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from synthetic import generate, make_header
from test_trace_store import HEADER, WIDTH, add_graph

from simlab.errors import InputError, SimlabWarning
from simlab.trace.remote import cache_folder, is_url, local_copy
from simlab.trace.store import TraceWriter, open_trace


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
    part = Path(first, "routing/part-000000.parquet")
    before = part.stat()
    assert local_copy(url) == first
    assert part.stat() == before, "what is here already is not copied again"
    shutil.rmtree(trace.path)
    other = generate(make_header(), n_decode=4).write(trace.path)
    second = local_copy(url)
    assert second != first
    assert open_trace(second).n_rows == other.n_rows


def test_a_recording_that_grew_or_was_rewritten_is_copied_anew(tmp_path, monkeypatch):
    """Its header does not change while it goes on; a part rewritten in place may keep even its size."""
    pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "t.trace"
    writer = TraceWriter(source, HEADER, WIDTH)
    n_graphs = []
    for graph in range(2):
        add_graph(writer, graph)
        writer.flush()
        with pytest.warns(SimlabWarning, match="did not finish"):
            n_graphs.append(open_trace(local_copy(f"file://{source}")).tokens.collect().height)
    assert n_graphs == [1, 2]
    before = local_copy(f"file://{source}")
    part = source / "tokens/part-000001.parquet"
    os.utime(part, ns=(0, 0))
    assert local_copy(f"file://{source}") != before


def test_a_copy_has_a_limit(trace, monkeypatch):
    """Refused by what is listed, and where the listing says nothing, by what comes; nothing stays either way."""
    fsspec = pytest.importorskip("fsspec")
    size = sum(p.stat().st_size for p in trace.path.rglob("*") if p.is_file())
    url = f"file://{trace.path}"
    monkeypatch.setenv("SIMLAB_COPY_LIMIT_GIB", repr((size - 1) / 2**30))
    refused = r"GiB to copy, above the limit; set SIMLAB_COPY_LIMIT_GIB to a larger number"
    with pytest.raises(InputError, match=refused):
        local_copy(url)
    listing = fsspec.implementations.local.LocalFileSystem.find

    def unsized(*args, **named):
        return {place: info | {"size": None} for place, info in listing(*args, **named).items()}

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.implementations.local.LocalFileSystem, "find", unsized)
        with pytest.raises(InputError, match=refused):
            local_copy(url)
    assert not [p for p in cache_folder().iterdir() if p.is_dir()]
    monkeypatch.setenv("SIMLAB_COPY_LIMIT_GIB", repr(size / 2**30))
    assert open_trace(local_copy(url)).n_rows == trace.n_rows
    monkeypatch.setenv("SIMLAB_COPY_LIMIT_GIB", "much")
    with pytest.raises(InputError, match="SIMLAB_COPY_LIMIT_GIB=much: must be a number of GiB above 0"):
        local_copy(url)


def test_a_source_that_leaves_its_folder_is_refused(trace, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    (tmp_path / "secret").write_text("not of the trace")
    (trace.path / "routing/part-000001.parquet").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"part-000001.parquet: a link to .*secret, which is not in the trace"):
        local_copy(f"file://{trace.path}")
    memory = fsspec.filesystem("memory")
    memory.pipe("/up/t.trace/header.json", (trace.path / "header.json").read_bytes())
    memory.pipe("/up/t.trace/routing/../../../part-000000.parquet", b"x")
    with pytest.raises(InputError, match=r"\.\./part-000000.parquet: leads out of the trace's folder"):
        local_copy("memory://up/t.trace")


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
