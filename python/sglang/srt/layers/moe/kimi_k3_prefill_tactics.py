"""Start Kimi-K3 prefill engines with the measured 16K-token MoE tactic.

At 16,384 tokens FlashInfer's candidate enumeration offers token tiles 192 and 256
only, so no tuning pass can find tile 128 / config 4, which serves faster there and
gives the same bits. ``kimi_k3_prefill_tactics.json`` beside this module holds that
tactic as a FlashInfer tuning record, and ``seed_kimi_k3_prefill_tactics`` loads it
with the public ``load_configs`` before the user's cache is loaded.

Where it applies
    Only on the setup it was measured on: see ``MEASURED``. Rules are read in this
    order, and reading stops at the first that fails: process-wide configuration,
    the runner's fields, FlashInfer's version, the record and the environment it
    names. A runner that lacks a field is therefore not touched unless all
    process-wide rules hold. Versions come last because a record that only a version
    keeps out is worth a warning, and that takes knowing the model.

Hit in a tuning pass
    The record carries the measurement policy the op asks for (CUDA graph, cold L2).
    Without it ``autotune(True)`` would profile the bucket again, and the live winner
    would outrank the record.

The user's cache
    It is loaded after the seed, so its entries win. ``save_configs`` also writes
    loaded records, so a seed would end up in the user's file and outrank a corrected
    bundle at the next start. ``flashinfer_user_cache`` never lets a seed stay there:
    whatever a start finds for the key is the user's, also when it equals an old or
    the present seed. A list of retired seeds cannot tell that case, FlashInfer saves
    no mark in an entry, and its namespaced records would fail the second of two
    concurrent starts.

Agreement
    A hit skips a profile, and profiling is a collective in a tuning sync group, so
    all ranks seed or none. Rules that are equal on every rank of a group by
    construction are checked first and alone; the verdict on the rest and the digest
    of the record are exchanged before any rank loads.

``python -m sglang.srt.layers.moe.kimi_k3_prefill_tactics --explain ARGS`` prints the
decision for this machine and the given server arguments; it needs no GPU.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Optional

import msgspec
import torch

from sglang.srt.configs.model_config import _hf_arch, is_kimi_k3
from sglang.srt.environ import envs
from sglang.srt.runtime_context import (
    get_exec,
    get_parallel,
    get_platform,
    get_schedule,
)
from sglang.srt.utils.flashinfer_user_cache import end_seeded_start, note_seed

if TYPE_CHECKING:
    from flashinfer.autotuner import AutoTuner

    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Every log line of this module starts with it.
LOG_PREFIX = "Kimi-K3 prefill tactic seed:"


class _Measured(msgspec.Struct, frozen=True):
    """The setup the bundled record was measured on (provenance in the record)."""

    tp_size: int = 1
    pp_size: int = 8
    ep_size: int = 1
    chunked_prefill_size: int = 16384  # tokens
    device_capability: tuple[int, int] = (10, 3)
    dtype: torch.dtype = torch.bfloat16
    flashinfer_version: str = "0.7.2"


MEASURED = _Measured()
_OP = "flashinfer::trtllm_fp4_block_scale_moe"
_RUNNER_RULE = "runner"


class SeedDecision(msgspec.Struct, frozen=True):
    """Whether this start was seeded.

    ``reason`` is the first rule that failed, with the expected and the found value;
    "" when seeded. ``record`` is the record file, ``bucket`` its token bucket and
    ``tactic`` (token tile, config); the last two are None when not seeded.
    """

    seeded: bool
    reason: str
    record: str
    bucket: Optional[int] = None
    tactic: Optional[tuple[int, int]] = None


class Rule(msgspec.Struct, frozen=True):
    """One line of the decision table."""

    name: str
    expected: str
    found: str
    ok: bool

    def failure(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


class Record(msgspec.Struct, frozen=True):
    """A bundled record, read and checked; see ``read_record``."""

    metadata: dict[str, Any]
    entries: dict[str, list]
    bucket: int
    tactic: tuple[int, int]
    digest: str


def bundled_record_path() -> Path:
    """The record file shipped with this module."""
    return Path(__file__).with_suffix(".json")


def read_record(path: Path) -> Record:
    """Read one bundled record.

    The file is a FlashInfer cache file with ``_metadata`` and exactly one entry
    ``file_key: [runner, [tile, config], policy]``. Raises ValueError naming what is
    wrong, OSError when the file cannot be read.
    """
    raw = path.read_bytes()
    content = json.loads(raw)
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, found {type(content).__name__}")
    metadata = content.pop("_metadata", None)
    if not isinstance(metadata, dict):
        raise ValueError("_metadata is not an object, so it would load unchecked")
    if len(content) != 1:
        raise ValueError(f"expected one entry, found {len(content)}")
    (key, entry), *_ = content.items()
    match entry:
        case [str(runner), [int(tile), int(config)], [_, _, _, _]]:
            pass
        case _:
            raise ValueError(
                f"entry is not [runner, [tile, config], policy of 4]: {entry!r:.80}"
            )
    try:
        _op, key_runner, shapes, _extras = ast.literal_eval(key)
        bucket = shapes[0][0]
    except (SyntaxError, TypeError, IndexError) as error:
        raise ValueError(f"key is not a FlashInfer file key: {key!r:.80}") from error
    if key_runner != runner:
        raise ValueError(f"key is for runner {key_runner!r}, entry for {runner!r}")
    return Record(
        metadata=metadata,
        entries={key: entry},
        bucket=bucket,
        tactic=(tile, config),
        digest=hashlib.sha256(raw).hexdigest(),
    )


def seed_kimi_k3_prefill_tactics(
    tuner: AutoTuner,
    model_runner: ModelRunner,
    *,
    user_cache: Optional[Path] = None,
) -> SeedDecision:
    """Load the bundled record into ``tuner`` when this start matches ``MEASURED``.

    ``user_cache`` is the cache file loaded next; its entries win over the record.
    Logs one line: INFO, or WARNING for a record kept out by a version only.
    """
    path = bundled_record_path()
    try:
        failed = _first_failure(
            group_wide_rules(
                parallel=get_parallel(),
                schedule=get_schedule(),
                kernel=get_exec().kernel,
            )
        )
    except ValueError as error:
        # Fixtures that run this without a published configuration are no engine.
        failed = Rule("server configuration", "published", str(error), False)
    if failed is not None:
        end_seeded_start(tuner)
        return _not_seeded(model_runner, path, failed.failure())

    record: Optional[Record] = None
    orphaned = False
    failed = _first_failure(_rank_rules(model_runner))
    if failed is None:
        try:
            record = read_record(path)
        except (OSError, ValueError, RecursionError) as error:
            failed = Rule("record", "a readable record", f"{path}: {error}", False)
        else:
            failed = _first_failure(version_rules(record))
            orphaned = failed is not None
    reason = "" if failed is None else failed.failure()

    group = _sync_group()
    if group is not None:
        reason = _agree(group, path, record, reason)
    if not reason:
        reason = _load_fault(tuner, path)
    if reason or record is None:
        # A draft phase belongs to the start whose target phase was seeded.
        if failed is None or failed.name != _RUNNER_RULE:
            end_seeded_start(tuner)
        return _not_seeded(model_runner, path, reason, orphaned=orphaned)

    note_seed(tuner, record.entries, home=user_cache)
    _log(
        model_runner,
        logging.INFO,
        f"seeded: bucket {record.bucket} tokens, tactic {record.tactic}, record {path}",
    )
    return SeedDecision(
        seeded=True,
        reason="",
        record=str(path),
        bucket=record.bucket,
        tactic=record.tactic,
    )


def group_wide_rules(*, parallel: Any, schedule: Any, kernel: Any) -> Iterator[Rule]:
    """Configuration that all ranks of a tuning sync group share."""
    reuse = envs.SGLANG_FLASHINFER_AUTOTUNE_CACHE.get()
    yield Rule("autotune cache reuse", "on", "on" if reuse else "off", reuse)
    yield equal_rule("tensor parallel size", MEASURED.tp_size, parallel.tp_size)
    yield equal_rule("pipeline parallel size", MEASURED.pp_size, parallel.pp_size)
    yield equal_rule("expert parallel size", MEASURED.ep_size, parallel.ep_size)
    yield equal_rule(
        "chunked prefill size",
        MEASURED.chunked_prefill_size,
        schedule.chunked_prefill_size,
    )
    # A skipped op is to use FlashInfer's heuristic; a loaded record would outrank it.
    skipped = kernel.flashinfer_autotune_skip_ops or ()
    found = ", ".join(skipped) or "none"
    yield Rule("autotune skip ops", f"without {_OP}", found, _OP not in skipped)


def _rank_rules(model_runner: ModelRunner) -> Iterator[Rule]:
    """This rank's device, then its runner."""
    yield device_rule(get_platform().device_capability)
    yield runner_rule(is_draft=model_runner.is_draft_worker)
    yield model_rule(model_runner.model_config.hf_config)
    yield equal_rule("model dtype", MEASURED.dtype, model_runner.dtype)


def device_rule(capability: tuple) -> Rule:
    expected = "SM{}{}".format(*MEASURED.device_capability)
    found = "no CUDA device" if None in capability else "SM{}{}".format(*capability)
    ok = tuple(capability) == MEASURED.device_capability
    return Rule("device", expected, found, ok)


def runner_rule(*, is_draft: bool) -> Rule:
    found = "draft" if is_draft else "target"
    return Rule(_RUNNER_RULE, "target", found, not is_draft)


def model_rule(hf_config: Any) -> Rule:
    found = _hf_arch(hf_config) or "no architecture"
    return Rule("model", "Kimi-K3", found, is_kimi_k3(hf_config))


def version_rules(record: Record) -> Iterator[Rule]:
    """FlashInfer's version, then each field of the record's environment."""
    import flashinfer
    from flashinfer.autotuner import _collect_metadata

    expected = MEASURED.flashinfer_version
    yield equal_rule("FlashInfer version", expected, flashinfer.__version__)
    for field, current in _collect_metadata().items():
        saved = record.metadata.get(field)
        # A tactic id means nothing in another FlashInfer, so no wildcard there.
        wildcard = saved == "*" and field != "flashinfer_version"
        known = saved not in (None, "unknown", "None")
        ok = wildcard or (known and saved == current)
        yield Rule(f"record's {field}", "any" if wildcard else str(saved), current, ok)


def equal_rule(name: str, expected: Any, found: Any) -> Rule:
    return Rule(name, str(expected), str(found), found == expected)


def _first_failure(rules: Iterator[Rule]) -> Optional[Rule]:
    return next((rule for rule in rules if not rule.ok), None)


def _sync_group() -> Optional[torch.distributed.ProcessGroup]:
    # The autotune context imports this module.
    from sglang.srt.model_executor.runner.flashinfer_autotune import (
        _autotune_tactic_sync_group,
    )

    try:
        tp_group = get_parallel().tp_group
    except RuntimeError:
        # No groups are built in this process, so there is nobody to agree with.
        return None
    return _autotune_tactic_sync_group(tp_group)


def _agree(
    group: torch.distributed.ProcessGroup,
    path: Path,
    record: Optional[Record],
    reason: str,
) -> str:
    """Exchange verdicts; return why this group does not seed, or ""."""
    from flashinfer.autotuner import AutoTuner

    # FlashInfer's own verdict, from a tuner that nothing else uses.
    reason = reason or _load_fault(AutoTuner(), path)
    mine = (reason, record.digest if record is not None else "")
    verdicts: list = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(verdicts, mine, group=group)
    if reason:
        return reason
    for rank, (other, _) in enumerate(verdicts):
        if other:
            return f"rank {rank} of the tuning group does not seed: {other}"
    if len({digest for _, digest in verdicts}) > 1:
        return "the ranks of the tuning group hold different records"
    return ""


def _load_fault(tuner: AutoTuner, path: Path) -> str:
    """Load the record; say why FlashInfer would not, or ""."""
    try:
        fault = "" if tuner.load_configs(str(path)) else "another environment"
    except Exception as error:
        # Raising would stop the start, or leave peers waiting in the exchange.
        fault = f"{type(error).__name__}: {error}"
    return fault and f"FlashInfer rejected {path}: {fault}"


def _not_seeded(
    model_runner: ModelRunner, path: Path, reason: str, *, orphaned: bool = False
) -> SeedDecision:
    if orphaned:
        _log(
            model_runner,
            logging.WARNING,
            f"not seeded, record {path} is orphaned: {reason}. Measure the tactic "
            "again on these versions and replace the record.",
        )
    else:
        _log(model_runner, logging.INFO, f"not seeded: {reason}")
    return SeedDecision(seeded=False, reason=reason, record=str(path))


class _LastLine(msgspec.Struct):
    runner: Optional[weakref.ref] = None
    text: str = ""


_last_line = _LastLine()


def _log(model_runner: ModelRunner, level: int, text: str) -> None:
    """Log once per runner: each start enters the autotune context several times."""
    if (
        _last_line.runner is not None
        and _last_line.runner() is model_runner
        and _last_line.text == text
    ):
        return
    try:
        _last_line.runner = weakref.ref(model_runner)
    except TypeError:
        # Stand-ins without weak references are logged each time.
        _last_line.runner = None
    _last_line.text = text
    logger.log(level, "%s %s", LOG_PREFIX, text)


if __name__ == "__main__":
    from sglang.srt.layers.moe.kimi_k3_prefill_explain import main

    sys.exit(main(sys.argv[1:]))
