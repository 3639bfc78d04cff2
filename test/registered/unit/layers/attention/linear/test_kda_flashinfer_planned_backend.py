"""KDAAttnBackend plans FlashInfer prefill once a batch and hands the plan to layers.

CPU: the causal conv is the identity of the kit's weights, the kernel a contract double.
"""

import unittest
from unittest.mock import patch

import torch

from sglang.srt.layers.attention.linear import kda_backend
from sglang.srt.layers.attention.linear.kernels import kda_flashinfer_planned as planned
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.utils import (
    LinearAttnKernelBackend,
    resolve_linear_attn_backends,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kits.attention_unittest.attention_methods.kda_attention import (
    KDAAttentionCase,
    MockKDAModelRunner,
    ProjectedKDAAttention,
    TinyKDAModelConfig,
)
from sglang.test.kits.kda_flashinfer_contract_double import KDAContractDouble
from sglang.test.kits.kda_planned_prefill_kit import (
    LOWER_BOUND,
    KDALayer,
    KDAPrefillBatch,
    expected_layer,
    make_forward_batch,
    make_layer,
    make_pool,
)
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

HEADS = 1


def identity_conv(x, weight, bias, *, out_widths=None, **kwargs):
    """causal_conv1d_fn for the kit's [0, 1] weights: SiLU of the last column."""
    y = torch.nn.functional.silu(x.transpose(0, 1))
    if out_widths is None:
        return y.transpose(0, 1)
    return tuple(part.contiguous() for part in y.split(list(out_widths), dim=-1))


class TestBackendHooks(CustomTestCase):
    def setUp(self):
        torch.manual_seed(0)
        for scope in (
            get_parallel().override(attn_dcp_rank=0, attn_dcp_size=1),
            patch.object(kda_backend, "causal_conv1d_fn", identity_conv),
        ):
            scope.__enter__()
            self.addCleanup(scope.__exit__, None, None, None)

    def make_runner(self, batch: KDAPrefillBatch, *, head_dim: int = 128):
        runner = MockKDAModelRunner(
            case=KDAAttentionCase(
                name="kda_flashinfer_planned_backend",
                backend="triton",
                forward_mode=ForwardMode.EXTEND,
                num_k_heads=HEADS,
                num_v_heads=HEADS,
                page_size=16,
                prefix_lens=tuple(prefix for prefix, _, _ in batch.rows),
                extend_lens=tuple(batch.lens),
            ),
            model_config=TinyKDAModelConfig(
                num_heads=HEADS, head_dim=head_dim, context_len=1024
            ),
            dtype=torch.bfloat16,
            device="cpu",
            max_context_len=1024,
            head_dim=head_dim,
            head_k_dim=head_dim,
            head_v_dim=head_dim,
            runner_batch_size=2 * len(batch.rows) + 1,
        )
        self.addCleanup(runner._server_args_override.restore)
        runner.linear_attn_backends = resolve_linear_attn_backends()
        return runner

    def run_backend(self, batch: KDAPrefillBatch):
        """Returns the double, the output, and the pool with what it should be."""
        runner = self.make_runner(batch)
        pool = runner.req_to_token_pool
        pool.req_index_to_mamba_index_mapping[: len(batch.rows)] = torch.arange(
            1, len(batch.rows) + 1, dtype=torch.int32
        )
        states = pool.mamba2_layer_cache(0).temporal
        states[: batch.num_slots] = make_pool(batch, heads=HEADS)[0]
        backend = kda_backend.KDAAttnBackend(runner)
        double = KDAContractDouble()
        dispatcher = backend.kernel_dispatcher
        dispatcher.prefill_backend = LinearAttnKernelBackend.FLASHINFER
        dispatcher.extend_kernel = planned.PlannedFlashInferKDAPrefillKernel(
            double.wrapper_cls
        )
        module = ProjectedKDAAttention(
            num_k_heads=HEADS,
            num_v_heads=HEADS,
            head_k_dim=128,
            head_v_dim=128,
            dtype=torch.bfloat16,
            device="cpu",
        )
        module.attn.lower_bound = LOWER_BOUND
        layer = make_layer(batch.num_tokens, heads=HEADS, seed=0)
        mixed_qkv = torch.cat(
            [x[0].flatten(1) for x in (layer.q, layer.k, layer.v)], dim=-1
        )
        forward_batch = make_forward_batch(batch)
        before = states.clone()
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(forward_batch)
            output = backend.forward_extend(
                module.attn, forward_batch, mixed_qkv, layer.g, layer.beta
            )
        q, k, v = (torch.nn.functional.silu(x) for x in (layer.q, layer.k, layer.v))
        served = KDALayer(
            q=q,
            k=k,
            v=v,
            g=layer.g,
            beta=layer.beta,
            A_log=module.A_log.detach(),
            dt_bias=module.dt_bias.detach().float(),
        )
        expected_output, expected = expected_layer(batch, layer=served, states=before)
        return double, (output[0], expected_output), (states, expected)

    def assert_same_bits(self, actual, expected):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    def test_output_states_and_snapshots(self):
        for rows in (
            ((0, 130, 130), (64, 128, 128), (16, 3, None)),
            ((512, 200, 65), (0, 63, 63)),
            ((0, 70, None),),
        ):
            with self.subTest(rows=rows):
                double, outputs, pools = self.run_backend(KDAPrefillBatch(rows=rows))
                self.assertEqual((double.num_plans, double.num_calls), (1, 1))
                self.assert_same_bits(*outputs)
                self.assert_same_bits(*pools)

    def test_single_token_batch_runs_on_triton(self):
        def triton_extend(self, q, k, v, g, beta, **kwargs):
            return torch.zeros_like(v)

        with patch.object(TritonKDAKernel, "extend", triton_extend):
            double, outputs, _ = self.run_backend(
                KDAPrefillBatch(rows=((64, 1, None), (16, 1, None)))
            )
        self.assertEqual((double.num_plans, double.num_calls), (0, 0))
        self.assertEqual(int(outputs[0].abs().sum()), 0)

    def test_start_up_checks_the_pool(self):
        """The dispatcher's planned kernel is asked before the first batch."""

        def build():
            return planned.PlannedFlashInferKDAPrefillKernel(KDAContractDouble)

        for head_dim, refused in ((128, False), (64, True)):
            runner = self.make_runner(
                KDAPrefillBatch(rows=((0, 70, None),)), head_dim=head_dim
            )
            runner.linear_attn_backends = runner.linear_attn_backends.__class__(
                decode=LinearAttnKernelBackend.TRITON,
                prefill=LinearAttnKernelBackend.FLASHINFER,
                verify=LinearAttnKernelBackend.TRITON,
            )
            with (
                patch.object(kda_backend, "is_cuda", return_value=True),
                patch.object(planned, "build_flashinfer_kda_prefill_kernel", build),
            ):
                if not refused:
                    kda_backend.KDAAttnBackend(runner)
                    continue
                with self.assertRaisesRegex(ValueError, "64 x 64"):
                    kda_backend.KDAAttnBackend(runner)


if __name__ == "__main__":
    unittest.main()
