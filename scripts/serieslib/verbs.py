"""The verbs: each gets the project and its arguments, prints, returns the exit code."""

import argparse
import sys
from pathlib import Path

from serieslib import engine
from serieslib.am import Commit
from serieslib.check import check as run_check
from serieslib.checkout import apply_to_checkout
from serieslib.errors import FAILED, OK, USAGE, SeriesError
from serieslib.gitio import Git
from serieslib.install import install as run_install
from serieslib.install import uninstall as run_uninstall
from serieslib.project import Project
from serieslib.rebase import CONFLICT
from serieslib.rebase import rebase as run_rebase
from serieslib.status import status_lines
from serieslib.testrun import run_tests


def apply(project: Project, arguments: argparse.Namespace) -> int:
    """make build/engine: the pinned release with the series on top

    Run again, it changes nothing. It refuses to lose work in build/engine. With
    --checkout the series goes onto your own checkout of SGLang instead.
    """
    with project.lock():
        if arguments.checkout is not None:
            if arguments.discard:
                raise SeriesError(
                    "--discard is for build/engine alone",
                    "put your checkout's changes away yourself: `git stash -u`",
                    USAGE,
                )
            print(apply_to_checkout(project, arguments.checkout.resolve()))
            return OK
        tip, commits, made = engine.apply(project, discard=arguments.discard)
    _print_series(project, commits)
    git = Git(project.engine)
    print(f"tip   commit {tip}")
    print(f"      tree   {git.out('rev-parse', 'HEAD^{tree}')}")
    print(f"      {project.engine} {'is ready' if made else 'was already there'}")
    path = f"PYTHONPATH={project.engine / 'python'}"
    print("\ntest it:   python3 scripts/series.py test")
    print(f"serve it:  {path} python3 -m sglang.launch_server --model-path MODEL")
    return OK


def export(project: Project, arguments: argparse.Namespace) -> int:
    """write build/engine's commits to patches/ and the mirror

    Refuses an empty range, a message that git am would damage, and uncommitted
    changes; on any failure patches/ and the mirror stay as they were.
    """
    with project.lock():
        series, changed = engine.export(project, overwrite=arguments.overwrite)
    _print_series(project, series.commits)
    for path in changed:
        print(f"wrote {path}" if (project.root / path).exists() else f"removed {path}")
    print(f"{len(changed)} files changed" if changed else "nothing changed")
    return OK


def check(project: Project, arguments: argparse.Namespace) -> int:
    """prove that base + patches, patches/ and the mirror agree"""
    with project.lock():
        report = run_check(project)
    for title, problems in report.items:
        print(f"{'FAILED' if problems else 'ok    '} {title}")
        for problem in problems:
            print(f"    {problem}")
    for note in report.notes:
        print(f"note: {note}")
    if report.problems:
        print(
            f"\n{len(report.problems)} problems. fix: edit in build/engine and "
            "`python3 scripts/series.py export`, or `git checkout -- patches python test`"
        )
        return FAILED
    return OK


def test(project: Project, arguments: argparse.Namespace) -> int:
    """run the tool's tests, the series' registered CPU tests, check and the lints

    Makes the engine environment first (kept in your cache folder) and brings
    build/engine to the tip.
    """
    counts = run_tests(project, keyword=arguments.keyword, here=arguments.here)
    print(counts, flush=True)
    if counts.passed + counts.failed == 0:
        raise SeriesError("no test ran", "widen or leave out -k")
    return FAILED if counts.failed else OK


def status(project: Project, arguments: argparse.Namespace) -> int:
    """say what base, engine and mirror hold and what is out of step"""
    for line in status_lines(project):
        print(line)
    return OK


def install(project: Project, arguments: argparse.Namespace) -> int:
    """patch an installed release in place, without a checkout or git

    Only when every file that the series touches is as released. What is needed to
    take it out again is kept in the package's .dist-info, and RECORD is kept right, so
    `pip uninstall` still removes everything.
    """
    print(run_install(project, arguments.python))
    return OK


def uninstall(project: Project, arguments: argparse.Namespace) -> int:
    """put an installed release back, byte for byte"""
    print(run_uninstall(project, arguments.python))
    return OK


def rebase(project: Project, arguments: argparse.Namespace) -> int:
    """say how each patch stands on another release

    clean, 3-way (merged without help), already there, or conflict with its files. A
    patch in conflict is left out while the ones after it are tried. Exit code 1 when
    there is a conflict. Nothing is changed without --write.
    """
    with project.lock():
        version, standings = run_rebase(project, arguments.onto, arguments.write)
    print(f"on {project.upstream.name} {version}:")
    for standing in standings:
        print(f"{standing.verdict:<14} {standing.name}")
        for file in standing.files:
            print(f"               {file}")
        if standing.detail:
            print(standing.detail)
    if arguments.write:
        print(
            "\nwritten: UPSTREAM, patches/, the mirror and the release's pin in "
            "requirements.lock and pyproject.toml.\nnext: resolve the other pins anew, "
            "then `series.py apply --discard`, `check` and `test`"
        )
    return FAILED if any(s.verdict == CONFLICT for s in standings) else OK


def _print_series(project: Project, commits: list[Commit]) -> None:
    upstream = project.upstream
    print(f"base  {upstream.name} {upstream.version}, commit {upstream.base_commit}")
    for number, commit in enumerate(commits, 1):
        print(
            f"{number:04d}  {commit.subject} "
            f"({commit.files} files, +{commit.added} -{commit.removed})"
        )


VERBS = {
    "apply": apply,
    "export": export,
    "check": check,
    "test": test,
    "status": status,
    "install": install,
    "uninstall": uninstall,
    "rebase": rebase,
}

_PYTHON = (
    ("--python",),
    {
        "default": sys.executable,
        "metavar": "PY",
        "help": "the interpreter that runs SGLang (default: this one)",
    },
)

OPTIONS: dict[str, list[tuple[tuple[str, ...], dict]]] = {
    "apply": [
        (
            ("--checkout",),
            {"type": Path, "metavar": "DIR", "help": "your own SGLang checkout"},
        ),
        (
            ("--discard",),
            {
                "action": "store_true",
                "help": "drop uncommitted and unexported work in build/engine",
            },
        ),
    ],
    "export": [
        (
            ("--overwrite",),
            {
                "action": "store_true",
                "help": "replace patches and mirror files that were edited by hand",
            },
        ),
    ],
    "install": [_PYTHON],
    "uninstall": [_PYTHON],
    "rebase": [
        (
            ("--onto",),
            {"required": True, "metavar": "VERSION", "help": "0.5.22, or `latest`"},
        ),
        (
            ("--write",),
            {
                "action": "store_true",
                "help": "move the series there, if nothing conflicts",
            },
        ),
    ],
    "test": [
        (
            ("-k",),
            {
                "dest": "keyword",
                "metavar": "EXPR",
                "help": "only tests that match (pytest's -k); leaves check and lints out",
            },
        ),
        (
            ("--here",),
            {
                "action": "store_true",
                "help": "use this interpreter instead of the engine environment",
            },
        ),
    ],
}
