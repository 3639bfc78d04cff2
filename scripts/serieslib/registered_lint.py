"""Lint the series' upstream-side files with the rules of upstream's own checks.

    python scripts/serieslib/registered_lint.py [--root DIR] FILES...

FILES are Python files or folders below DIR/test/registered or DIR/python/sglang.
One line a finding, ``path:line: rule: what to do``. Exit 0 clean, 1 findings,
2 usage. Registrations are read by sglang's ``ci_register`` itself, so the rules
see exactly what upstream's suite runner sees: DIR's engine tree or built engine is
looked at first, then the sglang of the Python that runs this.
"""

import argparse
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from serieslib.registered_rules import COMMON_CHECKS, PACKAGE_CHECKS, TEST_CHECKS
from serieslib.registered_source import TESTS, LintError, read_source


def _check_basename(root: Path, rel: str) -> Iterator[tuple[int, str, str]]:
    name = rel.rsplit("/", 1)[-1]
    twins = {p.relative_to(root).as_posix() for p in (root / TESTS).rglob(name)}
    for other in sorted(twins - {rel}):
        yield 1, "basename", f"{other} has the same name, which /rerun-test refuses"


def _expand(root: Path, paths: list[Path]) -> list[str]:
    """Posix paths below root of the files named, folders replaced by their files."""
    found = set()
    for path in paths:
        full = (path if path.is_absolute() else root / path).resolve()
        if not full.is_relative_to(root):
            raise LintError(f"{path} is not below {root}: give --root its tree")
        if not full.exists():
            raise LintError(f"{path} does not exist below {root}")
        files = sorted(full.rglob("*.py")) if full.is_dir() else [full]
        found |= {file.relative_to(root).as_posix() for file in files}
    return sorted(rel for rel in found if rel.endswith(".py"))


def lint_paths(
    root: Path, paths: list[Path], today: datetime.date | None = None
) -> list[str]:
    """Findings "path:line: rule: what to do", sorted; empty when all is well.

    ``root`` is a tree with test/registered and python/sglang; ``paths`` are files
    or folders in it (relative ones count from root). ``today`` decides which
    disabled-until dates have passed. LintError when a path is missing or outside
    root, or ci_register is nowhere to be found.
    """
    root = root.resolve()
    rels = _expand(root, paths)
    findings = []
    for rel in rels:
        try:
            src = read_source(root, rel, today or datetime.date.today())
        except (SyntaxError, UnicodeDecodeError) as error:
            line = error.lineno if isinstance(error, SyntaxError) else None
            findings.append((rel, line or 1, "syntax", f"fix it: {error}"))
            continue
        checks = list(COMMON_CHECKS)
        checks += TEST_CHECKS if src.is_test else ()
        checks += PACKAGE_CHECKS if src.in_package else ()
        found = [hit for check in checks for hit in check(src)]
        if src.is_test:
            found += _check_basename(root, rel)
        findings += [(rel, *hit) for hit in found]
    return [
        f"{rel}:{line}: {rule}: {text}" for rel, line, rule, text in sorted(findings)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="files or folders")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[2],
        help="tree that holds test/registered and python/sglang",
    )
    args = parser.parse_args(argv)
    try:
        findings = lint_paths(args.root, [p.absolute() for p in args.files])
    except LintError as error:
        print(f"registered_lint: {error}", file=sys.stderr)
        return 2
    print("\n".join(findings), end="\n" if findings else "")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
