"""Bisectability: after each single patch the touched modules compile and import."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

from serieslib.am import touched_files
from serieslib.fetch import writable_folder
from serieslib.gitio import Git, tail
from serieslib.project import Project, cache_root

# What most of the package imports first; loaded once and shared by every step.
PRELOAD = ["torch", "triton", "transformers", "torchvision", "flashinfer", "cutlass"]
CACHED_STEPS = 1000
WORKER = Path(__file__).with_name("import_worker.py")


def compile_problems(git: Git, base: str, tips: list[str]) -> list[str]:
    """`patch N: file:line: error` for every touched .py file that does not compile."""
    problems = []
    previous = base
    for number, tip in enumerate(tips, 1):
        for path in touched_files(git, previous, tip):
            if path.endswith(".py"):
                source = git.raw("cat-file", "blob", f"{tip}:{path}")
                try:
                    compile(source, path, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as error:
                    line = getattr(error, "lineno", None) or 1
                    problems.append(
                        f"patch {number:04d}: {path}:{line}: does not compile: {error}"
                    )
        previous = tip
    return problems


def import_problems(
    project: Project, git: Git, base: str, tips: list[str], python: Path
) -> tuple[list[str], list[str]]:
    """(problems, notes); steps that passed before with the same bytes are not run."""
    cache_file = writable_folder(cache_root(), project.build) / "imports-ok.json"
    passed = _read_cache(cache_file)
    steps, keys = [], {}
    previous = base
    for number, tip in enumerate(tips, 1):
        step = _step(git, base, previous, tip, f"patch {number:04d}")
        previous = tip
        if step["modules"]:
            text = json.dumps([step["modules"], step["sources"], str(python)])
            keys[step["name"]] = hashlib.sha256(text.encode()).hexdigest()
            steps.append(step)
    problems: list[str] = []
    wanted = [step for step in steps if keys[step["name"]] not in passed]
    for result in _run(python, wanted) if wanted else []:
        if "error" in result:
            return [result["error"]], []
        name = result["name"]
        problems += [f"{name}: import {m}: {e}" for m, e in result["failed"].items()]
        if not result["failed"]:
            passed[keys[name]] = [
                f"{name}: import {m}: fails at the release too on this machine: {e}"
                for m, e in result["skipped"].items()
            ]
    _write_cache(cache_file, passed)
    used = [passed[key] for key in keys.values() if key in passed]
    return problems, [note for notes in used for note in notes]


def _step(git: Git, base: str, previous: str, tip: str, name: str) -> dict:
    """What the worker needs to import a patch's modules as they are at ``tip``."""
    sources = {}
    for path in touched_files(git, base, tip):
        if _module(path):
            source = git.raw("cat-file", "blob", f"{tip}:{path}").decode()
            sources[path.removeprefix("python/")] = source
    changed = [path for path in touched_files(git, previous, tip) if _module(path)]
    return {
        "name": name,
        "modules": [_module(path) for path in changed],
        "at_base": [
            _module(path)
            for path in changed
            if git.run("cat-file", "-e", f"{base}:{path}").returncode == 0
        ],
        "sources": sources,
    }


def _module(path: str) -> str | None:
    """Dotted name of a file of the package; None for tests, data and scripts."""
    if not (path.startswith("python/sglang/") and path.endswith(".py")):
        return None
    parts = path.removeprefix("python/").removesuffix(".py").split("/")
    if parts[-1] == "__main__" or not all(part.isidentifier() for part in parts):
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _run(python: Path, steps: list[dict]) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    jobs = min(2, os.cpu_count() or 1)
    order = {"jobs": jobs, "preload": PRELOAD, "steps": steps}
    done = subprocess.run(
        [str(python), "-I", str(WORKER)],
        input=json.dumps(order).encode(),
        capture_output=True,
        env=env,
    )
    if done.returncode:
        return [{"error": f"the import worker failed:\n{tail(done.stderr)}"}]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _read_cache(path: Path) -> dict[str, list[str]]:
    """Key of each step that passed -> its notes; empty when unreadable."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _write_cache(path: Path, passed: dict[str, list[str]]) -> None:
    newest = dict(list(passed.items())[-CACHED_STEPS:])
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(newest), encoding="utf-8")
    os.replace(temporary, path)
