"""build/engine: what it holds, whether it may be replaced, and apply and export."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from serieslib.am import Commit, added_files, apply_patches, commits
from serieslib.base import lay_out
from serieslib.errors import SeriesError
from serieslib.export import (
    Series,
    build_series,
    finish_interrupted,
    series_changes,
    write_changes,
)
from serieslib.gitio import Git
from serieslib.project import Project, mirror_files, patch_folder, sha256_file

STATE = "series-state.json"
_DROP = "drop it with `python3 scripts/series.py apply --discard`"


@dataclass(frozen=True)
class EngineState:
    """What the last apply or export left: base, tip and the patches' sha256."""

    base: str
    tip: str
    patches: dict[str, str]


def read_state(engine: Path) -> EngineState | None:
    """None when build/engine was not made by this tool, or only in part."""
    try:
        values = json.loads((engine / ".git" / STATE).read_text(encoding="utf-8"))
        return EngineState(**values)
    except (OSError, ValueError, TypeError):
        return None


def write_state(engine: Path, base: str, tip: str, patches: dict[str, str]) -> None:
    target = engine / ".git" / STATE
    temporary = target.with_suffix(".tmp")
    values = {"base": base, "tip": tip, "patches": patches}
    temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
    os.replace(temporary, target)


def patch_digests(project: Project) -> dict[str, str]:
    names, _ = patch_folder(project.patches)
    return {name: sha256_file(project.patches / name) for name in names}


def unsaved_work(git: Git, state: EngineState) -> list[str]:
    """Everything in build/engine that exists nowhere else, one line each."""
    work = [f"changed file: {item}" for item in git.dirty_files()]
    for name in ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if git.git_path(name).exists():
            work.append(f"git operation in progress: {name}")
    ids = git.out("rev-list", "--all", "HEAD", "--not", state.tip).split()
    for commit in ids[:20]:
        work.append(f"commit not exported: {git.out('log', '-1', '--oneline', commit)}")
    return work


def apply(project: Project, discard: bool) -> tuple[str, list[Commit], bool]:
    """Bring build/engine to base + patches. Returns (tip, commits, was it made new)."""
    finish_interrupted(project)
    patches = project.list_patches()
    digests = patch_digests(project)
    engine, base = project.engine, project.upstream.base_commit
    if engine.exists() and not discard:
        state = read_state(engine)
        if state is None:
            raise SeriesError(
                f"{engine} was not made by `series.py apply`",
                f"move it away, or {_DROP}",
            )
        git = Git(engine)
        work = unsaved_work(git, state)
        if work:
            raise SeriesError(
                f"{engine} holds work that apply would lose:\n    "
                + "\n    ".join(work),
                "keep it by committing and `python3 scripts/series.py export`, or "
                + _DROP,
            )
        at_tip = git.out("rev-parse", "HEAD") == state.tip
        if at_tip and state.base == base and state.patches == digests:
            return state.tip, commits(git, base), False
    with project.scratch("apply") as scratch:
        git = lay_out(scratch / "engine", project)
        fix = (
            "restore the patch with `git checkout -- patches`; to move the series to "
            "another release see `series.py rebase`"
        )
        tip = apply_patches(git, patches, fix)
        write_state(git.folder, base, tip, digests)
        if engine.exists():
            os.rename(engine, scratch / "old")
        os.rename(git.folder, engine)
    return tip, commits(Git(engine), base), True


def export(project: Project, overwrite: bool) -> tuple[Series, list[str]]:
    """build/engine's commits to patches/ and mirror. Returns the changed paths too."""
    finish_interrupted(project)
    engine = project.engine
    state = read_state(engine)
    if state is None:
        raise SeriesError(
            f"there is no engine at {engine}",
            "run `python3 scripts/series.py apply` and commit your change there",
        )
    git = Git(engine)
    dirty = [item for item in unsaved_work(git, state) if "not exported" not in item]
    if dirty:
        raise SeriesError(
            f"{engine} has uncommitted changes:\n    " + "\n    ".join(dirty),
            "commit them, or drop them with `git -C build/engine stash -u`",
        )
    _, strays = patch_folder(project.patches)
    if strays:
        raise SeriesError(
            "patches/ holds what is no numbered patch: " + ", ".join(strays),
            "move it out of patches/",
        )
    if state.base != project.upstream.base_commit:
        raise SeriesError(
            f"the engine's base is {state.base[:12]}, UPSTREAM pins "
            f"{project.upstream.base_commit[:12]}",
            "run `python3 scripts/series.py apply` first (it says what it would lose)",
        )
    if not overwrite:
        _refuse_foreign_edits(project, git, state)
    tip = git.out("rev-parse", "HEAD")
    with project.scratch("export") as scratch:
        series = build_series(git, state.base, tip, scratch)
    changed = write_changes(project, series_changes(project, series))
    write_state(engine, state.base, tip, patch_digests(project))
    return series, changed


def _refuse_foreign_edits(project: Project, git: Git, state: EngineState) -> None:
    """patches/ and mirror must be what the engine was made from, else edits are lost."""
    now = patch_digests(project)
    edited = [
        f"patches/{name}"
        for name in sorted(now.keys() | state.patches.keys())
        if now.get(name) != state.patches.get(name)
    ]
    known = added_files(git, state.base, state.tip)
    for path, file in mirror_files(project.root).items():
        if path not in known or file.read_bytes() != known[path][1]:
            edited.append(path)
    if edited:
        raise SeriesError(
            "changed since the engine was made, and export would overwrite it:\n    "
            + "\n    ".join(edited),
            "take them back with `git checkout -- patches python test`, or overwrite "
            "them with `export --overwrite`; to take new patches into the engine "
            "instead, run `apply`",
        )
