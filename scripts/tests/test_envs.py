"""The engine environment: made once, whole or not at all, with clear failures."""

import multiprocessing
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from serieslib import envs
from serieslib.errors import SeriesError
from serieslib.project import Project
from tiny_release import SCRIPTS


def quick_venv(python: str, folder: Path) -> None:
    """As envs._make_venv, but with the pip of the interpreter that runs the tests."""
    options = ["--without-pip", "--system-site-packages"]
    subprocess.run([python, "-m", "venv", *options, str(folder)], check=True)


@pytest.fixture
def here(empty, tmp_path, release, monkeypatch):
    """A project whose only pin is the tiny release, from a folder, and a cold cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cold"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(release[0]))
    monkeypatch.setattr(envs, "_make_venv", quick_venv)
    return Project(empty.root)


def test_made_once_then_found(here, monkeypatch, capsys):
    assert envs.find_environment(here) is None
    python = envs.make_environment(here)
    assert envs.find_environment(here) == python
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    out = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
    assert out.strip() == "0.5.23"
    assert "once; several minutes" in capsys.readouterr().err
    monkeypatch.setattr(envs, "_make_venv", lambda *args: pytest.fail("made again"))
    assert envs.make_environment(here) == python


def test_other_pins_are_another_environment(here):
    python = sys.executable
    one = envs.environment_folder(here, python)
    path = here.root / "requirements.lock"
    path.write_text(path.read_text() + "pytest==1.0\n")
    assert envs.environment_folder(here, python) != one


def test_interrupted_one_is_made_again(here, monkeypatch):
    real = envs._install

    def stop(folder, pins):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setattr(envs, "_install", stop)
    with pytest.raises(KeyboardInterrupt):
        envs.make_environment(here)
    assert envs.find_environment(here) is None
    monkeypatch.setattr(envs, "_install", real)
    python = envs.make_environment(here)
    assert envs.find_environment(here) == python
    assert not (python.parents[1] / "half").exists()


def test_pip_failure_is_shown_and_nothing_is_used(here, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SeriesError, match="check the network") as caught:
        envs.make_environment(here)
    assert "sglang==0.5.23" in str(caught.value)
    assert envs.find_environment(here) is None


def _make(root: Path, done) -> None:
    envs._make_venv = quick_venv
    done.put(str(envs.make_environment(Project(root))))


def test_two_at_once(here):
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    workers = [context.Process(target=_make, args=(here.root, done)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0
    assert done.get(timeout=10) == done.get(timeout=10)


def test_venv_failure_says_what_to_install(here, monkeypatch, tmp_path):
    monkeypatch.undo()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho No module named ensurepip >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SeriesError, match="python3-venv"):
        envs._make_venv(str(broken), tmp_path / "env")
    assert not (tmp_path / "env").exists()


def test_full_disk(here, monkeypatch):
    path = here.root / "requirements.lock"
    path.write_text(path.read_text() + "".join(f"p{n}==1\n" for n in range(60)))
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(envs.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        SeriesError, match="1.0 GiB free.*XDG_CACHE_HOME|XDG_CACHE_HOME"
    ):
        envs.make_environment(here)


def test_interpreter_without_a_wheel(here, monkeypatch, tmp_path):
    monkeypatch.setattr(
        envs.sys, "version_info", type("V", (), dict(major=3, minor=99))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SeriesError, match="on PATH"):
        envs.environment_python(here)
    (tag,) = here.upstream.wheels
    other = tmp_path / f"python{tag[2]}.{tag[3:]}"
    other.symlink_to(sys.executable)
    assert envs.environment_python(here) == str(other)


def test_lock_must_pin_the_release(here):
    (here.root / "requirements.lock").write_text("sglang==0.5.22\n")
    with pytest.raises(SeriesError, match="does not pin sglang==0.5.23"):
        envs.locked_pins(here)
    (here.root / "requirements.lock").unlink()
    with pytest.raises(SeriesError, match="git checkout"):
        envs.locked_pins(here)


def test_the_projects_own_lock_holds_the_pins_of_pyproject():
    root = SCRIPTS.parent
    pins = envs.locked_pins(Project(root))
    groups = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]
    pins = [pin.lower().replace("_", "-") for pin in pins]
    assert set(groups["test"]) <= set(pins)
    names = [pin.partition("==")[0] for pin in pins]
    assert len(set(names)) == len(names)
    assert all("==" in pin for pin in pins)
