"""Names of GPU kernels sorted into the classes that the claims are about.

The rules read names only, so they serve every profiler. First match wins.
`kda_copy` has no rule: it is a copy in a KDA layer's input, told from other
copies by its neighbours on the stream (see `mark_kda_copies`).
"""

import functools
import re
from collections.abc import Iterable, Sequence

COPIES = ("copy", "memcpy_dtod")

# class, what it is, pattern. Names come from SGLang 0.5.23's Triton kernels,
# FlashInfer 0.7.2's CUDA and CuTe DSL kernels, trtllm-gen's GEMMs and PyTorch.
RULES = (
    ("memcpy_dtod", "driver copy on the device", r"^Memcpy (DtoD|PtoP)"),
    ("memcpy_htod", "host to device", r"^Memcpy HtoD"),
    ("memcpy_dtoh", "device to host", r"^Memcpy DtoH"),
    ("memset", "fills", r"^Memset|FillFunctor"),
    ("comm", "collectives", r"nccl|all_?reduce|reduce_scatter|all_?gather|ar_fusion"),
    (
        "conv_planar",
        "prefill conv that stores q, k, v as planes",
        r"conv1d.*plan(ar|e)|plan(ar|es?).*conv1d",
    ),
    (
        "kda_track",
        "state and conv window snapshots",
        r"_track_(conv|ssm|mamba)|kda_track",
    ),
    (
        "kda_decode",
        "decode and verify, not prefill",
        r"kda.*(decode|verify|mtp|_t1(_|$)|replayssm)"
        r"|recurrent_(kda_)?(gated_delta_rule_)?(update|packed_decode)"
        r"|causal_conv1d_update",
    ),
    (
        "pack",
        "KDA inputs packed into contiguous tensors",
        r"^(?=.*(kda|qkv|prefill))(.*_)?pack(_|ing|$)",
    ),
    ("conv", "causal conv of a prefill", r"causal_conv1d"),
    ("l2norm", "l2norm of q and k", r"l2_?norm|qkv_prepare_kernel"),
    (
        "kda",
        "KDA prefill core, any backend",
        # sglang.kernels.kda_kernels is "Kernel Design Agents", not this.
        r"(?<!kernels)kda|chunk_gla_fwd|chunk_gated_delta_rule_fwd|recompute_w_u_fwd"
        r"|chunk_local_cumsum|fused_kernel123|akk_inv_kernel|k4_persistent_kernel"
        # FlashInfer's BT=16 kernels have no module in their names.
        r"|^kernel_cutlass_(kernel_prep|kernel_chain_dv2|packed_metadata_kernel)_"
        r"|^kernel_cutlass_kernel_TensorMap",
    ),
    (
        "moe_gemm",
        "grouped GEMM of the experts",
        r"^bmm_.*_dynB|^bmm_.*_(rgTma|routeAct)|fused_moe_kernel|moe.*gemm|grouped_?gemm",
    ),
    (
        "moe_other",
        "routing, permutation, finalize",
        r"moe|routingIndices|routing(Custom|Main|Init)|topk|expert",
    ),
    (
        "cast",
        "copy that changes the dtype",
        r"^(?=.*copy_kernel).*(LoadWithCast|gpu_kernel_impl<)|float(16|8\w*)_copy_kernel",
    ),
    (
        "copy",
        "contiguous(), clone(), copy_()",
        r"direct_copy_kernel|copy_device_to_device",
    ),
    (
        "attention",
        "softmax attention, MLA",
        r"fmha|(\b|_)mla|flash_?(fwd|attn)|attention|merge_state",
    ),
    (
        "gemm",
        "dense GEMM",
        r"gemm|nvjet|cublas|cutlass.*(mma|matmul)|xmma|^bmm_|splitKreduce|gemv",
    ),
    ("norm", "RMSNorm, LayerNorm", r"rms_?norm|layer_?norm|norm_gate"),
)
OTHER = "other"
MEANING = {
    "kda_copy": "copy between the causal conv and the KDA core",
    **{name: text for name, text, _ in RULES},
    OTHER: "everything else",
}
# The operators that a trace without a GPU holds, for `--activity cpu`.
CPU_RULES = (
    ("copy", "", r"^aten::(copy_|contiguous|clone)$"),
    ("gemm", "", r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm)$"),
    ("norm", "", r"^aten::.*norm"),
    ("attention", "", r"^aten::.*attention"),
)
_RULES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, _, pattern in RULES)
_CPU = tuple((name, re.compile(pattern)) for name, _, pattern in CPU_RULES)

# trtllm-gen: bmm_<C>_<A><B>_<acc>_..._t<M>x<N>x<K>[u2]_..._et<epilogue>_m<mma>_...
_TILE = re.compile(r"_t(\d+)x(\d+)x(\d+)(?:u\d+)?(?:_|$)")
_TOKENS_N = re.compile(r"_(transOut|bN)(_|$)")
_TOKENS_M = re.compile(r"_bM(_|$)")


@functools.cache
def classify(name: str, activity: str = "gpu") -> str:
    """Class of one kernel (or, for activity "cpu", of one operator)."""
    for kind, pattern in _CPU if activity == "cpu" else _RULES:
        if pattern.search(name):
            return kind
    return OTHER


@functools.cache
def token_tile(name: str) -> int | None:
    """Tokens of one CTA tile of a trtllm-gen GEMM, read from its name.

    `_t128x192x512_` names M x N x K. With the output transposed (`transOut`,
    batched over N, `bN`) the weights are M and the tokens N, otherwise (`bM`)
    the tokens are M. None when the name says neither, as a cut name may.
    """
    match = _TILE.search(name) if name.lower().startswith("bmm_") else None
    if match is None:
        return None
    if _TOKENS_N.search(name):
        return int(match[2])
    return int(match[1]) if _TOKENS_M.search(name) else None


def mark_kda_copies(classes: Sequence[str]) -> list[str]:
    """Renames the copies of KDA's inputs to `kda_copy`.

    `classes` are one stream's kernels in order. A copy counts when the kernel
    before it is the causal conv, a pack or an l2norm, and the one after it is a
    pack, an l2norm or the KDA core; copies, casts, fills and unclassified kernels
    are passed over. Only a KDA layer's input copies lie there.
    """
    aside = {*COPIES, "cast", "memset", "memcpy_htod", "memcpy_dtoh", OTHER}
    result = list(classes)
    open_copies: list[int] = []
    before = OTHER
    for index, kind in enumerate(classes):
        if kind in COPIES:
            open_copies.append(index)
        if kind in aside:
            continue
        if before in ("conv", "conv_planar", "pack", "l2norm") and kind in (
            "pack",
            "l2norm",
            "kda",
        ):
            for position in open_copies:
                result[position] = "kda_copy"
        before, open_copies = kind, []
    return result


def names_of(classes: Iterable[str]) -> list[str]:
    """The classes in the order of the table, unknown ones last."""
    order = {name: place for place, name in enumerate(MEANING)}
    return sorted(set(classes), key=lambda name: (order.get(name, len(order)), name))
