"""The KDA contract double refuses whatever FlashInfer's own eligibility check refuses."""

import unittest
from unittest.mock import patch

import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kits.kda_flashinfer_contract_double import (
    ContractViolation,
    KDAContractDouble,
    check_call,
)

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

try:
    from flashinfer import kda_prefill, kda_prefill_cute
except ImportError:
    kda_prefill = kda_prefill_cute = None

TOKENS, HEADS, SLOTS = 96, 2, 5
BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


class _SeenAsCuda(torch.Tensor):
    """A CPU tensor that FlashInfer's host-side checks take for a device tensor."""

    is_cuda = property(lambda self: True)


def valid_call() -> dict:
    def zeros(*shape, dtype=BF16):
        return torch.zeros(*shape, dtype=dtype)

    pool = zeros(SLOTS, HEADS, 128, 128, dtype=FP32)
    return dict(
        q=zeros(1, TOKENS, HEADS, 128),
        k=zeros(1, TOKENS, HEADS, 128),
        v=zeros(1, TOKENS, HEADS, 128),
        g=zeros(1, TOKENS + 4, HEADS, 128),
        beta=zeros(1, TOKENS + 4, HEADS),
        A_log=zeros(HEADS, dtype=FP32),
        dt_bias=zeros(HEADS * 128, dtype=FP32),
        cu_seqlens=torch.tensor([0, 32, TOKENS], dtype=INT64),
        initial_state=pool,
        ssm_state_indices=torch.tensor([1, 2], dtype=INT32),
        lower_bound=-5.0,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        beta_is_logit=True,
        output=None,
        seq_order=torch.tensor([1, 0], dtype=INT32),
        state_checkpoints=pool,
        checkpoint_cu_starts=torch.tensor([0, 1, 3], dtype=INT64),
        checkpoint_state_indices=torch.tensor([3, -1, 4], dtype=INT32),
        checkpoint_every_n_tokens=32,
    )


def _strided(x):
    """The same shape with a gap after every last-dimension row."""
    return x.new_zeros(*x.shape[:-1], x.shape[-1] * 2)[..., : x.shape[-1]]


def _offset(x):
    """The same shape, contiguous, one element past an aligned address."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape)


def tensor_changes():
    """(name, wrong tensor) pairs, one changed argument each."""
    call = valid_call()
    for name in ("q", "k", "v", "g", "beta"):
        x = call[name]
        yield name, x.float()
        yield name, x.half()
        yield name, _strided(x)
        yield name, x[..., :1].contiguous()
        yield name, x[:, : TOKENS - 1].contiguous()
        yield name, x[0]
    for name in ("k", "v"):
        yield name, call[name][:, :, :1].contiguous()
    yield "beta", _offset(call["beta"])
    for name in ("A_log", "dt_bias"):
        x = call[name]
        yield name, x.to(BF16)
        yield name, x[1:]
        yield name, _strided(x)
        yield name, None
    yield "A_log", call["A_log"].view(1, 1, HEADS, 1)
    yield "dt_bias", call["dt_bias"].view(128, HEADS)
    for name in ("cu_seqlens", "checkpoint_cu_starts"):
        yield name, call[name].float()
        yield name, _strided(call[name])
        yield name, call[name].view(1, -1)
    yield "cu_seqlens", torch.zeros(1, dtype=INT64)
    yield "checkpoint_cu_starts", call["checkpoint_cu_starts"].int()
    yield "checkpoint_cu_starts", torch.zeros(4, dtype=INT64)
    yield "checkpoint_cu_starts", None
    for name in ("ssm_state_indices", "seq_order", "checkpoint_state_indices"):
        x = call[name]
        yield name, x.long()
        yield name, _strided(x)
        yield name, x.view(1, -1)
    for name in ("ssm_state_indices", "seq_order"):
        yield name, torch.zeros(3, dtype=INT32)
    pool = call["initial_state"]
    for name in ("initial_state", "state_checkpoints"):
        yield name, pool.half()
        yield name, pool.to(BF16)
        yield name, pool[:, :1].contiguous()
        yield name, pool.transpose(2, 3)
        yield name, pool[0]
    yield "initial_state", _offset(pool)
    yield "initial_state", pool[:0]
    yield "initial_state", _strided(pool)
    yield (
        "initial_state",
        torch.zeros(SLOTS, pool[0].numel() + 1)[:, :-1].view(SLOTS, HEADS, 128, 128),
    )
    yield "state_checkpoints", _strided(pool)
    yield "output", torch.zeros(1, TOKENS, HEADS, 128, dtype=FP32)
    yield "output", torch.zeros(1, TOKENS - 1, HEADS, 128, dtype=BF16)


def option_changes():
    """(name, wrong option) pairs."""
    for bound in (None, 0.0, 1.0, float("-inf"), float("nan")):
        yield "lower_bound", bound
    for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "beta_is_logit"):
        yield name, False
    for interval in (-32, 16, 48, 2**31, 0):
        yield "checkpoint_every_n_tokens", interval


def strided_pool_call() -> dict:
    pool = torch.zeros(SLOTS, HEADS * 128 * 128 + 16)[:, :-16]
    call = valid_call()
    call["initial_state"] = pool.unflatten(-1, (HEADS, 128, 128))
    return call


def refuses(call: dict) -> bool:
    try:
        check_call(**call)
    except (ContractViolation, AttributeError, IndexError):
        return True
    return False


@unittest.skipIf(kda_prefill_cute is None, "flashinfer.kda_prefill_cute is not here")
class TestDoubleAgainstFlashInfer(unittest.TestCase):
    """Every rule below is asked of FlashInfer itself, on CPU tensors."""

    def flashinfer_refuses(self, call: dict) -> bool:
        seen = {
            name: x.as_subclass(_SeenAsCuda) if isinstance(x, torch.Tensor) else x
            for name, x in call.items()
        }
        others = dict.fromkeys(
            (
                "num_spec_tokens",
                "num_accepted_tokens",
                "initial_state_source",
                "initial_state_indices",
            )
        )
        with (
            patch.object(
                kda_prefill_cute, "get_compute_capability", return_value=(10, 3)
            ),
            patch.object(
                kda_prefill_cute, "_is_cute_dsl_kda_runtime_available", lambda: True
            ),
        ):
            return not (
                kda_prefill._is_plain_multi_token_prefill(
                    seen["q"], seen["cu_seqlens"], None
                )
                and kda_prefill_cute._is_cute_dsl_kda_prefill_eligible(**seen, **others)
            )

    def test_valid_calls_pass_both(self):
        without = dict.fromkeys(
            ("state_checkpoints", "checkpoint_cu_starts", "checkpoint_state_indices")
        )
        int32 = dict(cu_seqlens=valid_call()["cu_seqlens"].int(), seq_order=None)
        for call in (
            valid_call(),
            {**valid_call(), **without, "checkpoint_every_n_tokens": 0},
            {**valid_call(), **int32},
            strided_pool_call(),
        ):
            self.assertFalse(self.flashinfer_refuses(call))
            self.assertFalse(refuses(call))

    def test_double_is_never_kinder(self):
        refused = 0
        for name, value in [*tensor_changes(), *option_changes()]:
            call = {**valid_call(), name: value}
            if self.flashinfer_refuses(call):
                refused += 1
                described = (
                    (value.dtype, tuple(value.shape), value.stride())
                    if isinstance(value, torch.Tensor)
                    else value
                )
                with self.subTest(name=name, value=described):
                    self.assertTrue(refuses(call))
        self.assertGreater(refused, 75)

    def test_more_tokens_than_sequences(self):
        call = valid_call()
        call["cu_seqlens"] = torch.arange(TOKENS + 1)
        call["ssm_state_indices"] = torch.zeros(TOKENS, dtype=INT32)
        call["seq_order"] = None
        call["checkpoint_cu_starts"] = torch.zeros(TOKENS + 1, dtype=INT64)
        self.assertTrue(self.flashinfer_refuses(call))
        self.assertTrue(refuses(call))


class TestDoubleReadsValues(unittest.TestCase):
    """Values that the real kernel would follow out of bounds."""

    def refuse(self, **changes):
        call = {**valid_call(), **changes}
        with self.assertRaises(ContractViolation):
            KDAContractDouble().recurrent_kda(**call)

    def test_values(self):
        def int32(*values):
            return torch.tensor(values, dtype=INT32)

        KDAContractDouble().recurrent_kda(**valid_call())
        self.refuse(cu_seqlens=torch.tensor([1, 32, TOKENS]))
        self.refuse(cu_seqlens=torch.tensor([0, 97, TOKENS]))
        self.refuse(cu_seqlens=torch.tensor([0, 32, TOKENS - 1]))
        self.refuse(ssm_state_indices=int32(-1, 2))
        self.refuse(ssm_state_indices=int32(1, SLOTS))
        self.refuse(ssm_state_indices=int32(2, 2))
        self.refuse(checkpoint_cu_starts=torch.tensor([0, 2, 3]))
        self.refuse(checkpoint_cu_starts=torch.tensor([1, 2, 4]))
        self.refuse(checkpoint_state_indices=int32(3, -1))
        self.refuse(checkpoint_state_indices=int32(3, -2, 4))
        self.refuse(checkpoint_state_indices=int32(3, -1, SLOTS))
        self.refuse(checkpoint_state_indices=int32(3, -1, 3))
        self.refuse(checkpoint_state_indices=int32(1, -1, 3))  # a live slot

    def test_wrapper_fixes_rows_and_tokens(self):
        call = valid_call()
        offsets = call.pop("cu_seqlens")
        call.pop("seq_order")
        wrapper = KDAContractDouble().wrapper_cls("cpu")
        with self.assertRaises(ContractViolation):
            wrapper.run(**call)
        wrapper.plan(offsets)
        wrapper.run(**call)
        with self.assertRaises(ContractViolation):
            wrapper.plan(offsets[:2])
        short = {name: call[name][:, :64].contiguous() for name in ("q", "k", "v")}
        with self.assertRaises(ContractViolation):
            wrapper.run(**{**call, **short})
        for wrong in (offsets.float(), offsets[:1], offsets.view(1, -1)):
            with self.assertRaises(ContractViolation):
                KDAContractDouble().wrapper_cls("cpu").plan(wrong)


if __name__ == "__main__":
    unittest.main()
