"""Which model, text and policy an artefact is of, and whether two artefacts belong together.

A plausible figure about the wrong thing is worse than none, so every artefact of a run carries a `Provenance`: trace
headers, tables and JSON of settings, calibrations, kept recordings, files of `--resume`. What is paired is compared by
`check`, on the fields that docs/trust.md lists for the pair.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import simlab
from simlab.cells import effective_k, resolve_budget
from simlab.errors import InputError, SimlabWarning
from simlab.policy import find_eviction
from simlab.trace.schema import TABLES
from simlab.types import Cell, EvictionPolicy, Provenance, ResolvedBudget, RoutingPolicy, TraceHeader

Field = Literal["model", "text", "policy", "budget", "recorded"]
OF_RUN: Sequence[Field] = ("model", "text", "policy", "budget")
"""What makes a run the same run."""
OF_TRACE: Sequence[Field] = ("model", "text", "recorded")
"""What makes a setting one of this trace."""
_WORDS = {"recorded": "setting recorded under"}
_FOOTER_BYTES = 1 << 16
"""Read of each part of a trace: a parquet file ends with its sizes, offsets and statistics."""


def differing(found: Provenance, wanted: Provenance, fields: Sequence[Field]) -> list[Field]:
    """The fields in which two differ; one that either does not know does not differ."""
    return [f for f in fields if None not in (a := getattr(found, f), b := getattr(wanted, f)) and a != b]


def check(
    found: Provenance | None, wanted: Provenance, fields: Sequence[Field], where: str, of: str, remedy: str
) -> None:
    """Refuse an artefact that is of something else than what it is used with.

    Args:
        found: the artefact's; None: an older version made it.
        where: the artefact, as the message names it. of: what it should be of, such as "this trace".
        remedy: what to do.

    Raises:
        InputError: they differ; names each field with both values.

    A field that only one of them says is not compared, with a warning.
    """
    found = found or Provenance()
    if names := differing(found, wanted, fields):
        said = "; ".join(f"{_WORDS.get(f, f)} {getattr(found, f)}, not {getattr(wanted, f)}" for f in names)
        raise InputError(f"{where}: is not of {of} ({said}); {remedy}")
    unknown = [f for f in fields if (getattr(found, f) is None) != (getattr(wanted, f) is None)]
    if unknown:
        warnings.warn(
            f"{where}: whether it is of {of} is not known, as an older simlab wrote one of the two without its "
            f"{', '.join(_WORDS.get(f, f) for f in unknown)}",
            SimlabWarning,
            stacklevel=3,
        )


def run_provenance(
    header: TraceHeader,
    cell: Cell,
    *,
    model: str | None,
    text: str | None,
    train: str | None = None,
) -> Provenance:
    """Of a run under a setting. `header` has the model's sizes, `train` is `Training.identity`."""
    budget = resolve_budget(cell.budget, cell.scope, header, effective_k(cell.route, header))
    return Provenance(
        model=model,
        text=text,
        policy=policy_words(cell, train),
        budget=budget_words(budget),
        simlab=simlab.__version__,
    )


def trace_provenance(header: TraceHeader) -> Provenance:
    """What every setting replayed from a trace, or run live beside it, shares with it (`OF_TRACE`)."""
    of = header.provenance or Provenance()
    known = of.policy is not None and of.budget is not None
    return Provenance(of.model, of.text, recorded=f"{of.policy} | {of.budget}" if known else None)


def setting_provenance(header: TraceHeader, cell: Cell, train: str | None = None) -> Provenance:
    """Of a setting that is replayed from a trace, or run live beside it."""
    of = trace_provenance(header)
    made = run_provenance(header, cell, model=of.model, text=of.text, train=train)
    return dataclasses.replace(made, recorded=of.recorded)


def policy_words(cell: Cell, train: str | None = None) -> str:
    """The policies of a setting, `substitute v1 L=0.15 | lru v1 | global`; a user's file has its hash for a version."""

    def one(policy: RoutingPolicy | EvictionPolicy, knobs: Any) -> str:
        rule = f"sha256:{policy.source_hash[:16]}" if policy.origin else f"v{policy.version}"
        name = policy.name.partition("@")[0]
        return " ".join([name, rule, *(f"{knob}={value!r}" for knob, value in sorted(knobs.items()))])

    steps = [one(s.policy, s.knobs) for s in cell.route.steps if not s.is_exact]
    words = [" + ".join(steps) or "original v1", one(find_eviction(cell.evict), cell.evict_knobs), cell.scope]
    words += ["sequential"] if cell.sequential else []
    words += [f"prefetch {cell.prefetch}"] if cell.prefetch is not None else []
    words += [f"trained on {train}"] if train is not None else []
    return " | ".join(words)


def budget_words(budget: ResolvedBudget) -> str:
    """A budget in bytes; a cache per layer is another cache than one of their sum."""
    if budget.off:
        return "off"
    if not budget.per_layer:
        return f"{budget.total_bytes} bytes"
    sizes = sorted(set(budget.layer_bytes))
    return f"{sizes[0] if len(sizes) == 1 else list(budget.layer_bytes)} bytes per layer"


def text_digest(parts: Sequence[Any]) -> str:
    """Of the token ids of a text or of prompts, or of other JSON values that stand for what was run."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def import_provenance(files: Sequence[Path]) -> Provenance:
    """Of a trace made of these files; which model and policy ran they do not say."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return Provenance(text=f"files {text_digest(sorted(digests))}", simlab=simlab.__version__)


def folder_digest(folder: Path) -> str:
    """Equal for the same recording, wherever it lies; reads the end of each part, not all of it."""
    found = hashlib.sha256((folder / "header.json").read_bytes())
    for table in TABLES:
        for part in sorted((folder / table).glob("part-*.parquet")):
            size = part.stat().st_size
            with part.open("rb") as file:
                file.seek(max(size - _FOOTER_BYTES, 0))
                found.update(f"{table}/{part.name} {size} ".encode() + file.read())
    return found.hexdigest()


def read_provenance(value: Any, where: str) -> Provenance:
    """What `known_fields` made.

    Raises:
        InputError: an object of other fields, or values that are no text.
    """
    names = {field.name for field in dataclasses.fields(Provenance)}
    if (
        not isinstance(value, dict)
        or value.keys() - names
        or not all(isinstance(v, str) for v in value.values())
    ):
        raise InputError(f"{where}: is no provenance (texts {', '.join(sorted(names))})")
    return Provenance(**value)
