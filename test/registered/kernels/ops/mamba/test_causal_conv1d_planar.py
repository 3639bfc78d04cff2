"""Planar causal conv on CUDA: the bits of the base conv, split and contiguous."""

import sys

import pytest
import torch

from sglang.kernels.jit.utils import get_ci_test_range
from sglang.kernels.ops.mamba.causal_conv1d_planar import (
    CAUSAL_CONV1D_PLANAR_BLOCK_M,
    planar_l2norm_is_exact,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kernels.causal_conv1d_planar import (
    UGLY_LENGTHS,
    assert_same_bits,
    block_table,
    check_l2norm_error,
    check_planes,
    make_inputs,
)

register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

requires_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA only")

# Equal heads, fewer key than value heads, and widths that end inside a block.
WIDTHS = [(512, 512, 512), (256, 256, 1536), (520, 24, 1000)]
LENGTHS = [*UGLY_LENGTHS, [63, 64, 65, 127, 128, 129], [1000, 1, 3000], [1] * 100]


def _inputs(lens, widths, *, dtype=torch.bfloat16, **kwargs):
    return make_inputs(lens=lens, widths=widths, dtype=dtype, device="cuda", **kwargs)


@requires_cuda
@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("block_tokens", [None, 8, CAUSAL_CONV1D_PLANAR_BLOCK_M])
def test_lengths_and_grids(lens, widths, block_tokens):
    inputs = _inputs(lens, widths)
    if block_tokens is None:
        check_planes(inputs, widths)
        return
    table = block_table(lens, device="cuda", block_tokens=block_tokens)
    check_planes(inputs, widths, table=table, block_tokens=block_tokens)


@requires_cuda
def test_the_tile_of_large_batches():
    check_planes(_inputs([22000, 0, 3, 500], WIDTHS[0]), WIDTHS[0])


@requires_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kernel_width", get_ci_test_range([2, 3, 4], [4]))
def test_dtypes_bias_and_activation(
    dtype, weight_dtype, bias, activation, kernel_width
):
    inputs = _inputs(
        [129, 0, 2, 700],
        WIDTHS[0],
        dtype=dtype,
        weight_dtype=weight_dtype or dtype,
        bias=bias,
        activation=activation,
        kernel_width=kernel_width,
    )
    check_planes(inputs, WIDTHS[0])


@requires_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lens", [[1], [300, 0, 2, 64], [22000]], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 4), (1, 1, 3), (2, 2, 8), (12, 12, 12)])
@pytest.mark.parametrize("fixed_grid", [False, True])
def test_l2norm_has_the_bits_of_l2norm_fwd(dtype, lens, heads, fixed_grid):
    widths = tuple(128 * h for h in heads)
    inputs = _inputs(lens, widths, dtype=dtype)
    assert planar_l2norm_is_exact(inputs.x, 128)
    n = CAUSAL_CONV1D_PLANAR_BLOCK_M
    table = block_table(lens, device="cuda", block_tokens=n) if fixed_grid else None
    check_planes(
        inputs, widths, table=table, block_tokens=n, l2norm_head_dims=(128, 128, 0)
    )


@requires_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("row_padding", [1, 8])
def test_l2norm_error(dtype, head_dim, row_padding):
    """Also where the bits are not promised: other head dims, unaligned rows."""
    inputs = _inputs([300, 5], WIDTHS[0], dtype=dtype, row_padding=row_padding)
    check_l2norm_error(inputs, WIDTHS[0], head_dim=head_dim)


@requires_cuda
def test_l2norm_is_promised_only_where_it_is_exact():
    x = torch.zeros(4, 1024, dtype=torch.bfloat16, device="cuda")
    assert planar_l2norm_is_exact(x, 128)
    assert not planar_l2norm_is_exact(x, 64)
    assert not planar_l2norm_is_exact(x.float(), 128)
    assert not planar_l2norm_is_exact(x[:, 1:], 128)
    assert not planar_l2norm_is_exact(x.new_zeros(4, 1025)[:, :1024], 128)
    assert not planar_l2norm_is_exact(x.cpu(), 128)


@requires_cuda
def test_state_dtype_differs_from_x():
    inputs = _inputs(
        [1, 2, 90], WIDTHS[0], dtype=torch.float16, state_dtype=torch.bfloat16
    )
    check_planes(inputs, WIDTHS[0])


@requires_cuda
@pytest.mark.parametrize("row_padding", [0, 1, 8, 512])
def test_row_pitch_and_alignment(row_padding):
    inputs = _inputs([77, 3], WIDTHS[0], row_padding=row_padding)
    check_planes(inputs, WIDTHS[0])


@requires_cuda
@pytest.mark.parametrize("fixed_grid", [False, True])
def test_padded_sequences_leave_rows_and_states_alone(fixed_grid):
    lens = [90, 50, 300]
    inputs = _inputs(lens, WIDTHS[0])
    inputs.cache_indices[1] = -1
    table = block_table(lens, device="cuda") if fixed_grid else None
    for plane in check_planes(inputs, WIDTHS[0], table=table):
        assert plane[90:140].isnan().all() and not plane[:90].isnan().any()


@requires_cuda
def test_graph_replay_reads_the_refreshed_table():
    """A captured launch serves any batch of the bucket: tables change in place."""
    bucket, seqs, widths = 512, 6, (256, 256, 256)
    inputs = _inputs([bucket] + [0] * (seqs - 1), widths)
    rows = bucket // 8 + seqs
    table = torch.full((rows, 2), -1, dtype=torch.int32, device="cuda")
    pool = inputs.pool.clone()

    def run():
        return causal_conv1d_fn(
            inputs.x.transpose(0, 1),
            inputs.weight,
            None,
            conv_states=pool.transpose(1, 2),
            query_start_loc=inputs.query_start_loc,
            seq_lens_cpu=None,
            cache_indices=inputs.cache_indices,
            has_initial_state=inputs.has_initial_state,
            block_table=table,
            out_widths=widths,
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        planes = run()

    for lens in ([bucket], [1, 2, 3, 100], [0, 65, 0, 64, 130, 1]):
        live = _inputs(lens, widths)
        tokens = sum(lens)
        inputs.x[:tokens].copy_(live.x)
        inputs.weight.copy_(live.weight)
        inputs.query_start_loc.fill_(tokens)
        inputs.query_start_loc[: len(lens) + 1].copy_(live.query_start_loc)
        inputs.cache_indices.fill_(-1)
        inputs.cache_indices[: len(lens)].copy_(live.cache_indices)
        inputs.has_initial_state.fill_(False)
        inputs.has_initial_state[: len(lens)].copy_(live.has_initial_state)
        fresh = block_table(lens, device="cuda", padding=0)
        table.fill_(-1)
        table[: len(fresh)].copy_(fresh)
        pool[: len(live.pool)].copy_(live.pool)
        for plane in planes:
            plane.fill_(float("nan"))
        graph.replay()
        expected, expected_pool = live.run(out_widths=widths)
        for plane, want in zip(planes, expected):
            assert_same_bits(plane[:tokens], want, str(lens))
            assert plane[tokens:].isnan().all()
        assert_same_bits(pool[: len(live.pool)], expected_pool, "conv states")


@requires_cuda
@pytest.mark.skipif(
    torch.cuda.is_available()
    and torch.cuda.get_device_properties(0).total_memory < 24 * 2**30,
    reason="needs 24 GB",
)
def test_offsets_past_32_bits():
    """Kimi-K3's 36864 columns: the last tokens lie past 2**31 elements of x and of
    the wide plane."""
    tokens, widths = 60000, (256, 256, 36352)
    dim = sum(widths)
    assert tokens * widths[2] > 2**31
    x = torch.zeros(tokens, dim, dtype=torch.bfloat16, device="cuda")
    tail = _inputs([70], widths, row_padding=0)
    tail.has_initial_state.fill_(False)
    x[-70:] = tail.x
    expected, expected_pool = tail.run(out_widths=widths)
    tail.x, tail.lens = x, [tokens]
    tail.query_start_loc[1] = tokens
    planes, pool = tail.run(out_widths=widths)
    # The tail follows zeros, as a sequence without a state does.
    for plane, want in zip(planes, expected):
        assert_same_bits(plane[-70:], want, "tail")
        assert not plane[:-70].any()
    assert_same_bits(pool, expected_pool, "conv states")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-x"]))
