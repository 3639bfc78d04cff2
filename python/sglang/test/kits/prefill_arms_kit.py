"""Serve one model in several prefill arms and compare what they answer.

An arm is a server command line with the log lines that prove its path. Arms run one
after the other on the same GPUs; the last one stays up for the other kits of a class.
"""

import tempfile
import unittest
from pathlib import Path

import msgspec
import numpy as np
import requests
import torch

from sglang.test.kl_multiturn_utils import (
    make_mamba_decode_assert,
    make_mamba_prefill_assert,
    test_input_output_logprobs_match_prefill_cache_hit_helper,
)
from sglang.test.test_utils import (
    _wait_for_gpu_idle_in_ci,
    popen_launch_server,
    terminate_and_kill_process_tree,
)

_GPU_IDLE_TIMEOUT = 120
_REQUEST_TIMEOUT = 600
_LOG_TAIL_LINES = 60
_PREFIXES = 2
_BRANCHES = 2


class PrefillArm(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    server_args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    # Substrings that the server log must hold, and must not hold.
    log_has: tuple[str, ...] = ()
    log_lacks: tuple[str, ...] = ()


class PrefillArmsMixin:
    """Mix into ``DefaultServerBase``, before it; the subclass sets what has no value."""

    # The first arm is the reference.
    arms: tuple[PrefillArm, ...]
    min_gpus: int
    capabilities: tuple[tuple[int, int], ...]

    # Prompt tokens. Each prompt repeats one random span, so that the continuation
    # is a copy and no near-tie decides it; a wrong state breaks the copy.
    prompt_lengths: tuple[int, ...]
    prompt_runs: int = 2
    prompt_span: int = 167
    prompt_vocab: tuple[int, int] = (1000, 50_000)
    new_tokens: int = 16

    # Branches of one prefix: tokens, the cache's boundaries, bound of the mean KL.
    branch_prefix: int = 8320
    branch_new_tokens: int = 64
    cache_chunk_size: int = 64
    track_interval: int = 256
    branch_kl_thres: float

    process = None
    _log_dir = None

    @classmethod
    def missing_hardware(cls) -> str | None:
        """What this machine lacks, or None."""
        found = [
            torch.cuda.get_device_capability(index)
            for index in range(torch.cuda.device_count())
        ]
        if len(found) >= cls.min_gpus and set(found) <= set(cls.capabilities):
            return None
        wanted = " or ".join(f"{major}.{minor}" for major, minor in cls.capabilities)
        return (
            f"needs {cls.min_gpus} GPUs of compute capability {wanted}, found "
            f"{found or 'none'}"
        )

    @classmethod
    def setUpClass(cls):
        missing = cls.missing_hardware()
        if missing:
            raise unittest.SkipTest(missing)
        cls._log_dir = tempfile.TemporaryDirectory(prefix="prefill_arms_")
        cls.outputs = {}
        for arm in cls.arms:
            cls.stop_server()
            cls.start_arm(arm)
            cls.outputs[arm.name] = cls.greedy_outputs()

    @classmethod
    def tearDownClass(cls):
        cls.stop_server()
        if cls._log_dir is not None:
            cls._log_dir.cleanup()

    @classmethod
    def log_path(cls, arm: PrefillArm) -> Path:
        return Path(cls._log_dir.name) / f"{arm.name}.log"

    @classmethod
    def start_arm(cls, arm: PrefillArm) -> None:
        log_path = cls.log_path(arm)
        # The pipe readers of popen_launch_server own the handle until the end.
        log = open(log_path, "w", encoding="utf-8")
        try:
            cls.process = popen_launch_server(
                cls.model,
                cls.base_url,
                timeout=cls.timeout,
                other_args=[*cls.other_args, *arm.server_args],
                env=arm.env,
                return_stdout_stderr=(log, log),
            )
        except Exception:
            print(f"--- arm {arm.name} did not start ---\n{_tail(log_path)}")
            raise

    @classmethod
    def stop_server(cls) -> None:
        if cls.process is not None:
            process, cls.process = cls.process, None
            terminate_and_kill_process_tree(process)
            _wait_for_gpu_idle_in_ci(timeout=_GPU_IDLE_TIMEOUT)

    @classmethod
    def copy_prompt(cls, *, length: int, seed: int) -> list[int]:
        """``length`` token ids that repeat one random span."""
        low, high = cls.prompt_vocab
        span = np.random.RandomState(seed).randint(low, high, size=cls.prompt_span)
        return np.resize(span, length).tolist()

    @classmethod
    def greedy_outputs(cls) -> dict[tuple[int, int], list[int]]:
        """Output ids by (prompt tokens, run), each from a cold cache."""
        outputs = {}
        for length in cls.prompt_lengths:
            for run in range(cls.prompt_runs):
                cls.flush_cache()
                response = requests.post(
                    cls.base_url + "/generate",
                    json={
                        "input_ids": cls.copy_prompt(length=length, seed=length),
                        "sampling_params": {
                            "temperature": 0,
                            "max_new_tokens": cls.new_tokens,
                            "ignore_eos": True,
                        },
                    },
                    timeout=_REQUEST_TIMEOUT,
                )
                response.raise_for_status()
                outputs[length, run] = response.json()["output_ids"]
        return outputs

    def test_server_log_states_the_path(self):
        for arm in self.arms:
            log = self.log_path(arm).read_text(encoding="utf-8")
            for line in arm.log_has:
                with self.subTest(arm=arm.name, has=line):
                    self.assertTrue(line in log, f"{line!r} is not in the server log")
            for line in arm.log_lacks:
                with self.subTest(arm=arm.name, lacks=line):
                    self.assertFalse(line in log, f"{line!r} is in the server log")

    def test_greedy_outputs_equal_the_reference(self):
        reference = self.outputs[self.arms[0].name]
        for arm in self.arms:
            for (length, run), output in self.outputs[arm.name].items():
                with self.subTest(arm=arm.name, tokens=length, run=run):
                    self.assertEqual(len(output), self.new_tokens)
                    self.assertEqual(output, reference[length, 0])

    def test_cached_branches_match_cold_scores(self):
        """Branches take turns on a cached prefix; scores equal those of a cold replay."""
        count = _PREFIXES * _BRANCHES
        prefixes = [
            self.copy_prompt(length=self.branch_prefix, seed=index // _BRANCHES)
            for index in range(count)
        ]
        suffixes = [
            self.copy_prompt(length=self.prompt_span, seed=count + index)
            for index in range(2 * count)
        ]
        test_input_output_logprobs_match_prefill_cache_hit_helper(
            base_url=self.base_url,
            model_name=self.model,
            kl_threshold=self.branch_kl_thres,
            prefix_input_ids=prefixes,
            full_input_ids=[
                prefix + suffix for prefix, suffix in zip(prefixes, suffixes)
            ],
            turn_suffixes=[suffixes[count:]],
            branches_per_group=_BRANCHES,
            max_new_tokens=self.branch_new_tokens,
            assert_prefill_cached_tokens=make_mamba_prefill_assert(
                self.cache_chunk_size
            ),
            assert_decode_cached_tokens=make_mamba_decode_assert(self.track_interval),
            sampling_temperature=0,
        )


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
