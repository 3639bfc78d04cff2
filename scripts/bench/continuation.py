"""`continuation`: scores of a fixed continuation after a cold and a cached context."""

import argparse
import math

from tqdm import tqdm

from . import cases, compare
from .client import Answer
from .config import Continuation
from .errors import CHECK_FAILED, OK, BenchError
from .experiment import Experiment, add_arguments, probe_arms
from .rows import Check, Row, Scored, finite
from .server import Server

__all__ = ["add_arguments", "continuation", "main"]


def continuation(experiment: Experiment, arm: str, server: Server) -> Row:
    """Scores each context cold, warm, warm again, and, if asked for, from the host."""
    settings = experiment.config.continuation
    refuse_without_host_tier(server)
    jobs = [(context, False) for context in settings.contexts]
    if settings.control:
        jobs.append((settings.control, True))
    row = experiment.row("continuation", arm, label=arm)
    for context, control in tqdm(jobs, desc=f"continuation {arm}", unit="context"):
        name = f"continuation-{settings.seed}-{context}"
        # The first token after a fully cached context cannot be scored: it is a lead.
        count = context + 1 + settings.length
        ids = cases.tokens(count, name=name, ids=experiment.config.token_range)
        for state, answer in _score(server, settings, ids, context):
            row.scored.append(
                Scored(
                    context=context,
                    state=state,
                    control=control,
                    seed=settings.seed,
                    input_sha256=cases.sha256(ids),
                    logprobs=finite(answer.logprobs),
                    cached_tokens=answer.cached_tokens,
                )
            )
            row.checks += score_checks(f"{context} {state}", answer, ids[context + 1 :])
            if state == "host":
                row.checks.append(host_check(context, answer))
    row.checks += depth_checks(row.scored) + limit_checks(row, settings)
    return row


def _score(server: Server, settings: Continuation, ids: list[int], context: int):
    """Yields (state, answer). Only the bare context is in the cache before "warm"."""
    client = server.client

    def score() -> Answer:
        return client.generate(ids, new_tokens=0, score_from=context)

    client.flush()
    yield "cold", score()
    client.flush()
    client.generate(ids[:context], new_tokens=0)
    yield "warm", score()
    yield "repeat", score()
    if settings.host:
        client.flush()
        client.generate(ids[:context], new_tokens=0)
        fill_device(server, settings, avoid=len(ids))
        yield "host", score()


def refuse_without_host_tier(server: Server) -> None:
    """Raises BenchError when host = true and the engine has no host cache tier."""
    if not server.config.continuation.host:
        return
    if not server.client.info().get("enable_hierarchical_cache"):
        raise BenchError(
            "continuation.host = true needs an engine with a host cache tier: add"
            " --enable-hierarchical-cache to server.arguments, or set host = false"
        )


def fill_device(server: Server, settings: Continuation, *, avoid: int) -> None:
    """Sends unrelated prompts until they cover the whole device cache.

    Least recently used entries leave first, so the context is then on the host only.
    """
    size = settings.fill or server.client.info().get("max_total_num_tokens") or 0
    if not size:
        raise BenchError(
            "the server does not state its cache size; set continuation.fill to it"
        )
    done, number = 0, 0
    while done < size:
        name = f"fill-{settings.seed}-{number}"
        ids = cases.tokens(avoid, name=name, ids=server.config.token_range)
        server.client.generate(ids, new_tokens=0)
        done, number = done + avoid, number + 1


def score_checks(name: str, answer: Answer, wanted: list[int]) -> list[Check]:
    """The answer scores the tokens we asked about, with finite values."""
    if answer.scored_ids != wanted:
        index = compare.first_difference(answer.scored_ids, wanted)
        detail = (
            f"{name}: the answer scores other tokens than were asked about, from"
            f" token {index} of the continuation on"
        )
        return [Check(name="scored-tokens", ok=False, detail=detail)]
    bad = [i for i, value in enumerate(answer.logprobs) if not math.isfinite(value)]
    if bad:
        detail = f"{name}: score of token {bad[0]} is {answer.logprobs[bad[0]]}"
        return [Check(name="finite-scores", ok=False, detail=detail)]
    return []


def host_check(context: int, answer: Answer) -> Check:
    """The prefix really came back from the host."""
    detail = f"context {context}: {answer.host_tokens} tokens came from the host"
    if not answer.host_tokens:
        detail += "; raise continuation.fill, or give the host tier more memory"
    return Check(name="host-restore", ok=answer.host_tokens > 0, detail=detail)


def depth_checks(scored: list[Scored]) -> list[Check]:
    """Cold scores used no cache, the others did: else they compare nothing."""
    bad = []
    for one in scored:
        if (one.cached_tokens == 0) != (one.state == "cold"):
            bad.append(f"{one.context} {one.state}: {one.cached_tokens} cached")
    detail = "; ".join(bad) or "cold ones used no cache, the others did"
    return [Check(name="cache-depth", ok=not bad, detail=detail)]


def limit_checks(row: Row, settings: Continuation) -> list[Check]:
    """The limits that the experiment file states, each against the worst context."""
    if any(not check.ok for check in row.checks):
        return []  # scores that do not belong together cannot be compared
    table = compare.continuation(row)
    stated = [
        ("max_mean", "mean", "cold vs warm", False, settings.max_mean),
        ("max_repeat", "max", "warm vs repeat", False, settings.max_repeat),
        ("max_control", "max", "cold vs warm", True, settings.max_control),
    ]
    found = []
    for name, column, states, control, limit in stated:
        values = [
            (entry[column], entry["context"])
            for entry in table
            if entry["states"] == states and entry["control"] == control
        ]
        if limit is None or not values:
            continue
        worst, context = max(values)
        detail = f"{states}: {column} {worst:.4g} at {context} tokens, limit {limit:g}"
        found.append(Check(name=name, ok=worst <= limit, detail=detail))
    return found


def show(found: list[Row]) -> int:
    """Prints the differences; CHECK_FAILED when a check failed."""
    bad = compare.report_problems(found)
    good = [row for row in found if row.passed]
    base = next((row for row in good if row.baseline), None)
    print("arm  context  states  mean  p90  max |difference| (nats)  cached tokens")
    for row in good:
        table = compare.continuation(row)
        if base is not None and row is not base:
            table += compare.continuation_arms(base, row)
        for entry in table:
            kind = " (control)" if entry["control"] else ""
            depths = " / ".join(str(d) for d in entry.get("depths", []))
            print(
                f"{row.arm}  {entry['context']}{kind}  {entry['states']}"
                f"  {entry['mean']:.6f}  {entry['p90']:.6f}  {entry['max']:.6f}"
                f"  {depths}"
            )
    return CHECK_FAILED if bad else OK


def main(argv: list[str]) -> int:
    """Runs the probe on every arm and prints how far cached scores are from cold ones."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench continuation",
        description="Scores a fixed continuation after contexts that are cold, cached,"
        " cached again, and (host = true) restored from the host cache tier.",
    )
    add_arguments(parser)
    experiment = Experiment(parser.parse_args(argv))
    return show(probe_arms(experiment, continuation))
