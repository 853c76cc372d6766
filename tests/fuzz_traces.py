"""Damage to the parts of a trace: `simlab info` and a replay of it end in numbers or in one line, whatever the bytes.

    python tests/fuzz_traces.py traces/original.trace --examples 1000 --seed 1

Example i of a seed is the same on every machine: `--first I --examples 1` runs it again. `tests/test_damaged_traces.py`
runs a few. An abort ends this process: the number of the example that ran is the last line of its output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fuzz_damage import bytes_damaged

from simlab.cli.main import main as simlab

REPLAYED_EVERY = 10


def part_damaged(rng: random.Random, data: bytes) -> bytes:
    """Half of the time bits of the footer are flipped, which is small beside the pages."""
    if rng.random() < 0.5:
        return bytes_damaged(rng, data)
    damaged = bytearray(data)
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    for _ in range(rng.choice((1, 1, 2, 4))):
        damaged[len(data) - 1 - rng.randrange(footer)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def outcome(words: list[str]) -> str:
    """Run a command: "read", "warned of" or "refused".

    Raises:
        AssertionError: it ended in another way, or wrote more than its one line; libraries' own lines count.
    """
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            errors = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                status = simlab(words)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        lines = [*errors.getvalue().splitlines(), *file.read().decode(errors="replace").splitlines()]
    trace = words[1]
    if status == 2 and len(lines) == 1 and lines[0].startswith(f"simlab: error: {trace}/"):
        return "refused"
    if status == 0 and not lines:
        return "read"
    if status == 0 and len(lines) == 1 and lines[0].startswith(f"simlab: warning: {trace}/"):
        return "warned of"
    raise AssertionError(f"simlab {' '.join(words)}: status {status}, {lines}")


def search(trace: Path, seed: int, first: int, examples: int, listed: bool) -> int:
    """Run examples; the number of failures. Without `listed` the header names no SHA-256, as another tool's."""
    counts: Counter[str] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        copy = Path(name) / "t.trace"
        shutil.copytree(trace, copy)
        if not listed:
            header = copy / "header.json"
            header.write_text(header.read_text().replace('"part_sha256"', '"some_other_field"'))
        parts = {part: part.read_bytes() for part in sorted(copy.rglob("*.parquet"))}
        for index in range(first, first + examples):
            print(f"--seed {seed} --first {index}", flush=True)
            rng = random.Random(f"{seed}/{index}")
            part = rng.choice(sorted(parts))
            part.write_bytes(part_damaged(rng, parts[part]))
            try:
                found = outcome(["info", str(copy)])
                if found != "refused" and index % REPLAYED_EVERY == 0:
                    found = f"{found}, replay {outcome(['replay', str(copy), '--budget', '2cycles'])}"
                counts[found] += 1
            except AssertionError as error:
                failures += 1
                print(f"FAILED --seed {seed} --first {index} ({part.parent.name}): {error}", flush=True)
            part.write_bytes(parts[part])
    print(f"{failures} failures; {dict(counts)}")
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--no-sha256", action="store_true", help="leave the parts' SHA-256 out of the header")
    args = parser.parse_args(argv)
    return min(search(args.trace, args.seed, args.first, args.examples, not args.no_sha256), 1)


if __name__ == "__main__":
    sys.exit(main())
