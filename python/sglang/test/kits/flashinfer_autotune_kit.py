"""Fixtures for FlashInfer autotune startup: target phase, then draft phase.

The real ``flashinfer_autotune_context`` and the real AutoTuner run; only the model
runner is a stand-in, and on a machine without CUDA the two stream calls are, too.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import msgspec
import torch
from flashinfer import autotuner
from flashinfer.autotuner import AutoTuner
from flashinfer.autotuner import autotuner as autotuner_impl

from sglang.srt.environ import envs
from sglang.srt.model_executor.runner import flashinfer_autotune as warmup
from sglang.srt.runtime_context import get_context, get_parallel


class StubStream:
    """Stands in for a CUDA stream where there is no CUDA; work is synchronous."""

    def wait_stream(self, stream: "StubStream") -> None:
        assert isinstance(stream, StubStream)


class HfConfig(msgspec.Struct):
    architectures: list[str]


class PhaseModelConfig(msgspec.Struct):
    hf_config: HfConfig
    quantization: Optional[str] = None


class PhaseRunner(msgspec.Struct, weakref=True):
    """The ModelRunner fields that autotune startup reads, and nothing else.

    A phase starts as the target's; ``start_draft_phase`` makes it the draft's.
    """

    device: str
    forward_stream: Any
    model_config: PhaseModelConfig
    dtype: torch.dtype = torch.bfloat16
    is_draft_worker: bool = False
    gpu_id: int = 0

    def start_draft_phase(self) -> None:
        self.is_draft_worker = True


class TensorParallelGroup(msgspec.Struct):
    """The two fields of the TP GroupCoordinator that autotune startup reads."""

    world_size: int = 1
    cpu_group: Optional[torch.distributed.ProcessGroup] = None


def make_phase_runner(
    *,
    architecture: str = "KimiK3ForConditionalGeneration",
    on_cuda: Optional[bool] = None,
) -> PhaseRunner:
    """A target-phase runner; by default on CUDA where there is a device."""
    on_cuda = torch.cuda.is_available() if on_cuda is None else on_cuda
    return PhaseRunner(
        device="cuda" if on_cuda else "cpu",
        forward_stream=torch.cuda.Stream() if on_cuda else StubStream(),
        model_config=PhaseModelConfig(hf_config=HfConfig([architecture])),
    )


def write_cache(path: Path, entries: dict[str, list]) -> Path:
    """A cache file as FlashInfer would save it in this environment."""
    metadata = autotuner._collect_metadata()
    path.write_text(json.dumps({"_metadata": metadata, **entries}))
    return path


def read_entries(path: Path) -> dict[str, list]:
    """The tactic entries of a cache file, without FlashInfer's own fields."""
    content = json.loads(path.read_text())
    return {key: value for key, value in content.items() if not key.startswith("_")}


@contextlib.contextmanager
def stated_environment(fields: dict[str, str]) -> Iterator[None]:
    """Let FlashInfer read ``fields`` as its environment, whatever is installed."""
    with (
        patch.object(autotuner, "_collect_metadata", lambda: dict(fields)),
        patch.object(autotuner_impl, "_collect_metadata", lambda: dict(fields)),
    ):
        yield


@contextlib.contextmanager
def fresh_tuner() -> Iterator[AutoTuner]:
    """The process's tuner, emptied before and after."""
    tuner = AutoTuner.get()
    tuner.clear_cache()
    tuner.reset_statistics()
    try:
        yield tuner
    finally:
        tuner.clear_cache()


@contextlib.contextmanager
def autotune_startup(
    *,
    reuse_cache: bool = True,
    on_cuda: Optional[bool] = None,
    cpu_group: Optional[torch.distributed.ProcessGroup] = None,
    **server_args: Any,
) -> Iterator[None]:
    """The process-wide state of one engine start: configuration, groups, streams."""
    tp_group = TensorParallelGroup(
        world_size=server_args.get("tp_size", 1), cpu_group=cpu_group
    )
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(get_context().override_server_args(**server_args))
        enter(get_parallel().override(tp_group=tp_group))
        enter(envs.SGLANG_FLASHINFER_AUTOTUNE_CACHE.override(reuse_cache))
        if not (torch.cuda.is_available() if on_cuda is None else on_cuda):
            stub = StubStream()
            enter(patch.object(torch.cuda, "current_stream", lambda *_: stub))
            enter(patch.object(torch.cpu, "stream", contextlib.nullcontext))
        yield


@contextlib.contextmanager
def autotune_phase(runner: PhaseRunner, cache: Path) -> Iterator[None]:
    """One pass through the autotune context, with ``cache`` as the user's file."""
    with (
        patch.object(warmup, "flashinfer_autotune_cache_path", return_value=cache),
        warmup.flashinfer_autotune_context(runner, run_lm_head=False),
    ):
        yield
