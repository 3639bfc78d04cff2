"""Load: `sglang.benchmark.serving` with the experiment's shape, read back per request."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from . import procs
from .config import Load
from .errors import RunFailed
from .rows import Request

WORKER = Path(__file__).resolve().parent / "load_worker.py"


class Result(msgspec.Struct, kw_only=True):
    """One load run: seconds as `sglang.benchmark.serving` states them."""

    duration_s: float
    requests: list[Request]


class LoadClient:
    """A process that holds `sglang.benchmark.serving`, for all runs of an experiment."""

    def __init__(
        self, *, python: str, python_path: str, scratch: Path, show: bool
    ) -> None:
        self.scratch, self.mark = scratch, procs.new_mark()
        self.log = scratch / "logs" / f"load-{self.mark[:12]}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.home = scratch / "home" / self.mark
        self.home.mkdir(parents=True)
        # The shared-prefix data set keeps prompts under HOME in a file whose name
        # leaves the vocabulary out: a folder of our own cannot be stale.
        cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
        environment = {
            **os.environ,
            **({"PYTHONPATH": python_path} if python_path else {}),
            "HOME": str(self.home),
            "HF_HOME": str(cache),
            procs.MARK: self.mark,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        read, write = os.pipe()
        with open(self.log, "ab") as log:
            self.process = procs.start(
                [python or sys.executable, "-P", str(WORKER), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=None if show else log,
                env=environment,
                pass_fds=[write],
                text=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)
        self._ready = False

    def __enter__(self) -> "LoadClient":
        return self

    def __exit__(self, *_exc) -> None:
        with procs.unhurried():
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            procs.end_marked(self.mark)
            self._answers.close()
            shutil.rmtree(self.home, ignore_errors=True)

    def _answer(self, alive: Callable[[], None]) -> dict:
        while True:
            readable, _, _ = select.select([self._answers], [], [], 0.5)
            if readable:
                line = self._answers.readline()
                if not line:
                    raise RunFailed(
                        "the load client ended; its log:\n" + procs.tail(self.log, 15)
                    )
                return json.loads(line)
            alive()

    def run(self, arguments: list[str], alive: Callable[[], None]) -> Result:
        """Runs one load. `alive` raises RunFailed when the server is gone.

        Raises RunFailed when the client gives no result.
        """
        if not self._ready:
            self._answer(alive)
            self._ready = True
        output = self.scratch / "logs" / f"load-{procs.new_mark()}.jsonl"
        self.process.stdin.write(json.dumps([*arguments, "--output-file", str(output)]))
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self._answer(alive)
        if not answer["ok"]:
            raise RunFailed(
                f"sglang.benchmark.serving gave no result ({answer['error']}); its log:\n"
                + procs.tail(self.log, 15)
            )
        return read_result(output)


class Detailed(msgspec.Struct, kw_only=True):
    """What is used of a result that --output-details and --cache-report wrote."""

    duration: float
    errors: list[str]
    ttfts: list[float]
    itls: list[list[float]]
    input_lens: list[int]
    output_lens: list[int]
    cached_tokens: list[int]
    generated_texts: list[str]


def read_result(path: Path) -> Result:
    """The last line of a detailed result file. Raises RunFailed when it has none."""
    try:
        # The file holds Infinity, which msgspec's own reader refuses.
        last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        data = msgspec.convert(last, Detailed)
        columns = [
            data.errors,
            data.ttfts,
            data.itls,
            data.input_lens,
            data.output_lens,
            data.cached_tokens,
            data.generated_texts,
        ]
        rows = zip(*columns, strict=True)
        found = [_request(index, *values) for index, values in enumerate(rows)]
    except (OSError, ValueError, IndexError) as error:
        raise RunFailed(f"no usable result in {path}: {error!r}") from error
    return Result(duration_s=data.duration, requests=found)


def _request(
    index: int,
    error: str,
    ttft: float,
    itl: list[float],
    input_tokens: int,
    output_tokens: int,
    cached: int,
    text: str,
) -> Request:
    # An aborted request ends the stream without text and without an error here.
    if not error and (not text or not ttft):
        error = "the answer held no text"
    ok = not error
    return Request(
        index=index,
        ok=ok,
        error=error.strip().splitlines()[-1][:300] if error.strip() else "",
        ttft_s=ttft if ok else None,
        latency_s=ttft + sum(itl) if ok else None,
        input_tokens=input_tokens,
        output_tokens=output_tokens if ok else 0,
        cached_tokens=cached if ok else None,
    )


def shape(load: Load) -> dict:
    """The load section as a plain mapping, for the rows."""
    return msgspec.to_builtins(load)


def prefix_tokens(load: Load) -> int:
    """Tokens of each formal prompt that are expected in the cache."""
    return round(load.isl * load.cached_share)


def arguments(
    load: Load, *, url: str, model: str, requests: int, seed: int, part: str
) -> list[str]:
    """The command line of one load.

    `part` is "formal", "warmup", or "prime": one request that leaves the formal
    prompts' shared prefix, and one token more, in the cache.
    """
    # Skipping special tokens would make some one-token answers empty texts, which
    # have no time to first token.
    sampling = {
        "temperature": 0,
        "max_new_tokens": load.osl,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    tokenizer = Path(load.tokenizer or model).expanduser()
    tokenizer = tokenizer.resolve() if tokenizer.is_dir() else load.tokenizer or model
    common = [
        *("--backend", "sglang", "--base-url", url, "--model", model),
        *("--tokenizer", str(tokenizer), "--seed", str(seed)),
        *("--tokenize-prompt", "--num-prompts", str(requests)),
        *("--max-concurrency", str(load.concurrency)),
        *("--warmup-requests", "0", "--cache-report", "--output-details"),
        *("--extra-request-body", json.dumps({"sampling_params": sampling})),
    ]
    if not load.cached_share:
        lengths = [
            *("--dataset-name", "random-ids", "--random-range-ratio", "1"),
            *("--random-input-len", str(load.isl)),
            *("--random-output-len", str(load.osl)),
        ]
    else:
        shared = prefix_tokens(load)
        rest = 1 if part == "prime" else load.isl - shared
        lengths = [
            *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "1"),
            *("--gsp-prompts-per-group", str(requests), "--gsp-ordered"),
            *("--gsp-system-prompt-len", str(shared)),
            *("--gsp-question-len", str(rest), "--gsp-output-len", str(load.osl)),
        ]
    return common + lengths + load.arguments
