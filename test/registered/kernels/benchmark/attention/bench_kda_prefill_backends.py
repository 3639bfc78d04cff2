"""KDA prefill of one Kimi-K3 layer on every backend that this machine can run.

Times ``extend`` after the causal conv (q, k, v dense, beta a slice of the fused
projection) with a cold L2. A backend that is missing is listed with its reason; one
that ran the Triton chunk kernels instead of its own is marked ``(triton)``. A backend
whose output or states differ from Triton's has no time.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Optional

import torch

from sglang.kernels.jit.benchmark import marker
from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_prefill import (
    build_flashinfer_kda_checkpoint_plan,
)
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.kda_planned_prefill_kit import (
    KDALayer,
    KDAPrefillBatch,
    call_extend,
    make_forward_batch,
    make_layer,
    make_metadata,
    make_pool,
)

register_cuda_ci(
    est_time=120, stage="base-b-kernel-benchmark", runner_config="1-gpu-large"
)

BACKENDS = (
    "triton",
    "flashinfer",
    "flashinfer_per_call",
    "ptx_kda",
    "nvidia_kda",
    "cutedsl",
    "flashkda",
    "helion",
)
# Heads of one Kimi-K3 rank at TP8 and at TP1.
LENGTHS = {
    "1x16384": (16384,),
    "8x16384": (16384,) * 8,
    "mixed": (8320, 167, 1, 7896),
}
SHAPES = [
    (12, "1x16384"),
    (12, "8x16384"),
    (12, "mixed"),
    (96, "1x16384"),
    (96, "mixed"),
]
INTERVAL = 64
# Normalised RMS against Triton: two bfloat16 orders of the same recurrence.
MAX_ERROR = 2e-2
# The state kernel of chunk_kda: its launch means that Triton did the work.
TRITON_MARK = "chunk_gated_delta_rule_fwd"


class Case:
    """One batch of one layer on the device, and how a backend runs it."""

    def __init__(self, *, heads: int, lengths: str, track: bool):
        rows = tuple((0, n, n if track and n >= 64 else None) for n in LENGTHS[lengths])
        self.batch = KDAPrefillBatch(rows=rows, interval=INTERVAL)
        self.heads = heads
        self.layer: KDALayer = make_layer(
            self.batch.num_tokens,
            heads=heads,
            seed=0,
            device="cuda",
            beta_pitch=heads + 128,
            beta_offset=128,
        )
        self.values = self.layer.v.clone()
        self.initial = make_pool(self.batch, heads=heads, device="cuda")
        self.track = track

    def prepare(self, dispatcher: KDAKernelDispatcher, pool: torch.Tensor):
        """What the metadata step does once a batch; returns the metadata."""
        metadata = make_metadata(self.batch, "cuda")
        metadata.mamba_cache_indices = metadata.mamba_cache_indices.int()
        forward_batch = make_forward_batch(self.batch, "cuda")
        kernel = dispatcher.extend_kernel
        if kernel.plans_prefill:
            kernel.plan(
                forward_batch=forward_batch,
                metadata=metadata,
                pool=pool,
                interval=INTERVAL,
            )
        elif kernel.uses_state_checkpoints and metadata.track_ssm_h_src.numel():
            build_flashinfer_kda_checkpoint_plan(
                forward_batch, metadata, torch.device("cuda"), INTERVAL
            )
        return metadata

    def start(self) -> torch.Tensor:
        """A fresh pool, and v as the conv left it: chunk_kda writes its output there."""
        self.layer.v.copy_(self.values)
        return self.initial.clone()

    def run(self, dispatcher: KDAKernelDispatcher, metadata, states: torch.Tensor):
        """The KDA part of KDAAttnBackend.forward_extend, snapshots included."""
        buffer = None
        if self.track and metadata.track_ssm_h_src.numel():
            buffer = torch.empty(
                (len(self.batch.rows), *states.shape[1:]), device="cuda"
            )
        output = call_extend(
            kernel=dispatcher,
            metadata=metadata,
            layer=self.layer,
            states=states,
            beta_is_raw=True,
            extend_seq_lens_cpu=self.batch.lens,
            is_spec_decode=False,
            track_ssm_h_src=metadata.track_ssm_h_src if self.track else None,
            track_state=buffer,
            track_chunk_idx=metadata.track_chunk_idx if buffer is not None else None,
            state_checkpoint_cu_starts=metadata.state_checkpoint_cu_starts,
            num_state_checkpoints=metadata.num_state_checkpoints,
            state_checkpoint_every_n_tokens=metadata.state_checkpoint_every_n_tokens,
            state_checkpoint_indices=metadata.state_checkpoint_indices,
            track_ssm_h_batch_src=metadata.track_ssm_h_batch_src,
        )
        if not self.track:
            return output
        if buffer is not None:
            states[metadata.track_ssm_h_dst] = buffer[metadata.track_ssm_h_batch_src]
        if metadata.track_ssm_final_src.numel():
            states[metadata.track_ssm_final_dst] = states[metadata.track_ssm_final_src]
        return output[0]


@functools.cache
def case(heads: int, lengths: str, track: bool) -> Case:
    case.cache_clear()  # one case in memory
    return Case(heads=heads, lengths=lengths, track=track)


@functools.cache
def reference(heads: int, lengths: str, track: bool):
    reference.cache_clear()
    current = case(heads, lengths, track)
    dispatcher = build("triton")
    states = current.start()
    output = current.run(dispatcher, current.prepare(dispatcher, states), states[0])
    return output.clone(), states


@functools.cache
def build(backend: str) -> KDAKernelDispatcher:
    triton = LinearAttnKernelBackend.TRITON
    if backend == "flashinfer_per_call":
        from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_prefill import (
            FlashInferKDAPrefillKernel,
        )

        dispatcher = KDAKernelDispatcher(triton, triton, triton)
        dispatcher.extend_kernel = FlashInferKDAPrefillKernel()
        dispatcher.prefill_backend = LinearAttnKernelBackend.FLASHINFER
        return dispatcher
    return KDAKernelDispatcher(triton, LinearAttnKernelBackend(backend), triton)


def launches(fn) -> list[str]:
    """Names of the kernels and copies that ``fn`` starts on the device."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        fn()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    live = torch.isfinite(expected)
    if not torch.equal(live, torch.isfinite(actual)):
        return float("inf")
    gap = torch.where(live, actual.float() - expected.float(), 0)
    return float(gap.norm() / (torch.where(live, expected.float(), 0).norm() + 1e-12))


NOTES: dict[str, list[str]] = {}


def note(backend: str, reason: str) -> None:
    reasons = NOTES.setdefault(backend, [])
    if reason not in reasons:
        reasons.append(reason)


@marker.parametrize("heads,lengths", SHAPES, [(12, "1x16384"), (12, "mixed")])
@marker.parametrize("track", [False, True])
@marker.benchmark("backend", list(BACKENDS))
def benchmark(heads: int, lengths: str, track: bool, backend: str):
    try:
        dispatcher = build(backend)
    except (ValueError, ImportError, RuntimeError) as e:
        note(backend, f"not here: {e}")
        marker.skip(str(e))
    if backend != "triton" and dispatcher.extend_kernel is dispatcher.triton_kernel:
        note(backend, "(triton) at start-up: the dispatcher took TritonKDAKernel")
        marker.skip("Triton at start-up")
    current = case(heads, lengths, track)
    expected, expected_states = reference(heads, lengths, track)
    states = current.start()
    try:
        metadata = current.prepare(dispatcher, states)
        output = current.run(dispatcher, metadata, states[0])
        torch.cuda.synchronize()
    except (ValueError, ImportError, RuntimeError, NotImplementedError) as e:
        note(backend, f"refused {heads} heads, {lengths}, track={track}: {e}")
        marker.skip(str(e))
    gap = max(error(output, expected), error(states, expected_states))
    if gap > MAX_ERROR:
        note(backend, f"WRONG by {gap:.2e} at {heads} heads, {lengths}, track={track}")
        marker.skip("wrong result")

    def fn():
        return current.run(dispatcher, metadata, states[0])

    if backend != "triton" and any(TRITON_MARK in name for name in launches(fn)):
        note(backend, f"(triton) at {heads} heads, {lengths}, track={track}")
        marker.skip("ran on Triton")
    result = marker.do_bench(
        fn,
        use_cuda_graph=False,
        warmup_iters=3,
        estimated_time_ms=100.0,
        stream=torch.cuda.current_stream(),
        disable_log_bandwidth=True,
    )
    print(
        f"{backend}: {heads} heads, {lengths}, track={track}: "
        f"{result.times[0] * 1e6:.1f} us",
        file=sys.stderr,
        flush=True,
    )
    return result


def main(argv: Optional[list[str]] = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_known_args(argv)
    if not torch.cuda.is_available():
        print("KDA prefill benchmark needs a CUDA device")
        return 0
    name = torch.cuda.get_device_name()
    benchmark.run(print_prefix=f"KDA prefill of one layer, {name}, cold L2, median")
    notes = [(backend, why) for backend, reasons in NOTES.items() for why in reasons]
    for backend, why in notes:
        print(f"{backend:20s} {why}")
    return 1 if any(why.startswith("WRONG") for _, why in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
