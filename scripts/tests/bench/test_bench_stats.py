"""Known answers for the statistics, each computed by another way than the code's."""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import stats

# The rows of the table in sgl-project/sglang pull request 47653: 128 requests of
# 65,536 tokens a run, C4, 8x B300. Input tok/s, printed with two decimals.
REQUESTS, ISL = 128, 65_536
RATE = {
    "A1": 42_203.78,
    "KDA": 42_899.91,
    "MoE": 42_813.05,
    "B1": 43_569.94,
    "A2": 42_130.58,
    "B2": 43_524.13,
}


def pooled(*labels, shift=0.0):
    tokens = [REQUESTS * ISL] * len(labels)
    return stats.pooled_throughput(
        tokens, [REQUESTS * ISL / (RATE[label] + shift) for label in labels]
    )


@pytest.mark.parametrize(
    "labels, printed", [(("A1", "A2"), 42_167.15), (("B1", "B2"), 43_547.02)]
)
def test_pooled_rate_of_the_seed_table(labels, printed):
    # The rows' own rounding leaves half a cent each way, as does the total's.
    low, high = pooled(*labels, shift=-0.005), pooled(*labels, shift=0.005)
    assert low - 0.005 <= printed <= high + 0.005
    assert round(pooled(*labels), 2) == printed
    assert pooled(*labels) < np.mean([RATE[label] for label in labels])


@pytest.mark.parametrize(
    "base, candidate, printed",
    [
        (("A1", "A2"), ("B1", "B2"), "+3.27%"),
        (("A1",), ("B1",), "+3.24%"),
        (("A2",), ("B2",), "+3.31%"),
        (("A1",), ("MoE",), "+1.44%"),
    ],
)
def test_changes_of_the_seed_table(base, candidate, printed):
    ratio = stats.paired_ratios([(pooled(*base), pooled(*candidate))])[0]
    assert f"{ratio - 1:+.2%}" == printed


def test_verdict_on_the_seed_table():
    ratios = stats.paired_ratios([(RATE["A1"], RATE["B1"]), (RATE["A2"], RATE["B2"])])
    noise = stats.noise_floor([[RATE["A1"], RATE["A2"]], [RATE["B1"], RATE["B2"]]])
    assert noise == pytest.approx(42_203.78 / 42_130.58 - 1)
    shown = stats.verdict(ratios, noise=noise)
    assert shown.outcome == "faster"
    assert f"{shown.change:+.2%}" in ("+3.27%", "+3.28%")
    # Two pairs say less than an interval's level promises, and the text says so.
    assert "at most 50%" in str(shown) and "6 reach 95%" in str(shown)
    moe = stats.verdict(stats.paired_ratios([(RATE["A1"], RATE["MoE"])]), noise=noise)
    assert moe.outcome == "no difference shown" and "screening" in str(moe)


def test_pooled_rate_weighs_by_time():
    # 100 tokens in 1 s and 100 tokens in 9 s: 200 / 10, not (100 + 11.1) / 2.
    assert stats.pooled_throughput([100, 100], [1.0, 9.0]) == 20.0


@pytest.mark.parametrize(
    "tokens, seconds",
    [([], []), ([1], []), ([1], [0.0]), ([1], [math.nan]), ([-1], [1.0])],
)
def test_pooled_rate_refuses(tokens, seconds):
    with pytest.raises(ValueError):
        stats.pooled_throughput(tokens, seconds)


def test_percentiles_are_of_all_requests():
    # As in the seed, where P99 is 7.046 and 7.050 s in the runs and 7.359 pooled:
    # two slow requests in each run lie above each run's P99 but not the pool's.
    first = [6.0] * 125 + [6.1, 7.4, 7.5]
    second = [6.0] * 125 + [6.1, 7.4, 7.5]
    each = [stats.percentile(run, 99) for run in (first, second)]
    both = stats.percentile(first + second, 99)
    assert max(each) < 7.1 < 7.3 < both
    assert both == pytest.approx(
        scipy.stats.scoreatpercentile(first + second, 99), rel=1e-12
    )


def test_percentile_against_its_definition():
    values = [15, 20, 35, 40, 50]  # rank 0.4 * 4 = 1.6: 20 + 0.6 * 15
    assert stats.percentile(values, 40) == pytest.approx(29.0)
    for bad in ([], [1.0, math.nan]):
        with pytest.raises(ValueError):
            stats.percentile(bad, 50)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("level", [0.5, 0.6, 0.8, 0.9, 0.95])
def test_exact_bootstrap_against_weights_of_multisets(count, level):
    # Another way to the same distribution: every multiset with its multinomial
    # weight, instead of every resample.
    values = [0.98, 1.01, 1.02, 1.05, 1.07, 1.16][:count]
    weight: dict[float, int] = {}
    for multiset in itertools.combinations_with_replacement(range(count), count):
        ways = math.factorial(count)
        for index in set(multiset):
            ways //= math.factorial(multiset.count(index))
        middle = float(np.median([values[index] for index in multiset]))
        weight[middle] = weight.get(middle, 0) + ways
    ordered = [m for m in sorted(weight) for _ in range(weight[m])]
    last = count**count - 1
    tail = (1 - level) / 2
    found = stats.bootstrap(values, level=level)
    assert found.exact and len(ordered) == last + 1
    assert found.low == pytest.approx(ordered[math.floor(tail * last)])
    assert found.high == pytest.approx(ordered[math.ceil((1 - tail) * last)])


def test_drawn_bootstrap_against_scipy():
    values = np.random.default_rng(7).normal(1.03, 0.01, 25)
    found = stats.bootstrap(values, statistic=np.mean, seed=3)
    other = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=11
    ).confidence_interval
    assert not found.exact
    # Two draws of 20,000: the edges differ by Monte Carlo error only.
    assert found.low == pytest.approx(other.low, abs=2e-4)
    assert found.high == pytest.approx(other.high, abs=2e-4)


def test_bootstrap_is_a_function_of_its_seed():
    values = list(np.random.default_rng(1).normal(1, 0.01, 9))
    state = np.random.get_state()[1].copy()
    shape = {"statistic": np.mean, "resamples": 50}
    first = stats.bootstrap(values, seed=5, **shape)
    assert first == stats.bootstrap(values, seed=5, **shape)
    assert first != stats.bootstrap(values, seed=6, **shape)
    assert (np.random.get_state()[1] == state).all()


def test_interval_covers_as_often_as_it_says():
    # 9 pairs with a known median: about 95% of the intervals hold it.
    draw = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        found = stats.bootstrap(draw.normal(1.0, 0.02, 9), resamples=1000)
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 300 <= 0.99


@pytest.mark.parametrize("values", [[], [math.inf], [math.nan, 1.0]])
def test_bootstrap_refuses(values):
    with pytest.raises(ValueError):
        stats.bootstrap(values)


def test_reachable_level_is_the_binomial_one():
    # The range of n draws misses the median when all fall on one side of it.
    for count in range(1, 8):
        miss = 2 * scipy.stats.binom.pmf(0, count, 0.5)
        found = stats.bootstrap([1.0 + i / 100 for i in range(count)])
        assert found.reachable == pytest.approx(max(0.0, 1 - miss))
    assert stats.pairs_for(0.95) == 6 and stats.pairs_for(0.5) == 2


def test_noise_floor_takes_the_worst_consecutive_pair():
    # 100 -> 103 is 3%; 100 against 104 are not consecutive.
    assert stats.noise_floor([[100, 103, 104], [50, 50.5]]) == pytest.approx(0.03)
    assert stats.noise_floor([[103, 100]]) == pytest.approx(0.03)
    assert stats.noise_floor([[100], [200]]) is None
    assert stats.noise_floor([[5, 5]]) == 0.0


def test_verdicts():
    clear = [1.030, 1.031, 1.032, 1.033, 1.034, 1.035]
    assert stats.verdict(clear).outcome == "faster"
    assert stats.verdict([1 / r for r in clear]).outcome == "slower"
    # Seconds: less is better.
    assert stats.verdict(clear, higher_is_better=False).outcome == "slower"
    assert stats.verdict(clear, noise=0.05).outcome == "no difference shown"
    wide = [0.97, 0.99, 1.0, 1.01, 1.02, 1.04]
    assert stats.verdict(wide).outcome == "no difference shown"
    assert "run 6 pairs" in str(stats.verdict(clear[:3]))
    assert stats.verdict(clear[:3], noise=0.001).outcome == "faster"
    assert stats.verdict([]).reason == "no complete pair"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=2, max_size=12)
)
def test_swapping_the_arms_swaps_the_verdict(pairs):
    there = stats.verdict(stats.paired_ratios(pairs))
    back = stats.verdict(stats.paired_ratios([(b, a) for a, b in pairs]))
    swap = {"faster": "slower", "slower": "faster"}
    # Medians of two middle ratios are means, whose inverse is not the inverse's.
    if len(pairs) % 2:
        assert back.outcome == swap.get(there.outcome, there.outcome)
    else:
        assert back.outcome != there.outcome or there.outcome not in swap
