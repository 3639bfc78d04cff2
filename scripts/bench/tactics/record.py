"""Writes a tactic as a `load_configs` file, alone or into a user's cache file."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Iterator

from ..errors import BenchError
from .candidates import from_json, text, to_json
from .case import OpCase
from .flashinfer_api import AutoTuner

METADATA = "_metadata"
GENERATION = "_generation"
# Not tactics: FlashInfer's own entries of a cache file.
RESERVED = (METADATA, "_records", GENERATION)
UNKNOWN = (None, "unknown", "None")


def environment() -> dict[str, str]:
    """The environment FlashInfer stamps on records of this process.

    Read from a file that `save_configs` of an empty AutoTuner writes, so it is
    what `load_configs` will compare. Values are "unknown" where it cannot tell.
    """
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = os.path.join(folder, "empty.json")
        AutoTuner().save_configs(path)
        return json.loads(Path(path).read_text())[METADATA]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps FlashInfer's notes about our own throwaway files off the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def entry(case: OpCase, tactic: Any) -> tuple[str, list]:
    """Key and value of a record: [runner, tactic, measurement policy]."""
    return case.file_key, [type(case.runner).__name__, to_json(tactic), case.policy]


def bundle(case: OpCase, tactic: Any, *, allow_unknown: bool = False) -> dict[str, Any]:
    """The whole file for one tactic, stamped with this machine's environment.

    Raises BenchError when FlashInfer cannot tell a field of the environment, and
    when a fresh AutoTuner that loads the file does not hit on `case`.
    """
    stamp = environment()
    unknown = [key for key, value in stamp.items() if value in UNKNOWN]
    if unknown and not allow_unknown:
        raise BenchError(
            f"FlashInfer cannot tell {', '.join(unknown)} here, and a record without "
            "them loads on no other machine; run record where they are known (or give "
            "--allow-unknown for a record that only works where they are unknown too)"
        )
    key, value = entry(case, tactic)
    document = {METADATA: stamp, key: value}
    _prove(document, case, tactic)
    return document


def write(path: Path, document: dict[str, Any]) -> None:
    """Writes a new file, whole or not at all. Raises BenchError if it exists."""
    if path.exists():
        raise BenchError(
            f"{path} exists and is not overwritten; choose another --out, or --merge "
            "to add the tactic to a cache file"
        )
    with _told(path):
        _replace(path, document)


def write_all(documents: dict[Path, dict[str, Any]]) -> None:
    """Writes new files in this order, all of them or none. Raises BenchError."""
    done: list[Path] = []
    try:
        for path, document in documents.items():
            write(path, document)
            done.append(path)
    except BaseException:
        for path in done:
            path.unlink(missing_ok=True)
        raise


def merge(path: Path, document: dict[str, Any], *, replace: bool = False) -> list[str]:
    """Adds the tactics of `document` to the cache file `path`; returns what it did.

    Every other entry keeps its value, the file its mode, and a link stays a link.
    A missing file is created. Raises BenchError, the file untouched, when it is
    damaged, belongs to another environment, has no environment, changes while it
    is read, or already holds another tactic for a key (unless `replace`, which
    first copies the file to a .bak beside it).
    """
    path = Path(os.path.realpath(path))
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            return _merge(path, document, replace)


def _merge(path: Path, document: dict[str, Any], replace: bool) -> list[str]:
    if not path.exists():
        _replace(path, document)
        return [f"created {path}"]
    before = path.read_bytes()
    current = parse(path, before)
    _same_environment(path, current, document)
    done = []
    updated = dict(current)
    for key, value in tactics_of(document).items():
        old = current.get(key)
        if old == json.loads(json.dumps(value)):
            done.append(f"{path} already holds {text(value[1])}, nothing to do")
            continue
        if old is not None and not replace:
            raise BenchError(
                f"{path} already holds {old} for this key and it is kept; give "
                "--replace to put "
                f"{value} there (the file is copied to a .bak first)"
            )
        if old is not None:
            backup = _backup(path)
            done.append(f"replaced {old} by {value}, the old file is {backup}")
        else:
            done.append(f"added {value} to {path}")
        updated[key] = value
    if updated == current:
        return done
    if GENERATION in updated:
        # Engines that hold the old generation must notice the change.
        content = {k: v for k, v in updated.items() if k != GENERATION}
        updated[GENERATION] = hashlib.sha256(
            json.dumps(content, sort_keys=True).encode()
        ).hexdigest()
    _replace(path, updated, unless_changed_from=before)
    return done


def parse(path: Path, data: bytes) -> dict[str, Any]:
    """The content of a `load_configs` file. Raises BenchError when damaged.

    Also refuses what FlashInfer would silently take one half of: a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"key {min(twice)!r} is there twice")
        return dict(pairs)

    try:
        content = json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise BenchError(
            f"{path} is no valid JSON ({error}); it is left as it is, repair or remove it"
        ) from error
    if not isinstance(content, dict):
        raise BenchError(
            f"{path} holds a {type(content).__name__}, not the object a tactic file "
            "is; it is left as it is, repair or remove it"
        )
    for key, value in tactics_of(content).items():
        if (
            not isinstance(value, list)
            or len(value) not in (2, 3)
            or not isinstance(value[0], str)
            or not isinstance(value[-1] if len(value) == 3 else [], list)
        ):
            raise BenchError(
                f"{path}: the entry of {key!r} is {value!r}, not [runner, tactic] or "
                "[runner, tactic, policy]; repair or remove it"
            )
    return content


def read(path: Path) -> dict[str, Any]:
    """Reads and parses a `load_configs` file. Raises BenchError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    return parse(path, data)


def parse_plain(path: Path) -> dict[str, Any]:
    """Reads a JSON object that is no tactic file. Raises BenchError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}; remove or repair it") from error
    if not isinstance(content, dict):
        raise BenchError(f"{path} holds no JSON object; remove or repair it")
    return content


def tactics_of(document: dict[str, Any]) -> dict[str, Any]:
    """The tactic entries of a file's content, FlashInfer's own left out."""
    return {key: value for key, value in document.items() if key not in RESERVED}


def _same_environment(
    path: Path, current: dict[str, Any], document: dict[str, Any]
) -> None:
    stamp = current.get(METADATA)
    if not isinstance(stamp, dict):
        raise BenchError(
            f"{path} does not say which environment its tactics are for, so FlashInfer "
            "loads it unchecked; a checked record cannot join it, use --out"
        )
    differ = [
        f"{key}: file {stamp.get(key)!r}, here {value!r}"
        for key, value in document[METADATA].items()
        if stamp.get(key) not in (value, "*")
    ]
    if differ:
        raise BenchError(
            f"{path} belongs to another environment ({'; '.join(differ)}); use --out, "
            "or --merge into the cache file of this environment"
        )


def _prove(document: dict[str, Any], case: OpCase, tactic: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder, "record.json")
        path.write_text(json.dumps(document))
        tuner = AutoTuner()
        if not tuner.load_configs(str(path)):
            raise BenchError(
                "FlashInfer does not load the record it was to become; see its warning"
            )
    for tuning in (False, True):
        tuner.is_tuning_mode = tuning
        hit, _, found, _ = tuner.search_cache(
            case.custom_op,
            [case.runner],
            case.shapes,
            case.tuning_config,
            inputs=case.inputs,
            require_profiling_policy=tuning,
        )
        if not hit or found != from_json(to_json(tactic)):
            raise BenchError(
                f"{text(tactic)} is no hit {'while tuning' if tuning else 'in serving'}:"
                " this FlashInfer derives another key or policy, or the op rejects the"
                f" tactic (found {text(found)})"
            )


def _backup(path: Path) -> Path:
    number = 0
    while (backup := path.with_name(f"{path.name}.{number}.bak")).exists():
        number += 1
    shutil.copy2(path, backup)
    return backup


def _replace(
    path: Path, document: dict[str, Any], unless_changed_from: bytes | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tactics_")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
        if unless_changed_from is not None and path.read_bytes() != unless_changed_from:
            raise BenchError(
                f"{path} changed while it was read; nothing was written, run it again"
            )
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One `record` at a time on a file. FlashInfer's own saving takes no lock, so
    the content is compared once more right before it is replaced."""
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BenchError(
            f"cannot write {path}: {error}; nothing was changed, choose a writable path"
        ) from error
