"""GLM-5.3-Flash with FlashInfer KDA prefill on four B200 GPUs.

Two servers run one after the other, Triton and FlashInfer KDA prefill. The server logs
must state which path ran, the greedy outputs must be equal, and the FlashInfer server
must keep the accuracy and the prefix-cache scores.

Bounds: those of https://github.com/sgl-project/sglang/pull/41400. This backend scored
0.932 over 500 questions on B200; the floor is two standard errors (0.011 each) below. A
shared state slot moved the mean copy logprob of the branching check from -0.02 to -1.35,
a KL estimate of 0.59, while single outliers of sound runs, near 2.9 nats, add at most
0.09 to the mean of 167 tokens; the KL bound lies between.
"""

import unittest

from sglang.srt.layers.attention.linear.kernels.kda_flashinfer_planned import (
    PLANNED_PREFILL_NOTICE,
    UNPLANNED_PREFILL_NOTICE,
)
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.kits.prefill_arms_kit import PrefillArm, PrefillArmsMixin
from sglang.test.server_fixtures.default_fixture import DefaultServerBase
from sglang.test.test_utils import try_cached_model

# ci-cost-override: each arm is a server of its own on four GPUs.
# est_time: not yet measured; the PTX sibling of this test takes 822 s.
register_cuda_ci(est_time=900, stage="base-c", runner_config="4-gpu-b200")


class TestGLM53FlashKdaFlashInferPrefillB200(
    PrefillArmsMixin, GSM8KMixin, DefaultServerBase
):
    """FlashInfer KDA prefill answers as Triton KDA prefill does."""

    model = try_cached_model("zai-org/GLM-5.3-Flash")
    timeout = 3600
    min_gpus = 4
    capabilities = ((10, 0), (10, 3))
    other_args = [
        "--tp-size",
        "4",
        "--dsa-prefill-backend",
        "trtllm",
        "--dsa-decode-backend",
        "trtllm",
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--moe-runner-backend",
        "flashinfer_trtllm",
        "--chunked-prefill-size",
        "16384",
        # 41400's prefix checks need the interval of the pooled index groups.
        "--mamba-track-interval",
        "256",
    ]
    arms = (
        PrefillArm(
            name="triton",
            server_args=("--linear-attn-prefill-backend", "triton"),
            log_has=("prefill=triton",),
            log_lacks=(PLANNED_PREFILL_NOTICE,),
        ),
        PrefillArm(
            name="flashinfer",
            server_args=("--linear-attn-prefill-backend", "flashinfer"),
            log_has=("prefill=flashinfer", PLANNED_PREFILL_NOTICE),
            log_lacks=(UNPLANNED_PREFILL_NOTICE,),
        ),
    )
    # Below the DSA indexer's top-k of 2048: sparse selection above it differs from
    # run to run on its own. 130 and 2040 are no multiples of the 64-token chunk.
    prompt_lengths = (130, 1024, 2040)

    # 41400: 0.932, less two standard errors.
    gsm8k_score_threshold = 0.91
    gsm8k_num_examples = 500
    gsm8k_num_shots = 20

    # 41400: prefix and span; between a sound run's 0.09 and a shared slot's 0.59.
    branch_prefix = 8320
    prompt_span = 167
    branch_new_tokens = 167
    branch_kl_thres = 0.2
    # The checkpoint of that prefix is resumed at 8192.
    cache_chunk_size = 256


if __name__ == "__main__":
    unittest.main()
