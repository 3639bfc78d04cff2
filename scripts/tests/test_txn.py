"""Transaction: all or nothing, killed at any step, for every step there is."""

import os
import shutil
from pathlib import Path

import pytest
from killing import killed_at
from serieslib.txn import Change, Transaction


def make(root: Path) -> None:
    root.mkdir()
    (root / "a").write_bytes(b"old a")
    (root / "b").write_bytes(b"old b")
    (root / "b").chmod(0o600)
    for name in "ab":
        os.utime(root / name, ns=(10**18, 10**18 + 7))


@pytest.fixture
def tree(tmp_path):
    make(tmp_path / "tree")
    return tmp_path / "tree"


def content(root: Path) -> dict:
    return {
        path.relative_to(root).as_posix(): (
            path.read_bytes() if path.is_file() else None,
            path.stat().st_mode,
            path.stat().st_mtime_ns if path.is_file() else 0,
        )
        for path in sorted(root.rglob("*"))
        if "store" not in path.relative_to(root).parts
    }


def recover(store: Path) -> None:
    transaction = Transaction(store, store.parent)
    if transaction.state() == "done":
        transaction.drop()
    else:
        transaction.roll_back()


def work(root: Path) -> None:
    transaction = Transaction(root / "store", root)
    transaction.run(
        [
            Change(root / "a", b"new a", 0o755),
            Change(root / "b", None),
            Change(root / "deep/er/c", b"c"),
            Change(root / "d", b"d"),
        ]
    )
    transaction.drop()


def test_killed_at_every_step(tree):
    before = content(tree)
    after, at = None, 0
    while True:
        at += 1
        killed = killed_at(at, lambda: work(tree))
        recover(tree / "store")
        assert not (tree / "store").exists()
        now = content(tree)
        if now != before:
            assert {k: v[0] for k, v in now.items()} == {
                "a": b"new a", "d": b"d", "deep": None, "deep/er": None,
                "deep/er/c": b"c",
            }  # fmt: skip
            assert after is None or after < at
            after = at
        if not killed:
            break
        if now != before:
            # It was finished when the kill came: start over from the old tree.
            shutil.rmtree(tree)
            make(tree)
            assert content(tree) == before
    assert at > 20 and after is not None


def test_roll_back_killed_at_every_step(tree):
    before = content(tree)
    at = 0
    killed = True
    while killed:
        at += 1
        transaction = Transaction(tree / "store", tree)
        transaction.prepare(
            [
                Change(tree / "a", b"x"),
                Change(tree / "b", None),
                Change(tree / "n/e", b"y"),
            ]
        )
        transaction.apply()
        killed = killed_at(at, transaction.roll_back)
        recover(tree / "store")
        assert content(tree) == before
        assert not (tree / "store").exists()
    assert at > 8


def test_error_in_the_middle_undoes_and_goes_on(tree):
    before = content(tree)
    bad = Change(tree / "b/below", b"a folder is needed where a file is")
    with pytest.raises(OSError):
        Transaction(tree / "store", tree).run([Change(tree / "a", b"x"), bad])
    assert content(tree) == before
    assert not (tree / "store").exists()


def test_a_folder_in_the_way_is_refused_before_anything(tree):
    (tree / "folder").mkdir()
    before = content(tree)
    changes = [Change(tree / "a", b"x"), Change(tree / "folder", b"y")]
    with pytest.raises(FileExistsError, match="folder is in the way"):
        Transaction(tree / "store", tree).run(changes)
    assert content(tree) == before


def test_extra_values_are_kept(tree):
    transaction = Transaction(tree / "store", tree)
    transaction.run([Change(tree / "a", b"x")], version="1")
    assert transaction.read()["version"] == "1"
    assert transaction.state() == "done"
