"""Batch plan of FlashInfer KDA prefill.

The plan is made once a batch from the scheduler's host lengths and is read by every
KDA layer of the forward: int64 offsets, FlashInfer's planned wrapper, non-negative
int32 state slots, an aligned buffer for beta, and the tables that let FlashInfer
write prefix-cache checkpoints straight into the rows of the state pool.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import msgspec
import numpy as np
import torch

from sglang.srt.utils import is_pin_memory_available

# Checkpoint intervals are multiples of this (flashinfer/kda_prefill_cute.py).
CHECKPOINT_INTERVAL_UNIT = 32
_INT32_MAX = 2**31 - 1


class KDATrackLens(msgspec.Struct, frozen=True):
    """Prefix-cache tracking of one batch, host lists with one entry a row.

    ``track_lens`` and ``prefix_lens`` are absolute token counts; the tracked boundary
    of a row is ``floor((track_len - prefix_len) / interval) * interval`` tokens into
    this extend.
    """

    mask: Sequence[bool]
    track_lens: Sequence[int]
    prefix_lens: Sequence[int]


class KDAHostTables(msgspec.Struct, frozen=True):
    """Host half of the plan; every array is int64."""

    cu_seqlens: np.ndarray  # [rows + 1] token offsets
    # [rows + 1] completed interval boundaries before each row.
    checkpoint_cu_starts: np.ndarray
    # [n] boundary entry of each tracked row, and the row it belongs to.
    entries: np.ndarray
    entry_rows: np.ndarray
    # [m] tracked rows whose boundary is the start of this extend.
    start_rows: np.ndarray

    @property
    def num_boundaries(self) -> int:
        return int(self.checkpoint_cu_starts[-1])


class KDAPrefillPlan(msgspec.Struct, frozen=True):
    """Device half of the plan. Tensors stay unchanged until the batch is done."""

    num_seqs: int
    num_tokens: int
    # FlashInfer's planned wrapper: `run` takes the tensors of one layer.
    wrapper: Any
    state_slots: torch.Tensor  # [rows] int32, never negative
    beta: torch.Tensor  # [1, num_tokens, heads] bfloat16 staging
    # Zero when no boundary of this batch is checkpointed.
    interval: int
    checkpoint_cu_starts: Optional[torch.Tensor]  # [rows + 1] int64
    # [boundaries] int32 row of the checkpoint target, -1 skips the boundary.
    checkpoint_rows: Optional[torch.Tensor]
    # Set when the pool cannot be a target: [n, H, V, K] in the pool's dtype, and the
    # [n] int64 pool rows it is copied to.
    scratch: Optional[torch.Tensor]
    scratch_dst: Optional[torch.Tensor]
    # [m] int64 pool rows of `start_rows`: live state, and the snapshot it goes to.
    start_src: Optional[torch.Tensor]
    start_dst: Optional[torch.Tensor]


def check_interval(interval: int) -> None:
    """Raise ValueError unless ``interval`` (tokens) is one FlashInfer can checkpoint."""
    if interval <= 0 or interval % CHECKPOINT_INTERVAL_UNIT or interval > _INT32_MAX:
        raise ValueError(
            f"FlashInfer KDA prefill checkpoints every {interval} tokens "
            "(mamba_chunk_size of the model config), but the interval must be a "
            f"positive multiple of {CHECKPOINT_INTERVAL_UNIT}; use "
            "--linear-attn-prefill-backend triton"
        )


def build_host_tables(
    *,
    extend_lens: Sequence[int],
    num_tokens: int,
    interval: int,
    track: Optional[KDATrackLens] = None,
) -> KDAHostTables:
    """Offsets and checkpoint tables of one batch.

    ``extend_lens`` are new tokens a row, ``num_tokens`` their sum, ``interval`` the
    checkpoint interval in tokens. ``track=None`` means that nothing is tracked.
    Raises ValueError that names the row and its numbers when they disagree.
    """
    check_interval(interval)
    lens = np.asarray(extend_lens, dtype=np.int64)
    for row in np.flatnonzero(lens < 0):
        raise ValueError(f"KDA prefill row {row} extends by {lens[row]} tokens")
    cu_seqlens = _offsets(lens)
    if cu_seqlens[-1] != num_tokens:
        raise ValueError(
            f"KDA prefill rows hold {cu_seqlens[-1]} tokens (lengths "
            f"{lens.tolist()}), but the batch has {num_tokens}"
        )
    boundaries = lens // interval
    starts = _offsets(boundaries)
    if starts[-1] > _INT32_MAX:
        raise ValueError(
            f"KDA prefill needs {starts[-1]} checkpoint entries, more than int32 holds"
        )
    tracked, completed = (
        _tracked_boundaries(lens=lens, interval=interval, track=track)
        if track is not None
        else (np.empty(0, np.int64), np.empty(0, np.int64))
    )
    inside = completed > 0
    return KDAHostTables(
        cu_seqlens=cu_seqlens,
        checkpoint_cu_starts=starts,
        entries=starts[tracked[inside]] + completed[inside] - 1,
        entry_rows=tracked[inside],
        start_rows=tracked[~inside],
    )


def _offsets(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(counts.shape[0] + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _tracked_boundaries(
    *, lens: np.ndarray, interval: int, track: KDATrackLens
) -> tuple[np.ndarray, np.ndarray]:
    """Tracked rows and the completed intervals at which each is snapshotted."""
    rows = lens.shape[0]
    for name, values in (
        ("track mask", track.mask),
        ("track lengths", track.track_lens),
        ("prefix lengths", track.prefix_lens),
    ):
        if len(values) != rows:
            raise ValueError(
                f"KDA prefill has {rows} rows, but {len(values)} {name}: {list(values)}"
            )
    tracked = np.flatnonzero(np.asarray(track.mask, dtype=bool)).astype(np.int64)
    prefix_lens = np.asarray(track.prefix_lens, dtype=np.int64)[tracked]
    track_lens = np.asarray(track.track_lens, dtype=np.int64)[tracked]
    relative = track_lens - prefix_lens
    completed = relative // interval
    bad = (prefix_lens < 0) | (relative < 0) | (completed * interval > lens[tracked])
    for i in np.flatnonzero(bad):
        row = int(tracked[i])
        raise ValueError(
            f"KDA prefill row {row} tracks {track_lens[i]} tokens, which is boundary "
            f"{completed[i] * interval} of an extend of {lens[row]} tokens after a "
            f"prefix of {prefix_lens[i]} (interval {interval})"
        )
    return tracked, completed


def check_batch_tensors(
    *,
    extend_lens: Sequence[int],
    interval: int,
    cache_indices: torch.Tensor,
    track_slots: Optional[torch.Tensor],
    pool: torch.Tensor,
) -> None:
    """Raise ValueError when the batch's device tensors cannot serve its rows.

    ``cache_indices`` and ``track_slots`` are integer [rows] pool slots; ``pool`` is
    one layer's [slots, H, V, K] states. Only shapes and types are read.
    """
    rows = len(extend_lens)
    for name, slots in (("state", cache_indices), ("snapshot", track_slots)):
        if slots is None:
            continue
        if slots.dtype not in (torch.int32, torch.int64) or slots.ndim != 1:
            raise ValueError(
                f"KDA prefill {name} slots must be one int32 or int64 vector, got "
                f"{slots.dtype} of shape {tuple(slots.shape)}"
            )
        count = slots.shape[0]
        if count < rows:
            raise ValueError(
                f"KDA prefill row {count} ({extend_lens[count]} tokens, interval "
                f"{interval}) has no {name} slot: {count} slots for {rows} rows"
            )
    if cache_indices.shape[0] > rows:
        raise ValueError(
            f"KDA prefill has {rows} rows of {list(extend_lens)} tokens, but "
            f"{cache_indices.shape[0]} state slots"
        )
    if pool.shape[0] > _INT32_MAX:
        raise ValueError(
            f"KDA state pool has {pool.shape[0]} slots, more than int32 holds"
        )


def build_kda_prefill_plan(
    *,
    wrapper_cls,
    extend_lens: Sequence[int],
    num_tokens: int,
    cache_indices: torch.Tensor,
    interval: int,
    pool: torch.Tensor,
    track: Optional[KDATrackLens] = None,
    track_slots: Optional[torch.Tensor] = None,
) -> KDAPrefillPlan:
    """Plan one batch on ``pool``'s device with one host-to-device copy.

    ``wrapper_cls(device)`` makes FlashInfer's planned wrapper. ``cache_indices`` are
    the rows' live slots ([rows] int32/int64; a negative slot of a padded row becomes
    the reserved slot 0). ``track_slots`` are the rows' snapshot slots ([rows], read for
    tracked rows only; a negative slot is skipped). ``pool`` is one layer's
    [slots, H, V, K] states: every layer shares its shape, strides and dtype.
    Raises ValueError before anything is written; nothing is read from the device.
    """
    tables = build_host_tables(
        extend_lens=extend_lens, num_tokens=num_tokens, interval=interval, track=track
    )
    num_seqs = len(extend_lens)
    num_tracked = tables.entries.shape[0] + tables.start_rows.shape[0]
    if num_tracked and track_slots is None:
        raise ValueError(
            f"KDA prefill tracks {num_tracked} rows, but the batch has no snapshot "
            "slots"
        )
    check_batch_tensors(
        extend_lens=extend_lens,
        interval=interval,
        cache_indices=cache_indices,
        track_slots=track_slots if num_tracked else None,
        pool=pool,
    )
    in_place = pool.is_contiguous()
    device = pool.device
    parts = _copy_tables(tables=tables, in_place=in_place, device=device)
    state_slots = cache_indices.clamp(min=0).to(torch.int32)

    wrapper = wrapper_cls(device)
    wrapper.plan(parts["cu_seqlens"])

    scratch = scratch_dst = start_src = start_dst = None
    if "entries" in parts:
        dst = track_slots.index_select(0, parts["entry_rows"])
        if in_place:
            parts["checkpoint_rows"].index_copy_(
                0, parts["entries"], dst.to(torch.int32)
            )
        else:
            scratch = pool.new_empty((dst.shape[0], *pool.shape[1:]))
            scratch_dst = dst.clamp(min=0).to(torch.int64)
    if "start_rows" in parts:
        start_src = state_slots.index_select(0, parts["start_rows"]).to(torch.int64)
        start_dst = track_slots.index_select(0, parts["start_rows"])
        start_dst = start_dst.clamp(min=0).to(torch.int64)
    return KDAPrefillPlan(
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        wrapper=wrapper,
        state_slots=state_slots,
        beta=torch.empty(
            (1, num_tokens, pool.shape[1]), dtype=torch.bfloat16, device=device
        ),
        interval=interval if "entries" in parts else 0,
        checkpoint_cu_starts=parts.get("checkpoint_cu_starts"),
        checkpoint_rows=parts.get("checkpoint_rows"),
        scratch=scratch,
        scratch_dst=scratch_dst,
        start_src=start_src,
        start_dst=start_dst,
    )


def _copy_tables(
    *, tables: KDAHostTables, in_place: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    """Send the tables this batch needs as one buffer; return device views of it."""
    int64_parts = {"cu_seqlens": tables.cu_seqlens}
    rows = np.empty(0, dtype=np.int32)
    if tables.entries.shape[0]:
        int64_parts["checkpoint_cu_starts"] = tables.checkpoint_cu_starts
        int64_parts["entries"] = tables.entries
        int64_parts["entry_rows"] = tables.entry_rows
        rows = np.full(tables.num_boundaries, -1, dtype=np.int32)
        if not in_place:
            rows[tables.entries] = np.arange(tables.entries.shape[0])
    if tables.start_rows.shape[0]:
        int64_parts["start_rows"] = tables.start_rows

    words = sum(part.shape[0] for part in int64_parts.values())
    host = torch.empty(
        words + (rows.shape[0] + 1) // 2,
        dtype=torch.int64,
        pin_memory=is_pin_memory_available(device),
    )
    staging = host.numpy()
    np.concatenate(list(int64_parts.values()), out=staging[:words])
    staging[words:].view(np.int32)[: rows.shape[0]] = rows
    packed = host.to(device, non_blocking=True)

    views = dict(
        zip(
            int64_parts,
            packed[:words].split([part.shape[0] for part in int64_parts.values()]),
        )
    )
    if rows.shape[0]:
        views["checkpoint_rows"] = packed[words:].view(torch.int32)[: rows.shape[0]]
    return views
