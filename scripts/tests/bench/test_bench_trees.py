"""Engine trees: which folder an arm means, and what its digest covers."""

import os

import pytest
from bench import trees
from bench.config import Arm, Config
from bench.digest import folder_digest
from bench.errors import BenchError, CheckFailed
from benchkit import git


def resolve(engine, scratch, **settings):
    return trees.resolve("x", Arm(engine=str(engine), **settings), scratch)


def test_without_patches_an_arm_is_the_folder_as_it_lies(standin, tmp_path):
    (standin / "python" / "sglang" / "edited.py").write_text("x = 1\n")
    tree = resolve(standin, tmp_path)
    assert tree.package == str(standin / "python" / "sglang") and not tree.commit
    for place in (standin / "python", standin / "python" / "sglang"):
        assert resolve(place, tmp_path).digest == tree.digest


def test_patches_false_is_the_root_commit_with_the_compiled_files(standin, tmp_path):
    tree = resolve(standin, tmp_path / "scratch", patches=False)
    root = git(standin, "rev-list", "--max-parents=0", "HEAD")
    assert tree.commit == root
    package = tmp_path / "scratch" / "trees" / root / "python" / "sglang"
    assert tree.package == str(package)
    assert not (package / "patched.py").exists()
    assert (package / "compiled.so").read_bytes() == b"not in git"
    assert tree.digest != resolve(standin, tmp_path, patches=True).digest
    assert os.listdir(tmp_path / "scratch" / "trees") == [root]


def test_a_revision_is_exported(standin, tmp_path):
    git(standin, "branch", "only-base", "HEAD~1")
    one = resolve(standin, tmp_path / "s", revision="only-base")
    assert one.digest == resolve(standin, tmp_path / "s", patches=False).digest
    with pytest.raises(BenchError, match="no-such"):
        resolve(standin, tmp_path / "s", revision="no-such")


def test_an_export_that_is_cut_short_leaves_nothing(standin, tmp_path, monkeypatch):
    def stop(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(trees.os, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        resolve(standin, tmp_path / "scratch", patches=False)
    assert os.listdir(tmp_path / "scratch" / "trees") == []


def test_patches_true_on_an_unpatched_repository_is_refused(standin, tmp_path):
    git(standin, "reset", "-q", "--hard", "HEAD~1")
    with pytest.raises(BenchError, match="apply the series first"):
        resolve(standin, tmp_path, patches=True)


def test_the_root_of_a_longer_history_is_no_base(standin, tmp_path):
    """As in upstream's own repository: the series lies on some later commit."""
    git(standin, "commit", "--amend", "-qm", "release")
    git(standin, "commit", "--allow-empty", "-qm", "a: b\n\nUpstream-Status: Pending")
    with pytest.raises(BenchError, match="arm x: patches = false .* with revision"):
        resolve(standin, tmp_path / "scratch", patches=False)
    assert resolve(standin, tmp_path / "scratch", revision="HEAD~1").commit
    git(standin, "checkout", "-q", "HEAD~2")  # a root without anything on it
    assert resolve(standin, tmp_path / "scratch", patches=False).commit


def test_an_edited_tree_is_measured_as_it_lies_with_a_warning(
    standin, tmp_path, capsys
):
    committed = resolve(standin, tmp_path, patches=True)
    assert capsys.readouterr().out == ""
    (standin / "python" / "sglang" / "edited.py").write_text("x = 1\n")
    assert resolve(standin, tmp_path, patches=True).digest != committed.digest
    assert "warning: arm x: " in capsys.readouterr().out


def test_patches_need_a_repository(standin, tmp_path):
    plain = tmp_path / "plain"
    (standin / "python").rename(plain)
    environment = os.environ.copy()
    os.environ["GIT_CEILING_DIRECTORIES"] = str(tmp_path)
    try:
        with pytest.raises(BenchError, match="no git repository"):
            resolve(plain, tmp_path, patches=False)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    assert resolve(plain, tmp_path).files > 0


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(BenchError, match="python/sglang"):
        resolve(tmp_path, tmp_path)


def test_the_digest_covers_names_and_texts_but_no_compiled_files(tmp_path):
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.json").write_text("2")
    first = folder_digest(tmp_path)
    assert first[1] == 2
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (tmp_path / "c.so").write_bytes(b"x")
    assert folder_digest(tmp_path) == first
    (tmp_path / "b.json").write_text("3")
    changed = folder_digest(tmp_path)
    assert changed != first
    (tmp_path / "b.json").rename(tmp_path / "d.json")
    assert folder_digest(tmp_path)[0] not in (first[0], changed[0])


def test_one_file_and_two_with_the_same_letters_differ(tmp_path):
    (tmp_path / "a").write_text("xbz")
    first = folder_digest(tmp_path)[0]
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("z")
    assert folder_digest(tmp_path)[0] != first


def test_twin_arms_are_refused_unless_stated():
    arms = {"a": Arm(engine="e"), "b": Arm(engine="e"), "c": Arm(engine="f")}
    config = Config(experiment="x", baseline="a", arms=arms)
    with pytest.raises(CheckFailed, match="arms a and b run the same tree"):
        trees.refuse_twins(config, {"a": "1", "b": "1", "c": "2"})
    arms["b"].same_tree_as = "a"
    trees.refuse_twins(config, {"a": "1", "b": "1", "c": "2"})
