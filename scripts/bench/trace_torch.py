"""Reads GPU events from the Chrome trace that torch.profiler exports."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import BenchError
from .trace_files import BrokenTrace, Event, Trace

CATEGORIES = {
    "gpu": frozenset(("kernel", "gpu_memcpy", "gpu_memset")),
    "cpu": frozenset(("cpu_op",)),
}
CHUNK = 4 << 20  # characters
# One event is a few hundred bytes; more unparsed text than this is no JSON.
LONGEST_EVENT = 64 << 20
_SPACE = " \t\r\n"
_DECODE = json.JSONDecoder().raw_decode


class _Text:
    """A text file as a sliding window, so that no whole trace is held."""

    def __init__(self, file: IO[str], progress: Callable[[], None]):
        self.file, self.progress = file, progress
        self.buffer, self.at = "", 0

    def more(self) -> bool:
        """Reads one chunk more, dropping what was consumed; False at the end."""
        chunk = self.file.read(CHUNK)
        self.progress()
        self.buffer, self.at = self.buffer[self.at :] + chunk, 0
        return bool(chunk)

    def peek(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """The JSON value that starts here."""
        self.peek()
        while True:
            try:
                result, end = _DECODE(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if len(self.buffer) - self.at > LONGEST_EVENT or not self.more():
                    raise EOFError(f"cut short or malformed: {error}") from None
                continue
            # A number that ends with the window may go on in the next chunk.
            if end == len(self.buffer) and self.more():
                continue
            self.at = end
            return result

    def expect(self, characters: str) -> str:
        found = self.peek()
        if not found or found not in characters:
            raise EOFError(
                f"expected one of {characters!r}, found {found or 'the end'!r}"
            )
        self.at += 1
        return found


def _items(text: _Text) -> Iterator[Any]:
    """Each value of the JSON array that starts here."""
    text.expect("[")
    if text.peek() == "]":
        text.expect("]")
        return
    while True:
        yield text.value()
        if text.expect(",]") == "]":
            return


def _events(text: _Text, header: dict) -> Iterator[dict]:
    """Every event; the other members of the trace land in `header`."""
    if text.peek() == "[":
        yield from _items(text)
    else:
        text.expect("{")
        while True:
            key = text.value()
            text.expect(":")
            if key == "traceEvents":
                header[key] = True
                yield from _items(text)
            else:
                header[key] = text.value()
            if text.expect(",}") == "}":
                break
        if "traceEvents" not in header:
            raise EOFError("no traceEvents in it")
    if text.peek():
        raise EOFError("text after the end of the trace")


def read(
    path: Path, activity: str = "gpu", progress: Callable[[int], None] = lambda _: None
) -> Trace:
    """One rank's events, each stream in order of time.

    `progress` gets the number of bytes read from disk so far. Raises
    BrokenTrace for a file that is cut short or malformed, BenchError for one
    without events of the activity.
    """
    streams: dict[tuple[int, int], list[Event]] = {}
    header: dict = {}
    wanted = CATEGORIES[activity]
    names: dict[str, str] = {}
    try:
        with open(path, "rb") as raw:
            binary = gzip.open(raw) if path.name.endswith(".gz") else raw
            text = _Text(
                io.TextIOWrapper(binary, encoding="utf-8", errors="replace"),
                lambda: progress(raw.tell()),
            )
            for event in _events(text, header):
                if event.get("cat") not in wanted or event.get("ph") != "X":
                    continue
                arguments = event.get("args", {})
                key = (
                    (int(arguments.get("device", 0)), int(arguments.get("stream", 0)))
                    if activity == "gpu"
                    else (0, 0)
                )
                name = names.setdefault(event["name"], event["name"])
                streams.setdefault(key, []).append(
                    Event(float(event["ts"]), float(event["dur"]), name)
                )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BrokenTrace(
            f"{path}: truncated or broken trace ({error}); export it again"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenTrace(
            f"{path}: an event is not as torch.profiler writes it ({error!r});"
            " export it again"
        ) from error
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error}; check the file") from error
    if not streams:
        raise BenchError(
            f"{path} holds no {activity} events; profile with"
            f" {'GPU' if activity == 'gpu' else 'CPU'} activity switched on"
        )
    for events in streams.values():
        events.sort(key=lambda event: event.start_us)
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    return Trace(
        source=str(path),
        streams=streams,
        rank=info.get("rank"),
        world=info.get("world_size"),
    )
