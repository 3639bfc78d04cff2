"""The user's FlashInfer autotune cache at a seeded start: kept, guarded, never lost.

The tuner, the record, the files and the processes are real; nothing here needs a GPU.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

import contextlib
import errno
import itertools
import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

import filelock
import torch
from flashinfer.autotuner import AutoTuner

from sglang.srt.environ import envs
from sglang.srt.model_executor.runner import flashinfer_autotune as warmup
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import flashinfer_user_cache
from sglang.test.kits.flashinfer_autotune_kit import (
    autotune_phase,
    read_entries,
    write_cache,
)
from sglang.test.kits.kimi_k3_tactics_kit import (
    MEASURED_ARGS,
    RECORD,
    SEEDED,
    TacticsBase,
    cpu_runner,
    cpu_startup,
    drop_privileges,
    record_environment,
    run_forked,
)
from sglang.test.test_utils import enter_scope


def damaged_contents() -> dict[str, bytes]:
    good = {"_metadata": record_environment(), "first": ["R", 1]}
    added = {
        "entry null": {"bad": None},
        "entry number": {"bad": 5},
        "entry text": {"bad": "MoERunner"},
        "entry object": {"bad": {"0": 1}},
        "entry empty": {"bad": []},
        "entry short": {"bad": ["R"]},
        "runner number": {"bad": [5, 1]},
        "policy number": {"bad": ["R", 1, 7]},
        "policy text": {"bad": ["R", 1, "cold"]},
        "comment": {"_comment": 5},
        "records list": {"_records": []},
    }
    return {
        "empty": b"",
        "truncated": json.dumps(good).encode()[:-9],
        "null": b"null",
        "a list": b"[1, 2]",
        "text": b'"x"',
        "not UTF-8": b"\xff\xfe\x00",
        "UTF-16": json.dumps(good).encode("utf-16"),
        "nested too deeply": b"[" * 100_000,
        **{name: json.dumps({**good, **bad}).encode() for name, bad in added.items()},
    }


# Damage, a start's pipeline size and its tactic, damage done while tuning.
DAMAGED_STARTS = tuple(
    itertools.product(
        damaged_contents().items(), ((8, SEEDED), (4, None)), (False, True)
    )
)


class TestUserCache(TacticsBase):
    def start(self, cache=None, *, while_tuning=None, pp_size=8):
        """A fresh start through the autotune context; returns its log records."""
        cache = cache or self.cache
        self.tuner.clear_cache()
        self.runner = cpu_runner()
        with (
            self.assertLogs("sglang.srt", "INFO") as logs,
            cpu_startup(**{**MEASURED_ARGS, "pp_size": pp_size}),
            autotune_phase(self.runner, cache),
        ):
            self.in_tuning = self.call.lookup(self.tuner)
            if while_tuning is not None:
                cache.write_bytes(while_tuning)
        return [record for record in logs.records if record.levelname == "WARNING"]

    def crash_in_save(self):
        """Another process with this tuner's tactics dies right after FlashInfer's save."""
        save = AutoTuner.save_configs

        def save_and_die(tuner, path):
            save(tuner, path)
            os._exit(1)

        def crash():
            with patch.object(AutoTuner, "save_configs", save_and_die):
                flashinfer_user_cache.save_user_cache(self.tuner, self.cache)

        self.assertEqual(run_forked(crash), ["died"])

    @contextlib.contextmanager
    def lock_held_elsewhere(self):
        with (
            filelock.FileLock(self.dir / f".{self.cache.name}.lock"),
            patch.object(flashinfer_user_cache, "_LOCK_TIMEOUT_SECS", 0),
        ):
            yield

    def corrected_bundle(self, tactic=(64, 1)):
        content = json.loads(RECORD.read_text())
        content[self.key][1] = list(tactic)
        self.bundle(content)
        return tactic

    def test_an_explicit_entry_wins(self):
        write_cache(self.cache, {self.key: self.entry((192, 4))})
        self.assertEqual(self.start(), [])
        self.assertEqual(self.in_tuning, (192, 4))
        self.assertEqual(self.call.lookup(self.tuner), (192, 4))
        self.assertEqual(read_entries(self.cache), {self.key: self.entry((192, 4))})

    def test_a_saved_seed_does_not_outrank_a_corrected_bundle(self):
        self.start()
        self.assertEqual(self.in_tuning, SEEDED)
        self.assertEqual(read_entries(self.cache), {})
        corrected = self.corrected_bundle()
        self.start()
        self.assertEqual(self.in_tuning, corrected)

    def test_an_entry_set_by_the_user_wins_even_when_it_equals_the_old_seed(self):
        self.start()
        write_cache(self.cache, {self.key: self.entry(SEEDED)})
        self.corrected_bundle()
        for _ in range(2):
            self.start()
            self.assertEqual(self.in_tuning, SEEDED)

    def test_another_start_in_the_same_process_loads_its_own_entries(self):
        self.start()
        other = write_cache(self.dir / "other.json", {self.key: self.entry((192, 4))})
        with cpu_startup(**{**MEASURED_ARGS, "pp_size": 4}):
            with autotune_phase(cpu_runner(), other):
                self.assertEqual(self.call.lookup(self.tuner), (192, 4))
        self.assertEqual(read_entries(other), {self.key: self.entry((192, 4))})

    def test_a_crash_during_the_save_leaves_no_seed_behind(self):
        write_cache(self.cache, {"user": ["R", 1]})
        self.start()
        self.crash_in_save()
        self.assertEqual(read_entries(self.cache)[self.key], self.entry(SEEDED))
        corrected = self.corrected_bundle()
        self.start()
        self.assertEqual(self.in_tuning, corrected)
        self.assertEqual(read_entries(self.cache), {"user": ["R", 1]})
        self.assertEqual(self.leftovers(), [])

    def test_a_save_finishes_what_another_start_left(self):
        for tile, lock in (
            (64, contextlib.nullcontext()),
            (32, self.lock_held_elsewhere()),
        ):
            with self.subTest(lock=lock):
                with lock, autotune_phase(cpu_runner(), self.cache):
                    self.crash_in_save()
                    self.assertIn(self.key, read_entries(self.cache))
                self.assertEqual(read_entries(self.cache), {})
                corrected = self.corrected_bundle((tile, 1))
                self.start()
                self.assertEqual(self.in_tuning, corrected)

    def test_a_repair_does_not_need_its_journal(self):
        # A start that had no lock can finish, and so remove, a living save's journal.
        save = AutoTuner.save_configs

        def save_and_lose_journal(tuner, path):
            save(tuner, path)
            self.dir.joinpath(f".{self.cache.name}.repair").unlink()

        with patch.object(AutoTuner, "save_configs", save_and_lose_journal):
            self.start()
        self.assertEqual(read_entries(self.cache), {})

    def test_an_unfinished_save_in_a_read_only_directory_is_hidden(self):
        self.start()
        self.crash_in_save()
        corrected = self.corrected_bundle()
        for path in (self.cache, self.dir / f".{self.cache.name}.repair"):
            path.chmod(0o644)
        self.addCleanup(self.dir.chmod, 0o755)
        self.dir.chmod(0o555)

        def serve():
            drop_privileges()
            warnings = self.start()
            return [w.getMessage() for w in warnings], self.in_tuning

        ((warnings, tactic),) = run_forked(serve)
        self.assertEqual(tactic, corrected)
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn("cannot be kept", warnings[0])
        self.assertIn(self.key, read_entries(self.cache))

    def test_an_entry_that_flashinfer_did_not_trust_does_not_come_back(self):
        untrusted = {**record_environment(), "cudnn_version": "unknown"}
        content = {"_metadata": untrusted, self.key: self.entry((192, 7))}
        for crash in (False, True):
            with self.subTest(crash=crash):
                self.cache.write_text(json.dumps(content))
                with autotune_phase(cpu_runner(), self.cache):
                    self.assertEqual(self.call.lookup(self.tuner), SEEDED)
                    if crash:
                        self.crash_in_save()
                self.start()
                self.assertEqual(self.in_tuning, SEEDED)
                self.assertEqual(read_entries(self.cache), {})

    def test_an_entry_without_metadata_is_trusted_and_stays(self):
        # FlashInfer loads such a file unchecked and stamps it at the save.
        self.cache.write_text(json.dumps({self.key: self.entry((192, 7))}))
        for _ in range(2):
            self.start()
            self.assertEqual(self.in_tuning, (192, 7))

    def test_an_entry_with_more_fields_is_loaded_and_stays(self):
        content = {self.key: [*self.entry((192, 7)), "note"]}
        write_cache(self.cache, content)
        self.assertEqual(self.start(), [])
        self.assertEqual(self.in_tuning, (192, 7))
        self.assertEqual(read_entries(self.cache), content)

    def test_the_file_is_read_loaded_and_saved_under_its_lock(self):
        write_cache(self.cache, {"user": ["R", 1]})
        lock = filelock.FileLock(self.dir / f".{self.cache.name}.lock", timeout=0)
        held, free = set(), set()

        def watched(call):
            def wrapper(*args):
                if str(args[-1]) == str(self.cache):
                    try:
                        with lock:
                            free.add(call.__name__)
                    except filelock.Timeout:
                        held.add(call.__name__)
                return call(*args)

            return wrapper

        with contextlib.ExitStack() as stack:
            for owner, name in (
                (flashinfer_user_cache, "_read_cache"),
                (AutoTuner, "load_configs"),
                (AutoTuner, "save_configs"),
            ):
                call = watched(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, call))
            self.start()
        self.assertEqual(free, set())
        self.assertEqual(held, {"_read_cache", "load_configs", "save_configs"})

    def leftovers(self) -> list[str]:
        expected = {self.cache.name, f".{self.cache.name}.lock"}
        return [
            name
            for name in sorted(os.listdir(self.dir))
            if name not in expected and not name.startswith("bundle")
        ]

    def test_two_processes_starting_at_once_lose_nothing(self):
        write_cache(self.cache, {"user": ["R", 1]})
        rounds = 15

        def starts(name: str):
            def run():
                for number in range(rounds):
                    key = f"{name}_{number}"
                    tuned = write_cache(self.dir / f"{name}.json", {key: ["R", number]})
                    self.tuner.clear_cache()
                    with autotune_phase(cpu_runner(), self.cache):
                        # Stands for a tactic tuned in this start only.
                        self.tuner.load_configs(str(tuned))
                return "done"

            return run

        self.assertEqual(run_forked(starts("a"), starts("b")), ["done", "done"])
        expected = {f"{name}_{n}": ["R", n] for name in "ab" for n in range(rounds)}
        self.assertEqual(read_entries(self.cache), {"user": ["R", 1], **expected})
        self.assertEqual(self.leftovers(), ["a.json", "b.json"])

    def test_damaged_files_are_set_aside_and_the_start_goes_on(self):
        for (name, content), (pp_size, tactic), late in DAMAGED_STARTS:
            with self.subTest(name, pp_size=pp_size, while_tuning=late):
                for path in self.dir.iterdir():
                    path.unlink()
                if not late:
                    self.cache.write_bytes(content)
                (warning,) = self.start(
                    pp_size=pp_size, while_tuning=content if late else None
                )
                self.assertIn(str(self.cache), warning.getMessage())
                (kept,) = self.leftovers()
                self.assertEqual((self.dir / kept).read_bytes(), content)
                self.assertIn(kept, warning.getMessage())
                self.assertEqual(self.in_tuning, tactic)
                # Nothing of the damaged file was loaded, so nothing is saved again.
                self.assertEqual(read_entries(self.cache), {})
                self.assertEqual(self.start(pp_size=pp_size), [])

    def test_a_damaged_file_that_cannot_be_moved_stops_nothing(self):
        caches = [self.dir / f"{number}.json" for number in range(len(DAMAGED_STARTS))]
        for cache, ((_, content), _, late) in zip(caches, DAMAGED_STARTS):
            cache.write_bytes(b"{}" if late else content)
            cache.chmod(0o666)
        # The one beside the module may be out of an unprivileged user's reach.
        self.corrected_bundle(SEEDED)
        self.addCleanup(self.dir.chmod, 0o755)
        self.dir.chmod(0o555)

        def starts():
            drop_privileges()
            found = []
            for cache, (damage, (pp_size, _), late) in zip(caches, DAMAGED_STARTS):
                content = damage[1] if late else None
                flashinfer_user_cache._warned.clear()
                warnings = self.start(cache, pp_size=pp_size, while_tuning=content)
                found.append(([w.getMessage() for w in warnings], self.in_tuning))
            return found

        (found,) = run_forked(starts)
        self.assertEqual(len(found), len(caches))
        for cache, case, (warnings, tactic) in zip(caches, DAMAGED_STARTS, found):
            (name, content), (pp_size, expected), late = case
            with self.subTest(name, pp_size=pp_size, while_tuning=late):
                self.assertEqual(len(warnings), 1, warnings)
                self.assertIn(str(cache), warnings[0])
                self.assertEqual(tactic, expected)
                self.assertEqual(cache.read_bytes(), content)

    def test_damage_by_a_writer_without_the_lock_stops_nothing(self):
        save = AutoTuner.save_configs
        for content in (b"\xff\xfe\x00", b"[" * 100_000):

            def damage_and_save(tuner, path, content=content):
                self.cache.write_bytes(content)
                save(tuner, path)

            with (
                self.subTest(content[:3]),
                patch.object(AutoTuner, "save_configs", damage_and_save),
            ):
                self.cache.unlink(missing_ok=True)
                flashinfer_user_cache._warned.clear()
                (warning,) = self.start()
                self.assertIn("cannot be kept", warning.getMessage())
                self.assertEqual(self.cache.read_bytes(), content)

    def test_a_journal_that_cannot_be_read_stops_nothing(self):
        journal = self.dir / f".{self.cache.name}.repair"
        nested = b'{"loaded": {"a": ' + b"[" * 100_000
        for content in (b"", b"[", b"{}", b"\xff", b'{"loaded": 1}', nested):
            with self.subTest(content[:20]):
                journal.write_bytes(content)
                self.assertEqual(self.start(), [])
                self.assertEqual(self.in_tuning, SEEDED)

    def test_a_file_that_cannot_be_read_now_stays(self):
        write_cache(self.cache, {"user": ["R", 1]})
        load = AutoTuner.load_configs

        def broken_disk(tuner, path):
            if path == str(self.cache):
                raise OSError(errno.EIO, "Input/output error")
            return load(tuner, path)

        with patch.object(AutoTuner, "load_configs", broken_disk):
            (warning,) = self.start()
        self.assertIn(str(self.cache), warning.getMessage())
        self.assertEqual(self.leftovers(), [])
        self.assertEqual(read_entries(self.cache), {"user": ["R", 1]})

    def test_a_second_writer_of_namespaced_records_is_still_an_error(self):
        write_cache(self.cache, {})
        with self.assertRaisesRegex(RuntimeError, "one writer per cache path"):
            with autotune_phase(cpu_runner(), self.cache):
                self.tuner.publish_namespaced_records("mega", {"a": 1})
                self.cache.write_text(json.dumps({"_generation": "another"}))

    def test_a_stricter_loader_does_not_stop_the_start(self):
        write_cache(self.cache, {"user": ["R", 1]})
        content = self.cache.read_bytes()
        load = AutoTuner.load_configs

        def strict(tuner, path):
            if path == str(self.cache):
                raise KeyError("a rule of a later FlashInfer")
            return load(tuner, path)

        with patch.object(AutoTuner, "load_configs", strict):
            (warning,) = self.start()
        self.assertIn(str(self.cache), warning.getMessage())
        (kept,) = self.leftovers()
        self.assertEqual((self.dir / kept).read_bytes(), content)


class TestCacheRoot(TacticsBase):
    """SGLANG_CACHE_DIR cannot hold the cache; the cache path is the real one."""

    def start(self, root: Path, reuse_cache: bool = True) -> list[str]:
        with (
            self.assertLogs("sglang.srt", "INFO") as logs,
            cpu_startup(reuse_cache=reuse_cache, **MEASURED_ARGS),
            get_parallel().override(tp_rank=0, pp_rank=0, dp_rank=None),
            envs.SGLANG_CACHE_DIR.override(str(root)),
            patch.object(torch.cuda, "get_device_capability", return_value=(10, 3)),
        ):
            for _ in range(2):
                with warmup.flashinfer_autotune_context(self.runner, run_lm_head=False):
                    self.in_tuning = self.call.lookup(self.tuner)
        return [r.getMessage() for r in logs.records if r.levelname == "WARNING"]

    def test_a_file_where_the_directory_should_be(self):
        root = self.dir / "file"
        root.write_text("")
        (warning,) = self.start(root)
        self.assertIn(str(root), warning)
        self.assertEqual(self.in_tuning, SEEDED)
        self.assertEqual(root.read_text(), "")

    def test_fresh_tuning_goes_to_a_temporary_directory(self):
        root = self.dir / "file"
        root.write_text("")
        enter_scope(self, patch.object(tempfile, "tempdir", str(self.dir)))
        (warning,) = self.start(root, reuse_cache=False)
        self.assertIn(str(root), warning)
        self.assertIsNone(self.in_tuning)

    def test_a_read_only_root_still_serves_its_cache(self):
        self.start(self.dir)
        (cache,) = self.dir.rglob("rank_*.json")
        write_cache(cache, {self.key: self.entry((192, 4))})
        before = cache.read_bytes()
        cache.chmod(0o444)
        self.addCleanup(cache.parent.chmod, 0o755)
        cache.parent.chmod(0o555)
        for parent in (self.dir, *cache.parent.relative_to(self.dir).parents):
            (self.dir / parent).chmod(0o755)

        def serve():
            drop_privileges()
            self.tuner.clear_cache()
            return self.start(self.dir), self.in_tuning

        def discard():
            drop_privileges()
            self.tuner.clear_cache()
            flashinfer_user_cache.discard_user_cache(cache)
            flashinfer_user_cache.load_user_cache(self.tuner, cache)
            return self.call.lookup(self.tuner)

        (warnings, tactic), discarded = run_forked(serve, discard)
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn(str(cache.parent), warnings[0])
        self.assertEqual(tactic, (192, 4))
        self.assertIsNone(discarded)
        self.assertEqual(cache.read_bytes(), before)


if __name__ == "__main__":
    unittest.main()
