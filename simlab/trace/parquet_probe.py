"""Whether polars can read a parquet file, found out in another process.

Damaged pages make polars' reader ask for exabytes, which ends the process on the spot, or panic over many lines of
stderr. So a file of unknown origin is read once in a child, whose end is only its own, and then again here. The child
starts with the first file and serves those after it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simlab.bounds import require_memory
from simlab.errors import RunError

_FIRST_ROWS = 64
_FOOTER_TIMES = 30
"""Memory of a schema over its bytes in the file."""
_START = "from simlab.trace.parquet_probe import serve; serve()"
_child: subprocess.Popen[bytes] | None = None


def probe_parquet(path: Path, columns: Sequence[str] | None, times: int = 1) -> str | None:
    """Why polars cannot read these columns of a file (None: its schema); None if it can.

    Args:
        times: memory that the caller comes to per byte of the columns, a value of which takes eight at least.

    Raises:
        InputError: they are too large, going by the number of rows and the first of them.
        RunError: the child did not start.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END) >= 8:
            file.seek(-8, os.SEEK_END)
            footer = int.from_bytes(file.read(4), "little")
            footer = min(footer, file.tell())
            require_memory(footer * _FOOTER_TIMES, f"{path}: {footer} bytes that describe its columns")
    if columns is not None:
        found = _ask(path, columns, "size")
        if isinstance(found, str):
            return found
        require_memory(found["bytes"] * times, f"{path}: {found['rows']} rows", path.stat().st_size)
    return _ask(path, columns, "read")


def _ask(path: Path, columns: Sequence[str] | None, what: str) -> Any:
    """The child's answer: None, a dict of sizes, or in words why the file cannot be read."""
    request = {"path": str(path.absolute()), "columns": columns and list(columns), "what": what}
    try:
        child = _running_child(path)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = b""
    except BaseException:
        # Interrupted in the middle: its answer would be taken for that of the next file.
        _stop_child()
        raise
    if answer:
        return json.loads(answer)
    _stop_child()
    return "its pages are damaged, and reading them ends the reader"


def _running_child(path: Path) -> subprocess.Popen[bytes]:
    global _child
    if _child is not None and _child.poll() is None:
        return _child
    _stop_child()
    words = [sys.executable, "-c", _START]
    paths = os.pathsep.join([p or os.getcwd() for p in sys.path])
    _child = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C is for the parent, which ends the child
    )
    assert _child.stdout is not None
    if not _child.stdout.readline():
        raise RunError(
            f"{path}: the process that reads parquet files first ended at once; is {words[0]} whole?"
        )
    return _child


@atexit.register
def _stop_child() -> None:
    global _child
    child, _child = _child, None
    if child is None:
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def serve() -> None:
    """Answer the requests of a parent, one a line, until it closes the pipe."""
    import polars as pl

    from simlab.trace.reading import one_line

    with contextlib.suppress(OSError, ValueError):  # without /proc, or where limits are not ours to set
        # More than the machine has is never needed, and would be handed out on credit.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        try:
            if request["columns"] is None:
                pl.read_parquet_schema(request["path"])
            elif request["what"] == "size":
                rows = pl.scan_parquet(request["path"], glob=False).select(request["columns"])
                n, first = rows.select(pl.len()).collect().item(), rows.head(_FIRST_ROWS).collect()
                values = sum(len(c.explode() if c.dtype.is_nested() else c) for c in first)
                size = max(first.estimated_size(), 8 * values)
                answer = {"rows": n, "bytes": n * size // max(first.height, 1)}
            else:
                pl.read_parquet(request["path"], columns=request["columns"])
        except (Exception, pl.exceptions.PanicException) as error:  # a panic is no Exception
            answer = one_line(error)
        print(json.dumps(answer), flush=True)
