"""Runs inside the engine: saves one chunk's inputs of one MoE layer.

SGLang's `--forward-hooks` imports `make_hook` and calls it after every eager call
of the module. Inputs may be overwritten by then, so the first call only puts a
pre-hook on the module (torch's own API), which saves a later chunk while the
file `armed` exists in the folder. Serving goes on whatever happens here.
"""

import hashlib
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any, Callable

import torch

logger = logging.getLogger(__name__)

ARMED = "armed"
SCHEMA = 1
DIGEST_CHUNK = 1 << 26  # bytes of a weight copied to the host at once


def make_hook(config: dict[str, Any]) -> Callable:
    """The hook for one layer. `config` is what `capture args` printed."""
    return _Layer(config)


def stem(layer: str, rank: int) -> str:
    """File name, without suffix, of a layer's capture on one rank."""
    return f"layer-{layer}.rank-{rank}"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 over a tensor's bytes in row-major order, its dtype and shape."""
    result = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for part in flat.split(DIGEST_CHUNK):
        result.update(part.cpu().numpy().tobytes())
    return result.hexdigest()


class _Layer:
    def __init__(self, config: dict[str, Any]):
        self._folder = Path(config["folder"])
        self._layer = str(config["layer"])
        self._tokens = int(config["tokens"])
        self._max_bytes = int(config["max_bytes"])
        self._with_weights = bool(config["with_weights"])
        self._module: torch.nn.Module | None = None
        self._done = False

    def __call__(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        if self._module is None:
            self._module = module
            module.register_forward_pre_hook(self._before, with_kwargs=True)
        elif module is not self._module and not self._done:
            self._done = True
            self._refuse("the pattern matches several modules; make it exact")

    def _before(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if self._done or not (self._folder / ARMED).exists():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        try:
            tensors, values = named(module, args, kwargs)
            if not tensors or next(iter(tensors.values())).shape[0] < self._tokens:
                return
            self._done = True
            self._save(module, tensors, values)
        except Exception as error:  # noqa: BLE001 - serving must go on
            self._done = True
            self._refuse(f"{type(error).__name__}: {error}")

    def _save(
        self, module: torch.nn.Module, tensors: dict[str, torch.Tensor], values: dict
    ) -> None:
        state = {f"weights.{name}": t for name, t in module.state_dict().items()}
        if self._with_weights:
            tensors = {**tensors, **state}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > self._max_bytes:
            self._refuse(
                f"{size} bytes exceed the bound of {self._max_bytes}; raise --max-bytes"
            )
            return
        from safetensors.torch import save

        held = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        # Views of one storage would be refused.
        held = {name: t.clone() for name, t in held.items()}
        path = self._folder / f"{stem(self._layer, _rank())}.safetensors"
        _write(path, save(held))
        self._write_manifest(
            {
                "file": path.name,
                "bytes": size,
                "tensors": {name: _describe(t) for name, t in held.items()},
                "values": values,
                "weights": {name: _describe(t) for name, t in state.items()},
            }
        )

    def _refuse(self, reason: str) -> None:
        logger.warning("capture of layer %s refused: %s", self._layer, reason)
        try:
            self._write_manifest({"refused": reason})
        except OSError as error:
            logger.warning("and its manifest cannot be written: %s", error)

    def _write_manifest(self, content: dict[str, Any]) -> None:
        document = {
            "schema": SCHEMA,
            "layer": self._layer,
            "rank": _rank(),
            "module": type(self._module).__name__,
            "environment": _environment(),
            **content,
        }
        path = self._folder / f"{stem(self._layer, _rank())}.json"
        _write(path, json.dumps(document, indent=2).encode() + b"\n")


def named(
    module: torch.nn.Module, args: tuple, kwargs: dict
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A call's tensors and plain values by parameter name, fields dotted."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        _walk(name, value, tensors, values)
    return tensors, values


def _walk(name: str, value: Any, tensors: dict, values: dict) -> None:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        values[name] = type(value).__name__
        for field in value._fields:
            _walk(f"{name}.{field}", getattr(value, field), tensors, values)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _walk(f"{name}.{index}", item, tensors, values)
    elif value is None or isinstance(value, (bool, int, float, str)):
        values[name] = value
    else:
        values[name] = type(value).__name__


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": digest(tensor),
    }


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def _environment() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("sglang", "flashinfer-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return found


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
