"""The Triton op and the commands, in fresh processes as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.__main__ import main
from bench.errors import BenchError
from bench.tactics import problems
from bench.tactics.timing import FlashInferClock
from tactics_kit import TinyOp

SCRIPTS = Path(__file__).resolve().parents[2]
SIZES = "hidden=24 intermediate=24 experts=3 local_experts=3 top_k=2 routing=unpacked"
TOKENS = 100  # 67 rows for the mean expert: tiles 64 to 256 are listed, 32 is not
OP = ["--op", "triton-grouped-gemm", "--tokens", str(TOKENS), "--list-at", "10"]
OP += [word for size in SIZES.split() for word in ("--set", size)]

# One process: kernels against torch, then a discovery on a scripted clock.
SCRIPT = """
import sys
import torch
from tactics_kit import ScriptedClock
from bench.tactics import cli, problems
from bench.tactics.case import open_op
from bench.tactics.examples import triton_grouped_gemm as example
from bench.tactics.routing import Routing, generate

folder, sizes, *op_arguments = sys.argv[1:]
tactics = [(t, c) for t in example.TILES for c in range(len(example.CONFIGS[t]))]

# Rows, columns and inner width that fill no block, and an expert without rows.
problem = problems.load("kimi-k3", [*sizes.split(), "hidden=72", "intermediate=136"])
op = open_op("triton-grouped-gemm", problem, device="cpu", seed=0)
routing = generate("uniform", tokens=110, experts=3, top_k=2, seed=0)
ids = routing.topk_ids.copy()
ids[ids == 1] = 2
assert (ids == 2).sum() > 128  # the third block of a tile of 192
case = op.case(110, Routing(ids, routing.topk_weights, "test"))
want = example.reference(case.inputs[1], case.inputs[2], case.kwargs["weight"])
for tactic in [-1, *((tile, 0) for tile in example.TILES)]:
    (got,) = case.run(tactic)
    error = (got.float() - want).abs().max() / want.abs().max()
    assert error < 2**-10, (tactic, error)  # float16 keeps 11 bits
print("kernels agree")

table = {tactic: {32: 0.8}.get(tactic[0], 1.0) + 0.01 * tactic[1] for tactic in tactics}
cli.clock_for = lambda case, samples: ScriptedClock({**table, -1: 1.0})
from bench.__main__ import main
raise SystemExit(main(["tactics", "discover", "--state", folder, *op_arguments]))
"""

# Another process, which knows the record only: does the op's own call hit?
SERVING = """
import sys
from flashinfer.autotuner import AutoTuner
from bench.tactics import problems
from bench.tactics.case import open_op
from bench.tactics.numerics import same_bits
from bench.tactics.routing import generate

record, sizes, tokens = sys.argv[1:]
problem = problems.load("kimi-k3", sizes.split())
op = open_op("triton-grouped-gemm", problem, device="cpu", seed=0)
routing = generate("uniform", tokens=int(tokens), experts=3, top_k=2, seed=0)
case = op.case(int(tokens), routing)
tuner = AutoTuner.get()
assert tuner.load_configs(record)
_, tactic = tuner.choose_one(
    case.custom_op, [case.runner], case.tuning_config, case.inputs, **case.kwargs
)
assert same_bits(*case.run(tactic), *case.run((32, 0)))
print("serving", tactic)
from bench.__main__ import main
raise SystemExit(main(["tactics", "verify", record, "--no-speed"]))
"""


def python(*arguments):
    path = f"{SCRIPTS}{os.pathsep}{Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def discovered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("found") / "state"
    code, text = python("-c", SCRIPT, str(folder), SIZES, *OP)
    assert code == 0, text
    return folder, text


@pytest.fixture
def recorded(discovered, tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    arguments = ["--state", str(discovered[0]), "--out", str(path), "--allow-unknown"]
    # The op opens without running a kernel here; the interpreter is the children's.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["tactics", "record", *arguments]) == 0
    assert f"verify {path}" in capsys.readouterr().out
    return path


def test_kernels_agree_with_torch_and_the_hidden_tile_is_found(discovered):
    text = discovered[1]
    assert "kernels agree" in text and "RECOMMENDED: (32,0)" in text
    assert "tile  192" in text and "next: record --state" in text


def test_a_fresh_process_serves_and_verifies_the_recorded_tactic(recorded):
    provenance = json.loads(Path(f"{recorded}.provenance.json").read_text())
    assert provenance["tactic"] == [32, 0] and provenance["tokens"] == TOKENS
    code, text = python("-c", SERVING, str(recorded), SIZES, str(TOKENS))
    assert "serving (32, 0)" in text, text
    assert "0 profiled" in text and "skip speed" in text and code == 0


def test_merge_and_repeat_through_the_command(recorded, discovered, tmp_path, capsys):
    cache = tmp_path / "cache.json"
    arguments = [
        "--state",
        str(discovered[0]),
        "--allow-unknown",
        "--merge",
        str(cache),
    ]
    assert main(["tactics", "record", *arguments]) == 0
    assert json.loads(cache.read_text()) == json.loads(recorded.read_text())
    assert main(["tactics", "record", *arguments]) == 0
    assert "nothing to do" in capsys.readouterr().out


def refusal(capsys, *arguments):
    try:
        code = main(["tactics", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine can time")
def test_timing_without_a_gpu_is_refused(recorded, capsys, monkeypatch):
    with pytest.raises(BenchError, match="needs a CUDA device.*this machine has none"):
        FlashInferClock(TinyOp().case(8, None))


def test_record_refuses_what_it_must(discovered, tmp_path, capsys, monkeypatch):
    state = str(discovered[0])
    out = ("--out", str(tmp_path / "r.json"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    text = refusal(capsys, "record", "--state", state, *out, "--allow-unknown")
    assert "TRITON_INTERPRET=1" in text
    rows = Path(state, "discover.jsonl").read_text().splitlines()
    for change, says in (
        (lambda row: row["environment"].update(gpu="other"), "gpu differ"),
        (lambda row: row.update(repetitions=10), "recommends no tactic"),
    ):
        header = json.loads(rows[0])
        change(header)
        folder = tmp_path / says[:3]
        folder.mkdir()
        Path(folder, "discover.jsonl").write_text(
            "\n".join([json.dumps(header), *rows[1:]]) + "\n"
        )
        assert says in refusal(capsys, "record", "--state", str(folder), *out)
    assert not Path(out[1]).exists()


def test_discover_refuses_bad_arguments(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fixed = ["discover", "--state", str(tmp_path / "s"), *OP]
    for arguments, says in (
        (["--list-at", "4,x"], "--list-at"),
        (["--list-at", "0"], "--list-at"),
        (["--list-at", "200"], "from 1 to 100"),
        (["--routing", "capture:/nowhere"], "no captured layer"),
        (["--tokens", "0"], "--tokens: '0'"),
        (["--repetitions", "3"], "at least 9"),
    ):
        assert says in refusal(capsys, *fixed, *arguments)
    assert "kimi-k3" in refusal(capsys, *fixed, "--op", "nothing.here")


def test_kimi_k3_without_its_gpu_is_refused(tmp_path, capsys):
    text = refusal(
        capsys,
        "discover",
        "--state",
        str(tmp_path / "s"),
        "--tokens",
        "16",
        "--device",
        "cpu",
    )
    assert "compute capability 10.0 or 10.3" in text


def test_more_tiles_than_a_grid_holds_are_refused_by_name(monkeypatch):
    from bench.tactics.examples import triton_grouped_gemm as example

    problem = problems.load("kimi-k3", SIZES.split())
    runner = example.GroupedGemmRunner(problem)
    rows = 65536 * 32
    inputs = [torch.empty((rows, 1, 0)), torch.empty((rows, 0)), torch.zeros(rows, 1)]
    inputs[2] = inputs[2].to(torch.int32)
    with pytest.raises(ValueError, match="2097152 rows need up to 65539 tiles of 32"):
        runner(inputs, tactic=(32, 0), weight=torch.empty((3, 24, 24)))
