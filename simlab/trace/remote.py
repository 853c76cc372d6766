"""Traces at a URL (`s3://`, `gs://`, `memory://` ..): copied to this machine once, then read from there.

The tables are read many times over and hashed on opening, so a local copy is faster than reading through the
network, and what is on disk is checked like any other trace. Needs fsspec (the extra `ray`) and, for some
schemes, fsspec's own package for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from simlab.errors import InputError, RunError


def is_url(path: str) -> bool:
    """Whether a trace's name is a URL rather than a folder's."""
    return "://" in path


def cache_folder() -> Path:
    """Where copies are kept; `$XDG_CACHE_HOME/simlab/traces`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "simlab" / "traces"


def local_copy(path: str) -> str:
    """The folder to read a trace from: `path` itself, or of a URL the copy on this machine.

    A copy is kept under the digest of its URL and header, so that a trace which was recorded anew is copied
    anew; processes of one machine that want the same trace wait for one copy.

    Raises:
        InputError: fsspec is missing, or there is no trace at the URL.
        RunError: copying failed.
    """
    if not is_url(path):
        return path
    if importlib.util.find_spec("fsspec") is None:
        raise InputError(f"{path}: reading a URL needs fsspec; pip install 'simlab[ray]'")
    fsspec: Any = importlib.import_module("fsspec")
    url = path.rstrip("/")
    try:
        files, root = fsspec.core.url_to_fs(url)
        header = files.cat_file(f"{root}/header.json")
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{path}: no trace there: {type(error).__name__}: {_first_line(error)}") from error
    digest = hashlib.sha256(url.encode() + b"\0" + header).hexdigest()[:20]
    name = url.rpartition("/")[2].removesuffix(".trace") or "trace"
    target = cache_folder() / f"{name}-{digest}.trace"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.with_suffix(".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _copy(files, root, target)
    except OSError as error:
        raise RunError(f"{path}: copying to {target} failed: {_first_line(error)}") from error
    return str(target)


def _copy(files: Any, root: str, target: Path) -> None:
    """Copy a folder and rename it into place, so that half of one is never read."""
    half = target.with_suffix(".half")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(half)
    for found in files.find(root):
        relative = found[len(root) :].lstrip("/")
        here = half / relative
        if not here.resolve().is_relative_to(half.resolve()):
            raise InputError(f"{found}: leads out of the trace's folder")
        here.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(found, str(here))
    half.rename(target)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
