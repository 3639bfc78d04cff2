"""check: base, am, re-export, compare; mirror; messages; every patch on its own."""

from dataclasses import dataclass, field
from pathlib import Path

from serieslib.am import PatchStopped, apply_patches, commits
from serieslib.base import base_repository
from serieslib.engine import finish_interrupted
from serieslib.envs import find_environment
from serieslib.export import format_series, mirror_of, seal_text
from serieslib.gitio import scratch_checkout
from serieslib.imports import compile_problems, import_problems
from serieslib.messages import message_problem
from serieslib.project import Project, mirror_files, patch_folder_problems

Mirror = dict[str, tuple[str, bytes]]


@dataclass
class Report:
    """What was checked, in order: (title, problems); ``notes`` are not failures."""

    items: list[tuple[str, list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, problems: list[str]) -> None:
        self.items.append((title, problems))

    @property
    def problems(self) -> list[str]:
        return [problem for _, found in self.items for problem in found]


def check(project: Project) -> Report:
    """Never changes anything but caches under build/ and the user's cache folder."""
    finish_interrupted(project)
    report = Report()
    strays = patch_folder_problems(project.patches)
    report.add("patches/ holds the numbered patches alone", strays)
    source = base_repository(project)
    report.add("the base commit is the pinned one", [])
    patches = sorted(project.patches.glob("[0-9]*.patch"))
    report.add("each patch has its exported sha256", _seal_problems(project, patches))
    base = project.upstream.base_commit
    with project.scratch("check") as scratch:
        tree = scratch_checkout(source, scratch / "tree", base)
        try:
            tip = apply_patches(tree, patches, fix="restore it or export again")
        except PatchStopped as error:
            report.add("git am applies the series", [str(error).split("\n  fix:")[0]])
            return report
        report.add("git am applies the series", [])
        again = format_series(tree, base, tip, scratch) if patches else {}
        report.add("a new export gives the same bytes", _differences(patches, again))
        mirror = mirror_of(tree, base, tip)
        report.add(
            "the mirror is what the series adds", _mirror_problems(project, mirror)
        )
        found = commits(tree, base)
        report.add(
            "each message survives git am and carries its trailer",
            [
                f"{number:04d} `{commit.subject}`: {problem[0]}; {problem[1]}"
                for number, commit in enumerate(found, 1)
                if (problem := message_problem(commit))
            ],
        )
        tips = [commit.id for commit in found]
        compiled = compile_problems(tree, base, tips)
        report.add("after each patch the touched files compile", compiled)
        python = find_environment(project)
        if python is None:
            report.notes.append(
                "imports after each patch: not run, there is no engine environment yet "
                "(`python3 scripts/series.py test` makes it)"
            )
        else:
            problems, notes = import_problems(project, tree, base, tips, python)
            report.add("after each patch the touched modules import", problems)
            report.notes += notes
    return report


def _seal_problems(project: Project, patches: list[Path]) -> list[str]:
    here = seal_text({path.name: path.read_bytes() for path in patches}).splitlines()
    try:
        sealed = project.seal.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        sealed = []
    wrong = [line.partition("  ")[2] for line in here if line not in sealed]
    wrong += [f"{project.seal.name}: {line!r}" for line in sealed if line not in here]
    return [f"{name}: is not as `series.py export` wrote it" for name in wrong]


def _differences(patches: list[Path], again: dict[str, bytes]) -> list[str]:
    here = {path.name: path for path in patches}
    problems = []
    for name in sorted(here.keys() | again.keys()):
        if name not in again:
            problems.append(f"patches/{name}: a new export has no patch of that name")
        elif name not in here:
            problems.append(f"patches/{name}: missing, a new export writes it")
        elif (data := here[name].read_bytes()) != again[name]:
            problems.append(f"patches/{name}:{_first(data, again[name])}: differs")
    return problems


def _first(one: bytes, two: bytes) -> int:
    """1-based number of the first line that differs."""
    left, right = one.split(b"\n"), two.split(b"\n")
    for number, (a, b) in enumerate(zip(left, right), 1):
        if a != b:
            return number
    return min(len(left), len(right)) + 1


def _mirror_problems(project: Project, mirror: Mirror) -> list[str]:
    here = mirror_files(project.root)
    problems = [f"{path}: no patch adds it" for path in sorted(here.keys() - mirror)]
    for path, (mode, data) in sorted(mirror.items()):
        file = here.get(path)
        if file is None or not file.is_file():
            problems.append(f"{path}: missing, the series adds it")
        elif file.read_bytes() != data:
            line = _first(file.read_bytes(), data)
            problems.append(f"{path}:{line}: differs from what the series adds")
        elif bool(file.stat().st_mode & 0o100) != (mode == "100755"):
            problems.append(f"{path}: the executable bit differs")
    return problems
