"""Properties of planned FlashInfer KDA prefill over generated batches.

The engine under test is the patched tree that ``scripts/series.py build`` leaves in
``build/engine``; the kernel is the contract double of the series' own test kit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ENGINE = Path(__file__).resolve().parents[2] / "build" / "engine" / "python"
KIT = ENGINE / "sglang" / "test" / "kits" / "kda_planned_prefill_kit.py"

if not KIT.is_file():
    pytest.skip(
        f"no patched engine at {ENGINE}: run `python scripts/series.py build`",
        allow_module_level=True,
    )
if "sglang" not in sys.modules:
    sys.path.insert(0, str(ENGINE))

import torch  # noqa: E402

from sglang.srt.layers.attention.linear.kda_flashinfer_plan import (  # noqa: E402
    KDATrackLens,
    build_host_tables,
)
from sglang.test.kits import kda_planned_prefill_kit as kit  # noqa: E402
from sglang.test.kits.kda_flashinfer_contract_double import (  # noqa: E402
    KDAContractDouble,
)

INTERVALS = (32, 64, 128, 256)
CASE = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def batches(draw, max_rows=4, max_tokens=300):
    """Rows around the interval's edges; some tracked, anywhere in the row."""
    interval = draw(st.sampled_from(INTERVALS))
    length = st.one_of(
        st.integers(0, max_tokens),
        st.sampled_from([0, 1, interval - 1, interval, interval + 1]),
    )
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        new = draw(length)
        tracked = draw(st.none() | st.integers(0, new) | st.just(new))
        rows.append((draw(st.integers(0, 1024)), new, tracked))
    if sum(new for _, new, _ in rows) <= len(rows):
        rows.append((0, interval + 1, interval + 1))
    return kit.KDAPrefillBatch(rows=tuple(rows), interval=interval)


@CASE
@given(batch=batches(), bfloat16=st.booleans(), padding=st.sampled_from([0, 16]))
def test_pool_equals_runs_that_stop_at_the_boundary(batch, bfloat16, padding):
    """Live, snapshot and foreign slots, bit for bit, in dense and strided pools."""
    pool = kit.make_pool(
        batch,
        heads=1,
        dtype=torch.bfloat16 if bfloat16 else torch.float32,
        slot_padding=padding,
    )
    layer = kit.make_layer(
        batch.num_tokens, heads=1, seed=batch.num_tokens, beta_pitch=9
    )
    output, expected = kit.expected_layer(batch, layer=layer, states=pool[0])
    actual = kit.run_planned(
        batch, pool=pool, layers=[layer], double=KDAContractDouble()
    )
    exact = dict(rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[0][0], output, **exact)
    torch.testing.assert_close(pool[0], expected, **exact)


@settings(CASE, max_examples=100)
@given(batch=batches(max_rows=12, max_tokens=200_000))
def test_tables_name_each_boundary_once(batch):
    """Entry e of row r is boundary e - starts[r] + 1, and starts count intervals."""
    rows = range(len(batch.rows))
    tables = build_host_tables(
        extend_lens=batch.lens,
        num_tokens=batch.num_tokens,
        interval=batch.interval,
        track=KDATrackLens(
            mask=[tracked is not None for _, _, tracked in batch.rows],
            track_lens=[prefix + (tracked or 0) for prefix, _, tracked in batch.rows],
            prefix_lens=[prefix for prefix, _, _ in batch.rows],
        ),
    )
    starts = tables.checkpoint_cu_starts
    assert [int(n) for n in tables.cu_seqlens] == [
        sum(batch.lens[:row]) for row in range(len(batch.rows) + 1)
    ]
    assert [int(b - a) for a, b in zip(starts, starts[1:])] == [
        n // batch.interval for n in batch.lens
    ]
    boundaries = {
        int(row): int(entry - starts[row] + 1) * batch.interval
        for row, entry in zip(tables.entry_rows, tables.entries)
    }
    boundaries.update({int(row): 0 for row in tables.start_rows})
    assert boundaries == {
        row: batch.boundary(row) for row in rows if batch.boundary(row) is not None
    }


@settings(CASE, max_examples=100)
@given(
    lens=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    data=st.data(),
    interval=st.sampled_from(INTERVALS),
)
def test_boundary_past_a_row_is_refused_by_name(lens, data, interval):
    row = data.draw(st.integers(0, len(lens) - 1))
    prefix = data.draw(st.integers(0, 100))
    boundary = (lens[row] // interval + data.draw(st.integers(1, 9))) * interval
    with pytest.raises(ValueError) as caught:
        build_host_tables(
            extend_lens=lens,
            num_tokens=sum(lens),
            interval=interval,
            track=KDATrackLens(
                mask=[i == row for i in range(len(lens))],
                track_lens=[prefix + boundary] * len(lens),
                prefix_lens=[prefix] * len(lens),
            ),
        )
    message = str(caught.value)
    for part in (f"row {row} ", f"boundary {boundary} ", f"{lens[row]} tokens"):
        assert part in message
