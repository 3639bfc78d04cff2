import numpy as np
import pytest
from bench.errors import BenchError
from bench.tactics.case import open_op
from bench.tactics.problems import KIMI_K3, digest, load
from bench.tactics.routing import Routing
from flashinfer.autotuner import AutoTuner

# What FlashInfer 0.7.2 derives for SGLang 0.5.23's call, written down once.
K3_KEY = (
    "('flashinfer::trtllm_fp4_block_scale_moe', 'MoERunner', ((16384, 3584), (0,), "
    "(16384, 16), (16384, 16), (16384, 3584), (16384, 112), (0,), (0,)), ('Module', "
    "16, 896, 896, 0, 17827853, 17826828, 0, 3584, 3584, 3072, 10, True, 0, False, "
    "False))"
)


def k3_case(*overrides, tokens=16384):
    problem = load("kimi-k3", list(overrides))
    op = open_op("kimi-k3", problem, device="cpu", seed=0)
    return op, op.case(tokens, routing(tokens))


def routing(tokens):
    ids = np.tile(np.arange(16, dtype=np.int32), (tokens, 1))
    return Routing(ids, ids.astype(np.float32), "test")


def derived(case):
    """The key as AutoTuner itself builds it."""
    return AutoTuner._get_cache_key(
        case.custom_op,
        case.runner,
        case.shapes,
        case.tuning_config,
        case.runner.get_cache_key_extras(case.inputs),
    ).file_key


def test_kimi_k3_is_the_default_and_its_key_is_flashinfers():
    _, case = k3_case()
    assert load("kimi-k3", []) == KIMI_K3
    assert case.file_key == K3_KEY == derived(case)
    cold = ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold"]
    assert case.policy == list(AutoTuner._profiling_policy(case.tuning_config)) == cold


@pytest.mark.parametrize(
    "override",
    ["routing=packed", "finalize=false", "intermediate=1536", "local_experts=112"],
)
def test_other_calls_have_other_keys(override):
    _, case = k3_case(override, tokens=256)
    _, plain = k3_case(tokens=256)
    assert case.file_key == derived(case)
    # Packed and unpacked ids have one shape, so FlashInfer keys them alike.
    assert (case.file_key == plain.file_key) == (override == "routing=packed")


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(8192, 8192), (8193, 16384), (16383, 16384), (16384, 16384)]
)
def test_token_counts_round_up_to_a_bucket(tokens, bucket):
    _, case = k3_case(tokens=tokens)
    assert case.bucket[4][0] == bucket
    assert case.file_key == derived(case)
    assert (case.file_key == K3_KEY) == (bucket == 16384)


def test_kimi_k3_says_why_it_cannot_be_listed_here():
    op, case = k3_case(tokens=16)
    assert not case.can_run
    with pytest.raises(BenchError, match="10.0 or 10.3.*no CUDA device"):
        op.case(16, routing(16), for_listing=True)


def test_file_problem_and_overrides(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "hidden = 64\nintermediate = 32\nexperts = 8\nlocal_experts = 8\ntop_k = 2\n"
    )
    problem = load(str(path), ["top_k=4"])
    assert (problem.name, problem.hidden, problem.top_k) == ("mine", 64, 4)
    assert digest(problem) != digest(load(str(path), []))


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("hidden = 64", [], "lacks"),
        ("hidden = [", [], "cannot read"),
        ("width = 3", [], "no field 'width'"),
        ("hidden = '64x'", [], "hidden must be int"),
        ("hidden = true", [], "hidden must be int"),
        ("", ["hidden"], "FIELD=VALUE"),
    ],
)
def test_bad_problem_file_names_file_and_field(tmp_path, text, overrides, says):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BenchError, match=says) as raised:
        load(str(path), overrides)
    assert "mine.toml" in str(raised.value) or overrides


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("top_k=897", "exceeds"),
        ("local_offset=1", "leave the"),
        ("experts=0", "at least 1"),
        ("routing=none", "packed or unpacked"),
    ],
)
def test_senseless_sizes_are_refused(override, says):
    with pytest.raises(BenchError, match=says):
        load("kimi-k3", [override])


def test_unknown_problem_and_op_name_the_known_ones():
    with pytest.raises(BenchError, match="kimi-k3"):
        load("kimi-k4", [])
    with pytest.raises(BenchError, match="kimi-k3.*triton"):
        open_op("no.such.module", KIMI_K3, device="cpu", seed=0)
    with pytest.raises(BenchError, match="open_op"):
        open_op("bench.errors", KIMI_K3, device="cpu", seed=0)
    with pytest.raises(BenchError, match="situ"):
        open_op("kimi-k3", load("kimi-k3", ["activation=relu"]), device="cpu", seed=0)
