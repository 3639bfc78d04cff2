"""install / uninstall: patch an installed release in place, and put it back exactly.

Everything that a roll-back needs lies in a folder of ours inside the .dist-info, next
to the RECORD that lists it, so `pip uninstall` removes the patched package whole.
"""

import base64
import csv
import fcntl
import hashlib
import io
import json
import os
import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from serieslib.errors import USAGE, SeriesError
from serieslib.gitio import tail
from serieslib.patchfile import apply_file, blob_id, read_patch
from serieslib.project import CACHE_NAME, Project, say
from serieslib.txn import JOURNAL, Change, Transaction

# Finds the package as an importing process would, without importing it.
_PROBE = """
import importlib.metadata, importlib.util, json, os, sys
name = sys.argv[1]
found = {"prefix": sys.prefix}
try:
    dist = importlib.metadata.distribution(name)
    found["version"] = dist.version
    found["root"] = str(dist.locate_file(""))
    found["info"] = str(getattr(dist, "_path", ""))
    found["direct_url"] = dist.read_text("direct_url.json")
except importlib.metadata.PackageNotFoundError:
    pass
spec = importlib.util.find_spec(name)
found["origin"] = spec and spec.origin and os.path.dirname(spec.origin)
print()
print("series-probe:" + json.dumps(found))
"""


@dataclass(frozen=True)
class Target:
    """An installed release: site-packages and its .dist-info folder."""

    root: Path
    info: Path

    @property
    def record(self) -> Path:
        return self.info / "RECORD"

    @property
    def transaction(self) -> Transaction:
        return Transaction(self.info / CACHE_NAME, self.root)


def find_target(project: Project, python: str) -> Target:
    """Where ``python`` has the release; refuses what cannot be patched in place."""
    name, version = project.upstream.name, project.upstream.version
    if os.sep in python:
        # The probe runs in /. Links are kept: a venv's python is one.
        python = os.path.abspath(os.path.expanduser(python))
    pip = f"`{python} -m pip install {name}=={version}`"
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE, name], capture_output=True, cwd="/"
        )
    except OSError as error:
        raise SeriesError(
            f"cannot run {python}: {error.strerror}",
            "name the interpreter that runs SGLang with --python",
            USAGE,
        ) from None
    # Start-up files of that interpreter may print too.
    answer = re.search(rb"^series-probe:(.*)$", done.stdout, re.MULTILINE)
    if done.returncode or answer is None:
        output = tail(done.stderr + b"\n" + done.stdout)
        raise SeriesError(
            f"{python} could not say where {name} is:\n{output}",
            "name a Python 3.11 or 3.12 interpreter with --python",
        )
    found = json.loads(answer[1])
    if "version" not in found:
        raise SeriesError(
            f"{name} is not installed in {found['prefix']}",
            f"{pip}, or name the interpreter that runs SGLang with --python",
        )
    root, info = Path(found["root"]).resolve(), Path(found["info"]).resolve()
    direct = json.loads(found["direct_url"] or "{}")
    package, origin = root / name, found["origin"]
    editable = direct.get("dir_info", {}).get("editable") or info.suffix == ".egg-info"
    if editable:
        raise SeriesError(
            f"{name} in {found['prefix']} is an editable install of "
            f"{direct.get('url') or origin}",
            "patch that checkout instead: `series.py apply --checkout DIR`",
        )
    if found["version"] != version:
        raise SeriesError(
            f"{name} {found['version']} is installed in {found['prefix']}, the series "
            f"is for {version}",
            f"{pip}; `series.py rebase --onto {found['version']}` says how the series "
            "stands on yours",
        )
    if origin is None or Path(origin).resolve() != package:
        raise SeriesError(
            f"`import {name}` does not take {package} but {origin}",
            "drop the PYTHONPATH entry or the folder that hides the installed one",
        )
    if not (info / "RECORD").is_file() or not (info / "INSTALLER").is_file():
        raise SeriesError(
            f"{root} is no installation but an unpacked wheel, such as build/engine",
            f"drop it from PYTHONPATH, or install the release: {pip}",
        )
    return Target(root, info)


def install(project: Project, python: str) -> str:
    """Patch the release that ``python`` imports; returns what was done."""
    patches = project.list_patches()
    if not patches:
        raise SeriesError(
            "patches/ is empty: nothing to install", "see README.md", USAGE
        )
    target = find_target(project, python)
    with _locked(target):
        _finish_interrupted(target)
        transaction = target.transaction
        journal = transaction.read()
        if journal is not None:
            return _already(project, target, journal)
        changes = _series_changes(project, target)
        changes += _stale_bytecode(target, changes)
        changes.append(Change(target.record, _new_record(target, changes)))
        _require_writable(target, changes)
        installed = {
            change.path.relative_to(target.root).as_posix(): _digest(change.data)
            for change in changes
            if change.data is not None
        }
        series = _series_digest(patches)
        transaction.run(changes, installed=installed, series=series)
        transaction.drop_new()
    return (
        f"installed {len(patches)} patches into {target.root} ({len(installed) - 1} "
        "files); restart running servers. `series.py uninstall` takes them out again"
    )


def uninstall(project: Project, python: str) -> str:
    """Put every file back, byte for byte; returns what was done."""
    target = find_target(project, python)
    with _locked(target):
        if _finish_interrupted(target):
            return f"{target.root} is as it was before the interrupted run"
        transaction = target.transaction
        journal = transaction.read()
        if journal is None:
            return f"the series is not installed in {target.root}: nothing to do"
        edited = _edited(target, journal)
        if edited:
            raise SeriesError(
                "changed since the series was installed:\n    " + "\n    ".join(edited),
                "put your changes elsewhere, then `python -m pip install --no-deps "
                f"--force-reinstall {project.upstream.name}=={project.upstream.version}`",
            )
        entries = [Change(target.root / e["path"], None) for e in journal["entries"]]
        _require_writable(target, entries)
        for path in journal["installed"]:
            for cached in _bytecode(target.root / path):
                cached.unlink()
        for folder in journal["folders"]:
            cache = target.root / folder / "__pycache__"
            if cache.is_dir() and not any(cache.iterdir()):
                cache.rmdir()
        transaction.roll_back()
    return f"{target.root} is the released {project.upstream.version} again"


@contextmanager
def _locked(target: Target) -> Iterator[None]:
    """One install or uninstall at a time; the folder itself is locked, no file made."""
    handle = os.open(target.info, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another install or uninstall ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _finish_interrupted(target: Target) -> bool:
    """Roll back what a killed run left; whether there was something."""
    transaction = target.transaction
    if not transaction.store.exists() or transaction.state() == "done":
        return False
    if transaction.state() == "open":
        say("an interrupted install or uninstall was found; putting the files back")
    transaction.roll_back()
    return True


def _already(project: Project, target: Target, journal: dict) -> str:
    if journal["series"] != _series_digest(project.list_patches()):
        raise SeriesError(
            f"another version of the series is installed in {target.root}",
            "run `series.py uninstall` first, then install again",
        )
    edited = _edited(target, journal)
    if edited:
        raise SeriesError(
            "the series is installed, and these files were changed since:\n    "
            + "\n    ".join(edited),
            "put them back, or reinstall the release with pip and install again",
        )
    return f"already installed in {target.root}: nothing to do"


def _edited(target: Target, journal: dict) -> list[str]:
    """Installed files that are not as this tool left them."""
    return [
        path
        for path, digest in journal["installed"].items()
        if not (target.root / path).is_file()
        or _digest((target.root / path).read_bytes()) != digest
    ]


def _series_changes(project: Project, target: Target) -> list[Change]:
    """The package's files after the series; every one must be the pinned one before."""
    content: dict[str, bytes | None] = {}
    modes: dict[str, int | None] = {}
    foreign = []
    for path in project.list_patches():
        for patch in read_patch(path):
            name = patch.path
            if not name.startswith("python/") or name in foreign:
                continue
            if name not in content:
                file = target.root / name.removeprefix("python/")
                content[name] = file.read_bytes() if file.is_file() else None
                modes[name] = None
                data = content[name]
                have = None if data is None else blob_id(data)
                if have != patch.old:
                    foreign.append(name)
                    continue
            content[name] = apply_file(content[name], patch, f"patches/{path.name}")
            if patch.mode:
                modes[name] = int(patch.mode, 8) & 0o777
    if foreign:
        version = f"{project.upstream.name}=={project.upstream.version}"
        raise SeriesError(
            f"not as released in {project.upstream.version}:\n    "
            + "\n    ".join(
                str(target.root / n.removeprefix("python/")) for n in foreign
            ),
            f"`python -m pip install --no-deps --force-reinstall {version}`, then "
            "install again",
        )
    return [
        Change(target.root / name.removeprefix("python/"), data, modes[name])
        for name, data in content.items()
    ]


def _bytecode(source: Path) -> list[Path]:
    """Compiled forms of one source file, for every interpreter and level."""
    if source.suffix != ".py":
        return []
    return sorted((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"))


def _stale_bytecode(target: Target, changes: list[Change]) -> list[Change]:
    """Deletions, so that no unchecked bytecode of the old source can be used."""
    return [
        Change(cached, None) for change in changes for cached in _bytecode(change.path)
    ]


def _new_record(target: Target, changes: list[Change]) -> bytes:
    """RECORD with the new digests, the new files, and our own store."""
    wanted = {
        change.path.relative_to(target.root).as_posix(): change for change in changes
    }
    rows = []
    with open(target.record, encoding="utf-8", newline="") as handle:
        for row in csv.reader(handle):
            change = wanted.pop(row[0], None) if row else None
            if change is None or row[0].endswith(".pyc"):
                rows.append(row)
            elif change.data is not None:
                rows.append(_record_row(row[0], change.data))
    for name, change in wanted.items():
        if change.data is not None:
            rows.append(_record_row(name, change.data))
    store = target.transaction.store.relative_to(target.root).as_posix()
    kept = [f"{n}.old" for n, change in enumerate(changes) if change.path.is_file()]
    for name in [JOURNAL, *kept, f"{len(changes)}.old"]:
        rows.append([f"{store}/{name}", "", ""])
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _record_row(name: str, data: bytes) -> list[str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return [name, f"sha256={digest.decode()}", str(len(data))]


def _require_writable(target: Target, changes: list[Change]) -> None:
    """Before anything is touched: every folder that files are replaced in."""
    folders = {target.info}
    for change in changes:
        folder = change.path.parent
        while not folder.exists():
            folder = folder.parent
        folders.add(folder)
    locked = sorted(str(folder) for folder in folders if not os.access(folder, os.W_OK))
    if locked:
        raise SeriesError(
            "cannot write to:\n    " + "\n    ".join(locked[:5]),
            "run it as the owner of the installation, or install the release into a "
            "virtual environment of your own and name its interpreter with --python",
        )


def _series_digest(patches: list[Path]) -> str:
    return _digest(b"".join(path.read_bytes() for path in patches))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
