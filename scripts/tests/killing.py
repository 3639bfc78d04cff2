"""Kill a piece of work at its n-th change of the file system, in a child process."""

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from serieslib import txn

# Every call through which the tool changes files.
_STEPS = [
    (os, "replace"),
    (os, "rename"),
    (os, "rmdir"),
    (os, "unlink"),
    (txn, "_write"),
    (txn, "_copy"),
    (Path, "unlink"),
    (Path, "mkdir"),
    (Path, "rmdir"),
    (Path, "write_text"),
    (Path, "write_bytes"),
    (shutil, "rmtree"),
]


def killed_at(at: int, work: Callable[[], object]) -> bool:
    """Whether ``work`` was killed (SIGKILL), that is, whether it has an at-th step."""
    pid = os.fork()
    if pid == 0:
        try:
            _watch(at)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the work failed, wait status {status}"
    return killed


def _watch(at: int) -> None:
    seen = 0

    def wrap(real):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for owner, name in _STEPS:
        setattr(owner, name, wrap(getattr(owner, name)))
