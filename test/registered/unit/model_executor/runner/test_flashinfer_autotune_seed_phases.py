"""Bundled seeds and user caches through the target and draft phases of a start.

The autotune context, the tuner and the files are real. On CPU only the streams are
stubs; the CUDA cases also tune a real grouped GEMM.
"""

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")
register_cpu_ci(est_time=25, suite="base-a-test-cpu")

import json
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

import flashinfer
import msgspec
import torch
from flashinfer.autotuner import _collect_metadata

from sglang.srt.layers.moe import kimi_k3_prefill_tactics as tactics
from sglang.srt.runtime_context import override_platform
from sglang.test.kits.flashinfer_autotune_kit import (
    autotune_phase,
    autotune_startup,
    fresh_tuner,
    make_phase_runner,
    read_entries,
    write_cache,
)
from sglang.test.kits.tunable_grouped_gemm_kit import (
    OP_NAME,
    GroupedGemmRunner,
    make_tuning_config,
    record_entry,
    reference_grouped_gemm,
    tuned_grouped_gemm,
    valid_tactics,
)
from sglang.test.test_utils import CustomTestCase, enter_override, enter_scope

# Enumerated up to 1024 tokens only, so a tuning pass cannot find it at 4096.
SEEDED_BUCKET, SEEDED_TACTIC = 4096, (32, 1)
BUCKETS = (1024, 2048, 4096, 8192)
EXPERTS, DEPTH, COLUMNS = 8, 256, 512


class SeedPhasesBase(CustomTestCase):
    """One start on the measured setup, with a record for the grouped GEMM."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.target = self.dir / "target.json"
        self.draft = self.dir / "draft.json"
        self.config = make_tuning_config(BUCKETS)
        self.gemm = GroupedGemmRunner()
        self.runner = make_phase_runner()
        self.tuner = enter_scope(self, fresh_tuner())
        enter_scope(
            self,
            autotune_startup(
                tp_size=1, pp_size=8, ep_size=1, chunked_prefill_size=16384
            ),
        )
        enter_override(self, override_platform(device_capability=(10, 3)))
        # These cases are about phases and files, whatever FlashInfer is installed.
        measured = msgspec.structs.replace(
            tactics.MEASURED, flashinfer_version=flashinfer.__version__
        )
        enter_scope(self, patch.object(tactics, "MEASURED", measured))
        self.bundle(SEEDED_TACTIC)

    def inputs(self, tokens: int, device: str = "meta") -> list[torch.Tensor]:
        x = torch.empty(tokens, DEPTH, dtype=torch.bfloat16, device=device)
        w = torch.empty(EXPERTS, COLUMNS, DEPTH, dtype=torch.bfloat16, device=device)
        return [x, w]

    def entry(self, tactic, tokens: int = SEEDED_BUCKET) -> dict[str, list]:
        return record_entry(
            runner=self.gemm,
            tuning_config=self.config,
            inputs=self.inputs(tokens),
            tactic=tactic,
        )

    def bundle(self, tactic) -> None:
        """Ship a record with ``tactic``, as an upgrade of the engine would."""
        path = self.dir / "bundle.json"
        # Without a GPU its name is "unknown", which no record may rely on.
        metadata = {
            field: "*" if value == "unknown" else value
            for field, value in _collect_metadata().items()
        }
        path.write_text(json.dumps({"_metadata": metadata, **self.entry(tactic)}))
        enter_scope(
            self, patch.object(tactics, "bundled_record_path", return_value=path)
        )

    def chosen(self, tokens: int = SEEDED_BUCKET):
        """The cached tactic for ``tokens``; None on a miss."""
        inputs = self.inputs(tokens)
        hit, _, tactic, _ = self.tuner.search_cache(
            OP_NAME,
            [self.gemm],
            tuple(tuple(tensor.shape) for tensor in inputs),
            self.config,
            inputs=inputs,
        )
        return tactic if hit else None

    def restart(self) -> None:
        self.tuner.clear_cache()
        self.runner = make_phase_runner()


class TestSeedPhases(SeedPhasesBase):
    def test_the_seed_is_a_hit_while_tuning_and_not_in_the_users_file(self):
        with autotune_phase(self.runner, self.target):
            self.assertTrue(self.tuner.is_tuning_mode)
            self.assertEqual(self.chosen(), SEEDED_TACTIC)
            self.assertIsNone(self.chosen(2048))
        self.assertEqual(self.chosen(), SEEDED_TACTIC)
        self.assertEqual(read_entries(self.target), {})

    def test_target_tactics_survive_the_drafts_load(self):
        write_cache(self.target, {"target_prefill": ["TestRunner", 7]})
        write_cache(self.draft, {"draft_decode": ["TestRunner", 3]})
        with autotune_phase(self.runner, self.target):
            pass
        self.runner.start_draft_phase()
        with (
            self.assertLogs(tactics.logger, "INFO") as logs,
            autotune_phase(self.runner, self.draft),
        ):
            self.assertEqual(self.chosen(), SEEDED_TACTIC)
        self.assertIn("runner: expected target, found draft", logs.output[0])
        saved = read_entries(self.draft)
        self.assertEqual(saved["draft_decode"], ["TestRunner", 3])
        self.assertEqual(saved["target_prefill"], ["TestRunner", 7])
        self.assertNotIn(next(iter(self.entry(SEEDED_TACTIC))), saved)

    def test_a_draft_file_cannot_change_the_targets_seeded_key(self):
        # A draft file saved before seeds were kept out of it.
        write_cache(self.draft, self.entry((128, 0)))
        with autotune_phase(self.runner, self.target):
            pass
        self.runner.start_draft_phase()
        with autotune_phase(self.runner, self.draft):
            self.assertEqual(self.chosen(), SEEDED_TACTIC)
        self.assertEqual(read_entries(self.draft), self.entry((128, 0)))

    def test_an_explicit_user_entry_wins_and_stays(self):
        write_cache(self.target, self.entry((128, 0)))
        with autotune_phase(self.runner, self.target):
            self.assertEqual(self.chosen(), (128, 0))
        self.runner.start_draft_phase()
        with autotune_phase(self.runner, self.draft):
            self.assertEqual(self.chosen(), (128, 0))
        self.assertEqual(read_entries(self.target), self.entry((128, 0)))
        self.assertEqual(read_entries(self.draft), {})

    def test_a_result_of_this_start_is_saved_for_the_seeded_key(self):
        # Neither the seed nor the user's: only what was loaded as these is put back.
        result = write_cache(self.dir / "result.json", self.entry((128, 1)))
        with autotune_phase(self.runner, self.target):
            self.tuner.load_configs(str(result))
        self.assertEqual(read_entries(self.target), self.entry((128, 1)))

    def test_a_corrected_bundle_replaces_an_older_seed(self):
        with autotune_phase(self.runner, self.target):
            pass
        self.restart()
        self.bundle((64, 0))
        with autotune_phase(self.runner, self.target):
            self.assertEqual(self.chosen(), (64, 0))

    def test_a_user_entry_equal_to_an_older_seed_still_wins(self):
        with autotune_phase(self.runner, self.target):
            pass
        write_cache(self.target, self.entry(SEEDED_TACTIC))
        self.restart()
        self.bundle((64, 0))
        with autotune_phase(self.runner, self.target):
            self.assertEqual(self.chosen(), SEEDED_TACTIC)
        self.assertEqual(read_entries(self.target), self.entry(SEEDED_TACTIC))

    def test_no_reuse_means_fresh_tuning_and_no_seed(self):
        write_cache(self.target, self.entry((128, 0)))
        with autotune_phase(self.runner, self.target):
            self.assertEqual(self.chosen(), (128, 0))
        before = self.target.read_bytes()
        with (
            autotune_startup(
                reuse_cache=False,
                tp_size=1,
                pp_size=8,
                ep_size=1,
                chunked_prefill_size=16384,
            ),
            autotune_phase(self.runner, self.target),
        ):
            self.assertIsNone(self.chosen())
        self.assertEqual(self.target.read_bytes(), before)


@unittest.skipUnless(torch.cuda.is_available(), "profiling needs CUDA")
class TestSeedProfiling(SeedPhasesBase):
    """A tuning pass profiles the seeded bucket's neighbours and not the bucket."""

    def real_inputs(self, tokens: int) -> list[torch.Tensor]:
        torch.manual_seed(tokens)
        return [torch.randn_like(tensor) for tensor in self.inputs(tokens, "cuda")]

    def tune(self, tokens: int = BUCKETS[-1]):
        with autotune_phase(self.runner, self.target):
            return tuned_grouped_gemm(
                self.tuner, self.gemm, self.config, *self.real_inputs(tokens)
            )

    def profiled(self) -> dict[int, set]:
        """token count -> tactics launched, by the op's own launch counters."""
        found: dict[int, set] = {}
        for tokens, tactic in self.gemm.launches:
            found.setdefault(tokens, set()).add(tactic)
        return found

    def test_the_tuning_pass_skips_the_seeded_bucket_only(self):
        self.tune()
        profiled = self.profiled()
        stats = self.tuner.stats
        print(
            f"buckets {BUCKETS}: total {stats.tuned_op_total_configs[OP_NAME]}, "
            f"profiled {stats.tuned_op_successful_configs[OP_NAME]}, "
            f"launches { ({n: len(t) for n, t in sorted(profiled.items())}) }"
        )
        self.assertEqual(stats.tuned_op_total_configs[OP_NAME], len(BUCKETS))
        self.assertEqual(stats.tuned_op_successful_configs[OP_NAME], len(BUCKETS) - 1)
        for bucket in BUCKETS:
            with self.subTest(bucket=bucket):
                if bucket == SEEDED_BUCKET:
                    self.assertNotIn(bucket, profiled)
                else:
                    offered = set(valid_tactics(bucket, experts=EXPERTS))
                    self.assertLessEqual(offered, profiled[bucket])
        self.assertEqual(self.chosen(), SEEDED_TACTIC)
        self.assertNotIn(SEEDED_TACTIC, valid_tactics(SEEDED_BUCKET, experts=EXPERTS))
        self.assertEqual(len(read_entries(self.target)), len(BUCKETS) - 1)

    def test_without_the_policy_the_bucket_would_be_profiled(self):
        # The control: what the record's third field is for.
        key, entry = self.entry(SEEDED_TACTIC).popitem()
        write_cache(self.target, {key: entry[:2]})
        self.tune()
        self.assertIn(SEEDED_BUCKET, self.profiled())
        self.assertNotEqual(self.chosen(), SEEDED_TACTIC)

    def test_the_seeded_tactic_runs_and_is_right(self):
        self.tune()
        x, w = self.real_inputs(SEEDED_BUCKET)
        self.gemm.launches.clear()
        out, tactic = tuned_grouped_gemm(self.tuner, self.gemm, self.config, x, w)
        self.assertEqual(tactic, SEEDED_TACTIC)
        self.assertEqual(dict(self.gemm.launches), {(len(x), SEEDED_TACTIC): 1})
        expected = reference_grouped_gemm(x, w)
        error = (out.float() - expected).abs().max()
        rounding = (expected.bfloat16().float() - expected).abs().max()
        self.assertLessEqual(error.item(), 2 * rounding.item())

    def test_a_second_start_profiles_nothing(self):
        self.tune()
        self.restart()
        self.tuner.reset_statistics()
        self.gemm.launches.clear()
        _, tactic = self.tune(SEEDED_BUCKET)
        self.assertEqual(tactic, SEEDED_TACTIC)
        self.assertEqual(self.tuner.stats.tuned_op_successful_configs, {})
        self.assertEqual(dict(self.gemm.launches), {(SEEDED_BUCKET, tactic): 1})


if __name__ == "__main__":
    unittest.main()
