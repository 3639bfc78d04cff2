"""Does a tactic compute the same as the default one: bits first, then a bound."""

import dataclasses
import math
from typing import Any

from .candidates import DEFAULT
from .case import POISON, OpCase
from .flashinfer_api import torch

# Normalised RMS error of a row. Rounding to bfloat16 alone is about 0.002 (8 bits);
# one wrong value of ordinary size in a row of 7168 is 0.012.
DEFAULT_TOLERANCE = 1e-2
CHUNK = 1 << 24  # values compared at once
BITWISE, WITHIN, FAILED = "bitwise", "within tolerance", "failed"


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How one tactic's outputs compare with the default tactic's.

    `max_abs` and `nrms` are the worst over all outputs, None where the tactic gave
    no comparable one. `nrms` is that of the worst row (last dimension): RMS of the
    difference over RMS of the default's row, or of its whole output where that is
    larger, so that a small row is not judged by its own rounding.
    """

    verdict: str
    reason: str = ""
    max_abs: float | None = None
    nrms: float | None = None

    @property
    def passed(self) -> bool:
        return self.verdict != FAILED


class Checker:
    """Holds the default tactic's outputs and compares others with them."""

    def __init__(self, case: OpCase, tolerance: float):
        self._case = case
        self._tolerance = tolerance
        self._reference = case.run(DEFAULT)
        again = self._run(DEFAULT)
        self.repeatable = all(map(same_bits, self._reference, again))
        self.finite = all(map(_finite, self._reference))

    def check(self, tactic: Any) -> Numerics:
        """Runs `tactic` twice on poisoned outputs and compares both runs.

        An op that raises is a failed tactic; its message becomes the reason.
        """
        try:
            runs = [self._run(tactic) for _ in range(2)]
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            first = str(error).strip().splitlines() or [""]
            return Numerics(FAILED, f"raised {type(error).__name__}: {first[0]}")
        worst = Numerics(BITWISE, max_abs=0.0, nrms=0.0)
        for outputs in runs:
            result = compare(self._reference, outputs, self._tolerance)
            if not result.passed:
                return result
            if result.verdict == WITHIN and (result.nrms or 0) >= (worst.nrms or 0):
                worst = result
        return worst

    def _run(self, tactic: Any) -> list[torch.Tensor]:
        # A tactic that writes nothing must not find the last one's result in the
        # block the allocator hands it.
        for tensor in self._reference:
            torch.empty_like(tensor).view(torch.uint8).fill_(POISON)
        return self._case.run(tactic)


def compare(
    reference: list[torch.Tensor], outputs: list[torch.Tensor], tolerance: float
) -> Numerics:
    """Compares two lists of outputs: bits, then `tolerance` on normalised RMS."""
    if len(reference) != len(outputs):
        return Numerics(
            FAILED, f"{len(outputs)} outputs, the default gives {len(reference)}"
        )
    for index, (want, got) in enumerate(zip(reference, outputs, strict=True)):
        if want.shape != got.shape or want.dtype != got.dtype:
            return Numerics(
                FAILED,
                f"output {index} is {got.dtype} {tuple(got.shape)}, the default's is "
                f"{want.dtype} {tuple(want.shape)}",
            )
    if all(map(same_bits, reference, outputs)):
        return Numerics(BITWISE, max_abs=0.0, nrms=0.0)
    max_abs = nrms = 0.0
    for index, (want, got) in enumerate(zip(reference, outputs, strict=True)):
        if same_bits(want, got):
            continue
        if not want.is_floating_point():
            return Numerics(FAILED, f"integer output {index} differs")
        errors = _errors(want, got)
        if not all(map(math.isfinite, errors)):
            return Numerics(FAILED, f"output {index} is not finite where it should be")
        max_abs, nrms = max(max_abs, errors[0]), max(nrms, errors[1])
    if not nrms <= tolerance:
        reason = f"normalised RMS error {nrms:.3g} exceeds {tolerance:.3g}"
        return Numerics(FAILED, reason, max_abs, nrms)
    return Numerics(WITHIN, "", max_abs, nrms)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality of two tensors of one shape and dtype; NaN equals itself."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())


def _errors(want: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Largest absolute and worst row's normalised RMS error, in bounded memory."""
    width = want.shape[-1] if want.ndim else 1
    pairs = list(
        zip(
            want.reshape(-1, width).split(max(1, CHUNK // width)),
            got.reshape(-1, width).split(max(1, CHUNK // width)),
            strict=True,
        )
    )
    whole = sum(float(part.double().square().sum()) for part, _ in pairs) / want.numel()
    biggest = worst = 0.0
    for part_want, part_got in pairs:
        part_want, part_got = part_want.double(), part_got.double()
        difference = part_got - part_want
        square = difference.square().mean(dim=1)
        scale = part_want.square().mean(dim=1).clamp(min=whole)
        # 0 / 0 is a row of zeros that stayed one.
        errors = torch.where(square == 0, 0.0, square / scale).sqrt()
        biggest = max(biggest, float(difference.abs().max()))
        worst = max(worst, float(errors.max()))
        if not bool(torch.isfinite(errors).all()):
            return math.nan, math.nan
    return biggest, worst
