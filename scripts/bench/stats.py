"""Pure statistics of paired runs: no files, no clocks, no global random state.

A ratio is candidate / baseline. For a rate (tokens/s) above 1 is better, for a
time (seconds) below 1 is better.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

# Every resample is enumerated up to this many pairs (6**6 = 46,656); above it
# they are drawn.
EXACT_PAIRS = 6
RESAMPLES = 20_000
LEVEL = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A bootstrap interval of a median. `reachable` is the most that the range
    of this many independent pairs can cover: 1 - 2**(1 - pairs)."""

    low: float
    high: float
    level: float
    pairs: int
    exact: bool
    reachable: float


class Verdict(msgspec.Struct, frozen=True):
    """What the pairs show. `change` is the median ratio - 1, signed as measured."""

    outcome: str  # "faster", "slower" or "no difference shown"
    change: float | None
    interval: Interval | None
    noise: float | None
    reason: str

    def __str__(self) -> str:
        if self.outcome == "no difference shown":
            return f"{self.outcome}: {self.reason}"
        return f"{self.outcome} by {abs(self.change):.2%}: {self.reason}"


def _positive(name: str, values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name}: need at least one number, got {list(values)!r}")
    if not np.all(np.isfinite(array)) or np.any(array <= 0):
        raise ValueError(f"{name}: every number must be finite and above 0")
    return array


def pooled_throughput(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Total tokens / total seconds over runs, in tokens/s.

    Not the mean of the runs' rates: a longer run weighs more. Raises ValueError
    for unequal lengths, an empty list, or a number that is not above 0.
    """
    if len(tokens) != len(seconds):
        raise ValueError(f"{len(tokens)} token counts for {len(seconds)} durations")
    return float(
        _positive("tokens", tokens).sum() / _positive("seconds", seconds).sum()
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile of all values together (linear interpolation, numpy's default).

    Pool the requests first: the percentile of a pool is no mean of the runs'
    percentiles. Raises ValueError without values, for NaN, or outside 0..100.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("percentile of no values")
    if np.any(np.isnan(array)):
        raise ValueError("percentile of values that hold NaN")
    return float(np.percentile(array, percent))


def paired_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """candidate / baseline for each (baseline, candidate), in order."""
    if not pairs:
        return []
    _positive("baseline", [base for base, _ in pairs])
    _positive("candidate", [candidate for _, candidate in pairs])
    return [candidate / base for base, candidate in pairs]


def bootstrap(
    values: Sequence[float],
    *,
    statistic: Callable[..., np.ndarray] = np.median,
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Percentile bootstrap interval of `statistic(values, axis=-1)`.

    Up to EXACT_PAIRS values all n**n resamples are enumerated, so the result
    needs no random numbers; above that `resamples` are drawn from `seed`.
    Raises ValueError for no values, non-finite ones or a level outside (0, 1).
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.all(np.isfinite(array)):
        raise ValueError("bootstrap needs at least one finite number")
    if not 0 < level < 1:
        raise ValueError(f"level {level} is not between 0 and 1")
    count = array.size
    exact = count <= EXACT_PAIRS
    if exact:
        index = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        index = np.random.default_rng(seed).integers(0, count, (resamples, count))
    spread = statistic(array[index], axis=-1)
    tail = 100 * (1 - level) / 2
    # An observed value each way, so that few distinct medians are not blended.
    low = np.percentile(spread, tail, method="lower")
    high = np.percentile(spread, 100 - tail, method="higher")
    return Interval(
        low=float(low),
        high=float(high),
        level=level,
        pairs=count,
        exact=exact,
        reachable=1 - 2.0 ** (1 - count),
    )


def pairs_for(level: float) -> int:
    """Fewest independent pairs whose range covers the median with `level`."""
    return math.ceil(1 - math.log2(1 - level))


def noise_floor(runs_by_arm: Sequence[Sequence[float]]) -> float | None:
    """Largest relative difference between two consecutive runs of one arm.

    Every two consecutive runs of an arm are an A/A pair: the same tree, so
    whatever they differ by is noise. Returns max(a/b, b/a) - 1 over all of them,
    or None when no arm ran twice.
    """
    worst = None
    for runs in runs_by_arm:
        for first, second in itertools.pairwise(runs):
            ratio = paired_ratios([(first, second)])[0]
            worst = max(worst or 0.0, max(ratio, 1 / ratio) - 1)
    return worst


def verdict(
    ratios: Sequence[float],
    *,
    noise: float | None = None,
    higher_is_better: bool = True,
    level: float = LEVEL,
    seed: int = 0,
) -> Verdict:
    """ "faster", "slower" or "no difference shown" from per-pair ratios.

    A difference is shown when the whole bootstrap interval lies on one side of
    1 and outside the A/A noise. With fewer pairs than `pairs_for(level)` the
    interval cannot reach its level, so a measured noise floor is needed too;
    one pair is a screening and shows nothing.
    """
    if not ratios:
        return Verdict("no difference shown", None, None, noise, "no complete pair")
    values = _positive("ratios", ratios)
    interval = bootstrap(values, level=level, seed=seed)
    change = float(np.median(values)) - 1
    count, needed = values.size, pairs_for(level)
    band = (1 + noise) if noise is not None else 1.0
    outside = interval.low > band or interval.high < 1 / band

    def nothing(reason: str) -> Verdict:
        return Verdict("no difference shown", change, interval, noise, reason)

    floor = "not measured" if noise is None else f"{noise:.2%}"
    if count == 1:
        return nothing(
            f"one pair ({change:+.2%}) is a screening; run at least {needed} pairs"
        )
    if not outside:
        return nothing(
            f"the interval {interval.low - 1:+.2%} to {interval.high - 1:+.2%} of"
            f" {count} pairs is not clear of 0 and of the A/A noise ({floor})"
        )
    if count < needed and noise is None:
        return nothing(
            f"{count} pairs and no A/A noise floor; run {needed} pairs, or one arm"
            " twice"
        )
    better = (change > 0) == higher_is_better
    reason = (
        f"{count} pairs, {interval.low - 1:+.2%} to {interval.high - 1:+.2%},"
        f" A/A noise {floor}"
    )
    if count < needed:
        reason += (
            f"; {count} pairs cover the median in at most {interval.reachable:.0%} of"
            f" cases, {needed} reach {level:.0%}"
        )
    return Verdict("faster" if better else "slower", change, interval, noise, reason)
