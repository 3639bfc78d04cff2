"""Each rule of the registered-test lint, with a file that breaks it."""

import datetime
import subprocess
import sys
from pathlib import Path

import pytest
from serieslib import registered_source
from serieslib.registered_lint import lint_paths, main
from serieslib.registered_source import LintError

SCRIPT = Path(__file__).resolve().parents[1] / "serieslib" / "registered_lint.py"
TODAY = datetime.date(2026, 11, 30)
IMPORT = "from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci\n"
CPU = 'register_cpu_ci(est_time=5, suite="base-a-test-cpu")\n'
GPU = 'register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-large")\n'
CASE = "import unittest\n\n\nclass TestIt(unittest.TestCase):\n    def test_a(self):\n"
CASE += "        self.assertTrue(1)\n\n\n"
UNITTEST = 'if __name__ == "__main__":\n    unittest.main()\n'
PLAIN = "import sys\nimport pytest\n\n\ndef test_a():\n    assert 1\n\n\n"
PYTEST = 'if __name__ == "__main__":\n'
PYTEST += '    sys.exit(pytest.main([__file__, "-v", "-x"]))\n'
GOOD = IMPORT + CPU + CASE + UNITTEST
GOOD_PYTEST = IMPORT + CPU + PLAIN + PYTEST
UNIT = "test/registered/unit/layers/test_sample_layer.py"
KERNEL = "test/registered/kernels/ops/mamba/test_sample_op.py"
E2E = "test/registered/e2e/models/test_sample_model.py"
MODULE = "python/sglang/srt/layers/sample.py"


@pytest.fixture
def lint(tmp_path):
    """Writes one file into an empty tree and returns (line, rule) pairs."""

    def run(text: str, rel: str = UNIT) -> list[tuple[int, str]]:
        file = tmp_path / rel
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        found = [f.split(": ", 2) for f in lint_paths(tmp_path, [file], today=TODAY)]
        assert all(place.startswith(rel + ":") and todo for place, _, todo in found)
        return [(int(place.rsplit(":", 1)[1]), rule) for place, rule, _ in found]

    return run


@pytest.mark.parametrize("rel", [UNIT, KERNEL, E2E])
@pytest.mark.parametrize("text", [GOOD, GOOD_PYTEST])
def test_a_well_made_file_has_no_finding(lint, text, rel):
    assert lint(text, rel) == []


def gpu(text: str = GPU) -> str:
    return IMPORT + text + CASE + UNITTEST


STRESS = 'register_cuda_ci(est_time=9, suite="stress")\n'
STAGE_CPU = 'register_cpu_ci(est_time=5, stage="base-a", runner_config="cpu")\n'
BIG = 'register_cuda_ci(est_time=151, stage="base-c", runner_config="8-gpu-b300")\n'
AMD = IMPORT.replace("register_cpu_ci", "register_amd_ci") + GPU
AMD_CALL = 'register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-amd")\n'
OFF = '    est_time=9, suite="base-a-test-cpu", disabled={!r}\n)\n'


def off(reason: str) -> str:
    return IMPORT + "register_cpu_ci(\n" + OFF.format(reason) + CASE + UNITTEST


ACCEPTED = {
    "stress keeps the single string": gpu(STRESS),
    "a pair for the CPU suite": gpu(STAGE_CPU),
    "cost at the limit": gpu(BIG.replace("151", "150")),
    "cost with its reason": gpu("# ci-cost-override: only this box.\n\n\n" + BIG),
    "disabled costs nothing": gpu(
        BIG.replace("151,", '9000, disabled="#1 until 2026-12-01",')
    ),
    "nightly may cost more": gpu(
        BIG.replace("base-c", "nightly").replace("b300", "b200")
    ),
    "accelerators with a reason": (
        AMD + "# backend-specific: wave64.\n" + AMD_CALL + CASE + UNITTEST
    ),
    "disabled with issue and date": off("see #12, until 2026-11-30"),
    "a conditional skip": GOOD.replace(
        "class TestIt", '@unittest.skipIf(True, "no GPU")\nclass TestIt'
    ),
    "a skip with issue and date": GOOD.replace(
        "class TestIt", '@unittest.skip("#12 until 2026-12-24.")\nclass TestIt'
    ),
    "SystemExit passes the status": GOOD_PYTEST.replace(
        "sys.exit(pytest", "raise SystemExit(pytest"
    ),
    "a stored status": GOOD_PYTEST.replace(
        'sys.exit(pytest.main([__file__, "-v", "-x"]))',
        "code = pytest.main([__file__])\n    sys.exit(code)",
    ),
    "property accessors": GOOD
    + "class A:\n    @property\n    def x(self): ...\n    @x.setter\n    def x(self, v): ...\n",
    "a test's own server_args list": GOOD + "args = TestIt.server_args.copy()\n",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(lint, text):
    assert lint(text) == []


BROKEN = {
    "no registration": (CASE + UNITTEST, (1, "registry")),
    "no time": (GOOD.replace("est_time=5, ", ""), (2, "registry")),
    "a computed time": (GOOD.replace("=5", "=5 * 2"), (2, "registry")),
    "suite beside stage": (GOOD.replace("suite", 'stage="x", suite'), (2, "registry")),
    "half a pair": (
        gpu(GPU.replace(', runner_config="1-gpu-large"', "")),
        (2, "registry"),
    ),
    "registered in an if": (
        IMPORT + GPU + "if True:\n    " + CPU + CASE + UNITTEST,
        (4, "registry-form"),
    ),
    "renamed registration": (
        GOOD.replace("register_cpu_ci,", "register_cpu_ci as on_cpu,").replace(
            CPU, GPU + CPU.replace("register_cpu_ci", "on_cpu")
        ),
        (3, "registry-form"),
    ),
    "an unknown CPU suite": (GOOD.replace("base-a-test", "base-z-test"), (2, "suite")),
    "a single CUDA string": (
        gpu('register_cuda_ci(est_time=9, suite="base-b-test-1-gpu-large")\n'),
        (2, "suite"),
    ),
    "nightly=True": (GOOD.replace("=5", "=5, nightly=True"), (2, "suite")),
    "-test- by hand": (gpu(GPU.replace("base-b", "base-b-test-x")), (2, "suite")),
    "an unknown stage": (gpu(GPU.replace("base-b", "base-q")), (2, "suite")),
    "no B300 at night": (
        gpu(BIG.replace("base-c", "nightly").replace("151", "9")),
        (2, "suite"),
    ),
    "cost": (gpu(BIG), (2, "cost")),
    "a cost marker too far up": (
        gpu("# ci-cost-override: only here.\n\n\n\n" + BIG),
        (6, "cost"),
    ),
    "a cost marker without a reason": (gpu("# ci-cost-override:\n" + BIG), (3, "cost")),
    "a cost marker in a string": (gpu('"# ci-cost-override: x"\n' + BIG), (3, "cost")),
    "another accelerator": (AMD + AMD_CALL + CASE + UNITTEST, (3, "backend")),
    "disabled without issue": (off("flaky until 2027-01-01"), (2, "disabled")),
    "disabled without date": (off("see #12"), (2, "disabled")),
    "disabled with a wrong date": (off("#12 until 2026-02-30"), (2, "disabled")),
    "disabled too long": (off("#12 until 2026-11-29"), (2, "disabled")),
    "a bare skip": (
        GOOD.replace("class TestIt", '@unittest.skip("flaky")\nclass TestIt'),
        (6, "disabled"),
    ),
    "a skip under another name": (
        GOOD.replace(
            "import unittest\n", "import unittest\nfrom unittest import skip as no\n"
        ).replace("class TestIt", '@no("flaky")\nclass TestIt'),
        (7, "disabled"),
    ),
    "pytest skip without reason": (
        GOOD_PYTEST.replace("def test_a", "@pytest.mark.skip\ndef test_a"),
        (7, "disabled"),
    ),
    "pytest skip without date": (
        GOOD_PYTEST.replace("def test_a", '@pytest.mark.skip(reason="#3")\ndef test_a'),
        (7, "disabled"),
    ),
    "no __main__": (IMPORT + CPU + CASE, (1, "main")),
    "a __main__ that runs nothing": (
        GOOD.replace("    unittest.main()", "    print(1)"),
        (11, "main-runner"),
    ),
    "dead classes in a disabled file": (
        off("see #12, until 2027-01-01").replace(UNITTEST, ""),
        (1, "main-runner"),
    ),
    "pytest functions under unittest.main": (
        GOOD + "def test_lost():\n    assert 1\n",
        (11, "main-runner"),
    ),
    "a bare pytest.main": (
        GOOD_PYTEST.replace("sys.exit(", "print("),
        (12, "main-exit"),
    ),
    "a bare pytest.main under another name": (
        GOOD_PYTEST.replace("import pytest", "import pytest as pt").replace(
            "sys.exit(pytest", "print(pt"
        ),
        (12, "main-exit"),
    ),
    "pytest.main with CI's -f": (
        GOOD_PYTEST.replace('[__file__, "-v", "-x"]', "sys.argv"),
        (12, "main-argv"),
    ),
    "pytest.main without arguments": (
        GOOD_PYTEST.replace('[__file__, "-v", "-x"]', ""),
        (12, "main-argv"),
    ),
    "a server in a unit test": (
        GOOD + "from sglang.test.test_utils import popen_launch_server as go\ngo()\n",
        (14, "unit-server"),
    ),
    "a test defined twice": (
        GOOD.replace(UNITTEST, "    def test_a(self):\n        pass\n\n\n" + UNITTEST),
        (7, "shadowed"),
    ),
    "no Python": (GOOD + "def (:\n", (13, "syntax")),
}


@pytest.mark.parametrize(("text", "finding"), BROKEN.values(), ids=BROKEN)
def test_broken(lint, text, finding):
    assert lint(text) == [finding]


@pytest.mark.parametrize(
    "rel",
    [
        "test/registered/kernels/mamba/test_sample_op.py",
        "test/registered/kernels/unit/mamba/test_sample_op.py",
        "test/registered/kernels/ops/test_sample_op.py",
        "test/registered/test_sample.py",
        "test/registered/unit/test_sample.py",
        "test/registered/b200/models/test_sample.py",
    ],
)
def test_a_file_in_the_wrong_folder(lint, rel):
    assert lint(GOOD, rel) == [(1, "layout")]


def test_suite_findings_name_what_is_wrong(tmp_path):
    file = tmp_path / UNIT
    file.parent.mkdir(parents=True)
    for wrong, said in {
        "base-b-test-1-gpu": "leave '-test-' out",
        "base-q": "no CUDA stage 'base-q'",
        "base-a": "no '1-gpu-large' in base-a",
    }.items():
        file.write_text(gpu(GPU.replace("base-b", wrong)))
        (found,) = lint_paths(tmp_path, [file], today=TODAY)
        assert said in found


def test_a_benchmark_outside_the_benchmark_folder(lint):
    text = gpu(GPU.replace("base-b", "base-b-kernel-benchmark"))
    assert lint(text, KERNEL) == [(2, "layout")]
    assert lint(text, "test/registered/kernels/benchmark/mamba/bench_x.py") == []


@pytest.mark.parametrize("name", ["conftest.py", "__init__.py"])
def test_structure_files_need_no_registration(lint, name):
    assert lint("X = 1\n", "test/registered/unit/layers/" + name) == []


def test_two_files_of_one_name_in_the_series(tmp_path):
    """The other file counts although only one of them was handed over."""
    for folder in ("unit/layers", "unit/models"):
        file = tmp_path / "test/registered" / folder / "test_twin.py"
        file.parent.mkdir(parents=True)
        file.write_text(GOOD)
    (found,) = lint_paths(tmp_path, [file], today=TODAY)
    assert found.startswith("test/registered/unit/models/test_twin.py:1: basename: ")
    assert "test/registered/unit/layers/test_twin.py" in found


READ, WRITE = "server-args-read", "server-args-write"
PACKAGE_CASES = {
    "a registered test in the package": (IMPORT + CPU, [(2, "package")]),
    "a module global": ("X = 0\ndef f():\n    global X\n    X = 1\n", [(3, "global")]),
    "a field of the record": ("a = get_server_args().tp_size\n", [(1, READ)]),
    "a field by way of the module": (
        "a = ctx.get_server_args().tp_size\n",
        [(1, READ)],
    ),
    "a field through a name": ("sa = get_server_args()\nb = sa.tp_size\n", [(2, READ)]),
    "a field by getattr": ('a = getattr(get_server_args(), "tp")\n', [(1, READ)]),
    "a renamed import": (
        "from sglang.srt.runtime_context import get_server_args as g\nx = g().tp\n",
        [(1, READ), (2, READ)],
    ),
    "an instance that was handed over": (
        "def f(server_args):\n    return server_args.tp_size\n",
        [],
    ),
    "a write": ("def f(self):\n    self.server_args.tp_size = 2\n", [(2, WRITE)]),
    "an in-place write": ("server_args.tp_size += 1\n", [(1, WRITE)]),
    "a write by setattr": ('setattr(server_args, "tp_size", 2)\n', [(1, WRITE)]),
    "a method defined twice": (
        "class A:\n    def f(self): ...\n    def g(self): ...\n    def f(self): ...\n",
        [(2, "shadowed")],
    ),
    "the record handed on whole": ("f(get_server_args())\ng(server_args)\n", []),
    "branches may define one name": (
        "if X:\n    def f(): ...\nelse:\n    def f(): ...\n",
        [],
    ),
    "overloads": ("@overload\ndef f(a): ...\n@overload\ndef f(b): ...\n", []),
}


@pytest.mark.parametrize(("text", "found"), PACKAGE_CASES.values(), ids=PACKAGE_CASES)
def test_package_files(lint, text, found):
    assert lint(text, MODULE) == found


def test_a_write_to_the_record_in_a_test(lint):
    assert lint(GOOD + "server_args.tp_size = 2\n") == [(13, WRITE)]


def run_script(*args, cwd):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command_prints_findings_and_exits_1(tmp_path):
    file = tmp_path / UNIT
    file.parent.mkdir(parents=True)
    file.write_text(CASE + UNITTEST)
    done = run_script("--root", ".", UNIT, cwd=tmp_path)
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.startswith(f"{UNIT}:1: registry: ")
    file.write_text(GOOD)
    done = run_script("--root", ".", "test", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_usage_errors_exit_2_and_name_the_path(tmp_path, capsys):
    assert main(["--root", str(tmp_path), str(tmp_path / "gone.py")]) == 2
    assert "gone.py does not exist" in capsys.readouterr().err
    assert main(["--root", str(tmp_path), __file__]) == 2
    assert f"{__file__} is not below {tmp_path}" in capsys.readouterr().err


@pytest.fixture
def no_sglang(monkeypatch):
    monkeypatch.setattr(
        registered_source.importlib.util, "find_spec", lambda name: None
    )


def test_says_so_when_the_parser_is_nowhere(tmp_path, no_sglang):
    file = tmp_path / UNIT
    file.parent.mkdir(parents=True)
    file.write_text(GOOD)
    with pytest.raises(LintError, match="series.py apply"):
        lint_paths(tmp_path, [file])


@pytest.mark.parametrize("tree", ["python", "build/engine/python"])
def test_takes_the_parser_of_the_tree(tmp_path, tree):
    """A Python without sglang can lint a project whose engine is built."""
    installed = registered_source.ci_register(tmp_path).__file__
    copy = tmp_path / tree / "sglang/test/ci/ci_register.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(Path(installed).read_text())
    assert registered_source.ci_register(tmp_path).__file__ == str(copy)
