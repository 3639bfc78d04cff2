"""Calls: into functions of the checkout, of the test, and of the few known others."""

import ast

from .classes import Classes
from .containers import Containers
from .expressions import Expressions
from .frames import DEPTH, STEPS, Frame, Scope
from .known import KNOWN, harmless
from .names import decorators, last_name
from .values import (
    UNKNOWN,
    Class,
    Const,
    External,
    Function,
    Instance,
    Mapping,
    Sequence,
    Stub,
    escape,
    has_stub,
    may_set,
)

# Decorators under which a call still runs the body that was read.
TRANSPARENT = {
    "staticmethod",
    "classmethod",
    "property",
    "cached_property",
    "contextmanager",
    "asynccontextmanager",
    "cache",
    "lru_cache",
    "no_grad",
    "inference_mode",
    "override",
    "final",
}
GUARDS = {"assertRaises", "assertRaisesRegex", "raises", "suppress"}
ENTERS = {"enter_context", "enterContext", "enter_scope", "enter_async_context"}


def is_generator(node: ast.AST) -> bool:
    """True when the function's own body yields."""
    todo = list(node.body) if isinstance(node.body, list) else [node.body]
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(part)
    return False


class Calls(Classes, Containers, Expressions):
    """Mixin of the interpreter: what a call reads, changes and returns."""

    def call(self, node: ast.Call, *, runs: bool = False):
        """Follows a call. `runs`: it is awaited or entered, so its body runs."""
        self.steps += 1
        self.frame.line = node.lineno
        owner = None
        if isinstance(node.func, ast.Attribute):
            above = self._super(node.func)
            if above is not None:
                return above if above is UNKNOWN else self.invoke(above, node, runs)
            owner = self.expression(node.func.value)
            if node.func.attr == "get" and not node.args:
                setting = self.settings.get(last_name(node.func.value))
                if setting is not None:
                    return setting
            if isinstance(owner, Class) and node.func.attr == "__new__":
                self.arguments(node)
                return Instance(owner, {})
            method = getattr(self, f"on_{type(owner).__name__}_{node.func.attr}", None)
            if method is not None:
                return method(owner, *self.arguments(node))
            callee = self.read(owner, node.func.attr, node.func)
        else:
            callee = self.expression(node.func)
        if node.func and last_name(node.func) in ENTERS:
            for part in node.args:
                self.enter(part, None)
            return UNKNOWN
        return self.invoke(callee, node, runs)

    def arguments(self, node: ast.Call) -> tuple[list, dict, bool]:
        """Positional values, keyword values, and whether that is all of them."""
        positional, keywords, whole = [], {}, True
        for part in node.args:
            if isinstance(part, ast.Starred):
                items = self.iterate(self.expression(part.value))
                positional += items or []
                whole = whole and items is not None
            else:
                positional.append(self.expression(part))
        for keyword in node.keywords:
            value = self.expression(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, Mapping):
                keywords.update(value.items)
                whole = whole and not value.open
            else:
                whole = False
        self.frame.line = node.lineno  # an argument may have been a call too
        return positional, keywords, whole

    def invoke(self, callee, node: ast.Call, runs: bool):
        positional, keywords, whole = self.arguments(node)
        return self.apply(callee, positional, keywords, whole, node, runs)

    def apply(self, callee, positional, keywords, whole=True, node=None, runs=False):
        """Calls a value with values."""
        given = [*positional, *keywords.values()]
        if isinstance(callee, External):
            known = KNOWN.get(callee.name)
            if known is not None:
                return known(self, positional, keywords, whole, node)
            runs_code = any(isinstance(v, Function) and may_set(v.node) for v in given)
            if runs_code or not harmless(callee.name):
                escape(given)
            return UNKNOWN
        if isinstance(callee, Class):
            return self.construct(callee, positional, keywords, whole)
        if isinstance(callee, Function):
            return self.enter_function(callee, positional, keywords, whole, runs)
        if not self._is_check(node):
            escape(given)
        return UNKNOWN

    @staticmethod
    def _is_check(node: ast.Call | None) -> bool:
        """True for unittest's own methods, which change nothing they are given."""
        name = last_name(node.func) if node is not None else ""
        return name.startswith(("assert", "fail", "subTest", "skipTest", "addCleanup"))

    def enter(self, node: ast.expr, target: ast.expr | None) -> int:
        """Enters a context manager; returns 1 when it swallows AttributeError."""
        guards, value = 0, UNKNOWN
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            guards = int(name in GUARDS)
            if name == "override" and isinstance(node.func, ast.Attribute):
                if len(node.args) == 1:
                    field = last_name(node.func.value)
                    self.settings[field] = self.expression(node.args[0])
            elif name == "object" and last_name(node.func.value) == "patch":
                self._patch(node)
            else:
                value = self.call(node, runs=True)
        else:
            value = self.expression(node)
        if target is not None:
            self.bind(target, value if isinstance(value, Stub) else UNKNOWN)
        return guards

    def _patch(self, node: ast.Call) -> None:
        """patch.object(owner, name, ...): the owner has that attribute then."""
        positional, keywords, _ = self.arguments(node)
        if len(positional) < 2 or not isinstance(positional[1], Const):
            escape(positional)
            return
        owner, name = positional[0], positional[1].value
        if isinstance(owner, Stub | Instance):
            owner.attributes[name] = UNKNOWN
        elif name == "get" and isinstance(keywords.get("return_value"), Const):
            self.settings[last_name(node.args[0])] = keywords["return_value"]

    # Functions.

    def enter_function(self, function, positional, keywords, whole, runs=False):
        """Follows a function's body; what it returns, UNKNOWN when that varies."""
        node, module = function.node, function.module
        positional = [*function.arguments, *positional]
        keywords = {**function.keywords, **keywords}
        given = [*positional, *keywords.values()]
        if getattr(node, "name", None) in self.patched and not self.is_test(module):
            return UNKNOWN  # a mock: it sets nothing on what it is given
        own_test = module is self.test_module
        # A function made in a call can reach what that call was given.
        if not own_test and function.scope is None and not has_stub(given):
            return UNKNOWN
        named = decorators(node)
        context = named & {"contextmanager", "asynccontextmanager"}
        lazy = isinstance(node, ast.AsyncFunctionDef) or is_generator(node)
        if lazy and not (runs and (context or isinstance(node, ast.AsyncFunctionDef))):
            escape(given)
            return UNKNOWN
        deep = len(self.frames) > DEPTH or any(
            frame.function is not None and frame.function.node is node
            for frame in self.frames
        )
        if not named <= TRANSPARENT or deep or self.steps > STEPS or not whole:
            escape(given)
            return UNKNOWN
        if self.is_test(module) and not own_test:
            escape(given)
            return UNKNOWN
        return self._run(function, positional, keywords)

    def _run(self, function, positional, keywords):
        scope = Scope(function.module, function.scope)
        names = self._parameters(function, positional, keywords)
        if names is None:
            escape([*positional, *keywords.values()])
            return UNKNOWN
        scope.names = names
        frame = Frame(scope, function, self.doubt)
        self.frames.append(frame)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.expression(function.node.body)
            ends = self.block(function.node.body, frame)
        finally:
            self.doubt -= frame.yielded
            self.frames.pop()
        values = [value for value, _ in frame.returned]
        if "fall" in ends:
            values.append(Const(None))
        if values and all(self.same(value, values[0]) for value in values):
            return values[0]
        return UNKNOWN

    def _parameters(self, function, positional, keywords) -> dict | None:
        """Names bound at the start of the body; None when the call does not fit."""
        spec = function.node.args
        plain = [each.arg for each in [*spec.posonlyargs, *spec.args]]
        only = [each.arg for each in spec.kwonlyargs]
        names = {}
        for name, value in zip(plain, positional, strict=False):
            names[name] = value
        extra = positional[len(plain) :]
        if extra and spec.vararg is None:
            return None
        if spec.vararg is not None:
            names[spec.vararg.arg] = Sequence(list(extra))
        rest = {}
        for name, value in keywords.items():
            if name in names and name != getattr(spec.vararg, "arg", None):
                return None
            if name in plain or name in only:
                names[name] = value
            elif spec.kwarg is not None:
                rest[name] = value
            else:
                return None
        if spec.kwarg is not None:
            names[spec.kwarg.arg] = Mapping(rest)
        defaults = dict(zip(reversed(plain), reversed(spec.defaults), strict=False))
        defaults |= {
            name: value
            for name, value in zip(only, spec.kw_defaults, strict=True)
            if value is not None
        }
        for name in [*plain, *only]:
            if name not in names:
                if name not in defaults:
                    return None
                default = defaults[name]
                constant = isinstance(default, ast.Constant)
                names[name] = Const(default.value) if constant else UNKNOWN
        return names
