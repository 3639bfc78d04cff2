"""series.py test: what it runs, how it counts, how it fails. Real pytest and unittest."""

import importlib.util
import shutil
import sys
import time
from pathlib import Path

import pytest
from serieslib import testrun
from serieslib.project import Project
from serieslib.testrun import Counts
from tiny_release import SCRIPTS

CPU_HEAD = "from sglang.test.ci.ci_register import register_cpu_ci\n\n"
CUDA_HEAD = "from sglang.test.ci.ci_register import register_cuda_ci\n\n"
CPU = 'register_cpu_ci(est_time=1, suite="base-a-test-cpu")\n'
CUDA = (
    'register_cuda_ci(est_time=1, stage="base-b-kernel-unit", '
    'runner_config="1-gpu-large")\n'
)
UNITTEST = """

class TestPart(unittest.TestCase):
    def test_one(self):
        self.assertEqual(part(), 1)

    def test_two(self):
        self.assertEqual(part() + 1, 2)

    def test_three(self):
        self.skipTest("no GPU")


def part():
    return 1


if __name__ == "__main__":
    unittest.main()
"""
PYTEST = """

def test_one():
    assert sys.argv[1:] == ["-f"] or True


@pytest.mark.skipif(True, reason="no GPU")
def test_gpu():
    raise AssertionError


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-x"]))
"""
STYLE = {
    "unit": "import unittest\n\n" + CPU_HEAD + CPU + UNITTEST,
    "pytest": "import sys\n\nimport pytest\n\n" + CPU_HEAD + CPU + PYTEST,
    "cuda": "import sys\n\nimport pytest\n\n" + CUDA_HEAD + CUDA + PYTEST,
}


@pytest.fixture
def ready(empty, monkeypatch):
    """Two CPU files and a CUDA one, with upstream's real registration module."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    real = Path(package, "test/ci/ci_register.py").read_text()
    assert empty.run("apply") == 0
    folder = "test/registered/unit/part"
    empty.commit(
        "tests: some",
        {
            "python/sglang/test/__init__.py": "",
            "python/sglang/test/ci/__init__.py": "",
            "python/sglang/test/ci/ci_register.py": real,
            f"{folder}/test_unit_style.py": STYLE["unit"],
            f"{folder}/test_pytest_style.py": STYLE["pytest"],
            f"{folder}/test_cuda_only.py": STYLE["cuda"],
        },
    )
    assert empty.run("export") == 0
    monkeypatch.setattr(testrun, "WORKERS", 0)
    shutil.copy(SCRIPTS.parent / "pyproject.toml", empty.root)
    return empty


@pytest.fixture
def only_files(monkeypatch):
    """Leave check and lints out, whose own tests are elsewhere."""
    monkeypatch.setattr(testrun, "_check_items", lambda project: [])
    monkeypatch.setattr(testrun, "lint_all", lambda *args: [])


def change(ready, name: str, old: str, new: str) -> None:
    path = ready.engine / "test/registered/unit/part" / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    ready.git("commit", "-qa", "--amend", "--no-edit")


def closing(capsys) -> tuple[str, str]:
    out = capsys.readouterr().out
    return out.strip().splitlines()[-1], out


def test_everything_in_one_run(ready, capsys):
    own = ready.root / "scripts/tests"
    own.mkdir(parents=True)
    (own / "test_own.py").write_text("def test_a():\n    assert 1\n")
    assert ready.run("test", "--here") == 0
    last, out = closing(capsys)
    checks = out.count("ok     check:")
    assert checks >= 7 and out.count("ok     lint:") == 4
    assert last == f"{1 + 2 + 1 + checks + 4} passed, 0 failed, 2 skipped"
    assert "test_unit_style.py: 2 passed, 0 failed, 1 skipped" in out
    assert "test_pytest_style.py: 1 passed, 0 failed, 1 skipped" in out
    assert "test_cuda_only.py" not in out


def test_failures_are_counted_and_shown(ready, only_files, capsys):
    change(ready, "test_unit_style.py", "return 1", "return 5")
    change(ready, "test_pytest_style.py", "or True", "and False")
    assert ready.run("export") == 0
    assert ready.run("test", "--here") == 1
    last, out = closing(capsys)
    # -f is unittest's failfast, and pytest got -x: each file ends with its failure.
    assert last == "0 passed, 2 failed, 0 skipped"
    assert "AssertionError: 5 != 1" in out


def one_file(ready, tmp_path) -> tuple[Counts, str]:
    _, counts, text, _ = testrun._one_file(
        Project(ready.root),
        Path(sys.executable),
        None,
        tmp_path,
        "test/registered/unit/part/test_unit_style.py",
    )
    return counts, text


@pytest.mark.parametrize(
    "old, new",
    [
        ("import unittest\n", "import unittest\nimport no_such_module\n"),
        ("    unittest.main()", "    pass"),
        ("    unittest.main()", "    raise SystemExit(3)"),
        ("    unittest.main()", "    unittest.main(exit=False)\n    sys.exit(3)"),
    ],
)
def test_a_file_that_ends_badly_or_runs_no_test_fails(ready, tmp_path, old, new):
    change(ready, "test_unit_style.py", old, new)
    counts, text = one_file(ready, tmp_path)
    assert counts.failed == 1 and "exit" in text


def test_a_file_that_hangs_is_ended_with_its_children(ready, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    spawn = (
        "import subprocess, time\n"
        "p = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(pid)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(300)\n"
    )
    change(ready, "test_unit_style.py", "import unittest\n", spawn)
    for limit in (3, 12, 48):  # a busy machine may take long to start the child
        monkeypatch.setattr(testrun, "FILE_TIMEOUT_S", limit)
        counts, text = one_file(ready, tmp_path)
        assert counts.failed == 1 and f"timed out after {limit} s" in text
        if pid.exists() and pid.read_text():
            break
    state = Path(f"/proc/{pid.read_text()}/stat")
    # A killed process may still be on its way out when its group leader is gone.
    for _ in range(100):
        try:
            if state.read_text().split()[2] == "Z":
                break
        except OSError:  # gone, also between open and read
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the file's child is still running")


def test_keyword_narrows(ready, capsys):
    assert ready.run("test", "--here", "-k", "test_two") == 0
    last, out = closing(capsys)
    assert last == "1 passed, 0 failed, 0 skipped"
    assert "check:" not in out


def test_no_test_at_all_is_a_failure(ready, capsys):
    assert ready.run("test", "--here", "-k", "no_such_test") == 1
    assert "no test ran" in capsys.readouterr().err


def test_own_test_that_cannot_be_collected(ready, only_files, capsys):
    own = ready.root / "scripts/tests"
    own.mkdir(parents=True)
    (own / "test_own.py").write_text("import no_such_module\n")
    assert ready.run("test", "--here") == 1
    assert closing(capsys)[0] == "3 passed, 1 failed, 2 skipped"


def test_unsaved_work_stops_the_run(ready, capsys):
    ready.commit("tests: more", {"python/sglang/more.py": "A = 1\n"})
    assert ready.run("test", "--here") == 1
    assert "not exported" in capsys.readouterr().err


def test_lints_name_our_files_and_spare_upstreams_old_sins(ready, capsys):
    ready.commit(
        "sins: some",
        {
            "python/sglang/core.py": "x = { 'a':1 }\n",
            "python/sglang/sins.py": "import sys\nimport os\nprint( os )\n",
        },
    )
    assert ready.run("export") == 0
    assert ready.run("test", "--here") == 1
    out = closing(capsys)[1]
    for lint in ("ruff format", "ruff check", "isort"):
        assert f"FAILED lint: {lint}" in out
    assert "sglang/sins.py" in out and "sglang/core.py" in out
    ready.commit("sins: none", {"python/sglang/sins.py": "A = 1\n"})
    core = ready.git("show", "base:python/sglang/core.py")
    ready.commit("sins: core", {"python/sglang/core.py": f"{core}\nx = 1\n"})
    assert ready.run("export") == 0
    assert ready.run("test", "--here") == 0


@pytest.mark.parametrize(
    "text, want",
    [
        ("Ran 3 tests in 0.1s\n\nOK\n", (3, 0, 0)),
        ("Ran 1 test in 0.1s\n\nOK (skipped=1)\n", (0, 0, 1)),
        ("Ran 5 tests in 1s\n\nFAILED (failures=1, errors=2, skipped=1)\n", (1, 3, 1)),
        ("Ran 2 tests in 1s\n\nOK (expected failures=1)\n", (2, 0, 0)),
        ("Ran 2 tests in 1s\n\nFAILED (unexpected successes=1)\n", (1, 1, 0)),
        ("Ran 0 tests in 0.000s\n\nNO TESTS RAN\n", (0, 0, 0)),
        ("Ran 1 test in 1s\n\nOK\nRan 2 tests in 1s\n\nOK\n", (3, 0, 0)),
        ("nothing", (0, 0, 0)),
    ],
)
def test_unittest_closing_lines(text, want):
    counts = testrun.unittest_counts(text)
    assert (counts.passed, counts.failed, counts.skipped) == want


def test_junit_file(tmp_path):
    path = tmp_path / "r.xml"
    path.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/>'
        "</testsuites>"
    )
    assert testrun.junit_counts(path) == Counts(4, 2, 3)
    assert testrun.junit_counts(tmp_path / "none.xml") == Counts()


def test_here_without_the_tools(ready, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        testrun.importlib.util,
        "find_spec",
        lambda name: None if name == "xdist" else real(name),
    )
    assert ready.run("test", "--here") == 1
    assert "lacks xdist" in capsys.readouterr().err
