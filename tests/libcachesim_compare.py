"""A development aid: `--sequential` beside libCacheSim, which handles one access at a time.

Run it by hand where libCacheSim's Python bindings happen to be installed; nothing of the project needs them:

    python tests/libcachesim_compare.py

It compares the misses of each policy both have, on a random walk over 64 experts of one layer, all of one size.
Those whose definitions agree must give equal misses; for the others the table says why they differ.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import from_batches, make_header

from simlab.cells import build_cells
from simlab.replay.run import sweep
from simlab.trace.store import Trace

N_EXPERT, N_TOKENS, K, SIZE = 64, 3000, 4, 1
CAPACITIES = (10, 20, 40)
"""Entries: whole tenths, halves and quarters, so that shares are whole entries too."""
PAIRS: dict[str, tuple[str, dict[str, Any], str]] = {
    # Ours, theirs with its options, and why they may differ; none: they must not.
    "lru": ("LRU", {}, ""),
    "fifo": ("FIFO", {}, ""),
    "belady": ("Belady", {}, ""),
    "clock": ("Clock", {}, ""),
    "sieve": ("Sieve", {}, ""),
    "two_q": ("TwoQ", {}, ""),
    "arc": ("ARC", {}, ""),
    "lirs": (
        "LIRS",
        {},
        "it takes LIR status from an entry when one outside the stack is used, unlike the paper",
    ),
    "s3fifo": (
        "S3FIFO",
        {},
        "it fills the main queue first, and takes nothing that fills the small one (10 entries)",
    ),
    "gdsf": ("GDSF", {}, "ours is what the paper comes to in plain Python; why theirs differs is not known"),
    "lfu": ("LFU", {}, "it forgets counts at eviction, and breaks ties its own way"),
    "slru": ("SLRU", {}, "it has four segments"),
    "wtinylfu:window=0.1": (
        "WTinyLFU",
        {"window_size": 0.1},
        "it counts in a sketch, hits of the main cache alone",
    ),
}


def walk() -> list[list[int]]:
    """Tokens of K experts each: a Zipf distribution whose ranks are dealt anew every 500 tokens."""
    rng = np.random.default_rng(1)
    popularity = 1 / np.arange(1, N_EXPERT + 1)
    popularity /= popularity.sum()
    tokens = []
    for _ in range(N_TOKENS // 500):
        ranks = rng.permutation(N_EXPERT)
        tokens += [ranks[rng.choice(N_EXPERT, K, replace=False, p=popularity)].tolist() for _ in range(500)]
    return tokens


def their_misses(cache: Any, accesses: list[int]) -> int:
    """Misses of a libCacheSim cache over a walk; each request says when its object comes again, for Belady."""
    import libcachesim as lcs  # pyright: ignore[reportMissingImports]

    following = np.full(len(accesses), 2**62)
    last: dict[int, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        following[at] = last.get(accesses[at], 2**62)
        last[accesses[at]] = at
    misses = 0
    for at, expert in enumerate(accesses):
        request = lcs.Request()
        request.obj_id, request.obj_size = expert + 1, SIZE
        request.next_access_vtime = int(following[at])
        misses += not cache.get(request)
    return misses


def our_misses(trace: Trace, evict: str) -> list[int]:
    """Misses by capacity."""
    budgets = [f"{n}/layer" for n in CAPACITIES]
    return [c.all.misses for c in sweep(trace, build_cells(budgets=budgets, evicts=[evict], sequential=True))]


def main() -> int:
    """Print the misses of both; 1 if those that must agree do not."""
    if importlib.util.find_spec("libcachesim") is None:
        print("libcachesim is not installed: nothing to compare with")
        return 0
    import libcachesim as lcs  # pyright: ignore[reportMissingImports]

    tokens = walk()
    accesses = [expert for token in tokens for expert in token]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        header = make_header(n_layer=1, n_expert=N_EXPERT, k=K, sizes=(SIZE,))
        trace = from_batches(header, tokens).write(Path(folder) / "t")
        for evict, (kind, options, why) in PAIRS.items():
            ours = our_misses(trace, evict)
            theirs = [
                their_misses(getattr(lcs, kind)(cache_size=n * SIZE, **options), accesses) for n in CAPACITIES
            ]
            gaps = ", ".join(f"{100 * (a - b) / b:+.1f} %" for a, b in zip(ours, theirs, strict=True))
            print(
                f"{evict:9} {ours}, libCacheSim {theirs}: {gaps if ours != theirs else 'equal'} {why}".rstrip()
            )
            wrong += not why and ours != theirs
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
