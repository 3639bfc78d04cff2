"""A start that matches the Kimi-K3 prefill tactic record, for tests on CPU.

The tuner, the record and the files are real; the device and what FlashInfer reads of
it are stated. ``run_forked`` runs parts of a test in processes of their own.
"""

import functools
import json
import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path
from unittest.mock import patch

from flashinfer.autotuner import _collect_metadata

from sglang.srt.layers.moe import kimi_k3_prefill_tactics as tactics
from sglang.srt.layers.moe.kimi_k3_prefill_tactics import (
    bundled_record_path,
    seed_kimi_k3_prefill_tactics,
)
from sglang.srt.runtime_context import override_platform
from sglang.test.kits.flashinfer_autotune_kit import (
    autotune_startup,
    fresh_tuner,
    make_phase_runner,
    stated_environment,
)
from sglang.test.kits.kimi_k3_moe_call_kit import capture_moe_call
from sglang.test.test_utils import CustomTestCase, enter_override, enter_scope

MEASURED_ARGS = dict(tp_size=1, pp_size=8, ep_size=1, chunked_prefill_size=16384)
SEEDED = (128, 4)
RECORD = bundled_record_path()
INSTALLED = _collect_metadata()
FORK = multiprocessing.get_context("fork")
# Forked children cannot use a CUDA context, so a device that is there stays unused.
cpu_runner = functools.partial(make_phase_runner, on_cuda=False)
cpu_startup = functools.partial(autotune_startup, on_cuda=False)


@functools.cache
def record_environment() -> dict[str, str]:
    """What FlashInfer reads where the record applies, but for the GPU: there is none."""
    metadata = json.loads(RECORD.read_text())["_metadata"]
    return {field: metadata[field] for field in INSTALLED} | {"gpu": "unknown"}


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
        enter_scope(self, stated_environment(record_environment()))
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
