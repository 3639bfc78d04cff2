"""series.py export: byte-stable, refuses what git am would damage, loses nothing."""

import subprocess

import pytest
from serieslib import export as export_module
from serieslib.am import Commit
from serieslib.messages import message_problem
from serieslib.project import mirror_files
from tiny_release import MESSAGE

FIRST = "0001-core-change-two-places.patch"


def test_round_trip_is_byte_stable(world):
    before = world.snapshot()
    world.run("apply", "--discard")
    assert world.run("export") == 0
    assert world.snapshot() == before
    assert world.run("check") == 0


def test_mirror_is_the_added_files_alone(world):
    mirror = set(mirror_files(world.root))
    assert mirror == {"python/sglang/new_part.py", "test/registered/unit/test_part.py"}
    assert (world.root / "python/sglang/new_part.py").read_bytes() == (
        world.engine / "python/sglang/new_part.py"
    ).read_bytes()


def test_patches_say_nothing_about_who_exported(world):
    text = (world.patches / FIRST).read_text()
    assert text.startswith("From 0000000000000000000000000000000000000000 ")
    assert "Subject: [PATCH] core: change two places\n" in text
    assert not text.rstrip().endswith(subprocess.getoutput("git --version").split()[-1])


def test_changed_series_replaces_patches_and_mirror(world):
    world.git("reset", "-q", "--hard", "HEAD~1")
    world.git("rm", "-q", "python/sglang/new_part.py")
    world.git("commit", "-q", "--amend", "--no-edit")
    world.commit("tool: add a script", {"python/sglang/go.sh": "#!/bin/sh\n"})
    (world.engine / "python/sglang/go.sh").chmod(0o755)
    world.git("commit", "-qa", "--amend", "--no-edit")
    assert world.run("export") == 0
    names = [path.name for path in sorted(world.patches.iterdir())]
    assert names == [FIRST, "0002-tool-add-a-script.patch"]
    assert not (world.root / "test").exists()
    assert (world.root / "python/sglang/go.sh").stat().st_mode & 0o111
    assert world.run("check") == 0
    world.git("reset", "-q", "--hard", "HEAD~1")
    assert world.run("export") == 0  # and one patch less is no lost patch
    assert world.run("apply") == 0


@pytest.mark.parametrize("unusual", ["Naïve Ünïcode – ok", "x" * 200, "one (a) #1"])
def test_unusual_subjects_survive(world, unusual):
    world.commit(f"core: {unusual}", {"python/sglang/third.py": "\n\n# no newline"})
    assert world.run("export") == 0
    assert world.run("check") == 0
    world.run("apply", "--discard")
    assert world.git("log", "-1", "--format=%s") == f"core: {unusual}"


def refused(world, capsys, *words: str) -> None:
    before = world.snapshot()
    assert world.run("export") == 1
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert "fix:" in message
    assert world.snapshot() == before
    assert not list((world.root / "build").glob(".scratch-*"))
    assert not (world.root / "build/export").exists()


def test_empty_range(empty, capsys):
    empty.run("apply")
    refused(empty, capsys, "no commit between the base")


def test_no_engine(empty, capsys):
    refused(empty, capsys, "no engine", "series.py apply")


@pytest.mark.parametrize(
    "subject, body, word",
    [
        ("core: no trailer", "Why: because.", "trailer is missing"),
        ("core: bad value", "Upstream-Status: Maybe", "not the last paragraph"),
        ("core: no reason", "Upstream-Status: Inappropriate", "not the last paragraph"),
        (
            "core: not last",
            "Upstream-Status: Pending\n\nmore",
            "not the last paragraph",
        ),
        (
            "core: two",
            "Upstream-Status: Pending\n\nUpstream-Status: Pending",
            "not the last paragraph",
        ),
        (
            "core: two trailers",
            "Signed-off-by: A <a@b.c>\nUpstream-Status: Pending",
            "not the last paragraph",
        ),
        ("[core] tag", MESSAGE, "bracket tag"),
        ("[PATCH] core: tag", MESSAGE, "bracket tag"),
        ("no area", MESSAGE, "not `area: summary`"),
        ("core: dashes", f"One.\n---\nTwo.\n\n{MESSAGE}", "three dashes"),
        ("core: dashes and more", f"One.\n--- a/x\nTwo.\n\n{MESSAGE}", "three dashes"),
        ("core: diff", f"diff --git a/x b/x\n\n{MESSAGE}", "start of a diff"),
        ("core: index", f"Index: x\n\n{MESSAGE}", "start of a diff"),
        ("core: two  spaces", MESSAGE, "comes out of git am changed"),
        (
            "core: header",
            f"From: X <x@y.z>\n\n{MESSAGE}",
            "comes out of git am changed",
        ),
    ],
)
def test_message_that_would_not_survive(world, capsys, subject, body, word):
    world.commit(subject, {"python/sglang/third.py": "A = 1\n"}, body)
    refused(world, capsys, word, subject, "git rebase -i base")


def test_statuses_of_the_vocabulary_are_taken():
    for status in (
        "Pending",
        "Submitted [https://x/1]",
        "Backport [u]",
        "Inappropriate [w]",
    ):
        body = f"Why.\n\nUpstream-Status: {status}"
        assert message_problem(Commit("1", "core: x", body, 1, 1, 0)) is None


def test_merge_commit(world, capsys):
    world.git("checkout", "-q", "-b", "side", "HEAD~1")
    world.commit("side: x", {"python/sglang/side.py": "A = 1\n"})
    world.git("checkout", "-q", "series")
    world.git("merge", "-q", "side", "-m", f"merge: side\n\n{MESSAGE}")
    refused(world, capsys, "is a merge")


def test_empty_commit(world, capsys):
    world.git("commit", "-q", "--allow-empty", "-m", f"core: nothing\n\n{MESSAGE}")
    refused(world, capsys, "changes nothing")


def test_file_with_no_place_in_the_mirror(world, capsys):
    world.commit("docs: x", {"docs/x.md": "x\n"})
    refused(world, capsys, "docs/x.md", "outside python/ and test/")


def test_symbolic_link(world, capsys):
    (world.engine / "python/sglang/link.py").symlink_to("core.py")
    world.git("add", "-A")
    world.git("commit", "-qm", f"core: link\n\n{MESSAGE}")
    refused(world, capsys, "link.py", "symbolic link")


def test_dirty_engine(world, capsys):
    (world.engine / "python/sglang/core.py").write_text("X = 1\n")
    refused(world, capsys, "python/sglang/core.py", "commit them")


def test_unrelated_history(world, capsys):
    world.git("checkout", "-q", "--orphan", "lost")
    world.git("commit", "-qm", f"core: lost\n\n{MESSAGE}")
    refused(world, capsys, "not an ancestor")


def test_stray_file_in_patches_is_kept(world, capsys):
    (world.patches / "cover.txt").write_text("hello\n")
    refused(world, capsys, "cover.txt", "move it out")


@pytest.mark.parametrize("where", ["patch", "mirror", "extra", "missing"])
def test_edits_by_hand_are_not_overwritten(world, capsys, where):
    edited = {
        "patch": world.patches / FIRST,
        "missing": world.patches / FIRST,
        "mirror": world.root / "python/sglang/new_part.py",
        "extra": world.root / "test/mine.py",
    }[where]
    if where == "missing":
        edited.unlink()
    else:
        edited.write_text("mine\n")
    name = edited.relative_to(world.root).as_posix()
    refused(world, capsys, name, "--overwrite")
    assert world.run("export", "--overwrite") == 0
    assert world.run("check") == 0


def test_failure_while_writing_puts_everything_back(world, capsys, monkeypatch):
    world.commit("third: x", {"python/sglang/third.py": "A = 1\n"})
    placed = []
    place = export_module.Transaction._place

    def full_disk(self, source, target):
        if len(placed) == 1:
            placed.append(target)
            raise OSError(28, "No space left on device")
        placed.append(target)
        place(self, source, target)

    monkeypatch.setattr(export_module.Transaction, "_place", full_disk)
    refused(world, capsys, "No space left")
    assert len(placed) > 1


def test_user_settings_in_the_engine_do_not_reach_the_patches(world):
    before = world.snapshot()
    for key, value in {
        "diff.noprefix": "true",
        "diff.context": "9",
        "diff.algorithm": "patience",
        "format.signature": "me",
        "format.subjectPrefix": "RFC",
        "core.autocrlf": "true",
        "commit.gpgsign": "true",
    }.items():
        world.git("config", key, value)
    (world.engine / ".git/info/attributes").write_text("*.py diff=python\n")
    assert world.run("export") == 0
    assert world.snapshot() == before
