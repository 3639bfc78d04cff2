"""Where things lie in the project, and what UPSTREAM pins."""

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Iterator

from serieslib.errors import USAGE, SeriesError

CACHE_NAME = "kimi-k3-prefill-series"
MIRROR_ROOTS = ("python", "test")
PATCH_NAME = re.compile(r"\d{4}-[A-Za-z0-9._+-]+\.patch")
_CACHE_DIRS = {"__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}
_REQUIRED = (
    "name",
    "version",
    "text-tree-sha256",
    "base-commit",
    "base-author",
    "base-date",
)


@dataclass(frozen=True)
class Upstream:
    """The pinned release. ``wheels`` maps an interpreter tag to (file, sha256)."""

    name: str
    version: str
    text_tree_sha256: str
    base_commit: str
    author_name: str
    author_mail: str
    timestamp: int
    wheels: dict[str, tuple[str, str]]
    find_links: str | None = None


def read_upstream(path: Path) -> Upstream:
    """Parse UPSTREAM (``key: value`` lines, # comments); names what is wrong."""
    fix = f"restore it with `git checkout -- {path.name}`"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SeriesError(f"{path} is missing", fix, USAGE) from None
    except UnicodeDecodeError:
        raise SeriesError(f"{path} is not UTF-8 text", fix, USAGE) from None
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, colon, value = line.partition(":")
        if not colon or not value.strip() or key in values:
            raise SeriesError(f"{path}:{number}: not one `key: value`: {line}", fix)
        values[key.strip()] = value.strip()
    missing = [key for key in _REQUIRED if key not in values]
    wheels = {}
    for key, value in values.items():
        if key.startswith("wheel-"):
            tag = key.removeprefix("wheel-")
            if f"sha256-{tag}" not in values:
                missing.append(f"sha256-{tag}")
            else:
                wheels[tag] = (value, values[f"sha256-{tag}"])
    if not wheels:
        missing.append("wheel-cp3XX")
    if missing:
        raise SeriesError(f"{path} lacks {', '.join(missing)}", fix)
    who = re.fullmatch(r"(.+) <(.+)>", values["base-author"])
    try:
        when = datetime.fromisoformat(values["base-date"])
    except ValueError:
        when = None
    if who is None or when is None or when.tzinfo is None:
        raise SeriesError(f"{path}: base-author or base-date is malformed", fix)
    return Upstream(
        name=values["name"],
        version=values["version"],
        text_tree_sha256=values["text-tree-sha256"],
        base_commit=values["base-commit"],
        author_name=who[1],
        author_mail=who[2],
        timestamp=int(when.timestamp()),
        wheels=wheels,
        find_links=values.get("find-links"),
    )


@dataclass
class Project:
    """Paths of one project checkout."""

    root: Path
    upstream: Upstream = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        self.upstream = read_upstream(self.root / "UPSTREAM")

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def seal(self) -> Path:
        """sha256 of every patch as exported, in the format of `sha256sum -c`."""
        return self.root / "patches.sha256"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def engine(self) -> Path:
        return self.build / "engine"

    @contextmanager
    def scratch(self, purpose: str) -> Iterator[Path]:
        """A folder under build/ that is gone afterwards; the caller holds the lock."""
        self.build.mkdir(exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f".scratch-{purpose}-", dir=self.build))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One run at a time in this checkout; leftovers of a killed run go first."""
        self.build.mkdir(exist_ok=True)
        with file_lock(self.build / "lock", what="series.py in this checkout"):
            for stale in self.build.glob(".scratch-*"):
                shutil.rmtree(stale, ignore_errors=True)
            yield

    def list_patches(self) -> list[Path]:
        """The patches in order; a stray file or a lost patch is an error that names it."""
        problems = patch_folder_problems(self.patches)
        if problems:
            raise SeriesError(
                "patches/ must hold the numbered patches alone:\n    "
                + "\n    ".join(problems),
                "move the named files out of patches/ (or renumber with "
                "`series.py export`)",
            )
        found = sorted(self.patches.glob("*.patch"))
        sealed = sealed_names(self.seal)
        lost = [name for name in sealed if not (self.patches / name).is_file()]
        # As many as sealed is a patch renamed by hand, which `check` reports.
        if lost and len(found) < len(sealed):
            raise SeriesError(
                f"patches/ lacks what {self.seal.name} lists:\n    "
                + "\n    ".join(lost),
                "restore it with `git checkout -- patches`; to drop a patch, drop its "
                "commit in build/engine and `python3 scripts/series.py export`",
            )
        return found


def sealed_names(seal: Path) -> list[str]:
    """The patches that the seal lists; none where there is no seal."""
    if not seal.is_file():
        return []
    lines = seal.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition("  patches/")[2] for line in lines]
    return [name for name in names if name]


def patch_folder_problems(folder: Path) -> list[str]:
    """One line for each entry of patches/ that `git am patches/*` would trip over."""
    names, strays = patch_folder(folder)
    problems = [f"{folder.name}/{name}: not a numbered patch" for name in strays]
    for number, name in enumerate(names, 1):
        if int(name[:4]) != number:
            problems.append(f"{folder.name}/{name}: expected number {number:04d}")
            break
    return problems


def patch_folder(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the patches in order, and of everything else."""
    if not folder.exists():
        return [], []
    if not folder.is_dir():
        raise SeriesError(f"{folder} is not a folder", "move it away")
    names, strays = [], []
    for entry in sorted(folder.iterdir()):
        fits = PATCH_NAME.fullmatch(entry.name) and entry.is_file()
        (names if fits and not entry.is_symlink() else strays).append(entry.name)
    return names, strays


def mirror_files(root: Path) -> dict[str, Path]:
    """Relative path -> file, for everything under the mirror roots but caches."""
    found = {}
    for top in MIRROR_ROOTS:
        for folder, folders, files in os.walk(root / top):
            folders[:] = sorted(set(folders) - _CACHE_DIRS)
            for name in files:
                if not name.endswith(".pyc"):
                    path = Path(folder, name)
                    found[path.relative_to(root).as_posix()] = path
    return found


def cache_root() -> Path:
    """The user's cache folder for wheels and test environments."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            base = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return Path(base) / CACHE_NAME


@contextmanager
def file_lock(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; says so when it has to wait."""
    with open(path, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another {what} ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_file(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def say(text: str) -> None:
    """Progress, kept apart from the results on stdout."""
    print(text, file=sys.stderr, flush=True)
