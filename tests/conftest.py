"""What holds for the whole run of the tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

import pytest

_FOLDER = "SIMLAB_TESTS_PROGRAMS"
"""Set by the process that made the folder, for it to remove."""
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Most of the time goes to compiling, and the workers of one run compile much alike. Nothing is left for the next.
    os.environ[_FOLDER] = f"{os.getpid()}:{tempfile.mkdtemp(prefix='simlab-tests-')}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ[_FOLDER].partition(":")[2]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


_LONGEST = (
    "test_recency", "test_docs_blocks", "test_notebooks", "test_record_cli", "test_bench_replay", "test_explain",
    "test_shared_walk", "test_curve", "test_replay", "test_eviction", "test_program", "test_routing_policies_replay",
    "test_gates", "test_sweep_resume", "test_model", "test_trace_time", "test_fidelity", "test_pick", "test_external",
    "test_quality", "test_live_replay", "test_eviction_live", "test_lookahead", "test_shipped_traces",
)  # fmt: skip
"""Files that take over half a minute. A worker takes whole files, and one that begins late is waited for."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of `pytest_collection_modifyitems`: xdist would begin with the files of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    place = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_unconfigure() -> None:
    """Remove compiled programs, and close the two files on /dev/null that llama-cpp-python keeps open, of which Python
    would warn at its end."""
    maker, _, folder = os.environ.get(_FOLDER, "").partition(":")
    if maker == str(os.getpid()):
        shutil.rmtree(folder, ignore_errors=True)
    bindings = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        file = getattr(bindings, name, None)
        if file is not None:
            file.close()
