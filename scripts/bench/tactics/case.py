"""One call of a tunable op, and how an op module is found and opened."""

import dataclasses
import importlib
import importlib.util
import inspect
import traceback
from pathlib import Path
from typing import Any, Protocol

from ..errors import BenchError
from .candidates import DEFAULT, profile_of, text
from .flashinfer_api import ProfilingCacheKey, TunableRunner, TuningConfig, torch
from .problems import Problem
from .routing import Routing

BUILT_IN = {
    "kimi-k3": "bench.tactics.ops_trtllm",
    "triton-grouped-gemm": "bench.tactics.examples.triton_grouped_gemm",
}
POISON = 0xFF  # every byte: NaN in floating point, -1 in integers


@dataclasses.dataclass
class OpCase:
    """What the op hands to `AutoTuner.choose_one`: runner, config and tensors.

    `writes` are the indices of the inputs the op writes its result into; those
    are poisoned before every checked run. `can_run` is False where the case only
    carries shapes (enough for keys, not for running).
    """

    custom_op: str
    runner: TunableRunner
    tuning_config: TuningConfig
    inputs: list[Any]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    writes: tuple[int, ...] = ()
    can_run: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes as AutoTuner sees them; anything but a tensor is (0,)."""
        return tuple(
            tuple(value.shape) if isinstance(value, torch.Tensor) else (0,)
            for value in self.inputs
        )

    @property
    def bucket(self) -> tuple[tuple[int, ...], ...]:
        """The shapes after FlashInfer's rounding to its tuning bucket."""
        shapes = [list(shape) for shape in self.shapes]
        for spec in self.tuning_config.dynamic_tensor_specs:
            size = shapes[spec.input_idx[0]][spec.dim_idx[0]]
            mapped = spec.map_to_tuning_buckets(size)
            for index, dim in zip(spec.input_idx, spec.dim_idx, strict=True):
                shapes[index][dim] = mapped
        for spec in self.tuning_config.constraint_specs:
            shapes[spec.input_idx][spec.dim_idx] = -1
        return tuple(tuple(shape) for shape in shapes)

    @property
    def file_key(self) -> str:
        """The key of this call in a `load_configs` file."""
        return ProfilingCacheKey(
            custom_op=self.custom_op,
            runner_class_name=type(self.runner).__name__,
            runner_hash=0,  # no part of the file's key
            nearest_profile=self.bucket,
            extras=self.runner.get_cache_key_extras(self.inputs),
        ).file_key

    @property
    def policy(self) -> list:
        """The measurement policy a record must carry to be a hit while tuning."""
        config = self.tuning_config
        return [
            "cuda_graph_profile_replays",
            config.cuda_graph_profile_replays if config.use_cuda_graph else None,
            "l2_cache_policy",
            "cold" if config.use_cold_l2_cache else "hot",
        ]

    def one_bucket_config(self) -> TuningConfig:
        """The tuning config, its buckets cut down to the one of this call.

        Bucket lists are no part of a key, so a tuning pass under it asks for
        exactly the entry that serving asks for, and for no other.
        """
        bucket = self.bucket
        specs = tuple(
            dataclasses.replace(
                spec,
                gen_tuning_buckets=(bucket[spec.input_idx[0]][spec.dim_idx[0]],),
            )
            for spec in self.tuning_config.dynamic_tensor_specs
        )
        return dataclasses.replace(self.tuning_config, dynamic_tensor_specs=specs)

    def prepare(self, tactics: list[Any]) -> None:
        """The one-time work AutoTuner does before it profiles `tactics`."""
        if "do_preparation" not in inspect.signature(self.runner.forward).parameters:
            return
        handled = self.runner.precompile_tactics(
            self.inputs, tactics, profile_of(self.inputs), **self.kwargs
        )
        if not handled:
            self.runner(self.inputs, tactic=DEFAULT, do_preparation=True, **self.kwargs)

    def run(self, tactic: Any) -> list[torch.Tensor]:
        """Runs one tactic on poisoned outputs and returns copies of its results.

        Raises whatever the op raises, launch faults included.
        """
        for index in self.writes:
            self.inputs[index].view(torch.uint8).fill_(POISON)
        result = self.runner(self.inputs, tactic=tactic, **self.kwargs)
        outputs = _tensors(result) or [self.inputs[index] for index in self.writes]
        if not outputs:
            raise BenchError(
                f"{self.custom_op} returned no tensor for {text(tactic)}; name the "
                "inputs it writes in `writes` of its case"
            )
        copies = [output.clone() for output in outputs]
        if copies[0].is_cuda:
            torch.cuda.synchronize()
        return copies


class Op(Protocol):
    """What an op module's `open_op(problem, device=..., seed=...)` returns."""

    custom_op: str

    def case(self, tokens: int, routing: Routing, *, for_listing: bool = False):
        """The OpCase at `tokens`; `for_listing` cases are never run."""

    def tile(self, tactic: Any) -> int | None:
        """Token tile of a tactic, None if the op has no such notion."""


def open_op(spec: str, problem: Problem, *, device: str, seed: int) -> Op:
    """Opens the op `spec` names: a built-in one, MODULE or FILE.py.

    Raises BenchError when there is no such module, it fails, or its `open_op` is
    not as docs/tactics.md has it.
    """
    target = BUILT_IN.get(spec, spec)
    try:
        module = _from_file(target) if target.endswith(".py") else None
        module = module or importlib.import_module(target)
    except BenchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's file raises
        raise BenchError(
            f"--op {spec}: cannot import it ({_where(error)}); use one of "
            f"{', '.join(BUILT_IN)}, a module on PYTHONPATH, or a .py file"
        ) from error
    make = vars(module).get("open_op")
    try:
        inspect.signature(make).bind(problem, device=device, seed=seed)
    except TypeError as error:
        raise BenchError(
            f"--op {spec}: {module.__name__} has no open_op(problem, *, device, seed) "
            f"({error}); scripts/bench/tactics/examples/triton_grouped_gemm.py shows one"
        ) from error
    try:
        op = make(problem, device=device, seed=seed)
    except BenchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's file raises
        raise BenchError(f"--op {spec}: open_op failed ({_where(error)})") from error
    lacks = [name for name in ("custom_op", "case", "tile") if not hasattr(op, name)]
    if lacks:
        raise BenchError(
            f"--op {spec}: what open_op returned has no {', '.join(lacks)}; see "
            "docs/tactics.md"
        )
    return op


def _where(error: Exception) -> str:
    """An error that a user's file raised, with the line it comes from."""
    if isinstance(error, (ImportError, SyntaxError)):
        return str(error)  # names the module, or the line
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}, at {last.filename}:{last.lineno}"


def _from_file(path: str):
    if not Path(path).is_file():
        raise ImportError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"tactics_op_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
