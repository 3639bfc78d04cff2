"""Planar causal conv against the base conv, in Triton's interpreter on the CPU."""

import os
import subprocess
import sys

import pytest
import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# A process that has imported triton without this can only compile.
_TOO_LATE = "triton" in sys.modules and not _INTERPRET
# One that has imported it with this never compiles again: no place for device tests.
_SHARED = _TOO_LATE or (torch.accelerator.is_available() and not _INTERPRET)
if _SHARED and __name__ != "__main__":
    pytest.skip(
        f"needs its own process: TRITON_INTERPRET=1 pytest {__file__}",
        allow_module_level=True,
    )
os.environ["TRITON_INTERPRET"] = "1"

from sglang.kernels.ops.mamba import causal_conv1d_planar  # noqa: E402
from sglang.kernels.ops.mamba.causal_conv1d_planar import (  # noqa: E402
    CAUSAL_CONV1D_PLANAR_BLOCK_M,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import (  # noqa: E402
    causal_conv1d_fn,
)
from sglang.test.ci.ci_register import register_cpu_ci  # noqa: E402
from sglang.test.kernels.causal_conv1d_planar import (  # noqa: E402
    UGLY_LENGTHS,
    assert_same_bits,
    block_table,
    check_l2norm_error,
    check_planes,
    make_inputs,
)

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

# Unequal, none a multiple of its feature block.
WIDTHS = (24, 8, 40)


def _inputs(lens, *, widths=WIDTHS, dtype=torch.bfloat16, **kwargs):
    return make_inputs(lens=lens, widths=widths, dtype=dtype, device="cpu", **kwargs)


@pytest.mark.parametrize("lens", UGLY_LENGTHS, ids=str)
def test_every_length_has_the_bits_of_the_base(lens):
    check_planes(_inputs(lens, widths=(24, 48)), (24, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_dtypes_bias_and_activation(dtype, bias, activation):
    check_planes(_inputs([9, 1], dtype=dtype, bias=bias, activation=activation), WIDTHS)


@pytest.mark.parametrize(
    "kernel_width, widths",
    [(2, (16, 56)), (3, (72,)), (4, (1, 2, 3, 66)), (4, (576, 8))],
    ids=str,
)
def test_kernel_widths_and_plane_counts(kernel_width, widths):
    inputs = _inputs([1, 9], widths=widths, kernel_width=kernel_width)
    check_planes(inputs, widths)


def test_weights_in_the_dtype_of_x():
    check_planes(_inputs([5, 9], weight_dtype=torch.bfloat16), WIDTHS)


def test_state_dtype_differs_from_x():
    inputs = _inputs([1, 2, 9], dtype=torch.float16, state_dtype=torch.bfloat16)
    check_planes(inputs, WIDTHS)


@pytest.mark.parametrize("lens", [[0, 64, 2], [70]], ids=str)
def test_the_tile_of_large_batches(lens, monkeypatch):
    """The interpreter is too slow for a batch that takes it by its size."""
    monkeypatch.setattr(causal_conv1d_planar, "_MIN_PROGRAMS", 0)
    check_planes(_inputs(lens, widths=(24, 48)), (24, 48))


@pytest.mark.parametrize("block_tokens", [8, CAUSAL_CONV1D_PLANAR_BLOCK_M])
@pytest.mark.parametrize("lens", [[17, 0, 2]], ids=str)
def test_block_table_rows_in_any_order(lens, block_tokens):
    table = block_table(lens, device="cpu", block_tokens=block_tokens)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    check_planes(
        _inputs(lens),
        WIDTHS,
        table=table[order].contiguous(),
        block_tokens=block_tokens,
    )


@pytest.mark.parametrize("fixed_grid", [False, True])
def test_padded_sequences_leave_rows_and_states_alone(fixed_grid):
    """Also the last live slot, the neighbour of index -1."""
    lens = [9, 5, 12]
    inputs = _inputs(lens)
    inputs.cache_indices[1] = -1
    table = block_table(lens, device="cpu") if fixed_grid else None
    planes = check_planes(inputs, WIDTHS, table=table)
    for plane in planes:
        assert plane[9:14].isnan().all() and not plane[:9].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dims", [(16, 16, 0), (0, 8, 8)], ids=str)
def test_l2norm_of_chosen_planes(dtype, head_dims):
    widths = (32, 48, 24)
    inputs = _inputs([1, 9], widths=widths, dtype=dtype)
    check_planes(inputs, widths, l2norm_head_dims=head_dims)


def test_l2norm_error():
    check_l2norm_error(_inputs([2, 9], widths=(32, 64)), (32, 64), head_dim=16)


def test_any_pad_slot_id_skips_the_sequence_of_that_number():
    """As in the base; a table's padded rows then name that sequence."""
    lens = [9, 5, 3]
    inputs = _inputs(lens)
    inputs.cache_indices.copy_(torch.tensor([3, 4, 5]))
    table = block_table(lens, device="cpu", padding=0)
    for grid in (None, table):
        for plane in check_planes(inputs, WIDTHS, table=grid, pad_slot_id=1):
            assert plane[9:14].isnan().all() and not plane[:9].isnan().any()


@pytest.mark.parametrize("missing", ["cache_indices", "has_initial_state"])
def test_optional_index_tensors(missing):
    check_planes(_inputs([3, 1, 12]), WIDTHS, **{missing: None})


def test_only_the_sequences_slots_change():
    inputs = _inputs([1, 2, 9])
    _, pool = inputs.run(out_widths=WIDTHS)
    others = torch.ones(len(pool), dtype=torch.bool)
    others[inputs.cache_indices.long()] = False
    assert others.sum() == 3
    assert_same_bits(pool[others], inputs.pool[others], "slots of no sequence")


def test_offsets_past_32_bits():
    """Sparse storage: rows 2**29 elements apart cost one page each."""
    dense = _inputs([7, 2], widths=(16, 16))
    dense.cache_indices.copy_(torch.tensor([4, 0]))
    expected, expected_pool = dense.run(out_widths=(16, 16))
    pitch = 2**29

    def spread(t, rows):
        far = torch.empty_strided((rows, *t.shape[1:]), (pitch, *t.stride()[1:]))
        far = torch.empty((rows - 1) * pitch + t[0].numel(), dtype=t.dtype).as_strided(
            far.shape, far.stride()
        )
        for row in range(rows):
            far[row] = t[row]
        return far

    pool = spread(dense.pool, 5)
    planes = causal_conv1d_fn(
        spread(dense.x, 9).transpose(0, 1),
        dense.weight,
        None,
        conv_states=pool.transpose(1, 2),
        query_start_loc=dense.query_start_loc,
        seq_lens_cpu=dense.lens,
        cache_indices=dense.cache_indices,
        has_initial_state=dense.has_initial_state,
        out_widths=(16, 16),
    )
    for plane, want in zip(planes, expected):
        assert_same_bits(plane, want, "plane")
    assert_same_bits(torch.stack(list(pool)), expected_pool, "conv states")


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(out_widths=(24, 8)), "sum to dim 72"),
        (dict(out_widths=(72, 0)), "must be positive"),
        (dict(out_widths=()), "sum to dim 72"),
        (dict(activation="gelu"), "activation must be None"),
        (dict(conv_states=None), "needs conv_states"),
        (dict(conv_states=torch.zeros(3, 72, 2)), r"\[slots, 72, >= 3\]"),
        (dict(weight=torch.zeros(72, 5)), "2 <= width <= 4"),
        (dict(weight=torch.zeros(70, 4)), "dim 72"),
        (dict(bias=torch.zeros(71)), r"bias must be contiguous \[72\]"),
        (dict(x=torch.zeros(72, 5)), "channel-last"),
        (dict(seq_lens_cpu=None), "seq_lens_cpu, or a block_table"),
        (
            dict(block_table=torch.zeros(4, 3, dtype=torch.int32)[:, :2]),
            "contiguous .blocks, 2.",
        ),
        (
            dict(block_table=torch.zeros(4, 2, dtype=torch.int32), block_tokens=2),
            "block_tokens must be at least 3",
        ),
        (dict(out_widths=None, block_tokens=16), "need out_widths"),
        (dict(out_widths=None, l2norm_head_dims=(8, 8, 0)), "need out_widths"),
        (dict(l2norm_head_dims=(8, 8)), "one entry per plane"),
        (dict(l2norm_head_dims=(8, 4, 0)), "all normalised planes share"),
        (dict(l2norm_head_dims=(16, 0, 0)), "divides 512 and the plane's width"),
        (dict(l2norm_head_dims=(24, 0, 0)), "divides 512 and the plane's width"),
    ],
)
def test_bad_arguments_are_named(change, match):
    inputs = _inputs([5])
    args = dict(
        x=inputs.x.transpose(0, 1),
        weight=inputs.weight,
        bias=None,
        conv_states=inputs.pool.transpose(1, 2),
        query_start_loc=inputs.query_start_loc,
        seq_lens_cpu=inputs.lens,
        cache_indices=inputs.cache_indices,
        out_widths=WIDTHS,
    )
    pool = inputs.pool.clone()
    with pytest.raises(ValueError, match=match):
        causal_conv1d_fn(**{**args, **change})
    assert_same_bits(inputs.pool, pool, "conv states")


if __name__ == "__main__":
    if _TOO_LATE:
        sys.exit(subprocess.call([sys.executable, __file__]))
    sys.exit(pytest.main([__file__, "-v", "-x"]))
