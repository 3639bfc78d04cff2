"""Processes the harness starts: each in its own group, marked, and always ended."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from .errors import BenchError

MARK = "BENCH_RUN"  # environment variable that all descendants of a run carry


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: ends the run in the same orderly way as Ctrl-C."""


def _raise(signum: int, _frame) -> None:
    raise Terminated(signal.Signals(signum).name)


@contextlib.contextmanager
def orderly_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind the stack, so that servers are ended.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [
        signum
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) != signal.SIG_IGN
    ]
    old = {signum: signal.signal(signum, _raise) for signum in taken}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Holds signals back while processes are being ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def new_mark() -> str:
    """A name no other run has."""
    return uuid.uuid4().hex


def start(command: list[str] | str, **options) -> subprocess.Popen:
    """A process in a session of its own; BenchError when its program cannot run."""
    try:
        return subprocess.Popen(command, start_new_session=True, **options)
    except OSError as error:
        name = command if isinstance(command, str) else command[0]
        raise BenchError(
            f"cannot run {name}: {error.strerror}; correct server.python"
        ) from error


class Child:
    """One started process with a log file; standard input is kept open for it.

    The launcher ends itself when its standard input closes, so a server goes away
    even when this process is killed, and across ssh.
    """

    def __init__(
        self,
        command: list[str] | str,
        *,
        log: Path,
        environment: dict[str, str],
        mark: str,
        folder: Path | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.mark = log, mark
        with open(log, "ab") as out:
            self.process = start(
                command,
                shell=isinstance(command, str),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environment, MARK: mark},
                cwd=folder,
            )

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def tail(self, lines: int = 15) -> str:
        """The last lines it wrote."""
        return tail(self.log, lines)

    def end(self, grace: float) -> None:
        """Ends the process, its group, and every descendant that left the group."""
        with unhurried():
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            if self._wait(min(grace, 5)) and not self._group_lives():
                end_marked(self.mark)
                return
            for signum, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signum)
                if self._wait(patience) and not self._group_lives():
                    break
            end_marked(self.mark)

    def _wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def marked(mark: str) -> list[psutil.Process]:
    """Running processes that carry this run's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def end_marked(mark: str, grace: float = 5) -> None:
    """Ends what is left of one run, and nothing else."""
    left = marked(mark)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace)


def tail(path: Path, lines: int) -> str:
    """The last lines of a text file, long ones cut; "" when there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    shown = [f"{ln[:300]}..." if len(ln) > 300 else ln for ln in text.splitlines()]
    return "\n".join(shown[-lines:])


def wait_until(ready, *, timeout: float, interval: float = 0.25) -> bool:
    """Polls `ready` until it is true (True) or the time is over (False)."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if ready():
            return True
        time.sleep(interval)
    return False
