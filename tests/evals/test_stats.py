"""stats.py against hand-computed values and, where scipy is installed, against scipy on the same tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from leyline_evals.stats import (
    PairedCounts,
    mcnemar_exact,
    paired_bootstrap,
    paired_counts,
    quantile,
    wilson_interval,
)


@pytest.fixture
def scipy_stats() -> Any:
    return pytest.importorskip("scipy.stats", reason="scipy is in requirements/evals.txt")


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (5, 0, 0.0625),  # 2 / 32
        (0, 6, 0.03125),  # 2 / 64
        (1, 7, 18 / 256),  # 2 * (1 + 8) / 256
        (4, 4, 1.0),
        (3, 5, 186 / 256),  # 2 * (1 + 8 + 28 + 56) / 256
    ],
)
def test_mcnemar_by_hand(b: int, c: int, p: float) -> None:
    assert mcnemar_exact(b, c) == p
    assert mcnemar_exact(c, b) == p


def test_mcnemar_is_scipys_binomial_test(scipy_stats: Any) -> None:
    for b in range(13):
        for c in range(13):
            if b + c:
                expected = scipy_stats.binomtest(b, b + c, 0.5).pvalue
                assert math.isclose(mcnemar_exact(b, c), expected, rel_tol=1e-9), (b, c)
    assert math.isclose(mcnemar_exact(400, 520), scipy_stats.binomtest(400, 920, 0.5).pvalue, rel_tol=1e-9)


def test_wilson_known_table() -> None:
    # 81 of 263, the example of Newcombe (1998), table I: 0.2553 to 0.3662.
    interval = wilson_interval(81, 263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    # 0 of 20 and 1 of 29 from the same table.
    assert (wilson_interval(0, 20).low, round(wilson_interval(0, 20).high, 4)) == (0.0, 0.1611)
    assert (round(wilson_interval(1, 29).low, 4), round(wilson_interval(1, 29).high, 4)) == (0.0061, 0.1718)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_is_scipys(confidence: float, scipy_stats: Any) -> None:
    for trials in (1, 2, 8, 24, 263):
        for successes in {0, 1, trials // 2, trials - 1, trials}:
            expected = scipy_stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
            got = wilson_interval(successes, trials, confidence)
            assert got.estimate == successes / trials
            assert math.isclose(got.low, expected.low, abs_tol=1e-12)
            assert math.isclose(got.high, expected.high, abs_tol=1e-12)


def test_bootstrap_is_scipys_within_its_noise(scipy_stats: Any) -> None:
    first = [3.0, 5.0, 2.0, 8.0, 7.0, 4.0, 6.0, 9.0, 1.0, 5.5, 6.5, 2.5]
    second = [2.0, 5.5, 1.0, 6.0, 7.5, 2.0, 4.0, 9.5, 1.5, 3.5, 5.0, 2.0]
    got = paired_bootstrap(first, second, resamples=20_000)

    def difference(a: object, b: object, axis: int) -> object:
        return b.mean(axis=axis) - a.mean(axis=axis)  # type: ignore[attr-defined]

    expected = scipy_stats.bootstrap(
        (first, second), difference, paired=True, vectorized=True, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    spread = expected.high - expected.low
    assert math.isclose(got.estimate, sum(second) / 12 - sum(first) / 12, rel_tol=1e-12)
    assert abs(got.low - expected.low) < 0.05 * spread
    assert abs(got.high - expected.high) < 0.05 * spread


def test_bootstrap_is_exact_where_it_can_be() -> None:
    constant = paired_bootstrap([1.0, 2.0, 3.0], [1.5, 2.5, 3.5], resamples=50)
    assert (constant.estimate, constant.low, constant.high) == (0.5, 0.5, 0.5)
    # Two pairs with differences 0 and 1: the resampled mean is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    two = paired_bootstrap([0.0, 0.0], [0.0, 1.0], resamples=2000)
    assert (two.estimate, two.low, two.high) == (0.5, 0.0, 1.0)
    narrow = paired_bootstrap([0.0, 0.0], [0.0, 1.0], resamples=2000, confidence=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_bootstrap_depends_on_its_seed_only() -> None:
    a, b = [1.0, 4.0, 2.0, 8.0, 5.0], [2.0, 1.0, 7.0, 3.0, 6.0]
    assert paired_bootstrap(a, b, seed=3, resamples=200) == paired_bootstrap(a, b, seed=3, resamples=200)
    assert paired_bootstrap(a, b, seed=3, resamples=200) != paired_bootstrap(a, b, seed=4, resamples=200)


def test_bootstrap_keeps_pairs_together() -> None:
    # The values vary widely, the differences hardly: an unpaired bootstrap would be hundreds wide.
    first = [float(10**power) for power in range(6)]
    got = paired_bootstrap(first, [value + 1 for value in first], resamples=200)
    assert got.high - got.low < 1e-6


def test_quantile_is_numpys() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with scipy")
    values = [1.0, 2.5, 2.5, 7.0, 11.0]
    for share in (0.0, 0.025, 0.3, 0.5, 0.95, 1.0):
        assert math.isclose(quantile(values, share), numpy.quantile(values, share))


def test_pairs_are_cases_both_arms_ran() -> None:
    first = {"a": True, "b": True, "c": False, "d": False, "only here": True}
    second = {"a": True, "b": False, "c": True, "d": False, "only there": False}
    assert paired_counts(first, second) == PairedCounts(both=1, only_first=1, only_second=1, neither=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mcnemar_exact(-1, 2),
        lambda: wilson_interval(1, 0),
        lambda: wilson_interval(3, 2),
        lambda: wilson_interval(1, 2, confidence=1.0),
        lambda: paired_bootstrap([], []),
        lambda: paired_bootstrap([1.0], [1.0, 2.0]),
        lambda: paired_bootstrap([1.0], [1.0], resamples=0),
        lambda: paired_bootstrap([1.0], [1.0], confidence=0.0),
        lambda: quantile([], 0.5),
        lambda: quantile([1.0], 1.5),
    ],
)
def test_impossible_input_is_refused(call: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call()  # type: ignore[operator]
