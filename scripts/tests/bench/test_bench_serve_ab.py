"""serve-ab on the stand-in engine: real launcher, processes, schedule and rows."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import benchkit
import psutil
import pytest
from bench import config, procs, rows, serve_ab
from bench.client import Client
from bench.errors import BenchError
from bench.server import free_port
from benchkit import SCRIPTS, experiment_of, git, run_bench

KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def read(tmp_path):
    found, bad = rows.read(tmp_path / "scratch" / "trial.jsonl")
    assert not bad
    return found


def formal(tmp_path):
    return [r for r in read(tmp_path) if r.kind == "serve" and r.formal]


def speeds(done):
    """Labels of the runs for which a speed was printed."""
    lines = done.stdout.splitlines()
    return [line.split(":")[0] for line in lines if line.endswith("input tok/s")]


def check(row, name):
    return next(c for c in row.checks if c.name == name)


def leftovers(tmp_path):
    """Processes that a harness run below `tmp_path` started and did not end."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            mine = any(str(tmp_path) in value for value in environment.values())
            if procs.MARK in environment and mine:
                found.append(process.cmdline())
        except (psutil.Error, OSError):
            continue
    return found


def two_nodes(command="{engine} --node-rank {rank}"):
    """Settings of a server of two nodes; `command` starts the second one."""
    nodes = [{"command": "{engine}"}, {"command": command}]
    return {"server__nodes": nodes, "server__port": free_port("127.0.0.1")}


def test_two_pairs_run_forwards_and_backwards_each_on_its_own_tree(tmp_path, standin):
    path = benchkit.write(tmp_path, standin, schedule__pairs=2)
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = formal(tmp_path)
    assert [r.label for r in found] == ["base-1", "series-1", "series-2", "base-2"]
    assert [r.pair for r in found] == [1, 1, 2, 2]
    digests = {r.arm: r.environment.engine.digest for r in found}
    assert len(set(digests.values())) == 2
    for row in found:
        assert row.passed, row.problems
        assert row.environment.engine.digest == digests[row.arm]
        assert row.baseline == (row.arm == "base")
        assert [r.cached_tokens for r in row.requests] == [0] * 4
        assert [r.retractions for r in row.requests] == [0] * 4
        assert [r.input_tokens for r in row.requests] == [40] * 4
        assert all(r.ttft_s > 0 and r.latency_s >= r.ttft_s for r in row.requests)
        assert row.environment.load["isl"] == 40
        assert "--model-path" in row.environment.arguments
    warm = [r for r in read(tmp_path) if not r.formal]
    assert [len(r.requests) for r in warm] == [2] * 4
    base = (tmp_path / "scratch" / "trees").iterdir()
    exported = next(base) / "python" / "sglang"
    assert (exported / "compiled.so").read_bytes() == b"not in git"
    assert not (exported / "patched.py").exists()
    assert not leftovers(tmp_path)


def test_probes_reuse_the_servers_of_serve_ab(tmp_path, standin):
    path = benchkit.write(tmp_path, standin)
    done = run_bench("serve-ab", path, "--with", "outputs,continuation,branching")
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(tmp_path)
    served = {r.arm: r.environment.engine.pid for r in found if r.kind == "serve"}
    for kind in ("outputs", "continuation", "branching"):
        probes = [r for r in found if r.kind == kind]
        assert {r.arm: r.environment.engine.pid for r in probes} == served
    # A later verb finds its rows and starts no server.
    for kind in ("outputs", "continuation", "branching"):
        again = run_bench(kind, path)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "starting" not in again.stderr
    assert len(read(tmp_path)) == len(found)


def test_probes_whose_server_never_came_up_are_failed_rows(tmp_path, standin):
    """Also when the arm's speed is measured already."""
    flag = tmp_path / "no-start"
    faults = ["--faults", f"no-start-while:{flag}"]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=faults)
    assert run_bench("serve-ab", path).returncode == 0
    flag.touch()
    done = run_bench("serve-ab", path, "--with", "outputs,branching")
    assert done.returncode == 1, done.stdout + done.stderr
    assert speeds(done) == ["base-1", "series-1"]
    probes = {(r.kind, r.arm): r for r in read(tmp_path) if r.kind != "serve"}
    for kind in ("outputs", "branching"):
        assert probes[kind, "base"].passed
        assert "refuses to start on purpose" in probes[kind, "series"].failed
    assert done.stdout.count("series: run failed: run series-1") == 2
    flag.unlink()
    done = run_bench("serve-ab", path, "--with", "outputs,branching")
    assert done.returncode == 0, done.stdout + done.stderr


def test_again_repeats_a_failed_probe_once(tmp_path, standin):
    faults = ["--faults", "sticky-cache"]  # cold scores come from the cache
    path = benchkit.write(
        tmp_path,
        standin,
        schedule__pairs=2,
        continuation={"contexts": [30, 30], "control": 0, "length": 8},
        arms__series__arguments=faults,
    )
    for options, count in ([], 1), (["--again"], 2):
        done = run_bench("serve-ab", path, "--with", "continuation", *options)
        assert done.returncode == 1, done.stdout + done.stderr
        probes = [r for r in read(tmp_path) if r.kind == "continuation"]
        assert [r.arm for r in probes].count("series") == count
        assert [r.arm for r in probes].count("base") == 1


def test_a_host_variant_without_a_host_tier_is_refused_before_the_load(
    tmp_path, standin
):
    path = benchkit.write(tmp_path, standin, continuation__host=True)
    done = run_bench("serve-ab", path, "--with", "continuation")
    assert done.returncode == 2
    assert "--enable-hierarchical-cache" in done.stderr
    assert not (tmp_path / "scratch" / "trial.jsonl").exists()


def test_resume_repeats_only_what_is_not_finished(tmp_path, standin):
    path = benchkit.write(tmp_path, standin, schedule__pairs=2)
    assert run_bench("serve-ab", path).returncode == 0
    file = tmp_path / "scratch" / "trial.jsonl"
    lines = file.read_text().splitlines()
    # The third run is lost, the fourth cut short in the middle of its line.
    file.write_text("\n".join([*lines[:5], lines[7][:200]]))
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}:6: truncated row" in done.stdout
    assert done.stderr.count("starting") == 2
    found, bad = rows.read(file)
    assert [b.line for b in bad] == [6]
    labels = [r.label for r in found if r.formal]
    assert labels == ["base-1", "series-1", "series-2", "base-2"]


def test_another_configuration_does_not_mix_with_old_rows(tmp_path, standin):
    path = benchkit.write(tmp_path, standin)
    assert run_bench("serve-ab", path).returncode == 0
    path = benchkit.write(tmp_path, standin, load__isl=41)
    done = run_bench("serve-ab", path)
    assert done.returncode == 2
    assert "holds runs of another configuration" in done.stderr
    assert "--rows" in done.stderr


def test_a_tree_edited_between_runs_is_refused(tmp_path, standin):
    path = benchkit.write(tmp_path, standin)
    assert run_bench("serve-ab", path).returncode == 0
    (standin / "python" / "sglang" / "patched.py").write_text("FASTER = 2\n")
    done = run_bench("serve-ab", path)
    assert done.returncode == 2
    assert "arm series is" in done.stderr


def test_both_arms_on_one_tree_are_refused_before_any_server(tmp_path, standin):
    path = benchkit.write(tmp_path, standin, arms__series__patches=False)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    assert "arms base and series run the same tree" in done.stderr
    assert "starting" not in done.stderr


def test_a_noise_run_may_state_that_it_shares_the_tree(tmp_path, standin):
    path = benchkit.write(
        tmp_path,
        standin,
        arms__series__patches=False,
        arms__series__same_tree_as="base",
    )
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("verb, mark", [("serve-ab", "-1"), ("outputs", "")])
def test_an_arm_that_serves_the_other_tree_is_caught(tmp_path, standin, verb, mark):
    """The server's environment wins over the tree: the serving process tells."""
    base = tmp_path / "base"
    git(standin, "clone", "-q", str(standin), str(base))
    git(base, "checkout", "-q", "HEAD~1")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{base}/python"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    path = benchkit.write(tmp_path, standin, server__python=str(python))
    done = run_bench(verb, path)
    assert done.returncode == 1
    first, second = [row for row in read(tmp_path) if row.formal]
    assert first.passed, first.problems
    assert not check(second, "engine").ok
    assert not check(second, "arms-differ").ok
    assert f"series{mark}: engine: serving process ran" in done.stdout
    assert f"base{mark}: engine" not in done.stdout
    assert speeds(done) == (["base-1"] if verb == "serve-ab" else [])


def test_a_stated_cache_share_is_met_and_checked(tmp_path, standin):
    changes = {"load__cached_share": 0.5, "load__cached_slack": 2}
    path = benchkit.write(tmp_path, standin, **changes)
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in formal(tmp_path):
        assert all(20 <= r.cached_tokens <= 22 for r in row.requests)


def test_prompts_served_from_cache_cost_the_run_its_speed(tmp_path, standin):
    """The server says of every prompt that all but its last token was cached."""
    faults = ["--faults", "always-cached"]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=faults)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    bad = check(formal(tmp_path)[-1], "cached-tokens")
    assert not bad.ok and "request 0: 39 of 40 cached" in bad.detail
    assert "series-1: cached-tokens: 0.0% of each prompt stated" in done.stdout
    assert speeds(done) == ["base-1"]


@pytest.mark.parametrize(
    "fault, text",
    [
        ("retract", "4 requests retracted"),
        ("no-count", "the server publishes no retraction count"),
    ],
)
def test_retractions_are_refused(tmp_path, standin, fault, text):
    faults = ["--faults", fault]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=faults)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    last = formal(tmp_path)[-1]
    assert check(last, "retractions").detail.startswith(text)
    assert not check(last, "retractions").ok
    assert all(r.retractions is None for r in last.requests)
    assert speeds(done) == ["base-1"]


def test_a_server_that_dies_mid_run_is_a_failed_row_and_is_run_again(tmp_path, standin):
    flag = tmp_path / "die"
    flag.touch()
    faults = ["--faults", f"die-while:{flag}"]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=faults)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    first, second = formal(tmp_path)
    assert first.passed and not second.passed and second.requests == []
    assert "ended with status 7" in second.failed
    assert "stand-in: dying on purpose" in second.failed
    assert speeds(done) == ["base-1"]
    assert not leftovers(tmp_path)
    flag.unlink()
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("starting") == 1
    assert speeds(done) == ["base-1", "series-1"]


def test_a_server_that_dies_after_its_last_answer_is_a_failed_row(
    tmp_path, standin, monkeypatch
):
    def measure(trial, run, _position, server, _client):
        server.children[0].process.kill()
        server.children[0].process.wait()
        return None, trial.row("serve", run.arm, label=run.label)

    monkeypatch.setattr(serve_ab, "measure", measure)
    trial = experiment_of(benchkit.write(tmp_path, standin))
    run = config.schedule(trial.config)[0]
    with trial.running([run.arm]):
        row = serve_ab.one_run(trial, run, 0, None, ["outputs"])
    assert "ended with status -9" in row.failed
    assert [r.failed == row.failed for r in read(tmp_path)] == [True, True]


def test_a_server_that_does_not_start_shows_its_log(tmp_path, standin):
    faults = ["--faults", "no-start"]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=faults)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    assert "stand-in: refuses to start on purpose" in done.stdout
    assert formal(tmp_path)[0].passed


def test_a_busy_port_is_named_with_the_way_out(tmp_path, standin):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        path = benchkit.write(tmp_path, standin, server__port=port)
        done = run_bench("serve-ab", path)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is busy" in done.stderr
    assert "server.port" in done.stderr
    assert not (tmp_path / "scratch" / "trial.jsonl").exists()


def test_a_port_lost_while_starting_ends_the_run_at_once(tmp_path, standin):
    faults = ["--faults", "lost-port"]
    path = benchkit.write(tmp_path, standin, arms__series__arguments=faults)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    assert "another process took port" in done.stdout
    assert "server.port 0" in done.stdout
    assert speeds(done) == ["base-1"]
    assert not leftovers(tmp_path)


def test_free_ports_lie_outside_the_range_the_kernel_gives_away():
    first = int(KERNEL_PORTS.read_text().split()[0])
    if first < 20000:
        pytest.skip(f"this kernel gives away ports from {first} up")
    assert all(free_port("127.0.0.1") < first for _ in range(20))


def test_a_host_without_a_free_port_is_named():
    with pytest.raises(BenchError, match="no free port .* on 203.0.113.1; set server"):
        free_port("203.0.113.1")  # no machine has a documentation address


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interruption_ends_every_process_it_started(tmp_path, standin, signum):
    faults = ["--faults", "hang"]
    path = benchkit.write(tmp_path, standin, arms__base__arguments=faults)
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"]
    )
    bench = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "bench"), "serve-ab", str(path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert procs.wait_until(lambda: "ready" in bench.stderr.readline(), timeout=120)
        bench.send_signal(signum)
        status = bench.wait(60)
        assert status == (-9 if signum == signal.SIGKILL else 130)
        assert procs.wait_until(lambda: not leftovers(tmp_path), timeout=60)
        assert bystander.poll() is None
    finally:
        bench.kill()
        bench.stderr.close()
        bystander.kill()
        bystander.wait()


def test_nohup_keeps_a_hangup_from_ending_the_runs():
    code = (
        "import os, signal; from bench import procs\n"
        "with procs.orderly_signals():\n"
        "    os.kill(os.getpid(), signal.SIGHUP); print('goes on', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run(
        ["nohup", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    )
    assert done.stdout == "goes on\n" and "Terminated: SIGTERM" in done.stderr


def test_every_run_gets_its_own_clone_of_the_baseline_cache(tmp_path, standin):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tactics.json").write_text("{}")
    faults = ["--faults", "writes-cache"]
    path = benchkit.write(
        tmp_path, standin, server__cache=str(cache), server__arguments=faults
    )
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    caches = [row.notes["autotune_cache"] for row in formal(tmp_path)]
    assert len({c["path"] for c in caches}) == 2
    assert [c["files"] for c in caches] == [1, 1]
    assert len({c["digest"] for c in caches}) == 1
    assert [p.name for p in cache.iterdir()] == ["tactics.json"]
    assert list((tmp_path / "scratch" / "caches").iterdir()) == []


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_missing_baseline_cache_is_made_by_prepare_cache(tmp_path, standin, hosts):
    cache = tmp_path / "cache"
    faults = ["--faults", "writes-cache"]
    changes = {"server__cache": str(cache), "server__arguments": faults}
    path = benchkit.write(
        tmp_path, standin, **changes, **(two_nodes() if hosts == 2 else {})
    )
    done = run_bench("serve-ab", path)
    assert done.returncode == 1 and "--prepare-cache" in done.stdout
    done = run_bench("serve-ab", path, "--prepare-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (cache / "written-by-engine.json").exists()
    caches = [row.notes["autotune_cache"] for row in formal(tmp_path) if row.passed]
    assert [c["files"] for c in caches] == [1, 1]


def test_a_baseline_cache_changed_between_runs_is_caught(tmp_path, standin):
    cache = tmp_path / "cache"
    cache.mkdir()
    path = benchkit.write(
        tmp_path,
        standin,
        server__cache=str(cache),
        arms__base__arguments=["--faults", f"spoils:{cache}"],
    )
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    assert not check(formal(tmp_path)[-1], "autotune-cache").ok


def test_a_host_with_another_baseline_cache_is_caught(tmp_path, standin):
    caches = [tmp_path / "cache", tmp_path / "other"]
    for cache in caches:
        cache.mkdir()
    (caches[1] / "tactics.json").write_text("{}")
    script = tmp_path / "node.sh"  # the same command with the other cache
    script.write_text(
        f'for word; do [ "$word" != {caches[0]} ] || word={caches[1]}\n'
        'set -- "$@" "$word"; shift; done; exec "$@"\n'
    )
    nodes = two_nodes(f"sh {script} {{engine}} --node-rank {{rank}}")
    path = benchkit.write(tmp_path, standin, server__cache=str(caches[0]), **nodes)
    done = run_bench("serve-ab", path)
    assert done.returncode == 1
    assert "autotune-cache: the hosts began with different caches" in done.stdout
    assert speeds(done) == []


def test_a_quoted_command_keeps_its_json_arguments_through_a_second_shell(
    tmp_path, standin
):
    """As ssh does: one word that another shell reads again."""
    override = ["--json-model-override-args", '{"a b": "c"}']  # the stand-in reads it
    nodes = two_nodes("sh -c {quoted}")
    nodes["server__nodes"][0]["command"] = "sh -c {quoted}"
    path = benchkit.write(tmp_path, standin, server__arguments=override, **nodes)
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not leftovers(tmp_path)


def test_two_nodes_report_their_trees(tmp_path, standin):
    """The second node's command runs the other tree: its own report tells."""
    base = tmp_path / "base"
    git(standin, "clone", "-q", str(standin), str(base))
    git(base, "checkout", "-q", "HEAD~1")
    path = benchkit.write(tmp_path, standin, **two_nodes())
    done = run_bench("serve-ab", path)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes_check = check(formal(tmp_path)[-1], "engine-nodes")
    assert nodes_check.ok and nodes_check.detail.startswith("2 of 2 nodes reported")
    assert not leftovers(tmp_path)
    script = tmp_path / "node.sh"  # drops `env PYTHONPATH=...` for one of its own
    script.write_text(f'shift 2; exec env PYTHONPATH={base}/python "$@"\n')
    nodes = two_nodes(f"sh {script} {{engine}} --node-rank {{rank}}")
    path = benchkit.write(tmp_path, standin, **nodes)
    done = run_bench("serve-ab", path, "--rows", tmp_path / "second.jsonl")
    assert done.returncode == 1
    assert "series-1: engine-nodes: 2 of 2 nodes reported, digests" in done.stdout
    assert speeds(done) == ["base-1"]


def test_attach_to_a_running_server(tmp_path, standin):
    """With our launcher it proves its tree; without, the run fails its check."""
    ports = [free_port("127.0.0.1") for _ in range(2)]
    line = ["--host", "127.0.0.1", "--model-path", "m", "--enable-metrics", "--port"]
    environment = {**os.environ, "PYTHONPATH": str(standin / "python")}
    launcher = [sys.executable, "-P", str(SCRIPTS / "bench" / "launcher.py"), "--"]
    plain = [sys.executable, "-P", "-m", "sglang.launch_server"]
    running = [
        subprocess.Popen([*command, *line, str(port)], env=environment)
        for command, port in zip((launcher, plain), ports)
    ]
    try:
        path = benchkit.write(
            tmp_path,
            standin,
            arms={
                "base": {"url": f"http://127.0.0.1:{ports[0]}"},
                "series": {"url": f"http://127.0.0.1:{ports[1]}"},
            },
            schedule__pairs=2,
        )
        for port in ports:
            client = Client(f"http://127.0.0.1:{port}")
            assert procs.wait_until(client.healthy, timeout=120)
        done = run_bench("serve-ab", path, env=environment)
        assert done.returncode == 1, done.stdout + done.stderr
        first, second, _, last = formal(tmp_path)
        assert first.passed, first.problems
        # The same prompts on the same server again: flushed in between.
        assert last.passed and last.label == "base-2", last.problems
        assert first.environment.engine.tree == str(standin / "python" / "sglang")
        assert not check(second, "engine").ok
        assert "launcher.py" in check(second, "engine").detail
        assert all(process.poll() is None for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()
