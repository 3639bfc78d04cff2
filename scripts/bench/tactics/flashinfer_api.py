"""The FlashInfer and torch names this package uses, all of them public."""

from ..errors import BenchError

try:
    import torch
    from flashinfer.autotuner import (
        AutoTuner,
        OptimizationProfile,
        ProfilingCacheKey,
        StaticDim,
        TunableRunner,
        TuningConfig,
        autotune,
    )
    from flashinfer.tactics_blocklist import TacticsBlocklist
except ImportError as error:
    raise BenchError(
        f"tactics needs torch and FlashInfer, and importing them failed: {error}; "
        "run it with the Python of the engine"
    ) from error

__all__ = [
    "AutoTuner",
    "OptimizationProfile",
    "ProfilingCacheKey",
    "StaticDim",
    "TacticsBlocklist",
    "TunableRunner",
    "TuningConfig",
    "autotune",
    "torch",
]
