"""The `simlab` command: parsing, and how failures look.

Every failure is one line on stderr: exit status 2 for the user's input, 1 for a failed run, 130 for Ctrl-C.
`--debug` adds the traceback. Commands import what they need when they run, so that `--help` stays instant.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from simlab.errors import InputError, RunError, SimlabError, SimlabWarning, Terminated

_INTERRUPTED, _TERMINATED = 130, 143
_JAX_CACHE = ("Error reading persistent compilation", "Error writing persistent compilation")
"""How JAX's warnings begin of a cache that is damaged, full or not to be written; it goes on without."""


class _Parser(argparse.ArgumentParser):
    """Reports a bad option like any other bad input."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("simlab").strip()
        raise InputError(f"{command + ': ' if command else ''}{message}; see {self.prog} --help")


class _Version(argparse.Action):
    """Reads the version only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from simlab import __version__

        print(f"simlab {__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command; a parsed command line has `run`, the function to call with it."""
    from simlab.cli import (
        about,
        analysis,
        bench,
        fidelity,
        gates,
        live,
        pick,
        replays,
        report,
        scores,
        times,
        traces,
    )  # fmt: skip

    parser = _Parser(
        prog="simlab",
        description="Record a mixture-of-experts decode, replay it under hundreds of cache policies, "
        "check the picks live.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    _add_debug(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for group in (
        live,
        scores,
        fidelity,
        gates,
        bench,
        traces,
        replays,
        analysis,
        times,
        pick,
        report,
        about,
    ):
        group.add_commands(commands)
    for command in commands.choices.values():
        command.allow_abbrev = False
        _add_debug(command)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of a failure"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    with warnings.catch_warnings():
        warnings.simplefilter("always", SimlabWarning)
        warnings.showwarning = _show_once(warnings.showwarning)
        try:
            for word in words:
                _check_utf8(word)
            args = build_parser().parse_args(words)
            args.run(args)
            sys.stdout.flush()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0
        except Terminated:
            return _fail("terminated", _TERMINATED, debug)
        except KeyboardInterrupt:
            return _fail("interrupted", _INTERRUPTED, debug)
        except SimlabError as error:
            return _fail(f"error: {error}", error.exit_status, debug)
        except BrokenPipeError:
            return 1  # the reader of a pipe has gone, and need not be told
        except BaseException as error:  # a panic of a Rust library is no Exception
            hint = "" if debug else " (run again with --debug)"
            return _fail(f"internal error: {type(error).__name__}: {error}{hint}", 1, debug)
    return 0


def _check_utf8(word: str) -> None:
    """Refuse a name that no table can hold: bytes of another encoding reach Python as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        shown = word.encode(errors="backslashreplace").decode()
        raise InputError(f"{shown}: is not UTF-8; rename the file, or link to it by another name") from None


def _fail(text: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print("simlab: " + " ".join(text.split()), file=sys.stderr)
    return status


def _show_once(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Simlab's own warnings as one line each, no line twice; others as Python shows them."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if str(message).startswith(_JAX_CACHE):
            folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
            cause = " ".join(str(message).partition("': ")[2].split())
            message = f"compiled programs cannot be kept in {folder} ({cause}); compiling them anew"
        elif not issubclass(category, SimlabWarning):
            otherwise(message, category, *rest, **named)
            return
        if str(message) not in shown:
            shown.add(str(message))
            print(f"simlab: warning: {message}", file=sys.stderr)

    return show


def entry() -> NoReturn:
    """Console script."""
    try:
        from simlab.cli.programs import keep_programs
        from simlab.cli.signals import ignore_signals, raise_on_signals
        from simlab.cli.streams import guard_streams

        guard_streams()
        raise_on_signals()
        keep_programs()
        status = main()
        ignore_signals()
    except KeyboardInterrupt:  # before the command began, or after it
        status = _fail("interrupted", _INTERRUPTED, False)
    if status in (_INTERRUPTED, _TERMINATED):
        # JAX's worker threads do not survive an orderly end in the middle of a computation.
        with contextlib.suppress(BrokenPipeError, RunError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
