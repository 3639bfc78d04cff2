"""series.py check: green as exported, red and precise for each kind of damage."""

import sys

import pytest
from serieslib import check as check_module
from serieslib import imports
from serieslib.project import Project

FIRST = "0001-core-change-two-places.patch"


def red(world, capsys, *words: str) -> str:
    before = world.snapshot()
    capsys.readouterr()
    assert world.run("check") == 1
    out = capsys.readouterr()
    for word in words:
        assert word in out.out, out.out + out.err
    assert world.snapshot() == before
    return out.out


def test_green_as_exported_and_without_an_engine(world, capsys):
    world.engine.rename(world.root / "build/away")
    assert world.run("check") == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out
    assert "imports after each patch: not run" in out and "series.py test" in out


def test_green_with_no_patches(empty):
    assert empty.run("check") == 0


@pytest.mark.parametrize(
    "old, new",
    [
        ("Why: the test", "Why: the text"),  # message
        ("+line_3 = 33", "+line_3 = 34"),  # an added line
        (" line_5 = 5", " line_5 = 6"),  # a context line
        ("-line_3 = 3\n", "-line_3 = 4\n"),  # a removed line
        ("@@ -28,6 +28,7 @@", "@@ -29,6 +29,7 @@"),  # an offset that am would forgive
        ("From: U <u@", "From: V <u@"),
        ("Date: ", "Date:  "),
        (" 2 files changed", " 3 files changed"),
        ("index 0000", "index 1000"),
    ],
)
def test_one_byte_in_a_patch(world, capsys, old, new):
    path = world.patches / FIRST
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    red(world, capsys, FIRST)


def test_deleted_hunk(world, capsys):
    path = world.patches / FIRST
    text = path.read_text()
    start = text.index("@@ -28,6")
    end = text.index("diff --git", start)
    path.write_text(text[:start] + text[end:])
    red(world, capsys, FIRST)


def test_deleted_file_section(world, capsys):
    path = world.patches / FIRST
    text = path.read_text()
    start = text.index("diff --git a/python/sglang/new_part.py")
    path.write_text(text[:start] + "\n")
    red(world, capsys, FIRST, "python/sglang/new_part.py")


@pytest.mark.parametrize(
    "name", ["README.md", "cover-letter.patch", "0003-empty.patch"]
)
def test_extra_file_in_patches(world, capsys, name):
    (world.patches / name).write_text("hello\n")
    red(world, capsys, name)


def test_missing_seal(world, capsys):
    (world.root / "patches.sha256").unlink()
    red(world, capsys, f"patches/{FIRST}: is not as `series.py export` wrote it")


def test_missing_patch(world, capsys):
    (world.patches / FIRST).unlink()
    red(world, capsys, "expected number 0001")


def test_renamed_patch(world, capsys):
    (world.patches / FIRST).rename(world.patches / "0001-another-name.patch")
    red(world, capsys, FIRST, "0001-another-name.patch")


@pytest.mark.parametrize("kind", ["byte", "missing", "extra", "upstream", "mode"])
def test_mirror_in_both_directions(world, capsys, kind):
    path = world.root / "python/sglang/new_part.py"
    if kind == "byte":
        path.write_text(path.read_text().replace("VALUE", "value"))
    elif kind == "missing":
        path.unlink()
    elif kind == "mode":
        path.chmod(0o755)
    else:
        path = path.with_name("core.py" if kind == "upstream" else "extra.py")
        path.write_text("A = 1\n")
    red(world, capsys, path.relative_to(world.root).as_posix())


def test_caches_in_the_mirror_do_not_count(world):
    cache = world.root / "python/sglang/__pycache__"
    cache.mkdir()
    (cache / "new_part.cpython-311.pyc").write_bytes(b"x")
    assert world.run("check") == 0


def test_bad_trailer_that_was_applied_by_hand(world, capsys):
    for path in world.patches.iterdir():
        path.write_text(path.read_text().replace("Status: Pending", "Status: pending"))
    red(world, capsys, "0001 `core: change two places`", "Upstream-Status")


def test_patch_that_breaks_compilation_until_the_next_one(world, capsys):
    world.commit("third: broken", {"python/sglang/third.py": "def f(:\n"})
    world.commit("third: mended", {"python/sglang/third.py": "def f(): ...\n"})
    assert world.run("export") == 0
    out = red(world, capsys, "patch 0003: python/sglang/third.py:1: does not compile")
    assert "patch 0004" not in out


def test_after_a_killed_export_check_sees_the_old_state(world, monkeypatch):
    before = world.snapshot()
    world.commit("third: x", {"python/sglang/third.py": "A = 1\n"})
    transaction = check_module.finish_interrupted.__globals__["Transaction"]
    monkeypatch.setattr(transaction, "mark", lambda self, state: None)
    monkeypatch.setattr(transaction, "drop", lambda self: None)
    assert world.run("export") == 0  # written, but never marked as done
    assert world.snapshot() != before
    monkeypatch.undo()
    with Project(world.root).lock():
        check_module.finish_interrupted(Project(world.root))
    assert world.snapshot() == before


class TestImports:
    """The real worker, on a package small enough to import in no time."""

    @pytest.fixture
    def site(self, world, tmp_path, monkeypatch):
        """An 'environment': this interpreter with the tiny release importable."""
        packages = tmp_path / "site"
        world.git("worktree", "add", "-q", "--detach", str(packages), "base")
        python = tmp_path / "python"
        python.write_text(
            f"#!/bin/sh\nshift\nPYTHONPATH={packages}/python exec {sys.executable} "
            '-c "import sys; sys.argv = sys.argv[1:]; '
            'exec(compile(open(sys.argv[0]).read(), sys.argv[0], \'exec\'))" "$@"\n'
        )
        python.chmod(0o755)
        monkeypatch.setattr(check_module, "find_environment", lambda project: python)
        monkeypatch.setattr(imports, "PRELOAD", [])
        return python

    def test_green_then_cached(self, world, site, monkeypatch, capsys):
        assert world.run("check") == 0
        assert "touched modules import" in capsys.readouterr().out
        monkeypatch.setattr(imports, "_run", lambda *args: pytest.fail("was cached"))
        assert world.run("check") == 0

    def test_name_that_only_a_later_patch_brings(self, world, site, capsys):
        world.commit(
            "third: too early",
            {"python/sglang/third.py": "from sglang.late import A\n"},
        )
        world.commit("late: here", {"python/sglang/late.py": "A = 1\n"})
        assert world.run("export") == 0
        out = red(world, capsys, "patch 0003: import sglang.third", "sglang.late")
        assert "patch 0004" not in out

    def test_what_fails_at_the_release_too_is_a_note(self, world, site, capsys):
        package = site.parent / "site/python/sglang"
        (package / "other.py").write_text("import no_such_gpu_library\n")
        world.commit(
            "other: more", {"python/sglang/other.py": "import no_such_gpu_library\n"}
        )
        assert world.run("export") == 0
        assert world.run("check") == 1  # new_part itself imports at no release
        out = capsys.readouterr().out
        assert "patch 0003: import sglang.other: fails at the release too" in out

    def test_process_that_dies_is_red(self, world, site, capsys):
        world.commit("third: x", {"python/sglang/third.py": "import os\nos._exit(3)\n"})
        assert world.run("export") == 0
        red(world, capsys, "patch 0003: import (process): died while importing")


def test_module_names():
    name = imports._module
    assert name("python/sglang/a/b.py") == "sglang.a.b"
    assert name("python/sglang/a/__init__.py") == "sglang.a"
    assert name("python/sglang/a/__main__.py") is None
    assert name("test/registered/a.py") is None
    assert name("python/sglang/a/data.json") is None
    assert name("python/sglang/my-tool/x.py") is None
