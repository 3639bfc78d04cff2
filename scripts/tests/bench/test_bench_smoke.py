"""All verbs on real SGLang servers: the CPU smoke example, base against series.

Everything is one test: its steps share five server starts, and two workers must not
start the same servers twice.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import requests
from bench import compare, outputs, procs, rows
from benchkit import SCRIPTS, Middleman, experiment_of, run_bench, toml
from test_bench_probes import Poison, faults

EXAMPLE = SCRIPTS / "bench" / "examples" / "cpu-smoke.toml"
ENGINE = Path(os.environ.get("BENCH_ENGINE", SCRIPTS.parent / "build" / "engine"))
pytestmark = [
    pytest.mark.xdist_group("bench-server"),
    pytest.mark.skipif(
        not ENGINE.is_dir(), reason="no engine: run `python3 scripts/series.py apply`"
    ),
]


def make_models(folders):
    """Models of seed 0, 1, ... in these folders, by one process."""
    script = str(EXAMPLE.parent / "make_tiny_model.py")
    code = (
        "import runpy, sys, pathlib\n"
        f"make = runpy.run_path({script!r})['make']\n"
        "for seed, folder in enumerate(sys.argv[1:]): make(pathlib.Path(folder), seed)"
    )
    command = [sys.executable, "-c", code, *map(str, folders)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


def servers_left(tmp_path):
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if procs.MARK in environment and str(tmp_path) in str(environment):
            found.append(process.pid)
    return found


def check_rows(found):
    """Every kind of row is there, met its checks, and proves its tree."""
    labels = [r.label for r in found if r.kind == "serve" and r.formal]
    assert labels == ["base-1", "series-1", "series-2", "base-2"]
    for row in found:
        assert row.passed, (row.kind, row.label, row.problems)
    digests = {(r.arm, r.environment.engine.digest) for r in found}
    assert len(digests) == 2
    for row in found:
        if row.kind == "serve" and row.formal:
            assert [r.cached_tokens for r in row.requests] == [0] * 4
            assert all(0 < r.ttft_s <= r.latency_s for r in row.requests)
            assert row.environment.packages["sglang"] == "0.5.23"
    for arm in ("base", "series"):
        kinds = {r.kind for r in found if r.arm == arm}
        assert kinds == {"serve", "outputs", "continuation", "branching"}
    scored = next(r for r in found if r.kind == "continuation").scored
    assert [s.cached_tokens for s in scored if s.context == 513] == [0, 513, 513]


def check_spoiled_weight(experiment, server, base):
    """Outputs of a model with other weights differ, with the place named."""
    row = outputs.outputs(experiment, "series", server)
    differences = compare.outputs(base, row)
    assert len(differences) == len(base.outputs)
    assert "first difference at output token" in differences[0]


def check_poisoned_branch(tmp_path, server, settings):
    """A middleman answers the second scoring of a branch with the sibling's answer."""
    for keep_ids, fault in ((False, "scored-tokens"), (True, "branch-drift")):
        with Middleman(server.url, Poison(keep_ids)) as middle:
            data = {
                "experiment": f"poison-{keep_ids}",
                "baseline": "base",
                "scratch": str(tmp_path / "poison"),
                "token_range": settings["token_range"],
                "arms": {"base": {"url": middle.url}},
                "branching": settings["branching"],
            }
            path = tmp_path / "poison.toml"
            path.write_text(toml(data))
            done = run_bench("branching", path)
        assert done.returncode == 1, done.stdout + done.stderr
        file = tmp_path / "poison" / f"poison-{keep_ids}.jsonl"
        assert fault in faults(rows.read(file)[0][0])


def check_trace(tmp_path, server):
    """A trace of the running server is counted; one rank of two is missing."""
    folder = tmp_path / "trace"
    start = {"output_dir": str(folder), "activities": ["CPU"]}
    requests.post(server.url + "/start_profile", json=start, timeout=300)
    server.client.generate(list(range(1, 200)), new_tokens=2)
    requests.post(server.url + "/stop_profile", timeout=300)
    assert procs.wait_until(
        lambda: list(folder.rglob("*.trace.json.gz")), timeout=300, interval=1
    )
    file = next(folder.rglob("*.trace.json.gz"))
    arm = ["--arm", f"base={file}", "--activity", "cpu"]
    done = run_bench("trace", *arm, "--ranks", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    missing = run_bench("trace", *arm, "--ranks", 2)
    assert missing.returncode == 1
    assert "rank 1" in missing.stdout + missing.stderr


def test_the_cpu_smoke_example_from_servers_to_report(tmp_path):
    tiny = tmp_path / "build" / "bench" / "tiny-gpt2"
    make_models([tiny, tmp_path / "spoiled"])
    place = ["--set", f"base={ENGINE}", "--set", f"series={ENGINE}"]
    probes = "outputs,continuation,branching"
    done = run_bench(
        *("serve-ab", EXAMPLE, *place, "--with", probes), cwd=tmp_path, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert servers_left(tmp_path) == []
    file = tmp_path / "build" / "bench" / "cpu-smoke.jsonl"
    found, bad = rows.read(file)
    assert bad == []
    check_rows(found)
    assert "all 14 outputs equal base's" in done.stdout

    # Each probe's own verb finds its rows and starts no server.
    again = run_bench("outputs", EXAMPLE, *place, cwd=tmp_path)
    assert again.returncode == 0 and "starting" not in again.stderr

    report = run_bench("report", file, "--config", EXAMPLE, cwd=tmp_path)
    assert report.returncode == 0, report.stdout + report.stderr
    text = (file.parent / "report.md").read_text()
    assert "cpu-smoke" in text and "series" in text

    experiment = experiment_of(
        EXAMPLE,
        rows=tmp_path / "other.jsonl",
        scratch=tmp_path / "build" / "bench",
        set=place[1::2],
    )
    experiment.config.server.model = str(tmp_path / "spoiled")
    base = next(r for r in found if r.kind == "outputs" and r.arm == "base")
    with experiment.running(["series"]):
        with experiment.server("series", "spoiled", quiet=True) as server:
            check_spoiled_weight(experiment, server, base)
            settings = tomllib.loads(EXAMPLE.read_text())
            check_poisoned_branch(tmp_path, server, settings)
            check_trace(tmp_path, server)
    assert servers_left(tmp_path) == []
