import math
import re

import pytest
import torch
from bench.tactics.numerics import (
    BITWISE,
    DEFAULT_TOLERANCE,
    FAILED,
    WITHIN,
    Checker,
    compare,
    same_bits,
)
from tactics_kit import TOKENS, TinyOp

TACTIC = (8, 0)


def check(fault, tolerance=1e-2):
    op = TinyOp({TACTIC: fault})
    return Checker(op.case(TOKENS, None), tolerance).check(TACTIC)


def test_equal_bits_are_bitwise():
    assert check("").verdict == BITWISE


def test_rounding_is_within_tolerance_and_measured():
    found = check("ulp")
    assert found.verdict == WITHIN and 2**-21 < found.nrms < 2**-19
    assert check("ulp", tolerance=1e-9).verdict == FAILED


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raises", "raised RuntimeError: no kernel image$"),
        ("writes nothing", "not finite"),
        ("one row", "normalised RMS error"),
        ("nan", "not finite"),
        ("flaky", "normalised RMS error"),
        ("other shape", "the default's is"),
    ],
)
def test_wrong_tactics_fail_with_the_reason(fault, says):
    found = check(fault)
    assert found.verdict == FAILED and re.search(says, found.reason)


def test_a_default_that_changes_its_bits_is_noticed():
    case = TinyOp({-1: "flaky"}).case(TOKENS, None)
    assert not Checker(case, 1e-2).repeatable
    assert Checker(TinyOp().case(TOKENS, None), 1e-2).repeatable


def test_bits_tell_signs_of_zero_apart_and_nan_equals_itself():
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_nrms_is_the_textbook_one():
    want, got = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    found = compare([want], [got], 1.0)
    assert found.nrms == pytest.approx(0.5 / 5) and found.max_abs == 0.5


def test_one_wrong_value_in_a_large_output_fails():
    generator = torch.Generator().manual_seed(0)
    want = torch.randn((400, 64), generator=generator)
    got = want.clone()
    got[123, 7] += 1.0
    found = compare([want], [got], 1e-2)
    assert found.verdict == FAILED
    # By hand: 1 / 8 of the row's RMS, which is near 1.
    assert found.nrms == pytest.approx(1 / 8, rel=0.3) and found.max_abs > 0.99


def test_a_small_row_is_not_judged_by_its_own_rounding():
    want = torch.ones((10, 8))
    want[3] = 1e-6
    got = want.clone()
    got[3] = 3e-6
    assert compare([want], [got], 1e-2).verdict == WITHIN


def test_bfloat16_rounding_stays_under_the_default_tolerance():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn((300, 128), generator=generator)
    want = exact.to(torch.bfloat16)
    got = (exact * (1 + 2**-9)).to(torch.bfloat16)
    assert not same_bits(want, got)
    assert compare([want], [got], DEFAULT_TOLERANCE).verdict == WITHIN


@pytest.mark.parametrize(
    ("want", "got"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.zeros(3), torch.tensor([0.0, 1e-9, 0.0])),
        (torch.tensor([math.inf]), torch.tensor([1.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
    ],
)
def test_what_no_tolerance_covers(want, got):
    assert compare([want], [got], 1e9).verdict == FAILED


def test_missing_outputs_fail():
    assert compare([torch.zeros(1)], [], 1.0).verdict == FAILED
