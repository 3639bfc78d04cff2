"""What all serving verbs share: configuration, trees, rows, and which runs are left."""

import argparse
import contextlib
import datetime
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from . import config as configs
from . import procs, rows, trees
from .errors import BenchError, RunFailed
from .rows import Environment, Row
from .server import Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that runs servers."""
    parser.add_argument("config", type=Path, help="experiment file (TOML)")
    parser.add_argument("--rows", type=Path, help="raw rows file (JSON lines)")
    parser.add_argument("--scratch", type=Path, help="folder for trees, caches, logs")
    parser.add_argument(
        "--again",
        action="store_true",
        help="repeat finished runs that failed a check (others are never repeated)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ARM=PATH",
        help="engine folder of an arm, instead of the file's",
    )


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Experiment:
    """An experiment file with its trees and the rows it has so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.config = configs.load(options.config)
        if options.scratch:
            self.config.scratch = str(options.scratch)
        for pair in options.set:
            arm, _, path = pair.partition("=")
            if arm not in self.config.arms or not path:
                raise BenchError(
                    f"--set {pair}: write ARM=PATH with one of the arms"
                    f" {', '.join(self.config.arms)}"
                )
            self.config.arms[arm].engine = path
        if "/" in self.config.server.python:  # servers start in another folder
            python = os.path.expanduser(self.config.server.python)
            self.config.server.python = os.path.abspath(python)
        self.scratch = Path(self.config.scratch).expanduser().resolve()
        default = self.config.rows or self.scratch / f"{self.config.experiment}.jsonl"
        self.path = Path(options.rows or default).expanduser()
        self.again = options.again
        self.digest = configs.digest(self.config)
        self.rows = self._read()
        self.before = len(self.rows)  # rows of earlier commands
        self.trees: dict[str, trees.Tree] = {}

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        found, bad = rows.read(self.path)
        for line in bad:
            print(f"warning: {line}; that run counts as not done")
        foreign = [r for r in found if r.config_sha256 != self.digest]
        if foreign:
            raise BenchError(
                f"{self.path} holds runs of another configuration (run"
                f" {foreign[0].label}); name another file with --rows, or move it away"
            )
        return found

    @contextlib.contextmanager
    def running(self, arms: list[str]) -> Iterator[None]:
        """Resolves the arms' trees and keeps a second harness off the rows file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.scratch.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.scratch).close()
            lock = open(f"{self.path}.lock", "w")
        except OSError as error:
            raise BenchError(
                f"cannot write to {error.filename or self.scratch}: {error.strerror};"
                " choose a --rows file and a --scratch folder that can be written"
            ) from error
        with lock, procs.orderly_signals():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BenchError(
                    f"another bench works on {self.path}; let it end, or name another"
                    " file with --rows"
                ) from None
            self.trees = trees.resolve_all(self.config, arms)
            self._refuse_changed_trees()
            yield

    def _refuse_changed_trees(self) -> None:
        for row in self.rows:
            tree = self.trees.get(row.arm)
            engine = row.environment.engine
            if tree and engine and engine.digest != tree.digest and row.passed:
                raise BenchError(
                    f"run {row.label} in {self.path} ran digest {engine.digest[:12]},"
                    f" arm {row.arm} is {tree.digest[:12]} now; name another file with"
                    " --rows, or put the old tree back"
                )

    def finished(self, kind: str, label: str) -> Row | None:
        """The last formal row of a run that need not be repeated."""
        for index, row in reversed(list(enumerate(self.rows))):
            if row.kind == kind and row.label == label and row.formal:
                again = self.again and index < self.before
                if row.failed or (again and not row.passed):
                    return None
                return row
        return None

    def add(self, row: Row) -> None:
        """Writes a row at once."""
        rows.append(self.path, row)
        self.rows.append(row)

    def row(self, kind: str, arm: str, *, label: str, **fields) -> Row:
        """A row of this experiment with what is the same in all of them."""
        fields.setdefault("environment", Environment())
        return Row(
            kind=kind,
            experiment=self.config.experiment,
            config_sha256=self.digest,
            label=label,
            arm=arm,
            baseline=arm == self.config.baseline,
            started=now(),
            **fields,
        )

    def server(self, arm: str, label: str, **options) -> Server:
        """A server of one arm, not yet started."""
        return Server(
            self.config,
            arm,
            label=label,
            tree=self.trees.get(arm),
            scratch=self.scratch,
            **options,
        )

    def check_twins(self, row: Row) -> None:
        """Adds a check: no arm that should differ reported this row's digest."""
        engine = row.environment.engine
        if engine is None:
            return
        arms = self.config.arms
        for other in self.rows:
            theirs = other.environment.engine
            stated = (
                arms[row.arm].same_tree_as == other.arm
                or other.arm in arms
                and arms[other.arm].same_tree_as == row.arm
            )
            if other.arm == row.arm or theirs is None or stated:
                continue
            if theirs.digest == engine.digest:
                detail = (
                    f"{row.label} and {other.label} were served by one tree (digest"
                    f" {engine.digest[:12]}), though arms {row.arm} and {other.arm}"
                    " should differ"
                )
                row.checks.append(
                    rows.Check(name="arms-differ", ok=False, detail=detail)
                )
                return
        row.checks.append(
            rows.Check(
                name="arms-differ", ok=True, detail=f"digest {engine.digest[:12]}"
            )
        )


Probe = Callable[[Experiment, str, Server], Row]


def run_probe(experiment: Experiment, probe: Probe, arm: str, server: Server) -> Row:
    """One probe on a ready server: its row is written, also when it failed."""
    kind = probe.__module__.rpartition(".")[2]
    try:
        with server.refusing_dead():
            row = probe(experiment, arm, server)
            section = msgspec.to_builtins(getattr(experiment.config, kind))
            row.environment = server.environment(section, section.get("seed", 0))
        row.checks += server.identity_checks()
        experiment.check_twins(row)
    except RunFailed as error:
        row = experiment.row(kind, arm, label=arm, failed=str(error))
    experiment.add(row)
    return row


def probe_arms(experiment: Experiment, probe: Probe) -> list[Row]:
    """Runs a probe once for every arm that has no finished row of it."""
    kind = probe.__module__.rpartition(".")[2]
    if getattr(experiment.config, kind) is None:
        raise BenchError(f"the experiment file has no [{kind}] section; add one")
    order = [experiment.config.baseline]
    order += [arm for arm in experiment.config.arms if arm not in order]
    with experiment.running(order):
        for arm in order:
            if experiment.finished(kind, arm) is None:
                try:
                    with experiment.server(arm, f"{kind}-{arm}") as server:
                        run_probe(experiment, probe, arm, server)
                except RunFailed as error:
                    experiment.add(
                        experiment.row(kind, arm, label=arm, failed=str(error))
                    )
    return [row for arm in order if (row := last(experiment, kind, arm))]


def last(experiment: Experiment, kind: str, label: str) -> Row | None:
    """The newest row of a run, finished or not."""
    found = [r for r in experiment.rows if (r.kind, r.label) == (kind, label)]
    return found[-1] if found else None
