"""The trace verb on files as torch.profiler and Nsight Systems write them."""

import gzip
import json
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import rows, trace, trace_files, trace_nsys, trace_torch
from bench.errors import BenchError, CheckFailed

CONV = "_causal_conv1d_fwd_kernel"
PACK = "_kda_pack_inputs_kernel"
CORE = "kernel_cutlass_kernel_prep_TensorMapswizzle_1"
GEMM = "nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT"
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)"
)
MOE = (
    "bmm_{c}_MxE2m1MxE4m3_Fp32_t128x{n}x256_s4_et128x64_m256x{n}x32_rM_TN_transOut_"
    "bN_rgTma_dynB_sm100f"
)

# Kimi-K3 at PP8 with chunks of 16,384 in a 65,536-token prompt.
LAYERS = [9, 9, 9, 9, 9, 8, 8, 8]  # KDA layers of each stage, 69 together
EXPERTS = [11, 12, 12, 12, 12, 11, 11, 11]  # MoE layers of each stage, 92 together
CHUNKS = 4


def kernels(stage, *, packed, tile):
    """One rank's kernel names in order."""
    names = []
    for _ in range(CHUNKS):
        for _ in range(LAYERS[stage]):
            names += [GEMM, CONV] + ([PACK] if packed else [COPY] * 4) + [CORE, COPY]
        for _ in range(EXPERTS[stage]):
            names += [MOE.format(c=c, n=tile) for c in ("MxE4m3", "Bfloat16")]
    return names


def torch_trace(names, *, start=1_000.0, rank=None, world=None, ops=()):
    """A trace as Kineto lays it out: header, events, trailer."""
    events = [
        {"ph": "M", "ts": 0.0, "pid": 0, "tid": 0, "name": "process_name", "args": {}},
        {
            "ph": "X",
            "cat": "overhead",
            "name": "Init",
            "pid": -1,
            "tid": 0,
            "ts": 1,
            "dur": 2,
        },
    ]
    for index, name in enumerate(ops):
        op = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 9}
        events.append(
            {**op, "ts": start + index, "dur": 0.5, "args": {"External id": index}}
        )
    for index, name in enumerate(names):
        category = {"Memc": "gpu_memcpy", "Mems": "gpu_memset"}.get(name[:4], "kernel")
        events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": start + 10 * index,
                "dur": 2.5,
                "args": {
                    "device": 0,
                    "stream": 7,
                    "correlation": index,
                    "grid": [1, 1, 1],
                },
            }
        )
    header = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA B300"}],
    }
    if rank is not None:
        header["distributedInfo"] = {
            "backend": "nccl",
            "rank": rank,
            "world_size": world,
        }
    return {**header, "traceEvents": events, "baseTimeNanoseconds": 1754904084000000000}


def write_torch(path, names, **options):
    text = json.dumps(torch_trace(names, **options), indent=2)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode(), 1))
    else:
        path.write_text(text)
    return path


def write_nsys(path, processes, *, graphs=0, copies=()):
    """An Nsight export with one entry of `processes` for each GPU process.

    Tables and columns are those of `nsys export --type sqlite` that are read.
    """
    connection = sqlite3.connect(path)
    columns = (
        "start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, contextId INT,"
        " streamId INT NOT NULL, correlationId INT, globalPid INT"
    )
    connection.executescript(
        f"""
        CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns}, demangledName INT NOT NULL,
            shortName INT NOT NULL, mangledName INT, gridX INT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({columns}, bytes INT NOT NULL,
            copyKind INT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({columns}, value INT, bytes INT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns}, graphId INT);
        INSERT INTO StringIds VALUES (1, 'elementwise_kernel');
        """
    )
    ids = {}
    for device, names in enumerate(processes):
        process = (4000 + device) << 24
        for index, name in enumerate(names):
            if name not in ids:
                ids[name] = len(ids) + 2
                connection.execute(
                    "INSERT INTO StringIds VALUES (?, ?)", (ids[name], name)
                )
            start = 1_000_000 + 10_000 * index + device
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL"
                " VALUES (?,?,?,1,7,?,?,?,1,NULL,1)",
                (start, start + 2_500, device, index, process, ids[name]),
            )
        for kind in copies:
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (5,10,?,1,7,1,?,64,?)",
                (device, process, kind),
            )
    for index in range(graphs):
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1,2,0,1,7,?,0,3)",
            (index,),
        )
    connection.commit()
    connection.close()
    return path


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """The seed's two arms: eight PP ranks, four copies a layer or one pack."""
    root = tmp_path_factory.mktemp("traces")
    for arm, options in (
        ("base", {"packed": False, "tile": 192}),
        ("series", {"packed": True, "tile": 128}),
    ):
        (root / arm).mkdir()
        for stage in range(8):
            write_torch(
                root / arm / f"1764511200.5-TP-0-PP-{stage}.trace.json.gz",
                kernels(stage, **options),
                start=1000.0 + stage,
            )
        # A merged profile beside them would count every kernel twice.
        shutil.copy(
            root / arm / "1764511200.5-TP-0-PP-0.trace.json.gz",
            root / arm / "merged-1764511200.5.trace.json.gz",
        )
    return root


STATED = [
    "base:kda_copy=1104",
    "base:pack=0",
    "base:moe_gemm@192=736",
    "base:moe_gemm@128=0",
    "series:kda_copy=0",
    "series:pack=276",
    "series:moe_gemm@128=736",
    "series:moe_gemm=736",
]


def verb(root, *options, arms=("base", "series")):
    paths = [f"--arm={arm}={root / arm}" for arm in arms]
    return trace.main([*paths, *options])


def test_counts_of_the_seed(arms, capsys):
    stated = [f"--expect={text}" for text in STATED]
    assert verb(arms, "--ranks=8", *stated) == 0
    shown = capsys.readouterr()
    assert "| kda_copy |  | 1,104 | 2.760 | 0 | 0.000 |" in shown.out
    assert "| moe_gemm | 192 | 736 | 1.840 | 0 | 0.000 |" in shown.out
    assert "| 7 | kda_copy | 128 | 0.320 | 0 | 0.000 |" in shown.out
    assert not shown.err


@pytest.mark.parametrize("wrong", ["base:kda_copy=1103", "series:moe_gemm@192=736"])
def test_a_wrong_count_is_red(arms, capsys, wrong):
    assert verb(arms, "--ranks=8", f"--expect={wrong}") == 1
    assert "stated" in capsys.readouterr().err


def test_rows_and_a_config(arms, tmp_path, capsys):
    config = tmp_path / "trace.toml"
    config.write_text(
        f'ranks = 8\n[arms]\nbase = ["{arms}/base"]\nseries = ["{arms}/series"]\n'
        '[expect.base]\nkda_copy = 1104\n"moe_gemm@192" = 736\n'
        "[expect.series]\npack = 5\n"
    )
    assert trace.main([str(config), f"--rows={tmp_path / 'r.jsonl'}"]) == 1
    found, bad = rows.read(tmp_path / "r.jsonl")
    assert not bad and [row.arm for row in found] == ["base", "series"]
    assert [row.passed for row in found] == [True, False]
    assert found[0].baseline and not found[1].baseline
    packs = [cell for cell in found[1].trace if cell.name == "pack"]
    assert [cell.rank for cell in packs] == list(range(8))
    assert sum(cell.count for cell in packs) == 276
    assert {cell.tile for cell in found[1].trace if cell.name == "moe_gemm"} == {128}


def test_a_missing_rank_is_named(arms, tmp_path, capsys):
    for arm in ("base", "series"):
        shutil.copytree(arms / arm, tmp_path / arm)
    (tmp_path / "series" / "1764511200.5-TP-0-PP-3.trace.json.gz").unlink()
    assert verb(tmp_path, "--ranks=8", f"--rows={tmp_path / 'r.jsonl'}") == 1
    assert "arm series: no trace of rank 3 (of 8)" in capsys.readouterr().err
    found, _ = rows.read(tmp_path / "r.jsonl")
    assert "rank 3" in found[1].failed and not found[1].trace
    # Without --ranks a hole is still seen; a lost last rank by the other arm.
    assert verb(tmp_path) == 1
    (tmp_path / "base" / "1764511200.5-TP-0-PP-3.trace.json.gz").rename(
        tmp_path / "series" / "1764511200.5-TP-0-PP-3.trace.json.gz"
    )
    (tmp_path / "base" / "1764511200.5-TP-0-PP-7.trace.json.gz").unlink()
    assert verb(tmp_path) == 1
    (tmp_path / "series" / "1764511200.5-TP-0-PP-7.trace.json.gz").unlink()
    capsys.readouterr()
    for stage in (3, 4, 5, 6):
        (tmp_path / "base" / f"1764511200.5-TP-0-PP-{stage}.trace.json.gz").unlink(True)
    assert verb(tmp_path) == 1
    assert "different ranks" in capsys.readouterr().err


def test_the_world_size_in_a_trace_finds_a_lost_last_rank(tmp_path, capsys):
    (tmp_path / "base").mkdir()
    write_torch(tmp_path / "base" / "a.json", [CONV, CORE], rank=0, world=2)
    assert verb(tmp_path, arms=["base"]) == 1
    assert "no trace of rank 1 (of 2)" in capsys.readouterr().err


def test_two_traces_of_one_rank_and_one_trace_as_two_ranks(arms, tmp_path, capsys):
    folder = tmp_path / "base"
    folder.mkdir()
    source = arms / "base" / "1764511200.5-TP-0-PP-0.trace.json.gz"
    shutil.copy(source, folder / "1-TP-0-PP-0-EXTEND.trace.json.gz")
    shutil.copy(source, folder / "2-TP-0-PP-0.trace.json.gz")
    assert verb(tmp_path, arms=["base"]) == 1
    assert "rank 0 has 2 traces" in capsys.readouterr().err
    (folder / "2-TP-0-PP-0.trace.json.gz").rename(folder / "2-TP-0-PP-1.trace.json.gz")
    assert verb(tmp_path, arms=["base"]) == 1
    assert "are the same trace" in capsys.readouterr().err
    assert verb(tmp_path, "--ranks=1", arms=["base"]) == 1
    assert "not one of the 1 stated" in capsys.readouterr().err


@pytest.mark.parametrize(
    "names, ranks, numbers",
    [
        (["1-TP-0-PP-0", "1-TP-0-PP-1"], None, [0, 1]),
        (
            ["1-TP-0-PP-0", "1-TP-1-PP-0", "1-TP-0-PP-1", "1-TP-1-PP-1"],
            None,
            [0, 1, 2, 3],
        ),
        # TP 1 is lost everywhere: only --ranks tells the width.
        (["1-TP-0-PP-0", "1-TP-0-PP-1"], 4, [0, 2]),
        (["run-rank3", "run_rank11"], None, [3, 11]),
        (["HTTP-5-TP-1"], None, [1]),
        (["whatever"], None, [0]),
    ],
)
def test_ranks_from_names(names, ranks, numbers):
    found = [trace_files.Trace(f"{name}.trace.json.gz", {}) for name in names]
    trace_files.number(found, ranks)
    assert [each.rank for each in found] == numbers


def test_a_rank_that_cannot_be_told():
    found = [trace_files.Trace("a.json", {}), trace_files.Trace("b.json", {})]
    with pytest.raises(BenchError, match="cannot tell the rank of a.json"):
        trace_files.number(found)


def test_every_cut_of_a_trace_is_noticed(tmp_path):
    whole = json.dumps(torch_trace([CONV, COPY, CORE]))
    path = tmp_path / "TP-0.json"
    for end in range(0, len(whole), 7):
        path.write_text(whole[:end])
        with pytest.raises(CheckFailed, match="truncated"):
            trace_torch.read(path)
    path.write_text(whole + "{")
    with pytest.raises(CheckFailed, match="truncated or broken"):
        trace_torch.read(path)
    packed = gzip.compress(whole.encode())
    path = tmp_path / "TP-0.json.gz"
    for end in (0, 5, 20, len(packed) // 2, len(packed) - 9, len(packed) - 1):
        path.write_bytes(packed[:end])
        with pytest.raises(CheckFailed, match="truncated"):
            trace_torch.read(path)
    path.write_bytes(whole.encode())
    with pytest.raises(CheckFailed):
        trace_torch.read(path)
    path.write_bytes(packed)
    assert trace_torch.read(path).events == 3


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000, 1 << 20])
def test_the_window_does_not_change_what_is_read(tmp_path, monkeypatch, chunk):
    path = write_torch(tmp_path / "TP-0.json", kernels(0, packed=False, tile=192)[:40])
    whole = trace_torch.read(path)
    monkeypatch.setattr(trace_torch, "CHUNK", chunk)
    assert trace_torch.read(path) == whole
    assert whole.events == 40


def test_a_window_holds_no_whole_trace(tmp_path, monkeypatch):
    path = write_torch(tmp_path / "TP-0.json", kernels(0, packed=False, tile=192))
    monkeypatch.setattr(trace_torch, "CHUNK", 4096)
    longest = 0

    class Watched(trace_torch._Text):
        def more(self):
            nonlocal longest
            result = super().more()
            longest = max(longest, len(self.buffer))
            return result

    monkeypatch.setattr(trace_torch, "_Text", Watched)
    trace_torch.read(path)
    assert path.stat().st_size > 20 * longest


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[]", "no gpu events"),
        ('{"traceEvents": []}', "no gpu events"),
        ('{"schemaVersion": 1}', "no traceEvents"),
        ('{"traceEvents": [1]}', "not as torch.profiler writes"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}',
            "not as torch.profiler writes",
        ),
        ("hello", "truncated or broken"),
    ],
)
def test_files_that_are_no_trace(tmp_path, text, reason):
    path = tmp_path / "TP-0.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=reason):
        trace_torch.read(path)


def test_streams_are_kept_apart(tmp_path):
    # A copy on another stream is not between the conv and the core.
    content = torch_trace([CONV, COPY, CORE])
    content["traceEvents"][3]["args"]["stream"] = 9
    path = tmp_path / "TP-0.json"
    path.write_text(json.dumps(content))
    classes, _ = trace.count(trace_torch.read(path), trace.Plan())
    assert [(c.name, c.count) for c in classes] == [
        ("conv", 1),
        ("kda", 1),
        ("copy", 1),
    ]


def test_events_out_of_order_are_sorted(tmp_path):
    content = torch_trace([CONV, COPY, CORE])
    content["traceEvents"].reverse()
    path = tmp_path / "TP-0.json"
    path.write_text(json.dumps(content))
    classes, _ = trace.count(trace_torch.read(path), trace.Plan())
    assert [c.name for c in classes] == ["kda_copy", "conv", "kda"]
    assert [c.time_us for c in classes] == [2.5] * 3


def test_a_trace_of_a_real_gpu():
    """Written by torch 2.11 on one H200: two KDA layers of SGLang 0.5.23's Triton
    path, 12 heads and 2,048 tokens. The first makes chunk_kda copy q, k and v; the
    second copies q, k, v and beta before it, casts cu_seqlens, and clones v."""
    path = Path(__file__).parent / "data" / "h200-TP-0.trace.json.gz"
    classes, unknown = trace.count(trace_torch.read(path), trace.Plan())
    assert {cell.name: cell.count for cell in classes} == {
        "kda_copy": 3 + 5,
        "conv": 2,
        "l2norm": 4,
        "kda": 12,
        "gemm": 2,
        "cast": 5,
        "memcpy_dtod": 2,
        "memcpy_htod": 2,
        "memset": 4,
        "other": 2,
    }
    assert all("CatArrayBatchedCopy" in name for name in unknown)


def test_a_trace_that_torch_writes_today(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    a, b = torch.ones(32, 64), torch.ones(64, 8)
    activities = [torch.profiler.ProfilerActivity.CPU]
    for rank in range(2):
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3 + rank):
                torch.mm(a, b)
            a[:, 1:].contiguous()
        profile.export_chrome_trace(str(tmp_path / f"1-TP-{rank}.trace.json.gz"))
    options = [f"--arm=base={tmp_path}", "--activity=cpu", "--ranks=2"]
    assert trace.main([*options, "--expect=base:gemm=7"]) == 0
    assert trace.main([*options, "--expect=base:gemm=6"]) == 1
    # It holds no GPU events, and the reader says so instead of counting nothing.
    with pytest.raises(BenchError, match="no gpu events"):
        trace.main([f"--arm=base={tmp_path}"])


def test_nsight_counts_of_the_seed(tmp_path, capsys):
    for arm, options in (
        ("base", {"packed": False, "tile": 192}),
        ("series", {"packed": True, "tile": 128}),
    ):
        (tmp_path / arm).mkdir()
        stages = [kernels(stage, **options) for stage in range(8)]
        # Two nodes of four GPUs; node10 is named so that text order would be wrong.
        write_nsys(tmp_path / arm / "node2.sqlite", stages[:4])
        write_nsys(tmp_path / arm / "node10.sqlite", stages[4:])
    stated = [f"--expect={text}" for text in STATED]
    assert verb(tmp_path, "--ranks=8", *stated) == 0
    assert "| 7 | kda_copy | 128 | 0.320 | 0 | 0.000 |" in capsys.readouterr().out
    assert verb(tmp_path, "--ranks=9") == 1
    assert "no trace of rank 8 (of 9)" in capsys.readouterr().err


def test_nsight_files_one_rank_each_and_copies(tmp_path):
    for rank in range(2):
        write_nsys(tmp_path / f"rank{rank}.sqlite", [[CONV, COPY, CORE] * (1 + rank)])
    found = trace.load("base", trace.Plan(arms={"base": [str(tmp_path)]}, ranks=2))
    assert [each.rank for each in found] == [0, 1]
    [only] = trace_nsys.read(write_nsys(tmp_path / "x.db", [[CONV]], copies=(1, 8, 99)))
    names = sorted(e.name for events in only.streams.values() for e in events)
    assert names == ["Memcpy DtoD", "Memcpy HtoD", "Memcpy kind 99", CONV]
    [event] = [e for events in only.streams.values() for e in events if e.name == CONV]
    assert (event.start_us, event.time_us) == (1000.0, 2.5)


def test_broken_nsight_files(tmp_path):
    path = write_nsys(tmp_path / "rank0.sqlite", [kernels(0, packed=True, tile=128)])
    data = path.read_bytes()
    for end in (0, 50, 4096, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        reason = f"truncated trace .{end} of {len(data)}" if end > 100 else "no SQLite"
        with pytest.raises(CheckFailed, match=reason):
            trace_nsys.read(path)
    path.write_bytes(data)
    assert trace_nsys.read(path)[0].events == 268
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM StringIds WHERE value LIKE '_causal%'")
    connection.close()
    with pytest.raises(CheckFailed, match="StringIds"):
        trace_nsys.read(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (a INT)")
    connection.close()
    with pytest.raises(BenchError, match="no GPU kernels"):
        trace_nsys.read(other)
    graph = write_nsys(tmp_path / "graph.sqlite", [[CONV]], graphs=2)
    with pytest.raises(BenchError, match="--cuda-graph-trace=node"):
        trace_nsys.read(graph)


@pytest.mark.parametrize(
    "options, reason",
    [
        ([], "no arm"),
        (["--arm=base"], "write NAME=PATH"),
        (["--arm=base=/nowhere"], "no trace file /nowhere"),
        (["--arm=base={0}", "--expect=other:kda=1"], "names arm 'other'"),
        (["--arm=base={0}", "--expect=base:kdacopy=1"], "no class 'kdacopy'"),
        (["--arm=base={0}", "--expect=base:kda=x"], "write ARM:CLASS"),
        (["--arm=base={0}", "--expect=base:moe_gemm@big=1"], "number of tokens"),
        (["--arm=base={0}", "--ranks=0"], "at least 1"),
        (["--arm=base={0}"], "no trace in"),
        (["{0}/none.toml"], "cannot read"),
    ],
)
def test_usage_errors(tmp_path, options, reason):
    with pytest.raises(BenchError, match=reason) as caught:
        trace.main([option.format(tmp_path) for option in options])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text, reason",
    [
        ("rank = 8", "unknown field `rank`"),
        ("ranks = 'eight'", "ranks"),
        ("[arms", "t.toml"),
        ("[arms]\na=['x']\n[classes]\npack='('", "classes.pack"),
    ],
)
def test_a_faulty_config_is_named(tmp_path, text, reason):
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(BenchError, match=reason) as caught:
        trace.main([str(path)])
    assert "t.toml" in str(caught.value) or "classes.pack" in str(caught.value)


def test_own_class_rules_come_first(tmp_path, capsys):
    (tmp_path / "base").mkdir()
    write_torch(tmp_path / "base" / "TP-0.json", [CONV, "my_kernel", CORE])
    config = tmp_path / "t.toml"
    config.write_text(
        "[arms]\nbase=['base']\n[classes]\npack='^my_'\n[expect.base]\npack=1\n"
    )
    assert trace.main([str(config)]) == 0
    config.write_text("[arms]\nbase=['base']\n")
    assert trace.main([str(config)]) == 0
    assert "1 x my_kernel" in capsys.readouterr().out


def test_nsight_report_files_are_turned_away(tmp_path):
    path = tmp_path / "a.nsys-rep"
    path.write_bytes(b"x")
    with pytest.raises(BenchError, match="nsys export"):
        trace_files.find([path])
    with pytest.raises(BenchError, match="named twice"):
        write_torch(tmp_path / "TP-0.json", [CONV])
        trace_files.find([tmp_path / "TP-0.json", tmp_path / "TP-0.json"])
