"""`simlab demo`: the whole loop on the embedded model, in about a minute.

Records a held-out text, sweeps margins and budgets over the trace, picks a few margins along the trade-off
at the recorded budget, runs each pick live on the same tokens, and sets replay and live side by side.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from simlab.cells import build_cells
from simlab.cli.options import warn_about_cells
from simlab.cli.output import Progress, cells_to_frame, table, write_frame
from simlab.errors import InputError
from simlab.judge.measure import measure
from simlab.judge.pick import pick_along
from simlab.judge.report.inputs import trace_report
from simlab.judge.report.page import write_report
from simlab.judge.validate import validate
from simlab.record.engine import Engine
from simlab.replay.run import sweep
from simlab.trace.store import open_trace
from simlab.types import CellNumbers, Comparison

DEMO_TEXT = Path(__file__).resolve().parent.parent / "data" / "text-b.txt"
N_TOKENS = 320
BUDGET = "2cycles"
"""Where a cache matters: a few tokens' experts fit, the model's do not."""
BUDGETS = ("1.2cycles", "1.5cycles", "2cycles", "2.5cycles", "3cycles", "4cycles", "5cycles", "6cycles")
MARGINS = ("0", "0.05", "0.1", "0.15", "0.2", "0.3", "0.45", "0.6")
N_PICKS = 4
OUTPUTS = ("demo.trace", "sweep.parquet", "report.html")
N_THREADS = 1
"""The embedded model is too small to share: two threads spend their time waiting for each other."""


@dataclass(frozen=True)
class Demo:
    """What the demo found."""

    recorded: CellNumbers
    swept: list[CellNumbers]
    compared: list[Comparison]
    report: Path


def run_demo(out: Path, say: Callable[[str], None], n_tokens: int = N_TOKENS) -> Demo:
    """Run the demo into a folder that does not exist yet; `say` gets a line per stage."""
    out.mkdir(parents=True)
    text = DEMO_TEXT.read_bytes()
    cell = build_cells(budgets=[BUDGET])[0]
    trace_path = out / "demo.trace"
    with Engine(n_threads=N_THREADS) as engine, Progress("record") as progress:
        tokens = engine.tokenize(text)[:n_tokens]
        say(f"recording {len(tokens)} tokens of a held-out text at {BUDGET}, original routing")
        engine.record_text(tokens, cell, trace_path, text=text, progress=progress)
    trace = open_trace(trace_path)
    recorded = measure(trace, cell)
    cells = build_cells(budgets=BUDGETS, margins=MARGINS)
    say(f"replaying {len(cells)} cells: {len(MARGINS)} margins x {len(BUDGETS)} budgets (simulated)")
    with Progress("sweep") as progress:
        swept = sweep(trace, cells, progress=progress)
    write_frame(out / "sweep.parquet", cells_to_frame(swept))
    here = [i for i, c in enumerate(cells) if c.budget.text == BUDGET]
    picks = [here[p] for p in pick_along([swept[i] for i in here], N_PICKS)]
    warn_about_cells([cells[i] for i in picks], trace.header)
    margins = ", ".join(f"{cells[i].margin:g}" for i in picks)
    say(f"running {len(picks)} picks live on the same tokens: L = {margins} at {BUDGET}")
    with Progress("live") as progress:
        compared = validate(trace, [cells[i] for i in picks], progress=progress, n_threads=N_THREADS)
    report = out / "report.html"
    with Progress("report") as progress:
        told = trace_report(
            str(trace_path), sweep=swept, comparisons=compared, explained=cell, progress=progress
        )
    write_report(
        report,
        [told],
        commands=[
            "simlab demo",
            f"simlab sweep {trace_path} --budget {','.join(BUDGETS)} --margin {','.join(MARGINS)}",
            f"simlab validate {trace_path} --budget {BUDGET} --margin {margins.replace(' ', '')} --threads {N_THREADS}",
        ],
        notes=[
            f"The first {len(tokens)} tokens of a held-out text, teacher-forced: the first 8 as one prefill graph, "
            "then one token per graph. Perplexity is over the decoded tokens.",
            "Each live run starts with an empty cache and records its own trace, which costs it a little time.",
        ],
    )
    return Demo(recorded, swept, compared, report)


def demo_command(args: argparse.Namespace) -> None:
    """`simlab demo`."""
    out = Path(args.out or "demo")
    if out.exists():
        if not args.force:
            raise InputError(f"--out {out}: exists already; add --force to replace it")
        others = (
            sorted(p.name for p in out.iterdir() if p.name not in OUTPUTS) if out.is_dir() else [out.name]
        )
        if others:
            raise InputError(
                f"--out {out}: holds {others[0]}, which is no demo's; --force does not remove it"
            )
        shutil.rmtree(out)
    demo = run_demo(out, lambda line: print(line, file=sys.stderr, flush=True))
    print(table([n for pair in demo.compared for n in (pair.replay, pair.live)]))
    print(f"report: {demo.report}")
