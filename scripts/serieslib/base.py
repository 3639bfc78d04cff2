"""A released wheel as a git base commit: text tracked, compiled files beside it."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from itertools import chain
from pathlib import Path, PurePosixPath

from serieslib.errors import SeriesError
from serieslib.fetch import pinned_wheel, writable_folder
from serieslib.gitio import Git, init
from serieslib.project import Project, Upstream, cache_root, file_lock, say

# What stays out of the tree: compiled files, caches and the wheel's metadata.
EXCLUDE = "\n".join(
    "*.so *.co *.pyc __pycache__/ .pytest_cache/ .hypothesis/ .ruff_cache/".split()
    + ["/python/*.dist-info/", ""]
)


Files = dict[str, tuple[str, bytes]]  # path in the wheel -> (git mode, bytes)


def read_wheel(wheel: Path, tracked: set[str] = frozenset()) -> Files:
    """The wheel's files, less those that ``tracked`` has below python/."""
    files: Files = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if info.is_dir() or f"python/{info.filename}" in tracked:
                    continue
                path = PurePosixPath(info.filename)
                if path.is_absolute() or ".." in path.parts or "\n" in info.filename:
                    raise zipfile.BadZipFile(f"unsafe member {info.filename!r}")
                mode = "100755" if (info.external_attr >> 16) & 0o100 else "100644"
                files[info.filename] = (mode, archive.read(info))
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise SeriesError(
            f"{wheel} is not a sound wheel: {error}", f"delete {wheel} and run again"
        ) from None
    return files


def text_files(files: Files, package: str) -> Files:
    """The package's files that git calls text (no NUL in the first 8000 bytes)."""
    return {
        path: (mode, data)
        for path, (mode, data) in files.items()
        if path.startswith(f"{package}/") and b"\0" not in data[:8000]
    }


def text_tree_digest(text: Files) -> str:
    """sha256 over the sorted lines ``mode sha256 path``."""
    total = hashlib.sha256()
    for path, (mode, data) in sorted(text.items()):
        inner = hashlib.sha256(data).hexdigest()
        total.update(f"{mode} {inner} {path}\n".encode())
    return total.hexdigest()


def commit_base(git: Git, text: Files, upstream: Upstream, title: str) -> str:
    """Write the text files as one root commit below python/; returns its id.

    The id depends on the files, the pinned author and date, and ``title`` alone.
    """
    who = f"{upstream.author_name} <{upstream.author_mail}> {upstream.timestamp} +0000"
    message = f"{title}\n".encode()
    parts = [
        b"commit refs/heads/series\n",
        f"author {who}\ncommitter {who}\n".encode(),
        b"data %d\n%s" % (len(message), message),
    ]
    for path, (mode, data) in sorted(text.items()):
        parts.append(f"M {mode} inline python/{path}\n".encode())
        parts.append(b"data %d\n%s\n" % (len(data), data))
    parts.append(b"\ndone\n")
    options = ["--quiet", "--done", "--force", "--depth=0"]
    stream = b"".join(parts)
    # However small: a pack, whose checksum tells later whether it is sound.
    settings = ["-c", "core.compression=1", "-c", "fastimport.unpackLimit=1"]
    git.raw(*settings, "fast-import", *options, stdin=stream)
    return git.out("rev-parse", "refs/heads/series")


def base_title(version: str) -> str:
    return f"sglang {version}, python/sglang from the released wheel"


def base_repository(project: Project) -> Git:
    """A bare repository that holds the pinned base commit, made once and then kept.

    A commit id names the content, so a kept one is as good as a new one; both
    pinned digests are verified when it is made.
    """
    upstream = project.upstream
    folder = writable_folder(cache_root() / "base", project.build / "base")
    target = folder / f"{upstream.base_commit}.git"
    with file_lock(folder / "lock", what="series.py making the base commit"):
        if target.is_dir():
            git = Git(target)
            if _sound(git, upstream.base_commit):
                return git
            say(f"{target} is damaged; making it again")
            shutil.rmtree(target)
        for stale in folder.glob(".base-*"):
            shutil.rmtree(stale, ignore_errors=True)
        wheel = pinned_wheel(project)
        say(f"making the base commit from {wheel.name} ...")
        with tempfile.TemporaryDirectory(prefix=".base-", dir=folder) as scratch:
            git = init(Path(scratch, "base.git"), bare=True)
            _pinned_commit(git, wheel, upstream)
            os.rename(git.folder, target)
    return Git(target)


def _sound(git: Git, commit: str) -> bool:
    """Whether the kept repository has the commit, in packs that are as git wrote them.

    A pack and its index end with the SHA-1 of all that is before.
    """
    packs = [git.folder.glob(f"objects/pack/*.{kind}") for kind in ("pack", "idx")]
    return git.resolve("refs/heads/series") == commit and all(
        hashlib.sha1(data[:-20], usedforsecurity=False).digest() == data[-20:]
        for data in (path.read_bytes() for path in chain(*packs))
    )


def _pinned_commit(git: Git, wheel: Path, upstream: Upstream) -> None:
    files = read_wheel(wheel)
    text = text_files(files, upstream.name)
    digest = text_tree_digest(text)
    fix = "restore UPSTREAM with `git checkout -- UPSTREAM`"
    if digest != upstream.text_tree_sha256:
        raise SeriesError(
            f"the text files of {wheel.name} are not the pinned ones:\n"
            f"    expected {upstream.text_tree_sha256}\n    found    {digest}",
            fix,
        )
    commit = commit_base(git, text, upstream, base_title(upstream.version))
    if commit != upstream.base_commit:
        raise SeriesError(
            f"the base commit is {commit}, pinned is {upstream.base_commit}", fix
        )


def lay_out(folder: Path, project: Project) -> Git:
    """A working repository in ``folder``: base checked out, tagged `base`, binaries in.

    Compiled extensions and the .dist-info are on disk and ignored, so that
    `PYTHONPATH=<folder>/python` imports and `importlib.metadata` answers.
    """
    source = base_repository(project)
    commit = project.upstream.base_commit
    git = init(folder)
    exclude = git.git_path("info/exclude")
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text(EXCLUDE, encoding="utf-8")
    git.raw("fetch", "--quiet", str(source.folder), "refs/heads/series:refs/tags/base")
    git.raw("reset", "--hard", "--quiet", commit)
    tracked = set(git.lines("ls-tree", "-r", "-z", "--name-only", commit))
    write_untracked(folder, pinned_wheel(project), tracked)
    return git


def write_untracked(folder: Path, wheel: Path, tracked: set[str]) -> None:
    """Put the wheel's files that the base commit lacks below ``folder``/python."""
    for path, (mode, data) in read_wheel(wheel, tracked=tracked).items():
        target = folder / "python" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(int(mode, 8) & 0o777)
