"""series.py apply: build/engine, from nothing and again, and what it refuses."""

import os
import re
import subprocess

import pytest
from serieslib import base, fetch, gitio, project
from tiny_release import FILES, LINES


def test_engine_holds_the_release_with_binaries_ignored(empty, capsys):
    assert empty.run("apply") == 0
    for name, data in FILES.items():
        here = empty.engine / "python" / name
        want = data if isinstance(data, bytes) else data.encode()
        assert here.read_bytes() == want
    assert os.access(empty.engine / "python/sglang/run.sh", os.X_OK)
    assert empty.git("status", "--porcelain") == ""
    tracked = empty.git("ls-files").splitlines()
    assert "python/sglang/kept/notes.txt" in tracked
    assert not [name for name in tracked if "native.so" in name or "dist-info" in name]
    assert empty.git("rev-parse", "base") == empty.git("rev-parse", "HEAD")


def test_prints_what_it_made_and_the_next_commands(world, capsys):
    world.run("apply", "--discard")
    out = capsys.readouterr().out
    tree = world.git("rev-parse", "HEAD^{tree}")
    commit = project.Project(world.root).upstream.base_commit
    assert f"commit {commit}" in out
    assert "0001  core: change two places (2 files, +3 -1)" in out
    assert "0002  other, core: use it (2 files, +3 -1)" in out
    assert f"tree   {tree}" in out
    assert "series.py test" in out
    assert f"PYTHONPATH={world.engine / 'python'}" in out


def test_again_changes_nothing(world, capsys):
    world.run("apply", "--discard")
    before = world.snapshot(world.engine)
    assert world.run("apply") == 0
    assert world.snapshot(world.engine) == before
    assert "was already there" in capsys.readouterr().out


def test_same_commit_ids_from_another_folder_and_user(world, tmp_path, monkeypatch):
    world.run("apply", "--discard")
    tip = world.git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "somebody else")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    world.run("apply", "--discard")
    assert world.git("rev-parse", "HEAD") == tip
    # Nothing of the moment or of the user may be in a commit, only the patch's own.
    for line in world.git("log", "--format=%at %ct %cn", "base..HEAD").splitlines():
        assert line == "1767323045 1767323045 KDA prefill series"


def test_git_am_by_hand_gives_the_same_tree(world, tmp_path):
    hand = tmp_path / "hand"
    world.git("clone", "--quiet", str(world.engine), str(hand))
    world.git("checkout", "--quiet", "-b", "hand", "base", folder=hand)
    patches = sorted(str(path) for path in world.patches.iterdir())
    world.git("am", *patches, folder=hand)
    tree = world.git("rev-parse", "HEAD^{tree}", folder=hand)
    assert tree == world.git("rev-parse", "HEAD^{tree}")


@pytest.mark.parametrize(
    "kind", ["edit", "untracked", "staged", "stash", "branch", "am"]
)
def test_refuses_to_lose_work(world, capsys, kind):
    path = world.engine / "python/sglang/other.py"
    if kind == "untracked":
        (world.engine / "notes.md").write_text("mine\n")
    elif kind == "am":
        bad = world.patches / "0001-core-change-two-places.patch"
        subprocess.run(["git", "am", bad], cwd=world.engine, capture_output=True)
        assert (world.engine / ".git/rebase-apply").exists()
    else:
        path.write_text("VALUE = 3\n")
    if kind == "staged":
        world.git("add", "-A")
    elif kind == "stash":
        world.git("stash")
    elif kind == "branch":
        world.git("checkout", "-q", "-b", "idea")
        world.git("commit", "-qam", "idea")
        world.git("checkout", "-q", "series")
    before = world.snapshot(world.engine / "python")
    assert world.run("apply") == 1
    message = capsys.readouterr().err
    assert "would lose" in message and "export" in message and "--discard" in message
    assert world.snapshot(world.engine / "python") == before
    assert world.run("apply", "--discard") == 0
    assert world.git("status", "--porcelain") == ""
    assert path.read_text() == "VALUE = 2\n"


def test_refuses_a_folder_it_did_not_make(empty, capsys):
    empty.engine.mkdir(parents=True)
    (empty.engine / "mine.txt").write_text("mine\n")
    assert empty.run("apply") == 1
    assert "was not made by" in capsys.readouterr().err
    assert (empty.engine / "mine.txt").read_text() == "mine\n"


def drop_from_seal(world, name: str) -> None:
    seal = world.root / "patches.sha256"
    lines = seal.read_text().splitlines(keepends=True)
    seal.write_text("".join(line for line in lines if name not in line))


def test_new_patches_replace_a_clean_engine(world):
    second = world.patches / "0002-other-core-use-it.patch"
    second.rename(world.root / "kept.patch")
    drop_from_seal(world, second.name)
    assert world.run("apply") == 0
    assert (world.engine / "python/sglang/other.py").read_text() == "VALUE = 1\n"


def test_a_patch_that_does_not_fit_is_named_and_nothing_is_left(world, capsys):
    first = world.patches / "0001-core-change-two-places.patch"
    text = first.read_text()
    first.write_text(text.replace(" line_5 = 5\n", " line_5 = 55\n"))
    before = world.snapshot(world.engine)
    assert world.run("apply") == 1
    message = capsys.readouterr().err
    assert "patches/0001-core-change-two-places.patch does not apply" in message
    assert "python/sglang/core.py:1" in message
    # git's advice is for a tree that is gone by now.
    assert "hint:" not in message and "git am --" not in message
    assert world.snapshot(world.engine) == before
    assert not list(world.root.glob("build/.scratch-*"))


def test_no_fuzz_and_no_guess_when_an_anchor_moved(world, capsys):
    """Context that occurs elsewhere in the file must not be taken instead."""
    first = world.patches / "0001-core-change-two-places.patch"
    first.write_text(first.read_text().replace("-line_3 = 3\n", "-line_3 = 4\n"))
    assert world.run("apply") == 1
    assert "does not apply" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["README.md", "0003-notes.txt", "x.patch", "0005-a.patch"]
)
def test_stray_file_in_patches_is_named(world, capsys, name):
    (world.patches / name).write_text("hello\n")
    assert world.run("apply") == 1
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["folder", "every patch", "last patch"])
@pytest.mark.parametrize("verb", [("apply",), ("rebase", "--onto", "0.5.23")])
def test_lost_patches_are_named_and_the_engine_is_kept(world, capsys, gone, verb):
    """Less than the seal lists is no shorter series."""
    last = world.patches / "0002-other-core-use-it.patch"
    if gone == "folder":
        world.patches.rename(world.root / "away")
    for path in [] if gone == "folder" else list(world.patches.iterdir()):
        if gone == "every patch" or path == last:
            path.unlink()
    before = world.snapshot(world.engine)
    assert world.run(*verb) == 1
    message = capsys.readouterr().err
    assert last.name in message and "git checkout -- patches" in message
    assert world.snapshot(world.engine) == before


def test_a_patch_renamed_or_edited_by_hand_is_applied(world):
    last = world.patches / "0002-other-core-use-it.patch"
    text = last.read_text().replace("VALUE = 2", "VALUE = 4")
    last.unlink()
    (world.patches / "0002-other.patch").write_text(text)
    assert world.run("apply") == 0
    assert (world.engine / "python/sglang/other.py").read_text() == "VALUE = 4\n"


def test_leftovers_of_a_killed_run_are_removed(world):
    stale = world.root / "build/.scratch-apply-x"
    stale.mkdir()
    (stale / "file").write_text("x")
    assert world.run("apply") == 0
    assert not stale.exists()


def test_interrupted_apply_leaves_the_old_engine(world, monkeypatch):
    world.run("apply", "--discard")
    before = world.snapshot(world.engine)
    last = world.patches / "0002-other-core-use-it.patch"
    last.write_text(last.read_text().replace("VALUE = 2", "VALUE = 4"))

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("serieslib.engine.write_state", stop)
    assert world.run("apply") == 130
    assert world.snapshot(world.engine) == before


class TestFetch:
    @pytest.fixture
    def cold(self, empty, tmp_path, monkeypatch):
        cache = tmp_path / "cold"
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        return empty

    def test_from_the_index_into_the_cache(self, cold, tmp_path):
        assert cold.run("apply") == 0
        kept = list((tmp_path / "cold" / project.CACHE_NAME / "wheels").glob("*.whl"))
        assert len(kept) == 1
        assert project.sha256_file(kept[0]) in (cold.root / "UPSTREAM").read_text()

    def test_no_network(self, cold, no_index, capsys, tmp_path):
        assert cold.run("apply") == 1
        message = capsys.readouterr().err
        assert "could not fetch sglang==0.5.23" in message
        assert "check the network" in message
        assert not cold.engine.exists()
        wheels = tmp_path / "cold" / project.CACHE_NAME / "wheels"
        assert [p.name for p in wheels.iterdir()] == ["lock"]

    def test_corrupt_download(self, cold, capsys, tmp_path):
        index = tmp_path / "bad"
        index.mkdir()
        (wheel,) = (cold.root / "index").glob("*.whl")
        (index / wheel.name).write_bytes(
            wheel.read_bytes().replace(b"line_7", b"line_8")
        )
        (cold.root / "index").unlink()
        (cold.root / "index").symlink_to(index)
        assert cold.run("apply") == 1
        message = capsys.readouterr().err
        assert "not the pinned file" in message and "expected sha256" in message
        assert not cold.engine.exists()
        assert not list((tmp_path / "cold" / project.CACHE_NAME).rglob("*.whl"))

    def test_damaged_cache_is_fetched_again(self, cold, release, tmp_path):
        wheels = tmp_path / "cold" / project.CACHE_NAME / "wheels"
        wheels.mkdir(parents=True)
        (wheel,) = release[0].glob("*.whl")
        (wheels / wheel.name).write_bytes(wheel.read_bytes()[:-100])
        assert cold.run("apply") == 0
        assert (wheels / wheel.name).read_bytes() == wheel.read_bytes()

    def test_read_only_home_falls_back_to_build(self, cold, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
        assert cold.run("apply") == 0
        assert list((cold.root / "build/wheels").glob("*.whl"))

    @pytest.mark.parametrize("key", ["text-tree-sha256", "base-commit"])
    def test_other_text_tree_or_base_is_refused(self, cold, capsys, key):
        path = cold.root / "UPSTREAM"
        path.write_text(re.sub(f"{key}: .*", f"{key}: {'0' * 40}", path.read_text()))
        assert cold.run("apply") == 1
        assert "git checkout -- UPSTREAM" in capsys.readouterr().err
        assert not cold.engine.exists()

    @pytest.mark.parametrize("kind", ["empty pack", "blob", "index", "ref", "HEAD"])
    def test_damaged_base_repository_is_made_again(self, cold, tmp_path, kind):
        assert cold.run("apply") == 0
        (kept,) = (tmp_path / "cold" / project.CACHE_NAME / "base").glob("*.git")
        name = {"index": "*.idx", "ref": "series", "HEAD": "HEAD"}.get(kind, "*.pack")
        (file,) = kept.rglob(name)
        data = bytearray(file.read_bytes())
        data[20] ^= 0xFF  # in a pack: of its first object, which is a file's text
        file.chmod(0o644)
        file.write_bytes(b"" if kind == "empty pack" else data)
        assert cold.run("apply", "--discard") == 0
        core = cold.engine / "python/sglang/core.py"
        assert core.read_text() == LINES

    def test_interpreter_without_a_wheel_takes_the_newest(self, cold, monkeypatch):
        monkeypatch.setattr(
            fetch.sys, "version_info", type("V", (), dict(major=3, minor=99))
        )
        assert fetch.wheel_tag({"cp311": 1, "cp312": 2}) == "cp312"


def test_text_tree_is_the_same_for_every_interpreter_tag(release):
    """The digest covers text files alone, so another wheel's binaries do not matter."""
    one = {"sglang/a.py": ("100644", b"x"), "sglang/a.so": ("100644", b"\0one")}
    two = {"sglang/a.py": ("100644", b"x"), "sglang/b.so": ("100644", b"\0two")}
    digest = base.text_tree_digest(base.text_files(one, "sglang"))
    assert digest == base.text_tree_digest(base.text_files(two, "sglang"))
    for changed in (("100755", b"x"), ("100644", b"y")):
        other = base.text_files(one | {"sglang/a.py": changed}, "sglang")
        assert base.text_tree_digest(other) != digest


def test_old_git_is_refused(monkeypatch, tmp_path, capsys):
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\necho git version 2.25.1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gitio.require_git.cache_clear()
    with pytest.raises(gitio.SeriesError, match="too old"):
        gitio.require_git()
    gitio.require_git.cache_clear()
