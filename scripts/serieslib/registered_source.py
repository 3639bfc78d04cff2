"""A registered test as upstream's CI sees it: syntax tree, comments, registrations."""

import ast
import datetime
import functools
import importlib.util
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

TESTS = "test/registered"
PACKAGE = "python/sglang"
# Upstream runs these two names as pytest and package structure, not as tests.
NOT_TESTS = ("conftest.py", "__init__.py")
MARKER_REACH = 3  # lines above a registration in which its marker comment may stand


class LintError(Exception):
    """The lint itself cannot run; the message says what to do."""


class Registration(NamedTuple):
    line: int
    entry: object  # sglang.test.ci.ci_register.CIRegistry


class Source(NamedTuple):
    """One parsed file; ``rel`` is its posix path below the root."""

    rel: str
    tree: ast.Module
    comments: dict[int, str]
    names: dict[str, str]
    registrations: list[Registration]
    refused: list[tuple[int, str]]
    has_main: bool
    today: datetime.date
    ci: ModuleType  # sglang.test.ci.ci_register

    @property
    def is_test(self) -> bool:
        name = self.rel.rsplit("/", 1)[-1]
        return self.rel.startswith(TESTS + "/") and name not in NOT_TESTS

    @property
    def in_package(self) -> bool:
        return self.rel.startswith(PACKAGE + "/")

    def dotted(self, node: ast.AST) -> str:
        """The dotted origin of a name, through this file's imports; "" if none."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self.names.get(node.id, node.id))
        return ".".join(reversed(parts))

    def calls(self, within: ast.AST | None = None) -> Iterator[tuple[ast.Call, str]]:
        for node in ast.walk(within or self.tree):
            if isinstance(node, ast.Call):
                yield node, self.dotted(node.func)

    def has_marker(self, line: int, marker: str) -> bool:
        """A comment ``# marker reason`` stands in the lines just above ``line``."""
        above = range(line - MARKER_REACH, line)
        pattern = re.compile(re.escape(marker) + r"\s*\S", re.IGNORECASE)
        return any(pattern.search(self.comments.get(number, "")) for number in above)


def ci_register(root: Path) -> ModuleType:
    """sglang's registration parser: of root's tree, its built engine, or this Python.

    Loaded by itself, because importing the engine costs seconds and needs torch.
    """
    trees = [root / "python" / "sglang", root / "build/engine/python/sglang"]
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        trees.append(Path(spec.submodule_search_locations[0]))
    for tree in trees:
        path = tree / "test" / "ci" / "ci_register.py"
        if path.is_file():
            return _load(path)
    raise LintError(
        f"sglang/test/ci/ci_register.py is neither below {root} nor installed for "
        f"{sys.executable}: run `python3 scripts/series.py apply`, or use the engine "
        "environment's Python"
    )


@functools.cache
def _load(path: Path) -> ModuleType:
    name = "_series_ci_register"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def _import_names(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                names[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _comments(text: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}


def read_source(root: Path, rel: str, today: datetime.date) -> Source:
    """Parse root/rel; SyntaxError or UnicodeDecodeError when it is no Python."""
    parser = ci_register(root)
    text = (root / rel).read_text(encoding="utf-8")
    tree = ast.parse(text, filename=rel)
    registrations, refused, has_main = [], [], False
    for stmt in tree.body:
        # One statement at a time: the parser's entries carry no line.
        visitor = parser.RegistryVisitor(filename=rel)
        try:
            visitor.visit(ast.Module(body=[stmt], type_ignores=[]))
        except ValueError as error:
            refused.append((stmt.lineno, str(error).removeprefix(f"{rel}: ")))
        has_main = has_main or visitor.has_main_entry
        registrations += [Registration(stmt.lineno, e) for e in visitor.registries]
    return Source(
        rel=rel,
        tree=tree,
        comments=_comments(text),
        names=_import_names(tree),
        registrations=registrations,
        refused=refused,
        has_main=has_main,
        today=today,
        ci=parser,
    )
