"""git, with the user's configuration, hooks and environment shut out."""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from serieslib.errors import SeriesError

COMMITTER = ("KDA prefill series", "series@users.noreply.example")
# GIT_CONFIG_GLOBAL is honoured from 2.32 on.
OLDEST = (2, 32)

# A repository's own .git/config still counts, so each of these is said aloud.
_SETTINGS = {
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.quotePath": "false",
    "core.commentChar": "#",
    "core.whitespace": "",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "am.threeWay": "false",
    "am.keepcr": "true",
    "commit.gpgSign": "false",
    "commit.cleanup": "default",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "advice.detachedHead": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.file.allow": "always",
}


def clean_env() -> dict[str, str]:
    """The environment without GIT_* and without user and system configuration."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_SYSTEM=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        GIT_TERMINAL_PROMPT="0",
        GIT_OPTIONAL_LOCKS="0",  # looking must not write the index
        GIT_COMMITTER_NAME=COMMITTER[0],
        GIT_COMMITTER_EMAIL=COMMITTER[1],
        GIT_AUTHOR_NAME=COMMITTER[0],
        GIT_AUTHOR_EMAIL=COMMITTER[1],
        LC_ALL="C",
        TZ="UTC",
    )
    return env


@cache
def require_git() -> None:
    """Raise when git is missing or too old to have its configuration shut out."""
    if shutil.which("git") is None:
        raise SeriesError("git is not on PATH", "install git 2.32 or newer")
    out = subprocess.run(["git", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", out)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        raise SeriesError(f"git is too old: {out.strip()}", "install git 2.32 or newer")


class Git:
    """Run git in one folder. Output is bytes from ``raw``, stripped text from ``out``."""

    def __init__(self, folder: Path) -> None:
        require_git()
        self.folder = Path(folder)

    def run(
        self, *args: str, stdin: bytes | None = None, **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        """Run and return whatever happened; the caller looks at returncode."""
        command = ["git", "-c", f"safe.directory={self.folder.absolute()}"]
        for key, value in _SETTINGS.items():
            command += ["-c", f"{key}={value}"]
        return subprocess.run(
            [*command, *args],
            cwd=self.folder,
            # Never fall through to a repository further up, such as the project's.
            env=clean_env()
            | {"GIT_CEILING_DIRECTORIES": str(self.folder.absolute().parent)}
            | env,
            input=b"" if stdin is None else stdin,
            capture_output=True,
        )

    def raw(self, *args: str, stdin: bytes | None = None, **env: str) -> bytes:
        done = self.run(*args, stdin=stdin, **env)
        if done.returncode:
            message = tail(done.stderr or done.stdout)
            raise SeriesError(
                f"`git {' '.join(args)}` failed in {self.folder}:\n{message}",
                "read git's message above; nothing was changed by this step",
            )
        return done.stdout

    def out(self, *args: str, stdin: bytes | None = None, **env: str) -> str:
        return self.raw(*args, stdin=stdin, **env).decode("utf-8", "replace").strip()

    def lines(self, *args: str) -> list[str]:
        """NUL-separated output as a list."""
        text = self.raw(*args).decode("utf-8", "surrogateescape")
        return [item for item in text.split("\0") if item]

    def dirty_files(self, untracked: bool = True) -> list[str]:
        """`XY path` of everything that differs from HEAD."""
        mode = "all" if untracked else "no"
        return self.lines(
            "status", "--porcelain", "-z", "--no-renames", f"--untracked-files={mode}"
        )

    def git_path(self, name: str) -> Path:
        return (self.folder / self.out("rev-parse", "--git-path", name)).absolute()

    def resolve(self, revision: str) -> str | None:
        done = self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        return done.stdout.decode().strip() or None


def init(folder: Path, bare: bool = False) -> Git:
    """A new repository without template; branch `series`."""
    folder.mkdir(parents=True, exist_ok=True)
    git = Git(folder)
    args = ["init", "--quiet", "--template=", "--initial-branch=series"]
    git.raw(*args, *(["--bare"] if bare else []))
    return git


def borrow(folder: Path, lender: Git, bare: bool = False) -> Git:
    """A new repository that reads another one's objects but not its configuration."""
    git = init(folder, bare=bare)
    objects = lender.git_path("objects")
    info = git.git_path("objects/info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "alternates").write_text(f"{objects}\n", encoding="utf-8")
    return git


def scratch_checkout(git: Git, folder: Path, commit: str) -> Git:
    """A throw-away work tree of ``commit`` that shares the objects of ``git``."""
    made = borrow(folder, git)
    made.raw("update-ref", "refs/heads/series", commit)
    made.raw("reset", "--hard", "--quiet", commit)
    return made


def tail(output: bytes, lines: int = 12) -> str:
    text = output.decode("utf-8", "replace").strip().splitlines()
    return "\n".join(f"    {line}" for line in text[-lines:])
