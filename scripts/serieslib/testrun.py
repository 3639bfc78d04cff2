"""test: the tool's own tests, the series' registered CPU tests, check and the lints."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serieslib.am import added_files
from serieslib.check import check
from serieslib.engine import apply
from serieslib.envs import make_environment
from serieslib.errors import SeriesError
from serieslib.gitio import Git
from serieslib.lints import lint_all
from serieslib.project import Project

WORKERS = 2
FILE_TIMEOUT_S = 1200


@dataclass
class Counts:
    """Number of tests; a lint or a check item counts as one."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: "Counts") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run_tests(project: Project, keyword: str | None, here: bool) -> Counts:
    """Run everything, print as it goes, return the sum."""
    total = Counts()
    with project.lock():
        tip, _, made = apply(project, discard=False)
    print(f"engine at {tip[:12]} ({'made' if made else 'was there'})", flush=True)
    python = Path(sys.executable) if here else make_environment(project)
    if here:
        _require_here()
    base = project.upstream.base_commit
    with (
        tempfile.TemporaryDirectory(prefix="series-test-") as scratch,
        ThreadPoolExecutor(max(1, WORKERS)) as pool,
    ):
        total.add(_own_tests(project, python, keyword, Path(scratch)))
        checked = pool.submit(_check_items, project) if keyword is None else None
        files = registered_cpu_tests(project, base)
        run = partial(_one_file, project, python, keyword, Path(scratch))
        for path, counts, output, seconds in pool.map(run, files):
            word = "FAILED" if counts.failed else "ok    "
            print(f"{word} {path}: {counts} in {seconds:.0f} s", flush=True)
            if counts.failed:
                print(output, flush=True)
            total.add(counts)
        if checked is not None:
            total.add(_items("check", checked.result()))
            total.add(_items("lint", lint_all(project, python, base)))
    return total


def _require_here() -> None:
    missing = [
        name
        for name in ("pytest", "xdist", "torch")
        if not importlib.util.find_spec(name)
    ]
    if missing:
        raise SeriesError(
            f"{sys.executable} lacks {', '.join(missing)}, which --here needs",
            "leave --here out, or run `pip install -r requirements.lock` first",
        )


def _check_items(project: Project) -> list[tuple[str, list[str]]]:
    with project.lock():
        report = check(project)
    for note in report.notes:
        print(f"note: {note}")
    return report.items


def _items(kind: str, items: list[tuple[str, list[str]]]) -> Counts:
    counts = Counts()
    for title, problems in items:
        print(f"{'FAILED' if problems else 'ok    '} {kind}: {title}")
        for problem in problems:
            print(f"    {problem}")
        counts.add(Counts(failed=1) if problems else Counts(passed=1))
    sys.stdout.flush()
    return counts


def _environment(project: Project) -> dict[str, str]:
    """The caller's environment, with the patched engine as the only PYTHONPATH."""
    drop = ("PYTHON", "PYTEST", "GIT_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    env["PYTHONPATH"] = str(project.engine / "python")
    env["PYTHONUNBUFFERED"] = "1"
    # Each worker has a core: more threads than that only wait for each other.
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def _own_tests(
    project: Project, python: Path, keyword: str | None, scratch: Path
) -> Counts:
    folder = project.root / "scripts" / "tests"
    if not folder.is_dir():
        return Counts()
    report = scratch / "own.xml"
    # fmt: off
    command = [
        str(python), "-m", "pytest", "-q", "-n", str(WORKERS), "--dist=loadgroup",
        "-p", "no:cacheprovider", "--disable-warnings",
        "--timeout=1800", f"--junitxml={report}", "--rootdir", str(folder), str(folder),
    ]
    # fmt: on
    if keyword is not None:
        command += ["-k", keyword]
    done = subprocess.run(command, cwd=project.root, env=_environment(project))
    counts = junit_counts(report)
    # 5 is pytest's "no test was collected", which -k makes ordinary.
    if done.returncode not in (0, 5) and not counts.failed:
        print(f"FAILED scripts/tests: pytest exited {done.returncode}")
        counts.failed += 1
    return counts


def junit_counts(report: Path) -> Counts:
    """Counts of a JUnit XML file; all zero when there is none."""
    if not report.is_file():
        return Counts()
    counts = Counts()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        number = {
            key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors")
        }
        skipped = int(suite.get("skipped", 0))
        failed = number["failures"] + number["errors"]
        counts.add(Counts(max(0, number["tests"] - failed - skipped), failed, skipped))
    return counts


def registered_cpu_tests(project: Project, base: str) -> list[str]:
    """Test files that the series adds and registers for CPU, by upstream's own parser."""
    git = Git(project.engine)
    added = sorted(
        path
        for path in added_files(git, base, "HEAD")
        if path.startswith("test/registered/") and path.endswith(".py")
    )
    if not added:
        return []
    parser = _ci_register(project.engine)
    found = []
    for path in added:
        registries, _ = parser.ut_parse_one_file(str(project.engine / path))
        if any(
            entry.backend == parser.HWBackend.CPU and not entry.disabled
            for entry in registries
        ):
            found.append(path)
    return found


def _ci_register(engine: Path):
    """sglang.test.ci.ci_register by its file: importing sglang itself takes seconds."""
    path = engine / "python" / "sglang" / "test" / "ci" / "ci_register.py"
    spec = importlib.util.spec_from_file_location("_ci_register", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _one_file(
    project: Project, python: Path, keyword: str | None, scratch: Path, path: str
) -> tuple[str, Counts, str, float]:
    """One registered file in its own process, as upstream's runner starts it.

    With a keyword pytest runs it, since `FILE -f` takes no expression.
    """
    env = _environment(project)
    file = project.engine / path
    report = scratch / path.replace("/", "-").replace(".py", ".xml")
    if keyword is None:
        command = [str(python), str(file), "-f"]
        env["PYTEST_ADDOPTS"] = f"--junitxml={report} -p no:cacheprovider"
    else:
        command = [str(python), "-m", "pytest", "-q", str(file), "-k", keyword]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider"]
    started = time.monotonic()
    code, output = _run_in_session(command, project.engine, env)
    text = output.decode("utf-8", "replace")
    counts = junit_counts(report) if report.is_file() else unittest_counts(text)
    nothing = counts.passed + counts.failed + counts.skipped == 0
    if keyword is not None and code == 5:
        code = 0
    if (code != 0 and not counts.failed) or (nothing and keyword is None):
        counts.failed += 1
        text += f"\n{path}: exit {code}, {counts}"
    return path, counts, text, time.monotonic() - started


def _run_in_session(
    command: list[str], folder: Path, env: dict[str, str]
) -> tuple[int, bytes]:
    """(exit code, output); what is still running after the timeout is ended."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ending = b""
        try:
            code = process.wait(timeout=FILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code, ending = -1, b"\ntimed out after %d s" % FILE_TIMEOUT_S
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read() + ending


def unittest_counts(text: str) -> Counts:
    """Counts from unittest's closing lines, summed over the runs in one output."""
    counts = Counts()
    for ran, verdict in re.findall(
        r"^Ran (\d+) tests? in [^\n]*\n+((?:OK|FAILED|NO TESTS RAN)[^\n]*)$",
        text,
        flags=re.MULTILINE,
    ):
        pairs = re.findall(r"([a-z ]+)=(\d+)", verdict)
        number = {key.strip(): int(value) for key, value in pairs}
        failed = sum(
            number.get(key, 0) for key in ("failures", "errors", "unexpected successes")
        )
        skipped = number.get("skipped", 0)
        counts.add(Counts(max(0, int(ran) - failed - skipped), failed, skipped))
    return counts
