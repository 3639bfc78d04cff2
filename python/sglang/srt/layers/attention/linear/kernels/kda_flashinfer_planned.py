"""FlashInfer KDA prefill on a plan that is made once a batch."""

from __future__ import annotations

import inspect
import logging
import math
from typing import TYPE_CHECKING, Optional

import torch

from sglang.srt.configs.bailing_hybrid import BailingHybridConfig
from sglang.srt.configs.hybrid_arch import hybrid_kda_config
from sglang.srt.layers.attention.linear.kda_flashinfer_plan import (
    KDAPrefillPlan,
    KDATrackLens,
    build_kda_prefill_plan,
    check_interval,
)
from sglang.srt.layers.attention.linear.kernels.kernel_backend import (
    LinearAttnKernelBase,
)
from sglang.srt.model_executor.cuda_graph_config import Backend as CudaGraphBackend
from sglang.srt.utils.common import rank0_log

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

# Logged once a backend, at start-up, when this adapter serves KDA prefill.
PLANNED_PREFILL_NOTICE = (
    "KDA prefill: FlashInfer planned adapter (one plan a batch, checkpoints in place)"
)
# Logged instead of it when FlashInfer has no RecurrentKDAPrefillWrapper.
UNPLANNED_PREFILL_NOTICE = "KDA prefill: FlashInfer without the planning API"

# The contract of flashinfer/kda_prefill_cute.py.
HEAD_DIM = 128
COMPUTE_CAPABILITIES = ((10, 0), (10, 3))
STATE_DTYPES = (torch.float32, torch.bfloat16)
_ALIGN_BYTES = 16
# Shared-memory stage of one 16-token chunk's beta, which packs tokens to 16-byte rows
# where heads % 8 != 0 (flashinfer/kda_kernels/kda_chunked_bt16.py, engine route).
_BETA_STAGE_BYTES = 512
# Chunk length that kda_flashinfer_prefill_graph.py is written for.
_GRAPH_INTERVAL = 64

_USE_TRITON = "use --linear-attn-prefill-backend triton"


def build_flashinfer_kda_prefill_kernel() -> LinearAttnKernelBase:
    """The planned kernel, or the per-call one on FlashInfer without the planning API.

    Raises ValueError, naming the flag that helps, when neither can run here.
    """
    capability = torch.cuda.get_device_capability()
    if capability not in COMPUTE_CAPABILITIES:
        raise ValueError(
            "FlashInfer KDA prefill runs on compute capability 10.0 and 10.3, this "
            f"device has {capability[0]}.{capability[1]}; {_USE_TRITON}"
        )
    try:
        import flashinfer
        from flashinfer import kda
    except ImportError as e:
        raise ValueError(
            f"FlashInfer KDA prefill needs flashinfer.kda ({e}); install "
            f"flashinfer_python>=0.7.0 or {_USE_TRITON}"
        ) from e
    if (
        "checkpoint_state_indices"
        not in inspect.signature(kda.recurrent_kda).parameters
    ):
        raise ValueError(
            f"FlashInfer {flashinfer.__version__} has no indexed KDA checkpoints; "
            f"install flashinfer_python>=0.7.0 or {_USE_TRITON}"
        )
    if not _cute_dsl_available():
        raise ValueError(
            "FlashInfer KDA prefill needs nvidia-cutlass-dsl>=4.7; install it or "
            f"{_USE_TRITON}"
        )
    if not hasattr(kda, "RecurrentKDAPrefillWrapper"):
        from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_prefill import (
            FlashInferKDAPrefillKernel,
        )

        rank0_log(f"{UNPLANNED_PREFILL_NOTICE} (version {flashinfer.__version__})")
        return FlashInferKDAPrefillKernel()
    rank0_log(PLANNED_PREFILL_NOTICE)
    return PlannedFlashInferKDAPrefillKernel(kda.RecurrentKDAPrefillWrapper)


def _cute_dsl_available() -> bool:
    try:
        from flashinfer.cute_dsl.availability import is_cute_dsl_experimental_available
    except ImportError:
        # Older than the probe: FlashInfer itself decides at the first call.
        return True
    return is_cute_dsl_experimental_available()


class PlannedFlashInferKDAPrefillKernel(LinearAttnKernelBase):
    """KDA prefill through FlashInfer's planned wrapper.

    ``plan`` runs once a batch and leaves a ``KDAPrefillPlan`` on the forward
    metadata; ``extend`` runs once a layer and only launches.
    """

    plans_prefill = True
    supports_track_state_snapshot = True
    supports_safe_gate = True

    def __init__(self, wrapper_cls):
        """``wrapper_cls`` is ``flashinfer.kda.RecurrentKDAPrefillWrapper``."""
        self._wrapper_cls = wrapper_cls
        self.prefill_graph_wrapper_cls = wrapper_cls

    def decode(self, *args, **kwargs):
        raise NotImplementedError("FlashInfer KDA prefill has no decode")

    def check_serving(
        self,
        *,
        model_config: ModelConfig,
        pool: torch.Tensor,
        interval: int,
        activation_dtype: torch.dtype,
        enable_two_batch_overlap: bool,
        prefill_graph_backend: CudaGraphBackend,
    ) -> None:
        """Refuse at start-up what no batch could serve.

        ``pool`` is every layer's states, [layers, slots, H, V, K]; ``interval`` the
        checkpoint interval in tokens. Raises ValueError naming the flag that helps.
        """
        check_interval(interval)
        _check_model_gate(model_config)
        if activation_dtype != torch.bfloat16:
            raise ValueError(
                f"FlashInfer KDA prefill takes bfloat16 activations, the model runs in "
                f"{activation_dtype}; use --dtype bfloat16 or "
                "--linear-attn-prefill-backend triton"
            )
        if enable_two_batch_overlap:
            raise ValueError(
                "FlashInfer KDA prefill plans one batch at a time; drop "
                f"--enable-two-batch-overlap or {_USE_TRITON}"
            )
        if prefill_graph_backend == CudaGraphBackend.FULL:
            raise ValueError(
                "FlashInfer KDA prefill cannot run inside a full prefill CUDA graph; "
                "use --cuda-graph-backend-prefill breakable or "
                "--linear-attn-prefill-backend triton"
            )
        _check_pool(pool)
        if pool.dtype != torch.float32 or interval != _GRAPH_INTERVAL:
            # The bucket tables keep float32 snapshots of 64-token boundaries; other
            # pools break the prefill graph at KDA layers and run this plan eagerly.
            self.prefill_graph_wrapper_cls = None

    def plan(
        self,
        *,
        forward_batch: ForwardBatch,
        metadata: ForwardMetadata,
        pool: torch.Tensor,
        interval: int,
    ) -> None:
        """Leave this batch's plan on ``metadata`` and take over its tracked rows.

        ``pool`` is every layer's states, [layers, slots, H, V, K]. A batch that this
        kernel does not run (one token a row or fewer, verify, idle) gets no plan and
        keeps the metadata as it is. Raises ValueError when the metadata disagrees.
        """
        num_tokens = metadata.logical_num_tokens
        cache_indices = metadata.mamba_cache_indices
        if num_tokens is None or num_tokens <= max(cache_indices.shape[0], 1):
            return
        if not pool.shape[0]:  # a pipeline stage without KDA layers
            return
        extend_lens = forward_batch.extend_seq_lens_cpu
        if extend_lens is None or len(extend_lens) != cache_indices.shape[0]:
            # One read a batch, as the caller already did for the token count.
            extend_lens = metadata.query_start_loc.diff().tolist()
        track = None
        if metadata.has_mamba_track_mask:
            track = _host_track_lens(forward_batch)
        metadata.kda_prefill_plan = build_kda_prefill_plan(
            wrapper_cls=self._wrapper_cls,
            extend_lens=extend_lens,
            num_tokens=num_tokens,
            cache_indices=cache_indices,
            interval=interval,
            pool=pool[0],
            track=track,
            track_slots=forward_batch.mamba_track_indices,
        )
        if track is not None:
            # FlashInfer writes these rows; nothing is left for the layers to copy.
            metadata.track_ssm_h_src = metadata.track_ssm_h_src[:0]
            metadata.track_ssm_final_src = metadata.track_ssm_final_src[:0]

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: Optional[float],
        kda_prefill_plan: Optional[KDAPrefillPlan] = None,
        return_intermediate_states: bool = False,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """One layer. q, k, v are bfloat16 [1, T, H, 128]; g is [1, >=T, H, 128] and
        beta [1, >=T, H] raw logits. Returns [1, T, H, 128]; ``ssm_states`` and its
        snapshot rows are updated in place. Raises ValueError before any write."""
        plan = kda_prefill_plan
        _check_layer(
            plan=plan,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            lower_bound=lower_bound,
            ssm_states=ssm_states,
        )
        num_tokens = plan.num_tokens
        beta = beta[:, :num_tokens]
        if not beta.is_contiguous() or beta.data_ptr() % _ALIGN_BYTES:
            beta = plan.beta.copy_(beta)
        if plan.start_src is not None:
            ssm_states.index_copy_(
                0, plan.start_dst, ssm_states.index_select(0, plan.start_src)
            )
        checkpoints = {}
        if plan.interval:
            checkpoints = dict(
                state_checkpoints=ssm_states if plan.scratch is None else plan.scratch,
                checkpoint_cu_starts=plan.checkpoint_cu_starts,
                checkpoint_state_indices=plan.checkpoint_rows,
                checkpoint_every_n_tokens=plan.interval,
            )
        # Every call below is a no-op on the tensors that KDA models pass.
        output = plan.wrapper.run(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g=g[:, :num_tokens].contiguous(),
            beta=beta,
            A_log=A_log.reshape(-1).float().contiguous(),
            dt_bias=dt_bias.reshape(-1).float().contiguous(),
            initial_state=ssm_states,
            ssm_state_indices=plan.state_slots,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            lower_bound=lower_bound,
            beta_is_logit=True,
            **checkpoints,
        )[0]
        if plan.scratch is not None:
            ssm_states.index_copy_(0, plan.scratch_dst, plan.scratch)
        return (output, None) if return_intermediate_states else output


def _host_track_lens(forward_batch: ForwardBatch) -> KDATrackLens:
    """Tracking lengths on the host; one read a batch when the scheduler kept none."""
    rows = forward_batch.batch_size
    mask = forward_batch.mamba_prefill_track_mask_cpu
    track_lens = forward_batch.mamba_track_seqlens_cpu
    prefix_lens = forward_batch.extend_prefix_lens_cpu
    if mask is None:
        mask = forward_batch.mamba_track_mask[:rows].tolist()
    if track_lens is None:
        track_lens = forward_batch.mamba_track_seqlens[:rows].tolist()
    if prefix_lens is None:
        prefix_lens = forward_batch.extend_prefix_lens[:rows].tolist()
    return KDATrackLens(mask=mask, track_lens=track_lens, prefix_lens=prefix_lens)


def _check_model_gate(model_config: ModelConfig) -> None:
    """Raise ValueError when the model says that its KDA gate has no bound. Models that
    do not say are checked layer by layer."""
    config = hybrid_kda_config(model_config)
    if config is None:
        return
    bound = (
        config.kda_lower_bound
        if isinstance(config, BailingHybridConfig)
        else config.linear_attn_config.get("gate_lower_bound")
    )
    if bound is None:
        raise ValueError(
            "FlashInfer KDA prefill needs a bounded gate, the model config has no "
            f"gate_lower_bound; {_USE_TRITON}"
        )


def _check_pool(pool: torch.Tensor) -> None:
    """Raise ValueError unless [layers, slots, H, V, K] ``pool`` meets FlashInfer's
    layout: 128 x 128 heads, dense slots, 16-byte aligned rows of float32 or bfloat16."""
    heads = pool.shape[2]
    if tuple(pool.shape[3:]) != (HEAD_DIM, HEAD_DIM):
        raise ValueError(
            f"FlashInfer KDA prefill needs {HEAD_DIM} x {HEAD_DIM} states a head, the "
            f"model has {pool.shape[3]} x {pool.shape[4]}; {_USE_TRITON}"
        )
    if heads % 8 and heads * (16 + 8 // (heads & -heads)) * 2 > _BETA_STAGE_BYTES:
        raise ValueError(
            "FlashInfer KDA prefill serves a multiple of 8 heads a rank, at most 10, "
            f"or 12; this rank has {heads}; change --tp-size or {_USE_TRITON}"
        )
    if pool.dtype not in STATE_DTYPES:
        raise ValueError(
            f"FlashInfer KDA prefill keeps float32 or bfloat16 states, the pool has "
            f"{pool.dtype}; use --mamba-ssm-dtype float32 or bfloat16"
        )
    size = pool.element_size()
    if (
        pool.stride()[2:] != (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)
        or pool.stride(1) < heads * HEAD_DIM * HEAD_DIM
        or any(
            offset % _ALIGN_BYTES
            for offset in (
                pool.data_ptr(),
                pool.stride(0) * size,
                pool.stride(1) * size,
            )
        )
    ):
        raise ValueError(
            "FlashInfer KDA prefill needs dense, 16-byte aligned state slots, the pool "
            f"has strides {pool.stride()} at address {pool.data_ptr():#x}; drop "
            f"--enable-page-major-kv-layout or {_USE_TRITON}"
        )


def _check_layer(
    *,
    plan: Optional[KDAPrefillPlan],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lower_bound: Optional[float],
    ssm_states: torch.Tensor,
) -> None:
    """Compare one layer's shapes and types with the plan; nothing is read or written."""
    if plan is None:
        raise ValueError(
            "FlashInfer KDA prefill was called without a plan for this batch"
        )
    if lower_bound is None or not (-math.inf < lower_bound < 0):
        raise ValueError(
            "FlashInfer KDA prefill needs a finite negative gate bound "
            f"(gate_lower_bound of the model config), got {lower_bound}; {_USE_TRITON}"
        )
    heads = ssm_states.shape[1]
    expected = (1, plan.num_tokens, heads, HEAD_DIM)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if tuple(x.shape) != expected or x.dtype != torch.bfloat16:
            raise ValueError(
                f"FlashInfer KDA prefill planned {name} as bfloat16 {expected}, got "
                f"{x.dtype} {tuple(x.shape)}"
            )
    for name, x, tail in (("g", g, expected[2:]), ("beta", beta, expected[2:3])):
        if (
            tuple(x.shape[2:]) != tail
            or x.shape[0] != 1
            or x.shape[1] < plan.num_tokens
            or x.dtype != torch.bfloat16
        ):
            raise ValueError(
                f"FlashInfer KDA prefill planned {name} as bfloat16 of at least "
                f"{(1, plan.num_tokens, *tail)}, got {x.dtype} {tuple(x.shape)}"
            )
