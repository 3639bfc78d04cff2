"""Read the series' own patch files and apply them in memory: exact, no fuzz, no git."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from serieslib.errors import SeriesError

_ZERO = "0" * 40
_FIX = "restore it with `git checkout -- patches`"


@dataclass
class FilePatch:
    """One file of one patch. ``old``/``new`` are git blob ids, None for no file."""

    path: str
    old: str | None = None
    new: str | None = None
    mode: str | None = None
    hunks: list[tuple[int, list[bytes]]] = field(default_factory=list)


def blob_id(data: bytes) -> str:
    """git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def read_patch(path: Path) -> list[FilePatch]:
    """Parse one exported patch (full ids, no renames, no binary parts)."""
    return parse_patch(path.read_bytes(), f"patches/{path.name}")


def parse_patch(data: bytes, name: str) -> list[FilePatch]:
    files: list[FilePatch] = []
    lines = data.split(b"\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith(b"diff --git "):
            files.append(FilePatch(_path_of(line, name)))
        elif not files:
            continue
        elif line.startswith(b"index "):
            found = re.fullmatch(
                rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})( \d+)?", line
            )
            if not found:
                raise SeriesError(f"{name}: no full blob ids in {line!r}", _FIX)
            old, new = (found[i].decode() for i in (1, 2))
            files[-1].old = None if old == _ZERO else old
            files[-1].new = None if new == _ZERO else new
        elif line.startswith((b"new file mode ", b"new mode ")):
            files[-1].mode = line.split()[-1].decode()
        elif line.startswith((b"GIT binary patch", b"rename ", b"copy ")):
            raise SeriesError(
                f"{name}: {files[-1].path} is changed by {line.decode()!r}, "
                "which this tool does not take",
                "make it a plain text change, then export again",
            )
        elif line.startswith(b"@@ "):
            at = _read_hunk(files[-1], lines, at, line, name)
    return files


def _path_of(line: bytes, name: str) -> str:
    found = re.fullmatch(rb"diff --git a/(.+) b/\1", line)
    if not found:
        raise SeriesError(f"{name}: a renamed or quoted path in {line!r}", _FIX)
    return found[1].decode()


def _read_hunk(
    file: FilePatch, lines: list[bytes], at: int, header: bytes, name: str
) -> int:
    """Append one hunk; returns the index of the line after it."""
    found = re.match(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", header)
    if not found:
        raise SeriesError(f"{name}: damaged hunk header {header!r}", _FIX)
    start = int(found[1])
    old, new = (int(count) if count is not None else 1 for count in found.group(2, 3))
    body: list[bytes] = []
    while old > 0 or new > 0 or (at < len(lines) and lines[at][:1] == b"\\"):
        line = lines[at] if at < len(lines) else b""
        kind = line[:1]
        if kind not in (b" ", b"+", b"-", b"\\"):
            raise SeriesError(
                f"{name}: the hunk {header.decode()!r} is cut short", _FIX
            )
        old -= kind in (b" ", b"-")
        new -= kind in (b" ", b"+")
        body.append(line)
        at += 1
    # A hunk that inserts after line N says -N,0; every other one starts at its line.
    empty_old = found[2] == b"0"
    file.hunks.append((start if empty_old else start - 1, body))
    return at


def apply_file(data: bytes | None, patch: FilePatch, name: str) -> bytes | None:
    """The file after ``patch``; both sides are compared with the patch's blob ids."""
    have = None if data is None else blob_id(data)
    if have != patch.old:
        raise SeriesError(
            f"{name}: {patch.path} is not the version that the patch expects",
            "use the pinned release",
        )
    if patch.new is None:
        return None
    source = (data or b"").split(b"\n")
    # Every line but the last is followed by a newline; the last one is what is left.
    lines = [line + b"\n" for line in source[:-1]] + (
        [source[-1]] if source[-1] else []
    )
    result: list[bytes] = []
    at = 0
    for start, body in patch.hunks:
        result += lines[at:start]
        at = start
        for number, line in enumerate(body):
            if line[:1] == b"\\":
                continue
            bare = number + 1 < len(body) and body[number + 1][:1] == b"\\"
            text = line[1:] if bare else line[1:] + b"\n"
            if line[:1] in (b" ", b"-"):
                if at >= len(lines) or lines[at] != text:
                    raise SeriesError(f"{name}: {patch.path}:{at + 1} differs", _FIX)
                at += 1
            if line[:1] in (b" ", b"+"):
                result.append(text)
    out = b"".join(result + lines[at:])
    if blob_id(out) != patch.new:
        raise SeriesError(f"{name}: {patch.path} comes out damaged", _FIX)
    return out


def file_states(patches: list[Path]) -> list[dict[str, str | None]]:
    """Blob id of every touched path before patch 1, after patch 1, ... after the last.

    None means that the path does not exist then. Raises when the patches do not
    follow from one another.
    """
    first: dict[str, str | None] = {}
    after: list[dict[str, str | None]] = []
    current: dict[str, str | None] = {}
    for path in patches:
        for item in read_patch(path):
            if item.path in current and current[item.path] != item.old:
                raise SeriesError(
                    f"patches/{path.name}: {item.path} does not follow from the "
                    "patches before it",
                    _FIX,
                )
            first.setdefault(item.path, item.old)
            current[item.path] = item.new
        after.append(dict(current))
    return [first] + [first | state for state in after]
