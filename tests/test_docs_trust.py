"""docs/trust.md names a test for every promise: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_promise_names_tests_that_exist():
    promises = [
        line
        for line in (ROOT / "docs" / "trust.md").read_text().splitlines()
        if re.search(r"\| `test_.*\|$", line)
    ]
    assert len(promises) > 20
    for line in promises:
        file = ""
        for name in re.findall(r"`((?:test_\w+\.py)?(?:::\w+)?)`", line.rsplit("|", 2)[1]):
            file, test = name.partition("::")[0] or file, name.partition("::")[2]
            text = (ROOT / "tests" / file).read_text()
            assert not test or f"\ndef {test}(" in text, name
