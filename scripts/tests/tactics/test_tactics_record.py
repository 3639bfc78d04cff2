import json
import os
import stat
import threading

import pytest
from bench.errors import BenchError
from bench.tactics import record
from flashinfer.autotuner import AutoTuner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tactics_kit import TOKENS, TinyOp

TACTIC = (8, 0)


def case():
    return TinyOp().case(TOKENS, None)


def document(tactic=TACTIC):
    return record.bundle(case(), tactic, allow_unknown=True)


def user_file(path, entries=None, **more):
    content = {"_metadata": record.environment(), **(entries or {}), **more}
    path.write_text(json.dumps(content))
    return content


def test_environment_is_what_load_configs_compares():
    from flashinfer.autotuner import _collect_metadata

    assert record.environment() == _collect_metadata()


def test_a_bundle_holds_key_policy_and_the_whole_environment():
    content = document()
    key, value = case().file_key, content[case().file_key]
    assert set(content) == {"_metadata", key}
    assert value == [
        "TinyRunner",
        [8, 0],
        ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold"],
    ]
    assert content["_metadata"] == record.environment()


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_policy_is_flashinfers_for_every_kind_of_config(cold, graph):
    import dataclasses

    call = case()
    call.tuning_config = dataclasses.replace(
        call.tuning_config,
        use_cold_l2_cache=cold,
        use_cuda_graph=graph,
        cuda_graph_profile_replays=3,
    )
    assert call.policy == list(AutoTuner._profiling_policy(call.tuning_config))
    record.bundle(call, TACTIC, allow_unknown=True)


def test_unknown_environment_fields_are_refused_by_name():
    unknown = [k for k, v in record.environment().items() if v == "unknown"]
    if not unknown:
        pytest.skip("FlashInfer knows every field of this machine")
    with pytest.raises(BenchError, match=unknown[0]):
        record.bundle(case(), TACTIC)


def test_a_tactic_the_op_rejects_is_never_written(monkeypatch):
    call = case()
    call.runner.validate_tactic = lambda inputs, tactic: False
    with pytest.raises(BenchError, match="no hit in serving"):
        record.bundle(call, TACTIC, allow_unknown=True)


def test_a_key_flashinfer_does_not_derive_is_never_written(monkeypatch):
    call = case()
    monkeypatch.setattr(type(call), "bucket", ((1, 8), (1, 8)))
    with pytest.raises(BenchError, match="no hit in serving"):
        record.bundle(call, TACTIC, allow_unknown=True)


def test_a_policy_flashinfer_does_not_ask_for_is_never_written(monkeypatch):
    call = case()
    hot = ["cuda_graph_profile_replays", 1, "l2_cache_policy", "hot"]
    monkeypatch.setattr(type(call), "policy", hot)
    with pytest.raises(BenchError, match="no hit while tuning"):
        record.bundle(call, TACTIC, allow_unknown=True)


def test_write_makes_a_whole_file_and_never_overwrites(tmp_path):
    path = tmp_path / "new" / "record.json"
    record.write(path, document())
    assert json.loads(path.read_text()) == json.loads(json.dumps(document()))
    assert stat.S_IMODE(path.stat().st_mode) & 0o444
    with pytest.raises(BenchError, match="not overwritten"):
        record.write(path, document((4, 0)))
    assert json.loads(path.read_text())[case().file_key][1] == [8, 0]
    assert os.listdir(path.parent) == ["record.json"]


def test_several_files_are_written_all_or_none(tmp_path):
    (tmp_path / "file").write_text("")
    files = {tmp_path / "a.json": document(), tmp_path / "file" / "b.json": document()}
    with pytest.raises(BenchError, match="cannot write"):
        record.write_all(files)
    assert os.listdir(tmp_path) == ["file"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.dictionaries(
    st.text(min_size=1).filter(lambda key: not key.startswith("_")),
    st.tuples(st.text(), VALUES).map(list)
    | st.tuples(st.text(), VALUES, st.lists(st.text())).map(list),
    max_size=5,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(entries=ENTRIES, namespaces=st.dictionaries(st.text(), VALUES, max_size=2))
def test_merge_keeps_every_other_entry(tmp_path, entries, namespaces):
    path = tmp_path / "cache.json"
    before = user_file(path, entries, _records=namespaces, _generation="old")
    record.merge(path, json.loads(json.dumps(MERGED)))
    after = record.read(path)
    assert after.pop("_generation") != before.pop("_generation")
    assert after.pop(KEY) == MERGED[KEY]
    assert after == before


MERGED = document()
KEY = case().file_key


def test_merge_is_a_hit_for_a_real_autotuner_and_keeps_the_users(tmp_path):
    path = tmp_path / "cache.json"
    other = TinyOp().case(16, None)
    key, value = record.entry(other, (4, 0))
    user_file(path, {key: value})
    assert "added" in record.merge(path, document())[0]
    tuner = AutoTuner()
    assert tuner.load_configs(str(path))
    for call, tactic in ((case(), TACTIC), (other, (4, 0))):
        _, found = tuner.choose_one(
            call.custom_op,
            [call.runner],
            call.tuning_config,
            call.inputs,
            **call.kwargs,
        )
        assert found == tactic


def test_merge_creates_what_is_missing_and_repeats_nothing(tmp_path):
    path = tmp_path / "a" / "cache.json"
    assert "created" in record.merge(path, document())[0]
    before = path.read_bytes()
    assert "nothing to do" in record.merge(path, document())[0]
    assert path.read_bytes() == before


def test_the_users_own_choice_is_replaced_only_on_request_and_kept_beside(tmp_path):
    path = tmp_path / "cache.json"
    user_file(path, {KEY: ["TinyRunner", [32, 0]]})
    before = path.read_bytes()
    with pytest.raises(BenchError, match="--replace"):
        record.merge(path, document())
    assert path.read_bytes() == before
    said = record.merge(path, document(), replace=True)
    assert (
        ".0.bak" in said[0] and (tmp_path / "cache.json.0.bak").read_bytes() == before
    )
    assert record.read(path)[KEY][1] == [8, 0]
    record.merge(path, document((4, 0)), replace=True)
    assert (tmp_path / "cache.json.0.bak").read_bytes() == before
    assert (tmp_path / "cache.json.1.bak").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no valid JSON"),
        ('{"_metadata": {}', "no valid JSON"),
        ("null", "NoneType"),
        ("[1, 2]", "list"),
        ('{"k": 3}', "entry of 'k'"),
        ('{"k": []}', "entry of 'k'"),
        ('{"k": ["R", 1, "p"]}', "entry of 'k'"),
        ('{"k": ["R", 1], "k": ["R", 2]}', "there twice"),
        ("{}", "which environment"),
        ('{"_metadata": 3}', "which environment"),
        ('{"_metadata": {"gpu": "other"}}', "another environment.*gpu: file 'other'"),
        (b"\xff\xfe", "no valid JSON"),
    ],
)
def test_a_file_that_cannot_be_merged_stays_as_it_is(tmp_path, text, says):
    path = tmp_path / "cache.json"
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(data)
    with pytest.raises(BenchError, match=says) as raised:
        record.merge(path, document(), replace=True)
    assert "cache.json" in str(raised.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize("field", sorted(record.environment()))
def test_each_environment_field_guards_the_users_file(tmp_path, field):
    path = tmp_path / "cache.json"
    stamp = {**record.environment(), field: "0.7.1"}
    user_file(path, {}, _metadata=stamp)
    with pytest.raises(BenchError, match=field):
        record.merge(path, document())
    user_file(path, {}, _metadata={**stamp, field: "*"})
    record.merge(path, document())


def test_mode_and_link_stay(tmp_path):
    real = tmp_path / "real.json"
    user_file(real)
    real.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    record.merge(link, document())
    assert link.is_symlink() and KEY in record.read(real)
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_file_that_changes_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "cache.json"
    path.write_text("new")
    with pytest.raises(BenchError, match="changed while it was read"):
        record._replace(path, {}, unless_changed_from=b"old")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["cache.json"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "cache.json"
    user_file(path)
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BenchError, match="No space left.*nothing was changed"):
        record.merge(path, document())
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [".cache.json.lock", "cache.json"]


def test_an_impossible_path_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for call in (record.merge, record.write):
        with pytest.raises(BenchError, match="cannot write"):
            call(tmp_path / "file" / "cache.json", document())


def test_mergers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "cache.json"
    user_file(path)
    documents = []
    for number in range(8):
        one = {"_metadata": MERGED["_metadata"], f"('op', {number})": ["R", number]}
        documents.append(one)
    failures = []

    def work(one):
        try:
            record.merge(path, one)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in documents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(record.tactics_of(record.read(path))) == 8


def test_a_merger_waits_for_the_one_before_it(tmp_path):
    path = tmp_path / "cache.json"
    user_file(path)
    started = threading.Event()

    def work():
        started.set()
        record.merge(path, document())

    thread = threading.Thread(target=work)
    with record._locked(path):
        thread.start()
        started.wait()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        user_file(path, {"('op', 1)": ["R", 1]})  # what the one before it writes
    thread.join()
    assert set(record.tactics_of(record.read(path))) == {KEY, "('op', 1)"}
