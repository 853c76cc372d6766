"""How far a machine's speed at one moment is from that at another, and where that is known from.

A recording shows one moment, and stretches of it say little of the next: minutes later a shared machine may be a
quarter slower, a phone warmer. Every live check (`simlab time --check`, `pick --live`, `fidelity --speed`) runs the
recorded cell again at another moment. What it then took over what it took in the recording is one look at how far
moments are apart, and is kept, a line each, in `moments.jsonl` in the cache folder, by the processor's name.

Logarithms of such ratios are taken for normal about zero. Their variance is known from the looks and from what is
assumed of a machine that nobody looked at, `ASSUMED`, which weighs as much as `ASSUMED_LOOKS` looks (a scaled inverse
chi-squared prior; what is foretold is then Student's t; Gelman et al., Bayesian Data Analysis, section 2.6).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from simlab.errors import InputError, SimlabWarning
from simlab.trace.remote import cache_folder

ASSUMED, ASSUMED_LOOKS = 0.15, 4
"""Relative standard deviation, and the looks it counts for: the virtual machine of docs/time.md, and a phone's two
halves of one run there (16 %)."""
LEAST_TOKENS = 128
"""Of a run that is a look: the mean of a shorter one is known too badly."""
MOST_LOOKS = 40
"""The last so many of a machine count: it may have become another since."""


@dataclass(frozen=True)
class Look:
    """One live check, as it is kept."""

    when: str
    """ISO 8601, UTC."""
    cpu: str
    model: str
    recorded: str | None
    """When the trace was recorded."""
    log_ratios: tuple[float, ...]
    """Of every live run of the recorded cell: the logarithm of its mean token time over that of the recording, long
    times cut in both."""

    @property
    def square(self) -> float:
        """Mean square of its ratios: runs of one check are of nearly one moment, and count for one."""
        return sum(r * r for r in self.log_ratios) / len(self.log_ratios)


@dataclass(frozen=True)
class Moments:
    """How far a run at another moment is from the recording."""

    share: float
    """Relative standard deviation of its mean token time."""
    freedom: float
    """Degrees of freedom that this is known with."""
    looks: int
    """Live checks on this processor that it rests on; 0: it is assumed."""
    last: str | None
    """Date of the last of them."""

    def words(self) -> str:
        """For people: the figure and where it is from."""
        share = f"{100 * self.share:.0f} %"
        if not self.looks:
            return (
                f"this machine's speed from one moment to another: {share}, assumed of one in the same use "
                "(docs/time.md); no live check of its processor is kept yet"
            )
        many = f"{self.looks} live check{'s' * (self.looks > 1)}"
        return (
            f"this machine's speed from one moment to another: {share}, from {many}, the last on {self.last}"
        )


def moments_of(looks: Sequence[Look]) -> Moments:
    """What looks say together with what is assumed."""
    looks = looks[-MOST_LOOKS:]
    freedom = ASSUMED_LOOKS + len(looks)
    variance = (ASSUMED_LOOKS * ASSUMED**2 + sum(look.square for look in looks)) / freedom
    return Moments(math.sqrt(variance), freedom, len(looks), looks[-1].when[:10] if looks else None)


def known_moments(cpu: str | None) -> Moments:
    """What is kept of the processor that a trace was recorded on, None where that is not known.

    Raises:
        InputError: the file holds something else.
    """
    return moments_of([look for look in read_looks() if look.cpu == cpu])


def looks_file() -> Path:
    """Where looks are kept; `$XDG_CACHE_HOME/simlab/moments.jsonl`."""
    return cache_folder().parent / "moments.jsonl"


def read_looks() -> list[Look]:
    """All that are kept, in the order they were made; none where there is no file.

    Raises:
        InputError: a line is none.
    """
    path = looks_file()
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    looks = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            ratios = tuple(float(r) for r in fields.pop("log_ratios"))
            look = Look(**fields, log_ratios=ratios)
            if not ratios or not all(map(math.isfinite, ratios)) or not isinstance(look.when, str):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                f"{path}, line {number}: is no live check; delete the line, or the file to forget all checks"
            ) from None
        looks.append(look)
    return looks


def keep_look(
    cpu: str | None, model: str, recorded: str | None, log_ratios: Sequence[float], tokens: int
) -> bool:
    """Keep a live check; whether it was. One of few tokens or of an unknown processor is not.

    Args:
        cpu, model, recorded: of the trace's header.
        log_ratios: of `Look`.
        tokens: counted in each of its runs.
    """
    if cpu is None or tokens < LEAST_TOKENS or not log_ratios:
        return False
    look = Look(datetime.now(UTC).isoformat(timespec="seconds"), cpu, model, recorded, tuple(log_ratios))
    path = looks_file()
    line = json.dumps(asdict(look)) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write of a short line: checks that end together do not tear each other's.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        warnings.warn(f"{path}: {error.strerror}; this live check is not kept", SimlabWarning, stacklevel=2)
        return False
    return True
