"""The default op end to end: FlashInfer's own runner on stand-in kernels."""

import dataclasses

import pytest
import torch
from bench.tactics import discover, ops_trtllm, problems, record, state
from bench.tactics.candidates import default_token_counts
from bench.tactics.case import open_op
from bench.tactics.routing import generate
from tactics_kit import ScriptedClock

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 256, 4, 2, 64, 32
TILES = (8, 16, 32, 64, 128, 192, 256)  # what FlashInfer 0.7.2 builds


class Module:
    """Stands for the kernels, which need a Blackwell GPU.

    Keeps the contract of the two entry points the runner calls: tactics by
    FlashInfer's rule (the first tile that holds the mean rows of an expert, two
    above, one below), and an output that depends on activations and routing. It
    refuses calls whose arguments are not of the documented shapes and dtypes.
    """

    def __init__(self):
        self.wrong: tuple = ()

    def trtllm_get_valid_moe_configs(self, *query):
        top_k, experts, tokens = query[3], query[7], query[12]
        index = next(i for i, t in enumerate(TILES) if t >= tokens * top_k / experts)
        tiles = TILES[max(0, index - 1) : index + 3]
        return [[tile, config] for tile in tiles for config in (0, 4)]

    def trtllm_fp4_block_scale_moe(self, *a):
        mode, logits, ids, weights, bias, hidden, scale = a[:7]
        tokens = hidden.shape[0]
        assert (mode, logits, bias) == (2, None, None)
        assert ids.dtype == torch.int32 and ids.shape == (tokens, TOP_K)
        assert weights.dtype == torch.bfloat16 and weights.shape == (tokens, TOP_K)
        assert hidden.dtype == torch.float8_e4m3fn and hidden.shape[1] == HIDDEN
        assert scale.shape == (tokens, HIDDEN // 32)
        assert a[7].shape == (EXPERTS, 2 * INNER, HIDDEN // 2)
        assert a[8].shape == (EXPERTS, 2 * INNER, HIDDEN // 32)
        assert a[14].shape == (EXPERTS, HIDDEN, INNER // 2)
        assert a[15].shape == (EXPERTS, HIDDEN, INNER // 32)
        assert {a[7].dtype, a[14].dtype} == {torch.uint8} and len(a) == 43
        assert a[21:24] == (EXPERTS, TOP_K, 0) and a[26:29] == (INNER, 0, EXPERTS)
        assert a[31] is True and a[32] is True and int(a[33]) == 10
        output, tactic = a[34:36]
        mean = (weights.float() * (ids + 1)).sum(dim=1, keepdim=True)
        output.copy_((hidden.float() * mean).to(torch.bfloat16))
        if tuple(tactic) in self.wrong:
            output[tokens // 2 :] = 0
        return []


@pytest.fixture
def op():
    sizes = f"hidden={HIDDEN} intermediate={INNER} experts={EXPERTS}"
    sizes += f" local_experts={EXPERTS} top_k={TOP_K}"
    problem = problems.load("kimi-k3", sizes.split())
    opened = open_op("kimi-k3", problem, device="cpu", seed=0)
    # What opening on the right GPU sets.
    opened._moe_op, opened._device, opened._can_run = Module(), "cpu", True
    return opened


def find(op, folder, ms):
    routing = generate(
        "dirichlet:0.5", tokens=TOKENS, experts=EXPERTS, top_k=TOP_K, seed=0
    )
    plan = discover.Plan(
        routing=routing,
        token_counts=default_token_counts(TOKENS),
        repetitions=9,
        tolerance=1e-2,
        seed=0,
        experts=EXPERTS,
    )
    header = {"seed": 0, "repetitions": 9}
    with state.opened(folder, header) as held:
        return discover.run(
            held, op, plan, lambda case: ScriptedClock(ms), lambda s: None
        )


def table(**fast):
    ms = {(tile, config): 1.0 for tile in TILES for config in (0, 4)}
    return {**ms, -1: 1.0, (32, 4): 0.9, (32, 0): 0.91}


def test_a_hidden_tile_is_found_recorded_and_hit(op, tmp_path):
    found = find(op, tmp_path / "s", table())
    hidden = {item.tactic for item in found.ranked if item.hidden}
    assert {tile for tile, _ in hidden} == {8, 16, 32}  # 64 to 256 are listed
    assert found.winner == (32, 4)
    assert all(item.numerics in ("bitwise", "reference") for item in found.ranked)
    routing = generate("uniform", tokens=TOKENS, experts=EXPERTS, top_k=TOP_K, seed=1)
    document = record.bundle(op.case(TOKENS, routing), (32, 4), allow_unknown=True)
    (value,) = record.tactics_of(document).values()
    assert value[:2] == ["MoERunner", [32, 4]] and value[2][-1] == "cold"


def test_a_wrong_hidden_tile_is_not(op, tmp_path):
    op._moe_op.wrong = ((32, 4),)
    found = find(op, tmp_path / "s", table())
    assert found.winner == (32, 0) and (32, 4) in dict(found.failed)


def test_the_real_and_the_stand_in_module_share_the_key(op):
    routing = generate("uniform", tokens=16, experts=EXPERTS, top_k=TOP_K, seed=1)
    elsewhere = open_op("kimi-k3", op._problem, device="cpu", seed=0)
    assert type(elsewhere._moe_op) is ops_trtllm.Module
    assert elsewhere.case(16, routing).file_key == op.case(16, routing).file_key
    other = dataclasses.replace(op._problem, finalize=False)
    no_output = open_op("kimi-k3", other, device="cpu", seed=0).case(16, routing)
    assert no_output.file_key != op.case(16, routing).file_key
