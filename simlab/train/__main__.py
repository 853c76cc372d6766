"""`python -m simlab.train fit | export | figures`: the embedded model from nothing, as a file, and in figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from simlab.errors import InputError, RunError


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m simlab.train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser(
        "fit", help="build the corpus and train; goes on where an earlier run was stopped"
    )
    fit.add_argument("folder", type=Path, help="corpus, checkpoint and held-out texts go here")
    fit.add_argument(
        "--doc-sources", type=Path, help="html/_sources of python3.11-doc, if apt-get cannot fetch it"
    )
    fit.add_argument("--threads", type=int, default=2)
    write = commands.add_parser("export", help="write a run's checkpoint as GGUF")
    write.add_argument("folder", type=Path)
    write.add_argument("target", type=Path)
    show = commands.add_parser(
        "figures", help="held-out loss, expert load, routers, and perplexity by margin"
    )
    show.add_argument("model", type=Path, nargs="?", help="a GGUF file; left out, the embedded model")
    args = parser.parse_args()
    try:
        {"fit": _fit, "export": _export, "figures": _figures}[args.command](args)
    except (InputError, RunError) as error:
        parser.exit(error.exit_status, f"simlab.train: {error}\n")


def _fit(args: argparse.Namespace) -> None:
    _need_torch()
    import torch  # pyright: ignore[reportMissingImports]

    from simlab.train.corpus import build_corpus, write_texts
    from simlab.train.fit import Plan, train

    torch.set_num_threads(args.threads)
    text, held_out = build_corpus(args.folder, args.doc_sources)
    write_texts(args.folder, held_out)
    train(text, held_out, args.folder, Plan())


def _export(args: argparse.Namespace) -> None:
    _need_torch()
    from simlab.train.export import export
    from simlab.train.fit import CHECKPOINT, Plan

    export(args.folder / CHECKPOINT, args.target, Plan().shape, Plan().context)


def _figures(args: argparse.Namespace) -> None:
    from simlab.record.engine import EMBEDDED_MODEL
    from simlab.train.figures import report

    print(report(args.model or EMBEDDED_MODEL))


def _need_torch() -> None:
    try:
        import gguf  # noqa: F401
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RunError(f"{error.name} is not installed; run: pip install 'simlab[train]'") from error


if __name__ == "__main__":
    main()
