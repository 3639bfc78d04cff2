"""status: what the checkout and build/engine hold, without changing or fetching."""

from serieslib.am import added_files, commits
from serieslib.engine import patch_digests, read_state, unsaved_work
from serieslib.envs import find_environment
from serieslib.gitio import Git
from serieslib.project import Project, mirror_files, patch_folder_problems


def status_lines(project: Project) -> list[str]:
    upstream = project.upstream
    digests = patch_digests(project)
    lines = [
        f"base     {upstream.name} {upstream.version}, "
        f"commit {upstream.base_commit[:12]}",
        f"patches  {len(digests)}",
    ]
    lines += [
        f"         {problem}" for problem in patch_folder_problems(project.patches)
    ]
    python = find_environment(project)
    lines.append(f"tests    {python or 'no environment yet: series.py test makes it'}")
    state = read_state(project.engine)
    if state is None:
        return [*lines, "engine   none yet: python3 scripts/series.py apply"]
    git = Git(project.engine)
    head = git.out("rev-parse", "HEAD")
    number = len(commits(git, state.base, head))
    tree = git.out("rev-parse", "HEAD^{tree}")
    lines.append(f"engine   {project.engine}, base + {number} commits")
    lines.append(f"tip      commit {head}, tree {tree}")
    if state.base != upstream.base_commit:
        lines.append("         made from another base: python3 scripts/series.py apply")
    elif state.patches != digests:
        lines.append(
            "         made from other patches: python3 scripts/series.py apply"
        )
    elif head != state.tip:
        lines.append("         not exported: python3 scripts/series.py export")
    else:
        lines.append("         in step with patches/")
    lines += [f"         {item}" for item in unsaved_work(git, state)]
    known = {
        path: data for path, (_, data) in added_files(git, state.base, head).items()
    }
    here = {
        path: file.read_bytes() for path, file in mirror_files(project.root).items()
    }
    differ = sorted(
        p for p in known.keys() | here.keys() if known.get(p) != here.get(p)
    )
    lines.append(
        f"mirror   {len(here)} files, " + ("OUT OF STEP" if differ else "in step")
    )
    return lines + [f"         {path}" for path in differ]
