"""KDA prefill core on CUDA: conv + split copies, conv + one pack launch, planes,
and planes with the q and k L2 norm folded into the store.

Correctness first: no time is printed for a shape whose outputs differ in a bit.
Every repetition runs all variants once, alternating the order, each after a
write of twice the L2 size and a wait that outlasts the launches; the median is
printed. The floor is one copy of x. Host microseconds (the launches alone) are in
a line of their own.
"""

import argparse
import statistics
import time

import msgspec
import torch
import triton
import triton.language as tl

from sglang.kernels.ops.attention.fla.kda import chunk_kda
from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd
from sglang.kernels.ops.mamba.causal_conv1d_planar import (
    CAUSAL_CONV1D_PLANAR_BLOCK_M,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import (
    CAUSAL_CONV1D_FWD_BLOCK_M,
    causal_conv1d_fn,
)
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kernels.causal_conv1d_planar import (
    assert_same_bits,
    block_table,
    make_inputs,
)

register_cuda_ci(
    est_time=90, stage="base-b-kernel-benchmark", runner_config="1-gpu-large"
)

HEAD_DIM = 128
LOWER_BOUND = -5.0  # Kimi-K3's gate bound
WAIT_CYCLES = 2_000_000  # about a millisecond, longer than any variant's launches


class Shape(msgspec.Struct, frozen=True):
    heads: int
    lens: tuple[int, ...]

    def __str__(self):
        lens = f"{len(self.lens)} x {self.lens[0]}"
        if len(set(self.lens)) > 1:
            lens = str(list(self.lens))
        return f"{self.heads} heads, {lens}"


CONV_SHAPES = (
    Shape(96, (16384,)),
    Shape(12, (16384,)),
    Shape(96, (8320, 167, 1, 7896)),
    Shape(12, (64,) * 64),
    Shape(12, (128,)),
    Shape(96, (128,)),
)
# chunk_kda autotunes once for each head count, on the first shape that has it.
CORE_SHAPES = (
    Shape(96, (16384,)),
    Shape(96, (4096,) * 4),
    Shape(12, (16384,) * 8),
    Shape(12, (16384,)),
)


@triton.jit
def _pack_kernel(src, out0, out1, out2, T, W, BM: tl.constexpr, BN: tl.constexpr):
    """The comparator: one launch copies the three column groups of [T, 3 * W]."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    cols = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    mask = (rows < T) & (cols < W)
    src += rows * (3 * W) + cols
    dst = rows * W + cols
    tl.store(out0 + dst, tl.load(src, mask=mask), mask=mask)
    tl.store(out1 + dst, tl.load(src + W, mask=mask), mask=mask)
    tl.store(out2 + dst, tl.load(src + 2 * W, mask=mask), mask=mask)


def _pack(qkv: torch.Tensor, width: int) -> list[torch.Tensor]:
    outs = [qkv.new_empty(len(qkv), width) for _ in range(3)]
    grid = (triton.cdiv(len(qkv), 16), triton.cdiv(width, 512))
    _pack_kernel[grid](qkv, *outs, len(qkv), width, BM=16, BN=512)
    return outs


class Case:
    """Inputs of one shape and the variants over them."""

    def __init__(self, shape: Shape, *, core: bool):
        self.heads, self.width = shape.heads, shape.heads * HEAD_DIM
        self.widths = (self.width,) * 3
        self.inputs = make_inputs(
            lens=shape.lens,
            widths=self.widths,
            dtype=torch.bfloat16,
            device="cuda",
            row_padding=0,
        )
        self.tokens = sum(shape.lens)
        self.pool = self.inputs.pool.clone()
        if core:
            self._make_core_inputs(len(shape.lens))

    def _make_core_inputs(self, seqs: int) -> None:
        def rand(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, device="cuda", dtype=dtype)

        self.gate = rand(1, self.tokens, self.heads, HEAD_DIM)
        self.beta = rand(1, self.tokens, self.heads + 8)[..., : self.heads]
        self.a_log = rand(self.heads, dtype=torch.float32)
        self.dt_bias = rand(self.heads * HEAD_DIM, dtype=torch.float32)
        self.state = torch.zeros(
            seqs + 3, self.heads, HEAD_DIM, HEAD_DIM, device="cuda"
        )

    def conv(self, **kwargs):
        inputs = self.inputs
        return causal_conv1d_fn(
            inputs.x.transpose(0, 1),
            inputs.weight,
            None,
            conv_states=self.pool.transpose(1, 2),
            query_start_loc=inputs.query_start_loc,
            seq_lens_cpu=inputs.lens,
            cache_indices=inputs.cache_indices,
            has_initial_state=inputs.has_initial_state,
            activation="silu",
            **kwargs,
        )

    def slices(self):
        return self.conv().transpose(0, 1).split(self.widths, dim=1)

    def base(self):
        return [t.contiguous() for t in self.slices()]

    def pack(self):
        return _pack(self.conv().transpose(0, 1), self.width)

    def planes(self):
        return self.conv(out_widths=self.widths)

    def folded(self):
        return self.conv(
            out_widths=self.widths, l2norm_head_dims=(HEAD_DIM, HEAD_DIM, 0)
        )

    def normed_base(self):
        q, k, v = self.base()
        q, k = (l2norm_fwd(t.unflatten(-1, (-1, HEAD_DIM))) for t in (q, k))
        return [q.flatten(1), k.flatten(1), v]

    def core(self, layout, *, qk_is_l2normed=False):
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).unsqueeze(0) for t in layout())
        return chunk_kda(
            q=q,
            k=k,
            v=v,
            g=self.gate,
            beta=self.beta,
            initial_state=self.state,
            initial_state_indices=self.inputs.cache_indices,
            use_qk_l2norm_in_kernel=not qk_is_l2normed,
            cu_seqlens=self.inputs.query_start_loc,
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            lower_bound=LOWER_BOUND,
            beta_is_raw=True,
        )

    def table_variants(self):
        """The CUDA graph path: fixed grids over the pairs of a full bucket."""
        tables = {
            n: block_table(self.inputs.lens, device="cuda", block_tokens=n, padding=0)
            for n in (CAUSAL_CONV1D_FWD_BLOCK_M, CAUSAL_CONV1D_PLANAR_BLOCK_M)
        }

        def base():
            table = tables[CAUSAL_CONV1D_FWD_BLOCK_M]
            out = self.conv(block_table=table).transpose(0, 1)
            return [t.contiguous() for t in out.split(self.widths, dim=1)]

        def planes():
            n = CAUSAL_CONV1D_PLANAR_BLOCK_M
            return self.conv(
                block_table=tables[n], block_tokens=n, out_widths=self.widths
            )

        return {"table base": base, "table planes": planes}

    def conv_variants(self):
        return {"base": self.base, "pack": self.pack, "planes": self.planes}

    def core_variants(self):
        return {
            "base": lambda: [self.core(self.slices)],
            "planes": lambda: [self.core(self.planes)],
            "folded": lambda: [self.core(self.folded, qk_is_l2normed=True)],
        }

    def check(self, variants) -> None:
        """Every variant has the bits of the first, conv pool and state included."""
        results = {}
        for name, run in variants.items():
            self.pool.copy_(self.inputs.pool)
            if hasattr(self, "state"):
                self.state.zero_()
            outs = [t.clone() for t in run()]
            outs.append(self.pool.clone())
            if hasattr(self, "state"):
                outs.append(self.state.clone())
            results[name] = outs
        first = next(iter(results))
        for name, outs in results.items():
            for i, (got, want) in enumerate(zip(outs, results[first])):
                assert_same_bits(got, want, f"{name} against {first}, result {i}")


def _measure(variants, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median device and host microseconds of each variant."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    flush = torch.empty(2 * l2, dtype=torch.int8, device="cuda")
    times = {name: [] for name in variants}
    host = {name: [] for name in variants}
    for run in variants.values():
        run()
        run()
    for repetition in range(repetitions):
        names = list(variants)
        if repetition % 2:
            names.reverse()
        for name in names:
            torch.cuda.synchronize()
            flush.zero_()
            torch.cuda._sleep(WAIT_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begin = time.perf_counter()
            variants[name]()
            host[name].append(1e6 * (time.perf_counter() - begin))
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    device = {
        name: statistics.median(1000 * a.elapsed_time(b) for a, b in pairs)
        for name, pairs in times.items()
    }
    return device, {name: statistics.median(us) for name, us in host.items()}


def _report(title: str, shape: Shape, measured, *columns) -> None:
    device, host = measured
    cells = [f"{name} {us:9.1f}" for name, us in device.items()]
    cells += [f"{name} {value}" for name, value in columns]
    print(f"{title:5} {str(shape):30} " + "  ".join(cells), flush=True)
    cells = [f"{name} {us:9.1f}" for name, us in host.items()]
    print(f"  host{'':31}" + "  ".join(cells), flush=True)


def bench_conv(shape: Shape, repetitions: int) -> None:
    case = Case(shape, core=False)
    variants = {**case.conv_variants(), **case.table_variants()}
    case.check(variants)
    normed = {"normed base": case.normed_base, "folded": case.folded}
    case.check(normed)
    target = torch.empty_like(case.inputs.x)
    measured = _measure(
        {**variants, **normed, "floor": lambda: target.copy_(case.inputs.x)},
        repetitions,
    )
    times, _ = measured
    _report(
        "conv",
        shape,
        measured,
        ("base/planes", f"{times['base'] / times['planes']:.2f}x"),
        ("planes/floor", f"{times['planes'] / times['floor']:.3f}x"),
    )


def bench_core(shape: Shape, repetitions: int) -> None:
    case = Case(shape, core=True)
    variants = case.core_variants()
    case.check(variants)
    peaks = {}
    for name, run in variants.items():
        torch.cuda.reset_peak_memory_stats()
        run()
        peaks[name] = torch.cuda.max_memory_allocated() / 1e9
    measured = _measure(variants, repetitions)
    times, _ = measured
    _report(
        "core",
        shape,
        measured,
        ("base/planes", f"{times['base'] / times['planes']:.3f}x"),
        ("base/folded", f"{times['base'] / times['folded']:.3f}x"),
        ("peak GB", "/".join(f"{gb:.2f}" for gb in peaks.values())),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-f", action="store_true", help="CI runner's flag, ignored")
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
        f"{triton.__version__}, bfloat16, float32 weights, head dim {HEAD_DIM}, "
        f"{args.repetitions} repetitions, microseconds"
    )
    torch.manual_seed(0)
    for shape in CONV_SHAPES:
        bench_conv(shape, args.repetitions)
    for shape in CORE_SHAPES:
        bench_core(shape, args.repetitions)


if __name__ == "__main__":
    main()
