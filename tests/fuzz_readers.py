"""Damage to valid files of every format that `simlab import` reads: each is read or refused in one line.

    python tests/fuzz_readers.py --examples 100000 --seed 1

Example i of a seed is the same on every machine: `--seed S --first I --examples 1` runs it again. The examples run in
a child process, so that an abort, a hang or a request for all memory is told with its number, and the search goes on.
`tests/test_hostile_files.py` runs a few hundred of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import dump_files
import numpy as np
import polars as pl
from route_files import io_lines, metrics_lines, route_lines

from simlab.errors import InputError, SimlabWarning
from simlab.replay.columns import ColumnNeeds, TraceColumns, WeightSource
from simlab.trace import header as header_module
from simlab.trace.importer import import_files, read_run
from simlab.trace.info import trace_info
from simlab.trace.schema import table_schema
from simlab.trace.store import Trace, _check_routing, open_trace
from simlab.types import TraceHeader

Files = dict[str, bytes]
"""File name to content; the damaged file is the first."""

ON_DISK_EVERY = 200
"""One example in so many is written to a trace folder and opened again; the others stay in memory."""
REPLAYED_EVERY = 4
"""One in so many of the files that were read is turned into a replay's columns, which takes the longest."""
SLOW_S, STUCK_S = 30.0, 900.0
"""Processor time, and time altogether, that no example takes."""
MEMORY_BYTES = 6 << 30
PIECES = [
    b"\r", b"\n", b"\0", b'"', b",", b"#", b"=", b" ", b"-", b".", b"\xff", b"[", b"]", b"{", b"}", b":", b";", b"-1",
    b"0", b"8", b"1.5", b"-0.5", b"1e400", b"1e39", b"nan", b"inf", b"-inf", b"NaN", b"Infinity", b"null", b"true",
    b"[]", b"{}", b"255", b"65536", b"2147483648", b"9223372036854775807", b"9223372036854775808", b"9" * 400,
    b"\xc2\xb2", b"\xef\xbb\xbf", b"\\ud800", b"PK\x03\x04", b"PAR1", b"\x93NUMPY", b"version https://git-lfs",
    b"turn", b"layer=",
]  # fmt: skip
NUMBERS: list[Any] = [
    -1, -2, 0, 1, 7, 8, 9, 127, 255, 256, 65535, 65536, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400, -(10**30),
    0.5, -0.25, 1e-45, 3.5e38, 1e308, -1e39, math.nan, math.inf, -math.inf, True, None, "", "x", "1", [], [1], {}, [[]],
]  # fmt: skip
DTYPES = [
    "u1",
    "i1",
    "<u2",
    ">i4",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    ">f8",
    "?",
    "<c8",
    "O",
    "S3",
    "<U2",
    "V2",
    "M8[s]",
]


# ---------------------------------------------------------------------------------------------------------
# Valid files


@cache
def originals() -> dict[str, tuple[Files, dict[str, Any]]]:
    """Format to its files and facts."""
    run = dump_files.dump(tokens=5)

    def text(lines: list[str]) -> bytes:
        return "".join(line + "\n" for line in lines).encode()

    route = {"route.csv": text(route_lines())}
    found: dict[str, tuple[Files, dict[str, Any]]] = {
        "route": (route, {}),
        "metrics": ({"metrics.csv": text(metrics_lines()), **route}, {}),
        "io": ({"io.csv": text(io_lines()), **route}, {}),
    }
    for name, (file, data) in dump_files.files_of(run).items():
        found[name] = ({file: data}, dump_files.SCORED)
    for name, (file, data) in dump_files.files_without_scores(run).items():
        facts = {n: v for n, v in dump_files.FACTS.items() if n != "prefill" or name != "fingerprint"}
        found[name] = ({file: data}, facts)
    sidecar = dump_files.SCORED | {"moe_layers": [1, 2, 4], "turns": [3, 2], "prefill": [2, 0], "model": "m"}
    files = {
        "run.json": json.dumps(sidecar, indent=1).encode(),
        "run.npz": dump_files.npz_bytes(dump_files.plain(run)),
    }
    found["sidecar"] = (files, {})
    return found


def kinds() -> list[str]:
    """Every format."""
    return sorted(originals())


# ---------------------------------------------------------------------------------------------------------
# Damage


def damaged(kind: str, rng: random.Random) -> tuple[Files, dict[str, Any]]:
    """The files of a format with one of them damaged, once to four times, and perhaps other facts."""
    files, facts = originals()[kind]
    name, data = next(iter(files.items()))
    rebuild = _REBUILT.get(kind)
    if rebuild is not None and rng.random() < 0.6:
        data = rebuild(rng)
        if rng.random() < 0.2:
            data = _bytes_damaged(rng, data)
    else:
        data = _bytes_damaged(rng, data)
    if facts and rng.random() < 0.15:
        facts = dict(facts)
        facts[rng.choice(sorted(facts))] = rng.choice(NUMBERS)
    return {**files, name: data}, facts


def _bytes_damaged(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            return data
        at = rng.randrange(len(data))
        match rng.randrange(7):
            case 0:  # flip bits
                data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            case 1:  # cut
                data = data[:at] if rng.random() < 0.7 else data[at:]
            case 2:  # duplicate a stretch
                stretch = data[at : at + rng.choice((1, 8, 64, 500))]
                data = data[:at] + stretch + data[at:]
            case 3:  # put something in or over
                gone = rng.choice((0, 0, 1, 2, 8))
                data = data[:at] + rng.choice(PIECES) + data[at + gone :]
            case 4:  # another number
                numbers = list(re.finditer(rb"[0-9]+(\.[0-9]+)?", data[at : at + 400]))
                if numbers:
                    found = rng.choice(numbers)
                    value = str(rng.choice(NUMBERS)).encode()
                    data = data[: at + found.start()] + value + data[at + found.end() :]
            case 5:  # swap two fields of a line, or two stretches
                data = _swapped(rng, data, at)
            case _:  # drop a line, or a stretch
                end = data.find(b"\n", at) + 1 or at + rng.choice((1, 4, 30))
                data = data[:at] + data[end:]
    return data


def _swapped(rng: random.Random, data: bytes, at: int) -> bytes:
    start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
    fields = data[start:end].split(b",") if 0 < end - start < 2000 else []
    if len(fields) > 1:
        i, j = rng.randrange(len(fields)), rng.randrange(len(fields))
        fields[i], fields[j] = fields[j], fields[i]
        return data[:start] + b",".join(fields) + data[end:]
    other = rng.randrange(len(data))
    low, high = min(at, other), max(at, other)
    n = min(8, high - low)
    return data[:low] + data[high : high + n] + data[low + n : high] + data[low : low + n] + data[high + n :]


def _arrays(rng: random.Random) -> dict[str, np.ndarray]:
    """Valid arrays with a value, a type, a shape or a name changed."""
    run: dict[str, Any] = {n: a.copy() for n, a in dump_files.plain(dump_files.dump(tokens=5)).items()}
    if rng.random() < 0.3:
        run[rng.choice(("turn", "phase", "step", "graph", "token"))] = np.array([0, 0, 1, 1, 2])
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(sorted(run))
        array = run[name]
        match rng.randrange(7):
            case 0 | 1:  # one value
                if array.size and array.dtype.kind in "iuf":
                    array.flat[rng.randrange(array.size)] = _fitting(rng, array.dtype)
            case 2:  # another type
                # Not every type can be made of every other.
                with contextlib.suppress(Exception), np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run[name] = array.astype(rng.choice(DTYPES))
            case 3:  # another shape
                run[name] = rng.choice(
                    (array[:-1], array[..., :-1], array.T, array[None], array.reshape(-1), array[:0])
                )
            case 4:  # another name
                run[rng.choice(("x", "scores", "topk_ids", "weights", "router_logits", "gate_probs"))] = (
                    run.pop(name)
                )
            case 5:  # swapped
                other = rng.choice(sorted(run))
                run[name], run[other] = run[other], run[name]
            case _:  # in another order of memory, or all the same
                run[name] = np.asfortranarray(array) if rng.random() < 0.5 else np.zeros_like(array)
    return run


def _fitting(rng: random.Random, dtype: np.dtype) -> Any:
    """One of the numbers, as near as the type comes to it."""
    value = rng.choice([n for n in NUMBERS if isinstance(n, (int, float)) and abs(n) != 10**400])
    with np.errstate(all="ignore"):
        if dtype.kind == "f":
            return np.array(float(value)).astype(dtype)
        limits = np.iinfo(dtype)
        return max(min(int(value), limits.max), limits.min) if math.isfinite(value) else 0


def _npz(rng: random.Random) -> bytes:
    return dump_files.npz_bytes(_arrays(rng))


def _npy(rng: random.Random) -> bytes:
    arrays = _arrays(rng)
    return dump_files.npy_bytes(arrays.get("ids", next(iter(arrays.values()))))


def _safetensors(rng: random.Random) -> bytes:
    """As `safetensors` writes it, by hand, so that types and offsets may lie."""
    arrays = _arrays(rng)
    codes = {
        "i4": "I32",
        "f4": "F32",
        "u1": "U8",
        "i1": "I8",
        "u2": "U16",
        "f2": "F16",
        "f8": "F64",
        "u8": "U64",
    }
    fields: dict[str, Any] = {}
    body = b""
    for name, array in arrays.items():
        code = codes.get(array.dtype.str[1:], rng.choice(("BF16", "F8_E4M3", "BOOL", "I64", "X")))
        content = array.astype(array.dtype.newbyteorder("<")).tobytes() if array.dtype.kind != "O" else b"abc"
        offsets = [len(body), len(body) + len(content)]
        fields[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": offsets}
        body += content
    text = json.dumps(_tree_damaged(rng, fields) if rng.random() < 0.3 else fields).encode()
    return len(text).to_bytes(8, "little") + text + body


def _tree_damaged(rng: random.Random, value: Any) -> Any:
    """JSON with one value replaced, one field dropped or renamed, or one item doubled."""
    root = json.loads(json.dumps(value))
    node = root
    for _ in range(rng.randrange(1, 6)):
        children = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not children:
            return root
        key = rng.choice(children)
        if isinstance(node[key], (dict, list)) and rng.random() < 0.75:
            node = node[key]
            continue
        match rng.randrange(4):
            case 0 if isinstance(node, dict):
                node[rng.choice(("x", "token_7", "layer_1", "selected_probs", "scores", str(key) + "0"))] = (
                    node.pop(key)
                )
            case 1:
                del node[key]
            case 2 if isinstance(node, list):
                node.insert(key, node[key])
            case _:
                node[key] = rng.choice(NUMBERS)
        return root
    return root


def _rows(rng: random.Random, slots: bool) -> list[dict[str, Any]]:
    run = dump_files.dump(tokens=5)
    rows: list[Any] = dump_files.slot_rows(run) if slots else dump_files.list_rows(run)
    if rng.random() < 0.3:
        extra, value = rng.choice((("turn", 0), ("step", 3), ("phase", 1), ("graph", 2), ("token_id", 9)))
        rows = [{**row, extra: value} for row in rows]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(rows))
        row = rows[at]
        name = rng.choice(sorted(row))
        match rng.randrange(6):
            case 0 | 1:
                row[name] = rng.choice(NUMBERS)
            case 2:
                if isinstance(row[name], list) and row[name]:
                    row[name][rng.randrange(len(row[name]))] = rng.choice(NUMBERS)
                    row[name] = row[name] * rng.choice((1, 1, 2))
            case 3:
                rows[at:at] = [dict(row)] * rng.choice((1, 3))
            case 4:
                other = rng.choice(sorted(row))
                rows = [{n: r.get({name: other, other: name}.get(n, n)) for n in r} for r in rows]
            case _:
                del rows[at : at + rng.choice((1, 5, 40))]
                if not rows:
                    return [{"token": 0, "layer": 0}]
    return rows


def _csv(slots: bool) -> Callable[[random.Random], bytes]:
    return lambda rng: dump_files.csv_bytes(_rows(rng, slots))


def _jsonl(slots: bool) -> Callable[[random.Random], bytes]:
    return lambda rng: dump_files.jsonl_bytes(_rows(rng, slots))


def _parquet(slots: bool) -> Callable[[random.Random], bytes]:
    def build(rng: random.Random) -> bytes:
        rows = _rows(rng, slots)
        try:
            frame = pl.DataFrame(rows, strict=rng.random() < 0.5, infer_schema_length=None)
            if rng.random() < 0.4 and frame.width:
                name = rng.choice(frame.columns)
                dtype = rng.choice(
                    (pl.UInt8, pl.Int8, pl.UInt64, pl.Float32, pl.String, pl.Boolean, pl.Int128, pl.Date)
                )
                frame = frame.with_columns(pl.col(name).cast(dtype, strict=False))
            file = io.BytesIO()
            frame.write_parquet(file)
            return file.getvalue()
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError):
            return originals()["parquet slots" if slots else "parquet lists"][0]["run.parquet"]

    return build


def _fingerprint(rng: random.Random) -> bytes:
    content = dump_files.fingerprint(dump_files.dump(tokens=5))
    for _ in range(rng.choice((1, 1, 2, 4))):
        content["router_data"] = _tree_damaged(rng, content["router_data"])
        if not isinstance(content["router_data"], list) or not content["router_data"]:
            break
    return json.dumps(content).encode()


def _sidecar(rng: random.Random) -> bytes:
    content = json.loads(originals()["sidecar"][0]["run.json"])
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = _tree_damaged(rng, content)
    return json.dumps(content).encode()


_REBUILT: dict[str, Callable[[random.Random], bytes]] = {
    "npz": _npz, "npz compressed": _npz, "npy": _npy, "safetensors": _safetensors, "csv lists": _csv(False),
    "csv slots": _csv(True), "jsonl lists": _jsonl(False), "jsonl slots": _jsonl(True),
    "parquet lists": _parquet(False), "parquet slots": _parquet(True), "fingerprint": _fingerprint,
    "sidecar": _sidecar,
}  # fmt: skip


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
    again, _, _ = header_module._parse(json.loads(header_module.header_to_json(header, None, width)))
    tables: dict[str, pl.LazyFrame] = {}
    for table in ("routing", "reads", "tokens"):
        schema = table_schema(table, header.n_expert, width)
        frame = frames.get(table, pl.DataFrame(schema=schema))
        missing = [pl.lit(None, dtype=t).alias(n) for n, t in schema.items() if n not in frame.columns]
        tables[table] = frame.with_columns(missing).select(list(schema)).lazy()
    _check_routing(folder, again, tables["routing"])
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
