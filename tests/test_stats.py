"""The statistics of scores against formulas and libraries that know nothing of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference

from simlab.judge.stats import (
    block_bootstrap_mean,
    mcnemar_p,
    paired_difference,
    paired_outcome,
    wilson,
)


@pytest.mark.parametrize(("b", "c"), [(5, 1), (1, 5), (0, 0), (0, 6), (3, 3), (40, 55), (1, 0)])
def test_mcnemar_is_the_binomial_test(b, c):
    golden = reference.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar_p(b, c) == pytest.approx(golden, rel=1e-12)


def test_mcnemar_by_hand():
    # 5 and 1 of 6 coin tosses: 2 * (C(6,0) + C(6,1)) / 2**6.
    assert mcnemar_p(5, 1) == pytest.approx(2 * (1 + 6) / 64)


def test_flips_each_way():
    first = [True, True, True, False, False, True]
    other = [True, False, False, True, False, True]
    outcome = paired_outcome(first, other)
    assert (outcome.to_wrong, outcome.to_right) == (2, 1)
    assert outcome.p_value == 1.0
    with pytest.raises(ValueError, match="shorter"):
        paired_outcome(first, other[:-1])


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (88, 100), (1, 3)])
def test_wilson_is_scipys(k, n):
    golden = reference.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert wilson(k, n) == pytest.approx((golden.low, golden.high), abs=1e-12)


def test_nothing_to_tell_is_nan():
    assert all(map(math.isnan, wilson(0, 0)))
    assert all(map(math.isnan, block_bootstrap_mean([np.array([1.0])])))
    assert math.isnan(paired_difference([], [])[0])


def test_a_constant_has_no_spread():
    low, high = block_bootstrap_mean([np.full(100, 0.25), np.full(37, 0.25)])
    assert (low, high) == pytest.approx((0.25, 0.25))


def test_independent_values_give_the_normal_interval():
    values = np.random.default_rng(1).normal(2.0, 3.0, size=4000)
    low, high = block_bootstrap_mean([values], block=1, n_resamples=20_000)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03 * half)


def _moving_average(generator: np.random.Generator, n: int, width: int) -> np.ndarray:
    return np.convolve(generator.normal(size=n + width - 1), np.full(width, 1 / width), "valid")


def test_blocks_cover_the_mean_of_correlated_values_and_single_values_do_not():
    # Moving averages of 8: the mean's variance is 8 times that of as many independent values, so an interval
    # that ignores it covers about 2 * Phi(1.96 / sqrt(8)) - 1 = 51 %.
    generator = np.random.default_rng(2)
    covered = {1: 0, 32: 0}
    for _ in range(200):
        values = _moving_average(generator, 1024, 8)
        for block in covered:
            low, high = block_bootstrap_mean([values], block=block, n_resamples=400)
            covered[block] += low <= 0 <= high
    assert covered[32] >= 0.86 * 200
    assert abs(covered[1] / 200 - 0.51) < 0.1


def test_pairing_removes_what_both_share():
    generator = np.random.default_rng(3)
    shared = generator.exponential(2.0, size=1000)
    first, other = [shared], [shared + 0.01 + generator.normal(0, 0.01, size=1000)]
    mean, (low, high) = paired_difference(first, other)
    assert mean == pytest.approx((other[0] - first[0]).mean())
    assert 0 < low < mean < high < 0.02
    unpaired = block_bootstrap_mean(other)
    assert unpaired.high - unpaired.low > 50 * (high - low)


def test_equal_arguments_give_equal_intervals():
    values = [np.random.default_rng(4).normal(size=300)]
    assert block_bootstrap_mean(values, seed=5) == block_bootstrap_mean(values, seed=5)
    assert block_bootstrap_mean(values, seed=5) != block_bootstrap_mean(values, seed=6)


def test_drawing_in_parts_keeps_the_interval(monkeypatch):
    values = [np.random.default_rng(7).normal(size=300)]
    whole = block_bootstrap_mean(values, n_resamples=1000)
    monkeypatch.setattr("simlab.judge.stats._AT_ONCE", 64)
    assert block_bootstrap_mean(values, n_resamples=1000) == pytest.approx(whole)
