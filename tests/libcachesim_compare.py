"""A development aid: `--sequential` beside libCacheSim, which handles one access at a time.

Run it by hand where libCacheSim's Python bindings happen to be installed; nothing of the project needs them:

    python tests/libcachesim_compare.py

It compares the misses of LRU, FIFO, LFU and Belady on a random walk over 64 experts of one layer. LFU breaks
ties and keeps counts in its own way there, so its figures are printed, not asserted.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
from synthetic import from_batches, make_header

from simlab.cells import build_cells
from simlab.replay.run import sweep

N_EXPERT, N_TOKENS, K = 64, 3000, 4
ASSERTED = ("lru", "fifo", "belady")


def main() -> int:
    """Print the misses of both; 1 if those that must agree do not."""
    if importlib.util.find_spec("libcachesim") is None:
        print("libcachesim is not installed: nothing to compare with")
        return 0
    import libcachesim as lcs  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(1)
    popularity = 1 / np.arange(1, N_EXPERT + 1)
    tokens = [
        rng.choice(N_EXPERT, K, replace=False, p=popularity / popularity.sum()).tolist()
        for _ in range(N_TOKENS)
    ]
    walk = [expert for token in tokens for expert in token]
    following = np.full(len(walk), 2**62)
    last: dict[int, int] = {}
    for at in range(len(walk) - 1, -1, -1):
        following[at] = last.get(walk[at], 2**62)
        last[walk[at]] = at
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        trace = from_batches(make_header(n_layer=1, n_expert=N_EXPERT, k=K, sizes=(1,)), tokens)
        opened = trace.write(Path(folder) / "t")
        for capacity in (8, 16, 32):
            for evict, kind in (
                ("lru", lcs.LRU),
                ("fifo", lcs.FIFO),
                ("lfu", lcs.LFU),
                ("belady", lcs.Belady),
            ):
                cell = build_cells(budgets=[f"{capacity}/layer"], evicts=[evict], sequential=True)[0]
                ours = sweep(opened, [cell])[0].all.misses
                cache = kind(cache_size=capacity)
                theirs = 0
                for at, expert in enumerate(walk):
                    request = lcs.Request()
                    request.obj_id, request.obj_size = expert + 1, 1
                    request.next_access_vtime = int(following[at])
                    theirs += not cache.get(request)
                print(f"{evict:8} {capacity:3} entries: {ours} misses, libCacheSim {theirs}")
                wrong += evict in ASSERTED and ours != theirs
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
