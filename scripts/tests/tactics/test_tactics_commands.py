"""The commands on the kit's op and a scripted clock: refusals, leftovers, last words."""

import json
import re
from pathlib import Path

import pytest
from bench.__main__ import main
from bench.tactics import cli, state
from tactics_kit import ScriptedClock, times

OP = "from tactics_kit import TinyOp\n\n"
OP += "def open_op(problem, *, device, seed):\n    return TinyOp()\n"
SIZES = "hidden=8 intermediate=8 experts=6 local_experts=6 top_k=2"
SET = [word for size in SIZES.split() for word in ("--set", size)]


def call(capsys, *arguments):
    """Exit code, stdout and stderr of a command."""
    try:
        code = main(["tactics", *map(str, arguments)])
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


@pytest.fixture
def op(tmp_path, monkeypatch):
    clock = ScriptedClock(times(t8=0.9))
    monkeypatch.setattr(cli, "clock_for", lambda case, samples: clock)
    path = tmp_path / "tiny.py"
    path.write_text(OP)
    return ["--op", path, *SET, "--tokens", 64]


@pytest.fixture
def found(op, tmp_path, capsys):
    code, out, err = call(capsys, "discover", "--state", tmp_path / "found", *op)
    assert code == 0 and "RECOMMENDED: (8,0)" in out, err
    return tmp_path / "found"


@pytest.fixture
def recorded(found, tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--state", found, "--out", path, "--allow-unknown"]
    assert call(capsys, "record", *arguments)[0] == 0
    return path


@pytest.mark.parametrize(
    "bad",
    [
        "--tolerance nan",
        "--tolerance inf",
        "--tolerance -1",
        "--tolerance 1",
        "--repetitions 0",
        "--repetitions 8",
        "--samples 0",
        "--seed -1",
        "--seed 9223372036854775808",
        "--tokens 0",
        "--tokens x",
        "--device bogus",
        "--device cuda:99",
        "--device cuda:-1",
    ],
)
@pytest.mark.parametrize("verb", ["discover --state s", "verify r.json"])
def test_bad_numbers_and_devices_are_refused_before_any_work(
    tmp_path, monkeypatch, capsys, verb, bad
):
    monkeypatch.chdir(tmp_path)
    option, value = bad.split()
    code, _, err = call(capsys, *verb.split(), f"{option}={value}")
    assert code == 2 and f"argument {option}" in err and value in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def open_op(:", r"cannot import it \(.*tiny.py, line 1"),
        ("1 / 0", "cannot import it .ZeroDivisionError.*tiny.py:1"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("open_op = 3", r"has no open_op\(problem"),
        ("def open_op(problem): pass", r"has no open_op\(problem.*device"),
        ("def open_op(*a, **k): return a[1]", "open_op failed .IndexError.*tiny.py:1"),
        ("def open_op(*a, **k): return 3", "has no custom_op, case, tile"),
    ],
)
def test_a_bad_op_file_is_refused_by_name(op, tmp_path, capsys, text, says):
    (tmp_path / "tiny.py").write_text(text)
    code, _, err = call(capsys, "discover", "--state", tmp_path / "s", *op)
    assert code == 2 and re.search(says, err) and "Traceback" not in err
    assert "tiny.py" in err and not (tmp_path / "s").exists()


def test_a_refused_command_leaves_its_folder_usable(op, tmp_path, capsys):
    folder = ["discover", "--state", tmp_path / "s"]
    # Refused with the folder open: nothing can be listed without the GPU.
    arguments = ["--device", "cpu", "--tokens", 16]
    assert call(capsys, *folder, *arguments)[0] == 2
    assert len((tmp_path / "s" / state.FILE).read_text().splitlines()) == 1
    assert call(capsys, *folder, *op)[0] == 0
    code, _, err = call(capsys, *folder, *op, "--seed", 1)
    assert code == 2 and "seed: there 0, now 1" in err


def test_a_state_of_another_environment_is_not_recorded(found, tmp_path, capsys):
    path = found / state.FILE
    header, *rows = path.read_text().splitlines()
    changed = json.loads(header)
    changed["environment"]["gpu"] = "another one"
    path.write_text("\n".join([json.dumps(changed), *rows, ""]))
    out = ["--out", tmp_path / "r.json", "--allow-unknown"]
    code, _, err = call(capsys, "record", "--state", found, *out)
    assert code == 2 and "(gpu differ)" in err
    assert not list(tmp_path.glob("r.json*"))


def test_record_writes_both_files_or_none(found, tmp_path, capsys):
    path = tmp_path / "r.json"
    side = Path(f"{path}.provenance.json")
    command = ["record", "--state", found, "--out", path, "--allow-unknown"]
    for there, other in ((side, path), (path, side)):
        there.write_text("mine")
        code, _, err = call(capsys, *command)
        assert code == 2 and f"{there} exists" in err
        assert there.read_text() == "mine" and not other.exists()
        there.unlink()
    assert call(capsys, *command)[0] == 0 and path.exists() and side.exists()


def test_last_words_of_verify(recorded, capsys, monkeypatch):
    code, out, _ = call(capsys, "verify", recorded)
    assert code == 0 and out.endswith("this record is good here\n")
    code, out, _ = call(capsys, "verify", recorded, "--no-speed")
    assert code == 0 and out.endswith("speed was not looked at\n")
    assert "good" not in out
    lost = ScriptedClock({**times(), (8, 0): RuntimeError("not capturable")})
    monkeypatch.setattr(cli, "clock_for", lambda case, samples: lost)
    code, out, _ = call(capsys, "verify", recorded)
    assert code == 1 and "ok   numerics" in out
    assert "FAIL speed: (8,0) cannot be timed: not capturable" in out
    assert out.endswith("this record does NOT help here\n")


def test_damaged_provenance_names_file_and_field(recorded, capsys):
    side = Path(f"{recorded}.provenance.json")
    content = json.loads(side.read_text())
    for change, says in (
        ({"tokens": "x"}, "$.tokens"),
        ({"tokens": 0}, "$.tokens"),
        ({"seed": -1}, "$.seed"),
        ({"op": None}, "$.op"),
        ({"problem": []}, "$.problem"),
        ({"problem": {}}, "lacks name, hidden"),
        ({"problem": {"width": 1}}, "no field 'width'"),
    ):
        side.write_text(json.dumps({**content, **change}))
        code, _, err = call(capsys, "verify", recorded, "--no-speed")
        assert code == 2 and says in err and str(side) in err, err


def test_set_changes_the_records_problem_not_the_default_one(
    recorded, capsys, monkeypatch
):
    asked = []

    def opened(spec, problem, **more):
        asked.append(problem)
        return real(spec, problem, **more)

    real = cli.open_op
    monkeypatch.setattr(cli, "open_op", opened)
    arguments = ["verify", recorded, "--no-speed", "--set", "finalize=false"]
    assert call(capsys, *arguments)[0] == 0
    assert (asked[0].hidden, asked[0].finalize) == (8, False)
    call(capsys, *arguments, "--problem", "kimi-k3")
    assert (asked[1].hidden, asked[1].finalize) == (3584, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("args file --layers 1", "cannot make the folder file"),
        ("take cap --layers 1 --url http://127.0.0.1:9", "--url and --ids go together"),
        ("take cap --layers 1 --ids ids", "--url and --ids go together"),
        ("take cap --layers 1 --url x --ids ids --tokens 4", "3 tokens never make"),
        ("take cap --layers 1 --url foo --ids ids --tokens 3", "request to foo failed"),
        (
            "take cap --layers 1 --url http://host:port --ids ids --tokens 3",
            "request to http://host:port failed",
        ),
        ("take cap --timeout nan --layers 1", "argument --timeout"),
        ("take cap", "name the --layers"),
        ("show cap", "no layer-"),
        ("show cap --layers 7", "no layer-7"),
    ],
)
def test_bad_capture_commands(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("cap").mkdir()
    Path("ids").write_text("[1, 2, 3]")
    code, _, err = call(capsys, "capture", *arguments.split())
    assert code == 2 and says in err and "Traceback" not in err
    assert list(Path("cap").iterdir()) == []
