"""Profiler traces of one arm: which files, which rank each is, what they hold."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .errors import BenchError, CheckFailed

# A profile merged from all ranks would count every kernel twice.
SKIPPED = re.compile(r"^(merged-|cuda_graph_capture-)|-memory\b")
TORCH_SUFFIXES = (".json", ".json.gz")
NSYS_SUFFIXES = (".sqlite", ".sqlite3", ".db")
_PART = re.compile(r"(?:^|[-_.])(TP|PP|DP|EP)-(\d+)(?=[-_.]|$)")
_RANK = re.compile(r"(?:^|[-_.])rank[-_]?(\d+)(?=[-_.]|$)", re.IGNORECASE)


def natural(path: Path) -> list:
    """Sort key by which node2 comes before node10."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if part.isdigit() else part for part in parts]


class Event(msgspec.Struct, frozen=True, gc=False):
    """One kernel, copy or fill. Times in microseconds."""

    start_us: float
    time_us: float
    name: str


class Trace(msgspec.Struct):
    """What one rank ran, by stream. `world` is the number of ranks, if known."""

    source: str
    streams: dict[tuple[int, int], list[Event]]
    rank: int | None = None
    world: int | None = None

    @property
    def events(self) -> int:
        return sum(len(events) for events in self.streams.values())

    def fingerprint(self) -> int:
        """Equal for copies of one trace: start and name of every event."""
        return hash(
            tuple(
                (key, tuple((e.start_us, e.name) for e in events))
                for key, events in sorted(self.streams.items())
            )
        )


class BrokenTrace(CheckFailed):
    """A trace file that is cut short or not a trace."""


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Trace files named, or lying directly in the folders named, by number.

    In a folder, merged profiles, graph-capture profiles and memory snapshots are
    left out. Raises BenchError for a path without any.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [
                entry
                for entry in sorted(path.iterdir(), key=natural)
                if entry.name.endswith(TORCH_SUFFIXES + NSYS_SUFFIXES)
                and not SKIPPED.search(entry.name)
            ]
            if not inside:
                raise BenchError(
                    f"no trace in {path}; expected *.trace.json.gz of"
                    " torch.profiler or *.sqlite of `nsys export --type sqlite`"
                )
            found += inside
        elif not path.exists():
            raise BenchError(f"no trace file {path}; check the --arm path")
        elif not path.name.endswith(TORCH_SUFFIXES + NSYS_SUFFIXES):
            raise BenchError(
                f"{path} is no trace: its name must end with one of"
                f" {', '.join(TORCH_SUFFIXES + NSYS_SUFFIXES)}; a .nsys-rep needs"
                " `nsys export --type sqlite` first"
            )
        else:
            found.append(path)
    twice = sorted({str(p) for p in found if found.count(p) > 1})
    if twice:
        raise BenchError(f"trace named twice: {', '.join(twice)}; name it once")
    return found


def parts_of(name: str) -> dict[str, int]:
    """Parallel ranks in a file name of SGLang's profiler, {"PP": 3, "TP": 0}."""
    return {part: int(number) for part, number in _PART.findall(name)}


def number(traces: list[Trace], ranks: int | None = None) -> None:
    """Sets `rank` where the trace itself did not say, from the file names.

    `rankN` in the name is the rank; else PP * tp_size + TP, where tp_size comes
    from `ranks` when given, or else from the largest TP seen.
    """
    # Numbers of the one kind and of the other are never mixed.
    if all(trace.rank is not None for trace in traces):
        return
    names = [Path(trace.source).name for trace in traces]
    parts = [parts_of(name) for name in names]
    stages = 1 + max(part.get("PP", 0) for part in parts)
    width = 1 + max(part.get("TP", 0) for part in parts)
    if ranks is not None and ranks % stages == 0:
        width = max(width, ranks // stages)
    for trace, name, part in zip(traces, names, parts, strict=True):
        stated = _RANK.search(name)
        if stated:
            trace.rank = int(stated[1])
        elif "TP" in part or "PP" in part:
            trace.rank = part.get("PP", 0) * width + part.get("TP", 0)
        elif len(traces) == 1 and ranks in (None, 1):
            trace.rank = 0
        else:
            raise BenchError(
                f"cannot tell the rank of {trace.source}; name it like SGLang's"
                " profiler does (ID-TP-0-PP-3.trace.json.gz) or with rank3 in it"
            )


def check_ranks(arm: str, traces: list[Trace], ranks: int | None = None) -> None:
    """Raises CheckFailed for a missing, unexpected, repeated or copied rank."""
    by_rank: dict[int, list[Trace]] = {}
    for trace in traces:
        by_rank.setdefault(trace.rank, []).append(trace)
    for rank, several in sorted(by_rank.items()):
        if len(several) > 1:
            raise CheckFailed(
                f"arm {arm}: rank {rank} has {len(several)} traces"
                f" ({', '.join(t.source for t in several)}); keep one, or profile"
                " the stages apart"
            )
    worlds = {trace.world for trace in traces if trace.world}
    if ranks is None and len(worlds) > 1:
        raise CheckFailed(
            f"arm {arm}: traces of groups of {sorted(worlds)} ranks; they are not of"
            " one run"
        )
    expected = ranks or (worlds.pop() if worlds else 1 + max(by_rank))
    missing = sorted(set(range(expected)) - set(by_rank))
    if missing:
        raise CheckFailed(
            f"arm {arm}: no trace of rank {', '.join(map(str, missing))}"
            f" (of {expected}); profile every rank and pass all files"
        )
    unexpected = sorted(rank for rank in by_rank if rank >= expected)
    if unexpected:
        raise CheckFailed(
            f"arm {arm}: rank {', '.join(map(str, unexpected))} is not one of the"
            f" {expected} stated; correct --ranks or the folder"
        )
    seen: dict[int, Trace] = {}
    for trace in traces:
        first = seen.setdefault(trace.fingerprint(), trace)
        if first is not trace:
            raise CheckFailed(
                f"arm {arm}: {first.source} and {trace.source} are the same trace"
                f" under ranks {first.rank} and {trace.rank}"
            )
