"""`policies` and `doctor`: what is built in, and what this machine can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from simlab.bounds import available_memory_bytes
from simlab.cli.options import add_json
from simlab.cli.output import print_json
from simlab.errors import SimlabError
from simlab.types import EvictionPolicy, RoutingPolicy

_PACKAGES = ("simlab", "numpy", "polars", "jax", "jaxlib", "llama-cpp-python")
_ENGINE_MODULE = "llama_cpp"
_MIB = 1 << 20


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    parser = commands.add_parser("policies", help="every policy, its knobs, its inputs, its source")
    add_json(parser)
    parser.add_argument(
        "--markdown", action="store_true", help="print a page with each policy's whole description"
    )
    parser.set_defaults(run=_policies)
    parser = commands.add_parser("doctor", help="versions, memory, direct reads, tensor layout, devices")
    parser.set_defaults(run=_doctor)


# ---------------------------------------------------------------------------------------------------------


def policy_facts(policy: RoutingPolicy | EvictionPolicy) -> dict[str, Any]:
    """A policy as plain JSON values."""
    routing = isinstance(policy, RoutingPolicy)
    doc = policy.function.__doc__ or ""
    return {
        "name": policy.name,
        "kind": "routing" if routing else "eviction",
        "origin": policy.origin,
        "stage": policy.stage if isinstance(policy, RoutingPolicy) else None,
        "knobs": {
            name: {"default": k.default, "low": k.low, "high": k.high, "integer": k.integer, "help": k.help}
            for name, k in policy.knobs.items()
        },
        "needs": sorted(policy.needs),
        "learns": {name: one._asdict() for name, one in policy.learns.items()}
        if isinstance(policy, RoutingPolicy)
        else {},
        "source": policy.source,
        "source_hash": policy.source_hash,
        "what": doc.strip().splitlines()[0] if doc.strip() else "",
    }


def _policies(args: argparse.Namespace) -> None:
    from simlab.policy import builtin_policies

    facts = [policy_facts(p) for p in builtin_policies().values()]
    if args.json:
        print_json(facts)
        return
    if args.markdown:
        print(_policies_page(list(builtin_policies().values())))
        return
    for f in facts:
        print(f"{f['name']} ({f['kind']}{', ' + f['stage'] if f['stage'] else ''}): {f['what']}")
        for name, k in f["knobs"].items():
            whole = "whole number, " if k["integer"] else ""
            print(f"    knob {name} = {k['default']:g}, {whole}{k['low']:g} to {k['high']:g}: {k['help']}")
        if f["kind"] == "routing" or f["needs"]:
            print(f"    needs: {' and '.join(f['needs']) or 'nothing'}")
        for name, one in f["learns"].items():
            lacking = "" if one["untrained"] is None else f", without it {one['untrained']:g}"
            print(f"    learns {name} per {one['per']} with --train{lacking}: {one['help']}")
        print(f"    source: {f['source']}")


# ---------------------------------------------------------------------------------------------------------


def _policies_page(policies: list[RoutingPolicy | EvictionPolicy]) -> str:
    """All policies as Markdown: what their docstrings say, with knobs, inputs and sources."""
    lines = [
        "# The policies that are built in",
        "",
        "Printed by `simlab policies --markdown` from the sources in `policies/`.",
    ]
    for title, kind in (("Routing", RoutingPolicy), ("Eviction", EvictionPolicy)):
        lines += ["", f"## {title}"]
        for policy in (p for p in policies if isinstance(p, kind)):
            lines += ["", *_policy_lines(policy)]
    return "\n".join(lines)


def _policy_lines(policy: RoutingPolicy | EvictionPolicy) -> list[str]:
    f = policy_facts(policy)
    stage = f" ({f['stage']})" if f["stage"] else ""
    lines = [f"### `{f['name']}`{stage}", "", inspect.cleandoc(policy.function.__doc__ or "").strip(), ""]
    for name, k in f["knobs"].items():
        whole = ", a whole number" if k["integer"] else ""
        lines.append(
            f"- `{name}`: {k['help']}; {k['low']:g} to {k['high']:g}{whole}, {k['default']:g} if left out"
        )
    lines += [
        f"- learns {name} per {one['per']} with `--train`: {one['help']}" for name, one in f["learns"].items()
    ]
    if f["kind"] == "routing" or f["needs"]:
        lines.append(f"- needs: {', '.join(f['needs']) or 'nothing'}")
    if f["source"]:
        lines.append(f"- source: {f['source']}")
    return lines


# ---------------------------------------------------------------------------------------------------------


def _doctor(args: argparse.Namespace) -> None:
    from simlab.judge.scores.sandbox import why_unprotected

    lines = [["python", f"{platform.python_version()} on {platform.platform()}"]]
    for package in _PACKAGES:
        lines.append([package, _version(package) or "not installed"])
    lines.append(["cores", str(_cores())])
    available = available_memory_bytes()
    lines.append(["memory", "unknown" if available is None else f"{available / _MIB:,.0f} MiB available"])
    for name, folder in (("temp folder", Path(tempfile.gettempdir())), ("this folder", Path.cwd())):
        lines.append([f"reads, {name}", f"{direct_reads(folder)} ({folder})"])
    lines.append(["jax devices", _jax_devices()])
    lines.append(["generated code", why_unprotected() or "runs in a sandbox"])
    lines.append(
        ["engine", "installed" if _has_engine() else "not installed: pip install 'simlab[engine]' to record"]
    )
    failure: SimlabError | None = None
    if _has_engine():
        from simlab.record.ggml import check_layout

        try:
            lines.append(["tensor layout", check_layout()])
        except SimlabError as error:
            failure = error
            lines.append(["tensor layout", "WRONG, see the error"])
    print("\n".join(f"{name:<20}{text}" for name, text in lines))
    if failure is not None:
        raise failure


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_engine() -> bool:
    return importlib.util.find_spec(_ENGINE_MODULE) is not None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def direct_reads(folder: Path) -> str:
    """Whether reads past the page cache work in a folder: one word or more for the user.

    A file is written there and read back both ways; direct reads that differ would be worse than none.
    """
    if not hasattr(os, "O_DIRECT"):
        return "buffered only: this system has no O_DIRECT"
    from simlab.record.reads import PAGE, not_direct

    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".simlab-doctor-") as file:
            file.write(os.urandom(PAGE))
            file.flush()
            os.fsync(file.fileno())
            reason = not_direct(Path(file.name))
            return f"buffered only: O_DIRECT {reason}" if reason else "direct"
    except OSError as error:
        return f"unknown: no file can be written there ({error.strerror})"


def _jax_devices() -> str:
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed"
    import jax

    try:
        return ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices())
    except (RuntimeError, AssertionError) as error:
        return f"none: {str(error).partition(chr(10))[0] or 'JAX finds none of JAX_PLATFORMS'}"
