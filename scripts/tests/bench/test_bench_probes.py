"""outputs, continuation and branching on the stand-in engine, and with a middleman."""

import copy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import benchkit
import pytest
from bench import (
    branching,
    cases,
    compare,
    config,
    continuation,
    experiment,
    outputs,
    procs,
    rows,
)
from bench.client import Answer, Client
from bench.errors import BenchError, RunFailed
from benchkit import Middleman, experiment_of, run_bench, standin_server

NOBODY = "http://127.0.0.1:9"


def attach(tmp_path, url, **changes):
    """An experiment with one arm, a running server at `url`."""
    return benchkit.write(
        tmp_path, "unused", arms={"base": {"url": url}}, server={}, **changes
    )


def read(tmp_path):
    found, bad = rows.read(tmp_path / "scratch" / "trial.jsonl")
    assert not bad
    return found


def faults(row):
    return {check.name for check in row.checks if not check.ok}


# outputs


def test_equal_arms_have_equal_outputs_with_hashed_inputs(tmp_path, standin):
    path = benchkit.write(tmp_path, standin)
    done = run_bench("outputs", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "series: all 7 outputs equal base's" in done.stdout
    base, series = read(tmp_path)
    assert base.passed and series.passed
    assert base.outputs == series.outputs
    lengths = [(o.length, o.repeat, o.concurrent) for o in base.outputs]
    assert lengths[:4] == [
        (10, 0, False),
        (10, 1, False),
        (20, 0, False),
        (20, 1, False),
    ]
    assert lengths[4:] == [(15, 0, True), (15, 1, True), (15, 2, True)]
    assert len({o.input_sha256 for o in base.outputs}) == 5
    prompt = cases.tokens(10, name="outputs-1-10", ids=(1, 500))
    assert base.outputs[0].input_sha256 == cases.sha256(prompt)
    assert [o.cached_tokens for o in base.outputs[:4]] == [0] * 4


def test_a_changed_weight_is_seen_with_request_and_token(tmp_path, standin):
    path = benchkit.write(tmp_path, standin, arms__series__arguments=["--weights", "1"])
    done = run_bench("outputs", path)
    assert done.returncode == 1
    assert (
        "series: 10 tokens, repeat 1: first difference at output token 0" in done.stdout
    )
    assert "series: 15 tokens, concurrent 3: first difference" in done.stdout
    # The rows are there now: the same answer without any server.
    again = run_bench("outputs", path)
    assert again.returncode == 1 and "starting" not in again.stderr


def test_an_answer_that_changes_between_repeats_is_seen(tmp_path, standin):
    count = iter(range(100))

    def spoil(_body, answer):
        if next(count) == 3:  # the second repeat of the second length
            answer["output_ids"][2] += 1
        return answer

    with standin_server(standin) as url, Middleman(url, spoil) as middle:
        done = run_bench("outputs", attach(tmp_path, middle.url))
    assert done.returncode == 1
    assert (
        "outputs-repeat: 20 tokens, repeat 2 differs from 20 tokens, repeat 1 at token 2"
    ) in done.stdout


def test_outputs_differences_name_the_first_token_and_missing_requests():
    def row(arm, *outputs):
        return rows.Row(
            kind="outputs",
            experiment="e",
            config_sha256="",
            label=arm,
            arm=arm,
            environment=rows.Environment(),
            outputs=[
                rows.Output(
                    name=name,
                    length=1,
                    repeat=0,
                    concurrent=False,
                    input_sha256=sha,
                    output_ids=ids,
                )
                for name, sha, ids in outputs
            ],
        )

    base = row("a", ("x", "1", [1, 2, 3]), ("y", "2", [1]), ("z", "3", [1, 2]))
    other = row("b", ("x", "1", [1, 9, 9]), ("y", "9", [2]), ("w", "4", [1]))
    assert compare.outputs(base, other) == [
        "x: first difference at output token 1: 2 in a, 9 in b",
        "y: the inputs differ, so the outputs say nothing",
        "z: missing in b",
        "w: missing in a",
    ]
    short = row("c", ("x", "1", [1, 2]))
    assert "token 2: 3 in a, nothing in c" in compare.outputs(base, short)[0]
    assert compare.outputs(base, copy.deepcopy(base)) == []


@pytest.mark.parametrize(
    "fault, text",
    [
        ("no-start", "refuses to start on purpose"),
        ("die-while:/", "the server ended with status 7"),
    ],
)
def test_a_probe_that_lost_its_server_is_a_failed_row(tmp_path, standin, fault, text):
    broken = ["--faults", fault]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=broken)
    done = run_bench("outputs", path)
    assert done.returncode == 1, done.stdout + done.stderr
    base, series = read(tmp_path)
    assert base.passed and text in series.failed and series.outputs == []
    assert "series: run failed: " in done.stdout


def test_a_host_that_ended_during_a_probe_makes_a_failed_row(tmp_path):
    """Also when the first host still answers."""
    trial = experiment_of(attach(tmp_path, NOBODY))
    server = trial.server("base", "outputs-base")
    environment = {"PATH": "/usr/bin:/bin"}
    command = ["sh", "-c", "echo gone"]
    child = procs.Child(
        command, log=tmp_path / "log", environment=environment, mark=procs.new_mark()
    )
    child.process.wait()
    server.children.append(child)
    server.client = Client(NOBODY)

    def probe(trial, arm, _server):
        return trial.row("outputs", arm, label=arm)

    probe.__module__ = "bench.outputs"
    row = experiment.run_probe(trial, probe, "base", server)
    child.end(1)
    assert "ended with status 0; its log:\ngone" in row.failed
    assert read(tmp_path) == [row]


def test_a_server_that_went_silent_after_its_answers_is_a_failed_run(tmp_path):
    server = experiment_of(attach(tmp_path, NOBODY)).server("base", "base-1")
    server.url, server.client = NOBODY, Client(NOBODY)
    assert server.environment({}, 0).engine is None  # never said what it is
    server.identity = {"digest": "0"}
    with pytest.raises(RunFailed, match="run base-1: .* answers no more; see"):
        server.environment({}, 0)


class _Page(BaseHTTPRequestHandler):
    """Answers everything with a web page, as a proxy does that has lost its server."""

    def do_GET(self):
        page = b"<html>\nsorry\n</html>"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_POST = do_GET

    def log_message(self, *_arguments):
        pass


def test_a_web_page_in_place_of_an_answer_is_a_failed_run(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{pages.server_address[1]}")
        done = run_bench("outputs", attach(tmp_path, client.url))
        assert client.identity() is None and client.retracted() is None
        with pytest.raises(RunFailed, match="server_info: not an answer of SGLang"):
            client.info()
        pages.shutdown()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "generate: not an answer of SGLang 0.5.23, but '<html>" in done.stdout
    assert "not an answer" in read(tmp_path)[0].failed


# continuation


def test_cached_scores_are_compared_with_cold_ones_at_known_depths(tmp_path, standin):
    path = benchkit.write(tmp_path, standin)
    done = run_bench("continuation", path)
    assert done.returncode == 0, done.stdout + done.stderr
    row = read(tmp_path)[0]
    depths = [(s.context, s.state, s.control, s.cached_tokens) for s in row.scored]
    assert depths == [
        (30, "cold", False, 0),
        (30, "warm", False, 30),
        (30, "repeat", False, 30),
        (32, "cold", True, 0),
        (32, "warm", True, 32),
        (32, "repeat", True, 32),
    ]
    assert all(len(s.logprobs) == 8 for s in row.scored)
    table = compare.continuation(row)
    assert [e["states"] for e in table[:2]] == ["cold vs warm", "warm vs repeat"]
    assert all(e["max"] == 0 for e in table)


def _drift(by):
    """A cached score that is `by` nats off, as after a wrong state restore."""

    def spoil(_body, answer):
        if answer["meta_info"]["cached_tokens"] > 20:
            for entry in answer["meta_info"].get("input_token_logprobs", [])[1:]:
                entry[0] -= by
        return answer

    return spoil


def test_a_drift_of_cached_scores_is_measured_and_held_to_its_limit(tmp_path, standin):
    with standin_server(standin) as url, Middleman(url, _drift(0.25)) as middle:
        path = attach(tmp_path, middle.url, continuation__max_mean=0.2)
        done = run_bench("continuation", path)
        assert done.returncode == 1
        row = read(tmp_path)[0]
        assert faults(row) == {"max_mean"}
        entries = {(e["context"], e["states"]): e for e in compare.continuation(row)}
        for column in ("mean", "p90", "max"):
            assert entries[30, "cold vs warm"][column] == pytest.approx(0.25)
            assert entries[30, "warm vs repeat"][column] == 0
        path = attach(tmp_path, middle.url, continuation__max_mean=0.3)
        done = run_bench("continuation", path, "--rows", tmp_path / "wide.jsonl")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "entry, fault",
    [([-1.0, 7, None], "scored-tokens"), ([float("nan"), None, None], "finite-scores")],
)
def test_scores_of_other_tokens_and_nan_are_refused(tmp_path, standin, entry, fault):
    def spoil(body, answer):
        scores = answer["meta_info"].get("input_token_logprobs")
        if scores:
            wanted = body["input_ids"][-1]
            token = wanted if entry[1] is None else wanted % 400 + entry[1]
            scores[-1] = [entry[0], token, None]
        return answer

    with standin_server(standin) as url, Middleman(url, spoil) as middle:
        done = run_bench("continuation", attach(tmp_path, middle.url))
    assert done.returncode == 1
    assert fault in faults(read(tmp_path)[0])


def test_a_cold_score_from_the_cache_is_refused(tmp_path, standin):
    with standin_server(standin, "--faults", "sticky-cache") as url:
        done = run_bench("continuation", attach(tmp_path, url, continuation__control=0))
        again = run_bench(
            "continuation",
            attach(tmp_path, url, continuation__control=0),
            *("--rows", tmp_path / "again.jsonl"),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert again.returncode == 1
    assert "cache-depth: 30 cold: 30 cached" in again.stdout


def test_an_engine_without_a_host_tier_refuses_the_host_variant(tmp_path, standin):
    path = benchkit.write(tmp_path, standin, continuation__host=True)
    done = run_bench("continuation", path)
    assert done.returncode == 2
    assert "--enable-hierarchical-cache" in done.stderr


class ScriptedTransport:
    """A stand-in for a server with a device and a host cache tier of fixed sizes.

    Least recently used prompts leave the device first; the host keeps everything.
    """

    def __init__(self, device, host=True):
        self.device, self.host = device, host
        self.used, self.kept, self.sent = [], [], []
        self.held = []  # lengths of the prompts on the device before each scoring

    def info(self):
        return {"enable_hierarchical_cache": True, "max_total_num_tokens": self.device}

    def flush(self):
        self.used, self.kept = [], []

    def generate(self, ids, *, new_tokens, score_from=None):
        assert new_tokens == 0
        limit = len(ids) - 1 if score_from is None else score_from
        on_device = self._found(self.used, ids, limit)
        on_host = self._found(self.kept if self.host else [], ids, limit) - on_device
        self.sent.append((len(ids), score_from, on_device, on_host))
        if score_from is not None:
            self.held.append([len(entry) for entry in self.used])
        self.kept.append(ids)
        self.used.append(ids)
        while sum(map(len, self.used)) > self.device:
            self.used.pop(0)
        start = len(ids) if score_from is None else score_from + 1
        return Answer(
            output_ids=[],
            prompt_tokens=len(ids),
            cached_tokens=on_device + max(on_host, 0),
            retractions=0,
            logprobs=[-1.0] * (len(ids) - start),
            scored_ids=ids[start:],
            host_tokens=max(on_host, 0),
        )

    @staticmethod
    def _found(entries, ids, limit):
        best = 0
        for entry in entries:
            common = next(
                (i for i, (a, b) in enumerate(zip(entry, ids)) if a != b),
                min(len(entry), len(ids)),
            )
            best = max(best, common)
        return min(best, limit)


class ScriptedServer:
    def __init__(self, client, settings):
        self.client, self.config = client, settings


def _host_row(tmp_path, client):
    path = benchkit.write(
        tmp_path, "unused", continuation__host=True, continuation__control=0
    )
    trial = experiment_of(path)
    server = ScriptedServer(client, trial.config)
    return continuation.continuation(trial, "base", server)


def test_the_host_variant_fills_the_device_until_the_prefix_is_on_the_host(tmp_path):
    client = ScriptedTransport(device=200)
    row = _host_row(tmp_path, client)
    assert not faults(row), row.problems
    assert [s.state for s in row.scored] == ["cold", "warm", "repeat", "host"]
    assert client.sent[-1][2:] == (0, 30)
    # "warm" finds the bare context alone, not the text that "cold" has scored.
    assert client.held[:3] == [[], [30], [30, 39]]
    entry = compare.continuation(row)[-1]
    assert entry["states"] == "cold vs host" and entry["depths"] == [0, 30]


def test_a_prefix_that_stayed_on_the_device_is_no_host_restore(tmp_path):
    row = _host_row(tmp_path, ScriptedTransport(device=200, host=False))
    assert "host-restore" in faults(row)


def test_a_server_that_hides_its_cache_size_needs_fill():
    client = ScriptedTransport(device=0)
    server = ScriptedServer(client, config.Config)
    with pytest.raises(BenchError, match="continuation.fill"):
        continuation.fill_device(server, config.Continuation(), avoid=10)


# branching


def test_a_sound_server_keeps_both_branches_apart(tmp_path, standin):
    done = run_bench("branching", benchkit.write(tmp_path, standin))
    assert done.returncode == 0, done.stdout + done.stderr
    row = read(tmp_path)[0]
    found = [(b.seed, b.order, b.cached_before) for b in row.branches]
    assert found == [(1, "A B A", 30), (1, "B A", 30), (2, "A B A", 30), (2, "B A", 30)]
    assert all(b.before == b.after and len(b.before) == 6 for b in row.branches)


def test_prompts_share_the_prefix_and_copy_their_own_suffix():
    settings = config.Branching(prefix=30, suffix=12, span=6, seeds=(1,))
    prefix, first, second = branching.prompts(settings, 1, (1, 500))
    assert first[:30] == second[:30] == prefix
    assert first[30:42] != second[30:42]
    assert first[42:] == first[30:36] and second[42:] == second[30:36]
    assert branching.prompts(settings, 2, (1, 500))[0] != prefix


class Poison:
    """Answers a branch that was scored after its sibling with the sibling's answer."""

    def __init__(self, keep_ids):
        self.keep_ids, self.last, self.seen = keep_ids, None, set()

    def __call__(self, body, answer):
        if body.get("logprob_start_len") is None:
            return answer
        key = tuple(body["input_ids"])
        known, last = key in self.seen, self.last
        self.seen.add(key)
        self.last = copy.deepcopy(answer)
        if not known or last is None:
            return answer
        if self.keep_ids:
            pairs = zip(
                answer["meta_info"]["input_token_logprobs"],
                last["meta_info"]["input_token_logprobs"],
            )
            for mine, theirs in pairs:
                mine[0] = theirs[0]
            return answer
        return last


@pytest.mark.parametrize(
    "keep_ids, fault", [(False, "scored-tokens"), (True, "branch-drift")]
)
def test_a_poisoned_branch_is_caught(tmp_path, standin, keep_ids, fault):
    """Also when the sibling's scores come back under the asked tokens' ids."""
    with standin_server(standin) as url, Middleman(url, Poison(keep_ids)) as middle:
        path = attach(tmp_path, middle.url, branching__max_mean=0.02)
        done = run_bench("branching", path)
    assert done.returncode == 1
    assert fault in faults(read(tmp_path)[0])
    assert f"base: {fault}" in done.stdout


def test_a_collapse_of_the_score_is_flagged_without_any_limit(tmp_path, standin):
    """-0.02 before and -1.35 after is what a shared index group did elsewhere."""
    seen = set()

    def spoil(body, answer):
        scores = answer["meta_info"].get("input_token_logprobs", [])
        value = -1.35 if tuple(body["input_ids"]) in seen else -0.02
        seen.add(tuple(body["input_ids"]))
        for entry in scores[1:]:
            entry[0] = value
        return answer

    with standin_server(standin) as url, Middleman(url, spoil) as middle:
        done = run_bench("branching", attach(tmp_path, middle.url))
    assert done.returncode == 1
    assert (
        "branch-collapse: seed 1, A B A: mean score -0.0200 before, -1.3500 after"
    ) in done.stdout


def test_a_probe_without_its_section_says_so(tmp_path, standin):
    path = benchkit.write(tmp_path, standin)
    text = path.read_text().replace("[branching]", "[continuation2]")
    path.write_text(text[: text.index("[continuation2]")])
    done = run_bench("branching", path)
    assert done.returncode == 2 and "[branching]" in done.stderr


def test_differences_match_another_way_of_computing_them():
    a, b = [-1.0, -2.0, -3.0, -4.0], [-1.5, -2.0, -3.25, -5.0]
    # |a - b| sorted: 0, 0.25, 0.5, 1; p90 lies 0.7 of the way from 0.5 to 1.
    assert compare.difference(a, b) == pytest.approx(
        {"mean": 0.4375, "p90": 0.85, "max": 1.0}
    )
    with pytest.raises(ValueError):
        compare.difference(a, b[:3])
    with pytest.raises(ValueError):
        compare.difference([], [])


def test_every_probe_is_named_after_its_verb():
    for module, name in (
        (outputs, "outputs"),
        (continuation, "continuation"),
        (branching, "branching"),
    ):
        assert getattr(module, name).__module__ == f"bench.{name}"
