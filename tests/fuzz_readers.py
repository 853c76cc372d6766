"""Damage to valid files of every format that `simlab import` reads: each is read or refused in one line.

    python tests/fuzz_readers.py --examples 100000 --seed 1

Example i of a seed is the same on every machine: `--seed S --first I --examples 1` runs it again. The examples run in
a child process, so that an abort, a hang or a request for all memory is told with its number, and the search goes on.
`tests/test_hostile_files.py` runs a few hundred of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import polars as pl
from fuzz_damage import Files, damaged, kinds

from simlab.errors import InputError, SimlabWarning
from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource
from simlab.trace import header as header_module
from simlab.trace.importer import import_files, read_run
from simlab.trace.info import trace_info
from simlab.trace.schema import table_schema
from simlab.trace.store import Trace, open_trace
from simlab.trace.whole import check_routing
from simlab.types import TraceHeader

ON_DISK_EVERY = 200
"""One example in so many is written to a trace folder and opened again; the others stay in memory."""
REPLAYED_EVERY = 4
"""One in so many of the files that were read is turned into a replay's columns, which takes the longest."""
SLOW_S, STUCK_S = 30.0, 900.0
"""Processor time, and time altogether, that no example takes."""
MEMORY_BYTES = 6 << 30
# ---------------------------------------------------------------------------------------------------------
# The claim


def check(folder: Path, files: Files, facts: dict[str, Any], index: int) -> str:
    """Read files in `folder`: "read" or "refused"; whatever else they do is raised."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    # A sidecar is found by its name, as a user has it.
    paths = [str(folder / name) for name in files if name != "run.json" or "run.npz" not in files]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error")
        warnings.simplefilter("always", SimlabWarning)
        try:
            if index % ON_DISK_EVERY == 0:
                trace = open_trace(import_files(paths, str(folder / "t.trace"), True, facts))
                trace_info(trace.path)
                _use(trace)
            else:
                header, frames = read_run(paths, facts)
                if index % REPLAYED_EVERY == 0:
                    _use(_in_memory(folder, header, frames))
        except InputError as error:
            _check_line(str(error))
            return "refused"
        finally:
            for warning in told:
                _check_line(str(warning.message))
            for name in files:
                (folder / name).unlink()
    return "read"


def _check_line(text: str) -> None:
    if "\n" in text or len(text) > 1500:
        raise AssertionError(f"not one line that a user can read: {text[:2000]}")


def _in_memory(folder: Path, header: TraceHeader, frames: dict[str, pl.DataFrame]) -> Trace:
    width = header.n_expert_used
    text = header_module.header_to_json(header_module.HeaderFile(header, None, width, {}))
    again = header_module._parse(json.loads(text)).header
    tables: dict[str, pl.LazyFrame] = {}
    for table in ("routing", "reads", "tokens"):
        schema = table_schema(table, header.n_expert, width)
        frame = frames.get(table, pl.DataFrame(schema=schema))
        missing = [pl.lit(None, dtype=t).alias(n) for n, t in schema.items() if n not in frame.columns]
        tables[table] = frame.with_columns(missing).select(list(schema)).lazy()
    check_routing(folder, again, tables["routing"])
    return Trace(folder, again, width, frames["routing"].height, **tables)


def _use(trace: Trace) -> None:
    columns = TraceColumns(trace)
    scores = trace.has_scores and None not in (trace.header.gating, trace.header.score_space)
    sources: set[WeightSource] = {"recorded"} if columns.has_weights else set()
    if scores and trace.header.weight_rule is not None:
        sources.add("scores")
    needs = ColumnNeeds(n_slots=trace.width, scores=scores, rank=scores, weights=frozenset(sources))
    stop = min(columns.n_rows, 64)
    columns.chunk(0, stop, stop, needs)


def run_example(folder: Path, seed: int, index: int) -> tuple[str, str]:
    """One example: its format, and what became of it."""
    rng = random.Random(f"{seed}/{index}")
    kind = rng.choice(kinds())
    files, facts = damaged(kind, rng)
    return kind, check(folder, files, facts, index)


# ---------------------------------------------------------------------------------------------------------
# The search


def work(seed: int, first: int, count: int, journal: Path) -> int:
    """Run examples in this process; the journal's first bytes are the number of the one that runs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    counts: Counter[str] = Counter()
    failures = 0
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT)
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=_fast_folder()) as name:
        folder = Path(name)
        for index in range(first, first + count):
            os.pwrite(descriptor, b"%020d" % index, 0)
            try:
                kind, outcome = run_example(folder, seed, index)
                counts[f"{kind}: {outcome}"] += 1
            except KeyboardInterrupt:
                raise
            except BaseException:  # a panic of a Rust library is no Exception
                failures += 1
                kind = random.Random(f"{seed}/{index}").choice(kinds())
                print(f"FAILED --seed {seed} --first {index} --examples 1 ({kind})", flush=True)
                print(traceback.format_exc(limit=-6), flush=True)
                shutil.rmtree(folder)
                folder.mkdir()
    os.pwrite(descriptor, b"%020d" % (first + count), 0)
    print("COUNTS " + json.dumps(counts), flush=True)
    return failures


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def search(seed: int, first: int, examples: int, batch: int) -> int:
    """Run examples in child processes, `batch` each; the number of failures."""
    counts: Counter[str] = Counter()
    failures, index, end = 0, first, first + examples
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        journal = Path(name) / "journal"
        while index < end:
            count = min(batch, end - index)
            words = [sys.executable, __file__, "--worker", str(journal), "--seed", str(seed)]
            words += ["--first", str(index), "--examples", str(count)]
            with (Path(name) / "out").open("w+") as out, (Path(name) / "err").open("w+") as err:
                child = subprocess.Popen(words, stdout=out, stderr=err)
                stuck = _wait(child, journal)
                out.seek(0)
                lines = out.read().splitlines()
                err.seek(0)
                noise = err.read().splitlines()
            tail = lines.pop() if lines and lines[-1].startswith("COUNTS ") else ""
            failures += sum(line.startswith("FAILED ") for line in lines)
            # Polars tells of every panic it survives; of interest is only what a process ended with.
            for line in lines if tail else [*lines, *noise[-60:]]:
                print(line, flush=True)
            if tail.startswith("COUNTS "):
                counts.update(json.loads(tail.removeprefix("COUNTS ")))
                index += count
            else:
                at = int(journal.read_bytes()) if journal.exists() else index
                what = "hung" if stuck else f"ended the process ({child.returncode})"
                print(f"FAILED --seed {seed} --first {at} --examples 1: {what}", flush=True)
                failures += 1
                index = at + 1
            rate = (index - first) / (time.monotonic() - started)
            read = sum(n for name, n in counts.items() if name.endswith(": read"))
            print(f"seed {seed}: {index - first} of {examples}, {rate:.0f} a second, {read} read, "
                  f"{sum(counts.values()) - read} refused, {failures} failures", flush=True)  # fmt: skip
    for kind, n in sorted(counts.items()):
        print(f"  {kind:<28}{n:>9}")
    return failures


def _wait(child: subprocess.Popen[Any], journal: Path) -> bool:
    """Wait for a child; True, and it is killed, if one example took too long."""
    last, since, used = b"", time.monotonic(), 0.0
    while True:
        try:
            child.wait(1.0)
            return False
        except subprocess.TimeoutExpired:
            now = journal.read_bytes() if journal.exists() else b""
            seconds = _processor_seconds(child.pid)
            if now != last:
                last, since, used = now, time.monotonic(), seconds
            elif seconds - used > SLOW_S or time.monotonic() - since > STUCK_S:
                child.kill()
                child.wait()
                return True


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--batch", type=int, default=20_000, help="examples per child process")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        return min(work(args.seed, args.first, args.examples, args.worker), 1)
    return min(search(args.seed, args.first, args.examples, args.batch), 1)


if __name__ == "__main__":
    sys.exit(main())
