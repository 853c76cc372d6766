"""Files that hold far more than they weigh, and settings that come to more than memory: one line, before it is taken.

The large ones are read by a `simlab` of their own, whose time and peak memory are its and its children's.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
from route_files import HEADING
from synthetic import generate, make_header, without_scores
from test_trace_store import change_header

from simlab import bounds
from simlab.bounds import available_memory_bytes, require_memory
from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.judge.report.cells_file import read_cells_table
from simlab.learning import learn
from simlab.replay.columns import ColumnNeeds, TraceColumns
from simlab.replay.curve import lru_curve
from simlab.replay.run import Replayer
from simlab.replay.slots import replay_slots
from simlab.trace.importer import import_files
from simlab.trace.parts import part_sha256
from simlab.trace.store import open_trace
from simlab.types import Choice, Learned, RoutingPolicy, Step

GIB = 1 << 30
FACTS = {"n_expert": 8, "expert_bytes": 1000, "prefill": 0}


class Ended(NamedTuple):
    status: int
    text: str
    cpu_seconds: float
    peak_bytes: int


# Of a process of its own: Linux counts the memory of who starts a process to that process.
MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stderr, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


def ended(*words: str | Path) -> Ended:
    """Run the command; nothing is said of memory, so it is this machine's."""
    environment = {name: value for name, value in os.environ.items() if name != "SIMLAB_MEMORY_GIB"}
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "simlab", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return Ended(*json.loads(done.stdout))


def refused(*words: str | Path) -> str:
    """What a command says that must end in one line, in 5 s and 1 GiB."""
    found = ended(*words)
    assert found.status == 2
    assert found.text.startswith("simlab: error: ")
    assert found.text.count("\n") == 1
    assert found.cpu_seconds < 5
    assert found.peak_bytes < GIB
    return found.text


def refused_import(path: Path) -> str:
    facts = (
        () if path.name == "route.csv" else ("--n-expert", "8", "--expert-bytes", "1000", "--prefill", "0")
    )
    return refused("import", path, "--out", path.parent / "t.trace", *facts)


# ---------------------------------------------------------------------------------------------------------
# Small files, large contents


@pytest.mark.parametrize("command", [["info"], ["replay", "--budget", "1cycles"], ["curve"]])
def test_a_trace_of_two_billion_entries(command: list[str], tmp_path: Path) -> None:
    """One routing row; 17 GB are what one number for each entry takes. `info` needs none, and answers."""
    header = make_header(n_layer=1, n_expert=65535, k=1)
    folder = generate(header, n_prefill=0, n_decode=1, scorer=ones).write(tmp_path / "t.trace").path
    change_header(folder, n_layer=32768, entry_bytes={str(layer): 1000 for layer in range(32768)})
    words = (command[0], folder, *command[1:])
    if command == ["info"]:
        found = ended(*words)
        assert found.status == 0
        assert found.cpu_seconds < 5
        assert found.peak_bytes < GIB
        return
    text = refused(*words)
    # 32,768 * 65,535 entries at 40 bytes are 80.0 GiB.
    assert f"{folder}/header.json: 32768 layers of 65535 experts: takes 80.0 GiB of memory" in text
    assert "SIMLAB_MEMORY_GIB=N allows N GiB" in text


def test_a_trace_whose_scores_are_null(tmp_path: Path) -> None:
    """A null takes as much memory as scores: 8,192 rows of 65,535 numbers are 2 GiB, of a file of 200 KB."""
    n, header = 8192, make_header(n_layer=1, n_expert=65535, k=1)
    folder = generate(header, n_prefill=0, n_decode=1, scorer=ones).write(tmp_path / "t.trace").path
    (part,) = (folder / "routing").iterdir()
    row = pl.read_parquet(part)
    rows = {name: row[name].new_from_index(0, n) for name in row.columns} | {
        "graph": pl.arange(0, n, eager=True)
    }
    nulls = {name: pl.Series([None] * n, dtype=row.schema[name]) for name in ("scores", "gate_probs")}
    pl.DataFrame(rows | nulls).write_parquet(part, row_group_size=n)
    said = {"rows": {"routing": n, "reads": 0, "tokens": 0}}
    change_header(folder, part_sha256={f"routing/{part.name}": part_sha256(part)}, **said)
    found = ended("replay", folder, "--budget", "1cycles")
    assert found.status == 0
    assert found.peak_bytes < GIB
    # Of another tool, a part is read whole by a child first.
    change_header(folder, part_sha256=None, **said)
    assert f"{part}: {n} rows: takes 8.3 GiB of memory" in refused("replay", folder, "--budget", "1cycles")


def ones(*_: object) -> dict[str, np.ndarray]:
    return {"scores": np.ones(65535, np.float32)}


def test_a_parquet_table_of_twenty_million_rows(tmp_path: Path) -> None:
    path, row = tmp_path / "r.parquet", pl.int_range(0, 20_000_000)
    pl.LazyFrame().select(token=row // 64, layer=row // 8 % 8, expert=row % 8).sink_parquet(path)
    assert path.stat().st_size < 3 << 20
    # 20 million rows of three numbers, 5 times 8 bytes for each.
    assert f"{path}: 20000000 rows: takes 2.2 GiB of memory" in refused_import(path)


def test_an_npz_that_unpacks_to_four_gigabytes(tmp_path: Path) -> None:
    path, n_blocks = tmp_path / "r.npz", 4000
    path.write_bytes(npz_of_zeros(n_blocks))
    assert path.stat().st_size < 6 << 20
    text = refused_import(path)
    assert f"{path}, array 'ids.npy': {128 + (n_blocks << 20)} bytes: takes 7.8 GiB of memory" in text


def npz_of_zeros(n_mib: int) -> bytes:
    """Ids `[tokens, 16, 8]`, int64, all 0; a MiB of them is packed once, and stands there many times."""
    header = str({"descr": "<i8", "fortran_order": False, "shape": (n_mib << 10, 16, 8)}).encode()
    header = b"\x93NUMPY\x01\0" + struct.pack("<H", 118) + header.ljust(117) + b"\n"
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = pack.compress(header) + pack.flush(zlib.Z_FULL_FLUSH)
    block = pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)
    packed = first + block * n_mib + pack.flush()
    facts = struct.pack("<HHHHHIII", 20, 0, 8, 0, 33, 0, len(packed), len(header) + (n_mib << 20))
    local = b"PK\3\4" + facts + struct.pack("<HH", 7, 0) + b"ids.npy" + packed
    central = (
        b"PK\1\2" + struct.pack("<H", 20) + facts + struct.pack("<HHHHHII", 7, 0, 0, 0, 0, 0, 0) + b"ids.npy"
    )
    return local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def test_ten_million_columns(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("token,layer,expert," + ",".join(map(str, range(10_000_000))) + "\n0,0,0\n")
    assert f"{path}, line 1: over 16 MiB long" in refused_import(path)


@pytest.mark.parametrize("name", ["r.csv", "route.csv", "r.jsonl"])
def test_a_line_of_a_gigabyte(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    heading = {
        "r.csv": "token,layer,expert",
        "route.csv": f"# route_trace v1\n{HEADING}",
        "r.jsonl": '{"token": 0}',
    }[name]
    with path.open("wb") as file:
        file.write(heading.encode() + b"\n")
        file.truncate(GIB)  # zeros that take no room on disk
    assert f"{path}, line {heading.count(chr(10)) + 2}: over 16 MiB long" in refused_import(path)


# ---------------------------------------------------------------------------------------------------------
# The same at a size that a test can hold, under a bound that is said


@pytest.fixture
def two_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMLAB_MEMORY_GIB", "2")


def refusal_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        import_files(
            [str(path)], str(path.parent / "t.trace"), facts=None if path.name == "route.csv" else FACTS
        )
    return str(caught.value)


def test_more_columns_than_a_table_has(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("token,layer,expert," + ",".join(f"c{i}" for i in range(9_998)) + "\n0,0,0\n")
    assert refusal_of(path) == f"{path}, line 1: 10001 columns; a table has at most 10000"


def test_more_columns_than_a_table_of_settings_has(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text("source,route," + ",".join(map(str, range(9_999))) + "\nreplay,original\n")
    with pytest.raises(InputError, match=r"sweep.csv, line 1: 10001 columns; a table has at most 10000"):
        read_cells_table(path)


@pytest.mark.usefixtures("two_gib")
def test_a_csv_of_many_fields(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("token,layer,expert" + ",\n" * (22 << 20))
    # 22 Mi commas and as many line ends, but for the last, and two commas of the heading, at 54 bytes.
    assert (
        f"{path}: {44 * (1 << 20) + 1} fields: takes 2.3 GiB of memory, more than SIMLAB_MEMORY_GIB=2 allows"
        in refusal_of(path)
    )


@pytest.mark.usefixtures("two_gib")
@pytest.mark.parametrize("name", ["r.json", "r.jsonl"])
def test_json_of_empty_objects(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"{}\n" * (30 << 20))
    message = f"{path}: {90 << 20} bytes to read: takes 2.2 GiB of memory"
    assert refusal_of(path).startswith(message)
    with pytest.raises(InputError, match=message):
        read_cells_table(path)


@pytest.mark.usefixtures("two_gib")
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_arrays_of_short_numbers(kind: str, tmp_path: Path) -> None:
    """96 MiB of ids of one byte, which are 2.3 GiB at 25 bytes for each."""
    path, shape, n = tmp_path / f"ids.{kind}", (96 << 14, 8, 8), 96 << 20
    header = str({"descr": "|u1", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    said = json.dumps({"ids": {"dtype": "U8", "shape": shape, "data_offsets": [0, n]}}).encode()
    front = {
        "npy": b"\x93NUMPY\x01\0" + struct.pack("<H", 118) + header,
        "safetensors": struct.pack("<Q", len(said)) + said,
    }[kind]
    with path.open("wb") as file:
        file.write(front)
        file.truncate(len(front) + n)
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    assert f"{n} values: takes 2.3 GiB of memory" in refusal_of(path)


@pytest.mark.parametrize("magic", ["1f8b0801", "28b52ffd", "78da"])
def test_a_packed_table_is_refused(magic: str, tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    path.write_bytes(bytes.fromhex(magic) + b"x\nx\n")
    assert refusal_of(path) == f"{path}: compressed; unpack it first"


@pytest.mark.usefixtures("two_gib")
def test_more_settings_than_memory_holds_caches(tmp_path: Path) -> None:
    """A policy of two numbers for each entry: 9 + 16 bytes, in and out, of 16,384 entries; 4,096 times are 3.1 GiB."""
    trace = generate(make_header(n_layer=4096, n_expert=4, k=2), n_prefill=0, n_decode=1).write(
        tmp_path / "t.trace"
    )
    cells = build_cells(budgets=[f"{n}cycles" for n in range(1, 4097)], margins=["0.1"], evicts=["lfu_decay"])
    with pytest.raises(
        InputError, match=r"t.trace: 4096 settings of 16384 entries, 4096 rows: takes 3.1 GiB"
    ):
        Replayer(trace, cells)
    assert Replayer(trace, cells[:2]).row == 0


@pytest.mark.parametrize("what", ["open", "slots", "curve"])
def test_more_rows_than_memory_holds(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 rows of four slots: 150 + 4 * 40 bytes each to replay, and twice 4 * 22 + 14 * 8 with every slot kept."""
    trace = without_scores(generate(make_header(), n_prefill=0, n_decode=100)).write(tmp_path / "t.trace")
    monkeypatch.setattr(bounds, "_SMALL", 0)
    n_bytes = {"open": 300 * 310, "slots": 300 * 400 + 3 * 16 * 18, "curve": 300 * 4 * 220}[what]
    said = {
        "open": "routing: 300 rows",
        "slots": "1 setting of 48 entries",
        "curve": "routing: lookups of 1200 slots",
    }
    (cell,) = build_cells(budgets=["2cycles"])
    run = {
        "open": lambda: open_trace(trace.path),
        "slots": lambda: replay_slots(trace, cell),
        "curve": lambda: lru_curve(trace),
    }[what]
    monkeypatch.setenv("SIMLAB_MEMORY_GIB", repr((n_bytes - 1) / GIB))
    with pytest.raises(
        InputError, match=f"t.trace.*{said[what]}.*: takes 0.0 GiB of memory, more than SIMLAB"
    ):
        run()
    monkeypatch.setenv("SIMLAB_MEMORY_GIB", repr(n_bytes / GIB))
    run()


@pytest.mark.usefixtures("two_gib")
def test_scores_of_more_experts_than_memory_holds_rows_of(tmp_path: Path) -> None:
    """4,096 rows are read at once, at eight bytes, and 512 got ready at 64: 64 KiB for an expert."""
    header = make_header(n_layer=1, n_expert=65535, k=1)
    trace = generate(header, n_prefill=0, n_decode=1, scorer=ones).write(tmp_path / "t.trace")
    with pytest.raises(
        InputError, match=r"t.trace/routing: scores of 65535 experts: takes 4.0 GiB of memory"
    ):
        TraceColumns(trace).chunk(0, 1, 512, ColumnNeeds(1, scores=True, rank=False, weights=frozenset()))


@pytest.mark.usefixtures("two_gib")
def test_more_pairs_than_memory_holds() -> None:
    """What a policy learns of each expert with each other: 4 bytes for 30,000 * 30,000 pairs of a layer."""
    policy = RoutingPolicy(
        "mine", "swap", lambda *_: (Choice(), None), learns={"near": Learned("pair", 0.0)}, train=dict
    )
    assert learn([Step(policy, {})], None, 1, 100)["swap"]["near"].shape == (1, 100, 100)
    with pytest.raises(InputError, match=r"policy mine: 'near' of shape \[1, 30000, 30000\]: takes 3.4 GiB"):
        learn([Step(policy, {})], None, 1, 30_000)


# ---------------------------------------------------------------------------------------------------------
# What is free


def test_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMLAB_MEMORY_GIB", raising=False)
    monkeypatch.setattr(bounds, "available_memory_bytes", lambda: 6 * GIB)
    require_memory(3 * GIB, "x")
    with pytest.raises(
        InputError, match=r"^x: takes 3.5 GiB of memory, more than half of the 6.0 GiB that are free; "
    ):
        require_memory(7 * GIB // 2, "x")
    # 500 times what is on disk is what nothing real takes, but only where it is large.
    require_memory(GIB, "x", 1000)
    require_memory(2 * GIB, "x", GIB // 250 + 1)
    with pytest.raises(InputError, match=r"^x: takes 2.0 GiB of memory, 2147483 times what is on disk"):
        require_memory(2 * GIB, "x", 1000)
    monkeypatch.setenv("SIMLAB_MEMORY_GIB", "8")
    require_memory(8 * GIB, "x", 1000)
    with pytest.raises(InputError, match="more than SIMLAB_MEMORY_GIB=8 allows"):
        require_memory(8 * GIB + 1, "x")
    for text in ("much", "inf", "nan"):
        monkeypatch.setenv("SIMLAB_MEMORY_GIB", text)
        with pytest.raises(InputError, match=f"SIMLAB_MEMORY_GIB={text}: must be a number of GiB"):
            require_memory(GIB, "x")


def test_a_limit_of_the_process_counts() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); "
        "from simlab.bounds import available_memory_bytes; print(available_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2 * GIB < int(done.stdout) < 4 * GIB
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert (available_memory_bytes() or 0) > 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_control_group_counts(version: int, tmp_path: Path) -> None:
    """Its own 8 GiB with 3 used, 1 of them cached files; above it 4 GiB with 3 used: 6 and 1 are left."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    total = "total_" if version == 1 else ""
    above = tmp_path / ("memory/a" if version == 1 else "a")
    for folder, limit, cached in ((above / "b", 8, 1), (above, 4, 0)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit * GIB}\n")
        (folder / names[1]).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(
            f"anon 5\n{total}inactive_file {cached * GIB}\n{total}active_file 0\n"
        )
    (tmp_path / "cgroup").write_text("5:devices:/a/b\n" + {1: "4:memory:/a/b\n", 2: "0::/a/b\n"}[version])
    assert list(bounds._control_groups(tmp_path / "cgroup", tmp_path)) == [6 * GIB, GIB]
    (above / "b" / names[0]).write_text("max\n")
    assert list(bounds._control_groups(tmp_path / "cgroup", tmp_path)) == [GIB]
