"""The checkout's Python modules, parsed when first needed."""

import ast
import builtins
from pathlib import Path

from .values import UNKNOWN, Class, Const, External, Function, ModuleValue

BUILTINS = frozenset(dir(builtins))


class Module:
    """One source file and the names bound at its top level."""

    def __init__(self, project: "Project", name: str, path: Path, tree: ast.Module):
        self.project, self.name, self.path, self.tree = project, name, path, tree
        self.is_package = path.name == "__init__.py"
        self.bindings: dict[str, list[tuple[ast.AST, ast.alias | None]]] = {}
        self._collect(tree.body)
        self._values: dict[str, object] = {}

    def _bind(self, name: str, node: ast.AST, alias: ast.alias | None = None) -> None:
        self.bindings.setdefault(name, []).append((node, alias))

    def _collect(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._bind(node.name, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = alias.asname or alias.name
                    if isinstance(node, ast.Import) and not alias.asname:
                        name = name.split(".")[0]
                    self._bind(name, node, alias)
            elif isinstance(node, ast.If) and _is_type_checking(node.test):
                self._collect(node.orelse)
            elif isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try):
                for field in ("body", "orelse", "finalbody"):
                    self._collect(getattr(node, field, []))
                for handler in getattr(node, "handlers", []):
                    self._collect(handler.body)
            else:
                for target in _stored_names(node):
                    self._bind(target, node)

    def lookup(self, name: str):
        """The value of a top-level name; UNKNOWN when bound twice or computed."""
        if name not in self._values:
            self._values[name] = UNKNOWN  # while it is being looked up
            self._values[name] = self._resolve(name)
        return self._values[name]

    def _resolve(self, name: str):
        found = self.bindings.get(name, [])
        if not found:
            inside = (
                self.project.module(f"{self.name}.{name}") if self.is_package else None
            )
            if inside is not None:
                return ModuleValue(inside)
            return self._starred(name)
        if len(found) > 1:
            return UNKNOWN
        node, alias = found[0]
        if isinstance(node, ast.ClassDef):
            return Class(node, self)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return Function(node, self)
        if alias is not None:
            return self.project.imported(self, node, alias)
        value = getattr(node, "value", None)
        return Const(value.value) if isinstance(value, ast.Constant) else UNKNOWN

    def _starred(self, name: str):
        """A name that only a star import, or the builtins, can have bound."""
        for node, alias in (pair for pairs in self.bindings.values() for pair in pairs):
            if alias is not None and alias.name == "*" and not name.startswith("_"):
                inside = self.project.module(self.absolute(node))
                if inside is not None and name in inside.bindings:
                    return inside.lookup(name)
        return External(f"builtins.{name}") if name in BUILTINS else UNKNOWN

    def absolute(self, node: ast.ImportFrom) -> str:
        """The dotted name that a `from` import names."""
        if not node.level:
            return node.module or ""
        base = self.name.split(".")
        drop = node.level - (1 if self.is_package else 0)
        base = base[: len(base) - drop] if drop else base
        return ".".join([*base, *([node.module] if node.module else [])])


class Project:
    """All modules below the source roots of one checkout."""

    def __init__(self, checkout: Path, roots: list[Path]):
        self.checkout, self.roots = checkout, roots
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module of that dotted name, None when the checkout has none."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        for root in self.roots:
            base = root.joinpath(*name.split("."))
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if path.is_file():
                    try:
                        tree = ast.parse(path.read_bytes())
                    except (SyntaxError, ValueError):
                        return None
                    return Module(self, name, path, tree)
        return None

    def relative(self, path: Path) -> str:
        """The path as a reader of the checkout would write it."""
        try:
            return path.relative_to(self.checkout).as_posix()
        except ValueError:
            return str(path)

    def has_package(self, name: str) -> bool:
        """True when the first part of a dotted name lies in the checkout."""
        first = name.split(".")[0]
        return any(
            (root / first).is_dir() or (root / f"{first}.py").is_file()
            for root in self.roots
        )

    def imported(self, module: Module, node: ast.AST, alias: ast.alias):
        """The value that one imported name is bound to."""
        if isinstance(node, ast.Import):
            name = alias.name if alias.asname else alias.name.split(".")[0]
            return self.named(name)
        source = module.absolute(node)
        inside = self.module(source)
        if inside is None:
            if self.has_package(source):
                # A namespace folder without __init__.py, or a file that is absent.
                child = self.module(f"{source}.{alias.name}")
                return ModuleValue(child) if child else UNKNOWN
            return External(f"{source}.{alias.name}")
        value = inside.lookup(alias.name)
        if value is UNKNOWN and alias.name not in inside.bindings:
            child = self.module(f"{source}.{alias.name}")
            return ModuleValue(child) if child else UNKNOWN
        return value

    def named(self, name: str):
        """The module of a plain `import`."""
        inside = self.module(name)
        if inside is not None:
            return ModuleValue(inside)
        return UNKNOWN if self.has_package(name) else External(name)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _stored_names(node: ast.AST) -> list[str]:
    return [
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store | ast.Del)
    ]
