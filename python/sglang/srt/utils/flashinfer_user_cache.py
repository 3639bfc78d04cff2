"""The user's FlashInfer autotune cache file: read, guard and write it.

A cache file belongs to the user. It holds tactics tuned on this machine or put
there by hand, and FlashInfer's ``load_configs`` / ``save_configs`` are the only
readers and writers of tactics. This module keeps three promises around them.

*Bundled seeds never stay in the user's file.* ``save_configs`` writes every
record the tuner has loaded, seeds included, and at the next start that copy would
outrank a corrected bundle. ``note_seed`` remembers, for each tuner, what was
loaded for a seeded key. ``save_user_cache`` then puts that key back to what the
file said before the save. So an entry found in a file is the user's, whatever its
value, and there is nothing to tell apart later. An entry that was tuned in this
process is kept: only values that were merely loaded are put back. A draft worker
saves into its own file through the same tuner; the same rule keeps the target's
seeded key out of it, and ``load_user_cache`` lets no other file change that key.

*Nothing is half written, and concurrent starts lose nothing.* A save runs under a
lock file. The intended repair is first written to a journal beside the cache, then
FlashInfer replaces the file, then the repair replaces it again and the journal
goes. All three are renames. Each load and each save finishes the repair of a journal
it finds before it uses the file, so a crash at any point leaves no seed behind.

*A file that cannot be used stops nothing.* A damaged file is moved aside with its
bytes unchanged, before any of its entries is loaded and before a save would replace
it; a directory that cannot be made or written costs one warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Optional
from weakref import WeakKeyDictionary

import filelock
import msgspec

from sglang.srt.environ import envs

if TYPE_CHECKING:
    from flashinfer.autotuner import AutoTuner

logger = logging.getLogger(__name__)

# A save takes milliseconds; a longer wait means a lock that does not work here.
_LOCK_TIMEOUT_SECS = 10.0

# FlashInfer's file_key -> [runner, tactic] or [runner, tactic, policy].
Entries = dict[str, list]
# FlashInfer reads every other key as an entry's.
_NO_ENTRIES = ("_metadata", "_generation", "_records")


class _Seeds(msgspec.Struct):
    # The cache file of the start that loaded the seed; None once that start is over,
    # or when the caller named none.
    home: Optional[Path]
    # file_key -> the entries this process loaded for it and did not measure.
    loaded: dict[str, list[list]]


class _Repair(msgspec.Struct):
    """What a save must not change: the journal's content."""

    loaded: dict[str, list[list]]
    # file_key -> entry before the save; a key the file did not have is absent.
    before: Entries
    # The file's _metadata before the save; None when it had none.
    metadata: Any = None


_seeds: WeakKeyDictionary[AutoTuner, _Seeds] = WeakKeyDictionary()
# What was warned about: a cache file, or the cache root for all directories in it.
_warned: set[str] = set()
# Caches that disagree between ranks and could not be deleted: never loaded.
_discarded: set[Path] = set()


def note_seed(tuner: AutoTuner, entries: Entries, *, home: Optional[Path]) -> None:
    """Tell this module that ``entries`` were loaded into ``tuner`` as a seed.

    ``home`` is the user's cache file of the same start, whose own entries win.
    """
    _seeds[tuner] = _Seeds(
        home=home, loaded={key: [entry] for key, entry in entries.items()}
    )


def end_seeded_start(tuner: AutoTuner) -> None:
    """The next files belong to another start: load their own entries again.

    What was seeded stays noted, because it stays in the tuner and must not be saved.
    """
    seeds = _seeds.get(tuner)
    if seeds is not None:
        seeds.home = None


def make_cache_dir(directory: Path) -> None:
    """Create the cache directory; warn once and go on when that is impossible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn_unwritable(directory, error)


def writable_dir(directory: Path) -> Path:
    """``directory``, created; or a new temporary one when it cannot be written."""
    make_cache_dir(directory)
    if os.access(directory, os.W_OK):
        return directory
    _warn_unwritable(directory, "no write permission")
    return Path(tempfile.mkdtemp(prefix="sglang_flashinfer_autotune_"))


def prepare_user_cache(path: Path) -> None:
    """Make ``path`` safe to read: finish an interrupted save, move damage aside.

    Runs before ranks compare their files, so a damaged one counts as absent and
    is not deleted by that comparison.
    """
    with _exclusive(path):
        _read_repaired(path)


def discard_user_cache(path: Path) -> None:
    """Delete ``path``, or never load it in this process when that is impossible."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _discarded.add(path)
        _warn_unwritable(path.parent, error)


def load_user_cache(tuner: AutoTuner, path: Path) -> None:
    """Load the user's cache, if there is a usable one, over what is loaded so far.

    Entries for a seeded key win over the seed when ``path`` is the file the seed
    was made for, and are left out when it is another file (a draft worker's).
    """
    if path in _discarded:
        return
    seeds = _seeds.get(tuner)
    with _exclusive(path):
        visible = _read_repaired(path)
        if visible is None:
            return
        if seeds is not None and seeds.home not in (None, path):
            visible = {k: v for k, v in visible.items() if k not in seeds.loaded}
        try:
            if visible == _read_cache(path):
                loaded = tuner.load_configs(str(path))
            else:
                with tempfile.TemporaryDirectory() as scratch:
                    copy = Path(scratch) / path.name
                    copy.write_text(json.dumps(visible))
                    loaded = tuner.load_configs(str(copy))
        except OSError as error:
            _warn_unreadable(path, error)
            return
        except Exception as error:
            # _read_cache knows today's format; a stricter FlashInfer must not stop
            # the start either.
            _set_aside(path, error)
            return
    if not loaded or seeds is None:
        return
    for key, entries in seeds.loaded.items():
        # FlashInfer loads and saves three fields.
        entry = visible.get(key, entries[0])[:3]
        if entry not in entries:
            logger.info(
                "FlashInfer autotune: %s in %s wins over the bundled %s for %s.",
                entry,
                path,
                entries[0],
                key,
            )
            entries.append(entry)


def save_user_cache(tuner: AutoTuner, path: Path) -> None:
    """Save the tuner's tactics to ``path``, leaving every seeded key as it was.

    A directory or file that cannot be written costs one warning; the tactics in
    memory serve on.
    """
    seeds = _seeds.get(tuner)
    try:
        with _exclusive(path):
            configs = _read_repaired(path)
            if configs is None and os.path.exists(path):
                # It was warned about and could not be moved.
                return
            if seeds is None:
                tuner.save_configs(str(path))
                return
            configs = configs or {}
            repair = _Repair(
                loaded=seeds.loaded,
                before={key: configs[key] for key in seeds.loaded if key in configs},
                metadata=configs.get("_metadata"),
            )
            _write_json(_journal(path), msgspec.to_builtins(repair))
            tuner.save_configs(str(path))
            _read_repaired(path, repair)
    except (OSError, ValueError, RecursionError) as error:
        # Not FlashInfer's own RuntimeError: a second writer of namespaced records.
        _warn_unwritable(path.parent, error)


def _read_repaired(path: Path, repair: Optional[_Repair] = None) -> Optional[dict]:
    """What the user's file says, once ``repair`` (by default the journal's) is done.

    Needs the lock. None when there is no usable file; a damaged one is moved aside.
    Where nothing can be written the journal stays and the file differs from the result.
    """
    configs = None
    if os.path.exists(path):
        try:
            configs = _read_cache(path)
        except OSError as error:
            _warn_unreadable(path, error)
            return None
        except ValueError as error:
            _set_aside(path, error)
    repair = repair or _read_journal(path)
    if repair is None:
        return configs
    repaired = configs and _restored(configs, repair)
    with contextlib.suppress(OSError, RecursionError):
        if repaired != configs:
            _write_json(path, repaired)
        _journal(path).unlink(missing_ok=True)
    return repaired


def _restored(configs: dict, repair: _Repair) -> dict:
    """``configs`` with the seeded keys put back, unless tuned since."""
    before = repair.before
    if repair.metadata not in (None, configs.get("_metadata")):
        # FlashInfer did not trust the entries of that environment and dropped them.
        before = {}
    restored = dict(configs)
    for key, loaded in repair.loaded.items():
        if configs.get(key) in loaded:
            del restored[key]
            if key in before:
                restored[key] = before[key]
    return restored


def _read_cache(path: Path) -> dict:
    """The file's JSON object. ValueError names the first thing that is wrong."""
    try:
        configs = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(configs, dict):
        raise ValueError(f"expected a JSON object, found {type(configs).__name__}")
    if not isinstance(configs.get("_records", {}), dict):
        raise ValueError("_records is not an object")
    for key, entry in configs.items():
        match entry:
            case [str(), _] | [str(), _, list(), *_]:
                pass
            case _ if key not in _NO_ENTRIES:
                raise ValueError(
                    f"entry {key!r} is not [runner, tactic] or [runner, tactic, "
                    f"policy]: {entry!r:.80}"
                )
    return configs


def _journal(path: Path) -> Path:
    return path.with_name(f".{path.name}.repair")


def _read_journal(path: Path) -> Optional[_Repair]:
    try:
        return msgspec.json.decode(_journal(path).read_bytes(), type=_Repair)
    except (OSError, msgspec.DecodeError, RecursionError):
        # Journals appear by rename, so an unreadable one is not ours to finish.
        return None


def _write_json(path: Path, content: dict) -> None:
    """Replace ``path`` in one step, or leave it as it was."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=2)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the cache file's lock; go on without one where locks do not work."""
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), mode=0o666)
    try:
        lock.acquire(timeout=_LOCK_TIMEOUT_SECS)
    except (OSError, NotImplementedError) as error:
        # filelock.Timeout is an OSError. A directory that cannot be written shows
        # again, with its warning, at the save.
        logger.debug("No lock on %s: %s", path, error)
    try:
        yield
    finally:
        lock.release()


def _set_aside(path: Path, fault: Exception) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%S")
    kept = path.with_name(f"{path.name}.damaged-{stamp}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, kept)
    except FileNotFoundError:
        return
    except OSError:
        _warn_unreadable(path, fault)
        return
    logger.warning(
        f"FlashInfer autotune cache {path} is damaged ({fault}). It was kept as "
        f"{kept}; this start tunes without it and writes a new one."
    )


def _warn_unreadable(path: Path, fault: Exception) -> None:
    _warn_once(
        str(path),
        f"FlashInfer autotune cache {path} cannot be used ({fault}). It was left as "
        "it is; this start tunes without it. Repair or delete it to use a cache again.",
    )


def _warn_unwritable(directory: Path, fault: object) -> None:
    _warn_once(
        envs.SGLANG_CACHE_DIR.get(),
        f"FlashInfer autotune results cannot be kept in {directory} ({fault}). "
        "Serving goes on, but every start tunes again; set SGLANG_CACHE_DIR to a "
        "writable directory to keep them.",
    )


def _warn_once(key: str, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)
