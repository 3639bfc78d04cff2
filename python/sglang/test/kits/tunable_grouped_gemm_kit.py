"""A Triton grouped GEMM that FlashInfer's AutoTuner tunes over real tiles.

For tests that need the real tuner to profile a real operation. Tactics are
``(token tile, config)`` as in trtllm-gen MoE, and like there the larger token counts
enumerate the larger tiles only, so a tactic found at a smaller count has to come
from a record. Depends on torch, triton and flashinfer.autotuner alone.
"""

from collections import Counter
from typing import Any

import torch
import triton
import triton.language as tl
from flashinfer.autotuner import (
    AutoTuner,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
)

OP_NAME = "sglang_test::grouped_gemm"
TOKEN_TILES = (16, 32, 64, 128)
# config -> (output column tile, warps)
CONFIGS = ((64, 4), (128, 8))
# Used for tactic -1, which the tuner asks for when it has none.
DEFAULT_TACTIC = (64, 0)


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,  # bf16 [tokens, K]
    w_ptr,  # bf16 [experts, N, K]
    out_ptr,  # bf16 [tokens, N]
    tokens,
    rows_per_expert,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    first = expert * rows_per_expert
    last = tl.minimum(first + rows_per_expert, tokens)
    rows = first + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < last
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[:, None] * K + ks[None, :], mask=live[:, None])
        w = tl.load(
            w_ptr + (expert * N + cols[None, :]) * K + ks[:, None],
            mask=cols[None, :] < N,
        )
        acc = tl.dot(x, w, acc)
    tl.store(
        out_ptr + rows[:, None] * N + cols[None, :],
        acc.to(tl.bfloat16),
        mask=live[:, None] & (cols[None, :] < N),
    )


class GroupedGemmRunner(TunableRunner):
    """out[t] = x[t] @ w[expert(t)].T; tokens are split evenly, in expert order.

    ``launches`` counts kernel launches by (tokens, tactic), the profiler's included.
    """

    def __init__(self):
        self.launches: Counter = Counter()

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list:
        return valid_tactics(inputs[0].shape[0], experts=inputs[1].shape[0])

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple:
        return tuple(inputs[1].shape)

    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, **kwargs):
        x, w = inputs
        tile, config = DEFAULT_TACTIC if tactic == -1 else tactic
        self.launches[(x.shape[0], (tile, config))] += 1
        return launch_grouped_gemm(x, w, token_tile=tile, config=config)


def valid_tactics(tokens: int, *, experts: int) -> list[tuple[int, int]]:
    """Every (tile, config) whose tile is at least a quarter of an expert's rows."""
    least = min(triton.cdiv(tokens, experts) // 4, TOKEN_TILES[-1])
    return [
        (tile, config)
        for tile in TOKEN_TILES
        if tile >= least
        for config in range(len(CONFIGS))
    ]


def launch_grouped_gemm(
    x: torch.Tensor, w: torch.Tensor, *, token_tile: int, config: int
) -> torch.Tensor:
    """x bf16 [tokens, K], w bf16 [experts, N, K], both contiguous -> [tokens, N]."""
    tokens, depth = x.shape
    experts, columns, _ = w.shape
    column_tile, warps = CONFIGS[config]
    rows = triton.cdiv(tokens, experts)
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    grid = (experts, triton.cdiv(rows, token_tile), triton.cdiv(columns, column_tile))
    _grouped_gemm_kernel[grid](
        x,
        w,
        out,
        tokens,
        rows,
        N=columns,
        K=depth,
        BLOCK_M=token_tile,
        BLOCK_N=column_tile,
        BLOCK_K=64,
        num_warps=warps,
    )
    return out


def reference_grouped_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same product in float32, unrounded."""
    rows = triton.cdiv(x.shape[0], w.shape[0])
    parts = x.float().split(rows)
    return torch.cat([part @ expert.float().T for part, expert in zip(parts, w)])


def make_tuning_config(buckets: tuple[int, ...]) -> TuningConfig:
    """Token buckets that round up; measured under CUDA graph with a cold L2."""
    return TuningConfig(
        dynamic_tensor_specs=(
            DynamicTensorSpec(
                input_idx=(0,),
                dim_idx=(0,),
                gen_tuning_buckets=buckets,
                map_to_tuning_buckets=lambda tokens: next(
                    (bucket for bucket in buckets if tokens <= bucket), buckets[-1]
                ),
            ),
        ),
        use_cold_l2_cache=True,
        use_cuda_graph=True,
    )


def tuned_grouped_gemm(
    tuner: AutoTuner,
    runner: GroupedGemmRunner,
    tuning_config: TuningConfig,
    x: torch.Tensor,
    w: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """Choose a tactic with the tuner, run it; returns the output and the tactic."""
    chosen, tactic = tuner.choose_one(OP_NAME, [runner], tuning_config, [x, w])
    return chosen([x, w], tactic=tactic), tactic


def record_entry(
    runner: GroupedGemmRunner,
    tuning_config: TuningConfig,
    inputs: list[torch.Tensor],
    tactic: tuple[int, int],
) -> dict[str, list]:
    """The cache-file entry that makes the tuner choose ``tactic`` for ``inputs``."""
    key = AutoTuner._get_cache_key(
        OP_NAME,
        runner,
        tuple(tuple(tensor.shape) for tensor in inputs),
        tuning_config,
        runner.get_cache_key_extras(inputs),
    )
    policy = AutoTuner._profiling_policy(tuning_config)
    return {key.file_key: [type(runner).__name__, list(tactic), list(policy)]}
