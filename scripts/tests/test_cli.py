"""The command line itself: help, exit codes, status, a broken UPSTREAM."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest
import series
from serieslib import verbs
from tiny_release import SCRIPTS

TOOL = [sys.executable, str(SCRIPTS / "series.py")]


def test_help_lists_verbs_checks_and_exit_codes():
    done = subprocess.run([*TOOL, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for verb in verbs.VERBS:
        assert f"\n    {verb}" in done.stdout
    for word in ("what `check` looks at", "130 interrupted", "2 wrong usage"):
        assert word in done.stdout


def test_every_verb_has_help(capsys):
    for verb in verbs.VERBS:
        assert series.main([verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: series.py {verb}")


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["apply", "--nonsense"], ["test", "-k"]]
)
def test_wrong_usage(argv, world, capsys):
    assert world.run(*argv) == 2


def test_interrupt_is_130(world, monkeypatch, capsys):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "status_lines", stop)
    assert world.run("status") == 130
    assert "interrupted" in capsys.readouterr().err


def test_unexpected_error_is_3_and_has_a_traceback(world, monkeypatch, capsys):
    monkeypatch.setattr(verbs, "status_lines", lambda project: 1 / 0)
    assert world.run("status") == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_real_interrupt_leaves_nothing_half_made(world):
    """SIGINT while the tool waits for its lock, through the real command line."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import series; "
        "from pathlib import Path; "
        "sys.exit(series.main(['apply'], root=Path(sys.argv[2])))"
    )

    with open(world.root / "build/lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(SCRIPTS), str(world.root)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "waiting for another" in process.stderr.readline()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert world.run("check") == 0


@pytest.mark.parametrize(
    "edit, word",
    [
        (lambda text: text.replace("base-date", "based-ate"), "lacks base-date"),
        (lambda text: text + "nonsense\n", "not one `key: value`"),
        (lambda text: text + "name: twice\n", "not one `key: value`"),
        (lambda text: text.replace("sha256-cp", "sha512-cp"), "lacks sha256-cp"),
        (lambda text: text.replace("2026-10-30T", "yesterday "), "malformed"),
        (lambda text: text.replace("+00:00", ""), "malformed"),
    ],
)
def test_broken_upstream_file(world, capsys, edit, word):
    path = world.root / "UPSTREAM"
    path.write_text(edit(path.read_text()))
    assert world.run("status") != 0
    message = capsys.readouterr().err
    assert word in message and "git checkout -- UPSTREAM" in message


def test_missing_upstream_file(world, capsys):
    (world.root / "UPSTREAM").unlink()
    assert world.run("status") == 2


class TestStatus:
    def lines(self, world, capsys) -> str:
        capsys.readouterr()
        before = world.snapshot(world.root)
        assert world.run("status") == 0
        assert world.snapshot(world.root) == before
        return capsys.readouterr().out

    def test_in_step(self, world, capsys):
        out = self.lines(world, capsys)
        assert "sglang 0.5.23" in out and "patches  2" in out
        assert "base + 2 commits" in out and "in step with patches/" in out
        assert "2 files, in step" in out

    def test_no_engine(self, empty, capsys):
        assert "none yet" in self.lines(empty, capsys)

    def test_everything_out_of_step(self, world, capsys):
        (world.engine / "python/sglang/core.py").write_text("X = 1\n")
        (world.root / "python/sglang/new_part.py").write_text("x\n")
        (world.root / "test/extra.py").write_text("x\n")
        (world.patches / "notes").write_text("x\n")
        out = self.lines(world, capsys)
        assert "python/sglang/core.py" in out
        assert "OUT OF STEP" in out and "python/sglang/new_part.py" in out
        assert "test/extra.py" in out and "patches/notes" in out

    def test_not_exported(self, world, capsys):
        world.commit("third: x", {"python/sglang/third.py": "A = 1\n"})
        out = self.lines(world, capsys)
        assert "not exported" in out and "third: x" in out

    def test_other_patches(self, world, capsys):
        path = sorted(world.patches.iterdir())[0]
        path.write_text(path.read_text() + "\n")
        assert "made from other patches" in self.lines(world, capsys)
