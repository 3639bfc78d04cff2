"""KDA extend on CUDA: q, k and v as planes against slices of one conv output.

Both layouts run the real backend, pool and Triton chunk_kda; the base layout
replaces the conv call alone.
"""

import unittest
from collections import Counter
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from sglang.kernels.ops.mamba.causal_conv1d_triton import (
    CAUSAL_CONV1D_FWD_BLOCK_M,
    causal_conv1d_fn,
)
from sglang.srt.configs.mamba_utils import KimiLinearStateShape
from sglang.srt.layers.attention.linear import kda_backend, kda_prefill_graph
from sglang.srt.layers.attention.linear.kda_prefill_graph import (
    KDAPrefillGraphMetadata,
    build_track_rows,
)
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kernels.causal_conv1d_planar import assert_same_bits, poisoned_empty
from sglang.test.kits.attention_unittest.attention_methods.kda_attention import (
    KDAAttentionCase,
    build_kda_attention_fixture,
)
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=120, stage="base-b-kernel-unit", runner_config="1-gpu-large")

HEAD_DIM = 128
CONV_WIDTH = 4


def _base_layout(
    x, weight, bias, *, out_widths, l2norm_head_dims, block_tokens=None, **kwargs
):
    """The conv as it was: q, k and v are column slices of one tensor."""
    assert l2norm_head_dims is None
    if block_tokens is not None:
        # Each row of the bucket's table is several of the base kernel's blocks.
        parts = block_tokens // CAUSAL_CONV1D_FWD_BLOCK_M
        table = kwargs["block_table"].repeat_interleave(parts, dim=0)
        part = torch.arange(parts, dtype=table.dtype, device=table.device)
        table[:, 1] = table[:, 1] * parts + part.repeat(len(kwargs["block_table"]))
        kwargs["block_table"] = table
    out = causal_conv1d_fn(x, weight, bias, **kwargs).transpose(0, 1)
    return out.split(list(out_widths), dim=1)


class KDACore:
    """One KDA layer on the attention kit's pool and backend, width 4 conv."""

    def __init__(self, testcase, lens, *, prefix_lens=None, heads=12, track=False):
        create = KimiLinearStateShape.create

        def wide_conv(**kwargs):
            return create(**{**kwargs, "conv_kernel_size": CONV_WIDTH})

        self.lens = lens
        self.prefix_lens = prefix_lens or [64 * (i % 2) for i in range(len(lens))]
        case = KDAAttentionCase(
            name="kda_planar_core",
            backend="torch_native",
            forward_mode=ForwardMode.EXTEND,
            num_k_heads=heads,
            num_v_heads=heads,
            page_size=1,
            prefix_lens=tuple(self.prefix_lens),
            extend_lens=tuple(lens),
        )
        with patch.object(KimiLinearStateShape, "create", wide_conv):
            self.fixture = build_kda_attention_fixture(
                testcase,
                case,
                head_k_dim=HEAD_DIM,
                head_v_dim=HEAD_DIM,
                max_context_len=max(lens) + 128,
                runner_batch_size=2 * len(lens) + 1,
            )
        testcase.addCleanup(self.fixture.runner._server_args_override.restore)
        self.layer = self.fixture.actual_module.attn
        self.layer.conv_weights = torch.randn(
            self.fixture.actual_module.mixed_qkv_dim, CONV_WIDTH, device="cuda"
        )
        self.layer.lower_bound = -5.0
        self.batch = self.fixture.forward_batch
        self.cache = self.fixture.runner.req_to_token_pool.mamba2_layer_cache(0)
        self.cache.conv[0].copy_(torch.randn_like(self.cache.conv[0]))
        self.saved = (self.cache.conv[0].clone(), self.cache.temporal.clone())
        # The slots behind the requests' own take the prefix-cache snapshots.
        self.track_slots = torch.arange(
            len(lens) + 1, 2 * len(lens) + 1, dtype=torch.int64, device="cuda"
        )
        self.track_mask = [i != 1 for i in range(len(lens))]
        if track:
            self._track()

    def _track(self):
        seqlens = [p + n for p, n in zip(self.prefix_lens, self.lens)]
        self.batch.mamba_track_indices = self.track_slots
        self.batch.mamba_track_mask = torch.tensor(self.track_mask, device="cuda")
        self.batch.mamba_track_seqlens = torch.tensor(
            seqlens, dtype=torch.int32, device="cuda"
        )
        self.batch.mamba_prefill_track_mask_cpu = list(self.track_mask)
        self.batch.mamba_track_seqlens_cpu = seqlens

    @property
    def linear_backend(self):
        return self.fixture.backend.linear_attn_backend

    def graph_metadata(self, num_tokens):
        """A bucket's tables for this batch, track tables included."""
        meta = KDAPrefillGraphMetadata.allocate(
            num_tokens=num_tokens,
            max_seqs_cap=len(self.lens) + 2,
            track=True,
            cache_index_dtype=torch.int32,
            device=torch.device("cuda"),
        )
        meta.fill(
            extend_seq_lens=self.lens,
            cache_indices=self.fixture.runner.req_to_token_pool.get_mamba_indices(
                self.batch.req_pool_indices
            ),
            extend_prefix_lens=self.batch.extend_prefix_lens,
            track_rows=build_track_rows(
                track_mask=self.track_mask,
                track_seq_lens=[p + n for p, n in zip(self.prefix_lens, self.lens)],
                extend_seq_lens=self.lens,
                extend_prefix_lens=self.prefix_lens,
                state_chunk_size=64,
                cache_chunk_size=64,
                conv_len=CONV_WIDTH - 1,
                dst=self.track_slots,
            ),
        )
        return meta

    def run(self, meta=None):
        """Restore the pool, run one extend: (output, conv pool, state pool)."""
        self.cache.conv[0].copy_(self.saved[0])
        self.cache.temporal.copy_(self.saved[1])
        with (
            torch.no_grad(),
            forward_context(ForwardContext(attn_backend=self.fixture.backend)),
        ):
            self.fixture.backend.init_forward_metadata(self.batch)
            self.linear_backend.prefill_graph_metadata = meta
            out = self.linear_backend.forward_extend(
                self.layer,
                self.batch,
                self.fixture.mixed_qkv,
                self.fixture.a,
                self.fixture.b,
            )
            self.linear_backend.prefill_graph_metadata = None
        torch.cuda.synchronize()
        return out, self.cache.conv[0].clone(), self.cache.temporal.clone()

    def run_base(self, meta=None):
        with (
            patch.object(kda_backend, "causal_conv1d_fn", _base_layout),
            patch.object(kda_prefill_graph, "causal_conv1d_fn", _base_layout),
            patch.object(TritonKDAKernel, "takes_l2normed_qk", False),
        ):
            return self.run(meta)


@unittest.skipUnless(torch.cuda.is_available(), "CUDA only")
class TestKDAPlanarCore(CustomTestCase):
    def assert_same(self, actual, expected):
        for got, want, what in zip(actual, expected, ("output", "conv", "state")):
            assert_same_bits(got, want, what)

    def test_output_and_states_have_the_bits_of_the_base_layout(self):
        for lens in ([1], [64, 1, 200], [0, 64, 64], [63, 65, 129, 2]):
            with self.subTest(lens=lens), poisoned_empty():
                core = KDACore(self, lens)
                self.assert_same(core.run(), core.run_base())

    def test_tracked_snapshots_have_the_bits_of_the_base_layout(self):
        """Unaligned, untracked and aligned rows; NaN in every snapshot slot first."""
        core = KDACore(self, [130, 70, 128, 200], track=True)
        core.saved[0][core.track_slots] = float("nan")
        core.saved[1][core.track_slots] = float("nan")
        actual, expected = core.run(), core.run_base()
        self.assert_same(actual, expected)
        for slot, tracked in zip(core.track_slots.tolist(), core.track_mask):
            self.assertEqual(bool(actual[1][slot].isnan().any()), not tracked)
            self.assertEqual(bool(actual[2][slot].isnan().any()), not tracked)

    def test_graph_bucket_has_the_bits_of_the_base_layout(self):
        core = KDACore(self, [130, 70, 128])
        bucket = 512
        for name in ("mixed_qkv", "a", "b"):
            t = getattr(core.fixture, name)
            axis = 0 if name == "mixed_qkv" else 1
            shape = list(t.shape)
            shape[axis] = bucket
            padded = t.new_zeros(shape)
            padded.narrow(axis, 0, t.shape[axis]).copy_(t)
            setattr(core.fixture, name, padded)
        meta = core.graph_metadata(bucket)
        with poisoned_empty():
            actual, expected = core.run(meta), core.run_base(meta)
        self.assert_same(actual, expected)
        self.assertFalse(actual[0][:, sum(core.lens) :].any())

    def _kernels_after_conv(self, run):
        run()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            run()
        kernels = sorted(
            (e for e in prof.events() if e.device_type.name == "CUDA"),
            key=lambda e: e.time_range.start,
        )
        names = [k.name for k in kernels]
        conv = max(i for i, n in enumerate(names) if "causal_conv1d" in n)
        last = max(i for i, n in enumerate(names) if "chunk_gla_fwd_kernel_o" in n)
        return names[conv:last]

    def test_no_copy_and_no_norm_between_conv_and_output(self):
        core = KDACore(self, [256, 300])
        base = self._kernels_after_conv(core.run_base)
        planes = self._kernels_after_conv(core.run)
        # The base's other copies (beta, indices) are not those of q, k and v.
        for what, removed in (("copy", 3), ("l2norm", 2)):
            gone = Counter(n for n in base if what in n.lower())
            left = Counter(n for n in planes if what in n.lower())
            self.assertEqual(left - gone, Counter(), "new kernels")
            self.assertEqual((gone - left).total(), removed, (base, planes))
        self.assertFalse([n for n in planes if "l2norm" in n.lower()])

    def test_peak_memory_is_below_the_base_layout(self):
        core = KDACore(self, [8192], heads=12)
        peaks = {}
        for name, run in (("base", core.run_base), ("planes", core.run)):
            run()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            run()
            peaks[name] = torch.cuda.max_memory_allocated() - start
        self.assertLess(peaks["planes"], peaks["base"])


if __name__ == "__main__":
    unittest.main()
