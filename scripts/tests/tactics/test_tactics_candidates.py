import json

import pytest
from bench.errors import BenchError
from bench.tactics.candidates import (
    default_token_counts,
    enumerate_tactics,
    from_json,
    text,
    to_json,
)
from bench.tactics.routing import generate
from tactics_kit import PROBLEM, SKEWED, TOKENS, TinyOp

ROUTING = generate(SKEWED, tokens=TOKENS, experts=6, top_k=PROBLEM.top_k, seed=0)


class Foreign:
    """Like the FFI arrays FlashInfer's kernels return: iterable, no list."""

    def __init__(self, *values):
        self._values = values

    def __iter__(self):
        return iter(self._values)


def test_candidates_are_the_union_and_say_where_they_were_seen():
    found = {
        item.tactic: item
        for item in enumerate_tactics(TinyOp(), ROUTING, default_token_counts(TOKENS))
    }
    assert set(found) == {(t, c) for t in (4, 8, 16, 32) for c in (0, 1)}
    assert found[(16, 1)].listed and found[(32, 0)].listed
    assert not found[(8, 0)].listed and found[(8, 0)].seen_at == (32, 16, 8, 4, 2, 1)
    assert found[(32, 0)].seen_at == (64,)
    assert found[(4, 1)].tile == 4


def test_only_the_real_count_gives_no_hidden_tactic():
    found = enumerate_tactics(TinyOp(), ROUTING, [TOKENS])
    assert all(item.listed for item in found) and len(found) == 4


def test_blocklisted_tactics_are_refused_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "block.json"
    path.write_text(
        json.dumps({"invalid_tactics": {"test::tiny::TinyRunner": [[8, 0]]}})
    )
    monkeypatch.setenv("FLASHINFER_TACTICS_BLOCKLIST", str(path))
    found = {c.tactic: c for c in enumerate_tactics(TinyOp(), ROUTING, [8, TOKENS])}
    assert "blocklist" in found[(8, 0)].refused and not found[(8, 1)].refused


def test_an_op_without_tactics_is_an_error(monkeypatch):
    op = TinyOp()
    monkeypatch.setattr(op.runner, "get_valid_tactics", lambda inputs, profile: [])
    with pytest.raises(BenchError, match="lists no tactic at any of"):
        enumerate_tactics(op, ROUTING, [8, TOKENS])


def test_tactics_survive_json_as_flashinfer_loads_them():
    from flashinfer.autotuner import _json_to_tactic, _tactic_to_json

    for tactic in (-1, 3, (128, 4), ((1, 2), 3), "name", True):
        assert to_json(tactic) == _tactic_to_json(tactic)
        assert from_json(to_json(tactic)) == _json_to_tactic(to_json(tactic)) == tactic
    assert from_json(to_json(Foreign(128, 4))) == (128, 4)
    assert text(-1) == "default" and text(Foreign(128, 4)) == "(128,4)"


def test_default_token_counts_end_at_the_real_one():
    assert default_token_counts(6) == [1, 2, 4, 6]
    assert default_token_counts(8) == [1, 2, 4, 8]
