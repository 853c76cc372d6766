"""simlab: record a mixture-of-experts decode, replay it under hundreds of cache policies, check the picks live."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from simlab.judge.misses.explain import explain
    from simlab.judge.validate import validate
    from simlab.record.engine import Engine
    from simlab.replay.curve import lru_curve
    from simlab.replay.run import replay, sweep
    from simlab.trace.store import open_trace

__all__ = ["Engine", "__version__", "explain", "lru_curve", "open_trace", "replay", "sweep", "validate"]

# Loaded on first use: the command line must answer before JAX is imported, and replaying must work
# where the engine extra is not installed.
_HOMES = {
    "Engine": "simlab.record.engine",
    "explain": "simlab.judge.misses.explain",
    "lru_curve": "simlab.replay.curve",
    "open_trace": "simlab.trace.store",
    "replay": "simlab.replay.run",
    "sweep": "simlab.replay.run",
    "validate": "simlab.judge.validate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("simlab")
    if name not in _HOMES:
        raise AttributeError(f"module 'simlab' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
