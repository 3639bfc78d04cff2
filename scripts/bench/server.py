"""One SGLang server for one run: started (on one or more hosts) or attached to."""

import contextlib
import json
import os
import random
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tqdm import tqdm

from . import procs, rows
from .client import Client
from .config import Config
from .errors import BenchError, RunFailed
from .launcher import MARK
from .trees import Tree

LAUNCHER = Path(__file__).resolve().parent / "launcher.py"
END_PATIENCE = 10  # seconds for the status of a server that answers no more


def free_port(host: str) -> int:
    """A port nothing listens on now and that the kernel gives nobody by itself.

    A server binds its port only when its model is loaded. Until then a port from the
    kernel's own range can go to anything that asks for any port, its workers included.
    """
    # SGLang picks those of its workers above 20000.
    for port in random.SystemRandom().sample(range(10000, 20000), k=64):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise BenchError(
        f"no free port from 10000 to 19999 on {host}; set server.port to a free one"
    )


def refuse_busy_port(host: str, port: int) -> None:
    """Raises BenchError when something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BenchError(
                f"port {port} on {host} is busy ({error.strerror}): another server would"
                " answer instead of ours; end that server, or set server.port to another"
                " port, or to 0 for any free one"
            ) from error


class Server:
    """A context manager: a ready server inside, no trace of it afterwards.

    Raises BenchError for a busy port, RunFailed when the server does not get ready.
    """

    def __init__(
        self,
        config: Config,
        arm: str,
        *,
        label: str,
        tree: Tree | None,
        scratch: Path,
        cache: str | None = None,
        quiet: bool = False,
    ) -> None:
        self.config, self.arm, self.label = config, config.arms[arm], label
        self.arm_name, self.tree, self.scratch = arm, tree, scratch
        self.mark = procs.new_mark()
        self.port = 0
        self.cache_override = cache
        self.children: list[procs.Child] = []
        self.quiet = quiet
        self.identity: dict | None = None

    # Starting

    def cache(self, rank: int) -> str:
        """Folder of one host's autotune cache in this run; hosts may share a disk."""
        name = f"{self.label}-{self.mark[:12]}-node{rank}"
        return str(self.scratch / "caches" / name)

    @property
    def model(self) -> str:
        """A model's name, or the absolute path of a folder that is here."""
        model = self.arm.model or self.config.server.model
        path = Path(model).expanduser()
        return str(path.resolve()) if path.is_dir() else model

    @property
    def arguments(self) -> list[str]:
        """SGLang's own command line."""
        server = self.config.server
        return [
            "--model-path",
            self.model,
            "--host",
            server.host,
            "--port",
            str(self.port),
            "--enable-metrics",
            *server.arguments,
            *self.arm.arguments,
        ]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that this run sets for the engine."""
        own = {**self.config.server.environment, **self.arm.environment}
        if self.cache_override:
            own["SGLANG_CACHE_DIR"] = self.cache_override
        return {**own, "PYTHONPATH": self.tree.python_path}

    def command(self, rank: int) -> list[str]:
        """The launch command of one host."""
        server = self.config.server
        baseline = server.cache and os.path.abspath(os.path.expanduser(server.cache))
        cache = ["--cache", self.cache(rank)]
        if self.cache_override:
            cache = []
        elif baseline:
            cache += ["--baseline-cache", baseline]
        python = server.python or sys.executable
        launch = [python, "-P", str(LAUNCHER), "--nonce", self.mark, *cache]
        return [*launch, "--stop-with-stdin", "--", *self.arguments]

    def _start(self) -> None:
        host = self.config.server.host
        self.port = self.config.server.port or free_port(host)
        nodes = self.config.server.nodes
        if not nodes:
            refuse_busy_port(host, self.port)
        environment = {**os.environ, **self.variables}
        # Compiling thousands of files in every process of every run takes minutes.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        logs = self.scratch / "logs"
        stamp = f"{self.label}-{self.mark[:12]}"
        folder = self.scratch / "run"
        folder.mkdir(parents=True, exist_ok=True)
        if not nodes:
            self._spawn(self.command(0), logs / f"{stamp}.log", environment, folder)
        for rank, node in enumerate(nodes):
            settings = [f"{key}={value}" for key, value in self.variables.items()]
            engine = shlex.join(["env", *settings, *self.command(rank)])
            try:
                command = node.command.format(
                    engine=engine,
                    quoted=shlex.quote(f"{engine} --node-rank {rank}"),
                    rank=rank,
                    port=self.port,
                    label=self.label,
                    nonce=self.mark,
                )
            except (KeyError, IndexError, ValueError) as error:
                raise BenchError(
                    f"server.nodes[{rank}].command: {error!r}; use {{quoted}}, {{engine}},"
                    " {rank}, {port}, {label}, {nonce}, and {{ }} for plain braces"
                ) from error
            self._spawn(command, logs / f"{stamp}-node{rank}.log", os.environ, folder)

    def _spawn(self, command, log: Path, environment, folder: Path) -> None:
        child = procs.Child(
            command,
            log=log,
            environment=dict(environment),
            mark=self.mark,
            folder=folder,
        )
        self.children.append(child)

    def _wait(self) -> None:
        def ready() -> bool:
            self.refuse_dead()
            self._refuse_lost_port()
            return self.client.healthy()

        timeout = self.config.server.ready_timeout
        if not procs.wait_until(ready, timeout=timeout, interval=0.5):
            raise RunFailed(
                f"run {self.label}: the server was not ready after {timeout:g} s; raise"
                f" server.ready_timeout, or see its log{self._log_tails()}"
            )

    def __enter__(self) -> "Server":
        try:
            if self.arm.url:
                self.url = self.arm.url
                self.client = Client(self.url)
                if not self.client.healthy():
                    raise RunFailed(
                        f"no healthy server at {self.url}; start it, or correct"
                        f" arms.{self.arm_name}.url"
                    )
            else:
                self._start()
                self.url = f"http://{self._reachable_host()}:{self.port}"
                self.client = Client(self.url)
                self._say(f"{self.label}: starting the {self.arm_name} server")
                began = time.monotonic()
                self._wait()
                self._say(f"{self.label}: ready in {time.monotonic() - began:.0f} s")
            self.identity = self.client.identity()
            if self.children and (self.identity or {}).get("nonce") != self.mark:
                raise RunFailed(
                    f"run {self.label}: {self.url} is answered by a process that this"
                    " harness did not start; choose another server.port"
                )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _reachable_host(self) -> str:
        host = self.config.server.host
        return "127.0.0.1" if host in ("0.0.0.0", "::") else host

    def _say(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(text, file=sys.stderr)

    # While it runs

    def refuse_dead(self) -> None:
        """Raises RunFailed when a process of this server has ended."""
        for rank, child in enumerate(self.children):
            status = child.exit_status
            if status is not None:
                node = f" (node {rank})" if len(self.children) > 1 else ""
                raise RunFailed(
                    f"run {self.label}: the server{node} ended with status {status};"
                    f" its log:\n{child.tail()}\n(whole log: {child.log})"
                )

    @contextlib.contextmanager
    def refusing_dead(self) -> Iterator[None]:
        """Reports a failure inside as the server's end, where that is the cause.

        A server that ends closes its connections first: what talked to it fails
        moments before the process has a status.
        """

        def ended() -> bool:
            return any(child.exit_status is not None for child in self.children)

        try:
            yield
        except RunFailed:
            if self.children and not ended() and not self.client.healthy():
                procs.wait_until(ended, timeout=END_PATIENCE)
            self.refuse_dead()
            raise
        self.refuse_dead()

    def _refuse_lost_port(self) -> None:
        """Raises RunFailed when the port went to another process during start-up.

        SGLang itself would wait 12 minutes for an answer from that process.
        """
        lost = f", {self.port}): address already in use"  # uvicorn's words
        if any(lost in child.tail() for child in self.children):
            raise RunFailed(
                f"run {self.label}: another process took port {self.port} while the"
                " server was starting; run again, with server.port 0 or a port outside"
                f" the kernel's own range{self._log_tails()}"
            )

    def _log_tails(self) -> str:
        return "".join(f"\n{child.log}:\n{child.tail()}" for child in self.children)

    def node_identities(self) -> list[dict]:
        """What each started process printed about itself, in node order."""
        found = []
        for child in self.children:
            text = child.log.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if line.startswith(MARK)]
            if lines:
                found.append(json.loads(lines[-1].removeprefix(MARK)))
        return found

    def environment(self, load: dict, seed: int) -> rows.Environment:
        """Where this run ran, read from the serving process now.

        Raises RunFailed when a server that said it before no longer answers.
        """
        me = self.client.identity() or {}
        if self.identity and not me:
            raise RunFailed(
                f"run {self.label}: {self.url} answers no more; see the server's log"
                + self._log_tails()
            )
        keys = ("digest", "tree", "files", "pid", "host", "nonce")
        return rows.Environment(
            engine=rows.Engine(**{k: me[k] for k in keys}) if me else None,
            gpus=[msgspec.convert(gpu, rows.Gpu) for gpu in me.get("gpus", [])],
            driver=me.get("driver", ""),
            packages=me.get("packages", {}),
            python=me.get("python", ""),
            arguments=[] if self.arm.url else self.arguments,
            variables={} if self.arm.url else self.variables,
            load=load,
            seed=seed,
        )

    def identity_checks(self) -> list[rows.Check]:
        """Did the serving process run the tree this arm names, from a fresh cache?"""
        me = self.identity
        if me is None:
            detail = (
                f"{self.url} does not say which engine it is: start it with"
                " `python -P scripts/bench/launcher.py -- SERVER ARGUMENTS`"
            )
            return [rows.Check(name="engine", ok=False, detail=detail)]
        checks = []
        if self.tree is not None:
            same = me["digest"] == self.tree.digest
            detail = (
                f"serving process ran {me['tree']} (digest {me['digest'][:12]}),"
                f" arm {self.arm_name} means {self.tree.package}"
                f" ({self.tree.digest[:12]})"
            )
            checks.append(rows.Check(name="engine", ok=same, detail=detail))
        nodes = self.node_identities()
        if len(self.children) > 1:
            digests = {node["digest"] for node in nodes}
            same = len(nodes) == len(self.children) and digests == {me["digest"]}
            detail = (
                f"{len(nodes)} of {len(self.children)} nodes reported, digests "
                + ", ".join(sorted(d[:12] for d in digests))
            )
            checks.append(rows.Check(name="engine-nodes", ok=same, detail=detail))
        return checks

    # Ending

    def __exit__(self, *_exc) -> None:
        for child in reversed(self.children):
            child.end(self.config.server.stop_grace)
        for rank in range(len(self.children)):
            shutil.rmtree(self.cache(rank), ignore_errors=True)
