"""Planned FlashInfer KDA prefill through KDAAttnBackend, where FlashInfer's kernel
cannot run: a contract double computes with the Triton kernel instead."""

import unittest

import torch

from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_planned import (
    PlannedFlashInferKDAPrefillKernel,
)
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.attention_unittest.attention_methods.kda_attention import (
    KDAAttentionCase,
    build_kda_attention_fixture,
    run_kda_fixture_eager,
)
from sglang.test.kits.kda_flashinfer_contract_double import KDAContractDouble
from sglang.test.kits.kda_planned_prefill_kit import (
    LOWER_BOUND,
    KDAPrefillBatch,
    make_forward_batch,
    make_layer,
    make_metadata,
    make_pool,
    run_planned,
)
from sglang.test.kits.kda_prefill_numerics import triton_numerics
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

# Heads of one Kimi-K3 rank at TP8.
HEADS = 12
# KDA layers of one Kimi-K3 forward.
NUM_LAYERS = 69


def _backend(fixture) -> KDAAttnBackend:
    return fixture.backend.linear_attn_backend


def _cache(fixture):
    return fixture.runner.req_to_token_pool.mamba2_layer_cache(0)


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestPlannedPrefillThroughTheBackend(CustomTestCase):
    def setUp(self):
        scope = get_parallel().override(attn_dcp_rank=0, attn_dcp_size=1)
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)

    def fixture(self, rows, *, wide_beta=False):
        """A kit fixture whose rows are ``(prefix, new, tracked or None)``."""
        batch = KDAPrefillBatch(rows=tuple(rows))
        fixture = build_kda_attention_fixture(
            self,
            KDAAttentionCase(
                name="kda_flashinfer_planned",
                backend="triton",
                forward_mode=ForwardMode.EXTEND,
                num_k_heads=HEADS,
                num_v_heads=HEADS,
                page_size=16,
                prefix_lens=tuple(prefix for prefix, _, _ in rows),
                extend_lens=tuple(batch.lens),
            ),
            head_k_dim=128,
            head_v_dim=128,
            max_context_len=1024,
            runner_batch_size=2 * len(rows) + 1,
        )
        self.addCleanup(fixture.runner._server_args_override.restore)
        fixture.actual_module.attn.lower_bound = LOWER_BOUND
        fixture.b = fixture.b_raw.unsqueeze(0)
        if wide_beta:
            wide = torch.full(
                (1, batch.num_tokens, 128 + HEADS), torch.nan, device="cuda"
            ).to(fixture.b.dtype)
            wide[..., 128:] = fixture.b
            fixture.b = wide[..., 128:]
        source = make_forward_batch(batch, "cuda")
        for name in (
            "mamba_track_mask",
            "mamba_track_indices",
            "mamba_track_seqlens",
            "mamba_prefill_track_mask_cpu",
            "mamba_track_seqlens_cpu",
        ):
            setattr(fixture.forward_batch, name, getattr(source, name))
        cache = _cache(fixture)
        for row in range(len(rows)):
            cache.temporal[batch.snapshot_slot(row)] = torch.nan
        return fixture, batch

    def use_planned(self, fixture, **double_options):
        double = KDAContractDouble(numerics=triton_numerics, **double_options)
        dispatcher = _backend(fixture).kernel_dispatcher
        dispatcher.prefill_backend = LinearAttnKernelBackend.FLASHINFER
        dispatcher.extend_kernel = PlannedFlashInferKDAPrefillKernel(double.wrapper_cls)
        return double

    def compare(self, rows, **fixture_options):
        fixture, batch = self.fixture(rows, **fixture_options)
        cache = _cache(fixture)
        conv, states = cache.conv[0].clone(), cache.temporal.clone()
        expected = run_kda_fixture_eager(fixture).clone()
        expected_conv, expected_states = cache.conv[0].clone(), cache.temporal.clone()
        cache.conv[0].copy_(conv)
        cache.temporal.copy_(states)
        double = self.use_planned(fixture)
        actual = run_kda_fixture_eager(fixture)
        for name, a, b in (
            ("output", actual, expected),
            ("conv", cache.conv[0], expected_conv),
            ("states", cache.temporal, expected_states),
        ):
            torch.testing.assert_close(
                a, b, rtol=0, atol=0, equal_nan=True, msg=f"{name} of {rows}"
            )
        for row in range(len(rows)):
            tracked = batch.boundary(row) is not None
            snapshot = cache.temporal[batch.snapshot_slot(row)]
            self.assertEqual(bool(torch.isfinite(snapshot).all()), tracked)
        return double

    def test_same_bits_as_the_triton_backend(self):
        """Output, conv window, live states and snapshots."""
        cases = (
            [(0, 130, 130), (0, 128, 128)],
            [(0, 130, 130), (0, 70, None), (64, 200, 129)],
            [(0, 65, 65), (16, 1, None), (0, 64, 64)],
            [(512, 200, 65)],
            [(0, 130, None), (3, 5, None)],
        )
        for rows in cases:
            with self.subTest(rows=rows):
                double = self.compare(rows)
                self.assertEqual((double.num_plans, double.num_calls), (1, 1))

    def test_same_bits_with_a_fused_beta(self):
        self.compare([(0, 130, 130), (0, 66, 66)], wide_beta=True)

    def test_single_token_batch_stays_on_triton(self):
        double = self.compare([(64, 1, None), (16, 1, None)])
        self.assertEqual((double.num_plans, double.num_calls), (0, 0))

    def test_graph_bucket_runs_on_the_wrapper(self):
        """The bucket tables of breakable prefill graphs, replayed without a graph."""
        fixture, _ = self.fixture([(0, 130, None), (64, 70, None)])
        cache, backend = _cache(fixture), _backend(fixture)
        conv, states = cache.conv[0].clone(), cache.temporal.clone()
        expected = run_kda_fixture_eager(fixture).clone()
        expected_states = cache.temporal.clone()
        cache.conv[0].copy_(conv)
        cache.temporal.copy_(states)
        double = self.use_planned(fixture)
        self.assertTrue(backend.supports_prefill_graph_extend())
        backend.init_prefill_graph_metadata(fixture.forward_batch)
        scope = forward_context(ForwardContext(attn_backend=fixture.backend))
        with torch.no_grad(), scope:
            actual = fixture.actual_module(
                fixture.forward_batch, fixture.mixed_qkv, fixture.a, fixture.b
            )
        self.assertEqual((double.num_plans, double.num_calls), (1, 1))
        # The bucket has a slot for every possible sequence, so chunk_kda is
        # launched for another shape: close, not the same bits.
        live = slice(1, 3)
        for a, b in (
            (actual, expected),
            (cache.temporal[live], expected_states[live]),
        ):
            gap = (a.double() - b.double()).norm() / b.double().norm()
            self.assertLess(float(gap), 1e-2)
        torch.testing.assert_close(
            cache.temporal[3:], states[3:], rtol=0, atol=0, equal_nan=True
        )

    def test_snapshot_has_the_bits_of_a_run_that_stops_there(self):
        for n in (64, 65, 127, 128, 129, 130):
            batch = KDAPrefillBatch(rows=((0, n, n), (0, 70, None)))
            stop = batch.boundary(0)
            stopped = KDAPrefillBatch(rows=((0, stop, None),))
            layer = make_layer(n + 70, heads=HEADS, seed=n, device="cuda")
            pool = make_pool(batch, heads=HEADS, device="cuda")
            short_pool = pool.clone()
            for run, states, tokens in (
                (batch, pool, n + 70),
                (stopped, short_pool, stop),
            ):
                for name in ("q", "k", "v", "g", "beta"):
                    tensor = getattr(layer, name)[:, :tokens].contiguous()
                    setattr(layer, name, tensor)
                run_planned(
                    run,
                    pool=states,
                    layers=[layer],
                    double=KDAContractDouble(numerics=triton_numerics),
                )
            torch.testing.assert_close(
                pool[0, batch.snapshot_slot(0)], short_pool[0, 1], rtol=0, atol=0
            )

    def test_layers_neither_synchronize_nor_allocate(self):
        """69 layers on one plan; the double launches nothing of its own."""
        batch = KDAPrefillBatch(rows=((0, 130, 130), (0, 70, 64), (0, 3, None)))
        layer = make_layer(
            batch.num_tokens, heads=HEADS, seed=0, device="cuda", beta_pitch=140
        )
        output = torch.zeros_like(layer.q)
        double = KDAContractDouble(numerics=lambda call: output, read_values=False)
        pool = make_pool(batch, heads=HEADS, device="cuda")
        kernel = PlannedFlashInferKDAPrefillKernel(double.wrapper_cls)
        metadata = make_metadata(batch, "cuda")
        forward_batch = make_forward_batch(batch, "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernel.plan(
                forward_batch=forward_batch,
                metadata=metadata,
                pool=pool,
                interval=batch.interval,
            )
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            for _ in range(NUM_LAYERS):
                kernel.extend(
                    layer.q,
                    layer.k,
                    layer.v,
                    layer.g,
                    layer.beta,
                    ssm_states=pool[0],
                    cache_indices=metadata.mamba_cache_indices,
                    query_start_loc=metadata.query_start_loc,
                    A_log=layer.A_log,
                    dt_bias=layer.dt_bias,
                    lower_bound=LOWER_BOUND,
                    kda_prefill_plan=metadata.kda_prefill_plan,
                    return_intermediate_states=True,
                )
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assertEqual(after - before, 0)
        self.assertEqual((double.num_plans, double.num_calls), (1, NUM_LAYERS))

    def test_backend_layers_do_not_synchronize(self):
        """The whole KDA layer, conv and tracking included, with Triton numerics."""
        fixture, _ = self.fixture([(0, 130, 130), (0, 128, 128), (64, 70, None)])
        self.use_planned(fixture, read_values=False)
        run_kda_fixture_eager(fixture)  # compiles
        with (
            torch.no_grad(),
            forward_context(ForwardContext(attn_backend=fixture.backend)),
        ):
            fixture.backend.init_forward_metadata(fixture.forward_batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(NUM_LAYERS):
                    fixture.actual_module(
                        fixture.forward_batch, fixture.mixed_qkv, fixture.a, fixture.b
                    )
            finally:
                torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    unittest.main()
