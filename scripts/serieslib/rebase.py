"""rebase: how the series stands on another release, and, when asked, move it there."""

import re
import zipfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from serieslib.am import am_message, apply_patches, roll_back
from serieslib.base import (
    Files,
    base_repository,
    base_title,
    commit_base,
    read_wheel,
    text_files,
    text_tree_digest,
)
from serieslib.engine import read_state, unsaved_work
from serieslib.errors import USAGE, SeriesError
from serieslib.export import (
    build_series,
    finish_interrupted,
    series_changes,
    write_changes,
)
from serieslib.fetch import find_links, pip_download, wheel_tag
from serieslib.gitio import Git, scratch_checkout
from serieslib.project import Project, Upstream, sha256_file
from serieslib.txn import Change

CLEAN, MERGED, CONFLICT, PRESENT = "clean", "3-way", "conflict", "already there"


@dataclass
class Standing:
    """One patch on the other release. ``files`` are those in conflict."""

    name: str
    verdict: str
    files: list[str] = field(default_factory=list)
    detail: str = ""


def rebase(project: Project, onto: str, write: bool) -> tuple[str, list[Standing]]:
    """(version, standing of each patch); with ``write`` and no conflict, also moves.

    Without ``write`` nothing outside build/'s scratch folder is changed.
    """
    if onto != "latest" and not re.fullmatch(r"[0-9][0-9A-Za-z.!+]*", onto):
        raise SeriesError(
            f"{onto!r} is no version", "give one like 0.5.22, or `latest`", USAGE
        )
    finish_interrupted(project)
    patches = project.list_patches()
    if not patches:
        raise SeriesError("patches/ is empty: nothing to try", "see README.md", USAGE)
    with project.scratch("rebase") as scratch:
        wheel = _fetch(project, onto, scratch)
        version = wheel.name.split("-")[1]
        target = _target(project, version, wheel)
        source = base_repository(project)
        tree = scratch_checkout(source, scratch / "tree", project.upstream.base_commit)
        # The series on its own base: 3-way merging needs the files it started from.
        apply_patches(tree, patches, fix="make `series.py check` green first")
        files = text_files(read_wheel(wheel), project.upstream.name)
        commit = commit_base(tree, files, target, base_title(version))
        tree.raw("reset", "--hard", "--quiet", commit)
        standings = [_try(tree, patch) for patch in patches]
        if write:
            _refuse_write(project, standings)
            _write(project, tree, target, wheel, commit, files, scratch)
    return version, standings


def _fetch(project: Project, onto: str, scratch: Path) -> Path:
    name = project.upstream.name
    requirement = name if onto == "latest" else f"{name}=={onto}"
    folder = scratch / "wheel"
    folder.mkdir()
    tag = wheel_tag(project.upstream.wheels)
    return pip_download(requirement, tag, folder, find_links(project))


def _target(project: Project, version: str, wheel: Path) -> Upstream:
    """The pins of another release; its date is that of the newest file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        newest = max(info.date_time for info in archive.infolist())
    old = project.upstream
    return Upstream(
        name=old.name,
        version=version,
        text_tree_sha256="",
        base_commit="",
        author_name=old.author_name,
        author_mail=old.author_mail,
        timestamp=int(datetime(*newest, tzinfo=UTC).timestamp()),
        wheels={},
        find_links=old.find_links,
    )


def _try(tree: Git, patch: Path) -> Standing:
    """Commit one patch onto the tree when it fits; a conflict leaves it out."""
    before = tree.out("rev-parse", "HEAD")
    try:
        apply_patches(tree, [patch], fix="")
        return Standing(patch.name, CLEAN)
    except SeriesError:
        pass
    done = tree.run(
        "am", "--quiet", "--3way", "--keep-cr", "--no-scissors", "--no-gpg-sign",
        "--whitespace=nowarn", "--committer-date-is-author-date", str(patch.absolute()),
    )  # fmt: skip
    if done.returncode == 0:
        moved = tree.out("rev-parse", "HEAD") != before
        return Standing(patch.name, MERGED if moved else PRESENT)
    files = tree.lines("diff", "--name-only", "--diff-filter=U", "-z")
    message = (done.stderr + b"\n" + done.stdout).decode("utf-8", "replace")
    if not files:
        # Not even a merge was possible: the message names the files.
        files = re.findall(r"^error: (?:patch failed: )?(\S+?):", message, re.MULTILINE)
    roll_back(tree)
    return Standing(patch.name, CONFLICT, sorted(set(files)), am_message(done))


def _refuse_write(project: Project, standings: list[Standing]) -> None:
    conflicts = [s.name for s in standings if s.verdict in (CONFLICT, PRESENT)]
    if conflicts:
        raise SeriesError(
            "not written, these patches need a person: " + ", ".join(conflicts),
            "change or drop them in build/engine, export, and try again",
        )
    state = read_state(project.engine)
    if state is not None and (work := unsaved_work(Git(project.engine), state)):
        raise SeriesError(
            "not written, build/engine holds work:\n    " + "\n    ".join(work),
            "commit and export it first",
        )


def _write(
    project: Project,
    tree: Git,
    target: Upstream,
    wheel: Path,
    base: str,
    files: Files,
    scratch: Path,
) -> None:
    """Patches, mirror, UPSTREAM and the release's own pins, all in one step."""
    digest = text_tree_digest(files)
    pins = []
    for tag in sorted(project.upstream.wheels):
        other = wheel
        if f"-{tag}-" not in wheel.name:
            folder = scratch / tag
            folder.mkdir()
            requirement = f"{target.name}=={target.version}"
            other = pip_download(requirement, tag, folder, find_links(project))
            same = text_files(read_wheel(other), target.name)
            if text_tree_digest(same) != digest:
                raise SeriesError(
                    f"{other.name} and {wheel.name} hold different text files",
                    "drop one of the wheel- lines from UPSTREAM",
                )
        pins += [f"wheel-{tag}: {other.name}", f"sha256-{tag}: {sha256_file(other)}"]
    series = build_series(tree, base, tree.out("rev-parse", "HEAD"), scratch)
    changes = series_changes(project, series)
    upstream = project.root / "UPSTREAM"
    text = _new_upstream(
        upstream.read_text(encoding="utf-8"), target, pins, digest, base
    )
    changes.append(Change(upstream, text.encode()))
    old = f"{project.upstream.name}=={project.upstream.version}"
    for name in ("requirements.lock", "pyproject.toml"):
        path = project.root / name
        if path.is_file() and old in (content := path.read_text(encoding="utf-8")):
            new = content.replace(old, f"{target.name}=={target.version}")
            changes.append(Change(path, new.encode()))
    write_changes(project, changes)


def _new_upstream(
    text: str, target: Upstream, pins: list[str], digest: str, base: str
) -> str:
    """UPSTREAM with its values replaced line by line, its comments kept."""
    when = datetime.fromtimestamp(target.timestamp, UTC).isoformat()
    values = dict(pin.split(": ", 1) for pin in pins) | {
        "version": target.version,
        "tag": f"v{target.version}",
        "text-tree-sha256": digest,
        "base-commit": base,
        "base-date": when,
    }
    lines = []
    for line in text.splitlines():
        key = line.partition(":")[0].strip()
        lines.append(f"{key}: {values[key]}" if key in values else line)
    return "\n".join(lines) + "\n"
