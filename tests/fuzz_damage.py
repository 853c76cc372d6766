"""Valid files of every format that `simlab import` reads, and damage to them: of bytes, and of what they say."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import dump_files
import numpy as np
import polars as pl
from route_files import io_lines, metrics_lines, route_lines

Files = dict[str, bytes]
"""File name to content; the damaged file is the first."""

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
            data = bytes_damaged(rng, data)
    else:
        data = bytes_damaged(rng, data)
    if facts and rng.random() < 0.15:
        facts = dict(facts)
        facts[rng.choice(sorted(facts))] = rng.choice(NUMBERS)
    return {**files, name: data}, facts


def bytes_damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, doubled, dropped, swapped or written over, once to four times."""
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
            strict = rng.random() < 0.5
            # Lists of lists among numbers let polars' constructor recurse until the stack is full.
            values = [value for row in rows for value in row.values() if isinstance(value, list)]
            if any(isinstance(item, list) for value in values for item in value):
                raise TypeError("polars cannot build it")
            frame = pl.DataFrame(rows, strict=strict, infer_schema_length=None)
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
