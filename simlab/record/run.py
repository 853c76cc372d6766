"""`simlab record`: from a command line to a trace."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simlab.cells import effective_k
from simlab.cli.options import cells_from_args, engine_options, warn_about_cells
from simlab.cli.output import Progress
from simlab.errors import InputError, SimlabWarning
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.gguf import read_gguf
from simlab.record.machine import auto_budget
from simlab.record.plan import SKIP
from simlab.trace.measured import measured, measured_text
from simlab.trace.store import check_output, open_trace, prepare_folder
from simlab.types import DECODE, Step, TraceHeader

_MIB = 1 << 20


def model_sizes(model: str | os.PathLike[str] | None) -> TraceHeader:
    """What a model's metadata alone says of it: enough to resolve a route's width before the model is loaded.

    Raises:
        InputError: not a model with experts.
    """
    gguf = read_gguf(Path(model) if model is not None else EMBEDDED_MODEL)
    sizes = (gguf.n_layer, gguf.n_expert, gguf.n_expert_used)
    return TraceHeader(gguf.path.name, gguf.arch, *sizes, None, None, None, {})


def open_engine(
    model: str | os.PathLike[str] | None, top_k: int | None, step: Step | None, options: Mapping[str, Any]
) -> Engine:
    """An engine of a width, and the step that asked for it.

    Raises:
        InputError: as `Engine`; a width it refuses is called what the user wrote to get it.
    """
    try:
        return Engine(model, top_k=top_k, **options)
    except InputError as error:
        said, own = str(error), f"--top-k {top_k}: "
        if step is None or not step.option or not said.startswith(own):
            raise
        raise InputError(f"{step.option}: {said.removeprefix(own)}") from None


def record_command(args: argparse.Namespace) -> None:
    """Record a text or a generation under one cell."""
    out = Path(args.out)
    if args.text is not None and not Path(args.text).is_file():
        raise InputError(f"--text {args.text}: no such file")
    for given in filter(None, (args.model, args.text)):
        if out.exists() and Path(given).exists() and out.samefile(given):
            raise InputError(f"--out {out}: is an input of this recording")
    check_output(out, args.force)
    # Wrong options are refused before a model is loaded; the budget, if left out, is not known until then.
    route = cells_from_args(args, "1MiB")[0].route
    step = route.step("width")
    top_k = effective_k(route, model_sizes(args.model)) if step is not None else None
    with open_engine(args.model, top_k, step, engine_options(args)) as engine:
        header = engine.header()
        dense = sum(engine.gguf.layer_bytes(i) for i in range(header.n_layer)) - header.expert_bytes
        default = f"{auto_budget(header, dense).total_bytes / _MIB!r}MiB"
        cell = cells_from_args(args, default)[0]
        warn_about_cells([cell], header)
        prompts = [engine.tokenize(prompt) for prompt in args.prompt or ()]
        text = Path(args.text).read_bytes() if args.text is not None else "\n".join(args.prompt).encode()
        whole = engine.windowed(engine.tokenize(text))
        tokens = whole[: args.tokens]
        if len(tokens) < len(whole):
            text = engine.detokenize(tokens)  # what the header's hash is of
        if len(tokens) < 2 and args.text is not None:
            raise InputError(f"--text {args.text}: has {len(tokens)} tokens, at least 2 are needed")
        prepare_folder(out, args.force)
        with Progress("record") as progress:
            if args.text is not None:
                engine.record_text(tokens, cell, out, text=text, progress=progress)
            else:
                turns = engine.record_generation(
                    prompts, args.n, cell, out, text=text, keep_context=args.keep_context, progress=progress
                )
                for made in turns:
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
    if figures := measured_text(measured(trace)):
        print(f"decode: {figures}")
