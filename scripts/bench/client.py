"""The HTTP side of an SGLang server, as far as the harness needs it."""

from concurrent.futures import ThreadPoolExecutor
from math import nan

import msgspec
import requests
from prometheus_client.parser import text_string_to_metric_families

from .errors import RunFailed

RETRACTED = "sglang:num_retracted_requests_total"
RETRACTED_NOW = "sglang:num_retracted_reqs"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one /generate request returned. `logprobs` are nats, NaN where none came."""

    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    retractions: int
    logprobs: list[float] = []
    scored_ids: list[int] = []
    host_tokens: int = 0  # cached tokens that came back from the host tier


class Client:
    """Talks to one server. Every method raises RunFailed when it does not answer."""

    def __init__(self, url: str, timeout: float = 3600) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout

    def _call(self, method: str, path: str, **arguments) -> requests.Response:
        arguments.setdefault("timeout", self.timeout)
        try:
            answer = requests.request(method, self.url + path, **arguments)
        except requests.RequestException as error:
            raise RunFailed(
                f"{self.url}{path} does not answer ({type(error).__name__}: {error});"
                " see the server's log"
            ) from error
        if answer.status_code != 200:
            raise RunFailed(
                f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}"
            )
        return answer

    def _json(self, method: str, path: str, **arguments) -> dict:
        answer = self._call(method, path, **arguments)
        try:
            data = answer.json()
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise RunFailed(
                f"{self.url}{path}: not an answer of SGLang 0.5.23, but"
                f" {answer.text[:300]!r}; is something else at this address?"
            )
        return data

    def healthy(self) -> bool:
        """True once the server has generated a token for its own health check."""
        try:
            answer = requests.get(self.url + "/health_generate", timeout=30)
        except requests.RequestException:
            return False
        return answer.status_code == 200

    def identity(self) -> dict | None:
        """The serving process's own description; None without our launcher."""
        try:
            return self._json("GET", "/bench_identity", timeout=60)
        except RunFailed:
            return None

    def info(self) -> dict:
        """The server's resolved settings."""
        return self._json("GET", "/server_info")

    def flush(self) -> None:
        """Empties the prefix cache, waiting for running requests to end."""
        self._call("POST", "/flush_cache", params={"timeout": 60})

    def retracted(self) -> int | None:
        """Requests retracted since the start; None when the server does not count.

        The counter appears with the first retraction; before that, the gauge
        beside it shows that the count is kept.
        """
        try:
            text = self._call("GET", "/metrics", timeout=60).text
            samples = [
                sample
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ]
        except (RunFailed, ValueError):
            return None
        counted = [s.value for s in samples if s.name == RETRACTED]
        if counted:
            return int(sum(counted))
        return 0 if any(s.name == RETRACTED_NOW for s in samples) else None

    def generate(
        self, ids: list[int], *, new_tokens: int, score_from: int | None = None
    ) -> Answer:
        """Greedy continuation of token ids; scores ids[score_from + 1:] if that is given.

        The server gives the token at `score_from` itself no score.
        """
        body = {
            "input_ids": ids,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
        }
        if score_from is not None:
            body |= {"return_logprob": True, "logprob_start_len": score_from}
        data = self._json("POST", "/generate", json=body)
        try:
            meta = data["meta_info"]
            # The first entry has no score; JSON has null where a later one is NaN.
            scored = (meta.get("input_token_logprobs") or [None])[1:]
            details = meta.get("cached_tokens_details") or {}
            return Answer(
                output_ids=data.get("output_ids") or [],
                prompt_tokens=meta["prompt_tokens"],
                cached_tokens=meta["cached_tokens"],
                retractions=meta.get("num_retractions") or 0,
                logprobs=[nan if e[0] is None else float(e[0]) for e in scored],
                scored_ids=[entry[1] for entry in scored],
                host_tokens=details.get("host") or 0,
            )
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise RunFailed(
                f"{self.url}/generate: not an answer of SGLang 0.5.23"
                f" ({type(error).__name__}: {error}): {str(data)[:300]}"
            ) from error

    def generate_all(
        self, prompts: list[list[int]], *, new_tokens: int, concurrency: int
    ) -> list[Answer]:
        """Sends prompts with that many in flight; answers in the prompts' order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(
                pool.map(lambda ids: self.generate(ids, new_tokens=new_tokens), prompts)
            )
