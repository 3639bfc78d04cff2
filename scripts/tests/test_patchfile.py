"""The in-memory applier agrees with git and refuses everything that is not exact."""

import random

import pytest
from serieslib import patchfile
from serieslib.errors import SeriesError
from serieslib.export import format_series
from serieslib.gitio import Git, init
from tiny_release import LINES


def commit_and_format(tmp_path, before: dict, after: dict) -> list[patchfile.FilePatch]:
    git = init(tmp_path / "repo")
    for state in (before, after):
        for path in git.lines("ls-files", "-z"):
            (git.folder / path).unlink()
        for name, data in state.items():
            (git.folder / name).write_bytes(data)
        git.raw("add", "-A")
        git.raw("commit", "-q", "--allow-empty", "-m", "core: x")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    base, tip = (git.out("rev-parse", name) for name in ("HEAD~1", "HEAD"))
    (data,) = format_series(git, base, tip, scratch).values()
    return patchfile.parse_patch(data, "patches/p")


def check(tmp_path, before: dict, after: dict) -> None:
    patches = commit_and_format(tmp_path, before, after)
    assert {p.path for p in patches} == {
        n for n in before.keys() | after.keys() if before.get(n) != after.get(n)
    }
    for patch in patches:
        made = patchfile.apply_file(before.get(patch.path), patch, "p")
        assert made == after.get(patch.path)


@pytest.mark.parametrize(
    "before, after",
    [
        ({"a": b"1\n2\n3\n"}, {"a": b"1\n2\n3\n4\n"}),
        ({"a": b"1\n2\n3\n"}, {"a": b"0\n1\n2\n3\n"}),
        ({"a": b"1\n2\n3"}, {"a": b"1\n2\n3\n"}),
        ({"a": b"1\n2\n3\n"}, {"a": b"1\n2\n3"}),
        ({"a": b"1"}, {"a": b"2"}),
        ({"a": b""}, {"a": b"x\n"}),
        ({"a": b"x\n"}, {"a": b""}),
        ({}, {"a": b"x\n", "b": b"y"}),
        ({"a": b"x\n", "b": b"y"}, {"b": b"y"}),
        ({"a": b"x\r\ny\r\n"}, {"a": b"x\r\nz\r\n"}),
        ({"a": b"-- \n--- a\n+++ b\n"}, {"a": b"-- \n--- a\n@@ -1 +1 @@\n"}),
        ({"a": b"x\ndiff --git a/q b/q\n"}, {"a": b"y\ndiff --git a/q b/q\n"}),
        ({"a": "naïve\n".encode()}, {"a": "naïf\n".encode()}),
        ({"a b": b"1\n"}, {"a b": b"2\n"}),
        ({"a": b"x\fy\nz\x0bw\n"}, {"a": b"x\fy\nq\x0bw\n"}),
    ],
)
def test_same_as_git(tmp_path, user, before, after):
    check(tmp_path, before, {"keep": b"k\n"} | after if not after else after)


@pytest.mark.parametrize("seed", range(6))
def test_random_edits(tmp_path, user, seed):
    rng = random.Random(seed)
    lines = [b"%d\n" % rng.randrange(6) for _ in range(rng.randrange(1, 80))]
    changed = [
        line
        for line in lines
        for line in rng.choice([[line], [line], [line], [], [line, b"new\n"], [b"9\n"]])
    ]
    before, after = b"".join(lines), b"".join(changed)
    if seed % 2:
        after = after.rstrip(b"\n")
    check(tmp_path, {"f": before}, {"f": after, "g": b"x\n"})


@pytest.fixture
def one(world):
    path = sorted(world.patches.iterdir())[0]
    return path.read_bytes()


def test_other_preimage_is_refused(one):
    core = next(
        p for p in patchfile.parse_patch(one, "p") if p.path.endswith("core.py")
    )
    with pytest.raises(SeriesError, match="not the version"):
        patchfile.apply_file(LINES.replace("line_9", "line_x").encode(), core, "p")
    with pytest.raises(SeriesError, match="not the version"):
        patchfile.apply_file(None, core, "p")


@pytest.mark.parametrize(
    "old, new, word",
    [
        (b" line_5 = 5\n", b" line_5 = 6\n", "differs"),
        (b"+line_3 = 33\n", b"+line_3 = 34\n", "damaged"),
        (b"@@ -28,6 +28,7 @@", b"@@ -27,6 +27,7 @@", "differs"),
        (b"@@ -28,6 +28,7 @@", b"@@ -28,9 +28,7 @@", "cut short"),
        (b"@@ -28,6 +28,7 @@", b"@@ 28 @@", "damaged hunk header"),
        (b"index ", b"index a", "blob ids"),
        (b"diff --git a/python/sglang/core.py b/", b"diff --git a/x b/", "renamed"),
    ],
)
def test_damaged_patch_is_refused(one, old, new, word):
    assert old in one
    with pytest.raises(SeriesError, match=word):
        for patch in patchfile.parse_patch(one.replace(old, new, 1), "p"):
            before = LINES.encode() if patch.path.endswith("core.py") else None
            patchfile.apply_file(before, patch, "p")


def test_binary_and_rename_are_refused():
    head = b"diff --git a/x b/x\nindex " + b"0" * 40 + b".." + b"1" * 40 + b"\n"
    for line in (b"GIT binary patch", b"rename from x"):
        with pytest.raises(SeriesError, match="does not take"):
            patchfile.parse_patch(head + line + b"\n", "p")


def test_states_follow_the_series(world):
    states = patchfile.file_states(sorted(world.patches.iterdir()))
    assert len(states) == 3
    git = Git(world.engine)
    for state, commit in zip(states, ("base", "HEAD~1", "HEAD")):
        for path, blob in state.items():
            found = git.run("rev-parse", "--verify", "--quiet", f"{commit}:{path}")
            assert (found.stdout.decode().strip() or None) == blob


def test_patches_that_do_not_follow(world):
    first, second = sorted(world.patches.iterdir())
    world.commit("other: more", {"python/sglang/other.py": "VALUE = 3\n"})
    world.run("export")
    second.unlink()
    with pytest.raises(SeriesError, match="does not follow"):
        patchfile.file_states([first, world.patches / "0003-other-more.patch", first])
