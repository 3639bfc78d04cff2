import numpy as np
import pytest
from bench.errors import BenchError
from bench.tactics.routing import generate, padding, rank_correlation
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr


def draw(spec, seed=0, tokens=500):
    return generate(spec, tokens=tokens, experts=40, top_k=5, seed=seed)


@pytest.mark.parametrize("spec", ["uniform", "dirichlet:0.2"])
def test_rows_hold_distinct_experts_and_weights_of_one(spec):
    routing = draw(spec)
    assert routing.topk_ids.shape == (500, 5) and routing.topk_ids.dtype == np.int32
    assert all(len(set(row)) == 5 for row in routing.topk_ids.tolist())
    assert routing.topk_ids.min() >= 0 and routing.topk_ids.max() < 40
    np.testing.assert_allclose(routing.topk_weights.sum(axis=1), 1, rtol=1e-5)
    assert routing.counts(40).sum() == 2500


def test_seed_decides_the_draw():
    assert draw("dirichlet:0.2").digest() == draw("dirichlet:0.2").digest()
    assert draw("dirichlet:0.2").digest() != draw("dirichlet:0.2", seed=1).digest()
    assert draw("dirichlet:0.2").digest() != draw("uniform").digest()


def test_uniform_is_flat_and_small_alpha_is_skewed():
    flat = draw("uniform", tokens=5000).counts(40)
    skewed = draw("dirichlet:0.2", tokens=5000).counts(40)
    assert flat.std() / flat.mean() < 0.1  # binomial: about 0.04
    assert skewed.std() / skewed.mean() > 0.5


def test_chunks_do_not_repeat_each_other():
    ids = draw("uniform", tokens=4096 + 7).topk_ids
    assert not np.array_equal(ids[:2048], ids[2048:4096])


def test_local_counts_are_the_slice_of_the_global_ones():
    routing = draw("dirichlet:0.2")
    np.testing.assert_array_equal(routing.counts(10, 20), routing.counts(40)[20:30])


@pytest.mark.parametrize(
    "spec",
    [
        "zipf",
        "dirichlet",
        "dirichlet:x",
        "dirichlet:0",
        "dirichlet:nan",
        "dirichlet:-1",
        "uniform:3",
    ],
)
def test_unknown_routing_says_what_is_known(spec):
    with pytest.raises(BenchError, match="dirichlet"):
        draw(spec)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=30), st.integers(1, 256))
def test_padding_equals_filling_tiles_by_hand(counts, tile):
    tiles = 0
    for count in counts:
        while count > 0:
            tiles, count = tiles + 1, count - tile
    found = padding(np.array(counts), tile)
    assert found.blocks == tiles
    assert found.rows == tiles * tile == found.routed + found.padded
    assert found.routed == sum(counts)
    assert found.active == sum(count > 0 for count in counts)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9)
)
def test_rank_correlation_is_scipys(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    found = rank_correlation(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(a, b).statistic)
