"""A model larger than its cache: memory holds the budget, and the file's mapping never reads an expert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import live  # noqa: F401  (skips where the engine is not installed)
import pytest
from tiny_models import make_model

from simlab.record.gguf import SAMPLES

MIB = 1 << 20
CHILD = """
import ctypes, json, mmap, os, sys
import numpy as np
from simlab.cells import build_cells
from simlab.record.engine import Engine
from simlab.record.asking import NodeFilter
from simlab.record.gguf import read_gguf

path = sys.argv[1]
descriptor = os.open(path, os.O_RDONLY)
os.fsync(descriptor)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def in_page_cache():
    size = os.path.getsize(path)
    mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, dtype=np.uint8)
    pages = np.zeros(-(-size // 4096), dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    assert asked == 0
    return (pages & 1).astype(bool)

model = read_gguf(__import__("pathlib").Path(path))
inner = np.zeros(-(-os.path.getsize(path) // 4096), dtype=bool)
dense = 0
for name, place in model.tensors.items():
    if "_exps." in name:
        inner[-(-place.offset // 4096) : (place.offset + place.size) // 4096] = True
    else:
        dense += place.size
# The compiler of the callback is code, some 60 MiB of it, and no part of what a model takes.
NodeFilter(frozenset({"none"}), bool).close()
before_pages = int((in_page_cache() & inner).sum())
before = status("VmRSS")
with Engine(path, n_threads=1) as engine:
    cell = build_cells(budgets=["12.5%"])[0]
    engine.start(cell)
    engine.score(np.random.default_rng(0).integers(10, 250, 48).tolist())
    largest = max(engine.experts.page_bytes(*entry) for entry in engine.experts.slices)
    print(json.dumps({
        "grown": status("VmHWM") - before,
        "budget": engine.cache.budget.total_bytes,
        "batch": largest * model.n_expert_used * 8,
        "dense": dense,
        "expert_bytes": int(inner.sum()) * 4096,
        "expert_pages_before": before_pages,
        "expert_pages": int((in_page_cache() & inner).sum()),
        "io_mode": engine.header(cell).io_mode,
        "resident": engine.experts.resident_bytes(),
    }))
"""


@pytest.mark.slow
def test_memory_holds_the_budget_and_the_mapping_reads_no_expert(tmp_path: Path) -> None:
    model = make_model(tmp_path, "split", n_layer=8, n_embd=512, n_ff=768, n_expert=32)
    assert model.stat().st_size > 300 * MIB
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # The prefill graph's batch is the largest: 8 tokens, k experts each.
    allowed = found["budget"] + found["batch"] + found["dense"] + 32 * MIB
    assert found["grown"] <= allowed < found["expert_bytes"]
    assert found["resident"] <= found["budget"] + found["batch"]
    if found["io_mode"] == "direct" and found["expert_pages_before"] == 0:
        # The digest's samples, of two pages at most, and nothing else.
        n_tensors = 8 * 3
        assert found["expert_pages"] <= 2 * SAMPLES * n_tensors
    else:
        pytest.skip("this file system reads through the page cache; the memory bounds were checked")
