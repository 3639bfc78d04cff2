"""Opt-in capture of MoE layer inputs from a running engine, and reading it back."""

import http.client
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from ..errors import BenchError, CheckFailed
from .capture_hook import ARMED, SCHEMA, digest, stem
from .flashinfer_api import torch
from .problems import Problem
from .routing import Routing

FACTORY = "bench.tactics.capture_hook:make_hook"
MOST_LAYERS = 8


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    sha256: str


class _Manifest(msgspec.Struct):
    """What is read of a manifest; see capture_hook for what it holds."""

    layer: str
    rank: int
    file: str
    tensors: dict[str, _Tensor]
    weights: dict[str, _Tensor]


class _Refusal(msgspec.Struct):
    layer: str
    rank: int
    refused: str


def hook_specs(
    folder: Path,
    layers: list[str],
    *,
    module: str,
    tokens: int,
    max_bytes: int,
    with_weights: bool,
) -> list[dict[str, Any]]:
    """The value of SGLang's `--forward-hooks`: one spec for each layer.

    `module` is the module's name with `{}` for the layer (fnmatch pattern). The
    bound in bytes is for all layers together. Raises BenchError.
    """
    if "{}" not in module:
        raise BenchError(f"--module {module}: put {{}} where the layer number goes")
    if not 0 < len(layers) <= MOST_LAYERS:
        raise BenchError(f"--layers: name 1 to {MOST_LAYERS} layers")
    if len(set(layers)) != len(layers) or not all(x.isdigit() for x in layers):
        raise BenchError("--layers: different layer numbers, separated by commas")
    return [
        {
            "name": f"tactics-capture-{layer}",
            "target_modules": [module.format(layer)],
            "hook_factory": FACTORY,
            "config": {
                "folder": str(folder.resolve()),
                "layer": layer,
                "tokens": tokens,
                "max_bytes": max_bytes // len(layers),
                "with_weights": with_weights,
            },
        }
        for layer in layers
    ]


def take(
    folder: Path, layers: list[str], *, url: str | None, ids: list[int], timeout: float
) -> list[dict[str, Any]]:
    """Arms the hooks, sends one request if `url` is given, waits for the files.

    Returns the manifests of all layers. Raises BenchError when files of an
    earlier capture are there, CheckFailed when a layer was refused (the engine's
    warm-up can do that before this runs) or never came.
    """
    if not folder.is_dir():
        raise BenchError(f"no folder {folder}; `capture args` makes it")
    old = sorted(path.name for path in folder.glob("layer-*"))
    if old:
        _manifests(folder)
        raise BenchError(
            f"{folder} already holds {old[0]}; a running engine captures each layer "
            "once, so restart it with a new folder"
        )
    armed = folder / ARMED
    try:
        armed.touch()
    except OSError as error:
        raise BenchError(f"cannot write in {folder}: {error}") from error
    try:
        if url is not None:
            _generate(url, ids, timeout)
        end = time.monotonic() + timeout
        while missing := [
            x for x in layers if not list(folder.glob(f"layer-{x}.*.json"))
        ]:
            if time.monotonic() > end:
                raise CheckFailed(
                    f"nothing came for layers {', '.join(missing)} in {timeout:.0f} s; "
                    "was the server started with the printed arguments, did a chunk "
                    "reach --tokens, and does the layer run outside a CUDA graph?"
                )
            time.sleep(0.1)
    finally:
        armed.unlink(missing_ok=True)
    return _manifests(folder)


def _manifests(folder: Path) -> list[dict[str, Any]]:
    """All manifests in `folder`. Raises CheckFailed for the first refusal."""
    manifests = [_manifest(path) for path in sorted(folder.glob("layer-*.json"))]
    for manifest in manifests:
        if "refused" in manifest:
            raise CheckFailed(
                f"layer {manifest['layer']}: {manifest['refused']}; then restart the "
                "server with a new folder"
            )
    return manifests


def show(folder: Path, layers: list[str]) -> list[dict[str, Any]]:
    """Manifests of all ranks of `layers`, of every layer there when it is empty.

    The tensors are compared with them. Raises BenchError when a layer has none.
    """
    found = []
    for pattern in [f"layer-{x}.*.json" for x in layers] or ["layer-*.json"]:
        paths = sorted(folder.glob(pattern))
        if not paths:
            raise BenchError(
                f"no {pattern} in {folder}; name a folder of `capture take`"
            )
        for path in paths:
            manifest = _manifest(path)
            found.append(manifest if "refused" in manifest else _load(path)[0])
    return found


def read(folder: Path, layer: str | None = None, rank: int = 0) -> tuple[dict, dict]:
    """Manifest and tensors of a captured layer, the first one when None.

    Raises BenchError when it is missing, of another schema, or its tensors are
    not those of the manifest.
    """
    if layer is None:
        found = sorted(folder.glob(f"layer-*.rank-{rank}.json"))
        if not found:
            raise BenchError(f"no captured layer in {folder}")
        path = found[0]
    else:
        path = folder / f"{stem(layer, rank)}.json"
    return _load(path)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read the manifest {path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise BenchError(f"{path} is no manifest of schema {SCHEMA}; capture again")
    try:
        msgspec.convert(manifest, _Refusal if "refused" in manifest else _Manifest)
    except msgspec.ValidationError as error:
        raise BenchError(f"{path} is damaged ({error}); capture again") from error
    return manifest


def _load(path: Path) -> tuple[dict, dict]:
    manifest = _manifest(path)
    if "refused" in manifest:
        raise BenchError(f"{path}: nothing was captured: {manifest['refused']}")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path.parent / manifest["file"]
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BenchError(f"cannot read {file}: {error}") from error
    for name, entry in manifest["tensors"].items():
        if name not in tensors or digest(tensors[name]) != entry["sha256"]:
            raise BenchError(
                f"{file}: {name} is not what the manifest describes; capture again"
            )
    return manifest, tensors


def routing_of(folder: Path, layer: str | None, problem: Problem) -> Routing:
    """Routing and hidden states of a captured layer, for discovery.

    Raises BenchError when the capture holds no precomputed routing, or is of a
    model with other sizes than the problem's.
    """
    manifest, tensors = read(folder, layer)
    by_field = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    if "packed_topk_ids" in by_field:
        # The expert in the high half, its bfloat16 weight in the low one.
        packed = by_field["packed_topk_ids"]
        ids = packed >> 16
        weights = (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16)
    elif "topk_ids" in by_field and "topk_weights" in by_field:
        ids, weights = by_field["topk_ids"], by_field["topk_weights"]
    else:
        raise BenchError(
            f"{folder}: layer {manifest['layer']} was captured without expert ids (it "
            f"has {', '.join(tensors)}); capture the module that gets a top-k output"
        )
    hidden = by_field.get("hidden_states")
    found = {
        "expert ids below experts": int(ids.max()) < problem.experts,
        "ids at least 0": int(ids.min()) >= 0,
        "top_k": ids.shape[1] == problem.top_k,
        "hidden": hidden is None or hidden.shape[1] == problem.hidden,
    }
    wrong = [name for name, good in found.items() if not good]
    if wrong:
        raise BenchError(
            f"{folder}: the captured layer is not of problem {problem.name} "
            f"({', '.join(wrong)}): its ids are {list(ids.shape)} up to "
            f"{int(ids.max())}; give --problem or --set of the captured model"
        )
    return Routing(
        ids.to(torch.int32).numpy(),
        weights.float().numpy(),
        f"capture of layer {manifest['layer']}",
        hidden,
    )


def _generate(url: str, ids: list[int], timeout: float) -> None:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    try:
        request = urllib.request.Request(
            url.rstrip("/") + "/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BenchError(
            f"the request to {url} failed: {error}; --url is http://HOST:PORT of the "
            "running server"
        ) from error
