"""A tiny release in a wheel, a project that pins it, and a quiet cache folder."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))

import series  # noqa: E402
from serieslib import base, fetch, gitio, project  # noqa: E402

VERSION = "0.5.23"
LINES = "".join(f"line_{n} = {n}\n" for n in range(1, 41))
FILES = {
    "sglang/__init__.py": "",
    "sglang/core.py": LINES,
    "sglang/other.py": "VALUE = 1\n",
    "sglang/kept/.gitignore": "*.txt\n",
    "sglang/kept/notes.txt": "ignored by the file beside it, and still released\n",
    "sglang/run.sh": "#!/bin/sh\necho hi\n",
    "sglang/dos.py": "A = 1\r\nB = 2\r\n",
    "sglang/native.so": b"\x7fELF\0binary",
    f"sglang-{VERSION}.dist-info/METADATA": (
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n"
    ),
    f"sglang-{VERSION}.dist-info/WHEEL": (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
    ),
}
MESSAGE = "Why: the test needs it.\n\nUpstream-Status: Pending"


def write_wheel(folder: Path, tag: str, files: dict, version: str = VERSION) -> Path:
    """A wheel named for interpreter ``tag``; .sh files are executable."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sglang-{version}-{tag}-{tag}-manylinux_2_34_x86_64.whl"
    record = f"sglang-{version}.dist-info/RECORD"
    rows = [record_row(name, data) for name, data in files.items()] + [f"{record},,"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {record: "\n".join(rows) + "\n"}).items():
            info = zipfile.ZipInfo(name, (2026, 10, 30, 1, 4, 36))
            mode = 0o100755 if name.endswith(".sh") else 0o100644
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return path


def record_row(name: str, data: str | bytes) -> str:
    data = data if isinstance(data, bytes) else data.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"{name},sha256={digest.decode()},{len(data)}"


def upstream_text(wheel: Path, tag: str, scratch: Path) -> str:
    """UPSTREAM for one wheel, its digests computed as the tool computes them."""
    text = base.text_files(base.read_wheel(wheel), "sglang")
    identity = "name: sglang\nversion: 0.5.23\n"
    author = "base-author: Test Base <base@example.org>\n"
    date = "base-date: 2026-10-30T01:04:36+00:00\n"
    lines = (
        f"{identity}{author}{date}find-links: index\n"
        f"wheel-{tag}: {wheel.name}\nsha256-{tag}: {project.sha256_file(wheel)}\n"
        f"text-tree-sha256: {base.text_tree_digest(text)}\n"
    )
    scratch.mkdir(parents=True)
    (scratch / "U").write_text(lines + "base-commit: none\n")
    parsed = project.read_upstream(scratch / "U")
    git = gitio.init(scratch / "repo", bare=True)
    commit = base.commit_base(git, text, parsed, base.base_title(VERSION))
    return f"{lines}base-commit: {commit}\n"


class World:
    """A project in a temporary folder, driven through the command line's main."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.patches = root / "patches"
        self.engine = root / "build" / "engine"

    def run(self, *argv: str) -> int:
        return series.main(list(argv), root=self.root)

    def git(self, *args: str, folder: Path | None = None) -> str:
        """git as a user runs it (their configuration counts)."""
        done = subprocess.run(
            ["git", *args],
            cwd=folder or self.engine,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, subject: str, files: dict, body: str = MESSAGE) -> str:
        """One commit in the engine; a value of None deletes the file."""
        for name, text in files.items():
            path = self.engine / name
            if text is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            data = text if isinstance(text, bytes) else text.encode()
            path.write_bytes(data)
        self.git("add", "--all", "--force", "--", *files)
        options = ["--quiet", "--cleanup=verbatim", "--date=2026-01-02T03:04:05+0000"]
        self.git("commit", *options, "-m", f"{subject}\n\n{body}")
        return self.git("rev-parse", "HEAD")

    def snapshot(self, *folders: Path) -> dict[str, tuple[int, bytes]]:
        """path -> (mode, bytes) of what a failed run must leave alone."""
        tops = folders or [self.root / n for n in ("patches", "python", "test")]
        found = {}
        seal = self.root / "patches.sha256"
        if not folders and seal.exists():
            found[str(seal)] = (seal.stat().st_mode, seal.read_bytes())
        for top in tops:
            for path in sorted(top.rglob("*")):
                if path.is_file():
                    found[str(path)] = (path.stat().st_mode, path.read_bytes())
                else:
                    found[str(path)] = (0, b"")
        return found


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """(folder with the wheel, UPSTREAM text, a warm cache folder)."""
    folder = tmp_path_factory.mktemp("release")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = write_wheel(folder / "index", tag, FILES)
    text = upstream_text(wheel, tag, folder / "pins")
    cache = folder / "cache"
    wheels = cache / project.CACHE_NAME / "wheels"
    wheels.mkdir(parents=True)
    os.link(wheel, wheels / wheel.name)
    return folder / "index", text, cache


def pytest_configure(config):
    config.addinivalue_line("markers", "real_pip: downloads through pip itself")


_UNWANTED = ("GIT_", "XDG_", "PYTHON", "PIP_TARGET", "PIP_PREFIX")


def set_up_user(home: Path, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """An empty home with a plain git identity, and the given cache folder."""
    home.mkdir()
    (home / ".gitconfig").write_text("[user]\n\tname = U\n\temail = u@example.org\n")
    for name in [name for name in os.environ if name.startswith(_UNWANTED)]:
        patch.delenv(name)
    patch.setenv("HOME", str(home))
    patch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def user(tmp_path, release, monkeypatch):
    set_up_user(tmp_path / "home", release[2], monkeypatch)
    return tmp_path / "home"


def new_project(root: Path, release: tuple) -> World:
    index, text, _ = release
    root.mkdir()
    (root / "UPSTREAM").write_text(text)
    (root / "index").symlink_to(index)
    (root / "requirements.lock").write_text("sglang==0.5.23\n")
    return World(root)


@pytest.fixture
def empty(tmp_path, user, release):
    """A project with no patches; wheel and base commit are in the cache."""
    return new_project(tmp_path / "project", release)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, release):
    """Two exported patches and their engine; copied by `world`, not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        set_up_user(folder / "home", release[2], patch)
        made = new_project(folder / "project", release)
        assert made.run("apply") == 0
        core = LINES.replace("line_3 = 3\n", "line_3 = 33\n")
        core = core.replace("line_30 = 30\n", "line_30 = 30\nextra = 1\n")
        part = "from sglang.other import VALUE\n"
        made.commit(
            "core: change two places",
            {"python/sglang/core.py": core, "python/sglang/new_part.py": part},
        )
        test = "def test_part():\n    assert 1 + 1\n"
        made.commit(
            "other, core: use it",
            {
                "python/sglang/other.py": "VALUE = 2\n",
                "test/registered/unit/test_part.py": test,
            },
        )
        assert made.run("export") == 0
    return made.root


@pytest.fixture
def world(tmp_path, user, finished):
    """A project with two exported patches and its engine."""
    shutil.copytree(finished, tmp_path / "project", symlinks=True)
    return World(tmp_path / "project")


@pytest.fixture
def no_index(monkeypatch):
    """pip as it fails without a network."""
    monkeypatch.setattr(fetch, "find_links", lambda project: "/nonexistent/index")
