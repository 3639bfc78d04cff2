"""`trace`: kernel counts and times by class, from profiler traces of every rank."""

import argparse
import collections
import hashlib
import re
import sys
import tomllib
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from tqdm import tqdm

from . import errors, kernel_classes, rows, trace_files, trace_nsys, trace_torch
from .errors import BenchError, CheckFailed
from .rows import Check, Environment, Row, TraceClass

EPILOG = """\
Classes: {classes}.
moe_gemm@192 is a class with its token tile. Times are sums over kernels, so
kernels that overlap on two streams count twice. CONFIG.toml holds the same as
the options:

  ranks = 8
  [arms]
  base = ["traces/base"]        # folders or files, as many as the arm has
  series = ["traces/series"]
  [expect.base]
  kda_copy = 1104
  "moe_gemm@192" = 736
  [expect.series]
  kda_copy = 0
  [classes]                     # tried before the built-in rules
  pack = "my_pack_kernel"

Nsight Systems instead of torch.profiler, with one export a host; start_profile
then takes "activities": ["CUDA_PROFILER"]:

  nsys profile --trace=cuda --cuda-graph-trace=node --output base \\
      --capture-range=cudaProfilerApi --capture-range-end=stop SERVER COMMAND
  nsys export --type sqlite --output base.sqlite base.nsys-rep
  python scripts/bench trace --arm base=base.sqlite --arm series=series.sqlite

exit codes: 0 ok, 1 a count is not as stated or a trace is missing or broken, 2 usage
"""


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    """What to read and what to expect. `expect` is arm -> class[@tile] -> count."""

    arms: dict[str, list[str]] = {}
    ranks: int | None = None
    activity: str = "gpu"
    expect: dict[str, dict[str, int]] = {}
    classes: dict[str, str] = {}


def parser() -> argparse.ArgumentParser:
    """The verb's options."""
    result = argparse.ArgumentParser(
        prog="python scripts/bench trace",
        description="Kernel counts and times by class, arms side by side.",
        epilog=EPILOG.format(classes=", ".join(kernel_classes.MEANING)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml")
    result.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="trace file or folder of an arm; repeatable, the first arm is the base",
    )
    result.add_argument("--ranks", type=int, help="ranks that every arm must have")
    result.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="ARM:CLASS[@TILE]=COUNT",
        help="stated count over all ranks, for example base:kda_copy=1104",
    )
    result.add_argument(
        "--activity",
        choices=("gpu", "cpu"),
        help="cpu: operators of a trace taken without a GPU (default: gpu)",
    )
    result.add_argument(
        "--rows", type=Path, help="append the result to this JSONL file"
    )
    result.add_argument("--experiment", default="trace", help="name in the rows")
    return result


def plan_of(arguments: argparse.Namespace) -> tuple[Plan, str]:
    """The plan and its SHA-256. Raises BenchError naming the faulty part."""
    plan = Plan()
    if arguments.config:
        try:
            text = arguments.config.read_text(encoding="utf-8")
            plan = msgspec.convert(tomllib.loads(text), Plan)
        except OSError as error:
            raise BenchError(
                f"cannot read {arguments.config}: {error}; name a TOML file"
            ) from error
        except (ValueError, msgspec.ValidationError) as error:
            raise BenchError(
                f"{arguments.config}: {error}; see `trace --help` for its keys"
            ) from error
        # Paths in a config are meant from where the config lies.
        home = arguments.config.parent
        plan.arms = {a: [str(home / p) for p in ps] for a, ps in plan.arms.items()}
    for text in arguments.arm:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise BenchError(f"--arm {text!r}: write NAME=PATH")
        plan.arms.setdefault(name, []).append(path)
    for text in arguments.expect:
        match = re.fullmatch(r"([^:]+):([^=]+)=(\d+)", text)
        if not match:
            raise BenchError(f"--expect {text!r}: write ARM:CLASS[@TILE]=COUNT")
        plan.expect.setdefault(match[1], {})[match[2]] = int(match[3])
    plan.ranks = plan.ranks if arguments.ranks is None else arguments.ranks
    plan.activity = arguments.activity or plan.activity
    _check_plan(plan)
    return plan, hashlib.sha256(msgspec.json.encode(plan)).hexdigest()


def _check_plan(plan: Plan) -> None:
    if not plan.arms:
        raise BenchError("no arm; give --arm NAME=PATH or [arms] in a CONFIG.toml")
    if plan.activity not in trace_torch.CATEGORIES:
        raise BenchError(f"activity {plan.activity!r}: write gpu or cpu")
    if plan.ranks is not None and plan.ranks < 1:
        raise BenchError(f"--ranks {plan.ranks}: at least 1")
    for name, pattern in plan.classes.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise BenchError(
                f"classes.{name} = {pattern!r}: {error}; fix it"
            ) from error
    known = {*kernel_classes.MEANING, *plan.classes}
    for arm, counts in plan.expect.items():
        if arm not in plan.arms:
            raise BenchError(
                f"an expectation names arm {arm!r}; the arms are {', '.join(plan.arms)}"
            )
        for key in counts:
            name, at, tile = key.partition("@")
            if name not in known:
                raise BenchError(
                    f"no class {name!r} to expect; the classes are {', '.join(known)}"
                )
            if at and not tile.isdigit():
                raise BenchError(f"expectation {key!r}: the tile is a number of tokens")


def load(arm: str, plan: Plan) -> list[trace_files.Trace]:
    """Every rank's trace of an arm, ranks checked. Reads with a progress bar."""
    paths = trace_files.find(plan.arms[arm])
    by_torch, by_nsys = [], []
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True, desc=arm, disable=None) as bar:
        done = 0
        for path in paths:
            if path.name.endswith(trace_files.NSYS_SUFFIXES):
                by_nsys.append(trace_nsys.read(path))
            else:
                step = lambda at, done=done: bar.update(done + at - bar.n)  # noqa: E731
                by_torch.append(trace_torch.read(path, plan.activity, step))
            done += path.stat().st_size
            bar.update(done - bar.n)
    if by_torch and by_nsys:
        raise BenchError(
            f"arm {arm} mixes torch.profiler and Nsight traces; each names an arm"
        )
    if any(len(group) > 1 for group in by_nsys):
        # One file a node, in order of name: its devices follow the last node's.
        for rank, trace in enumerate(trace for group in by_nsys for trace in group):
            trace.rank = rank
    traces = by_torch + [trace for group in by_nsys for trace in group]
    trace_files.number(traces, plan.ranks)
    trace_files.check_ranks(arm, traces, plan.ranks)
    return sorted(traces, key=lambda trace: trace.rank)


def count(trace: trace_files.Trace, plan: Plan) -> tuple[list[TraceClass], dict]:
    """Counts and times by class and tile; and of each unclassified name."""
    own = [(name, re.compile(text)) for name, text in plan.classes.items()]
    kinds: dict[str, str] = {}
    totals: dict[tuple[str, int | None], list] = {}
    unknown: dict[str, list] = {}
    for events in trace.streams.values():
        for event in events:
            if event.name not in kinds:
                kinds[event.name] = next(
                    (name for name, pattern in own if pattern.search(event.name)),
                    kernel_classes.classify(event.name, plan.activity),
                )
        marked = kernel_classes.mark_kda_copies([kinds[e.name] for e in events])
        for event, kind in zip(events, marked, strict=True):
            tile = kernel_classes.token_tile(event.name) if kind == "moe_gemm" else None
            cell = totals.setdefault((kind, tile), [0, 0.0])
            cell[0] += 1
            cell[1] += event.time_us
            if kind == kernel_classes.OTHER:
                cell = unknown.setdefault(event.name, [0, 0.0])
                cell[0] += 1
                cell[1] += event.time_us
    order = kernel_classes.names_of(kind for kind, _ in totals)
    classes = [
        TraceClass(
            rank=trace.rank,
            name=kind,
            tile=tile,
            count=number,
            time_us=round(time, 3),
            source=Path(trace.source).name,
        )
        for (kind, tile), (number, time) in sorted(
            totals.items(), key=lambda item: (order.index(item[0][0]), item[0][1] or 0)
        )
    ]
    return classes, unknown


def checks_of(
    arm: str, classes: list[TraceClass], expected: dict[str, int]
) -> list[Check]:
    """One check for each stated count, over all ranks."""
    result = []
    for key, wanted in expected.items():
        name, _, tile = key.partition("@")
        got = sum(
            cell.count
            for cell in classes
            if cell.name == name and (not tile or cell.tile == int(tile))
        )
        detail = f"{arm}: {got} {key}, stated {wanted}"
        result.append(Check(name=f"count of {key}", ok=got == wanted, detail=detail))
    return result


def table(arms: dict[str, list[TraceClass]]) -> list[str]:
    """Markdown: classes down, counts and milliseconds of every arm across."""
    sums: dict[tuple, dict[str, list]] = collections.defaultdict(dict)
    for arm, classes in arms.items():
        for cell in classes:
            entry = sums[(cell.name, cell.tile)].setdefault(arm, [0, 0.0])
            entry[0] += cell.count
            entry[1] += cell.time_us / 1000
    order = kernel_classes.names_of(name for name, _ in sums)
    head = "".join(f" {arm} kernels | {arm} ms |" for arm in arms)
    lines = [f"| class | token tile |{head}", "|---|---:|" + "---:|---:|" * len(arms)]
    for name, tile in sorted(sums, key=lambda k: (order.index(k[0]), k[1] or 0)):
        cells = ""
        for arm in arms:
            number, time = sums[(name, tile)].get(arm, (0, 0.0))
            cells += f" {number:,} | {time:,.3f} |"
        lines.append(f"| {name} | {tile or ''} |{cells}")
    return lines


def rank_table(arms: dict[str, list[TraceClass]]) -> list[str]:
    """Markdown: one line a rank and class, all arms across."""
    keys, counts = {}, {}
    for arm, classes in arms.items():
        for cell in classes:
            key = (cell.rank, cell.name, cell.tile)
            keys[key] = None
            counts[(arm, *key)] = (cell.count, cell.time_us / 1000)
    order = kernel_classes.names_of(name for _, name, _ in keys)
    head = "".join(f" {arm} kernels | {arm} ms |" for arm in arms)
    lines = [f"| rank | class |{head}", "|---:|---|" + "---:|---:|" * len(arms)]
    for key in sorted(keys, key=lambda k: (k[0], order.index(k[1]), k[2] or 0)):
        cells = ""
        for arm in arms:
            number, time = counts.get((arm, *key), (0, 0.0))
            cells += f" {number:,} | {time:,.3f} |"
        lines.append(f"| {key[0]} | {key[1]}{f'@{key[2]}' if key[2] else ''} |{cells}")
    return lines


def _row(arm: str, plan: Plan, digest: str, experiment: str) -> Row:
    return Row(
        kind="trace",
        experiment=experiment,
        config_sha256=digest,
        label=f"trace {arm}",
        arm=arm,
        baseline=arm == next(iter(plan.arms)),
        position=list(plan.arms).index(arm),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        environment=Environment(),
    )


def main(argv: list[str]) -> int:
    """Runs the verb; returns the exit code."""
    arguments = parser().parse_args(argv)
    plan, digest = plan_of(arguments)
    result: dict[str, list[TraceClass]] = {}
    failures, unknown = [], {}
    for arm in plan.arms:
        row = _row(arm, plan, digest, arguments.experiment)
        try:
            for trace in load(arm, plan):
                classes, names = count(trace, plan)
                row.trace += classes
                for name, (number, time) in names.items():
                    cell = unknown.setdefault(name, [0, 0.0])
                    cell[0] += number
                    cell[1] += time
            row.checks = checks_of(arm, row.trace, plan.expect.get(arm, {}))
            result[arm] = row.trace
        except CheckFailed as error:
            row.failed = str(error)
        failures += row.problems
        if arguments.rows:
            rows.append(arguments.rows, row)
    ranks = {arm: {cell.rank for cell in classes} for arm, classes in result.items()}
    if len({frozenset(each) for each in ranks.values()}) > 1:
        text = "; ".join(f"{arm} {sorted(each)}" for arm, each in ranks.items())
        failures.append(f"the arms have different ranks: {text}")
    if result:
        print("\n".join(table(result) + [""] + rank_table(result)))
    loud = sorted(unknown.items(), key=lambda item: -item[1][1])[:10]
    if loud:
        print("\nunclassified, longest first:")
        for name, (number, time) in loud:
            print(f"  {time / 1000:12,.3f} ms {number:8,} x {name[:160]}")
    for failure in failures:
        print(f"bench trace: {failure}", file=sys.stderr)
    return errors.CHECK_FAILED if failures else errors.OK
