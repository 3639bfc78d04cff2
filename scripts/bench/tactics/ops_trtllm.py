"""The MoE op of Kimi-K3: FlashInfer's `trtllm_fp4_block_scale_moe`.

The case is built from the classes the op itself uses, so its key and its tactics
are the op's. Running it needs compute capability 10.0 or 10.3 and the kernels
FlashInfer downloads; without such a GPU a case carries shapes only.
"""

from typing import Any

from ..errors import BenchError
from .case import OpCase
from .flashinfer_api import torch
from .problems import Problem
from .routing import Routing

CUSTOM_OP = "flashinfer::trtllm_fp4_block_scale_moe"
SCALE_GROUP = 32  # MXFP4 and MXFP8: one scale for 32 values
PDL_TOKENS = 8192  # SGLang 0.5.23 asks for dependent launch up to here
UE8M0_ONE = 127  # exponent byte of scale 1.0
SUPPORTED = ((10, 0), (10, 3))


class Module:
    """Stands for the loaded kernels where they cannot be loaded.

    A key holds the type name of the loaded module, which is `Module`.
    """


def open_op(problem: Problem, *, device: str, seed: int) -> "TrtllmMoe":
    """Opens the op. Raises BenchError for a problem it has no kernels for."""
    if problem.activation != "situ":
        raise BenchError(
            f"kimi-k3 op: activation {problem.activation!r} is not wired, only situ; "
            "write an op file for another one (docs/tactics.md)"
        )
    if problem.hidden % SCALE_GROUP or problem.intermediate % SCALE_GROUP:
        raise BenchError(
            f"kimi-k3 op: hidden and intermediate must be multiples of {SCALE_GROUP}"
        )
    return TrtllmMoe(problem, device=device, seed=seed)


class TrtllmMoe:
    """MXFP8 activations, MXFP4 weights, SiTU, precomputed routing."""

    custom_op = CUSTOM_OP

    def __init__(self, problem: Problem, *, device: str, seed: int):
        self._problem = problem
        self._seed = seed
        self._weights: dict[str, torch.Tensor] | None = None
        usable = device.startswith("cuda") and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability() if usable else None
        self._can_run = capability in SUPPORTED
        self._device = device if self._can_run else "meta"
        self._found = f"compute capability {capability}" if usable else "no CUDA device"
        self._moe_op = self._load_kernels() if self._can_run else Module()

    def tile(self, tactic: Any) -> int | None:
        """A tactic is (token tile, kernel configuration)."""
        return tactic[0] if isinstance(tactic, tuple) and len(tactic) == 2 else None

    def case(
        self, tokens: int, routing: Routing, *, for_listing: bool = False
    ) -> OpCase:
        """The op's call at `tokens`. Raises BenchError when it cannot be listed.

        Weights are drawn once, when a case that runs is first asked for.
        """
        from flashinfer.fused_moe.backends.trtllm.sm100_runner import MoERunner
        from flashinfer.fused_moe.shared.inputs import RoutingInputMode
        from flashinfer.tllm_enums import (
            ActivationType,
            DtypeTrtllmGen,
            Fp8QuantizationType,
            WeightLayout,
        )

        if for_listing and not self._can_run:
            raise BenchError(
                "trtllm-gen kernels need compute capability 10.0 or 10.3, this machine "
                f"has {self._found}; run discover on the machine the record is for"
            )
        problem = self._problem
        runner = MoERunner(
            self._moe_op,
            top_k=problem.top_k,
            num_local_experts=problem.local_experts,
            dtype_act=DtypeTrtllmGen.MxE4m3,
            dtype_weights=DtypeTrtllmGen.MxE2m1,
            fp8_quantization_type=Fp8QuantizationType.NoneFp8,
            hidden_size=problem.hidden,
            intermediate_size=problem.intermediate,
            activation_type=ActivationType.Situ.value,
            weight_layout=WeightLayout.MajorK,
            use_shuffled_weight=True,
            num_experts=problem.experts,
        )
        unpacked = problem.routing == "unpacked"
        mode = (
            RoutingInputMode.UnpackedPrecomputed
            if unpacked
            else RoutingInputMode.PackedPrecomputed
        )
        inputs = self._inputs(tokens, routing, unpacked)
        # The op asks for these two when it tunes.
        config = runner._make_tuning_config(
            inputs,
            tune_max_num_tokens=1 << (tokens - 1).bit_length(),
            routing_input_mode=mode,
            hidden_states_scale_layout=_linear_layout(),
            use_cold_l2_cache=True,
            use_cuda_graph=True,
        )
        kwargs = {} if for_listing or not self._can_run else self._kwargs(mode, tokens)
        return OpCase(
            custom_op=CUSTOM_OP,
            runner=runner,
            tuning_config=config,
            inputs=inputs.to_list(),
            kwargs=kwargs,
            writes=(0,) if problem.finalize else (),
            can_run=self._can_run,
        )

    def _load_kernels(self) -> Any:
        from flashinfer.jit.cubin_loader import setup_cubin_loader
        from flashinfer.jit.fused_moe import gen_trtllm_gen_fused_moe_sm100_module

        spec = gen_trtllm_gen_fused_moe_sm100_module()
        module = spec.build_and_load()
        for path in spec.get_library_paths():
            setup_cubin_loader(str(path))
        return module

    def _inputs(self, tokens: int, routing: Routing, unpacked: bool) -> Any:
        from flashinfer.fused_moe.shared.inputs import MoeRunnerInputs

        problem, device = self._problem, self._device
        shape = (tokens, problem.top_k)
        ids = torch.from_numpy(routing.topk_ids.copy())
        weights = torch.from_numpy(routing.topk_weights.copy()).to(torch.bfloat16)
        if not unpacked:
            ids = (ids << 16) | weights.view(torch.int16).to(torch.int32) & 0xFFFF
        hidden, scale = self._activations(tokens, routing)
        width = problem.hidden if problem.finalize else 0
        return MoeRunnerInputs(
            output=torch.empty((tokens, width), dtype=torch.bfloat16, device=device),
            routing_logits=None,
            # Real ids even without a GPU: the op's tuning config looks at them.
            topk_ids=ids if device == "meta" else ids.to(device),
            expert_weights=(
                weights.to(device)
                if unpacked
                else torch.empty(shape, dtype=torch.bfloat16, device=device)
            ),
            hidden_states=hidden,
            hidden_states_scale=scale.view(torch.float8_e4m3fn),
            gemm1_lora_delta=None,
            per_token_scale=None,
        )

    def _activations(
        self, tokens: int, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MXFP8 activations [tokens, hidden] and scales [tokens, hidden / 32]."""
        shape, device = (tokens, self._problem.hidden), self._device
        if routing.hidden is not None and device != "meta":
            from flashinfer import mxfp8_quantize

            quantized, scale = mxfp8_quantize(routing.hidden.to(device), False)
            return quantized, scale.reshape(tokens, -1)
        hidden = torch.empty(shape, device=device)
        if device != "meta":
            generator = torch.Generator(device=device).manual_seed(self._seed)
            hidden.normal_(generator=generator)
        groups = (tokens, shape[1] // SCALE_GROUP)
        scale = torch.full(groups, UE8M0_ONE, dtype=torch.uint8, device=device)
        return hidden.to(torch.float8_e4m3fn), scale

    def _kwargs(self, mode: Any, tokens: int) -> dict[str, Any]:
        from flashinfer.tllm_enums import ActivationType, RoutingMethodType

        problem = self._problem
        return {
            **self._drawn_weights(),
            **dict.fromkeys(
                "routing_bias gemm1_bias gemm2_bias gemm1_clamp_limit n_group "
                "output1_scale_scalar output1_scale_gate_scalar output2_scale_scalar "
                "topk_group routed_scaling_factor".split()
            ),
            "routing_input_mode": mode,
            "num_experts": problem.experts,
            "local_expert_offset": problem.local_offset,
            "routing_method_type": RoutingMethodType.TopK.value,
            "enable_pdl": tokens <= PDL_TOKENS,
            "do_finalize": problem.finalize,
            "activation_type": ActivationType.Situ.value,
        }

    def _drawn_weights(self) -> dict[str, torch.Tensor]:
        """Random MXFP4 experts with scales near 2**-6, so outputs stay finite."""
        if self._weights is not None:
            return self._weights
        problem, device = self._problem, self._device
        generator = torch.Generator(device=device).manual_seed(self._seed + 1)

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(
                low, high, shape, dtype=torch.uint8, device=device, generator=generator
            )

        experts, hidden = problem.local_experts, problem.hidden
        inner = problem.intermediate
        low, high = UE8M0_ONE - 7, UE8M0_ONE - 4
        scales = [
            draw(low, high, experts, rows, columns // SCALE_GROUP)
            for rows, columns in ((2 * inner, hidden), (hidden, inner))
        ]
        ones = torch.ones(experts, dtype=torch.float32, device=device)
        self._weights = {
            "gemm1_weights": draw(0, 256, experts, 2 * inner, hidden // 2),
            "gemm1_weights_scale": scales[0].view(torch.float8_e4m3fn),
            "gemm2_weights": draw(0, 256, experts, hidden, inner // 2),
            "gemm2_weights_scale": scales[1].view(torch.float8_e4m3fn),
            "gemm1_alpha": ones,
            "gemm1_beta": ones.clone(),
        }
        return self._weights


def _linear_layout() -> Any:
    from flashinfer.tllm_enums import SfLayout

    return SfLayout.layout_linear
