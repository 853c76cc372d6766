"""The first load of a model, in a process of its own.

llama.cpp checks little of what a GGUF file says: a wrong number in a header can make it abort, or write outside its
memory, and the process is gone. So a child loads the model first, as the engine will, and a child that dies is a
refusal. What the child is refused in an orderly way, the engine is refused again, with its own message.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from simlab.errors import InputError, SimlabError

_loaded: set[tuple[tuple[Path, int, int, int], ...]] = set()
"""What children of this process could load: each file's path, inode, bytes and time of change in ns."""


def try_loading(path: Path, files: Sequence[Path]) -> None:
    """Load a model of these files in a child, once per process as long as they stay the same.

    Costs the start of a Python, some 0.3 s, and a token of the dense weights; experts are not read.

    Raises:
        InputError: the child died.
    """
    found = [(file, file.stat()) for file in files]
    identity = tuple((file, s.st_ino, s.st_size, s.st_mtime_ns) for file, s in found)
    if identity in _loaded:
        return
    child = subprocess.run(
        [sys.executable, "-P", "-m", __name__, path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if child.returncode:
        lines = child.stderr.decode(errors="replace").splitlines() or ["no message"]
        why = next((line for line in lines if "GGML_ASSERT" in line), lines[-1]).rpartition("/")[2]
        how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"status {child.returncode}"
        raise InputError(
            f"{path}: llama.cpp dies of this model ({how}: {why}); the file is damaged, or not made for it"
        )
    _loaded.add(identity)


def _load(path: Path) -> None:
    from simlab.record.discovery import Discovery
    from simlab.record.llama import Llama

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        contextlib.suppress(SimlabError),
        contextlib.closing(Llama(path, n_threads=1, on_node=Discovery(path.name), read_ahead=False)) as llama,
    ):
        llama.decode([0], 0)
        llama.detokenize(llama.tokenize(b"a b"))


if __name__ == "__main__":
    _load(Path(sys.argv[1]))
