"""`outputs`: fixed greedy requests, and the first token at which arms differ."""

import argparse

from tqdm import tqdm

from . import cases, compare
from .client import Answer
from .errors import CHECK_FAILED, OK
from .experiment import Experiment, add_arguments, probe_arms
from .rows import Check, Output, Row
from .server import Server

__all__ = ["add_arguments", "main", "outputs"]


def outputs(experiment: Experiment, arm: str, server: Server) -> Row:
    """Sends every length `repeats` times alone, then the concurrent ones together."""
    settings = experiment.config.outputs
    ids = experiment.config.token_range
    found = []
    jobs = [(n, r) for n in settings.lengths for r in range(settings.repeats)]
    for length, repeat in tqdm(jobs, desc=f"outputs {arm}", unit="request"):
        name = f"outputs-{settings.seed}-{length}"
        prompt = cases.tokens(length, name=name, ids=ids)
        server.client.flush()  # each repeat starts cold: same work, same answer
        answer = server.client.generate(prompt, new_tokens=settings.new_tokens)
        found.append(_output(prompt, answer, repeat=repeat, concurrent=False))
    found += _concurrent(experiment, server)
    row = experiment.row("outputs", arm, label=arm, outputs=found)
    row.checks += [_complete(found, settings.new_tokens), compare.repeats(found)]
    return row


def _concurrent(experiment: Experiment, server: Server) -> list[Output]:
    settings = experiment.config.outputs
    prompts = [
        cases.tokens(
            settings.concurrent_length,
            name=f"outputs-{settings.seed}-concurrent-{index}",
            ids=experiment.config.token_range,
        )
        for index in range(settings.concurrent)
    ]
    server.client.flush()
    answers = server.client.generate_all(
        prompts, new_tokens=settings.new_tokens, concurrency=settings.concurrency
    )
    return [
        _output(prompt, answer, repeat=index, concurrent=True)
        for index, (prompt, answer) in enumerate(zip(prompts, answers))
    ]


def _output(
    prompt: list[int], answer: Answer, *, repeat: int, concurrent: bool
) -> Output:
    kind = "concurrent" if concurrent else "repeat"
    return Output(
        name=f"{len(prompt)} tokens, {kind} {repeat + 1}",
        length=len(prompt),
        repeat=repeat,
        concurrent=concurrent,
        input_sha256=cases.sha256(prompt),
        output_ids=answer.output_ids,
        cached_tokens=answer.cached_tokens,
    )


def _complete(found: list[Output], new_tokens: int) -> Check:
    bad = [o.name for o in found if len(o.output_ids) != new_tokens]
    detail = f"{len(found)} requests of {new_tokens} tokens"
    if bad:
        detail = f"not {new_tokens} tokens: {', '.join(bad)}"
    return Check(name="outputs-complete", ok=not bad, detail=detail)


def main(argv: list[str]) -> int:
    """Runs the fixed requests on every arm and compares the arms with the baseline."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench outputs",
        description="Sends fixed greedy requests to every arm and compares the output"
        " token ids: each length twice, then concurrent ones.",
    )
    add_arguments(parser)
    experiment = Experiment(parser.parse_args(argv))
    found = probe_arms(experiment, outputs)
    return show(found)


def show(found: list[Row]) -> int:
    """Prints what differs; CHECK_FAILED when anything does."""
    bad = compare.report_problems(found)
    base = next((row for row in found if row.baseline), None)
    for row in found:
        if row is base or base is None or row.failed or base.failed:
            continue
        differences = compare.outputs(base, row)
        for text in differences:
            print(f"{row.arm}: {text}")
        if not differences:
            print(f"{row.arm}: all {len(row.outputs)} outputs equal {base.arm}'s")
        bad = bad or bool(differences)
    return CHECK_FAILED if bad else OK
