"""Seeding the Kimi-K3 16K prefill MoE tactic: gate, record, key, ranks, --explain.

The tuner, the record and the files are real; nothing here needs a GPU.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

import contextlib
import copy
import io
import json
import unittest
from pathlib import Path
from unittest.mock import patch

import flashinfer
import msgspec
import torch
import torch.distributed as dist
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.tllm_enums import ActivationType, RoutingInputMode, WeightLayout

from sglang.kernels.ops.moe import moe_route_quant_fused
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.layers.moe import kimi_k3_prefill_tactics as tactics
from sglang.srt.layers.moe.kimi_k3_prefill_explain import _backend_rule
from sglang.srt.layers.moe.kimi_k3_prefill_explain import main as explain
from sglang.srt.layers.moe.kimi_k3_prefill_tactics import (
    bundled_record_path,
    read_record,
)
from sglang.srt.model_executor.runner import flashinfer_autotune as warmup
from sglang.srt.runtime_context import (
    get_parallel,
    override_platform,
    reset_context,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kits.flashinfer_autotune_kit import (
    PhaseRunner,
    autotune_phase,
    read_entries,
    write_cache,
)
from sglang.test.kits.kimi_k3_moe_call_kit import capture_moe_call
from sglang.test.kits.kimi_k3_tactics_kit import (
    INSTALLED,
    MEASURED_ARGS,
    RECORD,
    SEEDED,
    TacticsBase,
    cpu_runner,
    cpu_startup,
    record_environment,
    run_forked,
)


class UntouchableRunner:
    """A runner of an older fixture: no field this module reads exists."""

    def __getattr__(self, name: str):
        raise AssertionError(f"the runner's {name} was read")


class TestGate(TacticsBase):
    def test_the_measured_setup_is_seeded_and_says_so(self):
        with self.assertLogs(tactics.logger, "INFO") as logs:
            decision = self.seed()
        self.assertTrue(decision.seeded)
        self.assertEqual(decision.reason, "")
        self.assertEqual((decision.bucket, decision.tactic), (16384, SEEDED))
        self.assertEqual(decision.record, str(bundled_record_path()))
        self.assertEqual(len(logs.output), 1)
        for part in ("16384", "(128, 4)", decision.record):
            self.assertIn(part, logs.output[0])

    def test_process_wide_rules_come_before_the_runner(self):
        def server(**changed):
            return cpu_startup(**{**MEASURED_ARGS, **changed})

        def device(*capability):
            return override_platform(device_capability=capability)

        for name, change, found in (
            ("tensor parallel", server(tp_size=2), "expected 1, found 2"),
            ("tensor parallel", server(tp_size=8), "expected 1, found 8"),
            ("pipeline parallel", server(pp_size=1), "expected 8, found 1"),
            ("pipeline parallel", server(pp_size=4), "expected 8, found 4"),
            ("pipeline parallel", server(pp_size=16), "expected 8, found 16"),
            ("expert parallel", get_parallel().override(ep_size=8), "found 8"),
            ("chunked prefill", server(chunked_prefill_size=-1), "found -1"),
            ("chunked prefill", server(chunked_prefill_size=None), "found None"),
            ("chunked prefill", server(chunked_prefill_size=8192), "found 8192"),
            ("chunked prefill", server(chunked_prefill_size=32768), "found 32768"),
            ("device", device(10, 0), "expected SM103, found SM100"),
            ("device", device(9, 0), "expected SM103, found SM90"),
            ("device", device(12, 0), "expected SM103, found SM120"),
            ("device", device(None, None), "found no CUDA device"),
            ("cache reuse", server(reuse_cache=False), "expected on, found off"),
            (
                "autotune skip ops",
                server(flashinfer_autotune_skip_ops=["other", self.call.op]),
                f"found other, {self.call.op}",
            ),
        ):
            with self.subTest(name=name, found=found), change:
                self.assert_not_seeded(name, found, runner=UntouchableRunner())

    def test_another_op_may_be_skipped(self):
        with cpu_startup(**MEASURED_ARGS, flashinfer_autotune_skip_ops=["other"]):
            self.assertTrue(self.seed().seeded)

    def test_without_a_published_configuration_nothing_is_touched(self):
        def unpublished():
            reset_context()
            decision = self.seed(UntouchableRunner())
            return decision.seeded, decision.reason

        ((seeded, reason),) = run_forked(unpublished)
        self.assertFalse(seeded)
        self.assertIn("server configuration: expected published", reason)

    def test_runner_rules(self):
        for name, found, change in (
            ("model", "found Glm5NextForConditionalGeneration", "architecture"),
            ("model dtype", "found torch.float16", "dtype"),
            ("runner", "expected target, found draft", "draft"),
        ):
            with self.subTest(name=name):
                runner = cpu_runner()
                if change == "architecture":
                    runner = cpu_runner(architecture="Glm5NextForConditionalGeneration")
                elif change == "dtype":
                    runner.dtype = torch.float16
                else:
                    runner.start_draft_phase()
                self.assert_not_seeded(name, found, runner=runner)

    def test_a_version_bump_orphans_the_record_with_a_warning(self):
        for version in ("0.7.1", "0.7.2.post1", "0.7.3", "0.7.20"):
            with (
                self.subTest(version=version),
                patch.object(flashinfer, "__version__", version),
            ):
                warning = self.assert_not_seeded(
                    f"expected 0.7.2, found {version}", runner=cpu_runner()
                )
                self.assertEqual(warning.levelname, "WARNING")
                self.assertIn(str(bundled_record_path()), warning.getMessage())

    def test_an_orphan_is_no_warning_for_other_models_or_repeated_phases(self):
        with patch.object(flashinfer, "__version__", "0.7.3"):
            other = cpu_runner(architecture="DeepseekV3ForCausalLM")
            record = self.assert_not_seeded("found DeepseekV3", runner=other)
            self.assertEqual(record.levelname, "INFO")
            self.assert_not_seeded("found 0.7.3")
            with self.assertNoLogs(tactics.logger, "INFO"):
                self.seed()


class TestRecord(TacticsBase):
    def test_key_and_policy_are_those_of_the_serving_call(self):
        record = read_record(bundled_record_path())
        self.assertEqual(
            record.entries, {self.key: ["MoERunner", [128, 4], self.call.policy]}
        )
        self.assertEqual(
            self.call.policy,
            ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold"],
        )
        self.assertEqual(self.call.routing_mode, RoutingInputMode.UnpackedPrecomputed)
        self.assertTrue(self.call.do_finalize)

    def test_only_decode_sizes_take_the_packed_route(self):
        for tokens, packed in ((64, True), (65, False), (16384, False)):
            scores = torch.empty(tokens, 896, dtype=torch.bfloat16)
            x = torch.empty(tokens, 3584, dtype=torch.bfloat16)
            bias = torch.empty(896)
            covered = moe_route_quant_fused.covered(scores, bias, 16, x)
            self.assertEqual(covered, packed, tokens)

    def test_the_record_states_its_provenance(self):
        metadata = read_record(bundled_record_path()).metadata
        self.assertEqual(metadata["flashinfer_version"], "0.7.2")
        self.assertEqual(set(metadata["provenance"]), {"measured", "derived"})
        self.assertIn("B30Z", metadata["provenance"]["derived"]["gpu"])
        self.assertLessEqual(set(INSTALLED), set(metadata))

    def test_the_record_is_for_the_pinned_packages(self):
        if INSTALLED["cuda_version"] != record_environment()["cuda_version"]:
            self.skipTest(f"another build of torch: CUDA {INSTALLED['cuda_version']}")
        self.assertEqual(INSTALLED | {"gpu": "unknown"}, record_environment())

    def test_hit_in_serving_and_in_a_tuning_pass(self):
        self.seed()
        self.assertEqual(self.call.lookup(self.tuner), SEEDED)
        # One bucket, so choose_one runs to its end without a GPU on a hit only.
        self.tuner.reset_statistics()
        with autotune(True, tuning_buckets=(16384,)):
            _, tactic = self.tuner.choose_one(
                self.call.op, [self.call.runner], self.call.config, self.call.inputs
            )
        self.assertEqual(tactic, SEEDED)
        self.assertEqual(self.tuner.stats.tuned_op_total_configs[self.call.op], 1)
        self.assertEqual(self.tuner.stats.tuned_op_successful_configs, {})
        self.assertEqual(self.call.lookup(self.tuner), SEEDED)

    def test_bucket_edges(self):
        self.seed()
        for tokens, expected in (
            (8192, None),
            (8193, SEEDED),
            (16383, SEEDED),
            (16384, SEEDED),
            (16385, None),
            (32768, None),
        ):
            with self.subTest(tokens=tokens):
                self.assertEqual(capture_moe_call(tokens).lookup(self.tuner), expected)

    def test_other_problems_miss(self):
        self.seed()
        for field, value in (
            ("activation_type", ActivationType.Swiglu),
            ("top_k", 8),
            ("num_experts", 384),
            ("num_local_experts", 112),
            ("intermediate_size", 2048),
            ("weight_layout", WeightLayout.BlockMajorK),
        ):
            with self.subTest(field=field):
                other = copy.copy(self.call)
                other.runner = copy.copy(self.call.runner)
                setattr(other.runner, field, value)
                self.assertIsNone(other.lookup(self.tuner))
        with self.subTest("routing from logits"):
            other = copy.copy(self.call)
            other.inputs = list(self.call.inputs)
            other.inputs[1] = torch.empty(16384, 896, device="meta")
            other.inputs[2] = other.inputs[3] = None
            self.assertIsNone(other.lookup(self.tuner))

    def test_packed_ids_and_deferred_finalize_share_the_key(self):
        # FlashInfer's key names neither, so a change of route keeps the record.
        for change in ({"packed": True}, {"defer_finalize": True}):
            with self.subTest(change):
                self.assertEqual(capture_moe_call(16384, **change).file_key, self.key)

    def test_records_that_must_not_load(self):
        cases = {
            "made for 0.7.1": ("flashinfer_version", "0.7.1"),
            "made for 0.7.3": ("flashinfer_version", "0.7.3"),
            "made for a post release": ("flashinfer_version", "0.7.2.post1"),
            "any FlashInfer": ("flashinfer_version", "*"),
            "other CUDA": ("cuda_version", "12.9"),
            "unknown GPU, as here": ("gpu", record_environment()["gpu"]),
            "None": ("cudnn_version", None),
            "text None": ("cublas_version", "None"),
            "missing field": ("cutlass_dsl_version", ...),
        }
        for name, (field, value) in cases.items():
            with self.subTest(name):
                content = json.loads(RECORD.read_text())
                content["_metadata"][field] = value if value is not ... else None
                if value is ...:
                    del content["_metadata"][field]
                path = self.bundle(content)
                warning = self.assert_not_seeded(field, runner=cpu_runner())
                self.assertEqual(warning.levelname, "WARNING")
                self.assertIn(str(path), warning.getMessage())

    def test_malformed_records_do_not_load(self):
        good = json.loads(RECORD.read_text())
        metadata = {"_metadata": good.pop("_metadata")}
        entry = good[self.key]
        for name, content in {
            "no metadata": good,
            "metadata is a list": {"_metadata": [], **good},
            "no entry": metadata,
            "two entries": {**metadata, **good, "other": entry},
            "no policy": {**metadata, self.key: entry[:2]},
            "no tile": {**metadata, self.key: [entry[0], 4, entry[2]]},
            "other runner": {**metadata, self.key: ["CutlassRunner", *entry[1:]]},
            "not a key": {**metadata, "moe": entry},
            "a list": [],
            "empty": "",
            "truncated": RECORD.read_text()[:-40],
            "nested too deeply": "[" * 100_000,
        }.items():
            with self.subTest(name):
                path = self.bundle(content)
                self.assert_not_seeded("record", str(path), runner=cpu_runner())

    def test_a_record_that_flashinfer_rejects_does_not_stop_the_start(self):
        for rejection in ({"return_value": False}, {"side_effect": KeyError("rule")}):
            with (
                self.subTest(rejection),
                patch.object(AutoTuner, "load_configs", **rejection),
            ):
                self.assert_not_seeded("FlashInfer rejected", runner=cpu_runner())


class TestAgreement(TacticsBase):
    """Two ranks of one tuning group, with the gate widened to TP2."""

    @contextlib.contextmanager
    def rank(self, rank: int):
        dist.init_process_group(
            "gloo", init_method=f"file://{self.dir}/store", rank=rank, world_size=2
        )
        try:
            widened = msgspec.structs.replace(tactics.MEASURED, tp_size=2)
            with (
                patch.object(tactics, "MEASURED", widened),
                cpu_startup(
                    **{**MEASURED_ARGS, "tp_size": 2}, cpu_group=dist.group.WORLD
                ),
            ):
                self.tuner.clear_cache()
                yield
        finally:
            dist.destroy_process_group()

    def decide(self, rank: int, prepare) -> tuple:
        with self.rank(rank):
            prepare()
            decision = self.seed()
            return decision.seeded, decision.reason, self.call.lookup(self.tuner)

    def run_ranks(self, prepare_second) -> list:
        (self.dir / "store").unlink(missing_ok=True)
        return run_forked(
            lambda: self.decide(0, lambda: None), lambda: self.decide(1, prepare_second)
        )

    def test_both_load(self):
        self.assertEqual(self.run_ranks(lambda: None), [(True, "", SEEDED)] * 2)

    def test_one_cannot_load(self):
        def other_cuda():
            content = json.loads(RECORD.read_text())
            content["_metadata"]["cuda_version"] = "12.9"
            self.bundle(content)

        for name, prepare, fault in (
            ("record's environment", other_cuda, "record's cuda_version"),
            ("unreadable record", lambda: self.bundle("{"), "record"),
            (
                "FlashInfer's verdict",
                patch.object(AutoTuner, "load_configs", return_value=False).start,
                "FlashInfer rejected",
            ),
            (
                "device",
                override_platform(device_capability=(10, 0)).install,
                "found SM100",
            ),
        ):
            with self.subTest(name):
                first, second = self.run_ranks(prepare)
                self.assertEqual((first[0], first[2]), (False, None))
                self.assertEqual((second[0], second[2]), (False, None))
                self.assertIn("rank 1", first[1])
                self.assertIn(fault, first[1])
                self.assertIn(fault, second[1])

    def test_one_ranks_damaged_cache_is_kept_and_nobody_loads(self):
        # Ranks whose files differ delete them; a damaged one must survive that.
        good = write_cache(self.dir / "rank0.json", {self.key: self.entry((192, 4))})
        damaged = self.dir / "rank1.json"
        damaged.write_text(json.dumps({"first": ["R", 1], "bad": 5}))
        content = damaged.read_bytes()

        def start(rank: int, cache: Path):
            with self.rank(rank), autotune_phase(cpu_runner(), cache):
                return self.call.lookup(self.tuner)

        found = run_forked(lambda: start(0, good), lambda: start(1, damaged))
        self.assertEqual(found, [SEEDED, SEEDED])
        (kept,) = self.dir.glob("rank1.json.damaged-*")
        self.assertEqual(kept.read_bytes(), content)
        self.assertEqual(read_entries(good), read_entries(damaged))

    def test_different_records(self):
        def other_tactic():
            content = json.loads(RECORD.read_text())
            content[self.key][1] = [64, 1]
            self.bundle(content)

        for result in self.run_ranks(other_tactic):
            self.assertEqual((result[0], result[2]), (False, None))
            self.assertIn("different records", result[1])


class AutotunedRunner(PhaseRunner, kw_only=True):
    """The fields that the decision whether to autotune reads besides."""

    model: torch.nn.Module
    spec_algorithm: SpeculativeAlgorithm


class TestExplain(TacticsBase):
    def table(self, *argv: str) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = explain(["--explain", *argv])
        return code, output.getvalue()

    def model(self) -> str:
        config = {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "text_config": {"model_type": "kimi_linear", "dtype": "bfloat16"},
        }
        (self.dir / "config.json").write_text(json.dumps(config))
        return str(self.dir)

    def test_the_measured_setup(self):
        code, table = self.table(
            "--model-path", self.model(), "--pp-size=8", "--chunked-prefill-size=16384"
        )
        self.assertEqual(code, 0, table)
        self.assertNotIn(" NO", table)
        self.assertIn("would be seeded", table)
        self.assertIn("MoE runner backend auto is not resolved", table)
        self.assertEqual(self.tuner.profiling_cache, {})
        self.assertIsNone(self.call.lookup(self.tuner))

    def test_options_that_keep_the_autotuner_from_running(self):
        measured = ["--pp-size=8", "--chunked-prefill-size=16384"]
        for argument, reason in (
            ("--disable-flashinfer-autotune", "disable_flashinfer_autotune"),
            ("--enable-deterministic-inference", "enable_deterministic_inference"),
            ("--enable-kv-cache-sharding", "enable_kv_cache_sharding"),
            ("--moe-runner-backend=triton", "MoE runner backend"),
            (f"--flashinfer-autotune-skip-ops={self.call.op}", "autotune skip ops"),
        ):
            with self.subTest(argument):
                code, table = self.table(
                    "--model-path", self.model(), *measured, argument
                )
                self.assertEqual(code, 1, table)
                self.assertIn(f"would not be seeded: {reason}: expected", table)

    def test_the_backend_rule_is_that_of_the_autotuner(self):
        runner = AutotunedRunner(
            device="cuda",
            forward_stream=None,
            model_config=cpu_runner().model_config,
            model=torch.nn.Module(),
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        capability = patch.object(
            torch.cuda, "get_device_capability", return_value=(10, 3)
        )
        for backend in MOE_RUNNER_BACKEND_CHOICES:
            with (
                self.subTest(backend),
                capability,
                cpu_startup(**MEASURED_ARGS, moe_runner_backend=backend),
            ):
                self.assertEqual(
                    _backend_rule(backend).ok,
                    warmup.should_run_flashinfer_autotune(runner),
                )

    def test_every_failing_rule_is_shown(self):
        # An unreadable checkpoint fails its two rules and hides no other.
        (self.dir / "config.json").write_text("{")
        with override_platform(device_capability=(9, 0)):
            code, table = self.table("--model-path", str(self.dir), "--tp-size=8")
        self.assertEqual(code, 1)
        rows = [line for line in table.splitlines() if line.endswith(" NO")]
        names = [row.split("  ")[0] for row in rows]
        self.assertEqual(
            names,
            [
                "tensor parallel size",
                "pipeline parallel size",
                "chunked prefill size",
                "device",
                "model",
                "model dtype",
            ],
        )
        self.assertIn("SM90", table)
        self.assertIn("would not be seeded: tensor parallel size", table)


if __name__ == "__main__":
    unittest.main()
