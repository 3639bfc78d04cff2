"""A small real TunableRunner with faults to plant, and a clock that is scripted."""

import random
from pathlib import Path
from typing import Any

import torch
from bench.tactics import discover, state
from bench.tactics.case import OpCase
from bench.tactics.problems import Problem
from bench.tactics.routing import Routing, generate
from flashinfer.autotuner import DynamicTensorSpec, TunableRunner, TuningConfig

PROBLEM = Problem(
    name="tiny", hidden=8, intermediate=8, experts=6, local_experts=6, top_k=2
)
TOKENS = 64
TILES = (4, 8, 16, 32)
SKEWED = "dirichlet:0.3"


def listed(tokens: int) -> list[tuple[int, int]]:
    """Two tiles near the mean rows of an expert: (16, *) and (32, *) at 64 tokens,
    which hides (4, *) and (8, *) there."""
    mean = tokens * PROBLEM.top_k / PROBLEM.experts
    index = next((i for i, tile in enumerate(TILES) if tile >= mean), 3)
    low = max(0, min(index - 1, 2))
    return [(tile, c) for tile in TILES[low : low + 2] for c in (0, 1)]


class TinyRunner(TunableRunner):
    """out = x @ w, or what the fault planted for a tactic makes of it."""

    def __init__(self, faults: dict[Any, str] | None = None):
        self.faults = faults or {}
        self.runs: list[Any] = []

    def __hash__(self) -> int:
        return 7

    def get_cache_key_extras(self, inputs: list) -> tuple:
        return ("tiny", 8)

    def get_valid_tactics(self, inputs: list, profile: Any) -> list:
        return [list(tactic) for tactic in listed(inputs[1].shape[0])]

    def forward(
        self, inputs: list, tactic: Any = -1, do_preparation: bool = False, *, w: Any
    ) -> torch.Tensor:
        out, x = inputs
        fault = self.faults.get(tactic, "")
        if do_preparation:
            return out
        self.runs.append(tactic)
        if fault == "raises":
            raise RuntimeError("no kernel image\nsecond line")
        if fault == "stop":
            raise KeyboardInterrupt
        if fault == "writes nothing":
            return out
        torch.mm(x, w, out=out)
        if fault == "one row":
            out[-1] = 0
        elif fault == "nan":
            out[0, 0] = float("nan")
        elif fault == "ulp":
            out.mul_(1 + 2**-20)
        elif fault == "flaky" and self.runs.count(tactic) % 2 == 0:
            out.neg_()
        elif fault == "other shape":
            return out[:-1]
        return out


class TinyOp:
    """The op of TinyRunner; the same runner serves every case."""

    custom_op = "test::tiny"

    def __init__(self, faults: dict[Any, str] | None = None):
        self.runner = TinyRunner(faults)
        generator = torch.Generator().manual_seed(0)
        self.w = torch.randn((8, 8), generator=generator)

    def tile(self, tactic: Any) -> int | None:
        return tactic[0] if isinstance(tactic, tuple) else None

    def case(
        self, tokens: int, routing: Routing, *, for_listing: bool = False
    ) -> OpCase:
        generator = torch.Generator().manual_seed(1)
        spec = DynamicTensorSpec((0, 1), (0, 0), (16, 32, 64, 128), _bucket)
        return OpCase(
            custom_op=self.custom_op,
            runner=self.runner,
            tuning_config=TuningConfig(
                dynamic_tensor_specs=(spec,),
                use_cold_l2_cache=True,
                use_cuda_graph=True,
            ),
            inputs=[
                torch.empty((tokens, 8)),
                torch.randn((tokens, 8), generator=generator),
            ],
            kwargs={"w": self.w},
            writes=(0,),
        )


def _bucket(tokens: int) -> int:
    return 1 << max(4, (tokens - 1).bit_length())


class ScriptedClock:
    """Stands for the GPU's clock: times from a table, with seeded jitter.

    Keeps Clock's contract: positive milliseconds for a tactic that works, and the
    op's own error for one that does not.
    """

    name = "scripted clock, no GPU"

    def __init__(self, ms: dict[Any, float], jitter: float = 0.002, seed: int = 0):
        self.ms = ms
        self.asked: list[Any] = []
        self._jitter = jitter
        self._random = random.Random(seed)

    def time_ms(self, tactic: Any) -> float:
        self.asked.append(tactic)
        value = self.ms[tactic]
        if isinstance(value, BaseException):
            raise value
        return value * (1 + self._jitter * self._random.random())


def times(**tiles: float) -> dict[Any, float]:
    """Times of all tactics from those of the tiles, t4=..., t8=...; 1.0 elsewhere."""
    table: dict[Any, float] = {-1: 1.02}
    for tile in TILES:
        for config in (0, 1):
            table[(tile, config)] = tiles.get(f"t{tile}", 1.0) + 0.01 * config
    return table


def plan(repetitions: int = 9, tolerance: float = 1e-2) -> discover.Plan:
    routing = generate(SKEWED, tokens=TOKENS, experts=6, top_k=2, seed=3)
    return discover.Plan(
        routing=routing,
        token_counts=[1, 8, 16, 32, TOKENS],
        repetitions=repetitions,
        tolerance=tolerance,
        seed=0,
        experts=6,
    )


def header(repetitions: int = 9) -> dict[str, Any]:
    return {"op": "tiny", "seed": 0, "repetitions": repetitions}


def run(
    folder: Path,
    op: TinyOp,
    clock: ScriptedClock,
    repetitions: int = 9,
    tolerance: float = 1e-2,
) -> tuple[Any, list[str]]:
    """A whole discovery on the kit's op: its report and what it said."""
    said: list[str] = []
    with state.opened(folder, header(repetitions)) as held:
        found = discover.run(
            held, op, plan(repetitions, tolerance), lambda case: clock, said.append
        )
    return found, said
