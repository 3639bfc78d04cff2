"""Raw rows: nothing is lost by a crash, and a bad line spoils itself only."""

import json
import multiprocessing
import string

import msgspec
import pytest
from bench import rows
from bench.errors import BenchError
from hypothesis import given, settings
from hypothesis import strategies as st


def row(label="A1", **fields):
    return rows.Row(
        kind="serve",
        experiment="e",
        config_sha256="c",
        label=label,
        arm="base",
        environment=rows.Environment(),
        **fields,
    )


@given(
    label=st.text(alphabet=string.printable, max_size=20),
    failed=st.text(max_size=20),
    ttft=st.none() | st.floats(0, 1e6),
    tokens=st.integers(0, 2**40),
)
@settings(max_examples=50, deadline=None)
def test_a_row_reads_back_as_it_was_written(
    tmp_path_factory, label, failed, ttft, tokens
):
    path = tmp_path_factory.mktemp("rows") / "x.jsonl"
    request = rows.Request(index=0, ok=True, ttft_s=ttft, input_tokens=tokens)
    written = [row(label, failed=failed, requests=[request]), row("B")]
    for one in written:
        rows.append(path, one)
    found, bad = rows.read(path)
    assert found == written and bad == []


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_cut_line_is_named_and_the_next_row_survives(tmp_path, cut):
    path = tmp_path / "x.jsonl"
    for label in "AB":
        rows.append(path, row(label))
    path.write_bytes(path.read_bytes()[:-cut])
    if cut > 1:
        found, bad = rows.read(path)
        assert [r.label for r in found] == ["A"]
        assert [b.line for b in bad] == [2] and "truncated" in str(bad[0])
    rows.append(path, row("C"))
    found, bad = rows.read(path)
    assert [r.label for r in found] == (["A", "B", "C"] if cut == 1 else ["A", "C"])
    assert [b.line for b in bad] == ([] if cut == 1 else [2])
    assert str(path) in str(bad[0]) if bad else cut == 1


def test_other_lines_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    good = json.loads(msgspec.json.encode(row("A")))
    lines = [
        json.dumps(good),
        "not json",
        "[1]",
        json.dumps({**good, "schema": 99}),
        json.dumps({**good, "kind": "other"}),
        "",
        json.dumps({**good, "label": "B"}),
    ]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    found, bad = rows.read(path)
    assert [r.label for r in found] == ["A", "B"]
    assert [b.line for b in bad] == [2, 3, 4, 5, 8]


def test_a_missing_or_unwritable_file_is_named(tmp_path):
    with pytest.raises(BenchError, match="none.jsonl"):
        rows.read(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="--rows"):
        rows.append(tmp_path / "file" / "x.jsonl", row())


def _write(path, label):
    for _ in range(20):
        rows.append(path, row(label))


def test_two_writers_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, label)) for label in "AB"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found, bad = rows.read(path)
    assert sorted(r.label for r in found) == ["A"] * 20 + ["B"] * 20 and bad == []


def test_only_a_run_that_met_every_check_has_a_speed():
    good, bad = (rows.Check(name="c", ok=ok, detail="d") for ok in (True, False))
    assert row().passed and row(checks=[good]).passed
    assert not row(checks=[good, bad]).passed
    assert not row(failed="died").passed
    assert row(failed="died", checks=[bad]).problems == ["run failed: died", "c: d"]
