"""`serve-ab`: paired serving runs, one fresh server and one fresh cache for each."""

import argparse
import shutil
from pathlib import Path

from tqdm import tqdm

from . import branching, checks, compare, config, continuation
from . import experiment as common
from . import load, outputs
from .config import Run
from .errors import CHECK_FAILED, OK, BenchError, RunFailed
from .experiment import Experiment
from .load import LoadClient
from .rows import Check, Row
from .server import Server

PROBES = {
    "outputs": (outputs.outputs, outputs.show),
    "continuation": (continuation.continuation, continuation.show),
    "branching": (branching.branching, branching.show),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    common.add_arguments(parser)
    parser.add_argument(
        "--with",
        dest="probes",
        default="",
        metavar="PROBE,...",
        help="run these on each arm's first server after its load, so that no further"
        f" server is needed: {', '.join(PROBES)}",
    )
    parser.add_argument(
        "--prepare-cache",
        action="store_true",
        help="first start the baseline once to fill server.cache, if it is not there",
    )


def prepare_cache(experiment: Experiment) -> None:
    """Starts the baseline arm once with the baseline cache itself."""
    cache = experiment.config.server.cache
    if not cache:
        raise BenchError("--prepare-cache needs server.cache in the experiment file")
    target = Path(cache).expanduser().resolve()
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise BenchError(
            f"cannot make {partial}: {error.strerror}; correct server.cache"
        ) from error
    arm = experiment.config.baseline
    with experiment.server(arm, "prepare-cache", cache=str(partial)):
        pass
    partial.rename(target)


def measure(
    experiment: Experiment, run: Run, position: int, server: Server, client: LoadClient
) -> tuple[Row, Row]:
    """Warm-up, flush, formal requests. Returns the warm-up's row and the formal one."""
    shape = experiment.config.load

    def send(part: str, requests: int, seed: int) -> load.Result:
        line = load.arguments(
            shape,
            url=server.url,
            model=server.model,
            requests=requests,
            seed=seed,
            part=part,
        )
        return client.run(line, server.refuse_dead)

    def row(result: load.Result, formal: bool) -> Row:
        return experiment.row(
            "serve",
            run.arm,
            label=run.label,
            pair=run.pair,
            position=position,
            formal=formal,
            duration_s=result.duration_s,
            requests=result.requests,
            environment=server.environment(load.shape(shape), shape.seed),
        )

    warm = None
    if shape.warmup:
        # Another seed: the formal prompts must not be in any cache yet.
        warm = row(send("warmup", shape.warmup, shape.seed + 1), formal=False)
    server.client.flush()
    if shape.cached_share:
        send("prime", 1, shape.seed)
    before = server.client.retracted()
    formal = row(send("formal", shape.requests, shape.seed), formal=True)
    after = server.client.retracted()
    verdict = checks.retractions(before, after)
    if verdict.ok:
        for request in formal.requests:
            request.retractions = 0
    formal.checks = [
        checks.complete(formal.requests, shape),
        checks.lengths(formal.requests, shape),
        checks.cached(formal.requests, shape),
        verdict,
        *server.identity_checks(),
        *_cache_checks(experiment, run, server),
    ]
    formal.notes["autotune_cache"] = (server.identity or {}).get("cache")
    return warm, formal


def _cache_checks(experiment: Experiment, run: Run, server: Server) -> list[Check]:
    """Every run, on every host, began with a clone of one and the same cache."""
    mine = (server.identity or {}).get("cache")
    if mine is None:
        if server.arm.url:
            return []  # attached: whoever started the server chose its cache
        detail = "the serving process did not clone the baseline cache"
        return [Check(name="autotune-cache", ok=False, detail=detail)]
    for row in experiment.rows:
        theirs = row.notes.get("autotune_cache")
        if theirs and theirs["digest"] != mine["digest"]:
            detail = (
                f"{run.label} began with cache {mine['digest'][:12]}, {row.label} with"
                f" {theirs['digest'][:12]}: the baseline cache was changed in between"
            )
            return [Check(name="autotune-cache", ok=False, detail=detail)]
    caches = [
        (node["cache"] or {}).get("digest", "") for node in server.node_identities()
    ]
    if set(caches) - {mine["digest"]}:
        detail = (
            "the hosts began with different caches, digests "
            f"{', '.join(digest[:12] or 'none' for digest in caches)}: give each host the"
            " same server.cache, on a shared disk or as a copy"
        )
        return [Check(name="autotune-cache", ok=False, detail=detail)]
    detail = f"a clone of {mine['files']} files, digest {mine['digest'][:12]}"
    return [Check(name="autotune-cache", ok=True, detail=detail)]


def one_run(
    experiment: Experiment,
    run: Run,
    position: int,
    client: LoadClient,
    probes: list[str],
) -> Row:
    """One server from start to end; its rows are written whatever happens."""
    measured = experiment.finished("serve", run.label)
    left = list(probes)
    try:
        with experiment.server(run.arm, run.label) as server:
            with server.refusing_dead():
                if "continuation" in left:
                    continuation.refuse_without_host_tier(server)
                if measured is None:
                    new = measure(experiment, run, position, server, client)
            if measured is None:
                warm, measured = new
                experiment.check_twins(measured)
                if warm is not None:
                    experiment.add(warm)
                experiment.add(measured)
            while left:
                common.run_probe(experiment, PROBES[left.pop(0)][0], run.arm, server)
    except RunFailed as error:
        if measured is None:
            measured = experiment.row(
                "serve",
                run.arm,
                label=run.label,
                pair=run.pair,
                position=position,
                failed=str(error),
            )
            experiment.add(measured)
        for name in left:
            experiment.add(
                experiment.row(name, run.arm, label=run.arm, failed=str(error))
            )
    return measured


def run_all(
    experiment: Experiment, probes: list[str], *, prepare: bool = False
) -> list[Row]:
    """All runs of the schedule that are not finished, in order."""
    plan = config.schedule(experiment.config)
    arms = list(dict.fromkeys(run.arm for run in plan))
    found = []
    with experiment.running(arms):
        tree = next(iter(experiment.trees.values()), None)
        if prepare:
            prepare_cache(experiment)
        with LoadClient(
            python=experiment.config.server.python,
            python_path=tree.python_path if tree else "",
            scratch=experiment.scratch,
            show=True,
        ) as client:
            for position, run in enumerate(tqdm(plan, desc="runs", unit="run")):
                done = experiment.finished("serve", run.label)
                left = [p for p in probes if experiment.finished(p, run.arm) is None]
                if done is None or left:
                    done = one_run(experiment, run, position, client, left)
                found.append(done)
    return found


def main(argv: list[str]) -> int:
    """Runs the schedule and says for each run whether it may show a speed."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench serve-ab",
        description="Runs the arms in turn (A B B A ...), each on a fresh server with a"
        " fresh clone of the baseline autotune cache. Finished runs are kept: the same"
        " command goes on after an interruption.",
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    probes = [name for name in options.probes.split(",") if name]
    for name in probes:
        if name not in PROBES:
            raise BenchError(f"--with {name}: use {', '.join(PROBES)}")
    experiment = Experiment(options)
    if experiment.config.load is None:
        raise BenchError(f"{options.config} has no [load] section; add one")
    for name in probes:
        if getattr(experiment.config, name) is None:
            raise BenchError(f"{options.config} has no [{name}] section; add one")
    found = run_all(experiment, probes, prepare=options.prepare_cache)
    code = show(experiment, found)
    for name in probes:
        arms = dict.fromkeys(row.arm for row in found)
        rows = [common.last(experiment, name, arm) for arm in arms]
        code = max(code, PROBES[name][1](rows))
    return code


def show(experiment: Experiment, found: list[Row]) -> int:
    """Prints one line a run; CHECK_FAILED when a run failed or failed a check."""
    bad = compare.report_problems(found)
    for row in found:
        if row.passed:
            tokens = sum(request.input_tokens for request in row.requests)
            print(f"{row.label}: {tokens / row.duration_s:,.2f} input tok/s")
    print(f"rows: {experiment.path}")
    print(f"next: python scripts/bench report {experiment.path}")
    return CHECK_FAILED if bad else OK
