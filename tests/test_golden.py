"""Counts of every built-in policy, exactly those of before the replay loop (`golden.py` says of what)."""

from __future__ import annotations

import json

import golden
import pytest

STORED = json.loads(golden.STORED.read_text())


@pytest.mark.parametrize("name", golden.TRACES)
def test_every_policy_counts_as_it_did(name):
    assert golden.of_shipped(name) == STORED[name]


@pytest.mark.slow
def test_the_bench_workload_counts_as_it_did(tmp_path):
    assert golden.of_bench(tmp_path / "bench") == STORED["bench"]


@pytest.mark.slow
@pytest.mark.skipif(not golden.QWEN.is_file(), reason="the shared data is not here")
def test_an_imported_trace_counts_as_it_did(tmp_path):
    assert golden.of_qwen(tmp_path) == STORED["qwen"]
