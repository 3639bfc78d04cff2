"""Comparisons of probe rows, within an arm and between arms. Pure functions."""

import numpy as np

from .rows import Branch, Check, Output, Row, Scored


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs; None for equal lists."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _token(ids: list[int], index: int) -> str:
    return str(ids[index]) if index < len(ids) else "nothing"


def outputs(base: Row, other: Row) -> list[str]:
    """One text for each request that differs, with the first differing token."""
    mine = {o.name: o for o in base.outputs}
    theirs = {o.name: o for o in other.outputs}
    found = []
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in mine or name not in theirs:
            side = base.arm if name not in mine else other.arm
            found.append(f"{name}: missing in {side}")
            continue
        a, b = mine[name], theirs[name]
        if a.input_sha256 != b.input_sha256:
            found.append(f"{name}: the inputs differ, so the outputs say nothing")
            continue
        index = first_difference(a.output_ids, b.output_ids)
        if index is not None:
            found.append(
                f"{name}: first difference at output token {index}:"
                f" {_token(a.output_ids, index)} in {base.arm},"
                f" {_token(b.output_ids, index)} in {other.arm}"
            )
    return found


def repeats(found: list[Output]) -> Check:
    """Repeats of one input within an arm gave one output."""
    first: dict[str, Output] = {}
    bad = []
    for output in found:
        earlier = first.setdefault(output.input_sha256, output)
        index = first_difference(earlier.output_ids, output.output_ids)
        if index is not None:
            bad.append(f"{output.name} differs from {earlier.name} at token {index}")
    detail = "; ".join(bad) or f"{len(first)} inputs, each with one output"
    return Check(name="outputs-repeat", ok=not bad, detail=detail)


def difference(a: list[float | None], b: list[float | None]) -> dict[str, float]:
    """mean, p90 and max of |a - b| in nats, NaN where a score is missing.

    Raises ValueError for lists of different lengths and for empty ones.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} scores cannot be compared")
    gap = np.abs(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64))
    return {
        "mean": float(gap.mean()),
        "p90": float(np.quantile(gap, 0.9)),
        "max": float(gap.max()),
    }


def continuation(row: Row) -> list[dict]:
    """One entry for each context and pair of states: the difference and both depths."""
    by_context: dict[tuple[int, bool], dict[str, Scored]] = {}
    for scored in row.scored:
        by_context.setdefault((scored.context, scored.control), {})[scored.state] = (
            scored
        )
    found = []
    for (context, control), states in by_context.items():
        for a, b in (("cold", "warm"), ("warm", "repeat"), ("cold", "host")):
            if a not in states or b not in states:
                continue
            found.append(
                {
                    "context": context,
                    "control": control,
                    "states": f"{a} vs {b}",
                    **difference(states[a].logprobs, states[b].logprobs),
                    "depths": [states[a].cached_tokens, states[b].cached_tokens],
                }
            )
    return found


def continuation_arms(base: Row, other: Row) -> list[dict]:
    """Cold scores of two arms on identical inputs; ValueError when inputs differ."""
    mine = {(s.context, s.control): s for s in base.scored if s.state == "cold"}
    found = []
    for scored in other.scored:
        twin = mine.get((scored.context, scored.control))
        if scored.state != "cold" or twin is None:
            continue
        if twin.input_sha256 != scored.input_sha256:
            raise ValueError(f"context {scored.context}: the arms' inputs differ")
        gap = difference(twin.logprobs, scored.logprobs)
        states = f"cold, {base.arm} vs {other.arm}"
        found.append(
            {"context": scored.context, "control": scored.control, "states": states}
            | gap
        )
    return found


def branch(scores: Branch) -> dict[str, float]:
    """Mean score before and after the competing branch, and |difference|; nats.

    NaN where a score is missing.
    """
    return {
        "before": float(np.mean(np.asarray(scores.before, dtype=np.float64))),
        "after": float(np.mean(np.asarray(scores.after, dtype=np.float64))),
        **difference(scores.before, scores.after),
    }


def report_problems(found: list[Row]) -> bool:
    """Prints each row's problems; True when there are any."""
    for row in found:
        for text in row.problems:
            print(f"{row.label}: {text}")
    return any(not row.passed for row in found)
