"""What a reader of the docs has: small real files under the names that the pages use."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
from dump_files import dump, npz_bytes, plain

from simlab.trace.store import open_trace
from simlab.types import DECODE

ROOT = Path(__file__).parent.parent
DATA = ROOT / "simlab" / "data"
TEXT_BYTES = 96
"""Of a text, a token each for the embedded model."""
ITEMS = 2
MODELS = ("model.gguf",)
TEXTS = (
    "book.txt",
    "other.txt",
    "simlab/data/text-b.txt",
    "simlab/data/text-c.txt",
    "simlab/data/text-d.txt",
)
QUESTIONS = ("questions.jsonl", "simlab/data/choices-100.jsonl")


def make_files(folder: Path) -> None:
    """Fill a scratch folder: links to the shipped traces and model, texts and items cut short, a route CSV, a dump."""
    (folder / "simlab" / "data").mkdir(parents=True)
    (folder / "docs").mkdir()
    os.symlink(ROOT / "traces", folder / "traces")
    os.symlink(ROOT / "policies", folder / "policies")
    # A trace of the reader's own, which nothing on a page may change for the next page.
    os.symlink(ROOT / "traces" / "original.trace", folder / "T.trace")
    for name in MODELS:
        os.symlink(DATA / "tiny-moe-q8_0.gguf", folder / name)
    text = (DATA / "text-b.txt").read_bytes()
    for i, name in enumerate(TEXTS):
        (folder / name).write_bytes(text[i * TEXT_BYTES : (i + 1) * TEXT_BYTES])
    items = (DATA / "choices-100.jsonl").read_text("utf-8").splitlines(keepends=True)
    for name in QUESTIONS:
        (folder / name).write_text("".join(items[:ITEMS]), "utf-8")
    write_route_csv(folder / "qwen.route.csv", ROOT / "traces" / "original.trace")
    write_metrics_csv(folder / "qwen.metrics.csv", ROOT / "traces" / "original.trace")
    run = dump(tokens=40, layers=3, k=2, n_expert=128)
    (folder / "dump.npz").write_bytes(npz_bytes(plain(run)))


def write_route_csv(path: Path, trace: Path) -> None:
    """A recording as the `route_trace v1` that another engine would have written of it."""
    recorded = open_trace(trace)
    header = recorded.header
    entry, dense = header.entry_bytes, header.dense_bytes or {}
    lines = [
        "# route_trace v1",
        f"# model={header.model} arch={header.arch} n_layer={header.n_layer} n_expert={header.n_expert} "
        f"n_expert_used={header.n_expert_used}",
        *(f"# layer={i} expert_bytes={entry[i]} dense_bytes={dense.get(i, 0)}" for i in header.moe_layers),
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes",
    ]
    for row in recorded.routing.collect().iter_rows(named=True):
        slots = zip(row["experts"], row["weights"], row["residency"], row["read_bytes"], strict=True)
        for slot, (expert, weight, residency, read) in enumerate(slots):
            where = f"{row['turn']},{row['phase']},{row['step']},{row['layer']}"
            lines.append(f"{where},{slot},{expert},{weight:.6f},{residency},{read}")
    path.write_text("\n".join(lines) + "\n")


def write_metrics_csv(path: Path, trace: Path) -> None:
    """Its metrics, in the columns of a phone's file."""
    tokens = open_trace(trace).tokens.filter(pl.col("phase") == DECODE).collect()
    lines = ["step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms"]
    hits = lookups = 0
    for step, row in enumerate(tokens.iter_rows(named=True), 1):
        hits, lookups = hits + row["hits"], lookups + row["lookups"]
        wall, compute, wait, managed = (
            row[f"{name}_ns"] / 1e6 for name in ("wall", "compute", "read_wait", "management")
        )
        lines.append(
            f"{step},{tokens.height},{wall:.3f},{wait:.3f},{compute:.3f},{row['window_bytes']},"
            f"{100 * hits / lookups:.2f},{wait:.3f},{managed:.3f},{row['major_faults'] or 0},{wall:.3f}"
        )
    path.write_text("\n".join(lines) + "\n")
