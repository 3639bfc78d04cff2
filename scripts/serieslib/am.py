"""Apply the series with git am; a patch that stops is rolled back and named."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from serieslib.errors import SeriesError
from serieslib.gitio import Git, tail

_OPTIONS = (
    "--no-3way",
    "--keep-cr",
    "--no-scissors",
    "--no-keep",
    "--no-message-id",
    "--no-signoff",
    "--no-gpg-sign",
    "--no-ignore-whitespace",
    "--whitespace=nowarn",
    "--committer-date-is-author-date",
)
_ADVICE = re.compile(
    rb"hint:|Patch failed at|When you have resolved|If you prefer to skip"
    rb"|To restore the original"
)


class PatchStopped(SeriesError):
    """git am stopped at ``patch``; the repository is back where it was."""

    def __init__(self, patch: Path, message: str, fix: str) -> None:
        super().__init__(
            f"{patch.parent.name}/{patch.name} does not apply:\n{message}", fix
        )
        self.patch = patch


def apply_patches(git: Git, patches: list[Path], fix: str) -> str:
    """Commit every patch onto HEAD, or none; returns the new tip."""
    if patches:
        done = git.run(
            "am", "--quiet", *_OPTIONS, *[str(p.absolute()) for p in patches]
        )
        if done.returncode:
            stopped = _stopped_at(git, patches)
            message = am_message(done)
            roll_back(git)
            raise PatchStopped(stopped, message, fix)
    return git.out("rev-parse", "HEAD")


def am_message(done: subprocess.CompletedProcess[bytes]) -> str:
    """What a stopped git am said, less its advice for a tree that will be gone."""
    lines = (done.stderr + b"\n" + done.stdout).splitlines()
    return tail(b"\n".join(line for line in lines if not _ADVICE.match(line)))


def roll_back(git: Git) -> None:
    """End an interrupted am: HEAD, index and files as before it."""
    if git.git_path("rebase-apply").exists():
        git.raw("am", "--abort")


def _stopped_at(git: Git, patches: list[Path]) -> Path:
    """The patch that am was at; the first one when it did not even start."""
    try:
        number = int(git.git_path("rebase-apply/next").read_text())
    except (OSError, ValueError):
        number = 1
    return patches[min(number, len(patches)) - 1]


@dataclass(frozen=True)
class Commit:
    """One commit of the series: what it says and how much it touches."""

    id: str
    subject: str
    body: str
    files: int
    added: int
    removed: int


def commits(git: Git, base: str, tip: str = "HEAD") -> list[Commit]:
    """The commits after ``base`` up to ``tip``, oldest first."""
    found = []
    ids = git.out("rev-list", "--reverse", "--topo-order", f"{base}..{tip}").split()
    for commit in ids:
        message = git.raw("log", "-1", "--format=%B", commit).decode("utf-8", "replace")
        subject, _, body = message.strip("\n").partition("\n")
        rows = [
            row.split("\t", 2)
            for row in git.lines(
                "diff-tree", "-r", "--root", "--no-commit-id", "--numstat", "-z",
                "--no-renames", "--no-ext-diff", "--no-textconv", commit,
            )
        ]  # fmt: skip
        count = [[0 if cell == "-" else int(cell) for cell in row[:2]] for row in rows]
        found.append(
            Commit(
                id=commit,
                subject=subject,
                body=body.strip("\n"),
                files=len(rows),
                added=sum(row[0] for row in count),
                removed=sum(row[1] for row in count),
            )
        )
    return found


def added_files(git: Git, base: str, tip: str) -> dict[str, tuple[str, bytes]]:
    """path -> (git mode, bytes) of every file that ``tip`` has and ``base`` lacks."""
    rows = git.lines(
        "diff-tree", "-r", "-z", "--no-renames", "--diff-filter=A", base, tip
    )
    found = {}
    for meta, path in zip(rows[::2], rows[1::2]):
        _, mode, _, blob, _ = meta.lstrip(":").split()
        found[path] = (mode, git.raw("cat-file", "blob", blob))
    return found


def touched_files(git: Git, base: str, tip: str) -> list[str]:
    """Paths that differ between two commits and exist in ``tip``."""
    return git.lines(
        "diff-tree", "-r", "-z", "--no-renames", "--diff-filter=AM", "--name-only",
        base, tip,
    )  # fmt: skip
