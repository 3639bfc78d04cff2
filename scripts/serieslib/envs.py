"""The engine environment: a venv in the user's cache folder, made once for its pins."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serieslib.errors import SeriesError
from serieslib.fetch import writable_folder
from serieslib.gitio import tail
from serieslib.project import Project, cache_root, file_lock, say

LOCK = "requirements.lock"
MARKER = "complete"
NEEDED_BYTES = 14 * 2**30
# These share folders such as nvidia/, so one pip process installs all of them.
_SHARED = ("nvidia", "cuda", "torch", "triton", "nccl", "nvshmem")


def locked_pins(project: Project) -> list[str]:
    """The `name==version` lines of requirements.lock; the wheel's pin must be there."""
    path = project.root / LOCK
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SeriesError(
            f"{path} is missing", f"restore it with `git checkout -- {LOCK}`"
        ) from None
    pins = [line.strip() for line in lines if line.strip() and line[0] != "#"]
    wanted = f"{project.upstream.name}=={project.upstream.version}"
    if wanted not in pins:
        raise SeriesError(
            f"{path} does not pin {wanted}, which UPSTREAM names",
            f"make {LOCK} and UPSTREAM agree",
        )
    return pins


def environment_python(project: Project) -> str:
    """An interpreter that the pinned wheels support: this one, else one on PATH."""
    tags = sorted(project.upstream.wheels, reverse=True)
    if f"cp{sys.version_info.major}{sys.version_info.minor}" in tags:
        return sys.executable
    for tag in tags:
        found = shutil.which(f"python{tag[2]}.{tag[3:]}")
        if found:
            return found
    names = " or ".join(f"python{tag[2]}.{tag[3:]}" for tag in tags)
    raise SeriesError(
        f"the engine's wheels do not support Python {platform.python_version()}",
        f"put {names} on PATH, or run this tool with it",
    )


def environment_folder(project: Project, python: str) -> Path:
    """Named by what decides the content: the pins, the interpreter and the machine."""
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info[:2], sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    text = "\n".join([*locked_pins(project), version, platform.machine()])
    name = f"env-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return writable_folder(cache_root(), project.build / "cache") / name


def find_environment(project: Project) -> Path | None:
    """The interpreter of the finished environment, None when there is none yet."""
    try:
        folder = environment_folder(project, environment_python(project))
    except SeriesError:
        return None
    python = folder / "bin" / "python"
    return python if (folder / MARKER).is_file() and python.exists() else None


def make_environment(project: Project) -> Path:
    """The interpreter of the environment, which is made first when it is missing.

    A folder without its marker is a half-made one and is made anew; a lock keeps two
    runs from making the same one.
    """
    base_python = environment_python(project)
    folder = environment_folder(project, base_python)
    with file_lock(
        folder.with_suffix(".lock"), what="series.py making the environment"
    ):
        python = folder / "bin" / "python"
        if (folder / MARKER).is_file() and python.exists():
            return python
        if folder.exists():
            say(f"{folder} is half-made; making it again")
            shutil.rmtree(folder)
        _require_space(folder.parent, project)
        say(f"making the engine environment in {folder} (once; several minutes)")
        _make_venv(base_python, folder)
        _install(folder, locked_pins(project))
        (folder / MARKER).touch()
    return python


def _require_space(folder: Path, project: Project) -> None:
    if len(locked_pins(project)) < 50:
        return
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SeriesError(
            f"{folder} has {free / 2**30:.1f} GiB free, the engine environment takes "
            f"about {NEEDED_BYTES / 2**30:.0f}",
            "free some space, or name another cache folder with XDG_CACHE_HOME",
        )


def _make_venv(python: str, folder: Path) -> None:
    done = subprocess.run([python, "-m", "venv", str(folder)], capture_output=True)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise SeriesError(
            f"`{python} -m venv` failed:\n{tail(done.stdout + done.stderr, lines=6)}",
            "install the interpreter's venv module (Debian: apt install python3-venv)",
        )


def _install(folder: Path, pins: list[str]) -> None:
    """pip install of exactly the pins, in two processes, with progress every 10 s."""
    shares: tuple[list[str], list[str]] = ([], [])
    for pin in pins:
        shares[pin.lower().startswith(_SHARED)].append(pin)
    with tempfile.TemporaryDirectory() as scratch:
        running = []
        for number, share in enumerate(shares):
            if share:
                listed = Path(scratch, f"{number}.txt")
                listed.write_text("\n".join(share) + "\n", encoding="utf-8")
                running.append(_start_pip(folder, listed, folder / f"pip-{number}.log"))
        try:
            _watch(folder, [process for process, _ in running], len(pins))
        finally:
            for process, _ in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
    for process, log in running:
        if process.returncode:
            raise SeriesError(
                f"pip failed (exit {process.returncode}), {log} ends with:\n"
                + tail(log.read_bytes(), lines=8),
                "check the network and pip's index (`python3 -m pip config list`), "
                "then run the same command again; the half-made environment is not used",
            )


def _start_pip(
    folder: Path, requirements: Path, log: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    # fmt: off
    command = [
        str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps",
        "--no-compile", "--no-input", "--progress-bar", "off",
        "--disable-pip-version-check", "--requirement", str(requirements),
    ]
    # fmt: on
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        )
    return process, log


def _watch(folder: Path, processes: list[subprocess.Popen], total: int) -> None:
    started = said = time.monotonic()
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return
        time.sleep(0.2)
        now = time.monotonic()
        if now - said >= 10:
            said = now
            fetched = sum(
                line.startswith(b"Collecting ")
                for log in folder.glob("pip-*.log")
                for line in log.read_bytes().splitlines()
            )
            installed = len(list(folder.glob("lib/python*/site-packages/*.dist-info")))
            say(
                f"  {now - started:4.0f} s: {fetched} of {total} fetched, "
                f"{min(installed, total)} installed"
            )
