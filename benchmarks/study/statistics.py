"""Means over seeds with Student's t intervals, paired differences, and the area under a curve."""

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``count`` seeds and half the width of its 95 % interval, None for a single seed."""

    mean: float
    half_width: float | None
    count: int

    @property
    def differs_from_zero(self) -> bool:
        return self.half_width is not None and abs(self.mean) > self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """Mean ± t(n - 1) · sd / sqrt(n), sd the sample standard deviation. Raises ValueError for no values."""
    if not values:
        raise ValueError("values must hold at least one number")
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Estimate(mean, None, count)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1))
    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(count), count)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Of ours - theirs, over the seeds that both have; None where there is none."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return estimate(differences) if differences else None


def mean_height(xs: Sequence[float], ys: Sequence[float], end: float) -> float:
    """Area under the curve from its first point to ``end``, by the trapezoidal rule, divided by the width.

    Raises ValueError unless xs ascend and ``end`` lies beyond the first and not beyond the last.
    """
    if len(xs) != len(ys) or len(xs) < 2 or any(right <= left for left, right in itertools.pairwise(xs)):
        raise ValueError("xs must ascend, be at least two, and be as many as ys")
    if not xs[0] < end <= xs[-1]:
        raise ValueError(f"end must lie within xs, not at {end}")
    inside = bisect.bisect_left(xs, end)
    points = [*zip(xs[:inside], ys[:inside], strict=True), (end, float(np.interp(end, xs, ys)))]
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in itertools.pairwise(points))
    return area / (end - xs[0])
