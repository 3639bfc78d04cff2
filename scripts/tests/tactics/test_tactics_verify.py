import json

import pytest
from bench.errors import BenchError
from bench.tactics import record, verify
from tactics_kit import TOKENS, ScriptedClock, TinyOp, times

TACTIC = (8, 0)


def checks(path, op=None, table=None, tokens=TOKENS):
    op = op or TinyOp()
    clock = ScriptedClock(table or times(t8=0.9))
    found = verify.run(
        path,
        op.case(tokens, None),
        tolerance=1e-2,
        repetitions=9,
        seed=0,
        clock_of=lambda case: clock,
    )
    return found, clock


def write(tmp_path, change=lambda content, key: None, tactic=TACTIC):
    case = TinyOp().case(TOKENS, None)
    content = record.bundle(case, tactic, allow_unknown=True)
    change(content, case.file_key)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(content))
    return path


def failed(found):
    return [check.name for check in found if check.ok is False]


def test_a_good_record_passes_every_check(tmp_path):
    found, _ = checks(write(tmp_path))
    assert [check.name for check in found] == [
        "environment",
        "loads",
        "key",
        "hit in serving",
        "hit while tuning",
        "numerics",
        "speed",
    ]
    assert failed(found) == []
    assert "0 profiled" in found[4].detail and "faster by 1" in found[6].detail


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (times(t8=1.1), "slower"),
        (times(), "no difference shown"),
        ({**times(t8=0.9), -1: 0.5}, "slower"),
        (times(t8=0.9, t32=0.5), "slower"),
    ],
)
def test_a_record_that_does_not_help_says_so(tmp_path, table, word):
    found, _ = checks(write(tmp_path), table=table)
    assert failed(found) == ["speed"] and word in found[-1].detail


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field, here in sorted(record.environment().items())
        for value in ("0.7.1", "unknown", None, "absent")
        if value != here
    ],
)
def test_each_environment_field_is_compared(tmp_path, field, value):
    def change(content, key):
        content["_metadata"][field] = value
        if value == "absent":
            del content["_metadata"][field]

    found, clock = checks(write(tmp_path, change))
    assert failed(found) == ["environment", "loads"]
    assert field in found[0].detail and clock.asked == []


@pytest.mark.parametrize("stamp", ["gone", 3, None])
def test_a_record_without_environment_is_red_though_flashinfer_loads_it(
    tmp_path, stamp
):
    def change(content, key):
        content["_metadata"] = stamp
        if stamp == "gone":
            del content["_metadata"]

    found, _ = checks(write(tmp_path, change))
    assert failed(found) == ["environment"]


def test_a_record_for_another_call_shows_where_the_keys_part(tmp_path):
    found, _ = checks(write(tmp_path), tokens=16)
    assert failed(found) == ["key"] and "(64, 8)" in found[-1].detail

    def empty(content, key):
        del content[key]

    found, _ = checks(write(tmp_path, empty))
    assert failed(found) == ["key"] and "no tactic" in found[-1].detail


def test_another_runner_is_red(tmp_path):
    def change(content, key):
        content[key][0] = "OtherRunner"

    found, _ = checks(write(tmp_path, change))
    assert failed(found) == ["key"] and "OtherRunner" in found[-1].detail


def test_a_two_field_record_is_no_hit_while_tuning(tmp_path):
    def change(content, key):
        del content[key][2]

    found, clock = checks(write(tmp_path, change))
    assert failed(found) == ["hit while tuning"]
    assert "hot L2" in found[-1].detail and clock.asked == []


def test_a_tactic_the_op_rejects_is_no_hit(tmp_path):
    path = write(tmp_path)
    op = TinyOp()
    op.runner.validate_tactic = lambda inputs, tactic: False
    found, _ = checks(path, op)
    assert failed(found) == ["hit in serving"]


def test_what_autotuner_picks_counts_not_what_it_finds(tmp_path):
    path = write(tmp_path)
    op = TinyOp()
    asked = []
    # Found at the first look, rejected when the op chooses.
    op.runner.validate_tactic = lambda inputs, tactic: asked.append(1) or len(asked) < 2
    found, _ = checks(path, op)
    assert failed(found) == ["hit in serving"] and "picks default" in found[-1].detail


@pytest.mark.parametrize("fault", ["one row", "raises", "writes nothing"])
def test_a_wrong_tactic_gets_no_speed(tmp_path, fault):
    found, clock = checks(write(tmp_path), TinyOp({TACTIC: fault}))
    assert failed(found) == ["numerics"] and clock.asked == []


def test_a_default_that_does_not_run_is_red(tmp_path):
    found, _ = checks(write(tmp_path), TinyOp({-1: "raises"}))
    assert failed(found) == ["numerics"] and "default tactic" in found[-1].detail


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(BenchError, match="cannot read"):
        checks(tmp_path / "none.json")
    path = tmp_path / "record.json"
    for text in ("", "null", "[]", '{"k": [1, 2]}'):
        path.write_text(text)
        with pytest.raises(BenchError, match="record.json"):
            checks(path)


def test_listed_tactics_that_cannot_be_timed_are_no_baseline(tmp_path):
    path = write(tmp_path)
    table = {
        **times(t8=0.9, t16=0.5),
        (16, 0): RuntimeError("x"),
        (16, 1): float("nan"),
    }
    found, _ = checks(path, table=table)
    assert failed(found) == []


@pytest.mark.parametrize("tactic", [TACTIC, -1])
@pytest.mark.parametrize("ms", [RuntimeError("x"), float("nan"), 0.0])
def test_a_record_that_cannot_be_timed_is_red(tmp_path, tactic, ms):
    found, _ = checks(write(tmp_path), table={**times(t8=0.9), tactic: ms})
    assert failed(found) == ["speed"] and len(found) == 7
    assert "cannot be timed" in found[-1].detail


def test_a_machine_without_a_clock_is_red(tmp_path):
    def clock_of(case):
        raise BenchError("needs a CUDA device")

    case = TinyOp().case(TOKENS, None)
    limits = {"tolerance": 1e-2, "repetitions": 9, "seed": 0}
    found = verify.run(write(tmp_path), case, clock_of=clock_of, **limits)
    assert failed(found) == ["speed"] and "CUDA device" in found[-1].detail


def test_speed_left_out_is_not_red(tmp_path):
    found = verify.run(
        write(tmp_path),
        TinyOp().case(TOKENS, None),
        tolerance=1e-2,
        repetitions=9,
        seed=0,
        clock_of=None,
    )
    assert found[-1].ok is None and failed(found) == []
