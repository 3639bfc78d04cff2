import dataclasses
import json
import typing
from pathlib import Path

import pytest
import torch
from bench.errors import BenchError, CheckFailed
from bench.tactics import capture
from bench.tactics.capture_hook import ARMED, digest, make_hook
from tactics_kit import PROBLEM


class TopK(typing.NamedTuple):
    """The fields of the engine's standard top-k output."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class Packed(typing.NamedTuple):
    """The field of the engine's packed top-k output."""

    packed_topk_ids: torch.Tensor


class Experts(torch.nn.Module):
    """A MoE layer's surface; like the engine's it may overwrite its input."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.register_buffer("scale", torch.ones(3, dtype=torch.uint8))
        self.calls = 0

    def forward(self, hidden_states, topk_output):
        self.calls += 1
        out = hidden_states * 2
        hidden_states.zero_()
        return out


def call_inputs(tokens=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((tokens, 8), generator=generator).to(torch.bfloat16)
    ids = torch.stack(
        [torch.randperm(6, generator=generator)[:2] for _ in range(tokens)]
    )
    weights = torch.rand((tokens, 2), generator=generator)
    return hidden, TopK(weights, ids.to(torch.int32), torch.zeros(tokens, 6))


@pytest.fixture
def hooked(tmp_path):
    def make(**changes):
        specs = capture.hook_specs(
            tmp_path,
            ["3"],
            module="*layers.{}.experts",
            tokens=4,
            max_bytes=changes.pop("max_bytes", 1 << 20),
            with_weights=changes.pop("with_weights", False),
        )
        assert json.loads(json.dumps(specs)) == specs
        module = Experts()
        module.register_forward_hook(make_hook(specs[0]["config"]))
        return module

    return make


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_armed_chunk_is_saved_as_it_came_in(tmp_path, hooked):
    module = hooked()
    module(*call_inputs(seed=9))  # the first call only puts the pre-hook on
    hidden, topk = call_inputs()
    want = hidden.clone()
    (tmp_path / ARMED).touch()
    out = module(hidden, topk_output=topk)
    assert torch.equal(out, want * 2)
    manifest, tensors = capture.read(tmp_path)
    assert torch.equal(tensors["hidden_states"], want)
    assert torch.equal(tensors["topk_output.topk_ids"], topk.topk_ids)
    assert manifest["tensors"]["hidden_states"] == {
        "dtype": "bfloat16",
        "shape": [6, 8],
        "sha256": digest(want),
    }
    assert manifest["weights"]["weights.w"]["sha256"] == digest(module.w)
    assert set(manifest["weights"]) == {"weights.w", "weights.scale"}
    assert "weights.w" not in tensors
    assert manifest["environment"]["torch"] == torch.__version__
    assert files(tmp_path) == [
        ARMED,
        "layer-3.rank-0.json",
        "layer-3.rank-0.safetensors",
    ]


def test_only_one_chunk_is_saved(tmp_path, hooked):
    module = hooked()
    module(*call_inputs(seed=9))
    (tmp_path / ARMED).touch()
    module(*call_inputs(seed=1))
    first = (tmp_path / "layer-3.rank-0.safetensors").read_bytes()
    module(*call_inputs(seed=2))
    assert (tmp_path / "layer-3.rank-0.safetensors").read_bytes() == first


def test_nothing_is_saved_unless_armed_and_large_enough(tmp_path, hooked):
    module = hooked()
    for _ in range(3):
        module(*call_inputs())
    assert files(tmp_path) == []
    (tmp_path / ARMED).touch()
    module(*call_inputs(tokens=3))
    assert files(tmp_path) == [ARMED]


def test_weights_are_saved_on_request(tmp_path, hooked):
    module = hooked(with_weights=True)
    module(*call_inputs())
    (tmp_path / ARMED).touch()
    module(*call_inputs())
    assert torch.equal(capture.read(tmp_path)[1]["weights.w"], module.w)


def test_more_than_the_bound_is_refused_not_cut(tmp_path, hooked):
    module = hooked(max_bytes=100)
    module(*call_inputs())
    (tmp_path / ARMED).touch()
    module(*call_inputs())
    assert files(tmp_path) == [ARMED, "layer-3.rank-0.json"]
    with pytest.raises(BenchError, match="exceed the bound of 100.*--max-bytes"):
        capture.read(tmp_path)


def test_serving_goes_on_when_saving_fails(tmp_path, hooked):
    module = hooked()
    module(*call_inputs())
    (tmp_path / ARMED).touch()
    (tmp_path / "layer-3.rank-0.safetensors").mkdir()
    hidden, topk = call_inputs()
    want = hidden.clone() * 2
    assert torch.equal(module(hidden, topk), want)
    with pytest.raises(BenchError, match="nothing was captured: IsADirectoryError"):
        capture.read(tmp_path)


def test_a_pattern_that_matches_two_modules_is_refused(tmp_path):
    specs = capture.hook_specs(
        tmp_path, ["3"], module="{}", tokens=1, max_bytes=99, with_weights=False
    )
    hook = make_hook(specs[0]["config"])
    for module in (Experts(), Experts()):
        module.register_forward_hook(hook)
        module(*call_inputs())
    with pytest.raises(BenchError, match="matches several modules"):
        capture.read(tmp_path)
    # The engine's warm-up did this, before anyone takes.
    with pytest.raises(CheckFailed, match="layer 3: .*several modules.*new folder"):
        capture.take(tmp_path, ["3"], url=None, ids=[], timeout=0.2)


def test_serving_goes_on_when_a_refusal_cannot_be_written(tmp_path):
    folder = tmp_path / "gone"
    specs = capture.hook_specs(
        folder, ["3"], module="{}", tokens=1, max_bytes=99, with_weights=False
    )
    hook = make_hook(specs[0]["config"])
    for module in (Experts(), Experts()):
        module.register_forward_hook(hook)
        hidden, topk = call_inputs()
        want = hidden.clone() * 2
        assert torch.equal(module(hidden, topk), want)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file": None}, "file"),
        ({"file": "gone.safetensors"}, "cannot read"),
        ({"tensors": {"x": {}}}, "dtype"),
        ({"refused": 3}, "refused"),
        ({"schema": 0}, "no manifest of schema 1"),
    ],
)
def test_a_damaged_manifest_is_refused_by_name(tmp_path, hooked, change, says):
    module = hooked()
    module(*call_inputs())
    (tmp_path / ARMED).touch()
    module(*call_inputs())
    path = tmp_path / "layer-3.rank-0.json"
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    for reader in (capture.read, lambda folder: capture.show(folder, [])):
        with pytest.raises(BenchError, match=says):
            reader(tmp_path)


def test_a_file_that_is_not_the_manifests_is_refused(tmp_path, hooked):
    from safetensors.torch import load_file, save_file

    module = hooked()
    module(*call_inputs())
    (tmp_path / ARMED).touch()
    module(*call_inputs())
    path = tmp_path / "layer-3.rank-0.safetensors"
    tensors = load_file(path)
    tensors["hidden_states"][0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(BenchError, match="hidden_states is not what"):
        capture.read(tmp_path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(BenchError, match="cannot read"):
        capture.read(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_routing_of_a_capture_is_what_was_routed(tmp_path, hooked, packed):
    module = hooked()
    module(*call_inputs())
    (tmp_path / ARMED).touch()
    hidden, topk = call_inputs()
    want = hidden.clone()
    weights = topk.topk_weights.to(torch.bfloat16)
    if packed:
        bits = weights.view(torch.int16).to(torch.int32) & 0xFFFF
        topk = Packed((topk.topk_ids << 16) | bits)
    ids = call_inputs()[1].topk_ids
    module(hidden, topk)
    routing = capture.routing_of(tmp_path, "3", PROBLEM)
    assert (routing.topk_ids == ids.numpy()).all()
    expected = weights if packed else call_inputs()[1].topk_weights
    assert (routing.topk_weights == expected.float().numpy()).all()
    assert torch.equal(routing.hidden, want)
    assert routing.first(2).hidden.shape == (2, 8)
    for changes, says in (
        ({"experts": 3, "local_experts": 3}, "expert ids"),
        ({"top_k": 3}, "top_k"),
        ({"hidden": 16}, "hidden"),
    ):
        other = dataclasses.replace(PROBLEM, **changes)
        with pytest.raises(BenchError, match=rf"\({says}"):
            capture.routing_of(tmp_path, "3", other)


def test_take_refuses_old_files_and_says_what_never_came(tmp_path):
    with pytest.raises(CheckFailed, match="nothing came for layers 3"):
        capture.take(tmp_path, ["3"], url=None, ids=[], timeout=0.2)
    assert files(tmp_path) == []  # disarmed again
    with pytest.raises(BenchError, match="request to http://127.0.0.1:9 failed"):
        capture.take(tmp_path, ["3"], url="http://127.0.0.1:9", ids=[1], timeout=1)
    assert files(tmp_path) == []
    (tmp_path / "layer-3.rank-0.safetensors").write_text("")
    with pytest.raises(BenchError, match="already holds layer-3"):
        capture.take(tmp_path, ["3"], url=None, ids=[], timeout=0.2)
    with pytest.raises(BenchError, match="cannot write in /proc"):
        capture.take(Path("/proc"), ["3"], url=None, ids=[], timeout=0.2)


@pytest.mark.parametrize(
    ("layers", "module", "says"),
    [
        ([], "{}", "1 to 8"),
        ([str(n) for n in range(9)], "{}", "1 to 8"),
        (["1", "1"], "{}", "different"),
        (["x"], "{}", "numbers"),
        (["1"], "*.experts", "put {}"),
    ],
)
def test_bad_capture_arguments(tmp_path, layers, module, says):
    with pytest.raises(BenchError, match=says):
        capture.hook_specs(
            tmp_path, layers, module=module, tokens=1, max_bytes=1, with_weights=False
        )


def test_the_engines_own_hook_manager_takes_the_printed_argument(tmp_path, capsys):
    from bench.__main__ import main

    from sglang.srt.model_executor.hook_manager import register_forward_hooks

    arguments = ["--layers", "1,3", "--module", "*layers.{}.experts", "--tokens", "4"]
    folder = str(tmp_path / "captured")
    assert main(["tactics", "capture", "args", folder, *arguments]) == 0
    printed = capsys.readouterr().out.strip()
    option, _, value = printed.partition(" ")
    assert option == "--forward-hooks"
    layers = {str(n): torch.nn.ModuleDict({"experts": Experts()}) for n in (1, 3, 13)}
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(layers)})
    register_forward_hooks(model, json.loads(value.strip("'")))
    for layer in layers.values():
        layer["experts"](*call_inputs())
    (tmp_path / "captured" / ARMED).touch()
    for layer in layers.values():
        layer["experts"](*call_inputs())
    assert [n for n in files(tmp_path / "captured") if n.endswith(".json")] == [
        "layer-1.rank-0.json",
        "layer-3.rank-0.json",
    ]
    for options, shown in (([], 2), (["--layers", "3"], 1)):
        assert main(["tactics", "capture", "show", folder, *options]) == 0
        text = capsys.readouterr().out
        assert text.count("topk_output.topk_ids: int32 [6, 2]") == shown
        assert "layer 3 rank 0: layer-3.rank-0.safetensors" in text
    refused = {"schema": 1, "layer": "9", "rank": 1, "refused": "too large"}
    (tmp_path / "captured" / "layer-9.rank-1.json").write_text(json.dumps(refused))
    assert main(["tactics", "capture", "show", folder]) == 1
    text = capsys.readouterr().out
    assert "layer 9 rank 1: nothing was captured: too large" in text
    assert "layer 1 rank 0: layer-1" in text
