"""Oracle of the planar causal conv: the base conv, split and made contiguous."""

from contextlib import contextmanager
from itertools import accumulate
from typing import Iterator, Optional, Sequence

import msgspec
import torch

from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd
from sglang.kernels.ops.mamba.causal_conv1d_triton import (
    CAUSAL_CONV1D_FWD_BLOCK_M,
    PAD_SLOT_ID,
    causal_conv1d_fn,
)

# Sequence lengths of one batch: empty rows, rows below the conv window, rows
# beside a block edge (8 and 64 tokens), many rows.
UGLY_LENGTHS = (
    [1],
    [2],
    [1, 2, 3, 4],
    [13, 0, 1, 9],
    [0, 64, 2],
    [65, 0],
    [1] * 4,
    [0],
)


class PlanarConvInputs(msgspec.Struct):
    """One batch of KDA conv inputs; ``x`` and ``pool`` are token-major."""

    x: torch.Tensor  # [tokens, dim], rows padded past dim
    pool: torch.Tensor  # [slots, width - 1, dim]
    weight: torch.Tensor  # [dim, width]
    bias: Optional[torch.Tensor]  # [dim]
    query_start_loc: torch.Tensor
    lens: list[int]
    cache_indices: torch.Tensor
    has_initial_state: torch.Tensor
    activation: Optional[str] = "silu"

    def run(self, **kwargs):
        """``causal_conv1d_fn`` on a copy of the pool: (result, updated pool)."""
        pool = self.pool.clone()
        args = dict(
            seq_lens_cpu=self.lens,
            cache_indices=self.cache_indices,
            has_initial_state=self.has_initial_state,
        )
        args.update(kwargs)
        out = causal_conv1d_fn(
            self.x.transpose(0, 1),
            self.weight,
            self.bias,
            conv_states=pool.transpose(1, 2),
            query_start_loc=self.query_start_loc,
            activation=self.activation,
            **args,
        )
        return out, pool


def make_inputs(
    *,
    lens: Sequence[int],
    widths: Sequence[int],
    dtype: torch.dtype,
    device: str,
    kernel_width: int = 4,
    weight_dtype: torch.dtype = torch.float32,
    state_dtype: Optional[torch.dtype] = None,
    bias: bool = False,
    activation: Optional[str] = "silu",
    row_padding: int = 8,
) -> PlanarConvInputs:
    """Random inputs; every third sequence starts without a state, the slots are
    shuffled and the pool has more of them than sequences."""
    gen = torch.Generator().manual_seed(len(lens) * 1000 + sum(lens))

    def rand(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=gen).to(device=device, dtype=dtype)

    dim, seqs = sum(widths), len(lens)
    x = rand(sum(lens), dim + row_padding, dtype=dtype)[:, :dim]
    slots = torch.randperm(seqs + 3, generator=gen)[:seqs]
    return PlanarConvInputs(
        x=x,
        pool=rand(seqs + 3, kernel_width - 1, dim, dtype=state_dtype or dtype),
        weight=rand(dim, kernel_width, dtype=weight_dtype),
        bias=rand(dim, dtype=weight_dtype) if bias else None,
        query_start_loc=torch.tensor(
            [0, *accumulate(lens)], dtype=torch.int32, device=device
        ),
        lens=list(lens),
        cache_indices=slots.to(device=device, dtype=torch.int32),
        has_initial_state=(torch.arange(seqs) % 3 > 0).to(device),
        activation=activation,
    )


def block_table(
    lens: Sequence[int],
    *,
    device: str,
    block_tokens: int = CAUSAL_CONV1D_FWD_BLOCK_M,
    padding: int = 5,
) -> torch.Tensor:
    """(sequence, chunk) rows of a fixed grid, padded rows at the end."""
    rows = [
        (seq, chunk)
        for seq, n in enumerate(lens)
        for chunk in range(-(-n // block_tokens))
    ]
    rows += [(PAD_SLOT_ID, 0)] * padding
    return torch.tensor(rows, dtype=torch.int32, device=device)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """``torch.empty`` returns NaN, so a row that no program writes stays NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(8).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    same = actual.contiguous().view(torch.uint8) == expected.contiguous().view(
        torch.uint8
    )
    assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} bytes differ"


def check_l2norm_error(inputs: PlanarConvInputs, widths, head_dim: int) -> None:
    """Every plane normalised: at most twice the error of the same norm in torch and
    half a rounding step, both against float64 of the stored conv output."""
    planes, _ = inputs.run(out_widths=widths, l2norm_head_dims=[head_dim] * len(widths))
    plain, _ = inputs.run(out_widths=widths)
    for i in range(len(widths)):
        heads = plain[i].unflatten(-1, (-1, head_dim))
        exact = heads.double() / (heads.double().square().sum(-1, True) + 1e-6).sqrt()
        torch_norm = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        error = (planes[i].double() - exact.flatten(-2)).abs().max()
        step = torch.finfo(heads.dtype).eps / 2 * exact.abs().max()
        allowed = 2 * (torch_norm.double() - exact).abs().max() + step
        assert error <= allowed, f"plane {i}: error {error}, allowed {allowed}"


def check_planes(
    inputs: PlanarConvInputs,
    widths: Sequence[int],
    table: Optional[torch.Tensor] = None,
    block_tokens: int = CAUSAL_CONV1D_FWD_BLOCK_M,
    l2norm_head_dims: Optional[Sequence[int]] = None,
    **kwargs,
) -> tuple[torch.Tensor, ...]:
    """Planes and conv states have the bits of the base layout, written or not.

    The base runs the per-sequence grid, the planes that of ``table`` if given, whose
    rows count ``block_tokens``. With ``l2norm_head_dims`` the base layout's groups
    go through ``l2norm_fwd``.
    """
    grid = dict(l2norm_head_dims=l2norm_head_dims)
    if table is not None:
        grid.update(block_table=table, block_tokens=block_tokens, seq_lens_cpu=None)
    with poisoned_empty():
        base, base_pool = inputs.run(**kwargs)
        planes, pool = inputs.run(out_widths=widths, **kwargs, **grid)
    assert len(planes) == len(widths)
    # Separate allocations: a plane that lives on keeps no other plane alive.
    for plane in planes:
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.itemsize
    for i, group in enumerate(base.transpose(0, 1).split(list(widths), dim=1)):
        assert planes[i].is_contiguous()
        if l2norm_head_dims is not None and l2norm_head_dims[i]:
            heads = group.unflatten(-1, (-1, l2norm_head_dims[i])).contiguous()
            group = l2norm_fwd(heads).flatten(-2)
        assert_same_bits(planes[i], group, f"plane {i}")
    assert_same_bits(pool, base_pool, "conv states")
    return planes
