"""Which folder an arm's engine is imported from, and its digest."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from .config import Arm, Config
from .digest import folder_digest
from .errors import BenchError, CheckFailed


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """An importable engine tree."""

    python_path: str  # folder to put on PYTHONPATH
    package: str  # folder of the sglang package in it
    digest: str
    files: int
    commit: str = ""  # commit it was exported from, "" for a folder as it lies


def git(repository: Path, *arguments: str) -> str:
    """Output of a git command; BenchError with git's own words when it fails."""
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise BenchError(
            f"git {' '.join(arguments)} in {repository}: {done.stderr.strip()}"
        )
    return done.stdout.strip()


def package_of(engine: Path) -> Path:
    """The sglang package in a repository, a python folder, or itself."""
    for place in (engine / "python" / "sglang", engine / "sglang", engine):
        if place.name == "sglang" and (place / "__init__.py").is_file():
            return place.resolve()
    raise BenchError(
        f"no sglang package under {engine}; give the folder that holds python/sglang"
    )


def export(repository: Path, commit: str, scratch: Path) -> Path:
    """Writes one commit into SCRATCH/trees/COMMIT and links the compiled extensions.

    The extensions are not in git: they come from the repository's own folder.
    Returns the folder; one that is complete already is used as it is.
    """
    target = scratch / "trees" / commit
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{commit}.", dir=target.parent))
    try:
        archive = subprocess.Popen(
            ["git", "-C", str(repository), "archive", "--format=tar", commit],
            stdout=subprocess.PIPE,
        )
        unpack = subprocess.run(["tar", "-x", "-C", partial], stdin=archive.stdout)
        archive.stdout.close()
        if archive.wait() or unpack.returncode:
            raise BenchError(
                f"cannot export {commit} of {repository}; see git's message"
            )
        ignored = git(
            repository, "ls-files", "-z", "--others", "--ignored", "--exclude-standard"
        )
        for name in filter(None, ignored.split("\0")):
            if name.endswith((".so", ".co")) and not (partial / name).exists():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).symlink_to((repository / name).resolve())
        try:
            os.rename(partial, target)
        except OSError:
            if not target.is_dir():  # another harness may have been quicker
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def resolve(name: str, arm: Arm, scratch: Path) -> Tree:
    """The tree an arm's settings name. Raises BenchError when they fit none."""
    engine = Path(arm.engine).expanduser()
    package = package_of(engine)
    commit = ""
    if arm.patches is not None or arm.revision:
        try:
            top = Path(git(engine, "rev-parse", "--show-toplevel"))
        except BenchError as error:
            raise BenchError(
                f"arm {name}: {engine} is no git repository, so patches and revision"
                f" mean nothing there; leave them out ({error})"
            ) from error
        root = git(top, "rev-list", "--max-parents=0", "HEAD").splitlines()[-1]
        head = git(top, "rev-parse", "HEAD")
        if arm.patches and head == root:
            raise BenchError(
                f"arm {name}: patches = true, but {engine} has no commit above its base;"
                " apply the series first"
            )
        if arm.patches and git(top, "status", "--porcelain", "--", str(package)):
            print(
                f"warning: arm {name}: {package} differs from its commit; it is"
                " measured as it lies"
            )
        if arm.revision:
            commit = git(top, "rev-parse", f"{arm.revision}^{{commit}}")
        elif not arm.patches:
            _refuse_history(name, top, root)
            commit = root
        if commit:
            package = package_of(export(top, commit, scratch))
    digest, files = folder_digest(package)
    return Tree(
        python_path=str(package.parent),
        package=str(package),
        digest=digest,
        files=files,
        commit=commit,
    )


def _refuse_history(name: str, top: Path, root: str) -> None:
    """Raises BenchError when what lies on the root commit is not the series.

    In upstream's own repository, shallow or not, the root is some older commit.
    """
    above = git(top, "rev-list", "--reverse", f"{root}..HEAD").splitlines()
    if above and "Upstream-Status:" not in git(
        top, "log", "-1", "--format=%B", above[0]
    ):
        raise BenchError(
            f"arm {name}: patches = false means the root commit {root[:12]} of {top}, but"
            " the commit on it is not of the series (no Upstream-Status line); name the"
            ' base with revision, as in revision = "v0.5.23"'
        )


def resolve_all(config: Config, names: list[str]) -> dict[str, Tree]:
    """Trees of the named arms that the harness starts itself.

    Raises CheckFailed when two of them hold the same text without saying so.
    """
    scratch = Path(config.scratch).expanduser().resolve()
    found = {
        name: resolve(name, config.arms[name], scratch)
        for name in names
        if config.arms[name].engine
    }
    refuse_twins(config, {name: tree.digest for name, tree in found.items()})
    return found


def refuse_twins(config: Config, digests: dict[str, str]) -> None:
    """Raises CheckFailed when arms that should differ have one digest."""
    for name, digest in digests.items():
        for other, other_digest in digests.items():
            stated = (
                config.arms[name].same_tree_as == other
                or config.arms[other].same_tree_as == name
            )
            if name < other and digest == other_digest and not stated:
                raise CheckFailed(
                    f"arms {name} and {other} run the same tree (digest {digest[:12]}):"
                    " the comparison would show nothing. Point one of them at the other"
                    f" tree, or state it: same_tree_as = {other!r} in arms.{name}"
                )
