#!/usr/bin/env python3
"""Stands in for an engine binary: takes its flags, runs simlab's own engine, and writes the family's files.

`STAND_IN` in the environment makes it fail in one of several ways.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import polars as pl


def write_route(trace, path: Path) -> None:
    """`route_trace v1` of a recording; in prefill only the last token's rows say their position."""
    header = trace.header
    lines = [
        "# route_trace v1",
        f"# model={header.model} arch={header.arch} n_layer={header.n_layer} n_expert={header.n_expert} "
        f"n_expert_used={header.n_expert_used}",
        *(
            f"# layer={i} expert_bytes={header.entry_bytes.get(i, 0)} dense_bytes={header.dense_bytes[i]}"
            for i in range(header.n_layer)
        ),
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped",
    ]
    for row in trace.routing.filter(pl.col("turn") >= 0).collect().iter_rows(named=True):
        for slot, expert in enumerate(row["experts"]):
            lines.append(
                f"{row['turn']},{row['phase']},{row['step']},{row['layer']},{slot},{expert},"
                f"{row['weights'][slot]:.6g},{row['residency'][slot]},{row['read_bytes'][slot]},"
                f"{int(row['dropped'][slot])}"
            )
    path.write_text("\n".join(lines) + "\n")


def write_metrics(trace, path: Path, args) -> None:
    """`bmoe_metrics v2` of its decoded tokens; of a text that is scored the heading only, as the family does."""
    tokens = trace.tokens.filter((pl.col("turn") >= 0) & (pl.col("phase") == 1)).collect()
    n_prompt = trace.routing.filter(pl.col("phase") == 0).select(pl.col("step").n_unique()).collect().item()
    lines = [
        "# bmoe_metrics v2",
        f"# model={trace.header.model} n_expert={trace.header.n_expert}",
        f"# moe_stream=1 cache_mb={args.cache_mb} o_direct=1 overlap=0 drop_cold_frac={args.drop_cold_experts}",
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms",
    ]
    if args.ppl:
        path.write_text("\n".join(lines) + "\n")
        return
    for i, row in enumerate(tokens.iter_rows(named=True)):
        wall, wait, management = (row[n] / 1e6 for n in ("wall_ns", "read_wait_ns", "management_ns"))
        lines.append(
            f"{i + 1},{len(tokens)},{wall:.3f},{wait:.3f},{wall - wait - management:.3f},{row['window_bytes']},50,0,"
            f"{management:.3f}"
        )
    lines.append(
        f"# summary tokens={len(tokens)} n_prompt={n_prompt} experts_substituted={tokens['substituted'].sum()}"
    )
    path.write_text("\n".join(lines) + "\n")


def say_score(trace) -> None:
    """What the family prints of a text that was scored."""
    tokens = trace.tokens.filter((pl.col("turn") >= 0) & (pl.col("phase") == 1)).collect()
    slots = trace.routing.filter((pl.col("turn") >= 0) & (pl.col("phase") == 1)).collect()["experts"].len()
    slots *= trace.header.n_expert_used
    nll, hits = tokens["nll"].mean(), tokens["hit"].sum()
    print(
        f"ppl: {2.718281828459045**nll:.4f}  nll: {nll:.5f}  next-token hits: {hits}/{len(tokens)} "
        f"({100 * hits / len(tokens):.1f}%)  1.00 s"
    )
    print(
        f"ppl-policy: {tokens['dropped'].sum()}/{slots} routed experts dropped, "
        f"{tokens['substituted'].sum()}/{tokens['reranked'].sum()} reranked slots substituted"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-m", "-p", "--ppl", "--route-trace", "--csv"):
        parser.add_argument(flag)
    for flag in ("-n", "-t", "-c", "--io-threads", "--cache-mb"):
        parser.add_argument(flag, type=int)
    for flag in ("--drop-cold-experts", "--expert-substitute"):
        parser.add_argument(flag, type=float, default=0.0)
    for flag in ("--moe-stream", "--overlap", "--ppl-step", "--force-cache"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    how = os.environ.get("STAND_IN", "")
    if how == "status":
        print("loading\nno such\ttensor", file=sys.stderr)
        sys.exit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "silent":
        return
    if how == "rubbish":
        Path(args.route_trace).write_text("# route_trace v1\n# model=x\n")
        return
    from simlab.cells import build_cells
    from simlab.record.engine import Engine
    from simlab.trace.store import open_trace

    drops = [str(args.drop_cold_experts)] if args.drop_cold_experts else []
    margins = [str(args.expert_substitute)] if args.expert_substitute else []
    (cell,) = build_cells(budgets=[f"{args.cache_mb}MiB"], margins=margins, drops=drops)
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(args.m, n_threads=args.t or 1, n_ctx=args.c) as engine,
    ):
        out = Path(folder) / "t.trace"
        if args.ppl:
            assert args.ppl_step
            engine.record_text(engine.tokenize(Path(args.ppl).read_bytes()), cell, out)
        else:
            engine.record_generation([engine.tokenize(args.p)], args.n, cell, out)
        trace = open_trace(out)
        write_route(trace, Path(args.route_trace))
        write_metrics(trace, Path(args.csv), args)
        if args.ppl:
            say_score(trace)


if __name__ == "__main__":
    main()
