"""Reports from raw rows: what they show, what they must not, and that they repeat."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import config, report, report_data, report_text, rows
from bench.errors import BenchError
from bench.rows import (
    Branch,
    Check,
    Engine,
    Environment,
    Gpu,
    Output,
    Request,
    Row,
    Scored,
    TraceClass,
)

# Table of sgl-project/sglang pull request 47653: input tok/s and P50 TTFT.
SEED = [
    ("A1", "baseline", 1, 42_203.78, 6.128),
    ("KDA", "kda", 1, 42_899.91, 6.022),
    ("MoE", "moe", 1, 42_813.05, 6.034),
    ("B1", "combined", 1, 43_569.94, 5.925),
    ("A2", "baseline", 2, 42_130.58, 6.137),
    ("B2", "combined", 2, 43_524.13, 5.940),
]
REQUESTS, ISL = 128, 65_536


PORTS = itertools.count(30_000)  # every server takes another free one


def environment(arm="baseline", **changes):
    fields = {
        "engine": Engine(digest=f"{arm}-digest", tree="/opt/sglang", files=9, pid=7),
        "gpus": [Gpu(index=0, name="NVIDIA H200", sm_clock_mhz=1980)],
        "driver": "580.1",
        "packages": {"torch": "2.14.1", "flashinfer-python": "0.7.2"},
        "python": "3.11.2",
        "arguments": ["--host", "x", "--port", str(next(PORTS)), "--pp-size", "8"],
        "load": {"isl": ISL, "concurrency": 4, "tokenizer": "", "arguments": []},
        "seed": 3,
    }
    return Environment(**{**fields, **changes})


def run(label, arm, pair, rate, ttft, position=0, *, osl=1, **changes):
    """One formal run whose requests add up to `rate`."""
    draw = np.random.default_rng(position)
    times = ttft + draw.normal(0, 0.02, REQUESTS)
    times += ttft - np.median(times)
    fields = {
        "kind": "serve",
        "experiment": "kimi-k3",
        "config_sha256": "c" * 64,
        "label": label,
        "arm": arm,
        "baseline": arm == "baseline",
        "pair": pair,
        "position": position,
        "duration_s": REQUESTS * ISL / rate,
        "environment": environment(arm),
        "requests": [
            Request(
                index=i,
                ok=True,
                ttft_s=float(t),
                latency_s=float(t) + 0.02 * (osl - 1),
                input_tokens=ISL,
                output_tokens=osl,
                cached_tokens=0,
            )
            for i, t in enumerate(times)
        ],
        "checks": [Check(name="cached tokens", ok=True)],
    }
    return Row(**{**fields, **changes})


def seed_rows():
    return [run(*line, position=i) for i, line in enumerate(SEED)]


def written(tmp_path, members, name="rows.jsonl"):
    path = tmp_path / name
    for row in members:
        rows.append(path, row)
    return path


def reported(tmp_path, members, *options):
    """(exit code, Markdown) of a report on these rows."""
    path = written(tmp_path, members)
    code = report.main([str(path), f"--out={tmp_path / 'out'}", *options])
    return code, (tmp_path / "out" / "report.md").read_text()


def line_of(text, start):
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_the_seed_table(tmp_path):
    code, text = reported(tmp_path, seed_rows(), "--no-plots")
    assert code == 0
    assert "| A1 | baseline | 128 | 42,203.78 | 6.128 |" in text
    assert "| **baseline pooled** | baseline | 256 | 42,167.15 |" in text
    assert "| **combined pooled** | combined | 256 | 43,547.02 |" in text
    combined = line_of(text, "| combined | input tok/s")
    assert "+3.24%, +3.31%" in combined and "| +3.27% | faster by" in combined
    moe = line_of(text, "| moe | input tok/s")
    assert "+1.44%" in moe and "no difference shown: one pair" in moe
    assert "input tok/s 0.17%" in text  # 42,203.78 / 42,130.58
    assert "slower" not in text
    assert "Failed or missing" not in text


def test_the_same_rows_give_the_same_bytes(tmp_path):
    members = seed_rows()
    one = reported(tmp_path / "a", members)[1]
    two = reported(tmp_path / "b", members)[1]
    assert one == two
    for path in sorted((tmp_path / "a" / "out").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / "out" / path.name).read_bytes()
    # The order of the lines in the file is not the order of the schedule.
    assert (
        reported(tmp_path / "c", members[::-1], "--no-plots")[1]
        == reported(tmp_path / "d", members, "--no-plots")[1]
    )


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            {"checks": [Check(name="cached tokens", ok=False, detail="5 != 0")]},
            "5 != 0",
        ),
        ({"failed": "server died | exit -9"}, "run failed: server died \\| exit -9"),
    ],
)
def test_a_run_that_failed_shows_no_speed(tmp_path, capsys, changes, reason):
    members = seed_rows()
    members[3] = run(*SEED[3], position=3, **changes)
    code, text = reported(tmp_path, members, "--no-plots")
    assert code == 1
    assert "| B1 | combined | - | - | - | - | FAILED, see below |" in text
    assert "43,569.94" not in text and "5.925" not in text
    assert f"- serve B1: {reason}" in text.replace("cached tokens: ", "")
    # The other combined run is no pair of two, so nothing is claimed.
    combined = line_of(text, "| combined | input tok/s")
    assert "+3.31%" in combined and "+3.24%" not in combined
    assert "no difference shown" in combined
    assert "- Pair left out: A1 B1 (B1 did not pass)." in text
    pooled = line_of(text, "| **combined pooled** |")
    assert "| 128 | 43,524.13 |" in pooled and "| 1 of 2 runs |" in pooled
    assert "B1" in capsys.readouterr().err


def test_a_run_without_a_duration_or_tokens_shows_no_speed(tmp_path):
    for changes in ({"duration_s": None}, {"requests": []}):
        row = run(*SEED[0], **changes)
        assert report_data.speed([row]) is None
        assert report_data.speed([run(*SEED[1]), row]) is None


def test_missing_rows_are_listed(tmp_path, capsys):
    members = seed_rows()
    del members[5]
    code, text = reported(tmp_path / "a", members, "--no-plots")
    assert code == 1 and "- missing: the candidate run of pair 2" in text
    del members[2]
    assert "the run at position 2" in reported(tmp_path / "b", members, "--no-plots")[1]
    assert "missing" in capsys.readouterr().err


EXPERIMENT = """
experiment = "kimi-k3"
baseline = "baseline"
[arms.baseline]
engine = "/x"
patches = false
[arms.combined]
engine = "/x"
patches = true
[server]
model = "/m"
[load]
isl = 65536
[schedule]
pairs = 2
[outputs]
"""


def test_the_experiment_file_knows_every_row(tmp_path, capsys):
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT)
    digest = config.digest(config.load(path))
    order = ["baseline", "combined", "combined", "baseline"]
    members = [
        run(
            f"{arm}-{1 + i // 2}",
            arm,
            1 + i // 2,
            42_000.0,
            6.0,
            position=i,
            config_sha256=digest,
        )
        for i, arm in enumerate(order)
    ]
    del members[3]
    code, text = reported(tmp_path, members, "--no-plots", f"--config={path}")
    assert code == 1
    for name in ("serve baseline-2", "outputs baseline", "outputs combined"):
        assert f"- missing: {name}" in text
    assert text.count("missing:") == 3
    assert "outputs combined" in capsys.readouterr().err
    path.write_text(EXPERIMENT.replace("65536", "1024"))
    with pytest.raises(BenchError, match="the file the rows were measured with"):
        reported(tmp_path / "b", members, f"--config={path}")


def test_a_truncated_file_is_reported(tmp_path, capsys):
    path = written(tmp_path, seed_rows())
    path.write_bytes(path.read_bytes()[:-40])
    assert report.main([str(path), "--no-plots"]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "## Lines that are no rows" in text and "rows.jsonl:6: truncated row" in text
    assert "B2" not in line_of(text, "| combined | input tok/s")
    assert "truncated row" in capsys.readouterr().err


def test_a_line_that_is_no_row_makes_a_whole_report_red(tmp_path):
    path = written(tmp_path, seed_rows())
    assert report.main([str(path), "--no-plots"]) == 0
    with open(path, "a") as file:
        file.write("not json\n")
    assert report.main([str(path), "--no-plots"]) == 1
    assert "rows.jsonl:7: not a row" in (tmp_path / "report.md").read_text()


def test_no_rows_at_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(BenchError, match="cannot read rows"):
        report.main([str(path)])
    path.write_text("{}\n")
    with pytest.raises(BenchError, match="no row in .* the first line"):
        report.main([str(path)])
    with pytest.raises(BenchError, match="between 0 and 1"):
        report.main([str(path), "--level=95"])


def test_a_repeated_run_replaces_the_failed_one_and_says_so(tmp_path):
    failed = run(*SEED[3], position=3, failed="server died")
    code, text = reported(tmp_path, [failed, *seed_rows()], "--no-plots")
    assert code == 0
    assert "43,569.94" in text
    assert "- serve B1 ran again; an earlier row (run failed: server died)" in text


def test_warm_up_is_no_part_of_a_result(tmp_path):
    warm = run("W1", "baseline", None, 1.0, 99.0, formal=False)
    code, text = reported(tmp_path, [warm, *seed_rows()], "--no-plots")
    assert code == 0 and "W1" not in text and "42,167.15" in text


def test_failed_requests_count_neither_tokens_nor_times():
    row = run(*SEED[0])
    row.requests[0].ok = False
    found = report_data.speed([row])
    assert found.requests == 127 and len(found.ttft) == 127
    assert found.input_rate == pytest.approx(42_203.78 * 127 / 128)


def test_configurations_are_not_mixed(tmp_path):
    other = [
        run(*line, position=i, config_sha256="d" * 64) for i, line in enumerate(SEED)
    ]
    code, text = reported(tmp_path, seed_rows() + other, "--no-plots")
    assert code == 0
    assert text.count("42,167.15") == 2 and "| 512 |" not in text
    assert "## kimi-k3 (cccccccccccc)" in text and "## kimi-k3 (dddddddddddd)" in text


def test_output_tokens_get_their_own_columns(tmp_path):
    members = [run(*line, position=i, osl=11) for i, line in enumerate(SEED)]
    text = reported(tmp_path, members, "--no-plots")[1]
    assert "| Output tok/s | P50 TPOT ms |" in text
    row = line_of(text, "| A1 | baseline |").split("|")
    assert float(row[8].strip()) == pytest.approx(20.0)  # 0.02 s a token
    rate = REQUESTS * 11 / (REQUESTS * ISL / 42_203.78)
    assert float(row[7].strip()) == pytest.approx(rate, abs=0.005)


def test_percentiles_are_pooled_not_averaged():
    first, second = run(*SEED[0]), run(*SEED[4])
    for row in (first, second):
        for request, value in zip(
            row.requests, [6.0] * 125 + [6.1, 7.4, 7.5], strict=True
        ):
            request.ttft_s = value
    text = report_text._speed_cells([first, second], output=False)
    assert float(text[3]) > 7.3
    assert float(report_text._speed_cells([first], output=False)[3]) < 7.1


def test_environment_and_its_differences(tmp_path):
    members = seed_rows()
    members[3].environment = environment("combined", driver="581.0")
    text = reported(tmp_path, members, "--no-plots")[1]
    assert "| GPU | 1x NVIDIA H200 |" in text
    assert "| Driver | 580.1; 581.0 (DIFFERS between runs) |" in text
    assert "| torch | 2.14.1 |" in text
    assert "- combined: engine `combined-digest`" in text
    assert text.count("`--host x --pp-size 8`") == 4  # once an arm, not once a run
    assert "| Load | concurrency=4 isl=65536 |" in text


def outputs_row(arm, ids, **changes):
    made = [
        Output(
            name=f"len{len(each)} #{i}",
            length=len(each),
            repeat=i,
            concurrent=False,
            input_sha256="same" if i < 2 else f"in{i}",
            output_ids=each,
        )
        for i, each in enumerate(ids)
    ]
    fields = {"kind": "outputs", "outputs": made, "requests": []}
    return run(f"O-{arm}", arm, None, 1.0, 1.0, **{**fields, **changes})


def test_outputs_name_the_first_request_and_token(tmp_path):
    base = outputs_row("baseline", [[1, 2, 3], [1, 2, 3], [4, 5, 6]])
    good = outputs_row("kda", [[1, 2, 3], [1, 2, 3], [4, 5, 6]])
    odd = outputs_row("moe", [[1, 2, 3], [1, 2, 4], [4, 9, 6]])
    code, text = reported(tmp_path, [base, good, odd])
    assert code == 1
    assert text.count("outputs differ from baseline's") == 1
    assert (
        "- outputs moe: 2 of 3 outputs differ from baseline's; len3 #1: first difference"
        " at output token 2" in text
    )
    assert "| kda | 3 | 3 | 2 inputs, each with one output | none |" in text
    moe = line_of(text, "| moe | 3 | 1 | len3 #1 differs from len3 #0 at token 2 |")
    assert "len3 #1: first difference at output token 2" in moe


def test_an_arm_whose_outputs_differ_gets_no_speed_verdict(tmp_path, capsys):
    base = outputs_row("baseline", [[1, 2, 3]])
    probes = [
        base,
        outputs_row("kda", [[1, 2, 3]]),
        outputs_row("combined", [[1, 2, 4]]),
    ]
    members = seed_rows()
    members += [run("KDA2", "kda", 2, 42_800.0, 6.0, position=6)]
    code, text = reported(tmp_path / "a", members + probes)
    assert code == 1
    for what in ("input tok/s", "P50 TTFT"):
        line = line_of(text, f"| combined | {what}")
        assert line == f"| combined | {what} | - | - | - | - | outputs differ |"
    assert "- Pair left out: A1 B1 (outputs differ)." in text
    assert "faster by" in line_of(text, "| kda | input tok/s")
    assert "outputs combined: 1 of 1 outputs differ" in capsys.readouterr().err
    probes[2] = outputs_row("combined", [[1, 2, 3]])
    code, text = reported(tmp_path / "b", members + probes)
    assert code == 0 and "faster by" in line_of(text, "| combined | input tok/s")


def scored(state, values, context=100, cached=None, **changes):
    fields = {"control": False, "seed": 1, "input_sha256": "s"}
    return Scored(
        context=context,
        state=state,
        logprobs=values,
        cached_tokens=cached,
        **{**fields, **changes},
    )


def continuation_row(arm, members):
    label = f"continuation {arm}"
    changes = {"kind": "continuation", "requests": [], "scored": members}
    return run(label, arm, None, 1.0, 1.0, **changes)


def test_continuation_drift(tmp_path):
    base = continuation_row(
        "baseline",
        [
            scored("cold", [-1.0] * 10, cached=0),
            scored("warm", [-1.0] * 9 + [-2.0], cached=64),
            scored("repeat", [-1.0] * 9 + [-2.0], cached=64),
            scored("cold", [-1.0], context=64, control=True),
            scored("host", [-1.5], context=64, control=True),
        ],
    )
    other = continuation_row("kda", [scored("cold", [-1.25] * 10, cached=0)])
    text = reported(tmp_path, [base, other])[1]
    assert (
        "| baseline | 100 | cold vs warm | 0.1000 | 0.1000 | 1.0000 | 0 / 64 |" in text
    )
    assert "| warm vs repeat | 0.0000 | 0.0000 | 0.0000 | 64 / 64 |" in text
    assert "| 64 (aligned control) | cold vs host | 0.5000 | 0.5000 | 0.5000 |" in text
    assert "| kda | 100 | cold, baseline vs kda | 0.2500 |" in text
    other.scored[0].input_sha256 = "another"
    text = reported(tmp_path / "b", [base, other])[1]
    assert "| kda | context 100: the arms' inputs differ | - |" in text


def test_branching_and_kernels(tmp_path):
    branch = run(
        *SEED[0],
        **{
            "kind": "branching",
            "requests": [],
            "branches": [Branch(seed=5, prefix=8320, before=[-0.02], after=[-1.35])],
        },
    )
    kernels = [
        run(
            f"trace {arm}",
            arm,
            None,
            1.0,
            1.0,
            kind="trace",
            requests=[],
            trace=[
                TraceClass(rank=r, name="moe_gemm", tile=tile, count=92, time_us=10)
                for r in range(8)
            ],
            checks=[
                Check(name="n", ok=True, detail=f"{arm}: 736 moe_gemm, stated 736")
            ],
        )
        for arm, tile in (("baseline", 192), ("moe", 128))
    ]
    code, text = reported(tmp_path, [branch, *kernels])
    assert code == 0
    assert "| baseline | 5 | 8,320 | -0.0200 | -1.3500 | -1.3300 | 1.3300 | ? |" in text
    assert "| moe_gemm | 192 | 736 | 0.080 | 0 | 0.000 |" in text
    assert "| moe_gemm | 128 | 0 | 0.000 | 736 | 0.080 |" in text
    assert "- ok: moe: 736 moe_gemm, stated 736" in text


def test_plots_are_drawn_only_from_runs_that_passed(tmp_path):
    code, text = reported(tmp_path / "a", seed_rows())
    names = sorted(p.name for p in (tmp_path / "a" / "out").glob("*.png"))
    assert names == [f"01-kimi-k3-{k}.png" for k in ("ratios", "throughput", "ttft")]
    for name in names:
        data = (tmp_path / "a" / "out" / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 8_000
        assert f"({name})" in text
    failed = [
        run(*line, position=i, failed="server died") for i, line in enumerate(SEED)
    ]
    code, text = reported(tmp_path / "b", failed)
    assert code == 1 and "![" not in text
    assert not list((tmp_path / "b" / "out").glob("*.png"))


def test_an_interrupted_write_leaves_the_old_report(tmp_path, monkeypatch):
    path = written(tmp_path, seed_rows())
    report.main([str(path), "--no-plots"])
    before = (tmp_path / "report.md").read_text()

    def full(self, text, **kwargs):
        self.write_bytes(text.encode()[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BenchError, match="choose a writable --out"):
        report.main([str(path), "--no-plots"])
    monkeypatch.undo()
    assert (tmp_path / "report.md").read_text() == before
    # The report itself is never written into, only put in place whole.
    whole = Path.write_text

    def not_the_report(self, text, **kwargs):
        assert self.name != "report.md"
        return whole(self, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", not_the_report)
    report.main([str(path), "--no-plots"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.md", "rows.jsonl"]


def test_an_a_a_pair_shows_no_difference(tmp_path):
    # Noise of 0.2%: seven pairs of the same tree under another name.
    draw = np.random.default_rng(12)
    members = []
    for pair in range(7):
        for side, arm in enumerate(("baseline", "again")):
            rate = 42_000 * (1 + draw.normal(0, 0.002))
            label = f"{arm}{pair}"
            members.append(run(label, arm, pair, rate, 6.0, position=2 * pair + side))
    code, text = reported(tmp_path, members, "--no-plots")
    assert code == 0
    assert "no difference shown" in line_of(text, "| again | input tok/s")
    assert "faster" not in text and "slower" not in text
    group = report_data.groups(members)[0]
    by_arm = report_data.noise(group, report_data.input_rate)
    # Told that both arms ran one tree, the pairs themselves are A/A pairs.
    for row in members:
        row.environment = environment("same", variables={"PYTHONPATH": row.arm})
    by_pair = report_data.noise(group, report_data.input_rate)
    ratios = [r for c in report_data.compare(group, level=0.95, seed=0) for r in c.rate]
    assert by_pair == pytest.approx(max(by_arm, *(max(r, 1 / r) - 1 for r in ratios)))


def test_a_run_that_never_served_does_not_spoil_the_environment(tmp_path):
    members = seed_rows()
    members[5] = run(*SEED[5], position=5, failed="x", environment=Environment())
    text = reported(tmp_path, members, "--no-plots")[1]
    assert "DIFFERS" not in text and "| Seed | 3 |" in text
