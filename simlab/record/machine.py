"""What the machine and llama.cpp allow: memory, threads, the widest routing, and the budget that fits."""

from __future__ import annotations

import os
from pathlib import Path

from simlab import bounds
from simlab.cells import MIB
from simlab.errors import InputError, RunError
from simlab.record.gguf import GgufModel
from simlab.types import ResolvedBudget, TraceHeader

_SMALL_TOKEN_BYTES = 16 * MIB


def check_top_k(top_k: int, gguf: GgufModel) -> None:
    """Refuse what would make llama.cpp abort the process: more experts than there are, a graph beyond its room."""
    if not 1 <= top_k <= gguf.n_expert:
        raise InputError(f"--top-k {top_k}: must lie between 1 and this model's {gguf.n_expert} experts")
    moe_layers = len({name.split(".")[1] for name in gguf.tensors if "_exps." in name})
    # llama.cpp reserves this many graph nodes; summing k experts takes two nodes for each of them.
    room = max(1024, 8 * len(gguf.tensors)) - 60 * gguf.n_layer
    most = max(room // (2 * max(moe_layers, 1)), gguf.n_expert_used)
    if top_k > most:
        raise InputError(
            f"--top-k {top_k}: llama.cpp's graph of this model has room for {most} experts per token"
        )


def default_threads(gguf: GgufModel) -> int:
    """Cores, at most 8; one where a layer's experts are so small that threads only wait for each other."""
    expert_bytes = sum(place.size for name, place in gguf.tensors.items() if "_exps." in name)
    token_bytes = expert_bytes * gguf.n_expert_used // gguf.n_expert
    return 1 if token_bytes < _SMALL_TOKEN_BYTES else min(os.cpu_count() or 1, 8)


def auto_budget(header: TraceHeader, dense_bytes: int) -> ResolvedBudget:
    """The budget for a machine, once at start: what memory leaves, at least 1500 MiB or all experts (section 3)."""
    cap = header.expert_bytes
    room = available_memory_bytes() - dense_bytes - 1536 * MIB
    total = max(min(room, cap), min(1500 * MIB, cap))
    n = len(header.entry_bytes)
    return ResolvedBudget(total, (total // n,) * n, per_layer=False)


def available_memory_bytes() -> int:
    """Memory that is free to take."""
    available = bounds.available_memory_bytes()
    if available is None:
        raise RunError("/proc/meminfo names no MemAvailable; give --budget")
    return available


def cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
