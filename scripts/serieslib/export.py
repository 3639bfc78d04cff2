"""Commits to patch files and mirror: byte-stable, proven by applying them again."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from serieslib.am import (
    Commit,
    PatchStopped,
    added_files,
    apply_patches,
    commits,
)
from serieslib.errors import SeriesError
from serieslib.gitio import Git, borrow, scratch_checkout
from serieslib.messages import message_problem
from serieslib.project import MIRROR_ROOTS, Project, mirror_files, patch_folder
from serieslib.txn import Change, Transaction

_AMEND = "amend it in build/engine (`git rebase -i base`), then export again"


@dataclass(frozen=True)
class Series:
    """What a range of commits looks like in the project."""

    patches: dict[str, bytes]
    mirror: dict[str, tuple[str, bytes]]
    commits: list[Commit]


def format_series(git: Git, base: str, tip: str, scratch: Path) -> dict[str, bytes]:
    """File name -> bytes of each patch.

    Formatted in a bare repository of its own, so that no setting or attribute of
    the engine's repository can reach the output.
    """
    bare = borrow(scratch / "format.git", git, bare=True)
    folder = scratch / "formatted"
    folder.mkdir()
    bare.raw(
        "format-patch", "--quiet", "--zero-commit", "--no-signature", "--no-numbered",
        "--full-index", "--no-renames", "--no-base", "--no-attach", "--no-thread",
        "--no-cover-letter", "--no-notes", "--no-signoff", "--no-ext-diff",
        "--no-textconv", "--no-color", "--unified=3", "--inter-hunk-context=0",
        "--diff-algorithm=myers", "--indent-heuristic", "--src-prefix=a/",
        "--dst-prefix=b/", "--subject-prefix=PATCH", "--suffix=.patch",
        "--start-number=1", "--topo-order",
        f"--output-directory={folder}", f"{base}..{tip}",
    )  # fmt: skip
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def mirror_of(git: Git, base: str, tip: str) -> dict[str, tuple[str, bytes]]:
    """The files that the series adds; refuses those that have no place in the mirror."""
    added = added_files(git, base, tip)
    for path, (mode, _) in added.items():
        if path.split("/")[0] not in MIRROR_ROOTS or mode == "120000":
            kind = (
                "a symbolic link" if mode == "120000" else "outside python/ and test/"
            )
            raise SeriesError(
                f"the series adds {path}, which is {kind}",
                f"drop or move the file: {_AMEND}",
            )
    return added


def build_series(git: Git, base: str, tip: str, scratch: Path) -> Series:
    """Format base..tip and prove that the patches give the same commits again."""
    if not git.run("merge-base", "--is-ancestor", base, tip).returncode == 0:
        raise SeriesError(
            f"the base commit {base[:12]} is not an ancestor of the engine's HEAD",
            "rebase your commits onto the tag `base` in build/engine",
        )
    merges = git.out("rev-list", "--merges", f"{base}..{tip}").split()
    if merges:
        raise SeriesError(
            f"{merges[0][:12]} is a merge, which a patch cannot carry",
            "make the history linear: `git rebase base` in build/engine",
        )
    found = commits(git, base, tip)
    if not found:
        raise SeriesError(
            "there is no commit between the base and the engine's HEAD",
            "commit your change in build/engine first; to drop the whole series, "
            "remove patches/ and the mirror by hand",
        )
    for commit in found:
        problem = message_problem(commit)
        if problem:
            raise SeriesError(
                f"{commit.id[:12]} `{commit.subject}`: {problem[0]}",
                f"{problem[1]}: {_AMEND}",
            )
        if commit.files == 0:
            raise SeriesError(
                f"{commit.id[:12]} `{commit.subject}` changes nothing",
                f"drop it: {_AMEND}",
            )
    patches = format_series(git, base, tip, scratch)
    _prove(git, base, found, patches, scratch)
    return Series(patches, mirror_of(git, base, tip), found)


def _prove(
    git: Git, base: str, wanted: list[Commit], patches: dict[str, bytes], scratch: Path
) -> None:
    """git am of the patches must give each commit's tree, message and author."""
    folder = scratch / "formatted"
    again = scratch_checkout(git, scratch / "again", base)
    try:
        apply_patches(again, [folder / name for name in patches], fix=_AMEND)
    except PatchStopped as error:
        number = int(error.patch.name[:4])
        commit = wanted[number - 1]
        raise SeriesError(
            f"{commit.id[:12]} `{commit.subject}` does not survive git am:\n{error}",
            _AMEND,
        ) from None
    made = again.out("rev-list", "--reverse", f"{base}..HEAD").split()
    shape = "--format=%T%n%an%n%ae%n%ad%n%B"
    for commit, copy in zip(wanted, made, strict=True):
        one, two = (
            again.raw("log", "-1", "--date=raw", shape, item)
            for item in (commit.id, copy)
        )
        if one.rstrip(b"\n") != two.rstrip(b"\n"):
            raise SeriesError(
                f"{commit.id[:12]} `{commit.subject}` comes out of git am changed "
                "(its message has lines that mail cannot carry)",
                f"reword the message in plain prose: {_AMEND}",
            )


def seal_text(patches: dict[str, bytes]) -> str:
    """patches.sha256. Without it an edited message would still be a sound patch."""
    return "".join(
        f"{hashlib.sha256(data).hexdigest()}  patches/{name}\n"
        for name, data in sorted(patches.items())
    )


def series_changes(project: Project, series: Series) -> list[Change]:
    """What makes patches/, its seal and the mirror equal to ``series``."""
    changes: list[Change] = []
    for name, data in series.patches.items():
        _want(changes, project.patches / name, data, 0o644)
    for name in patch_folder(project.patches)[0]:
        if name not in series.patches:
            changes.append(Change(project.patches / name, None))
    _want(changes, project.seal, seal_text(series.patches).encode(), 0o644)
    for path, (mode, data) in series.mirror.items():
        _want(changes, project.root / path, data, int(mode, 8) & 0o777)
    for path, file in mirror_files(project.root).items():
        if path not in series.mirror:
            changes.append(Change(file, None))
    return changes


def write_changes(project: Project, changes: list[Change]) -> list[str]:
    """Make all changes or none; returns the changed paths."""
    if changes:
        transaction = Transaction(project.build / "export", project.root)
        transaction.run(changes)
        transaction.drop()
    for change in changes:
        if change.data is None:
            _remove_empty(change.path.parent, stop=project.root)
    return [change.path.relative_to(project.root).as_posix() for change in changes]


def finish_interrupted(project: Project) -> None:
    """Undo an export that was killed; a finished one only loses its store."""
    transaction = Transaction(project.build / "export", project.root)
    if transaction.state() == "done":
        transaction.drop()
    elif transaction.store.exists():
        transaction.roll_back()


def _want(changes: list[Change], path: Path, data: bytes, mode: int) -> None:
    if path.is_file() and not path.is_symlink():
        same_bit = (path.stat().st_mode & 0o100) == (mode & 0o100)
        if same_bit and path.read_bytes() == data:
            return
    changes.append(Change(path, data, mode))


def _remove_empty(folder: Path, stop: Path) -> None:
    while folder != stop:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
