"""Routings as people dump them: one small run in memory, written as arrays, tables and a fingerprint."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

import simlab
from simlab.cells import build_cells
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, open_trace

f32 = np.float32
N_EXPERT, ENTRY_BYTES = 8, 1000
FACTS: dict[str, Any] = {"n_expert": N_EXPERT, "expert_bytes": ENTRY_BYTES, "prefill": 3}
SCORED: dict[str, Any] = {
    **FACTS,
    "gating": "softmax",
    "score_space": "prob",
    "weight_rule": {"normalise": True},
}


def dump(
    *, tokens: int = 7, layers: int = 3, k: int = 2, n_expert: int = N_EXPERT, seed: int = 1
) -> dict[str, NDArray]:
    """A run of a softmax router: logits, the probabilities, its k best and their normalised weights."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (tokens, layers, n_expert)).astype(f32)
    power = np.exp(logits.astype(np.float64))
    scores = (power / power.sum(axis=2, keepdims=True)).astype(f32)
    ids = np.argsort(-scores, axis=2)[:, :, :k].astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=2)
    weights = (weights / weights.sum(axis=2, keepdims=True)).astype(f32)
    return {"ids": ids, "weights": weights, "scores": scores, "logits": logits}


RUN = dump()
"""The run of the tests that need no other."""


def plain(run: dict[str, NDArray]) -> dict[str, NDArray]:
    """Ids, weights and scores of a run."""
    return {name: run[name] for name in ("ids", "weights", "scores")}


def npz_bytes(arrays: dict[str, NDArray], *, compressed: bool = False) -> bytes:
    """Arrays as the bytes of an npz file."""
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def npy_bytes(array: NDArray) -> bytes:
    """An array as the bytes of a npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def list_rows(
    run: dict[str, NDArray], names: tuple[str, ...] = ("ids", "weights", "scores")
) -> list[dict[str, Any]]:
    """One row per (token, layer), with lists."""
    n_tokens, n_layers = run["ids"].shape[:2]
    called = {"ids": "experts"}
    return [
        {
            "token": t,
            "layer": layer,
            **{called.get(name, name): run[name][t, layer].tolist() for name in names if name in run},
        }
        for t in range(n_tokens)
        for layer in range(n_layers)
    ]


def slot_rows(run: dict[str, NDArray]) -> list[dict[str, Any]]:
    """One row per (token, layer, slot)."""
    n_tokens, n_layers, k = run["ids"].shape
    return [
        {
            "token": t,
            "layer": layer,
            "slot": slot,
            "expert": int(run["ids"][t, layer, slot]),
            "weight": float(run["weights"][t, layer, slot]),
        }
        for t in range(n_tokens)
        for layer in range(n_layers)
        for slot in range(k)
    ]


def csv_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Rows as CSV; a list is written as its numbers with spaces between, an empty one as []."""

    def word(value: Any) -> str:
        return (" ".join(map(repr, value)) or "[]") if isinstance(value, list) else repr(value)

    lines = [",".join(rows[0]), *(",".join(map(word, row.values())) for row in rows)]
    return "".join(line + "\n" for line in lines).encode()


def jsonl_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Rows as one JSON object per line."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Rows as parquet."""
    file = io.BytesIO()
    pl.DataFrame(rows).write_parquet(file)
    return file.getvalue()


def fingerprint(run: dict[str, NDArray], first: int = 5) -> dict[str, Any]:
    """The JSON of a fingerprint, its first decoded token at position `first`; the last sampled one has no row."""
    n_tokens, n_layers = run["ids"].shape[:2]
    words = [f"w{t}" for t in range(first + n_tokens + 1)]
    return {
        "row_index": 7,
        "original_prompt": "a, b",
        "full_text": words,
        "generated_only": words[first:],
        "router_data": [
            {
                f"token_{first + t}": {
                    f"layer_{layer}": {
                        "selected_experts": run["ids"][t, layer].tolist(),
                        "selected_probs": run["weights"][t, layer].tolist(),
                    }
                    for layer in range(n_layers)
                }
            }
            for t in range(n_tokens)
        ],
    }


def files_of(run: dict[str, NDArray]) -> dict[str, tuple[str, bytes]]:
    """One run in every format: name of the format to (file name, bytes)."""
    from safetensors.numpy import save

    return {
        "npz": ("run.npz", npz_bytes(plain(run))),
        "npz compressed": ("run.npz", npz_bytes(plain(run), compressed=True)),
        "safetensors": ("run.safetensors", save(plain(run))),
        "csv lists": ("run.csv", csv_bytes(list_rows(run))),
        "jsonl lists": ("run.jsonl", jsonl_bytes(list_rows(run))),
        "parquet lists": ("run.parquet", parquet_bytes(list_rows(run))),
    }


def files_without_scores(run: dict[str, NDArray]) -> dict[str, tuple[str, bytes]]:
    """The formats that hold no scores."""
    return {
        "npy": ("ids.npy", npy_bytes(run["ids"])),
        "csv slots": ("run.csv", csv_bytes(slot_rows(run))),
        "jsonl slots": ("run.jsonl", jsonl_bytes(slot_rows(run))),
        "parquet slots": ("run.parquet", parquet_bytes(slot_rows(run))),
        "fingerprint": ("run.json", json.dumps(fingerprint(run)).encode()),
    }


def write(folder: Path, file: tuple[str, bytes]) -> Path:
    """Write a file of `files_of`."""
    path = folder / file[0]
    path.write_bytes(file[1])
    return path


def load(folder: Path, *files: tuple[str, bytes], **facts: Any) -> Trace:
    """Import files into `folder` and open the trace."""
    paths = [str(write(folder, file)) for file in files]
    return open_trace(import_files(paths, str(folder / "t.trace"), True, facts))


def arrays_with(**changed: NDArray) -> tuple[str, bytes]:
    """`RUN` as an npz file, with some arrays changed or added."""
    return "run.npz", npz_bytes(plain(RUN) | changed)


def with_values(name: str, place: Any, value: Any) -> NDArray:
    """An array of `RUN` with a value at an index or slice of it."""
    array = RUN[name].copy()
    array[place] = value
    return array


def replayed(trace: Trace, **cell: Any) -> Any:
    """The numbers of cells of two token cycles."""
    return simlab.sweep(trace, build_cells(budgets=["2cycles"], **cell))
