"""Experiment files, commands and repositories for the harness's tests."""

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import requests
from bench.client import Client
from bench.experiment import Experiment
from bench.procs import wait_until
from bench.server import free_port

SCRIPTS = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).resolve().parent / "standin" / "sglang"


def run_bench(*arguments, timeout=240, **options):
    """`python scripts/bench ARGUMENTS` in a process of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "bench"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def git(folder, *arguments):
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.example"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.stdout.strip()


BASE = {
    "experiment": "trial",
    "baseline": "base",
    "token_range": [1, 500],
    "arms": {"base": {"patches": False}, "series": {"patches": True}},
    "server": {"model": "no-model", "stop_grace": 2, "ready_timeout": 120},
    "load": {"isl": 40, "osl": 1, "concurrency": 2, "requests": 4, "warmup": 2},
    "schedule": {"pairs": 1},
    "outputs": {
        "lengths": [10, 20],
        "new_tokens": 5,
        "concurrent": 3,
        "concurrent_length": 15,
    },
    "continuation": {"contexts": [30], "control": 32, "length": 8},
    "branching": {"prefix": 30, "suffix": 12, "span": 6, "seeds": [1, 2]},
}


def settings(engine, scratch, **changes):
    """The base experiment with `section__key=value` changes; __ goes one level down."""
    data = copy.deepcopy(BASE) | {"scratch": str(scratch)}
    for arm in data["arms"].values():
        arm["engine"] = str(engine)
    for name, value in changes.items():
        place, keys = data, name.split("__")
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
    return data


def toml(data, prefix=""):
    """The mapping as TOML text: scalars first, then one table a mapping."""
    lines = [f"[{prefix}]"] if prefix else []
    nested = {k: v for k, v in data.items() if isinstance(v, dict)}
    for key, value in data.items():
        if key not in nested:
            lines.append(f"{key} = {inline(value)}")
    for key, value in nested.items():
        lines.append(toml(value, f"{prefix}.{key}" if prefix else key))
    return "\n".join(lines)


def inline(value):
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {inline(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def write(tmp_path, engine, name="trial.toml", **changes):
    """Writes an experiment file and returns its path."""
    path = tmp_path / name
    path.write_text(toml(settings(engine, tmp_path / "scratch", **changes)) + "\n")
    return path


def experiment_of(path, **options):
    """The experiment of a file, in this process; `options` as on the command line."""
    given = {"rows": None, "scratch": None, "again": False, "set": [], **options}
    return Experiment(argparse.Namespace(config=path, **given))


class Middleman(ThreadingHTTPServer):
    """Stands between the harness and a server; `spoil(body, answer)` may change
    the answers of /generate. All other requests pass as they are."""

    def __init__(self, target, spoil):
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target, self.spoil = target, spoil
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.shutdown()
        self.server_close()


class _Forward(BaseHTTPRequestHandler):
    def log_message(self, *_arguments):
        pass

    def _pass(self, method):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {"Content-Type": "application/json"}
        answer = requests.request(
            method, self.server.target + self.path, data=body, headers=headers
        )
        content = answer.content
        if self.path == "/generate" and answer.status_code == 200:
            spoiled = self.server.spoil(json.loads(body), answer.json())
            content = json.dumps(spoiled).encode()
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self._pass("GET")

    def do_POST(self):
        self._pass("POST")


@contextlib.contextmanager
def standin_server(engine, *arguments):
    """A stand-in server under our launcher; yields its URL."""
    port = free_port("127.0.0.1")
    line = [sys.executable, "-P", str(SCRIPTS / "bench" / "launcher.py"), "--"]
    line += ["--model-path", "m", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [*line, "--enable-metrics", *arguments],
        env={**os.environ, "PYTHONPATH": str(engine / "python")},
        stdout=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        assert wait_until(Client(url).healthy, timeout=120)
        yield url
    finally:
        server.kill()
        server.wait()
