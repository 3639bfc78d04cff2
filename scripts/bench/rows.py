"""Raw rows: one JSON line for each run, written before anything is derived.

Times are seconds on the client's monotonic clock, counts are tokens, and a
field nobody could read is null, never a guess.
"""

import fcntl
import math
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import BenchError

SCHEMA = 1
Kind = Literal["serve", "outputs", "continuation", "branching", "trace"]


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU of the serving host, read when the run ended. Clocks in MHz."""

    index: int
    name: str
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None


class Engine(msgspec.Struct, kw_only=True):
    """What the serving process said about itself."""

    digest: str  # SHA-256 over path and text of every source file it can import
    tree: str  # folder of the sglang package that Python imported
    files: int
    pid: int
    host: str = ""
    nonce: str = ""


class Environment(msgspec.Struct, kw_only=True):
    """Where and with what one run ran."""

    engine: Engine | None = None
    gpus: list[Gpu] = []
    driver: str = ""
    packages: dict[str, str] = {}
    python: str = ""
    arguments: list[str] = []  # server command line, as given to the engine
    variables: dict[str, str] = {}  # environment variables the arm sets
    load: dict[str, Any] = {}  # request shape: isl, osl, concurrency, ...
    seed: int = 0


class Request(msgspec.Struct, kw_only=True):
    """One request of a run."""

    index: int
    ok: bool
    error: str = ""
    ttft_s: float | None = None
    latency_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    retractions: int | None = None


def finite(values: list[float]) -> list[float | None]:
    """The values with null for NaN and infinities, which JSON cannot hold."""
    return [value if math.isfinite(value) else None for value in values]


class Output(msgspec.Struct, kw_only=True):
    """One fixed greedy request: what went in and what came out."""

    name: str  # stable across arms: length, repeat, concurrent index
    length: int
    repeat: int
    concurrent: bool
    input_sha256: str
    output_ids: list[int]
    cached_tokens: int | None = None


class Scored(msgspec.Struct, kw_only=True):
    """One scored fixed continuation."""

    context: int  # tokens before the continuation
    state: Literal["cold", "warm", "repeat", "host"]
    control: bool  # True: the aligned-boundary control
    seed: int
    input_sha256: str
    logprobs: list[float | None]  # nats; null: not a finite number
    cached_tokens: int | None = None


class Branch(msgspec.Struct, kw_only=True):
    """Scores of the first branch before and after a competing branch.

    Order "A B A" scores A, sends B, scores A again; "B A" sends B first, into a
    cache that holds the shared prefix only, and then scores A.
    """

    seed: int
    order: Literal["A B A", "B A"] = "A B A"
    prefix: int
    before: list[float | None]  # nats; null: not a finite number
    after: list[float | None]
    cached_before: int | None = None
    cached_after: int | None = None


class TraceClass(msgspec.Struct, kw_only=True):
    """Kernels of one class on one rank."""

    rank: int
    name: str
    count: int
    time_us: float
    tile: int | None = None
    source: str = ""  # file the numbers come from


class Check(msgspec.Struct, kw_only=True):
    """One stated expectation and whether the run met it."""

    name: str
    ok: bool
    detail: str = ""


class Row(msgspec.Struct, kw_only=True):
    """One run. `failed` says why a run ended without a result."""

    schema: int = SCHEMA
    kind: Kind
    experiment: str
    config_sha256: str
    label: str  # A1, KDA, B1, ...: unique in an experiment's schedule
    arm: str
    baseline: bool = False  # True for runs of the arm others are compared with
    pair: int | None = None  # runs of one pair are compared with each other
    position: int = 0  # place in the schedule, from 0
    formal: bool = True  # False: warm-up, never part of a result
    started: str = ""  # UTC, ISO 8601
    duration_s: float | None = None  # as sglang.benchmark.serving reports it
    environment: Environment
    requests: list[Request] = []
    outputs: list[Output] = []
    scored: list[Scored] = []
    branches: list[Branch] = []
    trace: list[TraceClass] = []
    checks: list[Check] = []
    notes: dict[str, Any] = {}
    failed: str = ""

    @property
    def passed(self) -> bool:
        """True when the run ended and met every check: only then it has a speed."""
        return not self.failed and all(check.ok for check in self.checks)

    @property
    def problems(self) -> list[str]:
        """Why the run shows no speed, one text for each cause."""
        causes = [f"run failed: {self.failed}"] if self.failed else []
        return causes + [
            f"{check.name}: {check.detail}" for check in self.checks if not check.ok
        ]


class BadLine(msgspec.Struct, frozen=True):
    """A line that is no row. `line` counts from 1."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def append(path: Path, row: Row) -> None:
    """Adds one line and has it on disk before returning.

    A line that an earlier crash cut short is closed first, so that it spoils
    itself only. Raises BenchError when the file cannot be written.
    """
    line = msgspec.json.encode(row) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BenchError(
            f"cannot write rows to {path}: {error}; choose a writable --rows file"
        ) from error


def read(path: Path) -> tuple[list[Row], list[BadLine]]:
    """Returns the good rows in file order, and a BadLine for each other line.

    Raises BenchError when the file itself cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(
            f"cannot read rows from {path}: {error}; name the file that serve-ab wrote"
        ) from error
    rows, bad = [], []
    decoder = msgspec.json.Decoder(Row)
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            cut = number == len(lines) and not data.endswith(b"\n")
            reason = f"truncated row ({error})" if cut else f"not a row ({error})"
            bad.append(BadLine(path=str(path), line=number, reason=reason))
            continue
        if row.schema != SCHEMA:
            reason = f"row schema {row.schema}, this harness reads {SCHEMA}"
            bad.append(BadLine(path=str(path), line=number, reason=reason))
            continue
        rows.append(row)
    return rows, bad
