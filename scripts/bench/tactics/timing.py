"""How long one tactic takes, measured the way FlashInfer measures it."""

from typing import Any, Protocol

from ..errors import BenchError
from .case import OpCase
from .flashinfer_api import AutoTuner, torch


class Clock(Protocol):
    """Times single tactics of one case."""

    name: str

    def time_ms(self, tactic: Any) -> float:
        """Milliseconds of one call with `tactic`."""


class FlashInferClock:
    """AutoTuner's own profiling under the op's measurement policy.

    `prepare_tactic_profile` and `profile_tactic` are its public entry points:
    cold L2 and CUDA-graph replays where the op's TuningConfig asks for them,
    the median of `repeat` replays after `warmup` calls.
    """

    def __init__(self, case: OpCase, *, warmup: int = 3, repeat: int = 10):
        if not torch.cuda.is_available():
            raise BenchError(
                "FlashInfer's profiling needs a CUDA device and this machine has none; "
                "run it on the machine the record is for"
            )
        self._case = case
        self._tuner = AutoTuner(warmup=warmup, repeat=repeat)
        self._config, self._batches = self._tuner.prepare_tactic_profile(
            case.inputs, case.tuning_config
        )
        policy = dict(zip(case.policy[::2], case.policy[1::2], strict=True))
        self.name = (
            f"flashinfer profile_tactic, {policy['l2_cache_policy']} L2, "
            f"{'CUDA graph' if case.tuning_config.use_cuda_graph else 'eager'}, "
            f"{repeat} samples"
        )

    def time_ms(self, tactic: Any) -> float:
        """Milliseconds of one call. Raises what the op raises."""
        return self._tuner.profile_tactic(
            self._case.runner,
            self._case.inputs,
            tactic,
            self._config,
            self._batches,
            **self._case.kwargs,
        )
