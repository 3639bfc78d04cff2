"""Kernel names as the libraries write them, each sorted into its class."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import kernel_classes as kinds

LAMBDA = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}"
COPY = (
    f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    f"{LAMBDA}::operator()() const::{{lambda()#12}}::operator()() const::"
    "{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&, "
    f"{LAMBDA} const&)::{{lambda(int)#1}}>(int, {LAMBDA})"
)
CAST = (
    f"void at::native::unrolled_elementwise_kernel<{LAMBDA}, std::array<char*, 2ul>, 4,"
    " TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, unsigned"
    " int>, at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >"
    "(int)"
)
FC1 = (
    "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_Ab32_Bb32_Cb32_t128x{n}x512{u}_s3_et128x64_m128x{n}"
    "x32_c1x1x1_rM_TN_transOut_schPd2x1x2x3_biasFp32M_bN_ldgsts_ldgstsSf_rgTma_clmp_"
    "siTuGlu_dynB_sm100f"
)
FC2 = (
    "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_Ab32_Bb32_t128x{n}x256_s4_et128x64_m256x{n}x32_"
    "c2x1x1_rM_TN_transOut_schPd2x1x2x3_biasFp32M_bN_rgTma_clmp_dynB_sm100f"
)
# What CuTe DSL 4.8.0 names FlashInfer 0.7.2's BT=16 kernels when it compiles them
# for sm_103a: cut at 180 characters, then numbered.
MAP = "TensorMapswizzleTensorMapSwizzles128b_3_dtypeclass_cutlassbase_dslty"

EXAMPLES = {
    "copy": [COPY],
    "cast": [
        CAST,
        "void at::native::elementwise_kernel<128, 4,"
        f" at::native::gpu_kernel_impl<{LAMBDA}>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_"
        "kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>",
    ],
    "memcpy_dtod": ["Memcpy DtoD (Device -> Device)"],
    "memcpy_htod": ["Memcpy HtoD (Pinned -> Device)"],
    "memcpy_dtoh": ["Memcpy DtoH (Device -> Pageable)"],
    "memset": [
        "Memset (Device)",
        "void at::native::vectorized_elementwise_kernel<8, FillFunctor<float> >",
    ],
    "conv": ["_causal_conv1d_fwd_kernel"],
    "conv_planar": [
        "_causal_conv1d_planar_fwd_kernel",
        "_causal_conv1d_fwd_planes_kernel",
    ],
    "pack": [
        "_kda_pack_inputs_kernel",
        "_pack_kda_prefill_kernel",
        "pack_qkv_beta_kernel",
        "_kda_prefill_pack_kernel",
    ],
    "kda_track": ["_kda_track_conv_window_kernel", "_kda_track_ssm_kernel"],
    "l2norm": [
        "l2norm_fwd_kernel",
        "l2norm_fwd_kernel1",
        "gdn_prefill_qkv_prepare_kernel",
    ],
    "kda": [
        "kda_gate_chunk_cumsum_vector_kernel",
        "chunk_kda_fwd_kernel_intra_sub_chunk",
        "chunk_kda_fwd_kernel_inter_solve_fused",
        "chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_inter",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_gla_fwd_kernel_o",
        "_recompute_w_u_fwd_kernel",
        "kernel_cutlass_packed_metadata_kernel_tensorptri64gmemoi641_tensorptri32gm_0",
        f"kernel_cutlass_kernel_prep_{MAP}_1",
        f"kernel_cutlass_kernel_chain_dv2_{MAP}_2",
        f"kernel_cutlass_kernel_{MAP}_3",
        "kernel_flashkda_bf16_bt16_prepare",
        "kernel_flashkda_bf16_fused_m128_c8af151b6d",
        "kernel_cake_kda_affine_unbounded_softplus_scan",
        "kernel_kda_fwd_stream_m128_cluster2",
        "kernel_cutlass_kernel_sglangkernelsopsattentionlinearkda_blackwellkernel_hKd_0",
        "_kda_prologue_kernel",
        "kernel_cutlass_fused_kernel123_tensorptrbf16_0",
    ],
    "kda_decode": [
        "fused_recurrent_kda_packed_decode_kernel",
        "kernel_kimi_k3_kda_t1_packed_tile16",
        "_causal_conv1d_update_kernel",
        "kda_decode_mtp_kernel",
        "fused_kda_conv_gating_verify_kernel",
        "fused_recurrent_gated_delta_rule_update_fwd_kernel",
    ],
    "moe_gemm": [
        FC1.format(n=192, u=""),
        FC2.format(n=128),
        "fused_moe_kernel",
        "void deep_gemm::sm100_m_grouped_gemm_contiguous<...>",
    ],
    "moe_other": [
        "moe::dev::routing::routingCustom::routingIndicesSmallBsKernel<float>",
        "moe::dev::finalize::finalizeKernelVecLoad<...>",
    ],
    "comm": [
        "ar_fusion::moe::moefinalize_allreduce_fusion_kernel_oneshot_lamport<bf16, 8>",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "gemm": [
        "nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT",
        "bmm_Bfloat16_E4m3E4m3_Fp32_t128x16x128u2_s6_et64x16_m64x16x32_c1x1x1_rM_TN_"
        "transOut_noShfl",
        "kernel_cutlass_kernel_flashinfergemmkernelsdense_blockscaled_gemm_sm100Sm100Bl",
    ],
    "attention": [
        "fmhaSm100fKernel_QkvBfloat16OBfloat16H192HV128SeparateQkvCausalVarSeqQ128"
    ],
    "norm": ["void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>"],
    "other": [
        "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<float> >",
        # "Kernel Design Agents" and a lane count are neither KDA nor MLA.
        "kernel_cutlass_kernel_sglangkernelskda_kernelshopperfused_rope_0",
        "void reduce<kNumLanes>(int)",
    ],
}


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind, names in EXAMPLES.items() for name in names]
)
def test_class_of(kind, name):
    assert kinds.classify(name) == kind


def test_every_class_has_an_example_and_a_meaning():
    assert {*EXAMPLES, "kda_copy"} == set(kinds.MEANING)


@pytest.mark.parametrize(
    "name, tile",
    [
        (FC1.format(n=192, u=""), 192),
        (FC1.format(n=256, u="u2"), 256),
        (FC2.format(n=128), 128),
        # Tokens are M where the output is not transposed.
        (
            "bmm_E4m3_E4m3E4m3_Fp32_t256x64x128_s5_et128x32_m256x64x32_rM_TN_bM_dynB",
            256,
        ),
        # Cut before it says which side the tokens are on.
        (
            "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_Ab32_Bb32_t128x16x256_s4_et128x16_rM_TN_t",
            None,
        ),
        ("fused_moe_kernel", None),
        ("nvjet_sm100_tst_128x256_64x6", None),
    ],
)
def test_token_tile(name, tile):
    assert kinds.token_tile(name) == tile


@pytest.mark.parametrize(
    "stream, copies",
    [
        # FlashInfer: all inputs copied, cu_seqlens cast, then the kernels.
        ("gemm conv copy copy copy copy cast kda kda kda norm gemm", 4),
        # Triton chunk_kda: copies between its l2norms.
        ("conv copy l2norm copy l2norm copy kda kda kda", 3),
        # Metadata kernels of the first layer in between.
        ("conv copy l2norm copy l2norm copy other other kda", 3),
        ("conv copy pack kda", 1),
        ("conv pack kda", 0),
        ("conv_planar l2norm l2norm kda", 0),
        # Copies elsewhere in the model: before the conv, after the core, in MLA.
        ("copy conv kda copy norm gemm copy attention copy gemm", 0),
        # A conv without a KDA core behind it (the last layer was cut off).
        ("conv copy copy", 0),
        # A copy between two KDA kernels is the core's own.
        ("conv kda copy kda", 0),
        ("conv memcpy_dtod copy kda", 2),
        ("", 0),
    ],
)
def test_kda_copies_by_their_neighbours(stream, copies):
    before = stream.split()
    after = kinds.mark_kda_copies(before)
    assert after.count("kda_copy") == copies
    changed = [a for a, b in zip(before, after, strict=True) if a != b]
    assert set(changed) <= {"copy", "memcpy_dtod"}


def test_order_of_classes_is_the_tables():
    assert kinds.names_of(["other", "zzz", "kda", "kda_copy"]) == [
        "kda_copy",
        "kda",
        "other",
        "zzz",
    ]
