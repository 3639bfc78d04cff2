"""From a discovery's rows to its ranking and verdict: pure, no op, no clock."""

import dataclasses
import json
from typing import Any

import numpy as np

from ..errors import BenchError
from ..stats import Interval, Verdict, bootstrap, verdict
from .candidates import DEFAULT, from_json
from .numerics import FAILED
from .routing import padding, rank_correlation
from .state import State


@dataclasses.dataclass(frozen=True)
class Ranked:
    """One timed tactic. Times in ms; ratios are tactic / baseline per round."""

    tactic: Any
    tile: int | None
    hidden: bool  # the op does not list it at the real token count
    seen_at: tuple[int, ...]
    numerics: str
    median_ms: float
    ratio: float
    interval: Interval


@dataclasses.dataclass(frozen=True)
class Prediction:
    """How well the padding estimate foretold the ranking.

    `by_tile` is Spearman's rho between computed rows and the best time of each
    tile, `by_tactic` the same over all timed tactics; None where it is undefined.
    """

    tiles: int
    by_tile: float | None
    by_tactic: float | None
    predicted: int | None  # tile with the fewest rows
    measured: int | None  # tile of the fastest tactic


@dataclasses.dataclass(frozen=True)
class Report:
    """What a discovery found. `winner` is None unless it is recommended."""

    baseline: Any
    ranked: list[Ranked]
    failed: list[tuple[Any, str]]  # tactics without a time, and why
    prediction: Prediction
    challenger: Any  # the fastest hidden tactic, None when there is none
    verdict: Verdict
    winner: Any


def candidates(state: State) -> dict[Any, dict]:
    """The candidate rows by tactic, in listing order."""
    rows = state.of("candidates")
    if not rows:
        return {}
    return {from_json(row["tactic"]): row for row in rows[-1]["rows"]}


def numerics(state: State) -> dict[Any, dict]:
    """The numerics rows by tactic."""
    return {from_json(row["tactic"]): row for row in state.of("numerics")}


def untimed(state: State) -> dict[Any, str]:
    """Tactics that could not be timed, and why."""
    return {from_json(row["tactic"]): row["reason"] for row in state.of("untimed")}


def rounds(state: State, stage: str) -> list[dict[Any, list[float]]]:
    """Finished rounds of one stage: each tactic's times in ms, in order run."""
    result = []
    for row in state.of("round"):
        if row["stage"] == stage:
            times: dict[Any, list[float]] = {}
            for tactic, ms in row["times"]:
                times.setdefault(from_json(tactic), []).append(ms)
            result.append(times)
    return result


def paired(state: State, challenger: Any, baseline: Any) -> list[dict]:
    """The confirmation rounds that timed both."""
    confirmed = rounds(state, "confirm")
    return [r for r in confirmed if challenger in r and baseline in r]


def pick_baseline(state: State) -> Any:
    """What serving would run without a record: the fastest of the default tactic
    and the listed ones, by median over the ranking rounds.

    Raises BenchError when no ranking round is finished.
    """
    ranking = rounds(state, "rank")
    if not ranking:
        raise BenchError(f"{state.folder} has no timed round; run discover again")
    medians = _medians(ranking)
    rows = candidates(state)
    baselines = [
        t for t in medians if t == DEFAULT or (t in rows and rows[t]["listed"])
    ]
    return min(baselines, key=medians.__getitem__)


def pick_challenger(state: State) -> Any:
    """The fastest tactic that is not listed at the real token count, or None.

    One that could not be timed later, in a confirmation round, is none.
    """
    medians = _medians(rounds(state, "rank"))
    rows, lost = candidates(state), untimed(state)
    hidden = [
        t for t in medians if t in rows and not rows[t]["listed"] and t not in lost
    ]
    return min(hidden, key=medians.__getitem__, default=None)


def analyse(state: State) -> Report:
    """The ranking, the verdict and the prediction's record of a discovery.

    A tactic is recommended when it passed numerics and was faster than the
    baseline in the confirmation rounds, which took no part in choosing either.
    """
    baseline = pick_baseline(state)
    challenger = pick_challenger(state)
    seed = state.header["seed"]
    ranked = _ranking(state, baseline, seed)
    failed = [(t, row["reason"]) for t, row in numerics(state).items() if _bad(row)]
    failed += [(t, r["refused"]) for t, r in candidates(state).items() if r["refused"]]
    failed += list(untimed(state).items())
    if challenger is None:
        outcome = Verdict(
            "no difference shown", None, None, None, "no hidden tactic could be timed"
        )
    else:
        both, wanted = paired(state, challenger, baseline), state.header["repetitions"]
        reason = f"{len(both)} of {wanted} confirmation rounds timed both"
        if baseline in untimed(state):
            reason = "the baseline could not be timed to the end"
        elif len(both) >= wanted:
            reason = ""
        outcome = (
            Verdict("no difference shown", None, None, None, reason)
            if reason
            else compare(both, challenger, baseline, seed)
        )
    good = outcome.outcome == "faster" and challenger not in dict(failed)
    return Report(
        baseline=baseline,
        ranked=ranked,
        failed=failed,
        prediction=_prediction(state, ranked),
        challenger=challenger,
        verdict=outcome,
        winner=challenger if good else None,
    )


def compare(
    timed: list[dict[Any, list[float]]], tactic: Any, baseline: Any, seed: int
) -> Verdict:
    """Verdict on `tactic` against `baseline` from rounds that timed both.

    The baseline is timed twice in a round; the interval of those ratios around 1
    is the noise a difference has to exceed.
    """
    ratios = [np.median(r[tactic]) / np.median(r[baseline]) for r in timed]
    again = [r[baseline][1] / r[baseline][0] for r in timed if len(r[baseline]) > 1]
    noise = None
    if again:
        spread = bootstrap(again, seed=seed)
        noise = max(1 - spread.low, spread.high - 1, 0.0)
    return verdict(ratios, noise=noise, higher_is_better=False, seed=seed)


def _ranking(state: State, baseline: Any, seed: int) -> list[Ranked]:
    ranking = rounds(state, "rank")
    checks, rows = numerics(state), candidates(state)
    result = []
    for tactic, median in _medians(ranking).items():
        ratios = [
            np.median(r[tactic]) / np.median(r[baseline])
            for r in ranking
            if tactic in r
        ]
        row = rows.get(tactic, {"tile": None, "listed": True, "seen_at": []})
        result.append(
            Ranked(
                tactic=tactic,
                tile=row["tile"],
                hidden=not row["listed"],
                seen_at=tuple(row["seen_at"]),
                numerics=checks[tactic]["verdict"] if tactic in checks else "reference",
                median_ms=median,
                ratio=float(np.median(ratios)),
                interval=bootstrap(ratios, seed=seed),
            )
        )
    return sorted(result, key=lambda item: (item.median_ms, json.dumps(item.tactic)))


def _prediction(state: State, ranked: list[Ranked]) -> Prediction:
    counts = np.array(state.of("routing")[-1]["counts"])
    tiled = [item for item in ranked if item.tile]
    best: dict[int, float] = {}
    for item in tiled:
        best[item.tile] = min(item.median_ms, best.get(item.tile, np.inf))
    rows = {tile: padding(counts, tile).rows for tile in best}
    return Prediction(
        tiles=len(best),
        by_tile=rank_correlation([rows[t] for t in best], list(best.values())),
        by_tactic=rank_correlation(
            [rows[item.tile] for item in tiled], [item.median_ms for item in tiled]
        ),
        predicted=min(rows, key=rows.__getitem__, default=None),
        measured=min(best, key=best.__getitem__, default=None),
    )


def _medians(timed: list[dict[Any, list[float]]]) -> dict[Any, float]:
    """Median over rounds of each tactic that every round timed."""
    if not timed:
        return {}
    whole = [t for t in timed[0] if all(t in r for r in timed)]
    return {t: float(np.median([np.median(r[t]) for r in timed])) for t in whole}


def _bad(row: dict) -> bool:
    return row["verdict"] == FAILED
