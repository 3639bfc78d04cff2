"""The experiment file: TOML, checked key by key. Lengths are tokens, times seconds."""

import difflib
import hashlib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .errors import BenchError

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Token = Annotated[int, Meta(ge=0, lt=2**32)]
Limit = Annotated[float, Meta(ge=0)]  # nats


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: a key nobody knows is an error."""


class Arm(Section):
    """One engine tree with its own settings.

    `patches`: true is the folder as it lies in a repository that has commits above
    its base, false the root commit (the unpatched base), left out the folder as it
    lies. `revision` names a commit of that repository instead.
    """

    engine: str = ""
    patches: bool | None = None
    revision: str = ""
    model: str = ""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    same_tree_as: str = ""  # states that two arms share a tree on purpose
    url: str = ""  # attach to a running server instead of starting one


class Node(Section):
    """One host of a multi-node server.

    `command` is run through the shell here, with {engine} (the whole launch
    command), {quoted} (that with its --node-rank, as one word for ssh), {rank},
    {port}, {label} and {nonce} filled in.
    """

    command: str


class Server(Section):
    model: str = ""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    python: str = ""  # interpreter of the engine environment; default: this one
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # 0: any free port
    ready_timeout: Annotated[float, Meta(gt=0)] = 1800
    stop_grace: Annotated[float, Meta(ge=0)] = 30
    cache: str = ""  # baseline autotune cache; each run gets a clone
    nodes: list[Node] = []


class Load(Section):
    isl: Annotated[int, Meta(ge=2)]
    osl: Positive = 1
    concurrency: Positive = 4
    requests: Positive = 128
    warmup: Count = 8
    seed: Count = 1
    # Expected of every formal request.
    cached_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    cached_slack: Count = 0  # allowed distance from it, tokens
    tokenizer: str = ""  # default: the model
    arguments: list[str] = []  # more arguments for sglang.benchmark.serving


class Run(Section):
    label: str
    arm: str
    pair: int = 1


class Schedule(Section):
    pairs: Count = 0  # A B B A ... over all arms
    runs: list[Run] = []  # or each run by name


class Outputs(Section):
    lengths: tuple[Positive, ...] = (1024, 16383, 16384, 16385, 32768, 65536)
    repeats: Positive = 2
    new_tokens: Positive = 16
    concurrent: Count = 8
    concurrent_length: Positive = 16384
    concurrency: Positive = 4
    seed: int = 1


class Continuation(Section):
    contexts: tuple[Positive, ...] = (32769, 36000, 72000)
    control: Count = 32768  # aligned to the prefill chunk; 0: no control
    length: Positive = 167
    seed: int = 1
    host: bool = False  # also score after the prefix went to the host tier
    fill: Count = 0  # tokens that empty the device cache; 0: ask the server
    max_mean: Limit | None = None  # limit on mean |difference| cold to warm
    max_repeat: Limit | None = None  # limit on max |difference| warm to warm
    max_control: Limit | None = None  # limit on max |difference| of the control


class Branching(Section):
    prefix: Positive = 8320  # ends in the middle of an index group
    suffix: Positive = 512  # tokens each branch adds
    span: Positive = 167  # tokens of the first branch that are scored
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (1, 2, 3)
    collapse: Annotated[float, Meta(gt=0)] = 0.5  # a fall of the mean score, nats
    max_mean: Limit | None = None  # limit on mean |difference|


class Config(Section):
    experiment: str
    baseline: str
    arms: dict[str, Arm]
    server: Server = msgspec.field(default_factory=Server)
    load: Load | None = None
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    outputs: Outputs | None = None
    continuation: Continuation | None = None
    branching: Branching | None = None
    token_range: tuple[Token, Token] = (1000, 100000)  # ids the probes draw from
    scratch: str = "build/bench"
    rows: str = ""  # default: SCRATCH/EXPERIMENT.jsonl


def _known(where: str) -> list[str]:
    """Keys allowed in one section, named as in the TOML file."""
    found: Any = Config
    for part in [p for p in where.split(".") if p]:
        field = next((f for f in msgspec.structs.fields(found) if f.name == part), None)
        if field is None:
            return []
        choices = [field.type, *getattr(field.type, "__args__", ())]
        found = next((c for c in choices if hasattr(c, "__struct_fields__")), None)
        if found is None:
            return []
    return list(found.__struct_fields__)


def _explain(error: msgspec.ValidationError, prefix: str) -> str:
    """Turns msgspec's message into `key PATH: what is wrong; what is allowed`."""
    message, _, path = str(error).partition(" - at `$")
    where = ".".join(p for p in (prefix, path.strip("`").lstrip(".")) if p)
    unknown = re.search(r"unknown field `(.+)`", message)
    missing = re.search(r"missing required field `(.+)`", message)
    field = unknown or missing
    if not field:
        return f"key {where or '(top level)'}: {message}"
    key = ".".join(p for p in (where, field[1]) if p)
    section = re.sub(r"^arms\.[^.]+", "arms", re.sub(r"\[.*?\]", "", where))
    known = _known(section)
    if missing:
        return f"key {key} is missing; add it"
    close = difflib.get_close_matches(field[1], known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown key {key}; {hint}known keys here: {', '.join(known)}"


def _check(config: Config) -> None:
    """Raises ValueError for what the types alone cannot say."""
    names = list(config.arms)
    if config.baseline not in config.arms:
        raise ValueError(
            f"baseline is {config.baseline!r}, arms are {', '.join(names)};"
            " name one of them"
        )
    for name, arm in config.arms.items():
        if bool(arm.engine) == bool(arm.url):
            raise ValueError(f"arms.{name}: give either engine or url")
        if arm.revision and arm.patches is not None:
            raise ValueError(f"arms.{name}: give either patches or revision")
        if arm.same_tree_as and arm.same_tree_as not in config.arms:
            raise ValueError(f"arms.{name}.same_tree_as: no arm {arm.same_tree_as!r}")
        if arm.engine and not (arm.model or config.server.model):
            raise ValueError(f"arms.{name}: no model; set server.model")
    if config.server.nodes and not config.server.port:
        raise ValueError(
            "server.port is 0; with server.nodes give a port that is free on the"
            " first node"
        )
    labels = [run.label for run in config.schedule.runs]
    for run in config.schedule.runs:
        if run.arm not in config.arms:
            raise ValueError(f"schedule.runs {run.label}: no arm {run.arm!r}")
        if labels.count(run.label) > 1:
            raise ValueError(f"schedule.runs: label {run.label} is used twice")
    if config.schedule.runs and config.schedule.pairs:
        raise ValueError("schedule: give either pairs or runs")
    outputs, scores, branching = config.outputs, config.continuation, config.branching
    if outputs and not outputs.lengths and not outputs.concurrent:
        raise ValueError("outputs: no request; give lengths, or concurrent above 0")
    if scores and not scores.contexts and not scores.control:
        raise ValueError("continuation: no request; give contexts, or a control")
    if branching and branching.span > branching.suffix:
        raise ValueError(
            f"branching.span is {branching.span}, but a branch has only"
            f" {branching.suffix} tokens to score; lower span, or raise suffix"
        )
    if config.token_range[0] >= config.token_range[1]:
        raise ValueError("token_range: the first id must be below the second")


def load(path: Path) -> Config:
    """Reads an experiment file. Raises BenchError that names the file and the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(
            f"cannot read {path}: {error.strerror}; see scripts/bench/examples"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} is not TOML: {error}; fix that place") from error
    try:
        arms = data.get("arms", {})
        for name, arm in arms.items() if isinstance(arms, dict) else ():
            try:
                msgspec.convert(arm, Arm)
            except msgspec.ValidationError as error:
                raise BenchError(f"{path}: {_explain(error, f'arms.{name}')}") from None
        config = msgspec.convert(data, Config)
        _check(config)
    except msgspec.ValidationError as error:
        raise BenchError(f"{path}: {_explain(error, '')}") from None
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from None
    return config


def digest(config: Config) -> str:
    """SHA-256 of everything that decides a run's result; where files lie does not."""
    whole = msgspec.to_builtins(config)
    for key in ("scratch", "rows", "schedule"):
        whole.pop(key)
    for key in ("port", "ready_timeout", "stop_grace", "python", "cache"):
        whole["server"].pop(key)
    for arm in whole["arms"].values():
        arm.pop("engine")  # rows prove the tree by its text
    return hashlib.sha256(msgspec.json.encode(whole, order="sorted")).hexdigest()


def schedule(config: Config) -> list[Run]:
    """The runs in order: as listed, or forwards and backwards over the arms in turn."""
    if config.schedule.runs:
        return config.schedule.runs
    order = [
        config.baseline,
        *(name for name in config.arms if name != config.baseline),
    ]
    runs = []
    for pair in range(1, (config.schedule.pairs or 1) + 1):
        names = order if pair % 2 else order[::-1]
        runs += [Run(label=f"{name}-{pair}", arm=name, pair=pair) for name in names]
    return runs
