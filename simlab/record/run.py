"""`simlab record`: from a command line to a trace."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from simlab.cli.options import cells_from_args, engine_options, warn_about_cells
from simlab.cli.output import Progress
from simlab.errors import InputError, SimlabWarning
from simlab.record.engine import Engine, auto_budget
from simlab.record.plan import SKIP
from simlab.trace.store import open_trace, prepare_folder
from simlab.types import DECODE

_MIB = 1 << 20


def record_command(args: argparse.Namespace) -> None:
    """Record a text or a generation under one cell."""
    out = Path(args.out)
    if out.exists() and not args.force:
        raise InputError(f"--out {out}: exists already; add --force to replace it")
    if args.text is not None and not Path(args.text).is_file():
        raise InputError(f"--text {args.text}: no such file")
    for given in filter(None, (args.model, args.text)):
        if out.exists() and Path(given).exists() and out.samefile(given):
            raise InputError(f"--out {out}: is an input of this recording")
    # Wrong options are refused before a model is loaded; the budget, if left out, is not known until then.
    route = cells_from_args(args, "1MiB")[0].route
    step = route.step("width")
    top_k = int(step.knobs["k"]) if step else None
    with Engine(args.model, top_k=top_k, **engine_options(args)) as engine:
        header = engine.header()
        dense = sum(engine.gguf.layer_bytes(i) for i in range(header.n_layer)) - header.expert_bytes
        default = f"{auto_budget(header, dense).total_bytes / _MIB!r}MiB"
        cell = cells_from_args(args, default)[0]
        warn_about_cells([cell], header)
        text = Path(args.text).read_bytes() if args.text is not None else args.prompt.encode()
        tokens = engine.tokenize(text)
        if len(tokens) < 2 and args.text is not None:
            raise InputError(f"--text {args.text}: has {len(tokens)} tokens, at least 2 are needed")
        prepare_folder(out, args.force)
        with Progress("record") as progress:
            if args.text is not None:
                engine.record_text(tokens, cell, out, text=text, progress=progress)
            else:
                made = engine.record_generation(tokens, args.n, cell, out, text=text, progress=progress)
                print(engine.detokenize(made).decode(errors="replace"))
    trace = open_trace(out)
    if trace.tokens.filter(phase=DECODE).collect().is_empty():
        warnings.warn(
            f"{out}: holds prefill only; a text of more than {SKIP + 1} tokens, in a context as long, is decoded",
            SimlabWarning,
            stacklevel=2,
        )
    n_tokens = trace.tokens.collect().height
    print(f"{out}: {trace.n_rows} routing rows of {n_tokens} graphs, {cell.route.name} at {cell.budget.text}")
