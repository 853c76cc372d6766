"""What was measured before, by which commit, on which machine: one JSON object per line of a file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from simlab.errors import InputError, RunError

TIMES = ("whole", "memory", "alone")
"""What is timed of every contender (`bench/replay.py`); lines of before 30 November 2026, 14:00, lack `memory`."""


def machine() -> dict[str, Any]:
    """The processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:  # not Linux
        pass
    return {"cpu": name, "cores": len(os.sched_getaffinity(0))}


def commit() -> str:
    """The commit this code is of, with a + behind it where files differ from it; "unknown" outside a clone."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        return found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def entry(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a comparison (`bench_replay`): medians, in nanoseconds per routing event and cell."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "workload": found["workload"],
        "first_run_s": found["first_run_s"],
        **{
            f"{which}_ns": {row["name"]: row[f"{which}_ns"]["median"] for row in found["contenders"]}
            for which in TIMES
        },
    }


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a history.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RunError(f"--history {path}: {error.strerror}") from error


def last_of(path: Path, now: dict[str, Any]) -> dict[str, Any] | None:
    """The last line of a history from the machine and of the workload of `now`.

    Raises:
        InputError: the file cannot be read or is no history.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--against {path}: {getattr(error, 'strerror', None) or 'is not text'}") from error
    found = None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            past = json.loads(line)
            same = all(past[name] == now[name] for name in ("machine", "workload"))
            _ = past["date"], past["commit"], past["whole_ns"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"--against {path}: line {number} is not of simlab bench replay") from None
        if same:
            found = past
    return found


def change(past: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Per contender that both have what it took then and now, in nanoseconds, of all that both have timed.

    Each is a name and, say, `whole_then_ns` and `whole_now_ns`.
    """
    rows = []
    for name in now["whole_ns"]:
        if name in past["whole_ns"]:
            row: dict[str, Any] = {"name": name}
            for which in TIMES:
                then = past.get(f"{which}_ns", {}).get(name)
                if then is not None:
                    row |= {f"{which}_then_ns": then, f"{which}_now_ns": now[f"{which}_ns"][name]}
            rows.append(row)
    return rows
