"""KDA extend hands its kernel contiguous q, k and v (Triton interpreter, CPU)."""

import importlib
import os
import pkgutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# A process that has imported triton without this can only compile.
_TOO_LATE = "triton" in sys.modules and not _INTERPRET
# One that has imported it with this never compiles again: no place for device tests.
_SHARED = _TOO_LATE or (torch.accelerator.is_available() and not _INTERPRET)
if _SHARED and __name__ != "__main__":
    pytest.skip(
        f"needs its own process: TRITON_INTERPRET=1 pytest {__file__}",
        allow_module_level=True,
    )
os.environ["TRITON_INTERPRET"] = "1"

from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd  # noqa: E402
from sglang.srt.layers.attention.linear import kda_backend, kernels  # noqa: E402
from sglang.srt.layers.attention.linear.kda_backend import (  # noqa: E402
    KDAAttnBackend,
    KDAKernelDispatcher,
)
from sglang.srt.layers.attention.linear.kda_prefill_graph import (  # noqa: E402
    KDAPrefillGraphMetadata,
    kda_extend_in_graph,
)
from sglang.srt.layers.attention.linear.kernels import kda_triton  # noqa: E402
from sglang.srt.layers.attention.linear.kernels.kda_cutedsl import (  # noqa: E402
    CuteDSLKDAKernel,
)
from sglang.srt.layers.attention.linear.kernels.kernel_backend import (  # noqa: E402
    LinearAttnKernelBase,
)
from sglang.srt.layers.attention.linear.utils import (  # noqa: E402
    LinearAttnKernelBackend,
)
from sglang.srt.layers.attention.mamba.mamba2_metadata import (  # noqa: E402
    ForwardMetadata,
)
from sglang.srt.layers.radix_linear_attention import (  # noqa: E402
    RadixLinearAttention,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.test.ci.ci_register import register_cpu_ci  # noqa: E402
from sglang.test.kernels.causal_conv1d_planar import (  # noqa: E402
    assert_same_bits,
    make_inputs,
)

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

LENS = [37, 2, 5]
TOKENS = sum(LENS)
HEADS, VALUE_HEADS, HEAD_DIM = 2, 3, 8


class ExtendKernelStandIn(LinearAttnKernelBase):
    """Stands in for the CUDA extend kernels: keeps q, k and v as they arrived and,
    as chunk_kda does, writes the output over v."""

    def __init__(self, takes_l2normed_qk=False):
        self.takes_l2normed_qk = takes_l2normed_qk

    def decode(self, *args, **kwargs):
        raise NotImplementedError

    def extend(self, q, k, v, g, beta, *, qk_is_l2normed, **kwargs):
        self.qk_is_l2normed = qk_is_l2normed
        self.arrived = (q, k, v)
        self.values = tuple(t.clone() for t in (q, k, v))
        v.fill_(0.5)
        return v


def _dispatcher(kernel):
    """The real dispatcher around the stand-in; its constructor loads CUDA kernels."""
    dispatcher = object.__new__(KDAKernelDispatcher)
    dispatcher.prefill_backend = LinearAttnKernelBackend.TRITON
    dispatcher.extend_kernel = dispatcher.triton_kernel = kernel
    return dispatcher


def _case(num_tokens=TOKENS):
    widths = (HEADS * HEAD_DIM, HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM)
    inputs = make_inputs(lens=LENS, widths=widths, dtype=torch.bfloat16, device="cpu")
    layer = RadixLinearAttention(
        layer_id=0,
        num_q_heads=HEADS,
        num_k_heads=HEADS,
        num_v_heads=VALUE_HEADS,
        head_q_dim=HEAD_DIM,
        head_k_dim=HEAD_DIM,
        head_v_dim=HEAD_DIM,
        conv_weights=inputs.weight,
    )
    mixed = torch.zeros(num_tokens, sum(widths), dtype=torch.bfloat16)
    mixed[:TOKENS] = inputs.x
    gate = torch.zeros(1, num_tokens, VALUE_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    beta = torch.zeros(1, num_tokens, VALUE_HEADS, dtype=torch.bfloat16)
    states = torch.zeros(len(inputs.pool), VALUE_HEADS, HEAD_DIM, HEAD_DIM)
    return inputs, widths, layer, mixed, gate, beta, states


def _extend_eager(inputs, layer, mixed, gate, beta, states, pool, kernel):
    backend = object.__new__(KDAAttnBackend)
    backend.prefill_graph_metadata = None
    backend.accept_lens_pool = None
    backend.kernel_dispatcher = _dispatcher(kernel)
    backend.forward_metadata = ForwardMetadata(
        query_start_loc=inputs.query_start_loc,
        mamba_cache_indices=inputs.cache_indices,
        logical_num_tokens=TOKENS,
    )
    cache = SimpleNamespace(conv=[pool], temporal=states)
    backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda _: cache)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_prefix_lens=inputs.has_initial_state.int(),
        extend_seq_lens_cpu=LENS,
    )
    return backend.forward_extend(layer, batch, mixed, gate, beta)


def _extend_in_graph(
    inputs, layer, mixed, gate, beta, states, pool, kernel, flashinfer=None
):
    meta = KDAPrefillGraphMetadata.allocate(
        num_tokens=len(mixed),
        max_seqs_cap=5,
        track=False,
        cache_index_dtype=torch.int32,
        device=torch.device("cpu"),
    )
    meta = msgspec.structs.replace(meta, flashinfer=flashinfer)
    # fill() without its pinned, asynchronous copy.
    meta._write_host_tables(lens=torch.tensor(LENS).numpy(), track_rows=None)
    meta.packed.copy_(torch.from_numpy(meta.host))
    meta.cache_indices[: len(LENS)] = inputs.cache_indices
    meta.has_initial_state[: len(LENS)] = inputs.has_initial_state
    return kda_extend_in_graph(
        layer=layer,
        meta=meta,
        conv_pool=pool,
        ssm_states=states,
        kernel_dispatcher=_dispatcher(kernel),
        mixed_qkv=mixed,
        a=gate,
        b=beta,
    )


@pytest.mark.parametrize("extend", [_extend_eager, _extend_in_graph])
def test_kernel_receives_contiguous_planes(extend):
    """Bits of the sliced conv output, no storage shared with a sibling."""
    inputs, widths, layer, mixed, gate, beta, states = _case(num_tokens=TOKENS + 3)
    pool, kernel = inputs.pool.clone(), ExtendKernelStandIn()
    before = mixed.clone()
    out = extend(inputs, layer, mixed, gate, beta, states, pool, kernel)

    base, base_pool = inputs.run()
    wanted = base.transpose(0, 1).split(list(widths), dim=1)
    for name, arrived, value, want in zip("qkv", kernel.arrived, kernel.values, wanted):
        assert arrived.is_contiguous(), name
        assert arrived.shape[0] == 1 and arrived.shape[3] == HEAD_DIM
        assert_same_bits(value[0, :TOKENS].flatten(1), want.contiguous(), name)
    # The output lies over v; q, k and the conv input are as they were.
    for name, arrived, value in zip("qk", kernel.arrived, kernel.values):
        assert_same_bits(arrived[:, :TOKENS], value[:, :TOKENS], name)
    assert_same_bits(mixed, before, "conv input")
    assert_same_bits(pool, base_pool, "conv states")
    assert out.shape == (1, TOKENS + 3, VALUE_HEADS, HEAD_DIM)
    assert (out[:, :TOKENS] == 0.5).all() and not out[:, TOKENS:].any()


@pytest.mark.parametrize("extend", [_extend_eager, _extend_in_graph])
@pytest.mark.parametrize(
    "takes, exact, normed",
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_qk_are_normalised_only_for_a_kernel_that_skips_its_norm(
    extend, takes, exact, normed
):
    inputs, widths, layer, mixed, gate, beta, states = _case()
    pool, kernel = inputs.pool.clone(), ExtendKernelStandIn(takes_l2normed_qk=takes)
    # The promise is CUDA's; in the interpreter the two norms agree as well.
    with patch.object(kda_backend, "planar_l2norm_is_exact", lambda x, dim: exact):
        extend(inputs, layer, mixed, gate, beta, states, pool, kernel)

    base, base_pool = inputs.run()
    q, k, v = base.transpose(0, 1).split(list(widths), dim=1)
    q, k = (t.unflatten(-1, (-1, HEAD_DIM)).contiguous() for t in (q, k))
    if normed:
        q, k = l2norm_fwd(q), l2norm_fwd(k)
    assert kernel.qk_is_l2normed is normed
    for name, value, want in zip("qkv", kernel.values, (q, k, v)):
        assert_same_bits(value[0].flatten(1), want.reshape(TOKENS, -1), name)
    assert_same_bits(pool, base_pool, "conv states")


class FlashInferGraphStandIn:
    """Stands in for the captured FlashInfer call, which normalises q and k itself."""

    def run(self, *, q, k, v, **kwargs):
        self.values = (q, k, v)
        return v.clone()


def test_flashinfer_in_a_graph_receives_qk_as_they_are():
    """Whatever the dispatcher's kernel takes: it is not the one that runs."""
    inputs, widths, layer, mixed, gate, beta, states = _case()
    kernel, flashinfer = ExtendKernelStandIn(True), FlashInferGraphStandIn()
    args = (inputs, layer, mixed, gate, beta, states, inputs.pool.clone(), kernel)
    with patch.object(kda_backend, "planar_l2norm_is_exact", lambda x, dim: True):
        _extend_in_graph(*args, flashinfer=flashinfer)
    base, _ = inputs.run()
    wanted = base.transpose(0, 1).split(list(widths), dim=1)
    for name, value, want in zip("qkv", flashinfer.values, wanted):
        assert_same_bits(value[0].flatten(1), want, name)


def test_which_kernels_take_normalised_qk():
    """The conv normalises for these two; any other kernel would do it again."""
    takes = set()
    for info in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for cls in vars(importlib.import_module(info.name)).values():
            if isinstance(cls, type) and issubclass(cls, LinearAttnKernelBase):
                takes |= {cls} if cls.takes_l2normed_qk else set()
    assert takes == {kda_triton.TritonKDAKernel, CuteDSLKDAKernel}


@pytest.mark.parametrize("normed", [False, True])
def test_a_kernel_normalises_what_the_conv_did_not(normed):
    q, k, v = torch.randn(3, 1, 4, HEADS, HEAD_DIM).bfloat16()
    received = {}

    def extend_fn(q, k, *args, **kwargs):
        received.update(kwargs, q=q, k=k)
        return v, None

    extend = dict(
        q=q,
        k=k,
        v=v,
        g=torch.zeros_like(v),
        beta=torch.zeros(1, 4, HEADS),
        ssm_states=torch.zeros(2, HEADS, HEAD_DIM, HEAD_DIM),
        cache_indices=torch.tensor([0]),
        query_start_loc=torch.tensor([0, 4]),
        qk_is_l2normed=normed,
    )
    # Its constructor asks for the device.
    cutedsl = object.__new__(CuteDSLKDAKernel)
    cutedsl._extend_fn, cutedsl._l2norm_fn = extend_fn, l2norm_fwd
    cutedsl.extend(**extend)
    for name, t in (("q", q), ("k", k)):
        assert_same_bits(received[name], t[0] if normed else l2norm_fwd(t[0]), name)

    with patch.object(kda_triton, "chunk_kda", extend_fn):
        kda_triton.TritonKDAKernel().extend(**extend)
    assert received["q"] is q and received["k"] is k
    assert received["use_qk_l2norm_in_kernel"] is not normed


if __name__ == "__main__":
    if _TOO_LATE:
        sys.exit(subprocess.call([sys.executable, __file__]))
    sys.exit(pytest.main([__file__, "-v", "-x"]))
