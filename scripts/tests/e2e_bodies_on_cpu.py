"""Runs the bodies of the registered prefill tests against one real CPU server.

    XDG_CACHE_HOME=SCRATCH python scripts/tests/e2e_bodies_on_cpu.py TESTS SCRATCH

The model is a two-layer GPT-2 with random weights and the hardware gates are opened,
so this shows that the bodies run and can fail; it says nothing about Kimi-K3 or GLM.
All arms of a class are the same server. Started by test_e2e_bodies_on_cpu.py, which
reads SCRATCH/outcomes.json: {test: [outcome, reason or errors]}.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch
from flashinfer.autotuner import AutoTuner
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from sglang.srt.environ import envs
from sglang.srt.layers.moe import kimi_k3_prefill_tactics
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port_below_ephemeral
from sglang.test import kl_test_utils, simple_eval_mixed_prefix_gsm8k
from sglang.test.kits.prefill_arms_kit import PrefillArm, PrefillArmsMixin
from sglang.test.server_fixtures.default_fixture import DefaultServerBase

TESTS, SCRATCH = Path(sys.argv[1]), Path(sys.argv[2])
VOCAB = 512
READY = "The server is fired up and ready to roll!"
CPU_ARGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
    "--sleep-on-idle",
    *("--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "65536"),
    *("--chunked-prefill-size", "1024"),
]
# What the one server starts with; its log and its process show both.
SERVED = PrefillArm(
    name="served",
    server_args=("--random-seed", "4711"),
    env={"SGLANG_LOG_MS": "1"},
)
SAME_SERVER_ARMS = (
    PrefillArm(
        name="base",
        log_has=(READY, "'random_seed': 4711,"),
        log_lacks=("no such line",),
    ),
    PrefillArm(name="other", log_has=(READY,)),
)


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def make_model(folder: Path) -> None:
    """Random weights, and a byte tokenizer whose vocabulary has the kits' words."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=8192,
        n_embd=256,
        n_layer=2,
        n_head=4,
        # Wide enough that another prefix changes the next token.
        initializer_range=0.1,
        bos_token_id=0,
        # Half of all tokens end an answer, so that GSM8K's are short.
        eos_token_id=list(range(VOCAB // 2, VOCAB)),
    )
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    symbols = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>"
    ).save_pretrained(folder)


def write_kit_data(model: str) -> Path:
    """Prompts for the KL kit in its own cache, and GSM8K-shaped questions."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 256) for _ in range(150)] for _ in range(48)]
    cache = Path(kl_test_utils.CACHE_DIR)
    cache.mkdir(parents=True)
    name = f"input_ids_{model.replace('/', '_')}_3000_48.json"
    (cache / name).write_text(json.dumps(prompts))
    questions = SCRATCH / "questions.jsonl"
    line = json.dumps({"question": "How much is 1 + 1?", "answer": "#### 2"})
    questions.write_text(f"{line}\n" * 8)
    return questions


class OneServer:
    """Opens the hardware gate and lets every arm of every class share one server."""

    shared: subprocess.Popen | None = None
    model = str(SCRATCH / "model")
    other_args = CPU_ARGS
    arms = SAME_SERVER_ARMS
    # A generous bound: a loaded machine takes minutes, an idle one 25 s.
    timeout = 900
    min_gpus = 0
    prompt_vocab = (1, VOCAB)
    # The last one takes two chunks.
    prompt_lengths = (64, 1025)
    new_tokens = 4
    branch_prefix = 300
    prompt_span = 40
    branch_new_tokens = 4
    cache_chunk_size = 1
    track_interval = 1

    @classmethod
    def log_path(cls, arm):
        return SCRATCH / "server.log"

    @classmethod
    def start_arm(cls, arm):
        if OneServer.shared is None:
            super().start_arm(SERVED)
            OneServer.shared = cls.process
            (SCRATCH / "server.pid").write_text(str(cls.process.pid))
        cls.process = OneServer.shared

    @classmethod
    def stop_server(cls):
        cls.process = None


kimi = load("test_kimi_k3_prefill_arms_b300")
glm = load("test_glm53_flash_kda_flashinfer_prefill_b200")


class KimiOnCpu(OneServer, kimi.TestKimiK3PrefillArmsB300):
    gsm8k_score_threshold = 0.0
    gsm8k_num_examples = 2
    kl_div_max_samples = 2
    kl_div_prefill_max_new_tokens = 4
    kl_div_decode_max_new_tokens = 4

    def test_env_of_an_arm_reaches_the_server(self):
        environ = Path(f"/proc/{OneServer.shared.pid}/environ").read_bytes()
        self.assertIn(b"SGLANG_LOG_MS=1", environ.split(b"\0"))

    @unittest.skip("an attention model's cache hits a branch at the second request")
    def test_prefix_cache_branching(self):
        pass


class GlmOnCpu(OneServer, glm.TestGLM53FlashKdaFlashInferPrefillB200):
    prompt_lengths = (64,)

    @unittest.skip("the same body as in KimiOnCpu")
    def test_gsm8k(self):
        pass


class CommandLines(unittest.TestCase):
    """What no CPU server can show: the flags exist, the log line is the module's."""

    def test_flags_exist(self):
        parser = argparse.ArgumentParser(exit_on_error=False)
        ServerArgs.add_cli_args(parser)
        for case in (
            kimi.TestKimiK3PrefillArmsB300,
            glm.TestGLM53FlashKdaFlashInferPrefillB200,
        ):
            for arm in case.arms:
                command = ["--model-path", case.model, *case.other_args]
                _, unknown = parser.parse_known_args([*command, *arm.server_args])
                self.assertEqual(unknown, [])

    def test_base_arm_is_not_seeded(self):
        """Cache reuse off is the gate's first rule: the runner is not looked at."""
        base = kimi.TestKimiK3PrefillArmsB300.arms[0]
        self.assertEqual(base.env, {"SGLANG_FLASHINFER_AUTOTUNE_CACHE": "0"})
        sized = get_context().override_server_args(
            tp_size=1, pp_size=8, chunked_prefill_size=16384
        )
        with (
            sized,
            envs.SGLANG_FLASHINFER_AUTOTUNE_CACHE.override(False),
            self.assertLogs(kimi_k3_prefill_tactics.logger) as logs,
        ):
            decision = kimi_k3_prefill_tactics.seed_kimi_k3_prefill_tactics(
                AutoTuner(), unittest
            )
        self.assertFalse(decision.seeded)
        self.assertIn(kimi.NOT_SEEDED, logs.output[0])


class BrokenOnCpu(OneServer, PrefillArmsMixin, DefaultServerBase):
    """Every body here must fail."""

    arms = (
        PrefillArm(name="base", log_has=("no such line",)),
        PrefillArm(name="other", log_lacks=(READY,)),
    )
    capabilities = ()
    prompt_lengths = (64,)
    # Not even equal scores are below this.
    branch_kl_thres = 0.0

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.outputs["other"][64, 1][-1] += 1


class WrongPrefixStateOnCpu(OneServer, PrefillArmsMixin, DefaultServerBase):
    """The cold replay sees another prefix: what a shared state slot looks like."""

    capabilities = ()
    prompt_lengths = ()
    branch_kl_thres = kimi.TestKimiK3PrefillArmsB300.branch_kl_thres
    # Not this class's business, and no names that unittest would run.
    test_greedy_outputs_equal_the_reference = None
    test_server_log_states_the_path = None

    def test_cached_branches_match_cold_scores(self):
        real = kl_test_utils._generate

        def other_prefix(base_url, input_ids, max_new_tokens, **kwargs):
            if max_new_tokens == 0 and kwargs.get("return_logprob"):
                start = self.branch_prefix - 50
                input_ids = [[7] * start + ids[start:] for ids in input_ids]
            return real(base_url, input_ids, max_new_tokens, **kwargs)

        with mock.patch.object(kl_test_utils, "_generate", other_prefix):
            super().test_cached_branches_match_cold_scores()


class Outcomes(unittest.TextTestResult):
    """Also keeps each test's outcome and the texts of all its failed subtests."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {}

    def note(self, test, outcome, text=""):
        name = test.id().removeprefix("__main__.")
        before, said = self.seen.get(name, ("", ""))
        if before == outcome == "failed":
            text = f"{said}\n{text}"
        if before != "failed" or outcome == "failed":
            self.seen[name] = (outcome, text)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note(test, "ok")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "skipped", reason)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.note(test, "failed", str(err[1]))

    def addError(self, test, err):
        super().addError(test, err)
        # CustomTestCase wraps what the body raised.
        self.note(test, "failed", f"{err[1]!r} after {err[1].__context__!r}")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.note(test, "failed", str(err[1]))


def main() -> None:
    make_model(SCRATCH / "model")
    questions = write_kit_data(OneServer.model)
    OneServer.base_url = f"http://127.0.0.1:{get_free_port_below_ephemeral()}"
    loader = unittest.defaultTestLoader
    suite = unittest.TestSuite(
        loader.loadTestsFromModule(module)
        for module in (kimi, glm, sys.modules["__main__"])
    )
    local_questions = mock.patch.object(
        simple_eval_mixed_prefix_gsm8k,
        "download_and_cache_file",
        return_value=str(questions),
    )
    try:
        with local_questions:
            result = unittest.TextTestRunner(resultclass=Outcomes).run(suite)
    finally:
        PrefillArmsMixin.process = OneServer.shared
        PrefillArmsMixin.stop_server()
    (SCRATCH / "outcomes.json").write_text(json.dumps(result.seen))


if __name__ == "__main__":
    main()
