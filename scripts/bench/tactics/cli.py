"""`python scripts/bench tactics VERB`: arguments in, one module's work, text out."""

import argparse
import dataclasses
import json
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import CHECK_FAILED, OK, BenchError
from . import capture, discover, problems, record, report, state, verify
from .candidates import default_token_counts, to_json
from .case import BUILT_IN, OpCase, open_op
from .flashinfer_api import torch
from .numerics import DEFAULT_TOLERANCE
from .routing import Routing, generate
from .timing import Clock, FlashInferClock

PROVENANCE = ".provenance.json"


def main(argv: list[str]) -> int:
    """Runs one verb and returns the exit code. Raises BenchError."""
    options = _parser().parse_args(argv)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench tactics",
        description="Finds, records, verifies and captures kernel tactics.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("discover", help="find a tactic the op does not list")
    _op_options(verb)
    verb.add_argument("--state", type=Path, required=True, help="folder of its rows")
    verb.add_argument("--list-at", help="token counts to list tactics at, by commas")
    verb.set_defaults(run=_discover)

    verb = verbs.add_parser("record", help="write what discover found")
    verb.add_argument("--state", type=Path, required=True, help="discover's folder")
    where = verb.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="new file for the tactic alone")
    where.add_argument("--merge", type=Path, help="cache file to add the tactic to")
    verb.add_argument("--replace", action="store_true", help="with --merge")
    verb.add_argument(
        "--allow-unknown", action="store_true", help="see docs/tactics.md"
    )
    verb.add_argument("--device", default=_device())
    verb.set_defaults(run=_record)

    verb = verbs.add_parser("verify", help="does a record help on this machine")
    verb.add_argument("record", type=Path)
    verb.add_argument("--state", type=Path, help="take the call from this discovery")
    _op_options(verb, defaults=False)
    verb.add_argument("--no-speed", action="store_true", help="leave timing out")
    verb.set_defaults(run=_verify)

    verb = verbs.add_parser("capture", help="save MoE inputs from a running engine")
    verb.add_argument("step", choices=("args", "take", "show"))
    verb.add_argument("folder", type=Path)
    verb.add_argument("--layers", default="", help="layer numbers, by commas")
    verb.add_argument("--module", default="*layers.{}.*.experts", help="name pattern")
    verb.add_argument("--tokens", type=int, default=16384, help="smallest chunk")
    verb.add_argument("--max-bytes", type=int, default=2 << 30, help="of all layers")
    verb.add_argument("--with-weights", action="store_true", help="save them too")
    verb.add_argument("--url", help="take: send one request there")
    verb.add_argument("--ids", type=Path, help="take: JSON list of its token ids")
    verb.add_argument("--timeout", type=float, default=300.0, help="take: seconds")
    verb.set_defaults(run=_capture)
    return parser


def _op_options(verb: argparse.ArgumentParser, *, defaults: bool = True) -> None:
    def add(name: str, value: Any, **more: Any) -> None:
        verb.add_argument(name, default=value if defaults else None, **more)

    add("--op", "kimi-k3", help=f"{', '.join(BUILT_IN)}, a module or a .py file")
    add("--problem", "kimi-k3", help="name, .toml or .json file")
    verb.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    add("--tokens", 16384, type=int)
    add("--routing", "uniform", help="uniform, dirichlet:ALPHA, capture:FOLDER[:LAYER]")
    add("--seed", 0, type=int)
    verb.add_argument("--repetitions", type=int, default=discover.LEAST_REPETITIONS)
    verb.add_argument("--tolerance", type=float, default=DEFAULT_TOLERANCE)
    verb.add_argument("--samples", type=int, default=10, help="replays of one timing")
    verb.add_argument("--device", default=_device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def clock_for(case: OpCase, samples: int) -> Clock:
    """The clock of a command: FlashInfer's own profiling."""
    return FlashInferClock(case, repeat=samples)


def _discover(options: argparse.Namespace) -> int:
    problem = problems.load(options.problem, options.set)
    op = open_op(options.op, problem, device=options.device, seed=options.seed)
    routing = _routing(options.routing, problem, options.tokens, options.seed)
    counts = _token_counts(options.list_at, options.tokens)
    plan = discover.Plan(
        routing=routing,
        token_counts=counts,
        repetitions=options.repetitions,
        tolerance=options.tolerance,
        seed=options.seed,
        experts=problem.local_experts,
        expert_offset=problem.local_offset,
    )
    header = {
        "op": options.op,
        "custom_op": op.custom_op,
        "problem": dataclasses.asdict(problem),
        "tokens": options.tokens,
        "listed_at": counts,
        "routing": options.routing,
        "routing_sha256": routing.digest(),
        "seed": options.seed,
        "repetitions": options.repetitions,
        "tolerance": options.tolerance,
        "samples": options.samples,
        "environment": record.environment(),
        "software": _software(),
    }
    with state.opened(options.state, header) as held:
        found = discover.run(
            held, op, plan, lambda case: clock_for(case, options.samples)
        )
    print(report.render(found))
    if found.winner is not None:
        print(f"next: record --state {options.state} --out FILE (or --merge CACHE)")
    return OK


def _software() -> dict[str, str]:
    """What else a time depends on and FlashInfer does not stamp."""
    found = {"torch": torch.__version__}
    for package in ("triton", "sglang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _record(options: argparse.Namespace) -> int:
    from .analysis import analyse

    held = state.read(options.state)
    found = analyse(held)
    if found.winner is None:
        raise BenchError(
            f"{options.state} recommends no tactic ({found.verdict}); there is nothing "
            "to record"
        )
    header = held.header
    here = record.environment()
    if here != header["environment"]:
        changed = [k for k in here if here[k] != header["environment"].get(k)]
        raise BenchError(
            f"{options.state} was discovered in another environment "
            f"({', '.join(changed)} differ); discover again here"
        )
    case = _case(header, options.device)
    document = record.bundle(case, found.winner, allow_unknown=options.allow_unknown)
    provenance = _provenance(header, found, case)
    if options.merge is not None:
        target = options.merge
        for line in record.merge(target, document, replace=options.replace):
            print(line)
    else:
        target = options.out
        side = target.with_name(target.name + PROVENANCE)
        record.write(target, document)
        record.write(side, provenance)
        print(f"wrote {target} and {side}")
    print(f"next, in a new process: verify {target} --state {options.state}")
    return OK


def _provenance(header: dict, found: Any, case: OpCase) -> dict[str, Any]:
    kept = ("op", "custom_op", "problem", "tokens", "listed_at", "routing")
    kept += ("routing_sha256", "seed", "repetitions", "tolerance", "samples")
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "key": case.file_key,
        "tactic": to_json(found.winner),
        "baseline": to_json(found.baseline),
        "verdict": str(found.verdict),
        "numerics": next(r.numerics for r in found.ranked if r.tactic == found.winner),
        **{key: header[key] for key in kept},
        "environment": header["environment"],
        "software": header["software"],
    }


def _verify(options: argparse.Namespace) -> int:
    values = _verified_call(options)
    case = _case(values, options.device)
    clock_of = None if options.no_speed else lambda c: clock_for(c, options.samples)
    checks = verify.run(
        options.record,
        case,
        tolerance=options.tolerance,
        repetitions=options.repetitions,
        seed=values["seed"],
        clock_of=clock_of,
    )
    for check in checks:
        print(check)
    bad = any(check.ok is False for check in checks)
    print("this record does NOT help here" if bad else "this record is good here")
    return CHECK_FAILED if bad else OK


def _verified_call(options: argparse.Namespace) -> dict[str, Any]:
    """The call a record is for: from --state or the provenance file beside it, with
    what the options say on top."""
    side = options.record.with_name(options.record.name + PROVENANCE)
    values: dict[str, Any] = {}
    if options.state is not None:
        values = dict(state.read(options.state).header)
    elif side.is_file():
        values = record.parse_plain(side)
    values.setdefault("op", "kimi-k3")
    values.setdefault("tokens", 16384)
    values.setdefault("routing", "uniform")
    values.setdefault("seed", 0)
    for name in ("op", "tokens", "routing", "seed"):
        if vars(options)[name] is not None:
            values[name] = vars(options)[name]
    if options.problem is not None or options.set or "problem" not in values:
        problem = problems.load(options.problem or "kimi-k3", options.set)
        values["problem"] = dataclasses.asdict(problem)
    return values


def _case(values: dict[str, Any], device: str) -> OpCase:
    problem = problems.Problem(**values["problem"])
    op = open_op(values["op"], problem, device=device, seed=values["seed"])
    routing = _routing(values["routing"], problem, values["tokens"], values["seed"])
    return op.case(values["tokens"], routing)


def _routing(spec: str, problem: problems.Problem, tokens: int, seed: int) -> Routing:
    if tokens < 1:
        raise BenchError(f"--tokens {tokens}: at least 1")
    kind, _, rest = spec.partition(":")
    if kind != "capture":
        return generate(
            spec,
            tokens=tokens,
            experts=problem.experts,
            top_k=problem.top_k,
            seed=seed,
        )
    folder, _, layer = rest.partition(":")
    routing = capture.routing_of(Path(folder), layer or None, problem)
    if routing.tokens < tokens:
        raise BenchError(
            f"--tokens {tokens}: the capture in {folder} has {routing.tokens} tokens"
        )
    return routing.first(tokens)


def _token_counts(listed_at: str | None, tokens: int) -> list[int]:
    if listed_at is None:
        return default_token_counts(tokens)
    try:
        counts = sorted({int(item) for item in listed_at.split(",")} | {tokens})
    except ValueError:
        counts = [0]
    if counts[0] < 1 or counts[-1] > tokens:
        raise BenchError(
            f"--list-at {listed_at}: token counts from 1 to {tokens}, by commas"
        )
    return counts


def _capture(options: argparse.Namespace) -> int:
    layers = [item for item in options.layers.split(",") if item]
    if options.step == "args":
        specs = capture.hook_specs(
            options.folder,
            layers,
            module=options.module,
            tokens=options.tokens,
            max_bytes=options.max_bytes,
            with_weights=options.with_weights,
        )
        options.folder.mkdir(parents=True, exist_ok=True)
        scripts = Path(__file__).resolve().parents[2]
        print(
            f"start the server with PYTHONPATH={scripts} in its environment and",
            file=sys.stderr,
        )
        print(f"--forward-hooks '{json.dumps(specs)}'")
        return OK
    if options.step == "take":
        if not layers:
            raise BenchError("capture take: name the --layers given to `capture args`")
        ids = _ids(options)
        found = capture.take(
            options.folder, layers, url=options.url, ids=ids, timeout=options.timeout
        )
    else:
        found = [capture.read(options.folder, layer)[0] for layer in layers or [None]]
    for manifest in found:
        print(f"layer {manifest['layer']} rank {manifest['rank']}: {manifest['file']}")
        for name, entry in manifest["tensors"].items():
            print(f"  {name}: {entry['dtype']} {entry['shape']}")
        print(f"  weights known by digest: {len(manifest['weights'])}")
    return OK


def _ids(options: argparse.Namespace) -> list[int]:
    if options.ids is None:
        return [1 + index % 97 for index in range(options.tokens)]
    try:
        ids = json.loads(options.ids.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read --ids {options.ids}: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
        raise BenchError(f"--ids {options.ids}: a JSON list of token ids is needed")
    return ids
