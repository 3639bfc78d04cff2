"""Do the pull-request texts say what the patches and the measurements say?

    python scripts/serieslib/pr_texts.py [--root DIR]

Reads DIR/patches/NNNN-*.patch, DIR/docs/pull-requests/NNNN.md and the docs/ files
that a text cites. One line a finding, ``file:line: rule: what to do``. Exit 0 clean,
1 findings, 2 usage.
"""

import argparse
import email
import email.policy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from serieslib.registered_source import TESTS, LintError, read_source

TEXTS = "docs/pull-requests"
# Upstream's template, less the process section that its maintainers fill in.
HEADINGS = (
    "Motivation",
    "Modifications",
    "Accuracy Tests",
    "Speed Tests and Profiling",
    "Checklist",
)
MEASURED = ("Accuracy Tests", "Speed Tests and Profiling")
_UNITS = r"us|ms|s|ns|%|[kMGT]i?B(?:/s)?|tok/s|tokens/s|TFLOPS|nats?"
_NUMBER = r"\d+(?:[,_]\d{3})*(?:\.\d+)?"
# "x" as a unit is written without a space: "4 x 16" is a product.
_CLAIM = re.compile(rf"(?<![\w.,/])({_NUMBER})(?:x|\s?(?:{_UNITS}))(?![\w/])")
_PLAIN_NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}")
_CITED = re.compile(r"docs/[\w./-]+\.md")
_BOX = re.compile(r"^[-*] \[[ xX]\] \S")
_PLACEHOLDER = re.compile(r"\b(?:TODO|TBD|FIXME|XXX)\b|@@\w+@@")
_CODE = re.compile(r"`[^`]*`")
_ARROW = re.compile(rf"({_NUMBER})(?:\s?(?:{_UNITS}))?\s+->\s+({_NUMBER})")
# Up to a full stop, a semicolon, a blank line, a list item or a table row.
_CLAUSE = re.compile(r"(?:[^.;\n]|[.;](?!\s|$)|\n(?!\s*\n|[-*|] ?))+")
_RAN_ON = re.compile(r"\b(?:measured|ran|run)\s+on\b.*", re.I | re.S)
_NOT_RAN = re.compile(
    r"\b(?:not|nothing|never|no|neither)(?:\s+\S+){0,3}?\s+(?:measured|ran|run)\b", re.I
)
_DEVICES = {
    "Blackwell": re.compile(r"\b(?:Blackwell|G?B[23]00|B30Z|SM_?10[03])\b", re.I),
    "Hopper": re.compile(r"\b(?:Hopper|G?H[12]00|SM_?90)\b", re.I),
    "AMD": re.compile(r"\b(?:AMD|ROCm|MI\d{3}X?)\b", re.I),
    "XPU": re.compile(r"\bXPU\b", re.I),
}

Found = Iterator[tuple[int, str, str]]


class Patch(NamedTuple):
    """What a reviewer reads of one patch: its message and the files it leaves."""

    name: str
    subject: str
    body: str
    files: tuple[str, ...]


class Text(NamedTuple):
    rel: str
    lines: list[str]
    sections: dict[str, tuple[int, list[str]]]  # heading -> (line, its lines)
    title: tuple[int, str]

    def numbered(self, *headings: str) -> Iterator[tuple[int, str]]:
        for heading in headings:
            start, lines = self.sections.get(heading, (0, []))
            yield from enumerate(lines, start + 1)


def read_patch(path: Path) -> Patch:
    """Subject, message body and remaining files of one format-patch mail."""
    mail = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
    subject = re.sub(r"^\[PATCH[^\]]*\] ", "", str(mail["subject"]))
    content = mail.get_content().replace("\r\n", "\n")
    body, _, diff = content.partition("\n---\n")
    files = re.findall(r"^\+\+\+ b/(.+?)\t?$", diff, re.MULTILINE)
    return Patch(name=path.name, subject=subject, body=body, files=tuple(files))


def read_text(root: Path, path: Path) -> Text:
    """Split one Markdown text by its level-two headings; fences are no headings."""
    lines = path.read_text(encoding="utf-8").splitlines()
    sections: dict[str, tuple[int, list[str]]] = {}
    title, current, fenced = (1, ""), None, False
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        if not fenced and line.startswith("# ") and not title[1]:
            title = (number, line[2:].strip())
        elif not fenced and line.startswith("## "):
            current = line[3:].strip()
            sections.setdefault(current, (number, []))
        elif current is not None:
            sections[current][1].append(line)
    rel = path.relative_to(root).as_posix()
    return Text(rel=rel, lines=lines, sections=sections, title=title)


def expected_title(subject: str) -> str:
    """``area: do this`` as upstream writes it, ``[Area] Do this``."""
    area, _, summary = subject.partition(": ")
    return f"[{area}] {summary}"


def check_title(text: Text, patch: Patch) -> Found:
    line, title = text.title
    wanted = expected_title(patch.subject)
    if title.casefold() != wanted.casefold():
        yield line, "title", f"write it as '# {wanted}', the commit's subject"
    elif any(part[:1].islower() for part in title.strip("[").split("] ", 1)):
        yield line, "title", "start the area and the summary with a capital letter"


def check_headings(text: Text, patch: Patch) -> Found:
    at = [list(text.sections).index(h) for h in HEADINGS if h in text.sections]
    for heading in HEADINGS:
        if heading not in text.sections:
            yield 1, "headings", f"add the section '## {heading}'"
        elif not any(line.strip() for line in text.sections[heading][1]):
            line = text.sections[heading][0]
            yield line, "headings", f"fill {heading!r}, or say why there is nothing"
    if at != sorted(at):
        yield 1, "headings", f"put the sections in this order: {', '.join(HEADINGS)}"
    start, lines = text.sections.get("Checklist", (1, []))
    if "Checklist" in text.sections and not any(map(_BOX.match, lines)):
        yield start, "headings", "give the checklist items, '- [x] ...' or '- [ ] ...'"


def check_placeholders(text: Text, patch: Patch) -> Found:
    for line, words in enumerate(text.lines, 1):
        found = _PLACEHOLDER.search(words)
        if found:
            yield line, "placeholder", f"{found[0]}: fill it in, or remove the line"
    found = _PLACEHOLDER.search(patch.subject + "\n" + patch.body)
    if found:
        yield 1, "placeholder", f"{found[0]} in the message of {patch.name}: fill it in"


def check_not_measured(text: Text, patch: Patch) -> Found:
    for heading in MEASURED:
        start, lines = text.sections.get(heading, (1, []))
        if lines and "not measured" not in " ".join(" ".join(lines).split()).lower():
            yield start, "not-measured", "say what was 'not measured' and where"


def _normal(number: str) -> str:
    return number.replace(",", "").replace("_", "")


def _claims(text: Text) -> Iterator[tuple[int, str, str]]:
    """(line, number, as written): numbers with a unit, and numbers in result tables."""
    measured = {number for number, _ in text.numbered(*MEASURED)}
    for line, words in enumerate(text.lines, 1):
        words = _CODE.sub("", words)
        if words.startswith("|") and line in measured:
            for cell in words.strip().strip("|").split("|")[1:]:
                for found in _PLAIN_NUMBER.finditer(cell):
                    yield line, found[0], found[0]
        else:
            for found in _CLAIM.finditer(words):
                yield line, found[1], found[0]


def _cited(text: Text, root: Path) -> dict[str, str]:
    """The docs/ files that the text names and that exist; texts prove no texts."""
    names = {name for words in text.lines for name in _CITED.findall(words)}
    names = {n for n in names if not n.startswith(TEXTS) and (root / n).is_file()}
    return {n: (root / n).read_text(encoding="utf-8") for n in sorted(names)}


def _numbers(words: str) -> list[str]:
    return [_normal(found[0]) for found in _PLAIN_NUMBER.finditer(words)]


def _rows(words: str) -> list[str]:
    return [line for line in words.splitlines() if line.startswith("|")]


def _in_one(numbers: list[str], sources: list[str]) -> bool:
    """Whether one source has all the numbers in this order, others between them."""

    def holds(source: str) -> bool:
        rest = iter(_numbers(source))
        return all(number in rest for number in numbers)

    return any(map(holds, sources))


def check_numbers(text: Text, patch: Patch, root: Path) -> Found:
    for line, words in enumerate(text.lines, 1):
        for name in _CITED.findall(words):
            if not (root / name).is_file():
                yield line, "numbers", f"{name} does not exist: cite the file that does"
    cited = _cited(text, root)
    known = set(_numbers("\n".join([patch.subject, patch.body, *cited.values()])))
    places = "the commit message" + "".join(f" or {name}" for name in cited)
    wrong, tables = set(), set()
    for line, number, written in _claims(text):
        if text.lines[line - 1].startswith("|"):
            tables.add(line)
        if _normal(number) not in known:
            wrong.add(line)
            yield line, "numbers", f"{written} is not in {places}: correct it or cite"
    rows = [row for words in cited.values() for row in _rows(words)]
    rows += patch.body.split("\n\n")
    for line in tables - wrong:
        if not _in_one(_numbers(_CODE.sub("", text.lines[line - 1])), rows):
            todo = f"no row of {places} has this row's numbers in this order"
            yield line, "numbers", f"{todo}: correct it or cite"


def check_message(text: Text, patch: Patch, root: Path) -> Found:
    """The numbers of the message's measured paragraphs are the text's or its docs'."""
    sources = ["\n".join(text.lines), *_cited(text, root).values()]
    known = set(_numbers("\n".join(sources)))
    rows = [row for words in sources for row in _rows(words)]
    for paragraph in patch.body.split("\n\n"):
        if not (_CLAIM.search(paragraph) or "measured" in paragraph.lower()):
            continue
        lost = [number for number in _numbers(paragraph) if number not in known]
        lost += [
            " ".join(found[0].split())
            for found in _ARROW.finditer(paragraph)
            if not {*map(_normal, found.groups())} & {*lost}
            and not _in_one([*map(_normal, found.groups())], rows)
        ]
        for number in dict.fromkeys(lost):
            todo = f"{number} of the commit message is not in this text or its docs"
            yield 1, "message", f"{todo}: correct one, or cite the docs file"


def _ran_on(words: str) -> Iterator[tuple[int, str, bool]]:
    """(line, device, whether it ran) for each clause that says so or the contrary."""
    for clause in _CLAUSE.finditer(words):
        what = clause[0].strip()
        line = words.count("\n", 0, clause.start() + clause[0].find(what)) + 1
        excepts = _NOT_RAN.search(what) is not None
        claim = _RAN_ON.search(what)
        named = what if excepts else claim[0] if claim else ""
        for device, names in _DEVICES.items():
            if names.search(named) and not what.startswith("- [ ]"):
                yield line, device, not excepts


def check_devices(text: Text, patch: Patch) -> Found:
    """Text and message except the same devices, and claim no device that one excepts."""
    ours, theirs = list(_ran_on("\n".join(text.lines))), list(_ran_on(patch.body))
    here, there = ({d for _, d, ran in says if not ran} for says in (ours, theirs))
    for device in sorted(here ^ there):
        one, other = ("text", "message") if device in here else ("message", "text")
        todo = f"the {one} says not measured on {device}, the {other} does not"
        yield 1, "devices", f"{todo}: say it in both"
    claimed = [(line, device) for line, device, ran in ours if ran]
    claimed += [(1, device) for _, device, ran in theirs if ran]
    for line, device in claimed:
        if device in here | there:
            yield line, "devices", f"says measured on {device} and not: correct one"


def _rerun_specs(text: Text) -> Iterator[tuple[int, str]]:
    for line, words in enumerate(text.lines, 1):
        if words.startswith("/rerun-test"):
            for spec in words.split()[1:]:
                yield line, spec


def _rerun_problem(root: Path, patch: Patch, file: str, selector: str) -> str | None:
    if file not in patch.files:
        return f"{file} is not in {patch.name}: name a test that the patch adds"
    if not (root / file).is_file():
        return f"{file} is missing from the tree: export the series again"
    try:
        source = read_source(root, file, None)
    except SyntaxError as error:
        return f"{file} does not parse: {error}"
    if not source.registrations:
        return f"{file} is not registered: add a register_*_ci(...) to it"
    for name in filter(None, selector.split(".")):
        words = (root / file).read_text(encoding="utf-8")
        if not re.search(rf"^\s*(?:class|def) {re.escape(name)}\b", words, re.M):
            return f"{file} has no {name}: correct the selector"
    return None


def check_rerun(text: Text, patch: Patch, root: Path) -> Found:
    specs = list(_rerun_specs(text))
    named = set()
    for line, spec in specs:
        file, _, selector = spec.partition("::")
        named.add(file)
        problem = _rerun_problem(root, patch, file, selector)
        if problem:
            yield line, "rerun", problem
    tests = {file for file in patch.files if file.startswith(TESTS + "/")}
    tests = {file for file in tests if file.endswith(".py") and "/test_" in file}
    if tests and not specs:
        yield len(text.lines), "rerun", f"add '/rerun-test {' '.join(sorted(tests))}'"
    elif tests - named:
        line = specs[0][0]
        yield line, "rerun", f"name {', '.join(sorted(tests - named))} too"
    elif not tests and not specs:
        if not re.search(r"\bno registered test\b", "\n".join(text.lines), re.I):
            yield 1, "rerun", "say 'no registered test' and why, or give /rerun-test"


TEXT_CHECKS = (
    check_title,
    check_headings,
    check_placeholders,
    check_not_measured,
    check_devices,
)


def _check_one(root: Path, path: Path, patch: Patch) -> list[tuple[int, str, str]]:
    text = read_text(root, path)
    found = [hit for check in TEXT_CHECKS for hit in check(text, patch)]
    for check in (check_numbers, check_message, check_rerun):
        found += check(text, patch, root)
    return sorted(found)


def check_pr_texts(root: Path) -> list[str]:
    """Findings "file:line: rule: what to do" of all texts below ``root``.

    Each patch needs its text and each text its patch. A text's title must be the
    commit's subject and its sections those of the template. Every measured number must
    be one that the commit message or a cited docs/ file has (a table row's in one row,
    in order), and the other way round. Text and message except the same devices. The
    /rerun-test line names the registered tests that the patch adds. LintError when
    sglang's registration parser is nowhere to be found.
    """
    root = root.resolve()
    patches = {p.name[:4]: p for p in sorted((root / "patches").glob("[0-9]*.patch"))}
    texts = {p.stem: p for p in sorted((root / TEXTS).glob("*.md"))}
    findings = []
    for number in sorted(patches.keys() | texts.keys()):
        rel = f"{TEXTS}/{number}.md"
        if number not in texts:
            name = patches[number].name
            findings.append(f"{rel}:1: missing: write the text of {name}")
        elif number not in patches:
            findings.append(f"{rel}:1: orphan: no patch {number}: rename or remove it")
        else:
            patch = read_patch(patches[number])
            for line, rule, todo in _check_one(root, texts[number], patch):
                findings.append(f"{rel}:{line}: {rule}: {todo}")
    return findings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    args = parser.parse_args(argv)
    if not (args.root / "patches").is_dir():
        print(f"pr_texts: {args.root} has no patches/: give --root", file=sys.stderr)
        return 2
    try:
        findings = check_pr_texts(args.root)
    except LintError as error:
        print(f"pr_texts: {error}", file=sys.stderr)
        return 2
    print("\n".join(findings), end="\n" if findings else "")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
