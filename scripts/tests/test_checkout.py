"""series.py apply --checkout: the user's own checkout, whole or not at all."""

import subprocess

import pytest


@pytest.fixture
def mine(world, tmp_path):
    """A user's checkout at the right base, with files that the wheel does not hold."""
    folder = tmp_path / "mine"
    world.git("clone", "--quiet", str(world.engine), str(folder))
    world.git("checkout", "--quiet", "-B", "main", "base", folder=folder)
    (folder / "README.md").write_text("upstream's own\n")
    (folder / "test/registered/unit").mkdir(parents=True)
    (folder / "test/registered/unit/test_theirs.py").write_text("A = 1\n")
    world.git("add", "-A", folder=folder)
    world.git("commit", "-qm", "v", folder=folder)
    world.git("tag", "v0.5.23", folder=folder)
    return folder


def snapshot(world, folder):
    files = {p: d for p, d in world.snapshot(folder).items() if "/.git/" not in p}
    return files, world.git("rev-parse", "HEAD", folder=folder)


def apply(world, folder) -> int:
    return world.run("apply", "--checkout", str(folder))


def refused(world, folder, capsys, *words: str) -> None:
    before = snapshot(world, folder)
    assert apply(world, folder) == 1
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert snapshot(world, folder) == before


def test_applies_on_top_of_head(world, mine, capsys):
    assert apply(world, mine) == 0
    assert "applied 2 patches" in capsys.readouterr().out
    assert world.git("status", "--porcelain", folder=mine) == ""
    assert world.git("log", "--format=%s", "-3", folder=mine).splitlines() == [
        "other, core: use it",
        "core: change two places",
        "v",
    ]
    assert world.git("rev-parse", "--abbrev-ref", "HEAD", folder=mine) == "main"
    assert (mine / "python/sglang/other.py").read_text() == "VALUE = 2\n"


def test_detached_head(world, mine):
    world.git("checkout", "-q", "--detach", folder=mine)
    assert apply(world, mine) == 0
    assert (mine / "python/sglang/new_part.py").exists()


def test_already_applied(world, mine, capsys):
    apply(world, mine)
    before = snapshot(world, mine)
    assert apply(world, mine) == 0
    assert "already applied" in capsys.readouterr().out
    assert snapshot(world, mine) == before


@pytest.mark.parametrize("on_top", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_already_applied_keeps_an_uncommitted_revert(world, mine, on_top, staged):
    """A file put back to the release by hand is the user's change, not our half."""
    apply(world, mine)
    if on_top:
        core = mine / "python/sglang/core.py"
        core.write_text(core.read_text().replace("line_15 = 15", "line_15 = 0"))
        world.git("commit", "-qam", "mine", folder=mine)
    (mine / "python/sglang/other.py").write_text("VALUE = 1\n")
    if staged:
        world.git("add", "-A", folder=mine)
    before = snapshot(world, mine), world.git("status", "--porcelain", folder=mine)
    assert apply(world, mine) == (1 if on_top else 0)
    after = snapshot(world, mine), world.git("status", "--porcelain", folder=mine)
    assert after == before


def test_already_applied_with_changes_on_top(world, mine, capsys):
    apply(world, mine)
    core = mine / "python/sglang/core.py"
    core.write_text(core.read_text().replace("line_15 = 15", "line_15 = 0"))
    world.git("commit", "-qam", "mine", folder=mine)
    assert apply(world, mine) == 0
    assert "already applied, with other changes on top" in capsys.readouterr().out


def test_a_failed_check_is_not_taken_for_already_applied(world, mine, capsys):
    """One of two hunks present: neither base nor applied."""
    core = mine / "python/sglang/core.py"
    core.write_text(core.read_text().replace("line_3 = 3\n", "line_3 = 33\n"))
    world.git("commit", "-qam", "half by hand", folder=mine)
    refused(world, mine, capsys, "wrong base", "python/sglang/core.py", "v0.5.23")


def test_first_patches_already_committed(world, mine, capsys):
    first = sorted(world.patches.iterdir())[0]
    world.git("am", "-q", str(first), folder=mine)
    assert apply(world, mine) == 0
    assert "1 of 2 patches are in HEAD" in capsys.readouterr().err
    assert (mine / "python/sglang/other.py").read_text() == "VALUE = 2\n"


@pytest.mark.parametrize("stage", ["edit", "staged"])
def test_dirty_tree(world, mine, capsys, stage):
    (mine / "README.md").write_text("changed\n")
    if stage == "staged":
        world.git("add", "-A", folder=mine)
    refused(world, mine, capsys, "README.md", "git stash -u")


def test_untracked_file_in_the_way(world, mine, capsys):
    (mine / "python/sglang/new_part.py").write_text("mine\n")
    refused(world, mine, capsys, "python/sglang/new_part.py", "git stash -u")


def test_untracked_files_elsewhere_do_not_matter(world, mine):
    (mine / "notes.txt").write_text("mine\n")
    assert apply(world, mine) == 0
    assert (mine / "notes.txt").read_text() == "mine\n"


def test_wrong_base_is_named(world, mine, capsys):
    (mine / "python/sglang/other.py").write_text("VALUE = 0\n")
    world.git("commit", "-qam", "older", folder=mine)
    world.git("tag", "v0.5.22", folder=mine)
    refused(
        world, mine, capsys,
        "at v0.5.22", "needs sglang 0.5.23", "python/sglang/other.py", "checkout v0.5.23",
    )  # fmt: skip


@pytest.mark.parametrize("where", ["nowhere", "plain", "below"])
def test_not_the_top_of_a_checkout(world, mine, capsys, tmp_path, where):
    folder = {"nowhere": tmp_path / "no", "plain": tmp_path / "home"}.get(
        where, mine / "python"
    )
    assert apply(world, folder) == 2
    assert "top folder of a git checkout" in capsys.readouterr().err


def test_stopped_git_am_of_this_series_is_rolled_back(world, mine, capsys):
    """The user ran `git am patches/*` by hand and it stopped at the second patch."""
    (mine / "python/sglang/other.py").write_text("VALUE = 0\n")
    world.git("commit", "-qam", "in the way", folder=mine)
    start = snapshot(world, mine)
    patches = sorted(str(path) for path in world.patches.iterdir())
    done = subprocess.run(["git", "am", *patches], cwd=mine, capture_output=True)
    assert done.returncode and (mine / ".git/rebase-apply").exists()
    assert apply(world, mine) == 1
    message = capsys.readouterr().err
    assert "rolled back a half-applied series" in message and "wrong base" in message
    assert not (mine / ".git/rebase-apply").exists()
    assert snapshot(world, mine) == start
    world.git("revert", "--no-edit", "HEAD", folder=mine)
    assert apply(world, mine) == 0


def test_somebody_elses_am_is_left_alone(world, mine, capsys, tmp_path):
    other = tmp_path / "other.patch"
    text = sorted(world.patches.iterdir())[0].read_text()
    other.write_text(text.replace("line_3 = 3\n", "line_3 = 4\n"))
    subprocess.run(["git", "am", str(other)], cwd=mine, capture_output=True)
    assert (mine / ".git/rebase-apply").exists()
    refused(world, mine, capsys, "not this series")
    assert (mine / ".git/rebase-apply").exists()


def test_files_of_an_interrupted_run_are_put_back(world, mine, capsys):
    """A kill in the middle of the fast-forward: some files new, HEAD old."""
    for name in ("python/sglang/core.py", "python/sglang/new_part.py"):
        (mine / name).write_bytes((world.engine / name).read_bytes())
    assert apply(world, mine) == 0
    assert "rolled back a half-applied series (2 files)" in capsys.readouterr().err
    assert world.git("status", "--porcelain", folder=mine) == ""


def test_patch_that_fails_in_the_middle_touches_nothing(world, mine, capsys):
    second = sorted(world.patches.iterdir())[1]
    second.write_text(second.read_text().replace("@@ -0,0 +1,2 @@", "@@ -0,0 +1,9 @@"))
    refused(world, mine, capsys, second.name)


def test_no_patches(world, mine, capsys):
    names = [path.name for path in world.patches.iterdir()]
    for name in names:
        (world.patches / name).unlink()
    refused(world, mine, capsys, *names, "git checkout -- patches")
    (world.root / "patches.sha256").unlink()
    assert apply(world, mine) == 2


def test_last_patch_is_lost(world, mine, capsys):
    last = sorted(world.patches.iterdir())[1]
    last.unlink()
    refused(world, mine, capsys, last.name, "git checkout -- patches")


def test_discard_is_refused(world, mine, capsys):
    assert world.run("apply", "--checkout", str(mine), "--discard") == 2
