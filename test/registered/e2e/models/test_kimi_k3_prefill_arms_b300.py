"""Kimi-K3 prefill on eight B300 GPUs at TP1/PP8 with 16K chunks.

Three servers run one after the other: Triton KDA prefill without the MoE tactic seed,
with the seed, and the seed with FlashInfer KDA prefill. The server logs must state
which path ran, the greedy outputs must be equal, and the last server must keep the
accuracy and the prefix-cache scores.

Bounds: prompt lengths, runs and equal output ids are those of
https://github.com/sgl-project/sglang/pull/47653, which did not run FlashInfer prefill.
The accuracy floor and the branching check are those of
https://github.com/sgl-project/sglang/pull/41400, where a shared state slot moved the mean
copy logprob from -0.02 to -1.35, a KL estimate of 0.59. The KL bound is that of
Kimi-Linear's registered test and not yet measured on Kimi-K3.
"""

import unittest

from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_planned import (
    PLANNED_PREFILL_NOTICE,
    UNPLANNED_PREFILL_NOTICE,
)
from sglang.srt.layers.moe.kimi_k3_prefill_tactics import LOG_PREFIX
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.prefill_arms_kit import PrefillArm, PrefillArmsMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.server_fixtures.default_fixture import DefaultServerBase

# ci-cost-override: the seed applies to eight such GPUs only, and each arm is a server.
# est_time: three launches and the evaluations, not yet measured.
register_cuda_ci(est_time=1800, stage="base-c", runner_config="8-gpu-b300")

TRITON_PREFILL = ("--linear-attn-prefill-backend", "triton")
FLASHINFER_PREFILL = ("--linear-attn-prefill-backend", "flashinfer")
SEEDED = f"{LOG_PREFIX} seeded:"
NOT_SEEDED = f"{LOG_PREFIX} not seeded:"
# Part of the line in which the engine names its linear attention kernels.
TRITON_SELECTED = "prefill=triton"
FLASHINFER_SELECTED = "prefill=flashinfer"


class TestKimiK3PrefillArmsB300(
    PrefillArmsMixin,
    GSM8KMixin,
    KLDivergenceMixin,
    PrefixCacheBranchingMixin,
    DefaultServerBase,
):
    """Seeded and FlashInfer prefill answer as the unseeded Triton prefill does."""

    model = "moonshotai/Kimi-K3"
    timeout = 3600
    min_gpus = 8
    capabilities = ((10, 3),)
    # The setup of the seed's measurements, with the prefix cache on.
    other_args = [
        "--trust-remote-code",
        "--tp-size",
        "1",
        "--pp-size",
        "8",
        "--pp-async-batch-depth",
        "1",
        "--chunked-prefill-size",
        "16384",
        "--mem-fraction-static",
        "0.85",
        "--model-loader-extra-config",
        '{"enable_multithread_load": true, "num_threads": 12}',
        "--mamba-radix-cache-strategy",
        "extra_buffer",
    ]
    arms = (
        PrefillArm(
            name="base",
            server_args=TRITON_PREFILL,
            # Fresh tuning: the seed stands aside when cache reuse is off.
            env={"SGLANG_FLASHINFER_AUTOTUNE_CACHE": "0"},
            log_has=(TRITON_SELECTED, NOT_SEEDED),
            log_lacks=(SEEDED, PLANNED_PREFILL_NOTICE),
        ),
        PrefillArm(
            name="seeded",
            server_args=TRITON_PREFILL,
            log_has=(TRITON_SELECTED, SEEDED),
            log_lacks=(NOT_SEEDED, PLANNED_PREFILL_NOTICE),
        ),
        PrefillArm(
            name="seeded_flashinfer",
            server_args=FLASHINFER_PREFILL,
            log_has=(FLASHINFER_SELECTED, SEEDED, PLANNED_PREFILL_NOTICE),
            log_lacks=(NOT_SEEDED, UNPLANNED_PREFILL_NOTICE),
        ),
    )
    # 47653: all 60 comparisons at these lengths had equal output ids.
    prompt_lengths = (1024, 16_383, 16_384, 16_385, 32_768, 65_536)
    prompt_runs = 2

    # 41400 kept this registered Kimi-K3 floor.
    gsm8k_score_threshold = 0.95
    gsm8k_num_examples = 200
    gsm8k_num_threads = 98

    # 41400: prefix and span. A sound run must stay far below the 0.59 of a shared slot.
    branch_prefix = 8320
    prompt_span = 167
    branch_kl_thres = 0.02
    kl_div_thres = 0.02
    kl_div_trust_remote_code = True
    cache_chunk_size = 64


if __name__ == "__main__":
    unittest.main()
