"""What holds for the whole run of the tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

_FOLDER = "SIMLAB_TESTS_PROGRAMS"
"""Set by the process that made the folder, for it to remove."""
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Most of the time goes to compiling, and the workers of one run compile much alike. Nothing is left for the next.
    os.environ[_FOLDER] = f"{os.getpid()}:{tempfile.mkdtemp(prefix='simlab-tests-')}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ[_FOLDER].partition(":")[2]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


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
