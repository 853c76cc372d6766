"""The training text: the documentation's sources and the standard library of Python 3.11, both PSF-licensed.

One document in forty is held out. The order of the documents decides which, so the same two packages give the same
split.
"""

from __future__ import annotations

import random
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from simlab.errors import RunError

DOC_PACKAGE = "python3.11-doc"
_LEFT_OUT = ("/site-packages/", "/test/", "/idlelib/", "encodings/", "lib2to3/", "pydoc_data")
_HELD_OUT_ONE_IN = 40
TEXT_BYTES = 2600
TEXT_STARTS = {"b": 20104, "c": 120146, "d": 420276}
"""Where the shipped texts begin in the held-out bytes: arbitrary line starts, kept so that figures stay comparable."""
SAMPLE_BYTES = 250_000
"""Of the held-out bytes, from the start: the text that figures are taken on."""


def build_corpus(folder: Path, doc_sources: Path | None = None) -> tuple[bytes, bytes]:
    """Writes `train.bin` and `heldout.bin` to `folder` and returns their bytes.

    `doc_sources` is the `_sources` folder of the documentation; by default Debian's package is fetched with
    `apt-get download` and unpacked beside. The standard library is that of the running interpreter, which must be a
    Python 3.11 for the split to be the one of the embedded model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if doc_sources is None:
        doc_sources = _fetched_doc_sources()
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(doc_sources.rglob("*.rst.txt"), key=str)
    modules = sorted(library.rglob("*.py"), key=str)
    paths += [path for path in modules if not any(part in str(path) for part in _LEFT_OUT)]
    documents = [path.read_bytes() for path in paths]
    if len(documents) < _HELD_OUT_ONE_IN:
        raise RunError(f"{doc_sources} and {library} hold {len(documents)} documents; too few for a corpus")
    random.Random(0).shuffle(documents)
    held_out = len(documents) // _HELD_OUT_ONE_IN
    parts = b"\n\n".join(documents[held_out:]), b"\n\n".join(documents[:held_out])
    for name, part in zip(("train.bin", "heldout.bin"), parts, strict=True):
        (folder / name).write_bytes(part)
    return parts


def write_texts(folder: Path, held_out: bytes) -> None:
    """Writes the held-out texts that the project ships: `heldout.txt` and `text-b.txt` and its like."""
    (folder / "heldout.txt").write_bytes(held_out[:SAMPLE_BYTES])
    for name, start in TEXT_STARTS.items():
        (folder / f"text-{name}.txt").write_bytes(held_out[start : start + TEXT_BYTES])


def _fetched_doc_sources() -> Path:
    """The `_sources` folder of Debian's package, unpacked in a temporary folder that lasts as long as the process."""
    folder = Path(_temporary.name)
    for command in (["apt-get", "download", DOC_PACKAGE], ["sh", "-c", "dpkg -x *.deb ."]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RunError(
                f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}; fetch the package "
                f"{DOC_PACKAGE} by hand, unpack it, and name its html/_sources folder with --doc-sources"
            )
    return next(folder.glob("usr/share/doc/*/html/_sources"))


_temporary = tempfile.TemporaryDirectory(prefix="simlab-corpus-")
