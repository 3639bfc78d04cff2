"""`python scripts/bench` for somebody who sees it for the first time."""

import subprocess
import sys

import benchkit
import pytest
from bench.__main__ import VERBS
from benchkit import SCRIPTS, run_bench


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), ([], 2)])
def test_help_names_every_verb_and_a_first_run(arguments, status):
    done = run_bench(*arguments)
    assert done.returncode == status
    for verb in VERBS:
        assert f"  {verb} " in done.stdout
    assert "examples/cpu-smoke.toml" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_from_any_folder(verb, tmp_path):
    done = run_bench(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("usage: ")
        and "--rows" in done.stdout
        or verb in ("report", "tactics")
    )


def test_trace_help_names_the_way_with_nsight():
    text = run_bench("trace", "--help").stdout
    for part in ("--cuda-graph-trace=node", "nsys export --type sqlite", ".sqlite"):
        assert part in text


def test_an_unknown_verb_lists_the_known_ones():
    done = run_bench("serve")
    assert done.returncode == 2 and "serve-ab, outputs" in done.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--with", "latency"], "--with latency: use outputs, continuation, branching"),
        (["--set", "other=x"], "write ARM=PATH with one of the arms base, series"),
        (["--prepare-cache"], "--prepare-cache needs server.cache"),
        (["--rows", "/etc/passwd/x.jsonl"], "cannot write to /etc/passwd: "),
        (["--scratch", "/etc/passwd"], "cannot write to /etc/passwd: "),
        (["--scratch", "/proc", "--rows", "x.jsonl"], "cannot write to /proc"),
    ],
)
def test_wrong_options_say_what_to_write(tmp_path, standin, arguments, text):
    path = benchkit.write(tmp_path, standin)
    done = run_bench("serve-ab", path, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["serve-ab", "outputs"])
def test_an_interpreter_that_is_not_there_is_named(tmp_path, standin, verb):
    path = benchkit.write(tmp_path, standin, server__python="/nope/python")
    done = run_bench(verb, path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot run /nope/python: No such file or directory" in done.stderr
    assert "server.python" in done.stderr


def test_an_interpreter_is_meant_from_the_folder_of_the_command(tmp_path, standin):
    """A link is no other name: a venv's python finds its packages by its path."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$0" >> {tmp_path}/used\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "link").symlink_to(python)
    path = benchkit.write(tmp_path, standin, server__python="./link")
    done = run_bench("serve-ab", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # The load client and two servers.
    assert (tmp_path / "used").read_text().split() == [f"{tmp_path}/link"] * 3


def test_a_baseline_cache_that_cannot_be_made_is_named(tmp_path, standin):
    path = benchkit.write(tmp_path, standin, server__cache="/etc/passwd/cache")
    done = run_bench("serve-ab", path, "--prepare-cache")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot make /etc/passwd/cache.partial" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_python_without_the_engines_packages_is_named(verb):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPTS / "bench"), verb, "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"in {sys.executable}; run with the Python that has sglang" in done.stderr


def test_module_names_do_not_shadow_the_standard_library(tmp_path):
    """scripts/bench holds a trace.py; the library's own must stay importable."""
    code = (
        f"import sys; sys.argv = ['x']; sys.path.insert(0, {str(SCRIPTS / 'bench')!r})\n"
        f"import runpy; runpy.run_path({str(SCRIPTS / 'bench')!r}, run_name='bench_main')\n"
        "import trace, bench; assert hasattr(trace, 'CoverageResults')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
