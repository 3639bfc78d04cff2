"""install / uninstall on a real pip installation of the tiny release."""

import csv
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from killing import killed_at
from serieslib import install as module
from serieslib.project import CACHE_NAME, Project
from tiny_release import FILES, SCRIPTS, write_wheel

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
PURELIB = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def pip(python: Path, *args: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), *args]
    # With the engine on PYTHONPATH pip would take the release for installed.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """A virtual environment with the release, compiled by pip; copied by `site`."""
    folder = tmp_path_factory.mktemp("prefix")
    wheel = write_wheel(folder, TAG, FILES)
    make = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(make, check=True)
    python = folder / "venv/bin/python"
    pip(python, "install", "--no-index", "--no-deps", str(wheel))
    return folder / "venv"


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        self.root = (folder / PURELIB).resolve()
        self.package = self.root / "sglang"
        self.info = self.root / "sglang-0.5.23.dist-info"
        self.store = self.info / CACHE_NAME

    def digest(self) -> dict:
        """path -> (mode, mtime, bytes) of every file, links followed."""
        return {
            path.relative_to(self.folder).as_posix(): (
                path.stat().st_mode,
                path.stat().st_mtime_ns,
                path.read_bytes(),
            )
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }

    def say(self, code: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [self.python, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def site(tmp_path, prefix):
    shutil.copytree(prefix, tmp_path / "venv", symlinks=True)
    return Site(tmp_path / "venv")


def run(world, site, verb: str) -> int:
    return world.run(verb, "--python", str(site.python))


def refused(world, site, capsys, verb: str, *words: str, code: int = 1) -> None:
    before = site.digest()
    assert run(world, site, verb) == code
    message = capsys.readouterr().err
    for word in (*words, "fix:"):
        assert word in message, message
    assert site.digest() == before


def test_there_and_back(world, site, capsys):
    before = site.digest()
    assert run(world, site, "install") == 0
    assert "installed 2 patches" in capsys.readouterr().out
    for name in ("core", "other", "new_part"):
        engine = world.engine / f"python/sglang/{name}.py"
        assert (site.package / f"{name}.py").read_bytes() == engine.read_bytes()
    assert not list(site.root.rglob("test_part.py"))
    code = "import sglang.new_part as m, sglang.core as c; print(m.VALUE, c.line_3)"
    assert site.say(code) == "2 33"
    assert run(world, site, "uninstall") == 0
    assert site.digest() == before
    assert site.say("import sglang.core as c; print(c.line_3)") == "3"


def test_bytecode_of_the_patched_files_does_not_stay(world, site):
    """Also when the package was imported, and recompiled, in between."""
    before = site.digest()
    run(world, site, "install")
    assert not list((site.package / "__pycache__").glob("core.*.pyc"))
    site.say("import sglang.new_part, sglang.core, sglang.other")
    assert list((site.package / "__pycache__").glob("new_part.*.pyc"))
    run(world, site, "uninstall")
    assert site.digest() == before


def test_record_lists_what_is_there(world, site):
    run(world, site, "install")
    with open(site.info / "RECORD", newline="") as handle:
        rows = list(csv.reader(handle))
    names = [row[0] for row in rows]
    assert len(names) == len(set(names))
    listed = {site.root / name for name in names}
    here = {path for path in site.root.rglob("*") if path.is_file()}
    assert here <= listed
    for name, digest, size in rows:
        if digest:
            data = (site.root / name).read_bytes()
            assert module._record_row(name, data) == [name, digest, size]


def test_pip_uninstall_leaves_nothing(world, site):
    run(world, site, "install")
    site.say("import sglang.new_part, sglang.core")
    pip(site.python, "uninstall", "-y", "sglang")
    assert not list(site.root.iterdir())


def test_pip_reinstall_starts_over(world, site, prefix):
    run(world, site, "install")
    wheel = next(prefix.parent.glob("*.whl"))
    pip(
        site.python,
        "install",
        "--no-index",
        "--no-deps",
        "--force-reinstall",
        str(wheel),
    )
    assert not site.store.exists()
    assert run(world, site, "install") == 0


def test_second_install(world, site, capsys):
    run(world, site, "install")
    before = site.digest()
    assert run(world, site, "install") == 0
    assert "already installed" in capsys.readouterr().out
    assert site.digest() == before


def test_other_series_is_installed(world, site, capsys):
    run(world, site, "install")
    world.commit("third: x", {"python/sglang/third.py": "A = 1\n"})
    world.run("export")
    refused(world, site, capsys, "install", "another version", "uninstall")
    assert run(world, site, "uninstall") == 0
    assert run(world, site, "install") == 0
    assert (site.package / "third.py").exists()


def test_uninstall_without_install(world, site, capsys):
    before = site.digest()
    assert run(world, site, "uninstall") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert site.digest() == before


def test_uninstall_does_not_need_the_patches(world, site):
    before = site.digest()
    run(world, site, "install")
    shutil.rmtree(world.patches)
    assert run(world, site, "uninstall") == 0
    assert site.digest() == before


@pytest.mark.parametrize("gone", ["folder", "last patch"])
def test_lost_patches_are_not_a_shorter_series(world, site, capsys, gone):
    last = sorted(world.patches.iterdir())[1]
    if gone == "folder":
        shutil.rmtree(world.patches)
    else:
        last.unlink()
    refused(world, site, capsys, "install", last.name, "git checkout -- patches")


def test_interpreter_named_from_here(world, site, monkeypatch):
    """A relative path and ~, though the probe runs elsewhere."""
    before = site.digest()
    monkeypatch.chdir(site.folder.parent)
    monkeypatch.setenv("HOME", str(site.folder.parent))
    assert world.run("install", "--python", "venv/bin/python") == 0
    assert (site.package / "new_part.py").exists()
    assert world.run("uninstall", "--python", "~/venv/bin/python") == 0
    assert site.digest() == before


def test_interpreter_that_prints_at_start(world, site):
    (site.root / "sitecustomize.py").write_text("print('hello', end='')\n")
    assert site.say("") == "hello"  # and its bytecode is there
    before = site.digest()
    assert run(world, site, "install") == 0
    assert run(world, site, "uninstall") == 0
    assert site.digest() == before


def test_moved_environment(world, site, tmp_path):
    before = site.digest()
    run(world, site, "install")
    site.folder.rename(tmp_path / "moved")
    moved = Site(tmp_path / "moved")
    assert run(world, moved, "uninstall") == 0
    assert moved.digest() == before


@pytest.mark.parametrize("name", ["core.py", "new_part.py", "other.py"])
def test_file_that_is_not_as_released(world, site, capsys, name):
    (site.package / name).write_text("mine\n")
    refused(world, site, capsys, "install", f"sglang/{name}", "--force-reinstall")


def test_untouched_files_may_differ(world, site):
    (site.package / "dos.py").write_text("mine\n")
    before = site.digest()
    assert run(world, site, "install") == 0
    assert run(world, site, "uninstall") == 0
    assert site.digest() == before


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_edited_after_the_install(world, site, capsys, verb):
    run(world, site, "install")
    (site.package / "core.py").write_text("mine\n")
    refused(world, site, capsys, verb, "sglang/core.py")


def test_other_version(world, site, capsys, tmp_path):
    files = {name.replace("0.5.23", "0.5.22"): data for name, data in FILES.items()}
    metadata = "sglang-0.5.22.dist-info/METADATA"
    files[metadata] = files[metadata].replace("0.5.23", "0.5.22")
    wheel = write_wheel(tmp_path, TAG, files, version="0.5.22")
    pip(site.python, "install", "--no-index", "--no-deps", str(wheel))
    for verb in ("install", "uninstall"):
        refused(world, site, capsys, verb, "sglang 0.5.22", "0.5.23", "rebase --onto")


def test_not_installed(world, site, capsys):
    pip(site.python, "uninstall", "-y", "sglang")
    refused(world, site, capsys, "install", "not installed", "install sglang==0.5.23")


def test_editable_install(world, site, capsys, tmp_path):
    direct = '{"url": "file:///src/sglang", "dir_info": {"editable": true}}'
    (site.info / "direct_url.json").write_text(direct)
    words = ("editable install of file:///src/sglang", "apply --checkout")
    refused(world, site, capsys, "install", *words)


def test_hidden_by_pythonpath(world, site, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(world.engine / "python"))
    refused(world, site, capsys, "install", "build/engine", "PYTHONPATH")
    engine = world.snapshot(world.engine)
    (tmp_path / "other/sglang").mkdir(parents=True)
    (tmp_path / "other/sglang/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    refused(world, site, capsys, "install", f"{tmp_path}/other/sglang", "PYTHONPATH")
    assert world.snapshot(world.engine) == engine


@pytest.mark.parametrize("python", ["/nonexistent/python", "/etc/passwd"])
def test_no_such_interpreter(world, capsys, python):
    assert world.run("install", "--python", python) == 2
    assert "--python" in capsys.readouterr().err


@pytest.mark.parametrize("python", ["/bin/false", "/bin/true", "/bin/echo"])
def test_python_that_fails(world, capsys, python):
    assert world.run("install", "--python", python) == 1
    assert "--python" in capsys.readouterr().err


def test_damaged_patch_is_refused(world, site, capsys):
    path = sorted(world.patches.iterdir())[0]
    path.write_text(path.read_text().replace("+line_3 = 33", "+line_3 = 34"))
    refused(world, site, capsys, "install", "comes out damaged", "git checkout")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_read_only_site_packages(world, prefix, verb, capfd):
    """Run by a user who may read the installation but not write to it."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        shutil.copytree(prefix, folder / "venv", symlinks=True)
        shutil.copytree(world.root, folder / "project", symlinks=True)
        shutil.copytree(SCRIPTS, folder / "scripts")
        site = Site(folder / "venv")
        if verb == "uninstall":
            run(world, site, "install")
        before = site.digest()
        # That user may not be able to run this interpreter: find the target first.
        found = module.find_target(Project(world.root), str(site.python))
        nobody = pwd.getpwnam("nobody").pw_uid
        pid = os.fork()
        if pid == 0:
            os.setuid(nobody)
            module.find_target = lambda *args: found
            code = world.__class__(folder / "project").run(
                verb, "--python", str(site.python)
            )
            sys.stderr.flush()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        message = capfd.readouterr().err
        assert "cannot write to" in message and "--python" in message
        assert site.digest() == before
    finally:
        shutil.rmtree(folder)


class TestKilled:
    """SIGKILL before every single change of the file system."""

    @pytest.fixture
    def target(self, world, site, monkeypatch):
        """The probe is run once; finding the target changes nothing."""
        found = module.find_target(Project(world.root), str(site.python))
        monkeypatch.setattr(module, "find_target", lambda *args: found)
        return found

    def test_install(self, world, site, target):
        before, at, killed = site.digest(), 0, True
        project = Project(world.root)
        finished = 0
        while killed:
            at += 1
            killed = killed_at(at, lambda: module.install(project, ""))
            if at % 2:
                # The next call is an uninstall ...
                module.uninstall(project, "")
            else:
                # ... or an install, which must be complete, and then an uninstall.
                module.install(project, "")
                assert (site.package / "other.py").read_text() == "VALUE = 2\n"
                assert (site.package / "new_part.py").exists()
                module.uninstall(project, "")
                finished += 1
            assert site.digest() == before, at
            assert not site.store.exists()
        assert at > 40 and finished > 15

    def test_uninstall(self, world, site, target):
        before, at, killed = site.digest(), 0, True
        project = Project(world.root)
        while killed:
            at += 1
            module.install(project, "")
            for name in ("core", "new_part"):
                cached = site.package / f"__pycache__/{name}.cpython-311.pyc"
                cached.write_bytes(b"made by running it")
            killed = killed_at(at, lambda: module.uninstall(project, ""))
            module.uninstall(project, "")
            assert site.digest() == before, at
            assert not site.store.exists()
        assert at > 25

    def test_error_while_writing(self, world, site, target, monkeypatch):
        before = site.digest()
        place, count = module.Transaction._place, []

        def full(self, source, goal):
            count.append(goal)
            if len(count) == 3:
                raise OSError(28, "No space left on device")
            place(self, source, goal)

        monkeypatch.setattr(module.Transaction, "_place", full)
        with pytest.raises(OSError):
            module.install(Project(world.root), "")
        assert len(count) > 3
        assert site.digest() == before
