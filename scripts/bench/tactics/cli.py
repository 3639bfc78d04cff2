"""`python scripts/bench tactics VERB`: arguments in, one module's work, text out."""

import argparse
import dataclasses
import json
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import CHECK_FAILED, OK, BenchError
from . import capture, discover, problems, record, report, state, verify
from .arguments import default_device, device, number
from .candidates import default_token_counts, to_json
from .case import BUILT_IN, OpCase, open_op
from .flashinfer_api import torch
from .numerics import DEFAULT_TOLERANCE
from .routing import Routing, generate
from .timing import Clock, FlashInferClock

PROVENANCE = ".provenance.json"


class Call(msgspec.Struct):
    """What a discovery or a provenance file says about the call it is for."""

    op: str
    problem: dict[str, Any]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    routing: str
    seed: Annotated[int, msgspec.Meta(ge=0)]


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
    verb.add_argument("--device", type=device, default=default_device())
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
    verb.add_argument(
        "--tokens", type=number(int, 1), default=16384, help="smallest chunk"
    )
    verb.add_argument(
        "--max-bytes", type=number(int, 1), default=2 << 30, help="of all layers"
    )
    verb.add_argument("--with-weights", action="store_true", help="save them too")
    verb.add_argument("--url", help="take: send one request there")
    verb.add_argument("--ids", type=Path, help="take: JSON list of its token ids")
    verb.add_argument(
        "--timeout", type=number(float, 0), default=300.0, help="take: seconds"
    )
    verb.set_defaults(run=_capture)
    return parser


def _op_options(verb: argparse.ArgumentParser, *, defaults: bool = True) -> None:
    def add(name: str, value: Any, **more: Any) -> None:
        verb.add_argument(name, default=value if defaults else None, **more)

    add("--op", "kimi-k3", help=f"{', '.join(BUILT_IN)}, a module or a .py file")
    add("--problem", "kimi-k3", help="name, .toml or .json file")
    verb.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    add("--tokens", 16384, type=number(int, 1))
    add("--routing", "uniform", help="uniform, dirichlet:ALPHA, capture:FOLDER[:LAYER]")
    add("--seed", 0, type=number(int, 0, 1 << 63))
    least = discover.LEAST_REPETITIONS
    verb.add_argument("--repetitions", type=number(int, least), default=least)
    verb.add_argument(
        "--tolerance", type=number(float, 0, 1), default=DEFAULT_TOLERANCE
    )
    verb.add_argument(
        "--samples", type=number(int, 1), default=10, help="replays of one timing"
    )
    verb.add_argument("--device", type=device, default=default_device())


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
    case = _case(*_call(options.state, header, []), options.device)
    document = record.bundle(case, found.winner, allow_unknown=options.allow_unknown)
    provenance = _provenance(header, found, case)
    if options.merge is not None:
        target = options.merge
        for line in record.merge(target, document, replace=options.replace):
            print(line)
    else:
        target = options.out
        side = target.with_name(target.name + PROVENANCE)
        record.write_all({side: provenance, target: document})
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
    call, problem = _verified_call(options)
    case = _case(call, problem, options.device)
    clock_of = None if options.no_speed else lambda c: clock_for(c, options.samples)
    checks = verify.run(
        options.record,
        case,
        tolerance=options.tolerance,
        repetitions=options.repetitions,
        seed=call.seed,
        clock_of=clock_of,
    )
    for check in checks:
        print(check)
    bad = any(check.ok is False for check in checks)
    if bad:
        print("this record does NOT help here")
    elif options.no_speed:
        print("nothing is wrong with this record; speed was not looked at")
    else:
        print("this record is good here")
    return CHECK_FAILED if bad else OK


def _verified_call(options: argparse.Namespace) -> tuple[Call, problems.Problem]:
    """The call a record is for: from --state or the provenance file beside it, with
    what the options say on top."""
    side = options.record.with_name(options.record.name + PROVENANCE)
    values: dict[str, Any] = {}
    source = "the options"
    if options.state is not None:
        values = dict(state.read(options.state).header)
        source = str(options.state)
    elif side.is_file():
        values = record.parse_plain(side)
        source = str(side)
    values.setdefault("op", "kimi-k3")
    values.setdefault("tokens", 16384)
    values.setdefault("routing", "uniform")
    values.setdefault("seed", 0)
    for name in ("op", "tokens", "routing", "seed"):
        if vars(options)[name] is not None:
            values[name] = vars(options)[name]
    overrides = options.set
    if options.problem is not None or "problem" not in values:
        problem = problems.load(options.problem or "kimi-k3", overrides)
        values["problem"] = dataclasses.asdict(problem)
        overrides = []
    return _call(source, values, overrides)


def _call(
    source: Path | str, values: dict[str, Any], overrides: list[str]
) -> tuple[Call, problems.Problem]:
    """The call that `source` describes. Raises BenchError when it is damaged."""
    try:
        call = msgspec.convert(values, Call)
    except msgspec.ValidationError as error:
        raise BenchError(
            f"{source} is damaged: {error}; repair it, or move it away and give the "
            "call as options"
        ) from error
    return call, problems.build(call.problem, f"the problem in {source}", overrides)


def _case(call: Call, problem: problems.Problem, device: str) -> OpCase:
    op = open_op(call.op, problem, device=device, seed=call.seed)
    routing = _routing(call.routing, problem, call.tokens, call.seed)
    return op.case(call.tokens, routing)


def _routing(spec: str, problem: problems.Problem, tokens: int, seed: int) -> Routing:
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
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(
                f"cannot make the folder {options.folder}: {error}"
            ) from error
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
        found = capture.show(options.folder, layers)
    for manifest in found:
        which = f"layer {manifest['layer']} rank {manifest['rank']}"
        if "refused" in manifest:
            print(f"{which}: nothing was captured: {manifest['refused']}")
            continue
        print(f"{which}: {manifest['file']}")
        for name, entry in manifest["tensors"].items():
            print(f"  {name}: {entry['dtype']} {entry['shape']}")
        print(f"  weights known by digest: {len(manifest['weights'])}")
    return CHECK_FAILED if any("refused" in manifest for manifest in found) else OK


def _ids(options: argparse.Namespace) -> list[int]:
    if (options.url is None) != (options.ids is None):
        raise BenchError(
            "capture take: --url and --ids go together (the ids of real text: routing "
            "of made-up ones is no guide); give both, or neither and send the request"
        )
    if options.url is None:
        return []
    try:
        ids = json.loads(options.ids.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read --ids {options.ids}: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
        raise BenchError(f"--ids {options.ids}: a JSON list of token ids is needed")
    if len(ids) < options.tokens:
        raise BenchError(
            f"--ids {options.ids}: {len(ids)} tokens never make a chunk of --tokens "
            f"{options.tokens}; give more, or the --tokens given to `capture args`"
        )
    return ids
