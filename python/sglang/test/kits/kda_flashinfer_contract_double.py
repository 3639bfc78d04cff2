"""Contract double of FlashInfer's CuTe DSL KDA prefill, for tests only.

It stands in for ``flashinfer.kda.recurrent_kda(backend="cute-dsl")`` and
``flashinfer.kda.RecurrentKDAPrefillWrapper`` where no SM100/SM103 device exists. It
refuses every call that the documented contract refuses, and it computes the real
recurrence: in float64, or through the Triton kernel on a CUDA device. It says nothing
about the speed or the rounding of the real kernel.
"""

from __future__ import annotations

import math
from typing import Callable, Optional

import torch

from sglang.test.kits.kda_prefill_numerics import float64_numerics

HEAD_DIM = 128
_INT32_MAX = 2**31 - 1


class ContractViolation(ValueError):
    """The real kernel would refuse this call, or read or write out of bounds."""


def _require(ok: bool, rule: str) -> None:
    if not ok:
        raise ContractViolation(rule)


def _is_vector(x, *, dtypes, length, device) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.device == device
        and x.dtype in dtypes
        and x.ndim == 1
        and x.is_contiguous()
        and (length is None or x.numel() == length)
    )


def check_call(
    *,
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    initial_state,
    ssm_state_indices,
    lower_bound,
    use_qk_l2norm_in_kernel,
    use_gate_in_kernel,
    beta_is_logit,
    output=None,
    seq_order=None,
    state_checkpoints=None,
    checkpoint_cu_starts=None,
    checkpoint_state_indices=None,
    checkpoint_every_n_tokens=0,
) -> None:
    """Raise ContractViolation on types, shapes, strides and alignment that FlashInfer
    0.7.2 does not take for packed prefill. Reads no element."""
    bf16 = torch.bfloat16
    _require(isinstance(q, torch.Tensor) and q.ndim == 4, "q is [1, T, H, 128]")
    _, tokens, heads, dim = q.shape
    _require(
        q.dtype == bf16 and q.is_contiguous() and q.shape[0] == 1 and heads > 0,
        "q is contiguous bfloat16",
    )
    _require(dim == HEAD_DIM and tokens > 1, "head size 128 and more than one token")
    _require(
        use_qk_l2norm_in_kernel and use_gate_in_kernel and beta_is_logit,
        "norm, gate and beta sigmoid are in the kernel",
    )
    _require(
        lower_bound is not None and math.isfinite(lower_bound) and lower_bound < 0,
        "the gate bound is finite and negative",
    )
    for name, x in (("k", k), ("v", v)):
        _require(
            x.shape == q.shape
            and x.dtype == bf16
            and x.device == q.device
            and x.is_contiguous(),
            f"{name} is like q",
        )
    for name, x, tail in (("g", g, (heads, dim)), ("beta", beta, (heads,))):
        _require(
            x.dtype == bf16
            and x.device == q.device
            and x.shape[0] == 1
            and x.shape[1] >= tokens
            and tuple(x.shape[2:]) == tail
            and x[:, :tokens].is_contiguous(),
            f"{name} is bfloat16, contiguous over the tokens",
        )
    _require(beta.data_ptr() % 16 == 0, "beta is 16-byte aligned")
    for name, x, shapes in (
        ("A_log", A_log, ((heads,),)),
        ("dt_bias", dt_bias, ((heads * dim,), (heads, dim))),
    ):
        _require(
            isinstance(x, torch.Tensor)
            and x.dtype == torch.float32
            and x.device == q.device
            and tuple(x.shape) in shapes
            and x.is_contiguous(),
            f"{name} is contiguous float32 of {shapes}",
        )
    _require(
        _is_vector(
            cu_seqlens,
            dtypes=(torch.int32, torch.int64),
            length=None,
            device=q.device,
        )
        and cu_seqlens.numel() > 1,
        "cu_seqlens is a contiguous int32 or int64 vector",
    )
    num_seqs = cu_seqlens.numel() - 1
    _require(tokens > num_seqs, "more tokens than sequences")
    _require(
        seq_order is None
        or _is_vector(
            seq_order, dtypes=(torch.int32,), length=num_seqs, device=q.device
        ),
        "seq_order is int32, one entry a sequence",
    )
    _check_state(
        initial_state=initial_state,
        ssm_state_indices=ssm_state_indices,
        heads=heads,
        num_seqs=num_seqs,
        device=q.device,
    )
    _require(
        output is None
        or (
            output.shape == q.shape
            and output.dtype == bf16
            and output.device == q.device
            and output.is_contiguous()
        ),
        "output is like q",
    )
    _check_checkpoints(
        state=initial_state,
        target=state_checkpoints,
        cu_starts=checkpoint_cu_starts,
        indices=checkpoint_state_indices,
        interval=checkpoint_every_n_tokens,
        num_seqs=num_seqs,
        device=q.device,
    )


def _check_state(*, initial_state, ssm_state_indices, heads, num_seqs, device) -> None:
    _require(
        _is_vector(
            ssm_state_indices, dtypes=(torch.int32,), length=num_seqs, device=device
        ),
        "state indices are int32, one a sequence",
    )
    slot = HEAD_DIM * HEAD_DIM
    x = initial_state
    _require(
        isinstance(x, torch.Tensor)
        and x.device == device
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.ndim == 4
        and x.shape[0] > 0
        and tuple(x.shape[1:]) == (heads, HEAD_DIM, HEAD_DIM),
        "the pool is bfloat16 or float32 [slots, H, 128, 128]",
    )
    _require(
        x.stride()[1:] == (slot, HEAD_DIM, 1)
        and x.stride(0) >= heads * slot
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0,
        "pool slots are dense and 16-byte aligned",
    )


def _check_checkpoints(
    *, state, target, cu_starts, indices, interval, num_seqs, device
) -> None:
    _require(
        0 <= interval <= _INT32_MAX and interval % 32 == 0,
        "the checkpoint interval is a multiple of 32",
    )
    if not interval:
        _require(
            target is None and cu_starts is None and indices is None,
            "checkpoint tensors need an interval",
        )
        return
    _require(
        _is_vector(
            cu_starts, dtypes=(torch.int64,), length=num_seqs + 1, device=device
        ),
        "checkpoint_cu_starts is int64, one entry a sequence plus one",
    )
    _require(
        isinstance(target, torch.Tensor)
        and target.device == device
        and target.dtype == state.dtype
        and target.ndim == 4
        and target.shape[0] <= _INT32_MAX
        and target.shape[1:] == state.shape[1:]
        and target.is_contiguous(),
        "the checkpoint pool is contiguous and of the state's dtype",
    )
    _require(
        _is_vector(indices, dtypes=(torch.int32,), length=None, device=device),
        "checkpoint indices are a contiguous int32 vector",
    )


def check_values(
    *,
    tokens,
    cu_seqlens,
    initial_state,
    ssm_state_indices,
    state_checkpoints,
    checkpoint_cu_starts,
    checkpoint_state_indices,
    checkpoint_every_n_tokens,
) -> None:
    """Raise ContractViolation on values that make the real kernel read or write rows
    it must not. Reads the index tensors on the host."""
    offsets = cu_seqlens.tolist()
    lens = [b - a for a, b in zip(offsets, offsets[1:])]
    _require(
        offsets[0] == 0 and offsets[-1] == tokens and min(lens) >= 0,
        f"offsets {offsets} split {tokens} tokens",
    )
    slots = ssm_state_indices.tolist()
    _require(
        min(slots) >= 0 and max(slots) < initial_state.shape[0],
        f"state slots {slots} are inside the pool",
    )
    live = [slot for slot, n in zip(slots, lens) if n and slot]
    _require(len(set(live)) == len(live), f"rows share a state slot: {slots}")
    if not checkpoint_every_n_tokens:
        return
    starts = checkpoint_cu_starts.tolist()
    counts = [b - a for a, b in zip(starts, starts[1:])]
    _require(
        starts[0] == 0 and counts == [n // checkpoint_every_n_tokens for n in lens],
        f"checkpoint starts {starts} count the completed intervals of {lens}",
    )
    rows = checkpoint_state_indices.tolist()
    _require(len(rows) == starts[-1], f"{len(rows)} destinations, {starts[-1]} entries")
    written = [row for row in rows if row != -1]
    _require(
        all(0 <= row < state_checkpoints.shape[0] for row in written),
        f"checkpoint rows {rows} are -1 or inside the pool",
    )
    _require(len(set(written)) == len(written), f"checkpoint rows repeat: {rows}")
    if state_checkpoints.data_ptr() == initial_state.data_ptr():
        _require(
            not set(written) & set(slots),
            f"checkpoint rows {written} are live slots of this batch ({slots})",
        )


class KDAContractDouble:
    """One stand-in for ``recurrent_kda``; keeps the number of calls and of plans.

    ``numerics(call)`` computes a checked call; ``read_values=False`` leaves out the
    checks that read the device, for runs under sync debug mode.
    """

    def __init__(
        self, *, numerics: Callable = float64_numerics, read_values: bool = True
    ):
        self.numerics = numerics
        self.read_values = read_values
        self.num_calls = 0
        self.num_plans = 0
        self.planned_dtypes: list[torch.dtype] = []
        self.last_call: Optional[dict] = None

    def wrapper_cls(self, device) -> ContractDoubleWrapper:
        return ContractDoubleWrapper(self, device)

    def recurrent_kda(
        self, *, output_final_state=False, backend="cute-dsl", **call
    ) -> tuple[torch.Tensor, None]:
        """The direct entry point: check, compute in place, return (output, None)."""
        _require(backend == "cute-dsl", "the double is of the cute-dsl backend")
        _require(not output_final_state, "states stay in the pool")
        check_call(**call)
        if self.read_values:
            names = (
                "cu_seqlens",
                "initial_state",
                "ssm_state_indices",
                "state_checkpoints",
                "checkpoint_cu_starts",
                "checkpoint_state_indices",
            )
            check_values(
                tokens=call["q"].shape[1],
                checkpoint_every_n_tokens=call.get("checkpoint_every_n_tokens", 0),
                **{name: call.get(name) for name in names},
            )
        self.num_calls += 1
        self.last_call = call
        return self.numerics(call), None


class ContractDoubleWrapper:
    """Stand-in for ``RecurrentKDAPrefillWrapper``: rows are fixed by the first plan,
    tokens by the first run, and the offsets are copied at plan time."""

    def __init__(self, double: KDAContractDouble, device):
        self._double = double
        self._device = torch.device(device)
        self._cu_seqlens: Optional[torch.Tensor] = None
        self._num_tokens: Optional[int] = None

    def plan(self, cu_seqlens: torch.Tensor, *, non_blocking: bool = True) -> None:
        _require(
            cu_seqlens.dtype in (torch.int32, torch.int64)
            and cu_seqlens.ndim == 1
            and cu_seqlens.is_contiguous()
            and cu_seqlens.numel() > 1,
            "offsets are a contiguous int32 or int64 vector",
        )
        _require(
            self._cu_seqlens is None or len(self._cu_seqlens) == len(cu_seqlens),
            "the number of sequences is fixed by the first plan",
        )
        if self._cu_seqlens is None:
            self._cu_seqlens = torch.empty(
                len(cu_seqlens), dtype=torch.int64, device=self._device
            )
        self._cu_seqlens.copy_(cu_seqlens, non_blocking=non_blocking)
        self._double.num_plans += 1
        self._double.planned_dtypes.append(cu_seqlens.dtype)

    def run(self, **call) -> tuple[torch.Tensor, None]:
        _require(self._cu_seqlens is not None, "plan comes before run")
        tokens = call["q"].shape[1]
        _require(
            self._num_tokens in (None, tokens), "tokens are fixed by the first run"
        )
        self._num_tokens = tokens
        return self._double.recurrent_kda(cu_seqlens=self._cu_seqlens, **call)
