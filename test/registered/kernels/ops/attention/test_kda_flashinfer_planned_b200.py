"""FlashInfer's real KDA prefill kernel under the planned adapter (SM100, SM103)."""

import sys
from unittest.mock import patch

import pytest
import torch

from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_planned import (
    COMPUTE_CAPABILITIES,
    PlannedFlashInferKDAPrefillKernel,
)
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.attention_unittest.attention_methods.kda_attention import (
    KDAAttentionCase,
    build_kda_attention_fixture,
    run_kda_fixture_eager,
)
from sglang.test.kits.kda_planned_prefill_kit import (
    LOWER_BOUND,
    KDALayer,
    KDAPrefillBatch,
    expected_layer,
    extend_layer,
    make_forward_batch,
    make_layer,
    make_metadata,
    make_pool,
)
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=240, stage="base-b-kernel-unit", runner_config="4-gpu-b200")

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(
    CAPABILITY not in COMPUTE_CAPABILITIES,
    reason=f"FlashInfer KDA prefill runs on {COMPUTE_CAPABILITIES}, this is {CAPABILITY}",
)

# Normalised RMS against float64: bfloat16 inputs and tensor-core products.
MAX_ERROR = 5e-2
TWO_ROWS = ((0, 130, 130), (0, 128, 128))


def dispatcher() -> KDAKernelDispatcher:
    triton = LinearAttnKernelBackend.TRITON
    return KDAKernelDispatcher(triton, LinearAttnKernelBackend.FLASHINFER, triton)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / (expected.norm() + 1e-12))


def run(batch: KDAPrefillBatch, *, layer: KDALayer, pool: torch.Tensor):
    """Plan and run one layer. A first run on a copy compiles and sizes the workspace;
    the second must read nothing on the host."""
    kernel = dispatcher().extend_kernel
    assert isinstance(kernel, PlannedFlashInferKDAPrefillKernel)
    metadata = make_metadata(batch, "cuda")
    kernel.plan(
        forward_batch=make_forward_batch(batch, "cuda"),
        metadata=metadata,
        pool=pool,
        interval=batch.interval,
    )
    copy = torch.empty_strided(
        pool.size(), pool.stride(), dtype=pool.dtype, device=pool.device
    ).copy_(pool)

    def extend(states):
        return extend_layer(
            kernel=kernel, metadata=metadata, layer=layer, states=states
        )

    with patch(
        "flashinfer.kda_kernels.kda_chunked_bt16._cu_seqlens_contents",
        side_effect=AssertionError("offsets were read on the host"),
    ):
        extend(copy[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return extend(pool[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def stopped(batch: KDAPrefillBatch, *, row: int, layer: KDALayer, pool: torch.Tensor):
    """The state of ``row`` after a batch of its own that stops at its boundary."""
    begin = sum(batch.lens[:row])
    end = begin + batch.boundary(row)
    inputs = {
        name: getattr(layer, name)[:, begin:end].contiguous()
        for name in ("q", "k", "v", "g", "beta")
    }
    states = torch.stack((pool[0, 0], pool[0, batch.live_slot(row)])).unsqueeze(0)
    run(
        KDAPrefillBatch(rows=((batch.rows[row][0], end - begin, None),)),
        layer=KDALayer(**inputs, A_log=layer.A_log, dt_bias=layer.dt_bias),
        pool=states,
    )
    return states[0, 1]


@pytest.mark.parametrize("heads", [2, 12, 96])
@pytest.mark.parametrize(
    "dtype,rows,options",
    [
        (torch.bfloat16, TWO_ROWS, {}),
        (torch.float32, TWO_ROWS, {}),
        (torch.bfloat16, TWO_ROWS, dict(slot_padding=16)),
        (
            torch.float32,
            TWO_ROWS,
            dict(pad_tokens=14, gate_pitch=256, beta_pitch=1152, beta_offset=8),
        ),
        (torch.bfloat16, (*TWO_ROWS, (0, 0, None)), dict(padded_rows=(2,))),
        (torch.float32, ((512, 578, 513),), {}),
    ],
    ids=["bf16", "fp32", "padded_slots", "wide_gates", "padded_row", "prefix"],
)
def test_checkpoints_and_layouts(dtype, rows, options, heads):
    options = dict(options)
    batch = KDAPrefillBatch(rows=rows, padded_rows=options.pop("padded_rows", ()))
    pool = make_pool(
        batch,
        heads=heads,
        dtype=dtype,
        slot_padding=options.pop("slot_padding", 0),
        device="cuda",
    )
    layer = make_layer(batch.num_tokens, heads=heads, seed=7, device="cuda", **options)
    before = pool.clone()
    output = run(batch, layer=layer, pool=pool)
    on_cpu = KDALayer(
        **{name: getattr(layer, name).cpu() for name in layer.__struct_fields__}
    )
    expected, states = expected_layer(batch, layer=on_cpu, states=before[0].cpu())
    assert error(output[0].cpu(), expected) < MAX_ERROR
    written = set()
    for row in range(len(rows)):
        if row in batch.padded_rows:
            continue
        live = batch.live_slot(row)
        written.add(live)
        assert error(pool[0, live].cpu(), states[live]) < MAX_ERROR
        if batch.boundary(row) is not None:
            snapshot = batch.snapshot_slot(row)
            written.add(snapshot)
            torch.testing.assert_close(
                pool[0, snapshot],
                stopped(batch, row=row, layer=layer, pool=before),
                rtol=0,
                atol=0,
            )
    for slot in set(range(1, batch.num_slots)) - written:
        torch.testing.assert_close(
            pool[0, slot], before[0, slot], rtol=0, atol=0, equal_nan=True
        )


def backend_fixture(extend_lens, prefix_lens):
    fixture = build_kda_attention_fixture(
        CustomTestCase(),
        KDAAttentionCase(
            name="kda_flashinfer_planned_b200",
            backend="triton",
            forward_mode=ForwardMode.EXTEND,
            num_k_heads=2,
            num_v_heads=2,
            page_size=16,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
        ),
        head_k_dim=128,
        head_v_dim=128,
        max_context_len=256,
        runner_batch_size=6,
    )
    fixture.actual_module.attn.lower_bound = LOWER_BOUND
    fixture.b = fixture.b_raw.unsqueeze(0)
    return fixture


@pytest.mark.parametrize(
    "extend_lens,prefix_lens,tracked",
    [((130, 128), (0, 0), True), ((1, 1), (64, 16), False)],
    ids=["tracked", "single_token"],
)
def test_backend(extend_lens, prefix_lens, tracked):
    with get_parallel().override(attn_dcp_rank=0, attn_dcp_size=1):
        fixture = backend_fixture(extend_lens, prefix_lens)
        if tracked:
            source = make_forward_batch(KDAPrefillBatch(rows=TWO_ROWS), "cuda")
            for name in (
                "mamba_track_mask",
                "mamba_track_indices",
                "mamba_track_seqlens",
                "mamba_prefill_track_mask_cpu",
                "mamba_track_seqlens_cpu",
            ):
                setattr(fixture.forward_batch, name, getattr(source, name))
        cache = fixture.runner.req_to_token_pool.mamba2_layer_cache(0)
        conv, states = cache.conv[0].clone(), cache.temporal.clone()
        expected = run_kda_fixture_eager(fixture).clone()
        expected_states = cache.temporal.clone()
        cache.conv[0].copy_(conv)
        cache.temporal.copy_(states)
        backend = fixture.backend.linear_attn_backend
        backend.kernel_dispatcher = dispatcher()
        actual = run_kda_fixture_eager(fixture)
        planned = backend.forward_metadata.kda_prefill_plan is not None
        assert planned == tracked
        tolerance = 3e-2 if tracked else 0
        for a, b in ((actual, expected), (cache.temporal, expected_states)):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        fixture.runner._server_args_override.restore()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
