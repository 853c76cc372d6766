"""An engine binary of the BigMoeOnEdge family, run as a subprocess: a cell's command line, and its files as a trace.

Flags as its documentation has them: `-m, -p, -n, -t, -c, --moe-stream, --cache-mb, --io-threads, --overlap,
--route-trace, --csv, --drop-cold-experts, --expert-substitute, --ppl FILE, --ppl-step`. It writes a `route_trace v1`
and a `bmoe_metrics` file, which the importers read. Scoring a text it writes the heading of the metrics only, and says
on its output `ppl: 4.2352  nll: 1.44344 ..` and `ppl-policy: .. dropped, 29669/106240 reranked slots substituted`; a
generation's slots are on the metrics' summary line. Whatever goes wrong with it ends in one line.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simlab.cells import MIB, resolve_budget
from simlab.errors import InputError, RunError
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell, TraceHeader

_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_PERPLEXITY = re.compile(rf"^\W*(?:ppl|perplexity)\b\s*[=:]?\s*{_NUMBER}", re.IGNORECASE | re.MULTILINE)
_LOSS = re.compile(rf"\bnll\b\s*[=:]?\s*{_NUMBER}", re.IGNORECASE)
_SUBSTITUTED = re.compile(r"^ppl-policy:.*?([0-9]+)/[0-9]+ reranked slots", re.MULTILINE)
_TAIL_CHARACTERS = 300
_GRACE_S = 5.0
"""For a binary that was asked to stop."""


@dataclass(frozen=True)
class Source:
    """What is run: a text that is scored token by token, or a prompt that is continued."""

    text: Path | None = None
    prompt: str | None = None
    n: int = 0


@dataclass(frozen=True)
class ExternalRun:
    """One run of a binary."""

    trace: Trace
    nll: float | None = None
    """Mean over the tokens it scored, in nats; null where it scored none."""
    substituted: int | None = None
    """Decode slots given to another expert than the router's; null where it did not say."""


class ExternalEngine:
    """A binary with the options that are the same for every cell.

    Args:
        binary: a path; a bare name is a file of the current folder.
        threads, lanes, n_ctx, overlap: `-t`, `--io-threads`, `-c`, `--overlap`; None leaves the choice to it.
        more: further words for its command line.

    Raises:
        InputError: no such program, or no such model.
    """

    def __init__(
        self,
        binary: str | os.PathLike[str],
        model: str | os.PathLike[str],
        *,
        threads: int | None = None,
        lanes: int | None = None,
        n_ctx: int | None = None,
        overlap: bool = False,
        more: Sequence[str] = (),
    ) -> None:
        self.binary, self.model = Path(binary), Path(model)
        if not self.binary.is_file():
            raise InputError(f"--engine-binary {binary}: no such file")
        if not os.access(self.binary, os.X_OK):
            raise InputError(f"--engine-binary {binary}: is not executable")
        if not self.model.is_file():
            raise InputError(f"{model}: no such file")
        self._common = ["-m", str(self.model)]
        for flag, value in (("-t", threads), ("--io-threads", lanes), ("-c", n_ctx)):
            self._common += [flag, str(value)] if value is not None else []
        self._common += ["--overlap"] * overlap + list(more)

    def arguments(self, cell: Cell, header: TraceHeader, source: Source, folder: Path) -> list[str]:
        """The command line of a cell, without the binary.

        Raises:
            InputError: the binary has no such cell.
        """
        words = [*self._common, "--moe-stream", "--cache-mb", str(_whole_mib(cell, header)), *_policy(cell)]
        words += ["--route-trace", str(folder / "route.csv"), "--csv", str(folder / "metrics.csv")]
        if source.text is not None:
            return [*words, "--ppl", str(source.text), "--ppl-step"]
        return [*words, "-p", source.prompt or "", "-n", str(source.n)]

    def run(self, cell: Cell, header: TraceHeader, source: Source, folder: Path) -> ExternalRun:
        """Run a cell; the files it writes and the trace made of them lie in `folder`, which exists.

        Raises:
            InputError: as `arguments`.
            RunError: it did not start, failed, was killed, or wrote nothing that can be read.
        """
        # A relative name without a folder would be looked for on the search path.
        words = [str(self.binary.absolute()), *self.arguments(cell, header, source, folder)]
        output, errors = folder / "stdout.txt", folder / "stderr.txt"
        with output.open("wb") as out, errors.open("wb") as err:
            try:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            except OSError as error:
                raise RunError(f"{self.binary}: cannot be started: {error.strerror}") from error
            try:
                status = process.wait()
            except BaseException:
                _stop(process)
                raise
        said = _tail(errors)
        if status:
            raise RunError(f"{self.binary}: {_ending(status)}{': ' + said if said else ', and said nothing'}")
        route, metrics = folder / "route.csv", folder / "metrics.csv"
        if not route.is_file():
            raise RunError(f"{self.binary}: ended well but wrote no route trace{': ' + said if said else ''}")
        files = [str(route), *([str(metrics)] if _has_rows(metrics) else [])]
        try:
            # What a route trace does not say of its policy is the cell's.
            facts = {"route": cell.route}
            trace = open_trace(import_files(files, str(folder / "external.trace"), facts=facts))
        except InputError as error:
            raise RunError(f"{self.binary}: wrote what cannot be read: {error}") from error
        if trace.header.n_expert != header.n_expert:
            raise RunError(
                f"{self.binary}: ran a model of {trace.header.n_expert} experts, not {header.n_expert}"
            )
        said = output.read_text(errors="replace")
        nll = _loss(said) if source.text is not None else None
        return ExternalRun(trace, nll, _substituted(metrics, said))


def _whole_mib(cell: Cell, header: TraceHeader) -> int:
    """`--cache-mb` of a cell.

    Raises:
        InputError: not whole MiB, or no cache.
    """
    budget = resolve_budget(cell.budget, "global", header, header.n_expert_used)
    if budget.off:
        raise InputError("--budget off: the engine binary streams through a cache; give it one")
    if budget.total_bytes % MIB or cell.budget.kind == "per_layer":
        below = budget.total_bytes // MIB
        raise InputError(
            f"--budget {cell.budget.text}: comes to {budget.total_bytes / MIB:.2f} MiB, and the engine binary takes "
            f"whole MiB of one cache; write {below}MiB or {below + 1}MiB"
        )
    return budget.total_bytes // MIB


def _policy(cell: Cell) -> list[str]:
    """The flags of a cell's policies.

    Raises:
        InputError: the binary does not have them.
    """
    if cell.evict != "lru" or cell.scope != "global" or cell.sequential:
        raise InputError(
            f"--evict {cell.evict_spec}: the engine binary has one global lru cache and no other"
        )
    words: list[str] = []
    for step in cell.route.steps:
        policy, knobs = step.policy, step.knobs
        if policy.is_builtin("original"):
            continue
        if policy.is_builtin("substitute"):
            words += ["--expert-substitute", f"{knobs['L']:.9g}"] if knobs["L"] > 0 else []
        elif policy.is_builtin("drop_cold") and knobs["renorm"] and not knobs["prefill"]:
            words += ["--drop-cold-experts", f"{knobs['F']:.9g}"] if knobs["F"] > 0 else []
        else:
            raise InputError(
                f"--route {policy.name}: the engine binary runs substitute, and drop_cold with renorm=1,prefill=0"
            )
    return words


def _ending(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _stop(process: subprocess.Popen) -> None:
    """Ask it to end, then make it."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(path: Path) -> str:
    """The last lines of what it said, as one."""
    words = " ".join(path.read_text(errors="replace").split())
    return words if len(words) <= _TAIL_CHARACTERS else "... " + words[-_TAIL_CHARACTERS:]


def _has_rows(metrics: Path) -> bool:
    """Whether a metrics file holds more than comments and its heading."""
    if not metrics.is_file():
        return False
    lines = metrics.read_text(errors="replace").splitlines()
    return sum(bool(line.strip()) and not line.startswith("#") for line in lines) > 1


def _loss(said: str) -> float | None:
    """The mean loss on the last line of its output that names a perplexity: as such, or the perplexity's logarithm."""
    named = list(_PERPLEXITY.finditer(said))
    if not named:
        return None
    line = said[named[-1].start() :].lstrip().split("\n", 1)[0]
    loss = _LOSS.search(line)
    if loss is not None:
        return float(loss.group(1))
    perplexity = float(named[-1].group(1))
    return math.log(perplexity) if perplexity > 0 else None


def _substituted(metrics: Path, said: str) -> int | None:
    """Of the metrics' last summary line, or of the last line of its output that says so."""
    lines = metrics.read_text(errors="replace").splitlines() if metrics.is_file() else []
    words = [word for line in lines if line.startswith("# summary") for word in line.split()]
    values = [word.split("=", 1)[1] for word in words if word.startswith("experts_substituted=")]
    values += _SUBSTITUTED.findall(said)
    return int(values[-1]) if values and values[-1].isdigit() else None
