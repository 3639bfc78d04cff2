"""Planned FlashInfer KDA prefill against a contract double, on CPU."""

import inspect
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kda_flashinfer_plan import (
    KDATrackLens,
    build_host_tables,
    check_batch_tensors,
)
from sglang.srt.layers.attention.linear.kernels import kda_flashinfer_planned as planned
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kits.kda_flashinfer_contract_double import (
    ContractDoubleWrapper,
    ContractViolation,
    KDAContractDouble,
)
from sglang.test.kits.kda_planned_prefill_kit import (
    LOWER_BOUND,
    KDAPrefillBatch,
    expected_layer,
    extend_layer,
    make_forward_batch,
    make_layer,
    make_metadata,
    make_pool,
    run_planned,
)

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

HEADS = 1
TRITON_FLAG = "--linear-attn-prefill-backend triton"


def whole(*lens, prefix=0, interval=64):
    """A batch whose rows are all tracked to their end."""
    return KDAPrefillBatch(rows=tuple((prefix, n, n) for n in lens), interval=interval)


def random_batch(rng: np.random.Generator) -> KDAPrefillBatch:
    interval = int(rng.choice([32, 64, 128, 256]))
    edges = [0, 1, 2, interval - 1, interval, interval + 1, 2 * interval + 2, 70]
    rows = []
    for _ in range(int(rng.integers(1, 6))):
        new = int(rng.choice(edges))
        tracked = int(rng.integers(0, new + 1)) if rng.random() < 0.7 else None
        if tracked is not None and rng.random() < 0.5:
            tracked = new
        rows.append((int(rng.choice([0, 1, 63, 512])), new, tracked))
    if sum(new for _, new, _ in rows) <= len(rows):
        rows.append((0, interval + 2, interval + 1))
    return KDAPrefillBatch(rows=tuple(rows), interval=interval)


class PlannedPrefillCase(unittest.TestCase):
    def assert_same_bits(self, actual, expected, msg=None):
        self.assertEqual(actual.dtype, expected.dtype, msg)
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, msg=msg
        )

    def check(
        self, batch, *, heads=HEADS, layers=1, pool_options=None, layer_options=None
    ):
        """Every live, snapshot and foreign slot, and every output row, bit for bit."""
        pool = make_pool(batch, heads=heads, layers=layers, **(pool_options or {}))
        before = pool.clone()
        inputs = [
            make_layer(batch.num_tokens, heads=heads, seed=i, **(layer_options or {}))
            for i in range(layers)
        ]
        double = KDAContractDouble()
        outputs = run_planned(batch, pool=pool, layers=inputs, double=double)
        for i, layer in enumerate(inputs):
            output, states = expected_layer(batch, layer=layer, states=before[i])
            live = ~torch.isnan(output).all(-1).all(-1)
            self.assert_same_bits(outputs[i][0][live], output[live], str(batch))
            first = 1 if batch.padded_rows else 0
            self.assert_same_bits(pool[i][first:], states[first:], str(batch))
        self.assertEqual((double.num_plans, double.num_calls), (1, layers))
        return double


class TestCheckpoints(PlannedPrefillCase):
    def test_boundary_is_the_floor_of_the_new_tokens(self):
        for n in (63, 64, 65, 127, 128, 129, 130):
            with self.subTest(n=n):
                self.check(whole(n))

    def test_row_starts_off_the_interval(self):
        self.check(whole(130, 70, 200), heads=2, layers=2)

    def test_empty_rows_touch_no_neighbour(self):
        for lens in ([0, 64, 64], [64, 0, 64], [64, 64, 0]):
            with self.subTest(lens=lens):
                self.check(whole(*lens))

    def test_one_token_row_beside_long_ones(self):
        self.check(whole(1, 130, 1))

    def test_only_some_rows_are_tracked(self):
        rows = ((0, 130, None), (512, 129, 65), (64, 128, 128), (0, 70, None))
        self.check(KDAPrefillBatch(rows=rows))

    def test_nothing_is_tracked(self):
        double = self.check(KDAPrefillBatch(rows=((0, 130, None), (64, 3, None))))
        self.assertNotIn("state_checkpoints", double.last_call)

    def test_random_batches(self):
        rng = np.random.default_rng(20261130)
        for _ in range(12):
            self.check(random_batch(rng))

    def test_bfloat16_pool(self):
        self.check(whole(130, 64, 63), pool_options=dict(dtype=torch.bfloat16))

    def test_strided_pool_goes_through_scratch(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                double = self.check(
                    whole(130, 64, 63, 200),
                    layers=2,
                    pool_options=dict(dtype=dtype, slot_padding=16),
                )
                target = double.last_call["state_checkpoints"]
                self.assertNotEqual(
                    target.data_ptr(), double.last_call["initial_state"].data_ptr()
                )

    def test_dense_pool_is_written_in_place(self):
        for dtype in (torch.float32, torch.bfloat16):
            double = self.check(whole(130), pool_options=dict(dtype=dtype))
            self.assertIs(
                double.last_call["state_checkpoints"], double.last_call["initial_state"]
            )

    def test_wide_and_padded_gate_and_beta(self):
        self.check(
            whole(130, 64),
            layer_options=dict(
                pad_tokens=14, gate_pitch=256, beta_pitch=24, beta_offset=5
            ),
        )

    def test_misaligned_dense_beta_is_realigned(self):
        batch = whole(66)
        layer = make_layer(66, heads=1, seed=0)
        storage = torch.empty(67, dtype=torch.bfloat16)
        storage[1:] = layer.beta.flatten()
        dense, odd = layer.beta, storage[1:].view(1, 66, 1)
        self.assertTrue(odd.is_contiguous() and odd.data_ptr() % 16)
        results = []
        for beta in (dense, odd):
            layer.beta = beta
            pool = make_pool(batch, heads=1)
            run_planned(batch, pool=pool, layers=[layer], double=KDAContractDouble())
            results.append(pool)
        self.assert_same_bits(results[0], results[1])

    def test_padded_row_leaves_the_last_slot_alone(self):
        rows = ((0, 130, 130), (0, 0, None))
        self.check(KDAPrefillBatch(rows=rows, padded_rows=(1,)))

    def test_snapshot_slot_of_minus_one_is_skipped(self):
        # In place, through scratch, and at the first token of a row.
        rows = ((0, (64, 70, 130)), (16, (64, 70, 130)), (0, (63, 70, 130)))
        for slot_padding, lens in rows:
            with self.subTest(slot_padding=slot_padding, lens=lens):
                batch = whole(*lens)
                pool = make_pool(batch, heads=HEADS, slot_padding=slot_padding)
                forward_batch = make_forward_batch(batch)
                forward_batch.mamba_track_indices[:2] = -1
                layer = make_layer(batch.num_tokens, heads=HEADS, seed=0)
                expected = expected_layer(batch, layer=layer, states=pool[0])[1]
                run_planned(
                    batch,
                    pool=pool,
                    layers=[layer],
                    double=KDAContractDouble(),
                    forward_batch=forward_batch,
                )
                for row in range(2):
                    expected[batch.snapshot_slot(row)] = torch.nan
                self.assert_same_bits(pool[0, 1:], expected[1:])

    def test_scheduler_without_host_lists(self):
        batch = whole(130, 70)
        pool, layer = make_pool(batch, heads=1), make_layer(200, heads=1, seed=0)
        expected = expected_layer(batch, layer=layer, states=pool[0])[1]
        forward_batch = make_forward_batch(batch)
        forward_batch.extend_seq_lens_cpu = None
        forward_batch.extend_prefix_lens_cpu = None
        forward_batch.mamba_prefill_track_mask_cpu = None
        forward_batch.mamba_track_seqlens_cpu = None
        run_planned(
            batch,
            pool=pool,
            layers=[layer],
            double=KDAContractDouble(),
            forward_batch=forward_batch,
        )
        self.assert_same_bits(pool[0], expected)

    def test_near_collinear_keys_stay_finite(self):
        batch = whole(128)
        pool, layer = make_pool(batch, heads=1), make_layer(128, heads=1, seed=0)
        layer.k = (layer.k * 1e-3 + 1).contiguous()
        output = run_planned(
            batch, pool=pool, layers=[layer], double=KDAContractDouble()
        )[0]
        self.assertTrue(torch.isfinite(output).all())
        self.assertTrue(torch.isfinite(pool[0, batch.snapshot_slot(0)]).all())


class OpRecorder(TorchDispatchMode):
    """Names of the operators that move data; views are left out."""

    VIEWS = ("slice", "view", "select", "reshape", "detach", "alias", "unsqueeze")

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.VIEWS and not name.endswith("view"):
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


class TestOnePlanABatch(PlannedPrefillCase):
    def layer_ops(self, **layer_options):
        """Operators of one layer around a double that launches nothing."""
        batch = whole(130, 70)
        layer = make_layer(200, heads=HEADS, seed=0, **layer_options)
        output = torch.zeros_like(layer.q)
        double = KDAContractDouble(numerics=lambda call: output, read_values=False)
        kernel = planned.PlannedFlashInferKDAPrefillKernel(double.wrapper_cls)
        metadata = make_metadata(batch)
        pool = make_pool(batch, heads=HEADS, layers=3)
        kernel.plan(
            forward_batch=make_forward_batch(batch),
            metadata=metadata,
            pool=pool,
            interval=64,
        )
        layers = list(pool)
        with OpRecorder() as recorder:
            for states in layers:
                extend_layer(
                    kernel=kernel,
                    metadata=metadata,
                    layer=layer,
                    states=states,
                )
        self.assertEqual((double.num_plans, double.num_calls), (1, 3))
        return recorder.ops

    def test_layer_launches_nothing_but_the_kernel(self):
        self.assertEqual(self.layer_ops(), [])

    def test_fused_beta_costs_one_copy_and_no_allocation(self):
        self.assertEqual(
            self.layer_ops(beta_pitch=130, beta_offset=128, pad_tokens=8),
            ["copy_"] * 3,
        )

    def test_flashinfers_wrapper_takes_the_calls(self):
        """The double takes any keyword; these are bound to the real signatures."""
        try:
            from flashinfer.kda import RecurrentKDAPrefillWrapper
        except ImportError:
            self.skipTest("flashinfer.kda.RecurrentKDAPrefillWrapper is not here")
        for name in ("plan", "run"):
            real = inspect.signature(getattr(RecurrentKDAPrefillWrapper, name))
            method = getattr(ContractDoubleWrapper, name)
            with patch.object(
                ContractDoubleWrapper, name, autospec=True, side_effect=method
            ) as recorded:
                self.check(whole(65, 64))
            call = recorded.call_args
            real.bind(*call.args, **call.kwargs)

    def test_offsets_are_converted_once(self):
        batch, double = whole(130, 70), KDAContractDouble()
        run_planned(
            batch,
            pool=make_pool(batch, heads=1, layers=2),
            layers=[make_layer(200, heads=1, seed=i) for i in range(2)],
            double=double,
        )
        self.assertEqual(double.planned_dtypes, [torch.int64])

    def test_tracked_rows_are_taken_over(self):
        batch, metadata = whole(130, 64), make_metadata(whole(130, 64))
        run_planned(
            batch,
            pool=make_pool(batch, heads=1),
            layers=[make_layer(194, heads=1, seed=0)],
            double=KDAContractDouble(),
            metadata=metadata,
        )
        self.assertEqual(metadata.track_ssm_h_src.numel(), 0)
        self.assertEqual(metadata.track_ssm_final_src.numel(), 0)


class TestRoutes(unittest.TestCase):
    """Batches that FlashInfer's prefill does not take never reach it."""

    def dispatcher(self, double):
        kernel = planned.PlannedFlashInferKDAPrefillKernel(double.wrapper_cls)
        triton = LinearAttnKernelBackend.TRITON
        dispatcher = KDAKernelDispatcher(triton, triton, triton)
        dispatcher.prefill_backend = LinearAttnKernelBackend.FLASHINFER
        dispatcher.extend_kernel = kernel
        return dispatcher

    def test_single_and_zero_token_batches_run_on_triton(self):
        for lens in ([1], [1, 1, 1], [0], [0, 0], [1, 0], [2, 0]):
            with self.subTest(lens=lens):
                batch, double = whole(*lens), KDAContractDouble()
                dispatcher = self.dispatcher(double)
                metadata = make_metadata(batch)
                tracked = metadata.track_ssm_h_src
                dispatcher.extend_kernel.plan(
                    forward_batch=make_forward_batch(batch),
                    metadata=metadata,
                    pool=make_pool(batch, heads=1),
                    interval=64,
                )
                self.assertIsNone(metadata.kda_prefill_plan)
                self.assertIs(metadata.track_ssm_h_src, tracked)
                layer = make_layer(batch.num_tokens, heads=1, seed=0)
                with patch.object(TritonKDAKernel, "extend") as triton_extend:
                    dispatcher.extend(
                        layer.q,
                        layer.k,
                        layer.v,
                        layer.g,
                        layer.beta,
                        ssm_states=make_pool(batch, heads=1)[0],
                        cache_indices=metadata.mamba_cache_indices,
                        query_start_loc=metadata.query_start_loc,
                        lower_bound=LOWER_BOUND,
                        kda_prefill_plan=metadata.kda_prefill_plan,
                    )
                triton_extend.assert_called_once()
                self.assertEqual((double.num_plans, double.num_calls), (0, 0))

    def test_longer_batch_runs_on_flashinfer(self):
        batch, double = whole(2), KDAContractDouble()
        dispatcher = self.dispatcher(double)
        self.assertIs(
            dispatcher.effective_extend_kernel(LOWER_BOUND, 2, 1),
            dispatcher.extend_kernel,
        )
        metadata = make_metadata(batch)
        dispatcher.extend_kernel.plan(
            forward_batch=make_forward_batch(batch),
            metadata=metadata,
            pool=make_pool(batch, heads=1),
            interval=64,
        )
        self.assertEqual(metadata.kda_prefill_plan.num_tokens, 2)

    def test_verify_and_stages_without_kda_layers_get_no_plan(self):
        batch, double = whole(130), KDAContractDouble()
        kernel = self.dispatcher(double).extend_kernel
        verify, stage = make_metadata(batch), make_metadata(batch)
        verify.logical_num_tokens = None
        pool = make_pool(batch, heads=1)
        for metadata, states in ((verify, pool), (stage, pool[:0])):
            kernel.plan(
                forward_batch=make_forward_batch(batch),
                metadata=metadata,
                pool=states,
                interval=64,
            )
            self.assertIsNone(metadata.kda_prefill_plan)
        self.assertEqual(double.num_plans, 0)


class TestBatchErrors(PlannedPrefillCase):
    """Metadata that disagrees is named, and no state is written."""

    def refuse(self, *patterns, **changes):
        batch = KDAPrefillBatch(rows=((0, 70, 70), (512, 130, 130)))
        pool = make_pool(batch, heads=1)
        before, double = pool.clone(), KDAContractDouble()
        forward_batch, metadata = make_forward_batch(batch), make_metadata(batch)
        for name, value in changes.items():
            owner = forward_batch if hasattr(forward_batch, name) else metadata
            setattr(owner, name, value)
        with self.assertRaises(ValueError) as caught:
            run_planned(
                batch,
                pool=pool,
                layers=[make_layer(200, heads=1, seed=0)],
                double=double,
                forward_batch=forward_batch,
                metadata=metadata,
            )
        self.assertNotIsInstance(caught.exception, ContractViolation)
        for pattern in patterns:
            self.assertIn(pattern, str(caught.exception))
        self.assert_same_bits(pool, before)
        self.assertEqual(double.num_calls, 0)

    def test_boundary_past_the_sequence(self):
        self.refuse(
            "row 1",
            "boundary 192",
            "130 tokens",
            "prefix of 512",
            "interval 64",
            mamba_track_seqlens_cpu=[70, 512 + 192],
        )

    def test_boundary_before_the_extend(self):
        self.refuse("row 1", "prefix of 512", mamba_track_seqlens_cpu=[70, 511])

    def test_negative_prefix(self):
        self.refuse("row 0", "prefix of -1", extend_prefix_lens_cpu=[-1, 512])

    def test_token_count(self):
        self.refuse("201 tokens", "has 200", extend_seq_lens_cpu=[71, 130])

    def test_negative_length(self):
        self.refuse("row 0 extends by -1", extend_seq_lens_cpu=[-1, 201])

    def test_counts_of_host_lists(self):
        self.refuse("2 rows", "3 track mask", mamba_prefill_track_mask_cpu=[True] * 3)
        self.refuse("2 rows", "1 track lengths", mamba_track_seqlens_cpu=[70])
        self.refuse("2 rows", "1 prefix lengths", extend_prefix_lens_cpu=[0])

    def test_more_tracked_rows_than_destinations(self):
        self.refuse(
            "row 1 (130 tokens, interval 64)",
            "no snapshot slot: 1 slots for 2 rows",
            mamba_track_indices=torch.tensor([3]),
        )
        self.refuse("tracks 2 rows", "no snapshot slots", mamba_track_indices=None)

    def test_slot_types(self):
        self.refuse(
            "snapshot slots", "float32", mamba_track_indices=torch.tensor([3.0, 4.0])
        )
        self.refuse(
            "state slots", "(2, 1)", mamba_cache_indices=torch.tensor([[1], [2]])
        )

    def test_intervals(self):
        for interval in (0, -64, 48, 16, 2**31, True):
            with self.assertRaisesRegex(ValueError, f"every {interval} tokens"):
                build_host_tables(extend_lens=[64], num_tokens=64, interval=interval)

    def test_int64_offsets_do_not_wrap(self):
        tables = build_host_tables(
            extend_lens=[2**31, 2**31],
            num_tokens=2**32,
            interval=2**10,
            track=KDATrackLens(
                mask=[False, True], track_lens=[0, 2**31], prefix_lens=[0, 0]
            ),
        )
        self.assertEqual(tables.cu_seqlens.tolist(), [0, 2**31, 2**32])
        self.assertEqual(tables.entries.tolist(), [2**22 - 1])
        with self.assertRaisesRegex(ValueError, "more than int32 holds"):
            build_host_tables(extend_lens=[2**37], num_tokens=2**37, interval=32)

    def test_more_slots_than_int32_counts(self):
        with self.assertRaisesRegex(ValueError, f"{2**31} slots, more than int32"):
            check_batch_tensors(
                extend_lens=[130],
                interval=64,
                cache_indices=torch.tensor([1]),
                track_slots=None,
                pool=torch.empty(1, device="meta").expand(2**31, 1, 128, 128),
            )

    def test_state_slot_count(self):
        batch = whole(70, 130)
        for slots, message in (
            ([1], r"row 1 \(130 tokens, interval 64\) has no state slot"),
            ([1, 2, 3], r"2 rows of \[70, 130\] tokens, but 3 state slots"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                planned.build_kda_prefill_plan(
                    wrapper_cls=KDAContractDouble().wrapper_cls,
                    extend_lens=batch.lens,
                    num_tokens=200,
                    cache_indices=torch.tensor(slots),
                    interval=64,
                    pool=make_pool(batch, heads=1)[0],
                )


class TestLayerErrors(PlannedPrefillCase):
    def refuse(self, *patterns, plan=True, lower_bound=LOWER_BOUND, **changes):
        batch = whole(70, 130)
        pool, layer = make_pool(batch, heads=1), make_layer(200, heads=1, seed=0)
        before, double = pool.clone(), KDAContractDouble()
        kernel = planned.PlannedFlashInferKDAPrefillKernel(double.wrapper_cls)
        metadata = make_metadata(batch)
        if plan:
            kernel.plan(
                forward_batch=make_forward_batch(batch),
                metadata=metadata,
                pool=pool,
                interval=64,
            )
        inputs = {name: getattr(layer, name) for name in ("q", "k", "v", "g", "beta")}
        inputs.update(changes)
        with self.assertRaises(ValueError) as caught:
            kernel.extend(
                **inputs,
                ssm_states=pool[0],
                cache_indices=metadata.mamba_cache_indices,
                query_start_loc=metadata.query_start_loc,
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                lower_bound=lower_bound,
                kda_prefill_plan=metadata.kda_prefill_plan,
            )
        self.assertNotIsInstance(caught.exception, ContractViolation)
        for pattern in patterns:
            self.assertIn(pattern, str(caught.exception))
        self.assert_same_bits(pool, before)
        self.assertEqual(double.num_calls, 0)

    def test_plan_is_missing(self):
        self.refuse("without a plan", plan=False)

    def test_gate_bound(self):
        for bound in (None, 0.0, 1.0, float("-inf"), float("nan")):
            self.refuse(f"got {bound}", TRITON_FLAG, lower_bound=bound)

    def test_tensors_differ_from_the_plan(self):
        bf16 = torch.bfloat16
        for name in ("q", "k", "v"):
            short = torch.zeros(1, 199, 1, 128, dtype=bf16)
            self.refuse(f"planned {name}", "199", "200", **{name: short})
            narrow = torch.zeros(1, 200, 1, 64, dtype=bf16)
            self.refuse(f"planned {name}", "64", **{name: narrow})
            self.refuse(
                f"planned {name}",
                "float16",
                **{name: torch.zeros(1, 200, 1, 128, dtype=torch.float16)},
            )
        for name, tail in (("g", (1, 128)), ("beta", (1,))):
            self.refuse(
                f"planned {name}",
                "199",
                **{name: torch.zeros(1, 199, *tail, dtype=bf16)},
            )
            self.refuse(
                f"planned {name}", "float32", **{name: torch.zeros(1, 200, *tail)}
            )
        self.refuse("planned g", g=torch.zeros(1, 200, 1, 64, dtype=bf16))
        self.refuse("planned beta", beta=torch.zeros(1, 200, 2, dtype=bf16))
        self.refuse("planned beta", beta=torch.zeros(2, 200, 1, dtype=bf16))


def kda_model(**linear_attn_config):
    """The one field of a ModelConfig that the gate check reads."""
    config = KimiLinearConfig(
        linear_attn_config=dict(
            kda_layers=[1], full_attn_layers=[2], **linear_attn_config
        )
    )
    return SimpleNamespace(hf_config=config, is_draft_model=False)


class TestStartUp(unittest.TestCase):
    """Configurations that no batch could serve name the flag that helps."""

    def serve(self, pool=None, **changes):
        kernel = planned.PlannedFlashInferKDAPrefillKernel(KDAContractDouble)
        arguments = dict(
            model_config=kda_model(gate_lower_bound=-5.0),
            pool=torch.zeros(2, 3, 8, 128, 128) if pool is None else pool,
            interval=64,
            activation_dtype=torch.bfloat16,
            enable_two_batch_overlap=False,
            prefill_graph_backend=Backend.BREAKABLE,
        )
        kernel.check_serving(**{**arguments, **changes})
        return kernel

    def refuse(self, *patterns, **changes):
        with self.assertRaises(ValueError) as caught:
            self.serve(**changes)
        for pattern in patterns:
            self.assertIn(pattern, str(caught.exception))

    def test_refusals(self):
        def pool(heads=8, size=128, dtype=torch.float32):
            return torch.zeros(2, 3, heads, size, size, dtype=dtype)

        self.refuse("every 48 tokens", TRITON_FLAG, interval=48)
        self.refuse("gate_lower_bound", TRITON_FLAG, model_config=kda_model())
        self.refuse("float16", "--dtype bfloat16", activation_dtype=torch.float16)
        self.refuse("--enable-two-batch-overlap", enable_two_batch_overlap=True)
        self.refuse(
            "--cuda-graph-backend-prefill breakable", prefill_graph_backend=Backend.FULL
        )
        self.refuse("64 x 64", TRITON_FLAG, pool=pool(size=64))
        self.refuse("--mamba-ssm-dtype", pool=pool(dtype=torch.float16))
        self.refuse("strides", TRITON_FLAG, pool=pool().transpose(3, 4))
        one_slot = torch.zeros(1, 1, 8, 128, 128)
        self.refuse("strides", TRITON_FLAG, pool=one_slot.expand(1, 3, 8, 128, 128))
        unaligned = torch.zeros(2 * 3 * 8 * 128 * 128 + 1)[1:]
        self.refuse("aligned", TRITON_FLAG, pool=unaligned.view(2, 3, 8, 128, 128))
        # Slots, then layers, that start off a 16-byte address.
        odd_slots = torch.zeros(2, 4, 8 * 128 * 128 + 1)[..., :-1]
        self.refuse("aligned", TRITON_FLAG, pool=odd_slots.unflatten(-1, (8, 128, 128)))
        odd_layers = torch.zeros(2, 3 * 8 * 128 * 128 + 1)[..., :-1]
        self.refuse(
            "aligned", TRITON_FLAG, pool=odd_layers.unflatten(-1, (3, 8, 128, 128))
        )

    def test_head_counts_a_rank_may_have(self):
        for heads in (1, 3, 6, 9, 10, 12, 24, 96):
            self.serve(torch.zeros(1, 1, heads, 128, 128))
        for heads in (11, 13, 14, 15, 20):
            pool = torch.zeros(1, 1, heads, 128, 128)
            self.refuse(f"has {heads}", "--tp-size", TRITON_FLAG, pool=pool)

    def test_head_counts_are_those_of_flashinfers_own_check(self):
        """FlashInfer's host code on CPU tensors, around a kernel that does nothing."""
        try:
            from flashinfer.kda_kernels import kda_chunked_bt16 as bt16
        except (ImportError, RuntimeError) as e:
            self.skipTest(f"FlashInfer's CuTe DSL prefill is not here: {e}")
        spec = dict.fromkeys(("has_state_ckpt", "has_state_indices"), False)
        spec.update(has_state_in=True, has_state_out=True, mode="engine")
        call = bt16._make_call(
            lambda *args: None, {**spec, "dtype": bt16.cutlass.BFloat16}
        )

        def flashinfer(state):
            x = torch.zeros(1, 2, state.shape[1], 128, dtype=torch.bfloat16)
            beta, offsets = x[..., 0].contiguous(), torch.tensor([0, 2])
            order = torch.zeros(1, dtype=torch.int32)
            inputs = (x, x, x, x, None, None, beta, offsets, state, x, state, None, 0)
            with patch.object(bt16, "_device_sm_count", return_value=148):
                call(*inputs, seq_order=order)

        def refused(serve, pool):
            try:
                serve(pool)
            except ValueError as e:
                self.assertIn("heads", str(e))
                return True
            return False

        for heads in range(1, 33):
            pool = torch.zeros(1, 1, heads, 128, 128)
            self.assertEqual(
                refused(self.serve, pool), refused(flashinfer, pool[0]), heads
            )

    def test_graph_tables_serve_float32_pools_of_64_token_chunks(self):
        self.assertIsNotNone(self.serve().prefill_graph_wrapper_cls)
        self.assertIsNone(self.serve(interval=128).prefill_graph_wrapper_cls)
        bf16 = torch.zeros(2, 3, 8, 128, 128, dtype=torch.bfloat16)
        self.assertIsNone(self.serve(bf16).prefill_graph_wrapper_cls)

    def test_other_devices_are_refused(self):
        for capability in ((9, 0), (12, 0), (10, 1)):
            with patch.object(
                torch.cuda, "get_device_capability", return_value=capability
            ):
                with self.assertRaisesRegex(ValueError, TRITON_FLAG):
                    planned.build_flashinfer_kda_prefill_kernel()

    def test_flashinfer_builds(self):
        """The API decides: planned, per call, or refused with what to install."""
        try:
            from flashinfer import kda
        except ImportError:
            self.skipTest("flashinfer.kda is not installed")
        from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_prefill import (
            FlashInferKDAPrefillKernel,
        )

        def build():
            with patch.object(
                torch.cuda, "get_device_capability", return_value=(10, 3)
            ):
                return planned.build_flashinfer_kda_prefill_kernel()

        with patch.object(planned, "_cute_dsl_available", return_value=True):
            self.assertIsInstance(build(), planned.PlannedFlashInferKDAPrefillKernel)
            wrapper = kda.RecurrentKDAPrefillWrapper
            del kda.RecurrentKDAPrefillWrapper
            try:
                self.assertIs(type(build()), FlashInferKDAPrefillKernel)
            finally:
                kda.RecurrentKDAPrefillWrapper = wrapper
            with patch.object(kda, "recurrent_kda", lambda q: None):
                with self.assertRaisesRegex(ValueError, "flashinfer_python>=0.7.0"):
                    build()
        with patch.object(planned, "_cute_dsl_available", return_value=False):
            with self.assertRaisesRegex(ValueError, "nvidia-cutlass-dsl>=4.7"):
                build()


if __name__ == "__main__":
    unittest.main()
