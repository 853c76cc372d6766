"""`simlab bench engine` measures what it says; the one-row way to drop is the general one. No times are judged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live import THREADS

from simlab.cells import parse_route
from simlab.cli.bench import report
from simlab.cli.main import main
from simlab.judge.bench_engine import MODES, ROUTES, bench_engine, ratio
from simlab.record.live_route import LiveRoute
from simlab.types import WeightRule

N_EXPERT = 12


@pytest.fixture(scope="module")
def found():
    return bench_engine(n_tokens=20, repeats=1, n_threads=THREADS)


def test_every_cell_is_measured(found):
    settings_seen = {(row["route"], row["budget"], row["recording"]) for row in found["hook"]}
    assert settings_seen == {(r, b, w) for r in ROUTES for b in ("100%", "2cycles") for w in (False, True)}
    for row in found["hook"]:
        low, high = row["observed_us"]["interval"]
        assert 0 < row["observed_us"]["value"] <= row["all_passes_us"]
        assert low <= row["observed_us"]["value"] <= high
        parts = row["observed_us"]["value"], found["asking"]["callback_us"]["value"], row["writing_us"] or 0
        assert row["total_us"] == pytest.approx(sum(parts))
        assert (row["writing_us"] is not None) == row["recording"]
        if row["budget"] == "100%":
            assert row["misses_per_event"] == row["evictions_per_event"] == row["release_us"] == 0
        else:
            assert row["misses_per_event"] > 0
            assert 0 < row["release_us"] < row["observed_us"]["value"]
        assert (row["substituted_per_event"] > 0) >= (
            "substitute" in row["route"] and row["budget"] != "100%"
        )
    assert found["target_us"] == 60
    assert found["asking"]["nodes_per_event"] > 10


def test_every_way_of_reading_is_measured(found):
    assert [row["mode"] for row in found["reads"]] == list(MODES)
    serial = found["reads"][0]
    assert serial["read_wait_ratio"] == {"value": 1.0, "interval": [1.0, 1.0]}
    for row in found["reads"]:
        assert row["logits_identical"]
        assert row["issued_bytes"] == row["useful_bytes"] + row["wasted_bytes"]
        assert row["wasted_bytes"] >= 0
        assert row["read_wait_ms_per_token"] > 0
        assert (row["issued_bytes"] > 0) >= ("next_gate" in row["mode"])
    assert serial["issued_bytes"] == 0


def test_its_two_forms(found, capsys, tmp_path):
    text = report(found)
    assert all(word in text for word in (*ROUTES, *MODES, "target 60 us"))
    assert main(["bench", "engine", "--tokens", "16", "--repeats", "1", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(found)
    assert main(["bench", "engine", "--model", str(tmp_path / "none.gguf")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["bench", "engine", "--tokens", "3"]) == 2


def test_a_ratio_of_sums_and_its_interval():
    rng = np.random.default_rng(0)
    below = rng.uniform(1, 2, 400)
    same = ratio(below, 0.5 * below)
    assert same.value == pytest.approx(0.5)
    assert same.interval == pytest.approx((0.5, 0.5))
    noisy = ratio(below, below * rng.uniform(0.5, 1.5, 400))
    assert noisy.interval.low < 1 < noisy.interval.high
    assert noisy.interval.high - noisy.interval.low < 0.2


weights = st.lists(st.sampled_from([0.0, -0.0, 0.1, 0.25, 0.3, 0.5]), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    row=weights,
    at_hand=st.lists(st.booleans(), min_size=N_EXPERT, max_size=N_EXPERT),
    threshold=st.floats(0, 1),
    renorm=st.integers(0, 1),
)
def test_one_row_is_dropped_from_like_one_of_many(row, at_hand, threshold, renorm):
    k = len(row)
    live = LiveRoute(
        parse_route(f"drop_cold:F={threshold},renorm={renorm}"), k, N_EXPERT, 1, "raw", WeightRule()
    )
    weight, experts = np.array([row], dtype=np.float32), np.arange(k, dtype=np.int32)[None]
    scores, resident = np.zeros((1, N_EXPERT), dtype=np.float32), np.array(at_hand)
    one = live.drop(0, scores, experts, weight, resident, decode=True)
    two = live.drop(
        0,
        scores.repeat(2, axis=0),
        experts.repeat(2, axis=0),
        weight.repeat(2, axis=0),
        resident,
        decode=True,
    )
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        for a, b in zip(one, two, strict=True):
            assert a.dtype == b.dtype
            assert a[0].tobytes() == b[0].tobytes() == b[1].tobytes()
