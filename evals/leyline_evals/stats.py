"""Small-sample statistics for paired runs. Standard library only; checked against scipy in the tests."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedCounts:
    """How often each of two arms succeeded on the same cases."""

    both: int
    only_first: int
    only_second: int
    neither: int


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """The two-sided exact McNemar p-value of the discordant pairs.

    Under the null hypothesis each discordant pair falls either way with probability one half, so this is the two-sided
    binomial test: ``min(1, 2 P(X <= min(b, c)))`` with ``X ~ Binomial(b + c, 1/2)`` (McNemar 1947; the exact form as
    in Fagerland, Lydersen and Laake 2013). Without discordant pairs it is 1. The sum is in integers, so no rounding
    before the last division.

    Raises:
        ValueError: for a negative count.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts cannot be negative: {only_first}, {only_second}")
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**total)


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """The Wilson score interval of a proportion, without continuity correction (Wilson 1927).

    Unlike the normal approximation it stays inside [0, 1] and is sensible at 0 and at all successes.

    Raises:
        ValueError: without trials, with impossible successes, or a confidence outside (0, 1).
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials is not possible")
    z = NormalDist().inv_cdf(0.5 + _confidence(confidence) / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(share, low, high)


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the mean difference ``second - first`` over paired cases (Efron 1979).

    Whole pairs are drawn with replacement. The same ``seed`` gives the same bounds.

    Raises:
        ValueError: for sequences of different length, empty ones, fewer than one resample or a confidence outside
            (0, 1).
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"pairs are needed, got {len(first)} and {len(second)} values")
    if resamples < 1:
        raise ValueError("at least one resample is needed")
    tail = (1 - _confidence(confidence)) / 2
    differences = [b - a for a, b in zip(first, second, strict=True)]
    draw = random.Random(seed)
    size = len(differences)
    means = sorted(fmean(draw.choices(differences, k=size)) for _ in range(resamples))
    return Interval(fmean(differences), quantile(means, tail), quantile(means, 1 - tail))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The linearly interpolated quantile of an ascending sequence (Hyndman and Fan's type 7, numpy's default).

    Raises:
        ValueError: for an empty sequence or a share outside [0, 1].
    """
    if not ordered or not 0 <= share <= 1:
        raise ValueError(f"no quantile {share} of {len(ordered)} values")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def paired_counts(first: Mapping[Hashable, bool], second: Mapping[Hashable, bool]) -> PairedCounts:
    """Count the outcomes of two arms over the cases that *both* ran; the others are not pairs and are left out."""
    outcomes = [(bool(first[case]), bool(second[case])) for case in first if case in second]
    return PairedCounts(
        both=outcomes.count((True, True)),
        only_first=outcomes.count((True, False)),
        only_second=outcomes.count((False, True)),
        neither=outcomes.count((False, False)),
    )


def _confidence(value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {value}")
    return value
