"""Finds a tactic the op does not list at the real token count and that helps.

Every finished step is a row of the state, so an interrupted discovery goes on
where it stopped when the same command is given again.
"""

import contextlib
import dataclasses
import math
import random
from typing import Any, Callable, Iterator

from tqdm import tqdm

from ..errors import BenchError
from .analysis import (
    Report,
    analyse,
    candidates,
    numerics,
    paired,
    pick_baseline,
    pick_challenger,
    rounds,
    untimed,
)
from .candidates import DEFAULT, enumerate_tactics, text, to_json
from .case import Op, OpCase
from .flashinfer_api import torch
from .numerics import FAILED, Checker
from .routing import Padding, Routing, padding
from .state import State
from .timing import Clock

LEAST_REPETITIONS = 9
ATTEMPTS = 2  # starts of a tactic without an outcome before it counts as a crash


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to discover, besides the op: see the CLI's help for each field."""

    routing: Routing
    token_counts: list[int]
    repetitions: int
    tolerance: float
    seed: int
    experts: int
    expert_offset: int = 0


def run(
    state: State,
    op: Op,
    plan: Plan,
    clock_of: Callable[[OpCase], Clock],
    say: Callable[[str], None] = print,
) -> Report:
    """Runs or goes on with the discovery in `state` and returns what it found.

    `clock_of(case)` makes the clock that times tactics. Raises BenchError when
    the op lists nothing, cannot run here, or its default tactic cannot be timed.
    """
    if plan.repetitions < LEAST_REPETITIONS:
        raise BenchError(
            f"--repetitions {plan.repetitions}: at least {LEAST_REPETITIONS} are "
            "needed for an interval"
        )
    _list(state, op, plan)
    rows = candidates(state)
    counts = plan.routing.counts(plan.experts, plan.expert_offset)
    for line in describe_padding(
        [
            padding(counts, tile)
            for tile in sorted({r["tile"] for r in rows.values()} - {None})
        ]
    ):
        say(line)
    case = op.case(plan.routing.tokens, plan.routing)
    if not case.can_run:
        raise BenchError(
            f"{op.custom_op} cannot run on this machine; run discover on the machine "
            "the record is for"
        )
    case.prepare([DEFAULT, *rows])
    _check_all(state, case, plan, say)
    clock = clock_of(case)
    say(f"timing: {clock.name}, {plan.repetitions} interleaved rounds")
    _rank(state, clock, plan)
    _confirm(state, clock, plan)
    return analyse(state)


def describe_padding(estimates: list[Padding]) -> list[str]:
    """The padding estimate as text, one line for each tile."""
    lines = ["padding estimate from the routing (rows the kernel computes):"]
    for item in estimates:
        lines.append(
            f"  tile {item.tile:>4}: {item.rows:>9} rows = {item.routed} routed "
            f"+ {item.padded} padded ({item.overhead:.1%}), {item.blocks} tiles, "
            f"{item.active} experts with rows"
        )
    return lines


def _list(state: State, op: Op, plan: Plan) -> None:
    if not candidates(state):
        found = enumerate_tactics(op, plan.routing, plan.token_counts)
        rows = [
            {**dataclasses.asdict(item), "tactic": to_json(item.tactic)}
            for item in found
        ]
        state.add("candidates", rows=rows)
    if not state.of("routing"):
        counts = plan.routing.counts(plan.experts, plan.expert_offset)
        state.add("routing", counts=counts.tolist())


def _check_all(
    state: State, case: OpCase, plan: Plan, say: Callable[[str], None]
) -> None:
    done = numerics(state)
    todo = [
        tactic
        for tactic, row in candidates(state).items()
        if tactic not in done and not row["refused"]
    ]
    if not todo:
        return
    try:
        checker = Checker(case, plan.tolerance)
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises
        raise BenchError(
            f"{case.custom_op}: the default tactic does not run here, so nothing can "
            f"be compared with it ({type(error).__name__}: {error})"
        ) from error
    if not checker.finite:
        raise BenchError(
            "the default tactic's output is not finite on this input, so nothing can "
            "be compared with it; use other inputs (--seed, --routing)"
        )
    if not checker.repeatable:
        say("note: the default tactic's own bits change from run to run")
    for tactic in tqdm(todo, desc="numerics", unit="tactic", disable=None):
        if _crashed(state, tactic, "numerics"):
            reason = f"ended the process {ATTEMPTS} times while it was checked"
            state.add("numerics", tactic=to_json(tactic), verdict=FAILED, reason=reason)
            continue
        with _started(state, tactic, "numerics"):
            result = checker.check(tactic)
        state.add("numerics", tactic=to_json(tactic), **dataclasses.asdict(result))
        if not result.passed:
            _still_alive(tactic, result.reason)


def _rank(state: State, clock: Clock, plan: Plan) -> None:
    """Times every passing tactic in each round, in an order drawn for the round."""
    passed = [DEFAULT, DEFAULT]  # twice: their ratio is the round's noise
    passed += [t for t, row in numerics(state).items() if row["verdict"] != FAILED]
    first = len(rounds(state, "rank"))
    for number in tqdm(
        range(first, plan.repetitions), desc="ranking", unit="round", disable=None
    ):
        order = [t for t in passed if t not in untimed(state)]
        random.Random(f"{plan.seed} {number}").shuffle(order)
        _round(state, clock, "rank", number, order)


def _confirm(state: State, clock: Clock, plan: Plan) -> None:
    """Times the best hidden tactic against the baseline on fresh rounds.

    One that cannot be timed any more gives way to the next best; a baseline that
    cannot ends the confirmation, for nothing was shown to be faster than it.
    """
    baseline = pick_baseline(state)
    while baseline not in untimed(state):
        challenger = pick_challenger(state)
        if challenger is None:
            return
        first = len(paired(state, challenger, baseline))
        for number in tqdm(
            range(first, plan.repetitions),
            desc=f"confirming {text(challenger)}",
            unit="round",
            disable=None,
        ):
            order = [baseline, challenger, challenger, baseline]
            if number % 2:
                order = [challenger, baseline, baseline, challenger]
            _round(state, clock, "confirm", len(rounds(state, "confirm")), order)
            if not untimed(state).keys().isdisjoint(order):
                break
        else:
            return


def _round(
    state: State, clock: Clock, stage: str, number: int, order: list[Any]
) -> None:
    times: list[list[Any]] = []
    known = {tactic for done in rounds(state, stage) for tactic in done}
    for tactic in order:
        if tactic in untimed(state):
            continue
        new = tactic not in known
        known.add(tactic)
        if new and _crashed(state, tactic, stage):
            _untimed(state, tactic, f"ended the process {ATTEMPTS} times while timed")
            continue
        try:
            with _started(state, tactic, stage) if new else contextlib.nullcontext():
                if not times:
                    # Not kept: after the pause between rounds the GPU runs at
                    # another clock than in the middle of one.
                    clock.time_ms(tactic)
                ms = float(clock.time_ms(tactic))
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            reason = f"raised {type(error).__name__} while timed: {error}"
            _untimed(state, tactic, reason)
            _still_alive(tactic, reason)
            continue
        if not (math.isfinite(ms) and ms > 0):
            _untimed(state, tactic, f"the clock gave {ms} ms")
            continue
        times.append([to_json(tactic), ms])
    state.add("round", stage=stage, round=number, times=times)


def _untimed(state: State, tactic: Any, reason: str) -> None:
    if tactic == DEFAULT:
        # No row: the same command must not go on without it.
        raise BenchError(
            f"the default tactic cannot be timed ({reason}), so nothing can be "
            "compared with it; mend that and start again with another --state"
        )
    state.add("untimed", tactic=to_json(tactic), reason=reason)


def _crashed(state: State, tactic: Any, step: str) -> bool:
    """Whether the process ended each time this step of this tactic began."""
    key = {"tactic": to_json(tactic), "step": step}
    begun, ended = (
        sum(all(row[k] == key[k] for k in key) for row in state.of(kind))
        for kind in ("begun", "ended")
    )
    return begun - ended >= ATTEMPTS


@contextlib.contextmanager
def _started(state: State, tactic: Any, step: str) -> Iterator[None]:
    """Notes that a step begins, and that it ended unless the process did."""
    state.add("begun", tactic=to_json(tactic), step=step)
    try:
        yield
    finally:
        state.add("ended", tactic=to_json(tactic), step=step)


def _still_alive(tactic: Any, reason: str) -> None:
    """Ends the run when a failed tactic took the CUDA context with it."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - any CUDA error is final
        raise BenchError(
            f"tactic {text(tactic)} left the GPU context unusable ({reason}); it is "
            "noted as failed, give the same command again to go on with the others"
        ) from error
