"""Groups of a sweep spread over a Ray cluster. Optional: the extra `ray`.

A task is a group of cells over a trace that every machine sees under the same path or URL. Policies travel as what
the user wrote, not as code; a worker refuses to run with another simlab or another version of a policy file,
so that whatever comes back is what this machine would have found. A group whose worker dies is run again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simlab.cells import make_step
from simlab.errors import InputError, RunError, SimlabError
from simlab.policy import find_eviction, find_routing
from simlab.policy_check import one_line
from simlab.replay.groups import Group, Progress
from simlab.replay.parts import code_digest
from simlab.replay.run import sweep
from simlab.trace.remote import local_copy
from simlab.types import Budget, Cell, CellNumbers, Route, Scope, Step

RETRIES = 3
"""How often a group is run again whose worker died."""
_CONNECT_S = 10.0


@dataclass(frozen=True)
class _StepWords:
    policy: str
    """A built-in policy's name, or a file's absolute path."""
    source_hash: str
    knobs: dict[str, float]
    option: str


@dataclass(frozen=True)
class _CellWords:
    steps: tuple[_StepWords, ...]
    budget: Budget
    evict: str
    evict_hash: str
    evict_knobs: dict[str, float]
    scope: Scope
    sequential: bool
    prefetch: str | None


def _words(cell: Cell) -> _CellWords:
    return _CellWords(
        steps=tuple(
            _StepWords(_policy_word(s), s.policy.source_hash, dict(s.knobs), s.option)
            for s in cell.route.steps
        ),
        budget=cell.budget,
        evict=cell.evict,
        evict_hash=find_eviction(cell.evict).source_hash,
        evict_knobs=dict(cell.evict_knobs),
        scope=cell.scope,
        sequential=cell.sequential,
        prefetch=cell.prefetch,
    )


def _policy_word(step: Step) -> str:
    policy = step.policy
    if not policy.origin:
        return policy.name
    file = getattr(sys.modules.get(policy.function.__module__), "__file__", None)
    if file is None:
        raise InputError(f"--ray: {policy.name} is of no file, so that other machines cannot have it")
    return str(Path(file).resolve())


def _cell(words: _CellWords) -> Cell:
    steps = []
    for word in words.steps:
        policy = find_routing(word.policy)
        _check_same(word.policy, policy.source_hash, word.source_hash)
        steps.append(make_step(policy, word.knobs, word.option))
    _check_same(words.evict, find_eviction(words.evict).source_hash, words.evict_hash)
    return Cell(
        Route(tuple(steps)),
        words.budget,
        words.evict,
        words.evict_knobs,
        words.scope,
        words.sequential,
        words.prefetch,
    )


def _check_same(what: str, here: str, there: str) -> None:
    if here != there:
        raise InputError(f"--ray: {what} is another one on machine {os.uname().nodename}")


def _run_group(
    folder: str, code: str, trace: str, words: Sequence[_CellWords], train: str | None
) -> list[CellNumbers] | SimlabError:
    """What a worker does; failures that are meant for the user come back as values, others are raised."""
    node = os.uname().nodename
    try:
        if code_digest() != code:
            raise RunError(f"--ray: machine {node} has another version of simlab")
        if not os.path.isdir(folder):
            raise InputError(
                f"--ray: machine {node} has no folder {folder}; work in one that all machines share"
            )
        # Relative paths of traces, policies and training parts mean what they mean to the user.
        with contextlib.chdir(folder):
            return sweep(local_copy(trace), [_cell(w) for w in words], train=train)
    except SimlabError as error:
        return error


def check_address(address: str) -> None:
    """Refuse `--ray` where it cannot work.

    Raises:
        InputError: ray is not installed, or `local:N` has no legal N.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("--ray: ray is not installed; pip install 'simlab[ray]'")
    kind, colon, n = address.partition(":")
    if kind == "local" and colon and not (n.isdecimal() and int(n) >= 1):
        raise InputError(f"--ray {address}: write local, local:N with N workers, or a cluster's address")


def run_on_ray(
    address: str,
    traces: Sequence[str],
    cells: Sequence[Cell],
    groups: Sequence[Group],
    *,
    train: str | None = None,
    progress: Progress | None = None,
) -> Generator[tuple[Group, list[CellNumbers]], None, None]:
    """Run groups on a cluster; each with its numbers as it finishes, in no particular order.

    Args:
        traces: folders, or URLs, of which each machine makes its own copy (`simlab.trace.remote`).
        address: "local" or "local:N" starts workers on this machine, one per core or N; anything else is
            the address of a running cluster, as `ray.init` takes it.

    Raises:
        InputError: no such cluster, or what a worker refused.
        RunError: a group was given up after its worker died `RETRIES` + 1 times.
    """
    ray: Any = importlib.import_module("ray")
    started = _connect(address)
    try:
        run = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_group)
        folder, code = os.getcwd(), code_digest()
        waiting = {}
        for group in groups:
            words = [_words(cells[i]) for i in group.places]
            waiting[run.remote(folder, code, traces[group.trace], words, train)] = group
        total, done = sum(len(g.places) for g in groups), 0
        while waiting:
            (ready, *_), _rest = ray.wait(list(waiting), num_returns=1)
            group = waiting.pop(ready)
            try:
                found: Any = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise RunError(f"--ray: a group of cells failed: {one_line(error.cause)}") from error
            except ray.exceptions.RayError as error:
                raise RunError(f"--ray: a group of cells failed: {one_line(error)}") from error
            if isinstance(found, SimlabError):
                raise found
            yield group, [replace(n, cell=cells[i]) for i, n in zip(group.places, found, strict=True)]
            done += len(group.places)
            if progress is not None:
                progress(done / total)
    finally:
        if started:
            ray.shutdown()


def _connect(address: str) -> bool:
    """Connect this process to a cluster, or start one; False if it was connected already."""
    # Ray phones home otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        return False
    kind, _, n = address.partition(":")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if kind != "local":
        _probe(address)
    try:
        if kind == "local":
            cores = int(n) if n else len(os.sched_getaffinity(0))
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    # Ray ends the process where it finds no cluster behind an open port.
    except (ConnectionError, ValueError, RuntimeError, TimeoutError, SystemExit) as error:
        raise InputError(f"--ray {address}: cannot be reached: {one_line(error)}") from error
    return True


def _probe(address: str) -> None:
    """Refuse a host and port that nobody answers at; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--ray {address}: cannot be reached: {one_line(error)}") from error
