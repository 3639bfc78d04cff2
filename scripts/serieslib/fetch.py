"""Fetch a wheel with pip, exactly as the user's pip is configured, and check it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from serieslib.errors import SeriesError
from serieslib.gitio import tail
from serieslib.project import Project, cache_root, file_lock, say, sha256_file


def wheel_tag(wheels: dict) -> str:
    """The running interpreter's wheel; where it has none, the newest pinned one.

    Any of them gives the same text tree; only the compiled extensions differ.
    """
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return mine if mine in wheels else max(wheels)


def pinned_wheel(project: Project) -> Path:
    """The pinned wheel from the cache or from pip; its sha256 is right on return."""
    upstream = project.upstream
    tag = wheel_tag(upstream.wheels)
    name, digest = upstream.wheels[tag]
    folder = writable_folder(cache_root() / "wheels", project.build / "wheels")
    with file_lock(folder / "lock", what="series.py fetching a wheel"):
        target = folder / name
        if target.is_file():
            if sha256_file(target) == digest:
                return target
            say(f"{target} is damaged; fetching it again")
        for stale in folder.glob(".fetch-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            requirement = f"{upstream.name}=={upstream.version}"
            links = find_links(project)
            found = pip_download(requirement, tag, Path(scratch), links)
            actual = sha256_file(found)
            if actual != digest:
                raise SeriesError(
                    f"{found.name} from the package index is not the pinned file:\n"
                    f"    expected sha256 {digest}\n    received sha256 {actual}",
                    "run `python3 -m pip cache purge` and try again; if it stays so, "
                    "your index serves another build: name another with PIP_INDEX_URL",
                )
            os.replace(found, target)
    return target


def writable_folder(wanted: Path, fallback: Path) -> Path:
    """``wanted`` when it can be made and written to (read-only homes), else fallback."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback


def pip_download(
    requirement: str, tag: str, folder: Path, links: str | None = None
) -> Path:
    """`pip download --no-deps` of one wheel for interpreter ``tag`` (like cp311)."""
    say(f"fetching {requirement} ({tag}) with pip ...")
    version = f"{tag[2]}.{tag[3:]}"
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--python-version", version,
        "--implementation", "cp", "--abi", tag, "--abi", "none",
        "--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64",
        "--platform", "manylinux2014_x86_64", "--platform", "any",
        "--no-input", "--dest", str(folder), requirement,
    ]
    # fmt: on
    if links:
        command += ["--no-index", "--find-links", links]
    if not sys.stderr.isatty():
        command += ["--progress-bar", "off"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        if b"No module named pip" in done.stderr:
            raise SeriesError(
                f"{sys.executable} has no pip",
                "run `python3 -m ensurepip`, or install your system's python3-pip",
            )
        raise SeriesError(
            f"pip could not fetch {requirement} (exit {done.returncode}):\n"
            + tail(done.stderr or done.stdout, lines=6),
            "check the network and pip's index (`python3 -m pip config list`), then "
            "run the same command again; nothing half-made was left behind",
        )
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise SeriesError(
            f"pip left {len(found)} wheels for {requirement}, not one",
            "upgrade pip: `python3 -m pip install --upgrade pip`",
        )
    return found[0]


def find_links(project: Project) -> str | None:
    """UPSTREAM's optional `find-links` folder, relative to the project."""
    value = project.upstream.find_links
    return str(project.root / value) if value else None
