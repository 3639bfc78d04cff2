"""Print why this machine and these server arguments are, or are not, seeded.

The command is ``python -m sglang.srt.layers.moe.kimi_k3_prefill_tactics --explain``
followed by server arguments. It starts nothing, writes nothing and needs no GPU.
Exit code 0: would be seeded; 1: would not; 2: usage.
"""

from __future__ import annotations

import argparse
from typing import Any, Iterator

import msgspec

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.layers.moe.kimi_k3_prefill_tactics import (
    LOG_PREFIX,
    MEASURED,
    Rule,
    bundled_record_path,
    device_rule,
    equal_rule,
    group_wide_rules,
    model_rule,
    read_record,
    runner_rule,
    version_rules,
)
from sglang.srt.runtime_context import get_platform
from sglang.srt.server_args import ServerArgs, prepare_server_args


class _Table(msgspec.Struct):
    rules: list[Rule]
    notes: list[str]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.layers.moe.kimi_k3_prefill_tactics",
        description=__doc__.splitlines()[0],
        epilog="All other arguments are server arguments, as for a launch.",
        # Server arguments pass through, so none of them may be cut short.
        allow_abbrev=False,
    )
    parser.add_argument("--explain", action="store_true", required=True)
    _, server_argv = parser.parse_known_args(argv)
    table = _decide(prepare_server_args(server_argv))
    failed = [rule for rule in table.rules if not rule.ok]
    for line in _render(table.rules):
        print(line)
    for note in table.notes:
        print(f"note: {note}")
    print(f"record: {bundled_record_path()}")
    if failed:
        print(f"{LOG_PREFIX} would not be seeded: {failed[0].failure()}")
        return 1
    print(f"{LOG_PREFIX} would be seeded")
    return 0


def _decide(server_args: ServerArgs) -> _Table:
    notes = []
    try:
        server_args.resolve_once()
    except Exception as error:
        # Defaults that depend on the device or the checkpoint stay as given.
        notes.append(f"defaults are not resolved: {_first_line(error)}")
    config = resolved_view(server_args)
    rules = list(group_wide_rules(parallel=config, schedule=config, kernel=config))
    rules.extend(_autotune_rules(config))
    backend = config.moe_runner_backend
    if backend == "auto" and notes:
        notes.append("MoE runner backend auto is not resolved; it must be flashinfer_*")
    else:
        rules.append(_backend_rule(backend))
    rules.append(device_rule(get_platform().device_capability))
    rules.append(runner_rule(is_draft=False))
    rules.extend(_model_rules(server_args))
    try:
        rules.extend(version_rules(read_record(bundled_record_path())))
    except ImportError as error:
        expected = MEASURED.flashinfer_version
        rules.append(Rule("FlashInfer version", expected, _first_line(error), False))
    except (OSError, ValueError, RecursionError) as error:
        rules.append(Rule("record", "a readable record", _first_line(error), False))
    notes.append("draft workers are never seeded")
    return _Table(rules=rules, notes=notes)


def _autotune_rules(config: Any) -> Iterator[Rule]:
    """Options that keep a start from autotuning, and so from reaching the seed."""
    for option in (
        "disable_flashinfer_autotune",
        "enable_deterministic_inference",
        "enable_kv_cache_sharding",
    ):
        yield equal_rule(option, False, getattr(config, option))


def _backend_rule(backend: str) -> Rule:
    ok = backend.startswith("flashinfer_")
    return Rule("MoE runner backend", "flashinfer_*", backend, ok)


def _model_rules(server_args: ServerArgs) -> Iterator[Rule]:
    from sglang.srt.configs.model_config import _get_and_verify_dtype
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    try:
        hf_config = get_config(
            server_args.model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        )
        dtype = _get_and_verify_dtype(get_hf_text_config(hf_config), server_args.dtype)
    except Exception as error:
        # A missing, private or unknown checkpoint: the table still says the rest.
        found = f"no config for {server_args.model_path}: {_first_line(error)}"
        yield Rule("model", "Kimi-K3", found, False)
        yield Rule("model dtype", str(MEASURED.dtype), server_args.dtype, False)
        return
    yield model_rule(hf_config)
    yield equal_rule("model dtype", MEASURED.dtype, dtype)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _render(rules: list[Rule]) -> Iterator[str]:
    rows = [("rule", "expected", "found", "ok")]
    rows += [(r.name, r.expected, r.found, "yes" if r.ok else "NO") for r in rules]
    rows = [tuple(_shorten(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        yield "  ".join([*cells, row[3]])


def _shorten(cell: str, limit: int = 48) -> str:
    # The end differs where long version lists differ, so the middle goes.
    return cell if len(cell) <= limit else f"{cell[:22]}...{cell[-23:]}"
