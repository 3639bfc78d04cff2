"""A tunable grouped GEMM for MoE in Triton: an op module to start from.

out[t, s] = x[t] @ w[expert(t, s)]^T for every token t and routing slot s. Like
FlashInfer's MoE kernels it takes tiles of one expert's rows, and like them it
lists only the tiles near the mean rows of an expert, so at many tokens the small
ones are never tuned.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from bench.errors import BenchError
from bench.tactics.case import OpCase
from bench.tactics.problems import Problem
from bench.tactics.routing import Routing
from flashinfer.autotuner import DynamicTensorSpec, TunableRunner, TuningConfig

CUSTOM_OP = "bench::triton_grouped_gemm"
# Not bfloat16: tl.dot of Triton's interpreter multiplies its bits as integers.
DTYPE = torch.float16
MOST_TILES = 65535  # CUDA's bound on the second axis of a grid
TILES = (32, 64, 128, 192, 256)
# (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) of each configuration of each tile; a
# tile of 192 rows is three blocks of 64, because a block is a power of two.
CONFIGS = {
    32: ((32, 128, 64, 4, 4), (32, 256, 64, 4, 3)),
    64: ((64, 128, 64, 4, 4), (64, 256, 64, 8, 3)),
    128: ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3)),
    192: ((64, 128, 64, 8, 3), (64, 128, 64, 4, 3)),
    256: ((256, 128, 64, 8, 3), (256, 64, 64, 8, 3)),
}


@triton.jit
def _input_rows(x_ptr, order_ptr, position, end, K, TOP_K: tl.constexpr):
    row = tl.load(order_ptr + position, mask=position < end, other=0)
    return x_ptr + (row // TOP_K)[:, None] * K


@triton.jit
def _load_rows(x_rows, position, end, inner, K):
    mask = (position < end)[:, None] & (inner < K)[None, :]
    return tl.load(x_rows + inner[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(out_ptr, order_ptr, position, end, column, N, total):
    live = position < end
    row = tl.load(order_ptr + position, mask=live, other=0)
    tl.store(
        out_ptr + row[:, None] * N + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (column < N)[None, :],
    )


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,  # [tokens, K]
    w_ptr,  # [experts, N, K]
    out_ptr,  # [tokens * TOP_K, N]
    order_ptr,  # int64 [tokens * TOP_K]: flat (token, slot) rows by expert
    ends_ptr,  # int64 [experts]: end of each expert's rows in order_ptr
    tile_ends_ptr,  # int64 [experts]: end of each expert's tiles
    N,
    K,
    EXPERTS,
    TOP_K: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # blocks of BLOCK_M rows in a tile: 1 or 3
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    ids = tl.arange(0, EXPERTS_PADDED)
    tile_ends = tl.load(tile_ends_ptr + ids, mask=ids < EXPERTS, other=2**62)
    expert = tl.sum((tile_ends <= tile).to(tl.int64))
    if expert >= EXPERTS:
        return
    first_tile = tl.load(tile_ends_ptr + expert - 1, mask=expert > 0, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)

    position = start + (tile - first_tile) * (BLOCK_M * PARTS) + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_columns = w_ptr + expert * N * K + column[None, :].to(tl.int64) * K
    x_rows = _input_rows(x_ptr, order_ptr, position, end, K, TOP_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PARTS == 3:
        position_1 = position + BLOCK_M
        position_2 = position_1 + BLOCK_M
        x_rows_1 = _input_rows(x_ptr, order_ptr, position_1, end, K, TOP_K)
        x_rows_2 = _input_rows(x_ptr, order_ptr, position_2, end, K, TOP_K)
        total_1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        b = tl.load(
            w_columns + inner[:, None],
            mask=(inner < K)[:, None] & (column < N)[None, :],
            other=0.0,
        )
        total += tl.dot(_load_rows(x_rows, position, end, inner, K), b)
        if PARTS == 3:
            total_1 += tl.dot(_load_rows(x_rows_1, position_1, end, inner, K), b)
            total_2 += tl.dot(_load_rows(x_rows_2, position_2, end, inner, K), b)
    _store_rows(out_ptr, order_ptr, position, end, column, N, total)
    if PARTS == 3:
        _store_rows(out_ptr, order_ptr, position_1, end, column, N, total_1)
        _store_rows(out_ptr, order_ptr, position_2, end, column, N, total_2)


def listed_tiles(tokens: int, top_k: int, experts: int) -> list[int]:
    """The tiles FlashInfer 0.7.2's kernels would list out of TILES.

    The first one that holds the mean rows of an expert (the last where none does),
    two above it and one below.
    """
    mean = tokens * top_k / experts
    index = next((i for i, t in enumerate(TILES) if t >= mean), len(TILES) - 1)
    return list(TILES[max(0, index - 1) : index + 3])


class GroupedGemmRunner(TunableRunner):
    """Tactics are (token tile, configuration index)."""

    def __init__(self, problem: Problem):
        self._sizes = (
            problem.hidden,
            problem.intermediate,
            problem.experts,
            problem.top_k,
        )

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple:
        """Everything that selects a tactic and is not in the tensors' shapes."""
        return (*self._sizes, str(inputs[1].dtype))

    def get_valid_tactics(self, inputs: list, profile: Any) -> list[tuple[int, int]]:
        """What FlashInfer's heuristic would offer at this token count."""
        _, _, experts, top_k = self._sizes
        tokens = inputs[1].shape[0]
        return [
            (tile, index)
            for tile in listed_tiles(tokens, top_k, experts)
            for index in range(len(CONFIGS[tile]))
        ]

    def validate_tactic(self, inputs: list, tactic: Any) -> bool:
        """Whether the kernel exists, listed at this token count or not."""
        if tactic == -1:
            return True
        tile, index = tactic
        return tile in CONFIGS and 0 <= index < len(CONFIGS[tile])

    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = -1,
        do_preparation: bool = False,
        *,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Writes inputs[0] [tokens, top_k, N] from x [tokens, K] and ids.

        `weight` is [experts, N, K] of x's dtype; ids are int32 [tokens, top_k].
        """
        out, x, topk_ids = inputs
        width, experts, top_k = weight.shape[1], self._sizes[2], self._sizes[3]
        if tactic == -1:
            tactic = (listed_tiles(x.shape[0], top_k, experts)[0], 0)
        tile, index = tactic
        block_m, block_n, block_k, warps, stages = CONFIGS[tile][index]
        flat = topk_ids.reshape(-1)
        order = torch.sort(flat, stable=True).indices
        counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
        tiles = (counts + tile - 1) // tile
        # Bounds the tiles from shapes alone, so a CUDA graph may hold the launch.
        most = flat.numel() // tile + min(experts, flat.numel())
        if most > MOST_TILES:
            raise ValueError(
                f"{flat.numel()} rows need up to {most} tiles of {tile}, a grid's "
                f"second axis holds {MOST_TILES}; use a larger tile"
            )
        _grouped_gemm_kernel[(triton.cdiv(width, block_n), most)](
            x,
            weight,
            out,
            order,
            counts.cumsum(0),
            tiles.cumsum(0),
            width,
            x.shape[1],
            experts,
            TOP_K=top_k,
            EXPERTS_PADDED=triton.next_power_of_2(experts),
            BLOCK_M=block_m,
            PARTS=tile // block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
        )
        return out


def reference(
    x: torch.Tensor, topk_ids: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """float32 [tokens, top_k, N] of the same product, one expert at a time."""
    out = x.new_zeros((*topk_ids.shape, weight.shape[1]), dtype=torch.float32)
    for expert in range(weight.shape[0]):
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        out[token, slot] = x[token].float() @ weight[expert].float().T
    return out


def _bucket(tokens: int) -> int:
    return triton.next_power_of_2(tokens)


def _random_ids(experts: int):
    def draw(shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        scores = torch.rand((shape[0], experts), device=device)
        return scores.topk(shape[1], dim=1).indices.to(dtype)

    return draw


def open_op(problem: Problem, *, device: str, seed: int) -> "GroupedGemm":
    """Opens the op; without a GPU it needs Triton's interpreter."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BenchError(
            "triton-grouped-gemm runs on a CPU only with TRITON_INTERPRET=1 in the "
            "environment"
        )
    if problem.local_experts != problem.experts:
        raise BenchError("triton-grouped-gemm has no expert parallelism")
    return GroupedGemm(problem, device=device, seed=seed)


class GroupedGemm:
    """x is float16 [tokens, hidden], weight [experts, intermediate, hidden]."""

    custom_op = CUSTOM_OP

    def __init__(self, problem: Problem, *, device: str, seed: int):
        self._problem = problem
        self._device = device
        self._seed = seed
        self._runner = GroupedGemmRunner(problem)
        self._ids_initializer = _random_ids(problem.experts)
        self._weight: torch.Tensor | None = None

    def tile(self, tactic: Any) -> int | None:
        """Token tile of a tactic."""
        return tactic[0] if isinstance(tactic, tuple) else None

    def case(
        self, tokens: int, routing: Routing, *, for_listing: bool = False
    ) -> OpCase:
        """The op's call at `tokens`."""
        problem = self._problem
        device = "meta" if for_listing else self._device
        x = torch.empty((tokens, problem.hidden), device=device)
        if not for_listing:
            x.normal_(generator=self._generator(0))
            if routing.hidden is not None:
                x.copy_(routing.hidden)
            if self._weight is None:
                shape = (problem.experts, problem.intermediate, problem.hidden)
                weight = torch.empty(shape, dtype=DTYPE, device=device)
                self._weight = weight.normal_(generator=self._generator(1))
        config = TuningConfig(
            dynamic_tensor_specs=(
                DynamicTensorSpec(
                    input_idx=(0, 1, 2),
                    dim_idx=(0, 0, 0),
                    gen_tuning_buckets=(_bucket(tokens),),
                    map_to_tuning_buckets=_bucket,
                ),
            ),
            tensor_initializers=((2, self._ids_initializer),),
            use_cold_l2_cache=True,
            use_cuda_graph=True,
        )
        out = (tokens, problem.top_k, problem.intermediate)
        return OpCase(
            custom_op=CUSTOM_OP,
            runner=self._runner,
            tuning_config=config,
            inputs=[
                torch.empty(out, dtype=DTYPE, device=device),
                x.to(DTYPE),
                torch.from_numpy(routing.topk_ids.copy()).to(device),
            ],
            kwargs={} if for_listing else {"weight": self._weight},
            writes=(0,),
        )

    def _generator(self, offset: int) -> torch.Generator:
        return torch.Generator(device=self._device).manual_seed(self._seed + offset)
