"""Batches for planned FlashInfer KDA prefill and their expected pools, for tests."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Optional

import msgspec
import torch

from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_planned import (
    PlannedFlashInferKDAPrefillKernel,
)
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.layers.attention.mamba.prefill_track_metadata import (
    build_prefill_track_plan,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.kits.kda_flashinfer_contract_double import (
    HEAD_DIM,
    KDAContractDouble,
)
from sglang.test.kits.kda_prefill_numerics import sequential_kda

if TYPE_CHECKING:
    from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import (
        LinearAttnKernelBase,
    )

LOWER_BOUND = -5.0


class KDAPrefillBatch(msgspec.Struct, frozen=True):
    """One batch: a row is ``(prefix, new tokens, tracked tokens or None)``.

    ``tracked`` counts from the start of this extend; the snapshot is due at
    ``floor(tracked / interval) * interval``. Row i lives in slot 1 + i and is
    snapshotted to slot 1 + rows + i; the last slot belongs to nobody.
    """

    rows: tuple[tuple[int, int, Optional[int]], ...]
    interval: int = 64
    padded_rows: tuple[int, ...] = ()  # state slot -1

    @property
    def lens(self) -> list[int]:
        return [new for _, new, _ in self.rows]

    @property
    def num_tokens(self) -> int:
        return sum(self.lens)

    @property
    def num_slots(self) -> int:
        return 2 * len(self.rows) + 2

    def live_slot(self, row: int) -> int:
        return -1 if row in self.padded_rows else 1 + row

    def snapshot_slot(self, row: int) -> int:
        return 1 + len(self.rows) + row

    def boundary(self, row: int) -> Optional[int]:
        tracked = self.rows[row][2]
        return None if tracked is None else tracked // self.interval * self.interval


class KDALayer(msgspec.Struct):
    """What one layer's projections hand to the kernel."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor


def make_layer(
    num_tokens: int,
    *,
    heads: int,
    seed: int,
    device: str = "cpu",
    pad_tokens: int = 0,
    gate_pitch: int = HEAD_DIM,
    beta_pitch: Optional[int] = None,
    beta_offset: int = 0,
) -> KDALayer:
    """Random bfloat16 activations. The gate may have wider heads, and beta may be a
    slice of wider rows; ``pad_tokens`` rows of storage follow the batch's tokens."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    total = num_tokens + pad_tokens
    q, k, v = (randn(1, num_tokens, heads, HEAD_DIM) for _ in range(3))
    dense_gate, dense_beta = randn(1, total, heads, HEAD_DIM), randn(1, total, heads)
    gate = dense_gate.new_full((1, total, heads, gate_pitch), torch.nan)
    gate[..., :HEAD_DIM] = dense_gate
    beta = dense_beta.new_full(
        (1, total, (beta_pitch or heads) + beta_offset), torch.nan
    )
    beta[..., beta_offset : beta_offset + heads] = dense_beta
    return KDALayer(
        q=q,
        k=k,
        v=v,
        g=gate[..., :HEAD_DIM],
        beta=beta[..., beta_offset : beta_offset + heads],
        A_log=randn(1, 1, heads, 1, dtype=torch.float32) * 0.1,
        dt_bias=randn(heads * HEAD_DIM, dtype=torch.float32) * 0.1,
    )


def make_pool(
    batch: KDAPrefillBatch,
    *,
    heads: int,
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
    slot_padding: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """States [layers, slots, heads, 128, 128]; snapshot slots are NaN, others random."""
    slot = heads * HEAD_DIM * HEAD_DIM
    generator = torch.Generator(device).manual_seed(seed)
    storage = torch.full(
        (layers, batch.num_slots, slot + slot_padding),
        torch.nan,
        dtype=dtype,
        device=device,
    )
    storage[..., :slot] = 0.1 * torch.randn(
        layers, batch.num_slots, slot, generator=generator, device=device
    )
    for row in range(len(batch.rows)):
        storage[:, batch.snapshot_slot(row)] = torch.nan
    return storage[..., :slot].unflatten(-1, (heads, HEAD_DIM, HEAD_DIM))


def make_forward_batch(batch: KDAPrefillBatch, device: str = "cpu") -> ForwardBatch:
    """The ForwardBatch fields that KDA prefill reads."""
    rows, lens = len(batch.rows), batch.lens
    prefixes = [prefix for prefix, _, _ in batch.rows]
    mask = [tracked is not None for _, _, tracked in batch.rows]
    track_lens = [prefix + (tracked or 0) for prefix, _, tracked in batch.rows]

    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=rows,
        input_ids=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
        req_pool_indices=tensor(range(rows)),
        seq_lens=tensor([p + n for p, n in zip(prefixes, lens)], torch.int32),
        out_cache_loc=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
        seq_lens_sum=sum(prefixes) + batch.num_tokens,
    )
    forward_batch.extend_seq_lens = tensor(lens, torch.int32)
    forward_batch.extend_seq_lens_cpu = lens
    forward_batch.extend_prefix_lens = tensor(prefixes, torch.int32)
    forward_batch.extend_prefix_lens_cpu = prefixes
    forward_batch.extend_start_loc = tensor(
        list(accumulate(lens, initial=0))[:-1], torch.int32
    )
    forward_batch.extend_num_tokens = batch.num_tokens
    if any(mask):
        forward_batch.mamba_track_mask = tensor(mask, torch.bool)
        forward_batch.mamba_track_indices = tensor(
            [batch.snapshot_slot(row) for row in range(rows)]
        )
        forward_batch.mamba_track_seqlens = tensor(track_lens)
        forward_batch.mamba_prefill_track_mask_cpu = mask
        forward_batch.mamba_track_seqlens_cpu = track_lens
    return forward_batch


def make_metadata(batch: KDAPrefillBatch, device: str = "cpu") -> ForwardMetadata:
    """The forward metadata as MambaAttnBackendBase leaves it before the plan."""
    prefixes = [prefix for prefix, _, _ in batch.rows]
    plan = build_prefill_track_plan(
        [tracked is not None for _, _, tracked in batch.rows],
        [prefix + (tracked or 0) for prefix, _, tracked in batch.rows],
        batch.lens,
        prefixes,
        batch.interval,
        mamba2=False,
    )

    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    def snapshots(rows):
        return tensor([batch.snapshot_slot(row) for row in rows])

    return ForwardMetadata(
        query_start_loc=tensor(list(accumulate(batch.lens, initial=0)), torch.int32),
        mamba_cache_indices=tensor(
            [batch.live_slot(row) for row in range(len(batch.rows))]
        ),
        logical_num_tokens=batch.num_tokens,
        has_mamba_track_mask=bool(plan.tracked_rows),
        track_chunk_idx=tensor(plan.chunk_indices, torch.int32),
        track_ssm_h_src=tensor(plan.h_src),
        track_ssm_h_dst=snapshots(plan.unaligned_rows),
        track_ssm_h_batch_src=tensor(plan.unaligned_rows),
        track_ssm_final_src=tensor([batch.live_slot(r) for r in plan.final_rows]),
        track_ssm_final_dst=snapshots(plan.final_rows),
    )


def run_planned(
    batch: KDAPrefillBatch,
    *,
    pool: torch.Tensor,
    layers: list[KDALayer],
    double: KDAContractDouble,
    forward_batch: Optional[ForwardBatch] = None,
    metadata: Optional[ForwardMetadata] = None,
) -> list[torch.Tensor]:
    """Plan once, run every layer on its pool; returns the layers' outputs."""
    device = str(pool.device)
    kernel = PlannedFlashInferKDAPrefillKernel(double.wrapper_cls)
    metadata = metadata or make_metadata(batch, device)
    kernel.plan(
        forward_batch=forward_batch or make_forward_batch(batch, device),
        metadata=metadata,
        pool=pool,
        interval=batch.interval,
    )
    return [
        extend_layer(kernel=kernel, metadata=metadata, layer=layer, states=pool[i])
        for i, layer in enumerate(layers)
    ]


def call_extend(
    *,
    kernel: LinearAttnKernelBase | KDAKernelDispatcher,
    metadata: ForwardMetadata,
    layer: KDALayer,
    states: torch.Tensor,
    **options,
):
    """``kernel.extend`` of one layer, a kernel's or a dispatcher's; with tracked rows
    it returns (output, per-chunk states or None)."""
    return kernel.extend(
        layer.q,
        layer.k,
        layer.v,
        layer.g,
        layer.beta,
        ssm_states=states,
        cache_indices=metadata.mamba_cache_indices,
        query_start_loc=metadata.query_start_loc,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        lower_bound=LOWER_BOUND,
        kda_prefill_plan=metadata.kda_prefill_plan,
        return_intermediate_states=metadata.has_mamba_track_mask,
        **options,
    )


def extend_layer(*, metadata: ForwardMetadata, **call) -> torch.Tensor:
    """The output of ``call_extend``."""
    output = call_extend(metadata=metadata, **call)
    return output[0] if metadata.has_mamba_track_mask else output


def expected_layer(
    batch: KDAPrefillBatch, *, layer: KDALayer, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, 128] and pool after the batch, from one sequential run a row.

    A tracked row's snapshot comes from a second run that stops at the boundary.
    Rows without a state slot are left out (their tokens stay NaN).
    """
    pool = states.clone()
    output = torch.full_like(layer.q[0], torch.nan)
    begin = 0
    for row, (_, new, _) in enumerate(batch.rows):
        slot, boundary, end = batch.live_slot(row), batch.boundary(row), begin + new
        if slot >= 0:
            if boundary is not None:
                _, stopped = _run_rows(
                    layer, states[slot], begin=begin, end=begin + boundary
                )
                pool[batch.snapshot_slot(row)] = stopped
            output[begin:end], pool[slot] = _run_rows(
                layer, states[slot], begin=begin, end=end
            )
        begin = end
    return output, pool


def _run_rows(
    layer: KDALayer, state: torch.Tensor, *, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    output, final, _ = sequential_kda(
        q=layer.q[0, begin:end],
        k=layer.k[0, begin:end],
        v=layer.v[0, begin:end],
        g=layer.g[0, begin:end],
        beta=layer.beta[0, begin:end],
        A_log=layer.A_log.reshape(-1),
        dt_bias=layer.dt_bias,
        lower_bound=LOWER_BOUND,
        state=state,
    )
    return output, final
