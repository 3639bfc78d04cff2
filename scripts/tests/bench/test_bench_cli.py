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


def test_an_unknown_verb_lists_the_known_ones():
    done = run_bench("serve")
    assert done.returncode == 2 and "serve-ab, outputs" in done.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--with", "latency"], "--with latency: use outputs, continuation, branching"),
        (["--set", "other=x"], "write ARM=PATH with one of the arms base, series"),
        (["--prepare-cache"], "--prepare-cache needs server.cache"),
    ],
)
def test_wrong_options_say_what_to_write(tmp_path, standin, arguments, text):
    path = benchkit.write(tmp_path, standin)
    done = run_bench("serve-ab", path, *arguments)
    assert done.returncode == 2 and text in done.stderr
    assert "Traceback" not in done.stderr


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
