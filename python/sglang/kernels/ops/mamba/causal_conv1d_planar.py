"""Causal conv1d whose output columns land in separate contiguous tensors.

``causal_conv1d_fn`` returns one ``[tokens, dim]`` tensor. A consumer that needs
its column groups contiguous (KDA: q, k and v) then copies every one of them,
which costs more than the convolution. Here a program owns one feature block of
one group, so the group's own tensor is written directly.

The per-element arithmetic and its order are those of ``causal_conv1d_fn``:
outputs and conv states are bitwise equal to split + contiguous.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Optional, Sequence, Tuple, Union

import torch
import triton
import triton.language as tl

# Tokens per program.
_BLOCK_TOKENS = 64
# The same of a small batch, and of a row of a fixed grid's block_table.
CAUSAL_CONV1D_PLANAR_BLOCK_M = 16
# About eight programs for each SM of an H200: below it the small block wins.
_MIN_PROGRAMS = 1024
# Features per program; narrower planes take the next power of two.
_BLOCK_FEATURES = 512
# Added to the sum of squares by fla's l2norm_fwd.
_L2NORM_EPS = 1e-6


@triton.jit
def _silu(x, CUDA_MATH: tl.constexpr):
    if CUDA_MATH:
        # exp without its guard for results below 2**-126, which vanish in the
        # sum: the bits of the base formula for every float32 x, three
        # instructions fewer.
        return x / (1 + tl.exp2(x * -1.4426950408889634))
    return x / (1 + tl.exp(-x))


@triton.jit
def _l2norm_heads(
    x,  # [BLOCK_N] float32
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EPS: tl.constexpr,
    CUDA_MATH: tl.constexpr,
):
    """Heads of x, rounded to dtype as a store would, over their L2 norms."""
    if CUDA_MATH and dtype == tl.bfloat16:
        # Two values per conversion; the compiler converts one at a time.
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        x = x.to(dtype).to(tl.float32)
    heads = tl.reshape(x, (BLOCK_N // HEAD_DIM, HEAD_DIM))
    norm = tl.sqrt(tl.sum(heads * heads, axis=1) + EPS)
    if CUDA_MATH:
        # One reciprocal per head: CUDA's division is a product with it anyway.
        heads = heads * (1.0 / norm)[:, None]
    else:
        heads = heads / norm[:, None]
    return tl.reshape(heads, (BLOCK_N,))


@triton.jit
def _load_weights(
    w_row,  # [BLOCK_N] pointers to the feature's first weight
    mask,
    stride_w_width: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """KERNEL_WIDTH tensors of [BLOCK_N]."""
    if KERNEL_WIDTH == 4 and stride_w_width == 1:
        # One wide load: a load for each column touches every line four times.
        w = tl.load(
            w_row[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0
        )
        even, odd = tl.split(tl.reshape(w, (BLOCK_N, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        weights = (w0, w1, w2, w3)
    else:
        weights = ()
        for j in tl.static_range(KERNEL_WIDTH):
            w = tl.load(w_row + j * stride_w_width, mask=mask, other=0.0)
            weights = weights + (w,)
    return weights


@triton.jit
def _load_window(
    state_row,  # [BLOCK_N] pointers to the oldest state column
    x_row,  # [BLOCK_N] pointers to the chunk's first token
    is_first,  # whether the chunk starts its sequence
    has_state,  # is_first, and the sequence continues a cached state
    mask,
    dtype: tl.constexpr,
    stride_x_token: tl.constexpr,
    stride_state_token: tl.constexpr,
    STATE_LEN: tl.constexpr,
):
    """The STATE_LEN columns before the chunk: cached, zero, or the tokens before."""
    window = ()
    for j in tl.static_range(STATE_LEN):
        cached = tl.load(
            state_row + j * stride_state_token, mask=mask & has_state, other=0.0
        ).to(dtype)
        before = tl.load(
            x_row - (STATE_LEN - j) * stride_x_token,
            mask=mask & (is_first == 0),
            other=0.0,
        )
        window = window + (tl.where(is_first, cached, before),)
    return window


@triton.jit
def _update_conv_state(
    state_row,  # [BLOCK_N] pointers to the oldest state column
    x_row,  # [BLOCK_N] pointers to the sequence's first token
    seqlen,
    has_state,  # whether the old columns count, else they read as zero
    mask,
    stride_x_token: tl.constexpr,
    stride_state_token: tl.constexpr,
    STATE_LEN: tl.constexpr,
):
    """The last STATE_LEN columns of [old state | tokens], written in place."""
    columns = ()
    for j in tl.static_range(STATE_LEN):
        token = seqlen - STATE_LEN + j
        old = tl.load(
            state_row + (j + seqlen) * stride_state_token,
            mask=mask & has_state & (token < 0),
            other=0.0,
        )
        new = tl.load(
            x_row + token.to(tl.int64) * stride_x_token,
            mask=mask & (token >= 0),
            other=0.0,
        )
        columns = columns + (tl.where(token < 0, old, new.to(old.dtype)),)
    # Short chunks shift columns inside the row: read all before writing any.
    tl.debug_barrier()
    for j in tl.static_range(STATE_LEN):
        tl.store(state_row + j * stride_state_token, columns[j], mask=mask)


@triton.jit
def _convolve_rows(
    x_row,  # [BLOCK_N] pointers to the chunk's first token
    out_row,  # [BLOCK_N] pointers to its place in the plane
    rows_left,
    out_stride,
    window,  # STATE_LEN tensors of [BLOCK_N]
    weights,  # KERNEL_WIDTH tensors of [BLOCK_N]
    bias,  # [BLOCK_N] float32
    mask,
    stride_x_token: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    SILU_ACTIVATION: tl.constexpr,
    L2NORM_HEAD_DIM: tl.constexpr,  # 0: the plane is stored as it is
    L2NORM_EPS: tl.constexpr,
    CUDA_MATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype: tl.constexpr = out_row.dtype.element_ty
    for row in range(0, rows_left, ROWS):
        # All loads before the first use: ROWS rows are in flight.
        taps = window
        for r in tl.static_range(ROWS):
            x = tl.load(x_row + r * stride_x_token, mask=mask & (row + r < rows_left))
            taps = taps + (x,)
        for r in tl.static_range(ROWS):
            acc = bias
            for j in tl.static_range(KERNEL_WIDTH):
                acc += taps[r + j] * weights[j]
            if SILU_ACTIVATION:
                acc = _silu(acc, CUDA_MATH)
            if L2NORM_HEAD_DIM > 0:
                acc = _l2norm_heads(
                    acc, dtype, BLOCK_N, L2NORM_HEAD_DIM, L2NORM_EPS, CUDA_MATH
                )
            tl.store(out_row + r * out_stride, acc, mask=mask & (row + r < rows_left))
        window = taps[ROWS:]
        x_row += ROWS * stride_x_token
        out_row += ROWS * out_stride


@triton.jit(do_not_specialize=["num_chunks"])
def _causal_conv1d_planar_kernel(
    x_ptr,  # [tokens, dim], features contiguous
    w_ptr,  # [dim, WIDTH]
    bias_ptr,  # [dim] or None
    state_ptr,  # [slots, dim, >= WIDTH - 1]
    cache_indices_ptr,  # [seqs] or None
    has_initial_state_ptr,  # [seqs] bool or None
    query_start_loc_ptr,  # [seqs + 1]
    block_table_ptr,  # [blocks, 2] (seq, chunk) or None
    out_ptrs,  # one [tokens, WIDTHS[p]] pointer for each plane
    num_chunks,  # chunks per sequence of the grid; unused with a block table
    stride_x_token: tl.constexpr,
    stride_w_dim: tl.constexpr,
    stride_w_width: tl.constexpr,
    stride_state_seq: tl.constexpr,
    stride_state_dim: tl.constexpr,
    stride_state_token: tl.constexpr,
    pad_slot_id: tl.constexpr,
    WIDTHS: tl.constexpr,  # features of each plane
    FIRST_FEATURES: tl.constexpr,  # first feature of each plane
    FIRST_BLOCKS: tl.constexpr,  # first feature block of each plane
    NUM_BLOCKS: tl.constexpr,  # feature blocks of all planes
    L2NORM_PLANES: tl.constexpr,  # whether each plane is normalised
    L2NORM_HEAD_DIM: tl.constexpr,  # 0: none is
    L2NORM_EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    SILU_ACTIVATION: tl.constexpr,
    HAS_INITIAL_STATES: tl.constexpr,
    IS_CONTINUOUS_BATCHING: tl.constexpr,
    USE_PAD_SLOT: tl.constexpr,
    USE_BLOCK_TABLE: tl.constexpr,
    CUDA_MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Feature blocks run fastest: neighbours read adjacent columns of a row.
    pid = tl.program_id(0)
    block_n = pid % NUM_BLOCKS
    block_m = pid // NUM_BLOCKS
    if USE_BLOCK_TABLE:
        seq = tl.load(block_table_ptr + block_m * 2)
        chunk = tl.load(block_table_ptr + block_m * 2 + 1)
    else:
        seq = block_m // num_chunks
        chunk = block_m % num_chunks
    if USE_PAD_SLOT:
        if seq == pad_slot_id:
            return
    seq_start = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    seqlen = (tl.load(query_start_loc_ptr + seq + 1) - seq_start).to(tl.int32)
    rows_left = tl.minimum(seqlen - chunk * BLOCK_M, BLOCK_M)
    if rows_left <= 0:
        return
    slot = seq.to(tl.int64)
    if IS_CONTINUOUS_BATCHING:
        slot = tl.load(cache_indices_ptr + seq).to(tl.int64)
    if USE_PAD_SLOT:
        if slot == pad_slot_id:
            return

    out_ptr = out_ptrs[0]
    width = WIDTHS[0]
    first_feature = 0
    first_block = 0
    normed = L2NORM_PLANES[0]
    for p in tl.static_range(1, len(WIDTHS)):
        reached = block_n >= FIRST_BLOCKS[p]
        if reached:
            out_ptr = out_ptrs[p]
        width = tl.where(reached, WIDTHS[p], width)
        first_feature = tl.where(reached, FIRST_FEATURES[p], first_feature)
        first_block = tl.where(reached, FIRST_BLOCKS[p], first_block)
        normed = tl.where(reached, L2NORM_PLANES[p], normed)
    column = (block_n - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < width
    feature = first_feature + column
    x_row = x_ptr + (seq_start + chunk * BLOCK_M) * stride_x_token + feature
    out_row = out_ptr + (seq_start + chunk * BLOCK_M) * width + column
    state_row = state_ptr + slot * stride_state_seq + feature * stride_state_dim

    is_first = chunk == 0
    has_state = is_first
    if HAS_INITIAL_STATES:
        has_state = is_first & tl.load(has_initial_state_ptr + seq).to(tl.int1)
    else:
        has_state = is_first & (seqlen < 0)
    window = _load_window(
        state_row,
        x_row,
        is_first,
        has_state,
        mask,
        x_ptr.dtype.element_ty,
        stride_x_token,
        stride_state_token,
        KERNEL_WIDTH - 1,
    )
    if is_first:
        # The window is in registers before a column of it is overwritten.
        tl.debug_barrier()
        _update_conv_state(
            state_row,
            x_row,
            seqlen,
            has_state,
            mask,
            stride_x_token,
            stride_state_token,
            KERNEL_WIDTH - 1,
        )
    weights = _load_weights(
        w_ptr + feature * stride_w_dim, mask, stride_w_width, KERNEL_WIDTH, BLOCK_N
    )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=mask, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if L2NORM_HEAD_DIM > 0:
        if normed:
            _convolve_rows(
                x_row,
                out_row,
                rows_left,
                width,
                window,
                weights,
                bias,
                mask,
                stride_x_token,
                KERNEL_WIDTH,
                SILU_ACTIVATION,
                L2NORM_HEAD_DIM,
                L2NORM_EPS,
                CUDA_MATH,
                BLOCK_N,
                ROWS,
            )
            return
    _convolve_rows(
        x_row,
        out_row,
        rows_left,
        width,
        window,
        weights,
        bias,
        mask,
        stride_x_token,
        KERNEL_WIDTH,
        SILU_ACTIVATION,
        0,
        L2NORM_EPS,
        CUDA_MATH,
        BLOCK_N,
        ROWS,
    )


def _check_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    conv_states: Optional[torch.Tensor],
    seq_lens_cpu: Optional[Sequence[int]],
    out_widths: Sequence[int],
    activation: Union[str, bool, None],
    block_table: Optional[torch.Tensor],
    block_tokens: int,
) -> None:
    if x.dim() != 2 or x.stride(0) != 1:
        raise ValueError(
            "out_widths needs a channel-last x: [dim, tokens] with x.stride(0) == 1, "
            f"got shape {tuple(x.shape)} and strides {x.stride()}"
        )
    dim = x.size(0)
    if weight.dim() != 2 or weight.size(0) != dim or not 2 <= weight.size(1) <= 4:
        raise ValueError(
            "out_widths needs a weight of [dim, width] with 2 <= width <= 4 and "
            f"dim {dim}, got {tuple(weight.shape)}"
        )
    if sum(out_widths) != dim:
        raise ValueError(f"out_widths must sum to dim {dim}, got {tuple(out_widths)}")
    if bias is not None and (bias.shape != (dim,) or not bias.is_contiguous()):
        raise ValueError(
            f"bias must be contiguous [{dim}], got {tuple(bias.shape)} with strides "
            f"{bias.stride()}"
        )
    if conv_states is None:
        raise ValueError("out_widths needs conv_states: the conv updates them in place")
    if (
        conv_states.dim() != 3
        or conv_states.size(1) != dim
        or conv_states.size(2) < weight.size(1) - 1
    ):
        raise ValueError(
            f"conv_states must be [slots, {dim}, >= {weight.size(1) - 1}], got "
            f"{tuple(conv_states.shape)}"
        )
    if activation not in (None, False, True, "silu", "swish"):
        raise ValueError(
            f"activation must be None, 'silu' or 'swish', got {activation!r}"
        )
    if block_table is None:
        if seq_lens_cpu is None:
            raise ValueError("pass seq_lens_cpu, or a block_table for a fixed grid")
    elif block_table.dim() != 2 or not block_table.is_contiguous():
        raise ValueError(
            "block_table must be contiguous [blocks, 2], got "
            f"{tuple(block_table.shape)} with strides {block_table.stride()}"
        )
    elif block_tokens < weight.size(1) - 1:
        raise ValueError(
            f"block_tokens must be at least {weight.size(1) - 1}, the conv window, got "
            f"{block_tokens}"
        )


def _l2norm_head_dim(widths: Tuple[int, ...], head_dims: Tuple[int, ...]) -> int:
    """The one head dim of the normalised planes, 0 for none."""
    dims = {d for d in head_dims if d != 0}
    head_dim = max(dims, default=0)
    if (
        len(head_dims) != len(widths)
        or len(dims) > 1
        or head_dim < 0
        or (head_dim and _BLOCK_FEATURES % head_dim)
        or any(d and w % d for w, d in zip(widths, head_dims))
    ):
        raise ValueError(
            "l2norm_head_dims needs one entry per plane: 0, or a head dim that all "
            f"normalised planes share, that divides {_BLOCK_FEATURES} and the plane's "
            f"width; got {head_dims} for out_widths {widths}"
        )
    return head_dim


@lru_cache(maxsize=64)
def _plan(widths: Tuple[int, ...], head_dims: Tuple[int, ...]) -> Tuple[dict, int]:
    """Launch constants of a model's planes: (kernel arguments, feature blocks)."""
    if not widths or min(widths) <= 0:
        raise ValueError(f"out_widths must be positive, got {widths}")
    head_dim = _l2norm_head_dim(widths, head_dims)
    block_n, rows, num_warps = _BLOCK_FEATURES, 8, 4
    if head_dim:
        # Eight features a thread, as in l2norm_fwd; registers for four rows.
        rows, num_warps = 4, 2
    else:
        block_n = min(block_n, triton.next_power_of_2(max(widths)))
    first_features = (0, *accumulate(widths))[:-1]
    *first_blocks, num_blocks = (0, *accumulate(-(-w // block_n) for w in widths))
    constants = dict(
        WIDTHS=widths,
        FIRST_FEATURES=first_features,
        FIRST_BLOCKS=tuple(first_blocks),
        NUM_BLOCKS=num_blocks,
        L2NORM_PLANES=tuple(d > 0 for d in head_dims),
        L2NORM_HEAD_DIM=head_dim,
        L2NORM_EPS=_L2NORM_EPS,
        BLOCK_N=block_n,
        ROWS=rows,
        num_warps=num_warps,
    )
    return constants, num_blocks


def planar_l2norm_is_exact(x: torch.Tensor, head_dim: int) -> bool:
    """Whether ``l2norm_head_dims`` gives the bits of fla's ``l2norm_fwd``.

    x is the token-major ``[tokens, dim]`` input. Both kernels must then sum a head
    in one order: eight elements a lane over sixteen lanes.
    """
    return (
        x.is_cuda
        and torch.version.hip is None
        and head_dim == 128
        and x.element_size() == 2
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def causal_conv1d_planar_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Optional[Sequence[int]],
    out_widths: Sequence[int],
    *,
    cache_indices: Optional[torch.Tensor] = None,
    has_initial_state: Optional[torch.Tensor] = None,
    activation: Union[str, bool, None] = "silu",
    pad_slot_id: Optional[int] = -1,
    block_table: Optional[torch.Tensor] = None,
    block_tokens: int,
    l2norm_head_dims: Optional[Sequence[int]] = None,
) -> Tuple[torch.Tensor, ...]:
    """Varlen causal conv1d with ``[tokens, out_widths[p]]`` outputs, in x's dtype.

    Arguments as in ``causal_conv1d_fn``: x is ``[dim, tokens]`` with unit feature
    stride and any token stride; ``conv_states`` rows are updated in place.
    ``block_tokens`` is the number of tokens of one ``block_table`` row. Each output
    is its own allocation; rows of no sequence or of a padded one stay unwritten.
    A plane with an entry in ``l2norm_head_dims`` is stored as ``l2norm_fwd`` of it,
    head by head (see ``planar_l2norm_is_exact``); conv states are not affected.
    """
    _check_arguments(
        x=x,
        weight=weight,
        bias=bias,
        conv_states=conv_states,
        seq_lens_cpu=seq_lens_cpu,
        out_widths=out_widths,
        activation=activation,
        block_table=block_table,
        block_tokens=block_tokens,
    )
    widths = tuple(out_widths)
    head_dims = tuple(l2norm_head_dims) if l2norm_head_dims else (0,) * len(widths)
    constants, num_blocks = _plan(widths, head_dims)
    tokens = x.size(1)
    outs = tuple([x.new_empty((tokens, w)) for w in widths])
    if block_table is not None:
        block_m, num_chunks, blocks_m = block_tokens, 1, block_table.size(0)
    else:
        block_m = _BLOCK_TOKENS
        if -(-tokens // block_m) * num_blocks < _MIN_PROGRAMS:
            block_m = CAUSAL_CONV1D_PLANAR_BLOCK_M
        num_chunks = -(-max(seq_lens_cpu, default=0) // block_m)
        blocks_m = len(seq_lens_cpu) * num_chunks
    if blocks_m == 0:
        return outs

    _causal_conv1d_planar_kernel[(blocks_m * num_blocks,)](
        x,
        weight,
        bias,
        conv_states,
        cache_indices,
        has_initial_state,
        query_start_loc,
        block_table,
        outs,
        num_chunks,
        stride_x_token=x.stride(1),
        stride_w_dim=weight.stride(0),
        stride_w_width=weight.stride(1),
        stride_state_seq=conv_states.stride(0),
        stride_state_dim=conv_states.stride(1),
        stride_state_token=conv_states.stride(2),
        pad_slot_id=pad_slot_id,
        HAS_BIAS=bias is not None,
        KERNEL_WIDTH=weight.size(1),
        SILU_ACTIVATION=bool(activation),
        HAS_INITIAL_STATES=has_initial_state is not None,
        IS_CONTINUOUS_BATCHING=cache_indices is not None,
        USE_PAD_SLOT=pad_slot_id is not None,
        USE_BLOCK_TABLE=block_table is not None,
        CUDA_MATH=x.is_cuda and torch.version.hip is None,
        BLOCK_M=block_m,
        **constants,
    )
    return outs
