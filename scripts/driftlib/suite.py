"""Finds the registered tests of a checkout and follows each of them."""

import ast
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from .frames import Frame, Scope
from .interpreter import Finding, Interpreter
from .modules import Module, Project
from .names import decorators, last_name
from .values import UNKNOWN, Class, Function, Instance

# Run nowhere, or may fail. skipIf and skipUnless run somewhere.
SKIPS = {"skip", "xfail", "expectedFailure"}


class BadTest(Exception):
    """A test file that cannot be read or parsed."""


def is_registered(tree: ast.Module) -> bool:
    """True for a file with a module-level register_*_ci(...) call."""
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id.startswith("register_")
        and node.value.func.id.endswith("_ci")
        for node in tree.body
    )


def mentions_stub(text: bytes) -> bool:
    """A cheap first look: most tests make no stub at all."""
    return b"SimpleNamespace" in text


def patched_names(tree: ast.Module) -> set[str]:
    """Last names of everything the file replaces with mocks or fakes."""
    found: set[str] = set()
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = ast.unparse(node.func).split(".")
            if "patch" in words or words[-1] == "setattr":
                found |= _targets(node, tree)
                if "multiple" in words:
                    found |= {k.arg for k in node.keywords if k.arg}
        elif isinstance(node, ast.Assign):
            # module.function = fake replaces it; an object's own attribute does not.
            found |= {
                target.attr
                for target in node.targets
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id in imported
            }
    return found


def _targets(call: ast.Call, tree: ast.Module) -> set[str]:
    """What one patch(...) or setattr(...) may replace.

    A name built at run time may be any text of the file, or the end of one.
    """
    wanted = call.args[:2] + [k.value for k in call.keywords if k.arg == "target"]
    ends, computed = set(), False
    for node in wanted:
        if isinstance(node, ast.JoinedStr) and node.values:
            node = node.values[-1]
        if isinstance(node, ast.Constant):
            ends |= {node.value} if isinstance(node.value, str) else set()
        else:
            computed = True
    if computed and not ends:
        texts = (
            each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)
        )
        ends = {text for text in texts if isinstance(text, str)}
    return {text.rpartition(".")[2] for text in ends} - {""}


class Suite:
    """Follows tests of one checkout; findings of all of them together."""

    def __init__(self, checkout: Path, roots: list[Path]):
        self.project = Project(checkout, roots)
        self.findings: list[Finding] = []
        self.tests = self.files = 0

    def follow(self, path: Path) -> None:
        """Follows every test of one file. Raises BadTest for a broken file."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BadTest(f"{path}: {error}") from error
        if not mentions_stub(text):
            return
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise BadTest(f"{path}: {error}") from error
        if not is_registered(tree):
            return
        self.files += 1
        module = Module(self.project, path.stem, path, tree)
        interpreter = Interpreter(self.project, module, patched_names(tree))
        for function, cls in _tests(module):
            self.tests += 1
            _follow_one(interpreter, module, function, cls)
        self.findings += interpreter.findings.values()


def _tests(module: Module) -> Iterable[tuple[ast.AST, ast.ClassDef | None]]:
    if _skips(module.tree):
        return
    for node in module.tree.body:
        if _is_test(node):
            yield node, None
        elif isinstance(node, ast.ClassDef) and not _skips(node):
            for part in node.body:
                if _is_test(part):
                    yield part, node


def _is_test(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test")
        and not _skips(node)
    )


def _skips(node: ast.AST) -> bool:
    """A module, class or function that its decorators or pytestmark take out."""
    marks = [
        part.value
        for part in node.body
        if isinstance(part, ast.Assign) and last_name(part.targets[0]) == "pytestmark"
    ]
    named = {
        last_name(each) for mark in marks for each in getattr(mark, "elts", [mark])
    }
    return bool(SKIPS & (decorators(node) | named))


def _follow_one(interpreter, module, function, cls) -> None:
    """One test in a fresh state: module level, setUpClass, setUp, the test."""
    interpreter.reset()
    scope = Scope(module)
    interpreter.frames = [Frame(scope, None, 0)]
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known = module.lookup(node.name)
            if known is not UNKNOWN:  # bound once: it sees the module's state
                scope.names[node.name] = dataclasses.replace(known, scope=scope)
    # Imports are looked up by name; the rest is state.
    kept = ast.Assign | ast.AnnAssign | ast.Expr
    interpreter.block(
        [n for n in module.tree.body if isinstance(n, kept)], interpreter.frame
    )
    instance = None
    if cls is not None:
        owner = Class(cls, module, scope)
        instance = Instance(owner, {})
        for name in ("setUpClass", "setUp", "asyncSetUp"):
            method = interpreter.member(owner, name, instance, cls)
            if isinstance(method, Function) and method.module is module:
                method.arguments = (instance,)
                _run(interpreter, method, scope, instance)
    test = Function(function, module, scope, instance.cls if instance else None)
    test.arguments = (instance,) if instance else ()
    _run(interpreter, test, scope, instance)


def _run(interpreter, method: Function, scope: Scope, instance) -> None:
    """Runs a test-side function itself; parameters from decorators are unknown."""
    method.scope = scope
    spec = method.node.args
    names = [each.arg for each in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]]
    inner = Scope(method.module, scope)
    inner.names = {name: UNKNOWN for name in names}
    for extra in (spec.vararg, spec.kwarg):
        if extra is not None:
            inner.names[extra.arg] = UNKNOWN
    if instance is not None and names:
        inner.names[names[0]] = instance
    frame = Frame(inner, method, interpreter.doubt)
    interpreter.frames.append(frame)
    try:
        interpreter.block(method.node.body, frame)
    finally:
        interpreter.doubt -= frame.yielded
        interpreter.frames.pop()
