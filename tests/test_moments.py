"""How far moments of a machine are apart: by hand, as intervals of Student's t, and what is kept of checks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats
from test_trace_time_cells import costs

from simlab.errors import InputError, SimlabWarning
from simlab.judge.speed.moments import (
    ASSUMED,
    ASSUMED_LOOKS,
    LEAST_TOKENS,
    MOST_LOOKS,
    Look,
    keep_look,
    known_moments,
    looks_file,
    moments_of,
    read_looks,
)
from simlab.judge.speed.trace_time_cells import Spread
from simlab.judge.stats import coverage


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def look(*log_ratios: float, cpu: str = "this", when: str = "2026-11-30T10:00:00+00:00") -> Look:
    return Look(when, cpu, "m.gguf", None, log_ratios)


def test_the_estimate_by_hand():
    """Runs of one check count once, by their mean square; what is assumed counts for four checks."""
    nothing = moments_of([])
    assert (nothing.share, nothing.freedom, nothing.looks) == (ASSUMED, ASSUMED_LOOKS, 0)
    assert "assumed" in nothing.words()
    two = moments_of([look(0.1, -0.3), look(0.2, when="2026-12-01T00:00:00+00:00")])
    assert two.share == pytest.approx(math.sqrt((ASSUMED_LOOKS * ASSUMED**2 + 0.05 + 0.04) / 6))
    assert (two.freedom, two.looks, two.last) == (ASSUMED_LOOKS + 2, 2, "2026-12-01")
    assert "from 2 live checks, the last on 2026-12-01" in two.words()
    many = moments_of([look(9.0), *[look(0.01)] * MOST_LOOKS])
    assert many.looks == MOST_LOOKS
    assert many.share < ASSUMED / 2


def test_half_an_interval_by_hand():
    """All drift: Student's t of its freedom; none: the normal; between: Welch and Satterthwaite."""
    t = stats.t.ppf(0.975, 6)
    assert Spread(0.0, 0.2, 0.0, 6.0).half() == pytest.approx(0.2 * t)
    assert Spread(0.3, 0.0, 0.4).half() == pytest.approx(0.5 * stats.norm.ppf(0.975))
    both = Spread(0.3, 0.4, 0.0, 6.0)
    assert both.half() == pytest.approx(0.5 * stats.t.ppf(0.975, 6 / 0.8**4))
    assert both.half(1.2) == pytest.approx(1.3 * stats.t.ppf(0.975, 6 / (0.4 / 1.3) ** 4))
    assert Spread(0.0, 0.0, 0.0).half() == 0


def test_intervals_hold_on_machines_of_any_restlessness():
    """Machines as restless as is assumed on average, seen in six checks each: at the next one 95 % hold.

    A normal interval of the same share holds less; the interval score prefers ours to one width for all machines.
    """
    generator = np.random.default_rng(1)
    n, seen = 4000, 6
    sigma = ASSUMED * np.sqrt(ASSUMED_LOOKS / generator.chisquare(ASSUMED_LOOKS, n))
    truth = sigma * generator.standard_normal(n)
    half = np.empty(n)
    for i in range(n):
        known = moments_of([look(r) for r in sigma[i] * generator.standard_normal(seen)])
        half[i] = Spread(0.0, known.share, 0.0, known.freedom).half()
    ours = coverage(-half, half, truth, 0.95)
    assert ours.held / n == pytest.approx(0.95, abs=0.012)
    one = np.full(n, np.quantile(np.abs(truth), 0.95))
    assert ours.mean_score < coverage(-one, one, truth, 0.95).mean_score


def test_a_recording_more_restless_than_its_machine():
    calm = moments_of([look(0.01)] * MOST_LOOKS)
    own = costs(drift=0.3)
    assert own.at_another_moment(calm) is own
    later = costs(drift=0.02).at_another_moment(calm)
    assert (later.drift, later.drift_freedom) == (calm.share, calm.freedom)
    # A recording too short to show any drift has the machine's.
    assert costs(drift=math.nan).at_another_moment(calm).drift == calm.share


def test_what_is_kept():
    assert read_looks() == []
    assert keep_look("this", "m.gguf", "2026-11-30T09:00:00+00:00", [0.1, -0.05], LEAST_TOKENS)
    assert keep_look("that", "m.gguf", None, [0.5], LEAST_TOKENS)
    first, second = read_looks()
    assert (first.cpu, first.log_ratios, first.recorded) == (
        "this",
        (0.1, -0.05),
        "2026-11-30T09:00:00+00:00",
    )
    assert second.log_ratios == (0.5,)
    assert known_moments("this").looks == 1
    assert known_moments("this").share < ASSUMED < known_moments("that").share
    assert known_moments("other").looks == known_moments(None).looks == 0
    # Short runs and unknown processors are no looks.
    assert not keep_look("this", "m.gguf", None, [0.1], LEAST_TOKENS - 1)
    assert not keep_look(None, "m.gguf", None, [0.1], LEAST_TOKENS)
    assert not keep_look("this", "m.gguf", None, [], LEAST_TOKENS)
    assert len(read_looks()) == 2


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", "{}", '{"log_ratios": [NaN], "when": "", "cpu": "", "model": "", "recorded": null}',
     '{"log_ratios": [], "when": "", "cpu": "", "model": "", "recorded": null}', '{"log_ratios": [1], "new": 1}'],
)  # fmt: skip
def test_a_damaged_line_is_named(line):
    keep_look("this", "m.gguf", None, [0.1], LEAST_TOKENS)
    with looks_file().open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"moments\.jsonl, line 2: is no live check; delete the line"):
        read_looks()


def test_where_nothing_can_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(SimlabWarning, match="this live check is not kept"):
        assert not keep_look("this", "m.gguf", None, [0.1], LEAST_TOKENS)


def test_lines_of_checks_that_end_together_are_whole():
    for i in range(20):
        keep_look("this", "m.gguf", None, [i / 100], LEAST_TOKENS)
    assert [json.loads(line)["log_ratios"] for line in looks_file().read_text().splitlines()] == [
        [i / 100] for i in range(20)
    ]
