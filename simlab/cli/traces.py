"""`import` and `info`: from other tools' files to a trace, and what a trace holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from simlab.cli.options import add_force, add_json, add_trace, whole_number
from simlab.cli.output import print_json


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser(
        "import",
        help="make a trace of another tool's files",
        description="Make a trace of a route_trace v1 file with its metrics and io_trace files; of arrays (.npz, "
        ".npy, .safetensors) of ids [tokens, layers, k], weights and scores; of a table (CSV, parquet, JSONL) with "
        "one row per token and layer, or per slot; or of a fingerprint JSON.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="recognised by their content, in any order")
    parser.add_argument("--out", required=True, metavar="T.trace", help="the trace folder to write")
    parser.add_argument(
        "--route",
        metavar="SPEC",
        help="what the recorded run ran under, such as original or substitute:L=.15; a route_trace cannot say",
    )
    add_force(parser)
    _add_facts(parser)
    parser.set_defaults(run=_import)

    parser = commands.add_parser("info", help="what a trace holds")
    add_trace(parser)
    add_json(parser)
    parser.set_defaults(run=_info)


def _add_facts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "facts of arrays and tables (or in X.json beside X.npz, under the same names with _)"
    )

    def add(name: str, metavar: str, text: str, kind: Callable[[str], Any] = str) -> None:
        group.add_argument(f"--{name}", metavar=metavar, type=kind, help=text)

    add("columns", "OURS=NAME,..", "names of arrays or columns: ids=, weights=, scores=, layer=, index=, ..")
    add("n-expert", "N", "experts per layer", whole_number(1))
    add(
        "expert-bytes",
        "B[,..]",
        "bytes of one expert: for all MoE layers, or one number each",
        _whole_numbers,
    )
    add("n-layer", "N", "layers of the model, dense ones included", whole_number(1))
    add("moe-layers", "1-47", "layer numbers that have experts; others are left out (default: all, from 0)")
    add("axes", "A,B,k", "of arrays: tokens,layers,k (default) or layers,tokens,k")
    add("gating", "G", "softmax, sigmoid or logits (a softmax over the selected only)")
    add(
        "score-space",
        "S",
        "prob: the scores are probabilities; raw: they are what the router ranked as they are",
    )
    group.add_argument(
        "--selection-bias",
        action="store_true",
        default=None,
        help="the scores hold a selection bias: they rank, and are no probabilities",
    )
    add("weight-rule", "normalise=1,..", "softmax_over_selected=, normalise=, clamp_min=, scale=")
    add("prefill", "N[,..]", "prompt tokens, of each turn if there are several", _whole_numbers)
    add("turns", "N,..", "tokens of each turn, prompts included", _whole_numbers)
    add("skip-tokens", "N", "leave out the first N tokens, such as those of a profiling run", whole_number(0))
    group.add_argument(
        "--skip-padding",
        action="store_true",
        default=None,
        help="leave out tokens that are nothing but padding",
    )
    add("model", "NAME", "what the model is called")
    add("arch", "NAME", "its architecture")


def _whole_numbers(text: str) -> int | list[int]:
    """One whole number, or a list of them."""
    numbers = [whole_number(0)(part.strip()) for part in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


def _import(args: argparse.Namespace) -> None:
    from simlab.trace.facts import FIELDS, parse_rule, parse_words
    from simlab.trace.importer import import_files
    from simlab.trace.info import trace_info

    facts = {name: getattr(args, name) for name in FIELDS if getattr(args, name, None) is not None}
    for name, parse in (
        ("columns", lambda text: parse_words("--columns", text)),
        ("weight_rule", parse_rule),
    ):
        if name in facts:
            facts[name] = parse(facts[name])
    info = trace_info(import_files(args.files, args.out, args.force, facts))
    print(
        f"{args.out}: {info['rows']} routing rows, {info['n_moe_layers']} MoE layers, "
        f"{info['prefill_tokens']} prefill and {info['decode_tokens']} decode tokens"
    )


def _info(args: argparse.Namespace) -> None:
    from simlab.trace.info import info_lines, trace_info

    info = trace_info(args.trace)
    if args.json:
        print_json(info)
    else:
        print("\n".join(info_lines(info)))
