"""The load's command line and its result file, request by request."""

import json

import pytest
from bench import checks, load
from bench.config import Load
from bench.errors import RunFailed
from bench.rows import Request

RESULT = {
    "request_rate": float("inf"),  # the client's default, written as Infinity
    "duration": 2.5,
    "errors": ["", "Traceback\n  line\nValueError: no", ""],
    "ttfts": [0.5, 0.0, 0.0],
    "itls": [[0.1, 0.2], [], []],
    "input_lens": [10, 10, 10],
    "output_lens": [3, 0, 3],
    "cached_tokens": [0, 0, 4],
    "generated_texts": ["a b c", "", ""],
}


def read(tmp_path, **changes):
    path = tmp_path / "x.jsonl"
    path.write_text('{"an": "older run"}\n' + json.dumps(RESULT | changes) + "\n")
    return load.read_result(path)


def test_a_result_is_read_per_request(tmp_path):
    result = read(tmp_path)
    assert result.duration_s == 2.5
    good, failed, empty = result.requests
    assert good.ok and good.latency_s == pytest.approx(0.8)
    assert (good.ttft_s, good.input_tokens, good.output_tokens) == (0.5, 10, 3)
    assert (failed.ok, failed.error, failed.ttft_s) == (False, "ValueError: no", None)
    # A stream that was aborted ends without text, and the client calls that success.
    assert (empty.ok, empty.error) == (False, "the answer held no text")
    assert empty.cached_tokens is None


@pytest.mark.parametrize(
    "changes",
    [{"ttfts": [1.0]}, {"duration": None}, {"itls": None}, {"errors": [1, 2, 3]}],
)
def test_an_unusable_result_names_its_file(tmp_path, changes):
    with pytest.raises(RunFailed, match="x.jsonl"):
        read(tmp_path, **changes)


@pytest.mark.parametrize("content", ["", "{}\n", '{"duration": 1', "[]\n"])
def test_a_broken_result_file_is_a_failed_run(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(RunFailed):
        load.read_result(path)
    with pytest.raises(RunFailed):
        load.read_result(tmp_path / "none.jsonl")


def line(shape, part, seed=1):
    return load.arguments(
        shape, url="http://h:1", model="m", requests=3, seed=seed, part=part
    )


def value(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_uncached_load_uses_random_ids_of_exact_lengths():
    shape = Load(isl=64, osl=2, concurrency=5, arguments=["--tag", "x"])
    found = line(shape, "formal")
    assert value(found, "--dataset-name") == "random-ids"
    assert value(found, "--random-input-len") == "64"
    assert value(found, "--random-output-len") == "2"
    assert value(found, "--random-range-ratio") == "1"
    assert value(found, "--max-concurrency") == "5"
    assert found[-2:] == ["--tag", "x"]
    sampling = json.loads(value(found, "--extra-request-body"))["sampling_params"]
    assert sampling["max_new_tokens"] == 2 and sampling["ignore_eos"]
    assert not sampling["skip_special_tokens"]


def test_a_cached_share_becomes_one_shared_prefix():
    shape = Load(isl=131072, osl=1, cached_share=0.95)
    found = line(shape, "formal")
    prefix = int(value(found, "--gsp-system-prompt-len"))
    assert prefix == 124518
    assert int(value(found, "--gsp-question-len")) == 131072 - prefix
    prime = line(shape, "prime")
    assert value(prime, "--gsp-system-prompt-len") == str(prefix)
    assert value(prime, "--gsp-question-len") == "1"


def requests(**changes):
    fields = {"ok": True, "input_tokens": 100, "output_tokens": 1, "cached_tokens": 0}
    return [Request(index=i, **(fields | changes)) for i in range(3)]


@pytest.mark.parametrize(
    "share, slack, cached, ok",
    [
        (0.0, 0, 0, True),
        (0.0, 0, 1, False),
        (0.0, 1, 1, True),
        (0.95, 0, 95, True),
        (0.95, 0, 94, False),
        (0.95, 0, 99, False),
        (0.95, 4, 99, True),
        (0.955, 0, 95, True),
        (0.95, 0, 0, False),
        (0.95, 0, None, False),
    ],
)
def test_every_request_is_held_to_the_stated_share(share, slack, cached, ok):
    shape = Load(isl=100, requests=3, cached_share=share, cached_slack=slack)
    found = requests(cached_tokens=95 if share else 0)
    found[1].cached_tokens = cached
    check = checks.cached(found, shape)
    assert check.ok == ok
    assert ("request 1" in check.detail) == (not ok)


def test_failed_short_and_missing_requests_are_listed():
    shape = Load(isl=100, requests=3)
    found = requests()
    assert checks.complete(found, shape).ok and checks.lengths(found, shape).ok
    found[2].ok, found[2].error = False, "gone"
    assert "request 2: gone" in checks.complete(found, shape).detail
    assert not checks.complete(found, shape).ok
    assert not checks.complete(requests()[:2], shape).ok
    found[0].input_tokens = 99
    assert "request 0: 99 in, 1 out" in checks.lengths(found, shape).detail


@pytest.mark.parametrize(
    "before, after, ok", [(0, 0, True), (5, 5, True), (5, 6, False), (None, 0, False)]
)
def test_retractions_are_those_of_the_formal_part(before, after, ok):
    assert checks.retractions(before, after).ok == ok


def test_a_long_list_of_offenders_is_cut():
    shape = Load(isl=100, requests=100)
    found = [Request(index=i, ok=False, error="x") for i in range(100)]
    assert checks.complete(found, shape).detail.endswith("request 4: x and 95 more")
