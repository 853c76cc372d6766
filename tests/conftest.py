"""What holds for the whole run of the tests."""

from __future__ import annotations

import sys


def pytest_unconfigure() -> None:
    """Close the two files on /dev/null that llama-cpp-python keeps open, or Python warns of them at its end."""
    bindings = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        file = getattr(bindings, name, None)
        if file is not None:
            file.close()
