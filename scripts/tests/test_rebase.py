"""series.py rebase: a verdict for each patch, and a move only when asked."""

import shutil
import sys
from pathlib import Path

import pytest
from serieslib import rebase
from serieslib.errors import SeriesError
from tiny_release import FILES, LINES, write_wheel

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Take the wheel from the index folder; tests marked `real_pip` ask pip."""
    if "real_pip" not in request.keywords:
        monkeypatch.setattr(rebase, "pip_download", from_folder)


def from_folder(requirement: str, tag: str, folder: Path, links: str) -> Path:
    version = requirement.partition("==")[2]
    found = list(Path(links).glob(f"sglang-{version}-{tag}-*.whl"))
    if not found:
        raise SeriesError(f"no {requirement}", "none")
    return Path(shutil.copy(found[0], folder))


def release(world, version: str, **changed: str | None) -> None:
    """Put another release beside the pinned one in the index."""
    files = {name.replace("0.5.23", version): data for name, data in FILES.items()}
    metadata = f"sglang-{version}.dist-info/METADATA"
    files[metadata] = files[metadata].replace("0.5.23", version)
    for name, data in changed.items():
        files[f"sglang/{name}.py"] = data
    index = world.root / "index"
    if index.is_symlink():
        real = index.resolve()
        index.unlink()
        index.mkdir()
        for wheel in real.glob("*.whl"):
            (index / wheel.name).symlink_to(wheel)
    write_wheel(index, TAG, {k: v for k, v in files.items() if v is not None}, version)


def verdicts(world, capsys, *argv: str) -> tuple[int, list[str], str]:
    before = world.snapshot(world.root / "patches", world.root / "python", world.engine)
    capsys.readouterr()
    code = world.run("rebase", "--onto", *argv)
    out = capsys.readouterr()
    if "--write" not in argv:
        now = world.snapshot(
            world.root / "patches", world.root / "python", world.engine
        )
        assert now == before
    names = {"clean", "3-way", "conflict", "already"}
    lines = [ln for ln in out.out.splitlines() if ln.split() and ln.split()[0] in names]
    return code, [line.split()[0] for line in lines], out.out + out.err


def test_same_text_elsewhere_is_clean(world, capsys):
    core = LINES.replace("line_15 = 15\n", "line_15 = 15\n# more\n")
    release(world, "0.5.22", dos="B = 1\n", core=core)
    code, found, out = verdicts(world, capsys, "0.5.22")
    assert (code, found) == (0, ["clean", "clean"])
    assert "on sglang 0.5.22" in out


def test_a_changed_neighbour_needs_a_merge(world, capsys):
    release(world, "0.5.24", core=LINES.replace("line_6 = 6", "line_6 = 66"))
    code, found, _ = verdicts(world, capsys, "0.5.24")
    assert (code, found) == (0, ["3-way", "clean"])


def test_conflict_names_its_files_and_the_rest_is_tried(world, capsys):
    release(world, "0.6.0", core=LINES.replace("line_3 = 3\n", "line_3 = 7\n"))
    code, found, out = verdicts(world, capsys, "0.6.0")
    assert (code, found) == (1, ["conflict", "clean"])
    assert "python/sglang/core.py" in out
    assert "error: " in out
    # git's advice is for a tree that is gone by now.
    assert "hint:" not in out and "git am --" not in out


def test_vanished_file_is_a_conflict(world, capsys):
    release(world, "0.6.0", other=None)
    code, found, out = verdicts(world, capsys, "0.6.0")
    assert (code, found) == (1, ["clean", "conflict"])
    assert "python/sglang/other.py" in out


def test_merged_upstream_is_said(world, capsys):
    core = (world.engine / "python/sglang/core.py").read_text()
    part = (world.engine / "python/sglang/new_part.py").read_text()
    release(world, "0.6.0", core=core, new_part=part)
    code, found, _ = verdicts(world, capsys, "0.6.0")
    assert (code, found) == (0, ["already", "clean"])


@pytest.mark.real_pip
def test_latest(world, capsys):
    release(world, "0.5.22")
    release(world, "0.5.25")
    code, _, out = verdicts(world, capsys, "latest")
    assert code == 0 and "on sglang 0.5.25" in out


@pytest.mark.parametrize("onto, code", [("0.4.0", 1), ("newest", 2), ("../x", 2)])
def test_no_such_release(world, capsys, onto, code):
    assert verdicts(world, capsys, onto)[0] == code


@pytest.mark.real_pip
def test_write_moves_the_series(world, capsys):
    release(world, "0.5.24", core=LINES.replace("line_6 = 6", "line_6 = 66"))
    assert world.run("rebase", "--onto", "0.5.24", "--write") == 0
    assert "version: 0.5.24" in (world.root / "UPSTREAM").read_text()
    assert "find-links: index" in (world.root / "UPSTREAM").read_text()
    assert (world.root / "requirements.lock").read_text() == "sglang==0.5.24\n"
    assert world.run("check") == 0
    assert world.run("apply") == 0
    core = (world.engine / "python/sglang/core.py").read_text()
    assert "line_6 = 66" in core and "line_3 = 33" in core


@pytest.mark.parametrize("why", ["conflict", "work"])
def test_write_is_refused(world, capsys, why):
    core = LINES.replace("line_3 = 3\n", "line_3 = 7\n") if why == "conflict" else LINES
    release(world, "0.6.0", core=core)
    if why == "work":
        (world.engine / "python/sglang/core.py").write_text("X = 1\n")
    before = world.snapshot(world.root)
    assert world.run("rebase", "--onto", "0.6.0", "--write") == 1
    assert "not written" in capsys.readouterr().err
    assert world.snapshot(world.root) == before
