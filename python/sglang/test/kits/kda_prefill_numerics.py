"""KDA prefill numerics for tests: a float64 reference, and the Triton kernel behind
FlashInfer's call. Both take the keyword arguments of ``flashinfer.kda.recurrent_kda``
as one dict, update the pool and the checkpoint target, and return the output."""

from __future__ import annotations

import math

import torch

_L2NORM_EPS = 1e-6
# Chunk length of chunk_kda, and a chunk index past the end of any sequence.
_CHUNK = 64
_PAD_CHUNK = 1 << 20


def sequential_kda(
    *, q, k, v, g, beta, A_log, dt_bias, lower_bound, state, stops=(), scale=None
) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
    """One sequence token by token in float64.

    q, k, v, g [T, H, 128], raw beta logits [T, H], state [H, 128 (V), 128 (K)].
    Returns the output [T, H, 128], the final state, and the state after each of
    ``stops`` tokens. Safe gate: decay = exp(bound * sigmoid(exp(A) * (g + bias))).
    """
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale

    def unit(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2NORM_EPS)

    q, k, beta = unit(q) * scale, unit(k), torch.sigmoid(beta)
    rate = torch.exp(A_log.double()).view(1, heads, 1)
    bias = dt_bias.double().view(1, heads, dim)
    decay = torch.exp(lower_bound * torch.sigmoid(rate * (g + bias)))
    output, state = torch.empty_like(v), state.clone()
    snapshots = {0: state.clone()} if 0 in stops else {}
    for t in range(tokens):
        key = k[t].unsqueeze(-1)
        state *= decay[t].unsqueeze(-2)
        update = v[t].unsqueeze(-1) - torch.bmm(state, key)
        state.baddbmm_(update * beta[t].view(heads, 1, 1), key.mT)
        output[t] = torch.bmm(state, q[t].unsqueeze(-1)).squeeze(-1)
        if t + 1 in stops:
            snapshots[t + 1] = state.clone()
    return output, state, snapshots


def float64_numerics(call: dict) -> torch.Tensor:
    """Run a checked call row by row with ``sequential_kda``; returns the output."""
    q, pool = call["q"], call["initial_state"]
    output = torch.full_like(q, math.nan)
    offsets = call["cu_seqlens"].tolist()
    interval = call.get("checkpoint_every_n_tokens", 0)
    starts = call["checkpoint_cu_starts"].tolist() if interval else None
    for row, slot in enumerate(call["ssm_state_indices"].tolist()):
        begin, end = offsets[row], offsets[row + 1]
        if begin == end:
            continue
        entries = range(starts[row], starts[row + 1]) if interval else ()
        targets = {
            (i + 1) * interval: int(call["checkpoint_state_indices"][entry])
            for i, entry in enumerate(entries)
        }
        out, final, snapshots = sequential_kda(
            **{name: call[name][0, begin:end] for name in ("q", "k", "v", "g", "beta")},
            A_log=call["A_log"],
            dt_bias=call["dt_bias"],
            lower_bound=call["lower_bound"],
            state=pool[slot],
            stops=[stop for stop, target in targets.items() if target >= 0],
        )
        output[0, begin:end] = out
        pool[slot] = final
        for stop, snapshot in snapshots.items():
            call["state_checkpoints"][targets[stop]] = snapshot
    return output


def triton_numerics(call: dict) -> torch.Tensor:
    """Run a checked call through the Triton kernel on its CUDA device.

    Intervals are multiples of 64 tokens and at most one boundary a row is stored.
    Nothing is read on the host, so a plan can run under sync debug mode.
    """
    from sglang.kernels.ops.attention.fla.kda import chunk_kda

    pool, slots = call["initial_state"], call["ssm_state_indices"]
    cu_seqlens = call["cu_seqlens"]
    chunk_indices, chunk_offsets = _chunk_tables(
        cu_seqlens=cu_seqlens, num_tokens=call["q"].shape[1]
    )
    track, stored = {}, None
    if call.get("checkpoint_every_n_tokens", 0):
        stored, stop, dst = _stored_boundaries(call)
        inside = stored & (stop < cu_seqlens.diff())
        track = dict(
            track_state=torch.zeros(
                (slots.numel(), *pool.shape[1:]),
                dtype=torch.float32,
                device=pool.device,
            ),
            track_chunk_idx=torch.where(inside, stop // _CHUNK, -1).int(),
        )
    output = chunk_kda(
        q=call["q"],
        k=call["k"],
        v=call["v"].clone(),  # chunk_kda writes its output there
        g=call["g"],
        beta=call["beta"],
        initial_state=pool,
        initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens.int(),
        A_log=call["A_log"],
        dt_bias=call["dt_bias"],
        lower_bound=call["lower_bound"],
        beta_is_raw=True,
        chunk_indices=chunk_indices,
        chunk_offsets=chunk_offsets,
        **track,
    )
    if stored is not None:
        value = torch.where(
            inside.view(-1, 1, 1, 1),
            track["track_state"].to(pool.dtype),
            pool.index_select(0, slots),
        )
        # Rows without a boundary repeat the write of one that has.
        row = torch.arange(slots.numel(), device=pool.device)
        row = torch.where(stored, row, stored.int().argmax())
        call["state_checkpoints"].index_copy_(0, dst[row], value[row])
    return output


def _chunk_tables(
    *, cu_seqlens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """chunk_kda's (sequence, chunk) pairs and chunk offsets, padded to a fixed size."""
    rows = cu_seqlens.numel() - 1
    counts = (cu_seqlens.diff() + _CHUNK - 1) // _CHUNK
    offsets = torch.zeros_like(cu_seqlens)
    offsets[1:] = counts.cumsum(0)
    index = torch.arange(
        (num_tokens + _CHUNK - 1) // _CHUNK + rows, device=cu_seqlens.device
    )
    seq = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    chunk = torch.where(
        seq < rows, index - offsets[seq.clamp(max=rows - 1)], _PAD_CHUNK
    )
    seq = torch.where(seq < rows, seq, 0)
    return torch.stack((seq, chunk), dim=1).int(), offsets.int()


def _stored_boundaries(call: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row: whether a boundary is stored, at which token, and in which row."""
    starts, dst = call["checkpoint_cu_starts"], call["checkpoint_state_indices"]
    rows = call["ssm_state_indices"].numel()
    entry = torch.arange(dst.numel(), device=dst.device)
    row = torch.searchsorted(starts[1:].contiguous(), entry, right=True)
    stop = (entry - starts[row] + 1) * call["checkpoint_every_n_tokens"]
    # One more row collects the skipped entries.
    owner = torch.where(dst >= 0, row, rows)
    table = torch.zeros((3, rows + 1), dtype=torch.int64, device=dst.device)
    table[0].index_fill_(0, owner, 1)
    table[1].index_copy_(0, owner, stop)
    table[2].index_copy_(0, owner, dst.long())
    return table[0, :rows] > 0, table[1, :rows], table[2, :rows]
