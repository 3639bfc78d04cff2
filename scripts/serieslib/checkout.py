"""apply --checkout: the series onto the user's own checkout, whole or not at all."""

import os
from pathlib import Path

from serieslib.am import apply_patches, roll_back
from serieslib.errors import USAGE, SeriesError
from serieslib.gitio import Git, scratch_checkout
from serieslib.patchfile import blob_id, file_states
from serieslib.project import Project, say

State = dict[str, str | None]


def apply_to_checkout(project: Project, folder: Path) -> str:
    """Fast-forward the checkout to HEAD + series; returns a line that says what was done.

    The patches are applied in a scratch work tree first, so the user's files are
    touched only when every one of them fits.
    """
    patches = project.list_patches()
    if not patches:
        raise SeriesError("patches/ is empty: nothing to apply", "see README.md", USAGE)
    git = _open(folder)
    _end_our_am(git, patches)
    states = file_states(patches)
    head = _head_state(git, list(states[-1]))
    if head == states[-1]:
        return f"already applied: {folder} has all {len(patches)} patches"
    _undo_our_half(git, states[-1])
    _refuse_dirty(git, states[-1], head)
    done = max((n for n, state in enumerate(states) if state == head), default=None)
    with project.scratch("checkout") as scratch:
        tree = scratch_checkout(git, scratch / "tree", git.out("rev-parse", "HEAD"))
        if done is None:
            if _reverses(tree, patches):
                return f"already applied, with other changes on top: {folder}"
            raise _wrong_base(project, git, states[0], head)
        if done:
            say(f"{done} of {len(patches)} patches are in HEAD; adding the others")
        fix = "restore the patch with `git checkout -- patches`"
        tip = apply_patches(tree, patches[done:], fix)
        git.raw("fetch", "--quiet", "--no-tags", str(tree.folder), tip)
        git.raw(
            "-c", "submodule.recurse=false", "merge", "--quiet", "--ff-only",
            "--no-verify-signatures", "--no-autostash", "--no-stat", tip,
        )  # fmt: skip
    return f"applied {len(patches) - done} patches to {folder}, HEAD is now {tip[:12]}"


def _open(folder: Path) -> Git:
    fix = "name the top folder of a git checkout of SGLang"
    if not folder.is_dir():
        raise SeriesError(f"there is no folder {folder}", fix, USAGE)
    git = Git(folder)
    if not (folder / ".git").exists() or git.resolve("HEAD") is None:
        raise SeriesError(f"{folder} is not the top of a git checkout", fix, USAGE)
    return git


def _end_our_am(git: Git, patches: list[Path]) -> None:
    """Roll back a stopped `git am` of this series; anybody else's is left alone."""
    for name in ("rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if git.git_path(name).exists():
            raise SeriesError(
                f"a git operation is in progress in {git.folder} ({name})",
                "finish or abort it (`git status` there says how)",
            )
    folder = git.git_path("rebase-apply")
    if not folder.exists():
        return
    # git am keeps the mails it was given as 0001, 0002, ...; a rebase has no `applying`.
    ours = {_diff_part(path.read_bytes()) for path in patches}
    mails = sorted(path for path in folder.iterdir() if path.name.isdigit())
    if (folder / "rebasing").exists() or not mails:
        mine = False
    else:
        mine = all(_diff_part(path.read_bytes()) in ours for path in mails)
    if not mine:
        raise SeriesError(
            f"a git am or rebase that is not this series is in progress in {git.folder}",
            "finish or abort it (`git status` there says how)",
        )
    roll_back(git)
    say("rolled back a half-applied series (git am had stopped in it)")


def _diff_part(mail: bytes) -> bytes:
    """A patch from its first diff on, without trailing blank lines."""
    return mail[mail.find(b"\ndiff --git ") :].rstrip()


def _head_state(git: Git, paths: list[str]) -> State:
    state: State = dict.fromkeys(paths)
    for row in git.lines("ls-tree", "-r", "-z", "HEAD", "--", *paths):
        meta, path = row.split("\t", 1)
        if path in state:
            state[path] = meta.split()[2]
    return state


def _on_disk(git: Git, path: str) -> str | None:
    file = git.folder / path
    return blob_id(file.read_bytes()) if file.is_file() else None


def _undo_our_half(git: Git, last: State) -> None:
    """Put back files that an interrupted apply left at the series' own last version.

    Only when nothing else is dirty, so that no line of the user's is lost.
    """
    dirty = [item[3:] for item in git.dirty_files(untracked=True)]
    dirty = [path for path in dirty if path in last or _tracked(git, path)]
    if not dirty or any(
        path not in last or _on_disk(git, path) != last[path] for path in dirty
    ):
        return
    for path in dirty:
        if _tracked(git, path):
            git.raw("checkout", "--quiet", "HEAD", "--", path)
        else:
            git.run("rm", "--quiet", "--cached", "--ignore-unmatch", "--", path)
            (git.folder / path).unlink(missing_ok=True)
    say(f"rolled back a half-applied series ({len(dirty)} files)")


def _tracked(git: Git, path: str) -> bool:
    return git.run("cat-file", "-e", f"HEAD:{path}").returncode == 0


def _refuse_dirty(git: Git, last: State, head: State) -> None:
    dirty = git.dirty_files(untracked=False)
    dirty += [
        f"?? {path}"
        for path in last
        if head[path] is None and os.path.lexists(git.folder / path)
    ]
    if dirty:
        raise SeriesError(
            f"{git.folder} has changes of its own:\n    " + "\n    ".join(dirty[:30]),
            "commit them or put them away with `git stash -u`, then run this again",
        )


def _reverses(tree: Git, patches: list[Path]) -> bool:
    """Whether every patch, last first, comes off the tree cleanly."""
    return all(
        tree.run("apply", "--index", "--reverse", str(patch.absolute())).returncode == 0
        for patch in reversed(patches)
    )


def _wrong_base(project: Project, git: Git, first: State, head: State) -> SeriesError:
    differ = [path for path, blob in first.items() if head[path] != blob]
    named = git.run("describe", "--tags", "--always", "HEAD").stdout.decode().strip()
    version = project.upstream.version
    shown = "\n    ".join(differ[:10])
    return SeriesError(
        f"wrong base: {git.folder} is at {named}, the series needs sglang {version}; "
        f"{len(differ)} of the files that it touches differ:\n    {shown}",
        f"`git -C {git.folder} checkout v{version}` and run this again; "
        "`series.py rebase` says how the series stands on another release",
    )
