"""`branching`: does a competing branch change what a cached prefix answers?"""

import argparse

from tqdm import tqdm

from . import cases, compare
from .client import Answer
from .config import Branching
from .continuation import score_checks
from .errors import CHECK_FAILED, OK
from .experiment import Experiment, add_arguments, probe_arms
from .rows import Branch, Check, Row, finite
from .server import Server

__all__ = ["add_arguments", "branching", "main"]


def branching(experiment: Experiment, arm: str, server: Server) -> Row:
    """For each seed: cache a prefix, score branch A, send branch B, score A again.

    Then once more from the bare prefix with B first, so that A resumes exactly where
    the prefix ends. A's scored span repeats a part of A's own suffix: a model that
    reads its context gives it a high score, and a spoiled context a low one.
    """
    settings = experiment.config.branching
    row = experiment.row("branching", arm, label=arm)
    for seed in tqdm(settings.seeds, desc=f"branching {arm}", unit="seed"):
        prefix, first, second = prompts(settings, seed, experiment.config.token_range)
        start = len(first) - settings.span

        def score(ids: list[int]) -> Answer:
            return server.client.generate(ids, new_tokens=0, score_from=start - 1)

        def cache_prefix() -> None:
            server.client.flush()
            server.client.generate(prefix, new_tokens=0)

        cache_prefix()
        before = score(first)
        score(second)
        again = score(first)
        cache_prefix()
        score(second)
        late = score(first)
        for order, after in (("A B A", again), ("B A", late)):
            _add(row, settings, seed, order, before, after, first[start:])
    return row


def _add(
    row: Row,
    settings: Branching,
    seed: int,
    order: str,
    before: Answer,
    after: Answer,
    wanted: list[int],
) -> None:
    """Adds one comparison and its checks to the row."""
    name = f"seed {seed}, {order}"
    scores = Branch(
        seed=seed,
        order=order,
        prefix=settings.prefix,
        before=finite(before.logprobs),
        after=finite(after.logprobs),
        cached_before=before.cached_tokens,
        cached_after=after.cached_tokens,
    )
    faults = score_checks(f"{name}, before", before, wanted)
    faults += score_checks(f"{name}, after", after, wanted)
    row.branches.append(scores)
    row.checks += faults
    used = before.cached_tokens > 0 and after.cached_tokens > 0
    detail = f"{name}: {before.cached_tokens} tokens cached before branch B,"
    detail += f" {after.cached_tokens} after"
    row.checks.append(Check(name="branch-cached", ok=used, detail=detail))
    if not faults:
        row.checks += collapse_checks(scores, settings)


def prompts(
    settings: Branching, seed: int, ids: tuple[int, int]
) -> tuple[list[int], list[int], list[int]]:
    """The shared prefix, branch A and the competing branch B, each as token ids."""
    prefix = cases.tokens(settings.prefix, name=f"branching-{seed}-prefix", ids=ids)
    branches = []
    for side in "AB":
        name = f"branching-{seed}-{side}"
        suffix = cases.tokens(settings.suffix, name=name, ids=ids)
        branches.append(prefix + suffix + suffix[: settings.span])
    return prefix, *branches


def collapse_checks(scores: Branch, settings: Branching) -> list[Check]:
    """The mean score did not fall by `collapse`, nor move by more than `max_mean`."""
    result = compare.branch(scores)
    fall = result["before"] - result["after"]
    detail = (
        f"seed {scores.seed}, {scores.order}: mean score {result['before']:.4f} before,"
        f" {result['after']:.4f} after the competing branch"
    )
    found = [Check(name="branch-collapse", ok=fall < settings.collapse, detail=detail)]
    if settings.max_mean is not None:
        detail += f", mean |difference| {result['mean']:.4g}"
        ok = result["mean"] <= settings.max_mean
        found.append(Check(name="branch-drift", ok=ok, detail=detail))
    return found


def show(found: list[Row]) -> int:
    """Prints the scores; CHECK_FAILED when a check failed."""
    bad = compare.report_problems(found)
    print("arm  seed  order  before  after (mean score, nats)  cached tokens")
    for row in found:
        for scores in row.branches if row.passed else []:
            result = compare.branch(scores)
            print(
                f"{row.arm}  {scores.seed}  {scores.order}  {result['before']:.4f}"
                f"  {result['after']:.4f}"
                f"  {scores.cached_before} / {scores.cached_after}"
            )
    return CHECK_FAILED if bad else OK


def main(argv: list[str]) -> int:
    """Runs the probe on every arm; a collapse is a failed check."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench branching",
        description="Caches a prefix, scores one branch before and after a competing"
        " branch extends the same prefix, and flags a fall of the score.",
    )
    add_arguments(parser)
    experiment = Experiment(parser.parse_args(argv))
    return show(probe_arms(experiment, branching))
