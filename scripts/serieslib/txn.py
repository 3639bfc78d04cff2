"""Change several files as one: all of them or none, also after a kill.

A store folder on the same file system holds the new and the old bytes and a journal.
The journal is written only when both are complete, so at any moment either nothing
has been touched (no journal), or `roll_back` finds everything it needs.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

JOURNAL = "journal.json"


@dataclass(frozen=True)
class Change:
    """``data`` None deletes the file; ``mode`` None keeps the old mode (new: 0644)."""

    path: Path
    data: bytes | None
    mode: int | None = None


class Transaction:
    """States in the journal: `open` (to be rolled back after a kill), then `done`.

    `restored` is a finished roll-back whose store is being removed.
    """

    def __init__(self, store: Path, root: Path) -> None:
        """``root``: the journal names files relative to it, so a moved tree is fine."""
        self.store = store
        self.root = root

    def state(self) -> str | None:
        """None when there is no journal: nothing outside the store was touched."""
        journal = self.read()
        return None if journal is None else journal["state"]

    def read(self) -> dict | None:
        try:
            return json.loads((self.store / JOURNAL).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def run(self, changes: list[Change], **extra: object) -> None:
        """Make every change; on any error all are undone and the error goes on.

        ``extra`` is kept in the journal for the caller.
        """
        try:
            self.prepare(changes, **extra)
            self.apply()
            self.mark("done")
        except BaseException:
            self.roll_back()
            raise

    def prepare(self, changes: list[Change], **extra: object) -> None:
        """Write both versions of every file into the store, then the journal."""
        for change in changes:
            if os.path.lexists(change.path) and not change.path.is_file():
                raise FileExistsError(f"{change.path} is in the way: it is no file")
        if self.store.exists():
            shutil.rmtree(self.store)
        self.store.mkdir(parents=True)
        entries, new_folders = [], []
        for number, change in enumerate(changes):
            had = change.path.is_file()
            if had:
                _copy(change.path, self.store / f"{number}.old")
            if change.data is not None:
                new = self.store / f"{number}.new"
                _write(new, change.data)
                mode = change.mode
                if mode is None:
                    mode = change.path.stat().st_mode & 0o7777 if had else 0o644
                new.chmod(mode)
            folder = change.path.parent
            while not folder.exists() and self._name(folder) not in new_folders:
                new_folders.append(self._name(folder))
                folder = folder.parent
            keep = change.data is not None
            entries.append({"path": self._name(change.path), "had": had, "keep": keep})
        new_folders.sort(key=len, reverse=True)
        journal = {"state": "open", "entries": entries, "folders": new_folders}
        self._write_journal(journal | extra)

    def apply(self) -> None:
        for number, entry in enumerate(self.read()["entries"]):
            path = self.root / entry["path"]
            if entry["keep"]:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._place(self.store / f"{number}.new", path)
            else:
                _remove(path)

    def mark(self, state: str) -> None:
        self._write_journal(self.read() | {"state": state})

    def roll_back(self) -> None:
        """Put every file back; may itself be killed and run again."""
        journal = self.read()
        if journal is not None and journal["state"] != "restored":
            self._write_journal(journal | {"state": "open"})
            for number, entry in enumerate(journal["entries"]):
                path = self.root / entry["path"]
                if entry["had"]:
                    self._place(self.store / f"{number}.old", path)
                else:
                    _remove(path)
            for folder in journal["folders"]:
                try:
                    os.rmdir(self.root / folder)
                except OSError:
                    pass  # never made, or somebody else's files are in it
            self.mark("restored")
        self.drop()

    def drop(self) -> None:
        """Remove the store of a finished change; a killed drop is taken up later."""
        if self.store.exists():
            shutil.rmtree(self.store)

    def drop_new(self) -> None:
        """Keep only what a later roll-back needs."""
        for entry in self.store.glob("*.new"):
            entry.unlink()
        (self.store / "placing").unlink(missing_ok=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _place(self, source: Path, target: Path) -> None:
        """Replace ``target`` by a copy of ``source`` in one step."""
        temporary = self.store / "placing"
        _copy(source, temporary)
        os.replace(temporary, target)

    def _write_journal(self, journal: dict) -> None:
        temporary = self.store / "journal.tmp"
        _write(temporary, json.dumps(journal, indent=1, sort_keys=True).encode())
        os.replace(temporary, self.store / JOURNAL)


def _remove(path: Path) -> None:
    """Delete a file that may already be gone, or whose folder never came to be."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        pass


def _copy(source: Path, target: Path) -> None:
    """Bytes, mode and times."""
    _write(target, source.read_bytes())
    shutil.copystat(source, target)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
