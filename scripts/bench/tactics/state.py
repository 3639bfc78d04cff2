"""What a discovery has done so far: JSON lines, one finished step each."""

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any, Iterator

from ..errors import BenchError

SCHEMA = 1
FILE = "discover.jsonl"
MARKS = ("begun", "ended")  # outlive the process, not a power cut


class State:
    """The rows of one discovery, on disk before they count.

    The first row is the header: what is discovered, where, with what. Opening
    with another header is refused, so that rows of two questions never mix.
    """

    def __init__(self, folder: Path, rows: list[dict[str, Any]]):
        self.folder = folder
        self.rows = rows

    @property
    def header(self) -> dict[str, Any]:
        return self.rows[0]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All rows of one kind, oldest first."""
        return [row for row in self.rows if row["kind"] == kind]

    def add(self, kind: str, **values: Any) -> dict[str, Any]:
        """Appends one row and has it on disk before returning (MARKS may lag).

        Raises BenchError when the file cannot be written.
        """
        row = {"kind": kind, **values}
        path = self.folder / FILE
        try:
            with open(path, "ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                if kind not in MARKS:
                    os.fsync(file.fileno())
        except OSError as error:
            raise BenchError(
                f"cannot write {path}: {error}; make room or choose another --state"
            ) from error
        self.rows.append(row)
        return row


def read(folder: Path) -> State:
    """Reads a discovery's rows. Raises BenchError when there are none to read.

    A last line that an interruption cut short is left out; a damaged line
    anywhere else is an error, because what followed may rest on it.
    """
    path = folder / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(
            f"cannot read {path}: {error}; name the --state folder of a discovery"
        ) from error
    rows = _parse(path, data)
    if not rows:
        raise BenchError(f"{path} holds no finished step; run discover again")
    return State(folder, rows)


@contextlib.contextmanager
def opened(folder: Path, header: dict[str, Any]) -> Iterator[State]:
    """Opens a discovery's state for writing, new or to go on with.

    A header without any row after it gives way to another one. Raises BenchError
    when another process holds it, or when the rows there answer another question
    (the fields that differ are named).
    """
    header = {"kind": "header", "schema": SCHEMA, **json.loads(json.dumps(header))}
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise BenchError(f"cannot write in {folder}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BenchError(
                f"{folder} is in use by another discovery; wait for it or choose "
                "another --state"
            ) from error
        data = path.read_bytes() if path.exists() else b""
        rows = _parse(path, data)
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            _replace(path, whole)
        if len(rows) == 1 and rows[0] != header:
            # A refused command got no further: nothing is lost.
            _replace(path, b"")
            rows = []
        state = State(folder, rows)
        if not rows:
            state.add(**header)
        elif state.header != header:
            raise BenchError(_differs(path, state.header, header))
        yield state


def _parse(path: Path, data: bytes) -> list[dict[str, Any]]:
    rows = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            row["kind"]
        except (ValueError, TypeError, KeyError) as error:
            raise BenchError(
                f"{path}:{number} is damaged ({error}); move the folder away and run "
                "discover again"
            ) from error
        rows.append(row)
    if rows and rows[0]["kind"] != "header":
        raise BenchError(f"{path}:1 is no header; name a folder that discover wrote")
    return rows


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _differs(path: Path, old: dict, new: dict) -> str:
    lines = [f"{path} belongs to another discovery:"]
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            lines.append(f"  {key}: there {old.get(key)!r}, now {new.get(key)!r}")
    return "\n".join([*lines, "choose another --state folder"])
