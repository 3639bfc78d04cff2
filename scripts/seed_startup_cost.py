"""Print what the Kimi-K3 tactic seed costs at engine start, on this machine.

    PYTHONPATH=<engine>/python python scripts/seed_startup_cost.py [--repeat 200]

Needs the patched engine's packages (FlashInfer, torch), no GPU. Three cases, each the
real decision against the real tuner and the real record:

  process-wide rule fails   what every other engine pays
  runner rule fails         another model on the measured setup
  seeded                    the record is read, checked, compared, and loaded

The first seeded decision of a process also makes FlashInfer collect its environment
(it imports cuDNN for that). FlashInfer keeps the result and needs it for its own load
and save of the user's cache in the same start, so that line is printed apart.
Nothing is asserted; the aims are 5 ms when the seed does not apply, 50 ms when it does.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable

from flashinfer.autotuner import AutoTuner, _collect_metadata

from sglang.srt.layers.moe.kimi_k3_prefill_tactics import (
    SeedDecision,
    seed_kimi_k3_prefill_tactics,
)
from sglang.srt.runtime_context import override_platform
from sglang.test.kits.flashinfer_autotune_kit import (
    PhaseRunner,
    autotune_startup,
    make_phase_runner,
)

MEASURED = {"tp_size": 1, "pp_size": 8, "ep_size": 1, "chunked_prefill_size": 16384}


def decide(runner: PhaseRunner) -> SeedDecision:
    return seed_kimi_k3_prefill_tactics(AutoTuner.get(), runner)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) milliseconds of one call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3


def report(name: str, runner: PhaseRunner, repeat: int, *, seeded: bool) -> None:
    found = decide(runner)
    if found.seeded is not seeded:
        raise SystemExit(f"{name}: expected seeded={seeded}, found {found}")
    walls, cpus = zip(*(timed(lambda: decide(runner)) for _ in range(repeat)))
    p99 = sorted(walls)[int(0.99 * (repeat - 1))]
    columns = (statistics.median(walls), p99, max(walls))
    columns += (statistics.median(cpus), max(cpus))
    print(f"{name:<26}" + "".join(f"{value:>10.3f}" for value in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=200, help="calls per case")
    repeat = parser.parse_args().repeat
    if repeat < 1:
        parser.error(f"--repeat must be at least 1, got {repeat}")
    logging.disable(logging.WARNING)
    kimi = make_phase_runner()
    other = make_phase_runner(architecture="DeepseekV3ForCausalLM")
    with override_platform(device_capability=(10, 3)):
        with autotune_startup(**MEASURED):
            first, _ = timed(lambda: decide(kimi))
            collect, _ = timed(_collect_metadata)
        titles = ("median", "p99", "max", "CPU med", "CPU max")
        print(f"{'milliseconds':<26}" + "".join(f"{title:>10}" for title in titles))
        with autotune_startup(**{**MEASURED, "tp_size": 8}):
            report("process-wide rule fails", kimi, repeat, seeded=False)
        with autotune_startup(**MEASURED):
            report("runner rule fails", other, repeat, seeded=False)
            report("seeded", kimi, repeat, seeded=True)
    print(
        f"first seeded decision of the process: {first:.1f} ms, FlashInfer's first look "
        f"at its environment included (later looks: {collect:.2f} ms)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
