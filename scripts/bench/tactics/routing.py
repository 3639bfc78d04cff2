"""Which token goes to which expert, and what that costs in padding."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from ..errors import BenchError

CHUNK = 2048  # tokens drawn at once, bounds the [CHUNK, experts] scratch


@dataclasses.dataclass(frozen=True)
class Routing:
    """Routing of one chunk.

    `topk_ids` is int32 [tokens, top_k] with distinct global expert ids in a row,
    `topk_weights` float32 [tokens, top_k], rows summing to 1 when generated.
    `source` says where it comes from. `hidden` is the captured chunk's torch
    tensor [tokens, hidden], None where inputs are to be drawn.
    """

    topk_ids: np.ndarray
    topk_weights: np.ndarray
    source: str
    hidden: Any = None

    @property
    def tokens(self) -> int:
        return self.topk_ids.shape[0]

    def first(self, tokens: int) -> "Routing":
        """The routing of the first `tokens` rows."""
        return dataclasses.replace(
            self,
            topk_ids=self.topk_ids[:tokens],
            topk_weights=self.topk_weights[:tokens],
            hidden=None if self.hidden is None else self.hidden[:tokens],
        )

    def counts(self, experts: int, offset: int = 0) -> np.ndarray:
        """Routed rows of each of `experts` local experts from id `offset` on."""
        counts = np.bincount(self.topk_ids.reshape(-1), minlength=offset + experts)
        return counts[offset : offset + experts]

    def digest(self) -> str:
        """SHA-256 over ids, weights and, where captured, hidden states."""
        digest = hashlib.sha256()
        for array in (self.topk_ids, self.topk_weights):
            digest.update(str((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        if self.hidden is not None:
            digest.update(self.hidden.float().numpy().tobytes())
        return digest.hexdigest()


def generate(spec: str, *, tokens: int, experts: int, top_k: int, seed: int) -> Routing:
    """Draws the routing that `spec` names: "uniform" or "dirichlet:ALPHA".

    Expert popularity is flat, or one draw of a symmetric Dirichlet with
    concentration ALPHA (smaller is more skewed); a token then picks `top_k`
    distinct experts without replacement in proportion to it (Gumbel top-k).
    Raises BenchError for a spec it does not know.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    kind, _, parameter = spec.partition(":")
    if kind == "uniform" and not parameter:
        popularity = np.full(experts, 1.0 / experts)
    elif kind == "dirichlet":
        try:
            alpha = float(parameter)
        except ValueError:
            alpha = 0.0
        if not 1e-3 <= alpha <= 1e6:
            raise BenchError(
                f"--routing {spec}: the Dirichlet parameter must be a number from "
                "0.001 to 1000000, e.g. dirichlet:0.3"
            )
        popularity = rng.dirichlet(np.full(experts, alpha))
    else:
        raise BenchError(
            f"--routing {spec}: use uniform, dirichlet:ALPHA or capture:FOLDER"
        )
    logits = np.log(np.maximum(popularity, 1e-300))
    ids = np.empty((tokens, top_k), np.int32)
    weights = np.empty((tokens, top_k), np.float32)
    for start in range(0, tokens, CHUNK):
        rows = slice(start, min(start + CHUNK, tokens))
        keys = logits + rng.gumbel(size=(rows.stop - start, experts))
        ids[rows] = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
        raw = rng.random((rows.stop - start, top_k)) + 0.1
        weights[rows] = raw / raw.sum(axis=1, keepdims=True)
    return Routing(ids, weights, spec)


@dataclasses.dataclass(frozen=True)
class Padding:
    """What a token tile costs on one routing, in rows of the grouped GEMM."""

    tile: int
    routed: int  # rows with a token
    padded: int  # rows without one: every expert is filled up to whole tiles
    blocks: int  # tiles launched along the token axis
    active: int  # experts with at least one row

    @property
    def rows(self) -> int:
        """Rows the kernel computes."""
        return self.routed + self.padded

    @property
    def overhead(self) -> float:
        """Padded rows over routed rows."""
        return self.padded / self.routed if self.routed else 0.0


def padding(counts: np.ndarray, tile: int) -> Padding:
    """Padding of `counts` (int [experts], rows of each expert) at a token tile."""
    blocks = -(-counts.astype(np.int64) // tile)
    routed = int(counts.sum())
    return Padding(
        tile=tile,
        routed=routed,
        padded=int(blocks.sum()) * tile - routed,
        blocks=int(blocks.sum()),
        active=int((counts > 0).sum()),
    )


def rank_correlation(a: list[float], b: list[float]) -> float | None:
    """Spearman's rho of two equally long lists, ties given their mean rank.

    None when there are fewer than two values or one list is constant.
    """
    if len(a) < 2:
        return None
    ranks = [_mean_ranks(np.asarray(values, float)) for values in (a, b)]
    if any(np.ptp(r) == 0 for r in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    return np.array([(values < v).sum() + (values == v).sum() / 2 for v in values])
