"""Small route traces written by an independent plain-Python LRU, and where the recorded ones are."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("SIMLAB_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
HEADING: str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"
ENTRY_BYTES = 1000


def shared(name: str) -> Path:
    """A recorded file, or skip."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is not here; set SIMLAB_SHARED_DATA to the folder of recorded data")
    return path


def route_lines(
    *,
    layers: int = 3,
    n_expert: int = 8,
    k: int = 2,
    prompt: int = 3,
    decode: int = 4,
    entries: int = 9,
    seed: int = 1,
) -> list[str]:
    """A route trace: one prefill graph whose last layer routes the last token, then decode graphs."""
    rng = random.Random(seed)
    lines = [
        "# route_trace v1",
        f"# model=toy.gguf arch=toy n_layer={layers} n_expert={n_expert} n_expert_used={k}",
        *(f"# layer={i} expert_bytes={ENTRY_BYTES} dense_bytes={10 + i}" for i in range(layers)),
        HEADING,
    ]
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    graphs = [(0, list(range(prompt)))] + [(1, [prompt + i]) for i in range(decode)]
    for phase, steps in graphs:
        for layer in range(layers):
            tokens = steps[-1:] if phase == 0 and layer == layers - 1 else steps
            resident = set(cache)
            touched: set[tuple[int, int]] = set()
            for step in tokens:
                for slot, expert in enumerate(rng.sample(range(n_expert), k)):
                    key = (layer, expert)
                    charge = ENTRY_BYTES if key not in resident and key not in touched else 0
                    touched.add(key)
                    cache[key] = None
                    cache.move_to_end(key)
                    weight = round(1 / (slot + 1.5), 4)
                    lines.append(
                        f"0,{phase},{step},{layer},{slot},{expert},{weight},{int(key in resident)},{charge},0"
                    )
            while len(cache) > entries and next(iter(cache)) not in touched:
                cache.popitem(last=False)
    return lines


def metrics_lines(*, prompt: int = 3, decode: int = 4) -> list[str]:
    """The metrics of `route_lines`: settings above, a summary below; a missed entry is read in two pages."""
    rows = [line.split(",") for line in route_lines(prompt=prompt, decode=decode) if line[0].isdigit()]
    missed = [sum(r[2] == str(prompt + i) and r[8] != "0" for r in rows) for i in range(decode)]
    return [
        "# bmoe_metrics v2",
        "# engine=0.19.0",
        "# model=toy.gguf arch=toy n_layer=3 n_expert=8 n_expert_used=2",
        "# cache_mb=3 o_direct=1 overlap=1 drop_cold_frac=0 drop_renorm=1 drop_prefill=0",
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,turn,cache_budget_mib",
        *(f"{i + 1},{decode},10.5,4.0,6.0,{8192 * n},50.0,3.0,0.5,2,0,3.0" for i, n in enumerate(missed)),
        f"# summary tokens={decode} n_prompt={prompt} cache_budget_MiB=3.0",
    ]


def io_lines(*, prompt: int = 3, decode: int = 4) -> list[str]:
    """Some reads of `route_lines`."""
    return [
        "# io_trace v1",
        "# model=toy.gguf arch=toy o_direct=1",
        "turn,phase,step,layer,expert,proj,lane,spec,offset,req_bytes,read_bytes,latency_ns",
        f"0,0,{prompt - 1},0,3,0,0,0,4096,1000,4096,135652",
        *(f"0,1,{prompt + i},{i % 3},{i},{i % 3},1,0,8192,1000,4096,118817" for i in range(decode)),
    ]


def write_lines(path: Path, lines: list[str], end: str = "\n") -> Path:
    """Write lines, each with its line end."""
    path.write_bytes("".join(line + end for line in lines).encode())
    return path
