"""Seeding the Kimi-K3 16K prefill MoE tactic: gate, record, key, user's cache.

The tuner, the record and the files are real; nothing here needs a GPU.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

import contextlib
import copy
import errno
import functools
import io
import itertools
import json
import multiprocessing
import os
import tempfile
import traceback
import unittest
from pathlib import Path
from unittest.mock import patch

import filelock
import flashinfer
import msgspec
import torch
import torch.distributed as dist
from flashinfer.autotuner import AutoTuner, _collect_metadata, autotune
from flashinfer.tllm_enums import ActivationType, RoutingInputMode, WeightLayout

from sglang.kernels.ops.moe import moe_route_quant_fused
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.environ import envs
from sglang.srt.layers.moe import kimi_k3_prefill_tactics as tactics
from sglang.srt.layers.moe.kimi_k3_prefill_explain import _backend_rule
from sglang.srt.layers.moe.kimi_k3_prefill_explain import main as explain
from sglang.srt.layers.moe.kimi_k3_prefill_tactics import (
    bundled_record_path,
    read_record,
    seed_kimi_k3_prefill_tactics,
)
from sglang.srt.model_executor.runner import flashinfer_autotune as warmup
from sglang.srt.runtime_context import (
    get_parallel,
    override_platform,
    reset_context,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import flashinfer_user_cache
from sglang.test.kits.flashinfer_autotune_kit import (
    PhaseRunner,
    autotune_phase,
    autotune_startup,
    fresh_tuner,
    make_phase_runner,
    read_entries,
    stated_environment,
    write_cache,
)
from sglang.test.kits.kimi_k3_moe_call_kit import capture_moe_call
from sglang.test.test_utils import CustomTestCase, enter_override, enter_scope

MEASURED_ARGS = dict(tp_size=1, pp_size=8, ep_size=1, chunked_prefill_size=16384)
SEEDED = (128, 4)
RECORD = bundled_record_path()
INSTALLED = _collect_metadata()
# What FlashInfer reads where the record applies, but for the GPU there is none of.
ENVIRONMENT = {
    field: json.loads(RECORD.read_text())["_metadata"][field] for field in INSTALLED
} | {"gpu": "unknown"}
FORK = multiprocessing.get_context("fork")
# Forked children cannot use a CUDA context, so a device that is there stays unused.
cpu_runner = functools.partial(make_phase_runner, on_cuda=False)
cpu_startup = functools.partial(autotune_startup, on_cuda=False)


class UntouchableRunner:
    """A runner of an older fixture: no field this module reads exists."""

    def __getattr__(self, name: str):
        raise AssertionError(f"the runner's {name} was read")


def run_forked(*targets) -> list:
    """Run each callable in its own process at once; returns their results."""
    pipes, processes = [], []
    for target in targets:
        reader, writer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_report, args=(target, writer))
        process.start()
        writer.close()
        pipes.append(reader)
        processes.append(process)
    try:
        results = []
        for reader in pipes:
            if not reader.poll(60):
                raise AssertionError("a process hangs")
            try:
                results.append(reader.recv())
            except EOFError:
                results.append("died")
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    for result in results:
        if isinstance(result, str) and result.startswith("Traceback"):
            raise AssertionError(result)
    return results


def _report(target, writer) -> None:
    try:
        writer.send(target())
    except BaseException:
        writer.send(traceback.format_exc())
    finally:
        writer.close()


def drop_privileges() -> None:
    """Become a user that file modes bind, for the rest of a forked process."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


class TacticsBase(CustomTestCase):
    """A start that matches the measured setup, with an empty tuner."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.cache = self.dir / "rank_tp0_pp0_dp0.json"
        enter_scope(self, cpu_startup(**MEASURED_ARGS))
        enter_override(self, override_platform(device_capability=(10, 3)))
        enter_scope(self, stated_environment(ENVIRONMENT))
        self.tuner = enter_scope(self, fresh_tuner())
        self.runner = cpu_runner()
        self.call = capture_moe_call(16384)
        # The entry of the call in the form the op's measurement needs.
        self.key = self.call.file_key

    def entry(self, tactic) -> list:
        return ["MoERunner", list(tactic), self.call.policy]

    def seed(self, runner=None):
        return seed_kimi_k3_prefill_tactics(self.tuner, runner or self.runner)

    def assert_not_seeded(self, *fragments: str, runner=None):
        with self.assertLogs(tactics.logger, "INFO") as logs:
            decision = self.seed(runner)
        self.assertEqual(len(logs.output), 1, logs.output)
        self.assertFalse(decision.seeded)
        self.assertIsNone(self.call.lookup(self.tuner))
        for fragment in fragments:
            self.assertIn(fragment, decision.reason)
            self.assertIn(fragment, logs.output[0])
        return logs.records[0]

    def bundle(self, content) -> Path:
        """Put a record in place of the bundled one."""
        path = self.dir / f"bundle_{len(os.listdir(self.dir))}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        enter_scope(
            self, patch.object(tactics, "bundled_record_path", return_value=path)
        )
        return path


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
        if INSTALLED["cuda_version"] != ENVIRONMENT["cuda_version"]:
            self.skipTest(f"another build of torch: CUDA {INSTALLED['cuda_version']}")
        self.assertEqual(INSTALLED | {"gpu": "unknown"}, ENVIRONMENT)

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
            "unknown GPU, as here": ("gpu", ENVIRONMENT["gpu"]),
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


def damaged_contents() -> dict[str, bytes]:
    good = {"_metadata": ENVIRONMENT, "first": ["R", 1]}
    added = {
        "entry null": {"bad": None},
        "entry number": {"bad": 5},
        "entry text": {"bad": "MoERunner"},
        "entry object": {"bad": {"0": 1}},
        "entry empty": {"bad": []},
        "entry short": {"bad": ["R"]},
        "runner number": {"bad": [5, 1]},
        "policy number": {"bad": ["R", 1, 7]},
        "policy text": {"bad": ["R", 1, "cold"]},
        "comment": {"_comment": 5},
        "records list": {"_records": []},
    }
    return {
        "empty": b"",
        "truncated": json.dumps(good).encode()[:-9],
        "null": b"null",
        "a list": b"[1, 2]",
        "text": b'"x"',
        "not UTF-8": b"\xff\xfe\x00",
        "UTF-16": json.dumps(good).encode("utf-16"),
        "nested too deeply": b"[" * 100_000,
        **{name: json.dumps({**good, **bad}).encode() for name, bad in added.items()},
    }


# Damage, a start's pipeline size and its tactic, damage done while tuning.
DAMAGED_STARTS = tuple(
    itertools.product(
        damaged_contents().items(), ((8, SEEDED), (4, None)), (False, True)
    )
)


class TestUserCache(TacticsBase):
    def start(self, cache=None, *, while_tuning=None, pp_size=8):
        """A fresh start through the autotune context; returns its log records."""
        cache = cache or self.cache
        self.tuner.clear_cache()
        self.runner = cpu_runner()
        with (
            self.assertLogs("sglang.srt", "INFO") as logs,
            cpu_startup(**{**MEASURED_ARGS, "pp_size": pp_size}),
            autotune_phase(self.runner, cache),
        ):
            self.in_tuning = self.call.lookup(self.tuner)
            if while_tuning is not None:
                cache.write_bytes(while_tuning)
        return [record for record in logs.records if record.levelname == "WARNING"]

    def crash_in_save(self):
        """Another process with this tuner's tactics dies right after FlashInfer's save."""
        save = AutoTuner.save_configs

        def save_and_die(tuner, path):
            save(tuner, path)
            os._exit(1)

        def crash():
            with patch.object(AutoTuner, "save_configs", save_and_die):
                flashinfer_user_cache.save_user_cache(self.tuner, self.cache)

        self.assertEqual(run_forked(crash), ["died"])

    @contextlib.contextmanager
    def lock_held_elsewhere(self):
        with (
            filelock.FileLock(self.dir / f".{self.cache.name}.lock"),
            patch.object(flashinfer_user_cache, "_LOCK_TIMEOUT_SECS", 0),
        ):
            yield

    def corrected_bundle(self, tactic=(64, 1)):
        content = json.loads(RECORD.read_text())
        content[self.key][1] = list(tactic)
        self.bundle(content)
        return tactic

    def test_an_explicit_entry_wins(self):
        write_cache(self.cache, {self.key: self.entry((192, 4))})
        self.assertEqual(self.start(), [])
        self.assertEqual(self.in_tuning, (192, 4))
        self.assertEqual(self.call.lookup(self.tuner), (192, 4))
        self.assertEqual(read_entries(self.cache), {self.key: self.entry((192, 4))})

    def test_a_saved_seed_does_not_outrank_a_corrected_bundle(self):
        self.start()
        self.assertEqual(self.in_tuning, SEEDED)
        self.assertEqual(read_entries(self.cache), {})
        corrected = self.corrected_bundle()
        self.start()
        self.assertEqual(self.in_tuning, corrected)

    def test_an_entry_set_by_the_user_wins_even_when_it_equals_the_old_seed(self):
        self.start()
        write_cache(self.cache, {self.key: self.entry(SEEDED)})
        self.corrected_bundle()
        for _ in range(2):
            self.start()
            self.assertEqual(self.in_tuning, SEEDED)

    def test_another_start_in_the_same_process_loads_its_own_entries(self):
        self.start()
        other = write_cache(self.dir / "other.json", {self.key: self.entry((192, 4))})
        with cpu_startup(**{**MEASURED_ARGS, "pp_size": 4}):
            with autotune_phase(cpu_runner(), other):
                self.assertEqual(self.call.lookup(self.tuner), (192, 4))
        self.assertEqual(read_entries(other), {self.key: self.entry((192, 4))})

    def test_a_crash_during_the_save_leaves_no_seed_behind(self):
        write_cache(self.cache, {"user": ["R", 1]})
        self.start()
        self.crash_in_save()
        self.assertEqual(read_entries(self.cache)[self.key], self.entry(SEEDED))
        corrected = self.corrected_bundle()
        self.start()
        self.assertEqual(self.in_tuning, corrected)
        self.assertEqual(read_entries(self.cache), {"user": ["R", 1]})
        self.assertEqual(self.leftovers(), [])

    def test_a_save_finishes_what_another_start_left(self):
        for tile, lock in (
            (64, contextlib.nullcontext()),
            (32, self.lock_held_elsewhere()),
        ):
            with self.subTest(lock=lock):
                with lock, autotune_phase(cpu_runner(), self.cache):
                    self.crash_in_save()
                    self.assertIn(self.key, read_entries(self.cache))
                self.assertEqual(read_entries(self.cache), {})
                corrected = self.corrected_bundle((tile, 1))
                self.start()
                self.assertEqual(self.in_tuning, corrected)

    def test_a_repair_does_not_need_its_journal(self):
        # A start that had no lock can finish, and so remove, a living save's journal.
        save = AutoTuner.save_configs

        def save_and_lose_journal(tuner, path):
            save(tuner, path)
            self.dir.joinpath(f".{self.cache.name}.repair").unlink()

        with patch.object(AutoTuner, "save_configs", save_and_lose_journal):
            self.start()
        self.assertEqual(read_entries(self.cache), {})

    def test_an_unfinished_save_in_a_read_only_directory_is_hidden(self):
        self.start()
        self.crash_in_save()
        corrected = self.corrected_bundle()
        for path in (self.cache, self.dir / f".{self.cache.name}.repair"):
            path.chmod(0o644)
        self.addCleanup(self.dir.chmod, 0o755)
        self.dir.chmod(0o555)

        def serve():
            drop_privileges()
            warnings = self.start()
            return [w.getMessage() for w in warnings], self.in_tuning

        ((warnings, tactic),) = run_forked(serve)
        self.assertEqual(tactic, corrected)
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn("cannot be kept", warnings[0])
        self.assertIn(self.key, read_entries(self.cache))

    def test_an_entry_that_flashinfer_did_not_trust_does_not_come_back(self):
        untrusted = {**ENVIRONMENT, "cudnn_version": "unknown"}
        content = {"_metadata": untrusted, self.key: self.entry((192, 7))}
        for crash in (False, True):
            with self.subTest(crash=crash):
                self.cache.write_text(json.dumps(content))
                with autotune_phase(cpu_runner(), self.cache):
                    self.assertEqual(self.call.lookup(self.tuner), SEEDED)
                    if crash:
                        self.crash_in_save()
                self.start()
                self.assertEqual(self.in_tuning, SEEDED)
                self.assertEqual(read_entries(self.cache), {})

    def test_an_entry_without_metadata_is_trusted_and_stays(self):
        # FlashInfer loads such a file unchecked and stamps it at the save.
        self.cache.write_text(json.dumps({self.key: self.entry((192, 7))}))
        for _ in range(2):
            self.start()
            self.assertEqual(self.in_tuning, (192, 7))

    def test_an_entry_with_more_fields_is_loaded_and_stays(self):
        content = {self.key: [*self.entry((192, 7)), "note"]}
        write_cache(self.cache, content)
        self.assertEqual(self.start(), [])
        self.assertEqual(self.in_tuning, (192, 7))
        self.assertEqual(read_entries(self.cache), content)

    def test_the_file_is_read_loaded_and_saved_under_its_lock(self):
        write_cache(self.cache, {"user": ["R", 1]})
        lock = filelock.FileLock(self.dir / f".{self.cache.name}.lock", timeout=0)
        held, free = set(), set()

        def watched(call):
            def wrapper(*args):
                if str(args[-1]) == str(self.cache):
                    try:
                        with lock:
                            free.add(call.__name__)
                    except filelock.Timeout:
                        held.add(call.__name__)
                return call(*args)

            return wrapper

        with contextlib.ExitStack() as stack:
            for owner, name in (
                (flashinfer_user_cache, "_read_cache"),
                (AutoTuner, "load_configs"),
                (AutoTuner, "save_configs"),
            ):
                call = watched(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, call))
            self.start()
        self.assertEqual(free, set())
        self.assertEqual(held, {"_read_cache", "load_configs", "save_configs"})

    def leftovers(self) -> list[str]:
        expected = {self.cache.name, f".{self.cache.name}.lock"}
        return [
            name
            for name in sorted(os.listdir(self.dir))
            if name not in expected and not name.startswith("bundle")
        ]

    def test_two_processes_starting_at_once_lose_nothing(self):
        write_cache(self.cache, {"user": ["R", 1]})
        rounds = 15

        def starts(name: str):
            def run():
                for number in range(rounds):
                    key = f"{name}_{number}"
                    tuned = write_cache(self.dir / f"{name}.json", {key: ["R", number]})
                    self.tuner.clear_cache()
                    with autotune_phase(cpu_runner(), self.cache):
                        # Stands for a tactic tuned in this start only.
                        self.tuner.load_configs(str(tuned))
                return "done"

            return run

        self.assertEqual(run_forked(starts("a"), starts("b")), ["done", "done"])
        expected = {f"{name}_{n}": ["R", n] for name in "ab" for n in range(rounds)}
        self.assertEqual(read_entries(self.cache), {"user": ["R", 1], **expected})
        self.assertEqual(self.leftovers(), ["a.json", "b.json"])

    def test_damaged_files_are_set_aside_and_the_start_goes_on(self):
        for (name, content), (pp_size, tactic), late in DAMAGED_STARTS:
            with self.subTest(name, pp_size=pp_size, while_tuning=late):
                for path in self.dir.iterdir():
                    path.unlink()
                if not late:
                    self.cache.write_bytes(content)
                (warning,) = self.start(
                    pp_size=pp_size, while_tuning=content if late else None
                )
                self.assertIn(str(self.cache), warning.getMessage())
                (kept,) = self.leftovers()
                self.assertEqual((self.dir / kept).read_bytes(), content)
                self.assertIn(kept, warning.getMessage())
                self.assertEqual(self.in_tuning, tactic)
                # Nothing of the damaged file was loaded, so nothing is saved again.
                self.assertEqual(read_entries(self.cache), {})
                self.assertEqual(self.start(pp_size=pp_size), [])

    def test_a_damaged_file_that_cannot_be_moved_stops_nothing(self):
        caches = [self.dir / f"{number}.json" for number in range(len(DAMAGED_STARTS))]
        for cache, ((_, content), _, late) in zip(caches, DAMAGED_STARTS):
            cache.write_bytes(b"{}" if late else content)
            cache.chmod(0o666)
        # The one beside the module may be out of an unprivileged user's reach.
        self.corrected_bundle(SEEDED)
        self.addCleanup(self.dir.chmod, 0o755)
        self.dir.chmod(0o555)

        def starts():
            drop_privileges()
            found = []
            for cache, (damage, (pp_size, _), late) in zip(caches, DAMAGED_STARTS):
                content = damage[1] if late else None
                flashinfer_user_cache._warned.clear()
                warnings = self.start(cache, pp_size=pp_size, while_tuning=content)
                found.append(([w.getMessage() for w in warnings], self.in_tuning))
            return found

        (found,) = run_forked(starts)
        self.assertEqual(len(found), len(caches))
        for cache, case, (warnings, tactic) in zip(caches, DAMAGED_STARTS, found):
            (name, content), (pp_size, expected), late = case
            with self.subTest(name, pp_size=pp_size, while_tuning=late):
                self.assertEqual(len(warnings), 1, warnings)
                self.assertIn(str(cache), warnings[0])
                self.assertEqual(tactic, expected)
                self.assertEqual(cache.read_bytes(), content)

    def test_damage_by_a_writer_without_the_lock_stops_nothing(self):
        save = AutoTuner.save_configs
        for content in (b"\xff\xfe\x00", b"[" * 100_000):

            def damage_and_save(tuner, path, content=content):
                self.cache.write_bytes(content)
                save(tuner, path)

            with (
                self.subTest(content[:3]),
                patch.object(AutoTuner, "save_configs", damage_and_save),
            ):
                self.cache.unlink(missing_ok=True)
                flashinfer_user_cache._warned.clear()
                (warning,) = self.start()
                self.assertIn("cannot be kept", warning.getMessage())
                self.assertEqual(self.cache.read_bytes(), content)

    def test_a_journal_that_cannot_be_read_stops_nothing(self):
        journal = self.dir / f".{self.cache.name}.repair"
        nested = b'{"loaded": {"a": ' + b"[" * 100_000
        for content in (b"", b"[", b"{}", b"\xff", b'{"loaded": 1}', nested):
            with self.subTest(content[:20]):
                journal.write_bytes(content)
                self.assertEqual(self.start(), [])
                self.assertEqual(self.in_tuning, SEEDED)

    def test_a_file_that_cannot_be_read_now_stays(self):
        write_cache(self.cache, {"user": ["R", 1]})
        load = AutoTuner.load_configs

        def broken_disk(tuner, path):
            if path == str(self.cache):
                raise OSError(errno.EIO, "Input/output error")
            return load(tuner, path)

        with patch.object(AutoTuner, "load_configs", broken_disk):
            (warning,) = self.start()
        self.assertIn(str(self.cache), warning.getMessage())
        self.assertEqual(self.leftovers(), [])
        self.assertEqual(read_entries(self.cache), {"user": ["R", 1]})

    def test_a_second_writer_of_namespaced_records_is_still_an_error(self):
        write_cache(self.cache, {})
        with self.assertRaisesRegex(RuntimeError, "one writer per cache path"):
            with autotune_phase(cpu_runner(), self.cache):
                self.tuner.publish_namespaced_records("mega", {"a": 1})
                self.cache.write_text(json.dumps({"_generation": "another"}))

    def test_a_stricter_loader_does_not_stop_the_start(self):
        write_cache(self.cache, {"user": ["R", 1]})
        content = self.cache.read_bytes()
        load = AutoTuner.load_configs

        def strict(tuner, path):
            if path == str(self.cache):
                raise KeyError("a rule of a later FlashInfer")
            return load(tuner, path)

        with patch.object(AutoTuner, "load_configs", strict):
            (warning,) = self.start()
        self.assertIn(str(self.cache), warning.getMessage())
        (kept,) = self.leftovers()
        self.assertEqual((self.dir / kept).read_bytes(), content)


class TestCacheRoot(TacticsBase):
    """SGLANG_CACHE_DIR cannot hold the cache; the cache path is the real one."""

    def start(self, root: Path, reuse_cache: bool = True) -> list[str]:
        with (
            self.assertLogs("sglang.srt", "INFO") as logs,
            cpu_startup(reuse_cache=reuse_cache, **MEASURED_ARGS),
            get_parallel().override(tp_rank=0, pp_rank=0, dp_rank=None),
            envs.SGLANG_CACHE_DIR.override(str(root)),
            patch.object(torch.cuda, "get_device_capability", return_value=(10, 3)),
        ):
            for _ in range(2):
                with warmup.flashinfer_autotune_context(self.runner, run_lm_head=False):
                    self.in_tuning = self.call.lookup(self.tuner)
        return [r.getMessage() for r in logs.records if r.levelname == "WARNING"]

    def test_a_file_where_the_directory_should_be(self):
        root = self.dir / "file"
        root.write_text("")
        (warning,) = self.start(root)
        self.assertIn(str(root), warning)
        self.assertEqual(self.in_tuning, SEEDED)
        self.assertEqual(root.read_text(), "")

    def test_fresh_tuning_goes_to_a_temporary_directory(self):
        root = self.dir / "file"
        root.write_text("")
        enter_scope(self, patch.object(tempfile, "tempdir", str(self.dir)))
        (warning,) = self.start(root, reuse_cache=False)
        self.assertIn(str(root), warning)
        self.assertIsNone(self.in_tuning)

    def test_a_read_only_root_still_serves_its_cache(self):
        self.start(self.dir)
        (cache,) = self.dir.rglob("rank_*.json")
        write_cache(cache, {self.key: self.entry((192, 4))})
        before = cache.read_bytes()
        cache.chmod(0o444)
        self.addCleanup(cache.parent.chmod, 0o755)
        cache.parent.chmod(0o555)
        for parent in (self.dir, *cache.parent.relative_to(self.dir).parents):
            (self.dir / parent).chmod(0o755)

        def serve():
            drop_privileges()
            self.tuner.clear_cache()
            return self.start(self.dir), self.in_tuning

        def discard():
            drop_privileges()
            self.tuner.clear_cache()
            flashinfer_user_cache.discard_user_cache(cache)
            flashinfer_user_cache.load_user_cache(self.tuner, cache)
            return self.call.lookup(self.tuner)

        (warnings, tactic), discarded = run_forked(serve, discard)
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn(str(cache.parent), warnings[0])
        self.assertEqual(tactic, (192, 4))
        self.assertIsNone(discarded)
        self.assertEqual(cache.read_bytes(), before)


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
