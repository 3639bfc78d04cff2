"""Reads GPU activity from the SQLite file of `nsys export --type sqlite`."""

import sqlite3
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from .errors import BenchError
from .trace_files import BrokenTrace, Event, Trace

# CUPTI's copy kinds, named as torch.profiler names them.
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
# shortName drops the template arguments that tell a copy from a sum.
_KERNELS = """
    SELECT k.start, k.end, k.deviceId, k.globalPid, k.streamId, s.value
    FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.demangledName
"""
_COPIES = """
    SELECT start, end, deviceId, globalPid, streamId, copyKind
    FROM CUPTI_ACTIVITY_KIND_MEMCPY
"""
_FILLS = """
    SELECT start, end, deviceId, globalPid, streamId, 0
    FROM CUPTI_ACTIVITY_KIND_MEMSET
"""


def _check_size(path: Path) -> None:
    """Raises BrokenTrace when the file is shorter than its header says."""
    with open(path, "rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise BrokenTrace(
            f"{path} is no SQLite file; export again with `nsys export --type sqlite`"
        )
    page = int.from_bytes(header[16:18], "big")
    size = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    if path.stat().st_size < size:
        raise BrokenTrace(
            f"{path}: truncated trace ({path.stat().st_size} of {size} bytes); export"
            " or copy it again"
        )


def _rows(connection: sqlite3.Connection) -> Iterator[tuple]:
    """(start ns, end ns, device, process, stream, name) of everything that ran."""
    tables = {
        name
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        )
    }
    if "CUPTI_ACTIVITY_KIND_KERNEL" in tables:
        yield from connection.execute(_KERNELS)
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in tables:
        for *place, kind in connection.execute(_COPIES):
            yield *place, f"Memcpy {COPY_KINDS.get(kind, f'kind {kind}')}"
    if "CUPTI_ACTIVITY_KIND_MEMSET" in tables:
        for *place, _ in connection.execute(_FILLS):
            yield *place, "Memset"
    if "CUPTI_ACTIVITY_KIND_GRAPH_TRACE" in tables:
        graphs = connection.execute(
            "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
        ).fetchone()[0]
        if graphs:
            raise BenchError(
                f"{graphs} CUDA graph launches were traced as a whole, so their"
                " kernels are not in it; profile with --cuda-graph-trace=node"
            )


def read(path: Path) -> list[Trace]:
    """One Trace for each process and device that ran kernels, times in us.

    They are in order of device, then process. Raises BrokenTrace for a file that
    is cut short or lacks Nsight's columns, BenchError for one without kernels.
    """
    found: dict[tuple[int, int], dict[tuple[int, int], list[Event]]] = {}
    has_kernel: set[tuple[int, int]] = set()
    try:
        _check_size(path)
        uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True)
        try:
            for start, end, device, process, stream, name in _rows(connection):
                if name is None:
                    raise BrokenTrace(
                        f"{path}: a kernel's name is not in StringIds; export again"
                    )
                owner = (device, process or 0)
                event = Event(start / 1000, (end - start) / 1000, name)
                found.setdefault(owner, {}).setdefault((device, stream), []).append(
                    event
                )
                if not name.startswith("Mem"):
                    has_kernel.add(owner)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise BrokenTrace(
            f"{path}: truncated or not of Nsight Systems ({error}); export it again"
            " with `nsys export --type sqlite`"
        ) from error
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error}; check the file") from error
    except BrokenTrace:
        raise
    except BenchError as error:
        raise BenchError(f"{path}: {error}") from error
    if not has_kernel:
        raise BenchError(f"{path} holds no GPU kernels; profile with --trace=cuda")
    traces = []
    for owner in sorted(has_kernel):
        for events in found[owner].values():
            events.sort(key=lambda event: event.start_us)
        traces.append(Trace(source=str(path), streams=found[owner]))
    return traces
