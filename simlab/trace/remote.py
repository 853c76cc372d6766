"""Traces at a URL (`s3://`, `gs://`, `memory://` ..): copied to this machine, then read from there until they change.

The tables are read many times over and hashed on opening, so a local copy is faster than reading through the
network, and what is on disk is checked like any other trace. Needs fsspec (the extra `ray`) and, for some
schemes, fsspec's own package for them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simlab.errors import InputError, RunError
from simlab.trace.reading import check_inside
from simlab.trace.schema import TABLES

_LIMIT = "SIMLAB_COPY_LIMIT_GIB"
_LIMIT_GIB = 8.0
_CHANGES = ("size", "mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created")
"""What file systems call a file's size and modification."""
_BLOCK = 1 << 20


def is_url(path: str) -> bool:
    """Whether a trace's name is a URL rather than a folder's."""
    return "://" in path


def cache_folder() -> Path:
    """Where copies are kept; `$XDG_CACHE_HOME/simlab/traces`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "simlab" / "traces"


def local_copy(path: str) -> str:
    """The folder to read a trace from: `path` itself, or of a URL the copy on this machine.

    A copy is kept under the digest of its URL and of every file's name, size and modification, so that a trace that
    grew or was recorded anew is copied anew; processes of one machine that want the same trace wait for one copy. A
    copy is at most `SIMLAB_COPY_LIMIT_GIB` large, 8 GiB unless that variable says otherwise.

    Raises:
        InputError: fsspec is missing, there is no trace at the URL, or one that is too large or leaves its folder.
        RunError: copying failed.
    """
    if not is_url(path):
        return path
    if importlib.util.find_spec("fsspec") is None:
        raise InputError(f"{path}: reading a URL needs fsspec; pip install 'simlab[ray]'")
    fsspec: Any = importlib.import_module("fsspec")
    url = path.rstrip("/")
    limit = _limit_bytes()
    try:
        files, root = fsspec.core.url_to_fs(url)
        files.invalidate_cache()
        # First the header, then what lies beside it: a recording that goes on has at least the parts of its header.
        header = files.cat_file(f"{root}/header.json")
        found = _parts(files, root)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{path}: no trace there: {type(error).__name__}: {_first_line(error)}") from error
    size = len(header) + sum(info.get("size") or 0 for info in found.values())
    if size > limit:
        raise _too_large(path, size)
    stamps = [(name, [str(info.get(key)) for key in _CHANGES]) for name, info in sorted(found.items())]
    digest = hashlib.sha256(repr((url, header, stamps)).encode()).hexdigest()[:20]
    name = url.rpartition("/")[2].removesuffix(".trace") or "trace"
    target = cache_folder() / f"{name}-{digest}.trace"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.with_suffix(".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _copy(files, root, header, found, target, limit, path)
    except OSError as error:
        raise RunError(f"{path}: copying to {target} failed: {_first_line(error)}") from error
    return str(target)


def _limit_bytes() -> int:
    text = os.environ.get(_LIMIT) or str(_LIMIT_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 < gib < 1e9:
        raise InputError(f"{_LIMIT}={text}: must be a number of GiB above 0")
    return int(gib * (1 << 30))


def _too_large(path: str, size: int) -> InputError:
    return InputError(
        f"{path}: {size / (1 << 30):.2f} GiB to copy, above the limit; set {_LIMIT} to a larger number to copy it"
    )


def _parts(files: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """What there is of each part of a trace by its path in the folder; other files are left out.

    Raises:
        InputError: a path or a link that leaves the folder.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for place, info in files.find(root, detail=True).items():
        name = place[len(root) :].lstrip("/")
        if not place.startswith(root) or ".." in Path(name).parts:
            raise InputError(f"{place}: leads out of the trace's folder")
        if "file" in files.protocol:
            check_inside(Path(root), Path(place))
        table, _, part = name.partition("/")
        if table in TABLES and Path(part).match("part-*.parquet") and "/" not in part:
            found[name] = info
    return found


def _copy(
    files: Any, root: str, header: bytes, found: Mapping[str, Any], target: Path, limit: int, path: str
) -> None:
    """Copy a folder and rename it into place, so that half of one is never read."""
    half = target.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    left = limit - len(header)
    try:
        half.mkdir()
        (half / "header.json").write_bytes(header)
        for name in found:
            here = half / name
            here.parent.mkdir(exist_ok=True)
            # Counted as it comes: what a listing says of a file may be old, or nothing.
            with files.open(f"{root}/{name}") as source, here.open("wb") as copy:
                while block := source.read(_BLOCK):
                    left -= len(block)
                    if left < 0:
                        raise _too_large(path, limit - left)
                    copy.write(block)
        half.rename(target)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
