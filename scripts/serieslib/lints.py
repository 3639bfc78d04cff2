"""The lints that upstream's pre-commit runs, over our files and the touched ones."""

import importlib
import subprocess
from pathlib import Path

from serieslib import pr_texts
from serieslib.am import added_files, touched_files
from serieslib.gitio import Git
from serieslib.project import MIRROR_ROOTS, Project

RUFF_RULES = "F401,F821,UP037"


def lint_all(project: Project, python: Path, base: str) -> list[tuple[str, list[str]]]:
    """(lint, problems) for each lint, in the order of upstream's configuration."""
    git = Git(project.engine)
    # The added files are linted in the mirror, so only upstream's own are left.
    added = added_files(git, base, "HEAD")
    touched = touched_files(git, base, "HEAD")
    engine = [p for p in touched if p.endswith(".py") and p not in added]
    own = [
        name for name in (*MIRROR_ROOTS, "scripts") if (project.root / name).is_dir()
    ]
    found = []
    for title, arguments in (
        ("ruff format", ["ruff", "format", "--check", "--quiet"]),
        ("ruff check", ["ruff", "check", f"--select={RUFF_RULES}", "--quiet"]),
        ("isort", ["isort", "--check-only", "--quiet"]),
    ):
        problems = _run(python, arguments, own, project.root)
        if engine:
            problems += _new_in_engine(python, arguments, engine, git, base)
        found.append((title, problems))
    found.append(("registered tests", registered_problems(project)))
    if (project.root / pr_texts.TEXTS).is_dir():
        problems = pr_texts.check_pr_texts(project.root)
        found.append(("pull-request texts", problems))
    return found


def registered_problems(project: Project) -> list[str]:
    """Upstream's rules for registered tests, over the mirror."""
    folders = [project.root / "test" / "registered", project.root / "python" / "sglang"]
    folders = [folder for folder in folders if folder.is_dir()]
    if not folders:
        return []
    try:
        rules = importlib.import_module("serieslib.registered_lint")
    except ModuleNotFoundError as error:
        if error.name != "serieslib.registered_lint":
            raise
        return ["scripts/serieslib/registered_lint.py is missing"]
    return rules.lint_paths(project.root, folders)


def _new_in_engine(
    python: Path, arguments: list[str], files: list[str], git: Git, base: str
) -> list[str]:
    """Findings in touched upstream files, less files that the base fails on too."""
    config = git.folder.parents[1]
    if not _run(python, arguments, files, git.folder, config):
        return []
    problems = []
    for path in files:
        here = _run(python, arguments, [path], git.folder, config)
        if here and not _base_fails(python, arguments, path, git, base):
            problems += here
    return problems


def _base_fails(
    python: Path, arguments: list[str], path: str, git: Git, base: str
) -> bool:
    """Whether the released file already fails this lint (read from stdin)."""
    source = git.run("cat-file", "blob", f"{base}:{path}")
    if source.returncode:
        return False
    name = "--filename" if arguments[0] == "isort" else "--stdin-filename"
    done = subprocess.run(
        [str(python), "-m", *arguments, name, path, "-"],
        input=source.stdout,
        capture_output=True,
        cwd=git.folder.parents[1],
    )
    return done.returncode != 0


def _run(
    python: Path,
    arguments: list[str],
    paths: list[str],
    folder: Path,
    config: Path | None = None,
) -> list[str]:
    """Lines that the lint prints; its settings come from the project's pyproject."""
    settings = []
    if config is not None:
        flag = "--settings-path" if arguments[0] == "isort" else "--config"
        settings = [flag, str(config / "pyproject.toml")]
    done = subprocess.run(
        [str(python), "-m", *arguments, *settings, *paths],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    if not done.returncode:
        return []
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines or [f"{' '.join(arguments)} exited {done.returncode} in {folder}"]
