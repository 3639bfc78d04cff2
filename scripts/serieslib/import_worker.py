"""Run inside the engine environment: import modules as they are at each commit.

stdin: {"jobs": n, "preload": [...], "steps": [{"name", "modules", "sources": {path: text}}]} where
``sources`` are the files (relative to the import root) that differ from the installed
release. One process loads the heavy third-party packages once; every step then runs in
a fork of it, with those sources laid over the installed package in memory.
stdout: one JSON object a step: {"name", "failed": {module: error}, "skipped": {...}}.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback


class Overlay(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serve modules from ``sources``: path -> text."""

    def __init__(self, sources):
        self.sources = sources

    def find_spec(self, fullname, path=None, target=None):
        stem = fullname.replace(".", "/")
        for origin, package in ((f"{stem}/__init__.py", True), (f"{stem}.py", False)):
            if origin not in self.sources:
                continue
            spec = importlib.machinery.ModuleSpec(
                fullname, self, origin=origin, is_package=package
            )
            if package:
                spec.submodule_search_locations = [
                    os.path.join(entry, stem) for entry in sys.path
                ]
            spec.has_location = True
            return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        origin = module.__spec__.origin
        module.__file__ = next(
            (
                os.path.join(entry, origin)
                for entry in sys.path
                if os.path.isdir(os.path.join(entry, origin.split("/")[0]))
            ),
            origin,
        )
        exec(compile(self.sources[origin], origin, "exec"), module.__dict__)

    def get_source(self, fullname):
        spec = self.find_spec(fullname)
        return spec and self.sources[spec.origin]


def import_all(modules, sources):
    """module -> last line of the error, for those that do not import."""
    if sources:
        sys.meta_path.insert(0, Overlay(sources))
        # Triton reads the source of a kernel when it is decorated.
        import linecache

        for origin, text in sources.items():
            lines = text.splitlines(keepends=True)
            linecache.cache[origin] = (len(text), None, lines, origin)
    failed = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            failed[name] = f"{type(error).__name__}: {error} ({where})"
    return failed


def fork_step(modules, sources):
    """Start `import_all` in a child; returns (pid, pipe to read its JSON from)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    failed = import_all(modules, sources)
    with os.fdopen(writer, "w") as pipe:
        pipe.write(json.dumps(failed))
    os._exit(0)


def finish(child):
    pid, reader = child
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"(process)": "died while importing"}


def reason(error):
    """An error without the place it was raised at."""
    return error and error.rpartition(" (")[0]


def run_steps(steps, jobs):
    waiting, running = list(steps), []
    while waiting or running:
        while waiting and len(running) < jobs:
            step = waiting.pop(0)
            running.append((step, fork_step(step["modules"], step["sources"])))
        step, child = running.pop(0)
        failed = finish(child)
        skipped = {}
        if failed:
            # What does not import at the release either says nothing about the patch.
            known = [name for name in failed if name in set(step.get("at_base", []))]
            at_base = finish(fork_step(known, {})) if known else {}
            for name in known:
                if reason(at_base.get(name)) == reason(failed[name]):
                    skipped[name] = failed.pop(name)
        print(
            json.dumps({"name": step["name"], "failed": failed, "skipped": skipped}),
            flush=True,
        )


if __name__ == "__main__":
    order = json.load(sys.stdin)
    for heavy in order["preload"]:
        try:
            importlib.import_module(heavy)
        except Exception:
            pass  # a step that needs it reports it
    run_steps(order["steps"], order["jobs"])
