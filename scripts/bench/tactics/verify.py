"""Does an existing record load, hit, compute the same and help on this machine?"""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any, Callable

from tqdm import tqdm

from ..errors import BenchError, CheckFailed
from ..stats import Verdict
from . import record
from .analysis import compare
from .candidates import DEFAULT, from_json, profile_of, text, to_json
from .case import OpCase
from .flashinfer_api import AutoTuner
from .numerics import Checker
from .timing import Clock


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at. `ok` is None when it was left out on request."""

    name: str
    ok: bool | None
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "skip"}[self.ok]
        return f"{mark} {self.name}: {self.detail}"


def run(
    path: Path,
    case: OpCase,
    *,
    tolerance: float,
    repetitions: int,
    seed: int,
    clock_of: Callable[[OpCase], Clock] | None,
) -> list[Check]:
    """All checks in order; the first that fails ends the list.

    `clock_of` None leaves speed out. A red check is never followed by a speed.
    """
    checks: list[Check] = []
    tactic = _loads(path, case, checks)
    if all(check.ok for check in checks):
        checks.append(_hit(path, case, tactic, tuning=False))
    if all(check.ok for check in checks):
        checks.append(_hit(path, case, tactic, tuning=True))
    if all(check.ok for check in checks):
        checks.append(_numerics(case, tactic, tolerance))
    if not all(check.ok for check in checks):
        return checks
    if clock_of is None:
        checks.append(Check("speed", None, "left out on request"))
    else:
        try:
            result = speed(case, tactic, clock_of(case), repetitions, seed)
            checks.append(Check("speed", result.outcome == "faster", str(result)))
        except BenchError as error:
            checks.append(Check("speed", False, str(error)))
    return checks


def _loads(path: Path, case: OpCase, checks: list[Check]) -> Any:
    """Appends the loading checks; returns the record's tactic for this case."""
    content = record.read(path)
    stamp = content.get(record.METADATA)
    if not isinstance(stamp, dict):
        reason = "it has no environment, so FlashInfer loads it unchecked anywhere"
        checks.append(Check("environment", False, reason))
        return None
    wrong = [
        f"{key}: record {stamp.get(key)!r}, here {value!r}"
        for key, value in record.environment().items()
        if stamp.get(key) not in (value, "*")
    ]
    here = f"all {len(stamp)} fields are this machine's"
    checks.append(Check("environment", not wrong, "; ".join(wrong) or here))
    loaded = AutoTuner().load_configs(str(path))
    said = "FlashInfer loads it" if loaded else "FlashInfer does not load it"
    checks.append(Check("loads", loaded, said))
    value = content.get(case.file_key)
    if value is None:
        checks.append(Check("key", False, _nearest(content, case.file_key)))
        return None
    runner = type(case.runner).__name__
    detail = f"{value[0]} {text(value[1])}"
    if value[0] != runner:
        detail = f"the record is for runner {value[0]}, the op's is {runner}"
    checks.append(Check("key", value[0] == runner, detail))
    return from_json(value[1])


def _nearest(content: dict[str, Any], wanted: str) -> str:
    """Says which entry comes closest to the wanted key, and where they part."""
    keys = list(record.tactics_of(content))
    if not keys:
        return "the record holds no tactic"

    def same(key: str) -> int:
        pairs = zip(key, wanted, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))

    best = max(keys, key=same)
    at = max(0, same(best) - 20)
    return (
        f"none of its {len(keys)} entries is for this call; the closest has "
        f"...{best[at : at + 60]}... where the call has ...{wanted[at : at + 60]}..."
    )


def _hit(path: Path, case: OpCase, tactic: Any, *, tuning: bool) -> Check:
    """Asks AutoTuner for the tactic the way serving or a tuning pass does."""
    name = "hit while tuning" if tuning else "hit in serving"
    tuner = AutoTuner()
    tuner.load_configs(str(path))
    tuner.is_tuning_mode = tuning
    config = case.one_bucket_config() if tuning else case.tuning_config
    hit, _, found, _ = tuner.search_cache(
        case.custom_op,
        [case.runner],
        case.shapes,
        config,
        inputs=case.inputs,
        require_profiling_policy=tuning,
    )
    if not hit:
        why = "the op rejects the tactic (validate_tactic) or no entry matches"
        if tuning:
            value = record.read(path)[case.file_key]
            have = value[2] if len(value) > 2 else "none, which counts as hot L2"
            why = (
                f"the op asks for the measurement policy {case.policy} and the record "
                f"has {have}: a tuning pass would measure again and overrule it"
            )
        return Check(name, False, why)
    _, chosen = tuner.choose_one(
        case.custom_op, [case.runner], config, case.inputs, **case.kwargs
    )
    profiled = tuner.stats.tuned_op_successful_configs.get(case.custom_op, 0)
    good = chosen == found == tactic and profiled == 0
    return Check(name, good, f"AutoTuner picks {text(chosen)}, {profiled} profiled")


def _numerics(case: OpCase, tactic: Any, tolerance: float) -> Check:
    if not case.can_run:
        return Check("numerics", False, "the op cannot run on this machine")
    try:
        case.prepare([DEFAULT, tactic])
        checker = Checker(case, tolerance)
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises
        reason = f"the default tactic does not run: {type(error).__name__}: {error}"
        return Check("numerics", False, reason)
    result = checker.check(tactic)
    detail = f"against the default tactic: {result.verdict}"
    if result.nrms is not None:
        detail += f", max abs {result.max_abs:.3g}, normalised RMS {result.nrms:.3g}"
    return Check("numerics", result.passed, f"{detail} {result.reason}".rstrip())


def speed(
    case: OpCase, tactic: Any, clock: Clock, repetitions: int, seed: int
) -> Verdict:
    """Times `tactic` against the default and every listed tactic, interleaved.

    The baseline is the fastest of those by its median, as a tuning pass would
    have it. Raises CheckFailed when the default or the tactic cannot be timed.
    """
    listed = case.runner.get_valid_tactics(case.inputs, profile_of(case.inputs))
    others = [from_json(to_json(item)) for item in listed]
    others = [item for item in others if item not in (tactic, DEFAULT)]
    dead: set[Any] = set()
    timed: list[dict[Any, list[float]]] = []
    for number in tqdm(range(repetitions), desc="timing", unit="round", disable=None):
        # Twice each: whichever becomes the baseline then has its own noise.
        order = [tactic, *[item for item in (DEFAULT, *others) for _ in range(2)]]
        random.Random(f"{seed} {number}").shuffle(order)
        times: dict[Any, list[float]] = {}
        for item in order:
            if item in dead:
                continue
            try:
                ms = float(clock.time_ms(item))
                if not (math.isfinite(ms) and ms > 0):
                    raise ValueError(f"the clock gave {ms} ms")
                times.setdefault(item, []).append(ms)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises
                if item in (tactic, DEFAULT):
                    raise CheckFailed(
                        f"{text(item)} cannot be timed: {error}"
                    ) from error
                dead.add(item)
        timed.append(times)
    alive = [item for item in (DEFAULT, *others) if item not in dead]
    baseline = min(
        alive, key=lambda item: sorted(r[item][0] for r in timed)[len(timed) // 2]
    )
    return compare(timed, tactic, baseline, seed)
