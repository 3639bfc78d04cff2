"""The problem an op is tuned for: a mixture-of-experts layer's sizes."""

import dataclasses
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

from ..errors import BenchError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes of one MoE layer as one rank sees it.

    `hidden` and `intermediate` are the widths of the experts' input and of one
    half of the gated projection, `experts` counts all routed experts and
    `local_experts` those on this rank (from `local_offset`), `top_k` the experts
    a token goes to. `routing` is how the engine hands the routing over: "packed"
    (one int32 for expert and bf16 weight) or "unpacked" (ids and weights).
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    local_experts: int
    top_k: int
    local_offset: int = 0
    activation: str = "situ"
    routing: str = "packed"
    finalize: bool = True


# Sizes: the released Kimi-K3 configuration (routed latent width 3584, expert width
# 3072, 896 experts, top-16) at expert-parallel size 1. At 16,384 tokens SGLang
# 0.5.23 hands ids and weights over unpacked: packing is a decode-size path.
KIMI_K3 = Problem(
    name="kimi-k3",
    hidden=3584,
    intermediate=3072,
    experts=896,
    local_experts=896,
    top_k=16,
    routing="unpacked",
)
BUILT_IN = {KIMI_K3.name: KIMI_K3}


def load(name: str, overrides: list[str]) -> Problem:
    """Returns the problem `name`, a built-in one or a TOML or JSON file.

    `overrides` are FIELD=VALUE texts. Raises BenchError naming the file and the
    field when a field is unknown, missing, of the wrong type or makes no sense.
    """
    return build(*_read(name), overrides)


def build(values: dict[str, Any], where: str, overrides: list[str]) -> Problem:
    """The problem of `values` with `overrides` on top. Raises BenchError as `load`,
    naming `where` the values are from."""
    values = dict(values)
    fields = {f.name: f.type for f in dataclasses.fields(Problem)}
    for text in overrides:
        key, sep, value = text.partition("=")
        if not sep:
            raise BenchError(f"--set {text!r}: write it as FIELD=VALUE")
        values[key] = value
    for key, value in values.items():
        if key not in fields:
            raise BenchError(
                f"{where}: no field {key!r} in a problem; fields are "
                + ", ".join(fields)
            )
        values[key] = _typed(where, key, value, fields[key])
    if overrides and values.get("name") in BUILT_IN:
        values["name"] += f" with {' '.join(overrides)}"
    try:
        problem = Problem(**values)
    except TypeError as error:
        missing = [f for f in fields if f not in values]
        raise BenchError(
            f"{where}: the problem lacks {', '.join(missing)}; add them"
        ) from error
    _check(where, problem)
    return problem


def digest(problem: Problem) -> str:
    """SHA-256 over the problem's fields, its name left out."""
    values = dataclasses.asdict(problem)
    del values["name"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _read(name: str) -> tuple[dict, str]:
    if name in BUILT_IN:
        return dataclasses.asdict(BUILT_IN[name]), f"problem {name}"
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise BenchError(
            f"no problem {name!r}: use one of {', '.join(BUILT_IN)}, or name a "
            ".toml or .json file"
        )
    try:
        text = path.read_text()
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read the problem {path}: {error}") from error
    if not isinstance(values, dict):
        raise BenchError(f"{path}: a problem is a table of fields")
    values.setdefault("name", path.stem)
    return values, str(path)


def _typed(where: str, key: str, value: object, kind: type) -> object:
    if kind is bool and isinstance(value, str):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif kind is int and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise BenchError(f"{where}: {key} must be {kind.__name__}, got {value!r}")


def _check(where: str, problem: Problem) -> None:
    for key in ("hidden", "intermediate", "experts", "local_experts", "top_k"):
        if getattr(problem, key) < 1:
            raise BenchError(f"{where}: {key} must be at least 1")
    if problem.top_k > problem.experts:
        raise BenchError(
            f"{where}: top_k {problem.top_k} exceeds experts {problem.experts}"
        )
    last = problem.local_offset + problem.local_experts
    if problem.local_offset < 0 or last > problem.experts:
        raise BenchError(
            f"{where}: local experts {problem.local_offset}..{last} leave the "
            f"{problem.experts} experts"
        )
    if problem.routing not in ("packed", "unpacked"):
        raise BenchError(f"{where}: routing must be packed or unpacked")
