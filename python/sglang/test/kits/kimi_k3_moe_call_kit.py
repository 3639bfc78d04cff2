"""The routed-MoE call that Kimi-K3 serving makes, captured without a GPU.

SGLang's function and FlashInfer's public op, runner and tuning classes run as they
are, on meta tensors. Stand-ins replace what needs the hardware: the quantization
kernel (its outputs keep the shapes the real allocation gives them), the compiled MoE
module, and the device queries. The capture ends the call where the tuner is asked.
"""

import contextlib
import importlib
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import tvm_ffi
from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig
from flashinfer.fused_moe import core

from sglang.srt.layers.moe import route_quant_handoff
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig, flashinfer_trtllm
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

# Kimi-K3's routed experts at TP1/EP1.
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 896, 16, 3584, 3072


class CapturedCall(msgspec.Struct):
    """What the op handed to AutoTuner.choose_one."""

    op: str
    runner: TunableRunner
    config: TuningConfig
    inputs: list
    routing_mode: int
    do_finalize: bool

    @property
    def file_key(self) -> str:
        return AutoTuner._get_cache_key(
            self.op,
            self.runner,
            self.shapes,
            self.config,
            self.runner.get_cache_key_extras(self.inputs),
        ).file_key

    @property
    def policy(self) -> list:
        return list(AutoTuner._profiling_policy(self.config))

    @property
    def shapes(self) -> tuple:
        return tuple(
            (0,) if tensor is None else tuple(tensor.shape) for tensor in self.inputs
        )

    def lookup(self, tuner: AutoTuner) -> Any:
        """The tuner's cached tactic for this call; None on a miss."""
        hit, _, tactic, _ = tuner.search_cache(
            self.op,
            [self.runner],
            self.shapes,
            self.config,
            inputs=self.inputs,
            require_profiling_policy=tuner.is_tuning_mode,
        )
        return tactic if hit else None


class _Captured(Exception):
    """Carries the call out of the op, which has no GPU to go on with."""

    def __init__(self, call: CapturedCall):
        self.call = call


class _MoeModuleStandIn:
    """A loaded MoE module without functions: the op only passes them on."""

    def __getattr__(self, name: str) -> None:
        return None


# The key holds the type name of the loaded module.
_MoeModuleStandIn.__name__ = tvm_ffi.Module.__name__


class _JitSpecStandIn:
    def build_and_load(self) -> _MoeModuleStandIn:
        return _MoeModuleStandIn()

    def get_library_paths(self) -> list:
        return []


def _capture(tuner, custom_op, runners, tuning_config, inputs, **kwargs):
    raise _Captured(
        CapturedCall(
            op=custom_op,
            runner=runners[0],
            config=tuning_config,
            inputs=inputs,
            routing_mode=int(kwargs["routing_input_mode"]),
            do_finalize=kwargs["do_finalize"],
        )
    )


def _meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _weights() -> flashinfer_trtllm.FlashInferTrtllmGenMxfp4MoeQuantInfo:
    scale = torch.float8_e4m3fn
    return flashinfer_trtllm.FlashInferTrtllmGenMxfp4MoeQuantInfo(
        w13_weight=_meta(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        w2_weight=_meta(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        w13_weight_scale=_meta(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32, dtype=scale),
        w2_weight_scale=_meta(EXPERTS, HIDDEN, INTERMEDIATE // 32, dtype=scale),
        w13_weight_bias=None,
        w2_weight_bias=None,
        gemm1_alpha=None,
        gemm1_beta=None,
        gemm1_clamp_limit=None,
        global_num_experts=EXPERTS,
        local_expert_offset=0,
        local_num_experts=EXPERTS,
        intermediate_size_per_partition=INTERMEDIATE,
        hidden_size=HIDDEN,
        flashinfer_mxfp4_moe_precision="default",
    )


def capture_moe_call(
    tokens: int, *, packed: bool = False, defer_finalize: bool = False
) -> CapturedCall:
    """Drive the call for ``tokens`` rows; needs a published config and TP group.

    ``packed`` plays the fused decode route, which hands over packed top-k ids.
    """
    quant_module = importlib.import_module(
        "sglang.kernels.ops.quantization.per_token_group_quant"
    )
    x = _meta(tokens, HIDDEN, dtype=torch.bfloat16)
    ids = _meta(tokens, TOP_K, dtype=torch.int32)
    topk = StandardTopKOutput(
        topk_weights=_meta(tokens, TOP_K, dtype=torch.float32),
        topk_ids=ids,
        router_logits=None,
    )
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(quant_module, "_per_token_group_quant_custom_op"))
        enter(
            patch.object(
                core,
                "gen_trtllm_gen_fused_moe_sm100_module",
                return_value=_JitSpecStandIn(),
            )
        )
        module = core._get_trtllm_moe_sm100_module_impl.__wrapped__(False)
        enter(patch.object(core, "get_trtllm_moe_sm100_module", return_value=module))
        enter(patch.object(core, "get_compute_capability", return_value=(10, 3)))
        enter(patch.object(core, "device_support_pdl", return_value=True))
        enter(
            patch.object(flashinfer_trtllm, "trtllm_moe_enable_pdl", return_value=False)
        )
        enter(patch.object(AutoTuner, "choose_one", _capture))
        if packed:
            quantized = _meta(tokens, HIDDEN, dtype=torch.float8_e4m3fn)
            scales = _meta(tokens, HIDDEN // 128, dtype=torch.int32)
            enter(
                patch.object(
                    route_quant_handoff, "take", return_value=(ids, quantized, scales)
                )
            )
        enter(
            flashinfer_trtllm.flashinfer_trtllm_deferred_finalize_context(
                defer_finalize
            )
        )
        try:
            flashinfer_trtllm._fused_experts_flashinfer_mxfp4_sm100_trtllm_gen(
                StandardDispatchOutput(
                    hidden_states=x, hidden_states_scale=None, topk_output=topk
                ),
                _weights(),
                MoeRunnerConfig(activation="situ"),
            )
        except _Captured as captured:
            return captured.call
    raise AssertionError("the op did not ask the tuner")
