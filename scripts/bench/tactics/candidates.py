"""Which tactics an op has: the union of what it lists at many token counts."""

import dataclasses
import os
from typing import Any

from ..errors import BenchError
from .flashinfer_api import OptimizationProfile, StaticDim, TacticsBlocklist, torch

DEFAULT = -1  # FlashInfer's fallback tactic: it must run at any shape


def to_json(tactic: Any) -> Any:
    """A tactic as JSON has it: nested lists of numbers. Foreign sequences too."""
    if isinstance(tactic, (str, bool)) or not hasattr(tactic, "__iter__"):
        return int(tactic) if type(tactic).__name__.startswith("int") else tactic
    return [to_json(value) for value in tactic]


def from_json(value: Any) -> Any:
    """The tactic FlashInfer itself would load for a JSON value: lists are tuples."""
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


def text(tactic: Any) -> str:
    """A tactic for people: `default` or its JSON."""
    value = from_json(to_json(tactic))
    return "default" if value == DEFAULT else str(value).replace(" ", "")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One tactic. `seen_at` are the token counts whose list holds it."""

    tactic: Any
    listed: bool  # the op lists it at the real token count
    seen_at: tuple[int, ...]
    tile: int | None
    refused: str = ""  # why it is not run at all


def default_token_counts(tokens: int) -> list[int]:
    """Powers of two below `tokens`, and `tokens` itself."""
    counts = [1 << bit for bit in range(tokens.bit_length()) if 1 << bit < tokens]
    return [*counts, tokens]


def profile_of(inputs: list) -> OptimizationProfile:
    """A profile with exactly the shapes of `inputs`; no tensor counts as (0,)."""
    shapes = [
        [StaticDim(size) for size in value.shape]
        if isinstance(value, torch.Tensor)
        else [StaticDim(0)]
        for value in inputs
    ]
    return OptimizationProfile(shapes, [None] * len(inputs))


def enumerate_tactics(
    op: Any, routing: Any, token_counts: list[int]
) -> list[Candidate]:
    """Candidates of `op` over `token_counts`, the largest being the real one.

    The order is first seen from the real count downwards, so listed ones come
    first. The default tactic is not among them. Raises BenchError when the op
    lists nothing anywhere.
    """
    tokens = max(token_counts)
    seen: dict[Any, list[int]] = {}
    blocked: dict[Any, str] = {}
    blocklist, blocklist_path = _blocklist()
    for count in sorted(set(token_counts), reverse=True):
        case = op.case(count, routing.first(count), for_listing=True)
        listed = case.runner.get_valid_tactics(case.inputs, profile_of(case.inputs))
        listed = [from_json(to_json(tactic)) for tactic in listed]
        kept = blocklist.filter(op.custom_op, case.runner, listed)
        for tactic in listed:
            if tactic == DEFAULT:
                continue
            seen.setdefault(tactic, []).append(count)
            if tactic not in kept:
                blocked[tactic] = f"on the tactics blocklist {blocklist_path}"
    if not seen:
        raise BenchError(
            f"{op.custom_op} lists no tactic at any of {sorted(token_counts)} tokens; "
            "is this GPU supported by the op, and are its kernels installed?"
        )
    return [
        Candidate(
            tactic=tactic,
            listed=tokens in counts,
            seen_at=tuple(counts),
            tile=op.tile(tactic),
            refused=blocked.get(tactic, ""),
        )
        for tactic, counts in seen.items()
    ]


def _blocklist() -> tuple[TacticsBlocklist, str]:
    blocklist = TacticsBlocklist()
    # The variable AutoTuner reads: what serving never runs is no candidate.
    path = os.environ.get("FLASHINFER_TACTICS_BLOCKLIST", "")
    if path and os.path.isfile(path):
        blocklist.load(path)
    return blocklist, path
