"""Follows one test through production code and notes what it reads of its stubs.

This is no execution: statements are walked in order with what is known of each
value. A condition that cannot be told puts both of its branches in doubt, and so
does everything after a return that may have happened. Only reads free of doubt
are reported, so a finding is a read that the test's own call always makes.
"""

import ast
import dataclasses

from .calls import Calls
from .frames import STEPS, Frame
from .modules import Module, Project
from .values import (
    SETTERS,
    UNKNOWN,
    Class,
    Const,
    External,
    Function,
    Instance,
    Mapping,
    ModuleValue,
    Sequence,
    Stub,
    escape,
    truth,
)

FALL, RETURN, RAISE, BREAK, CONTINUE = "fall", "return", "raise", "break", "continue"
UNROLL = 32
CATCHES = {"AttributeError", "Exception", "BaseException"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """An attribute that production code reads and a stub lacks."""

    test: str
    stub_line: int
    call_line: int
    attribute: str
    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return (
            f"{self.test}:{self.stub_line}: the stub lacks {self.attribute!r}, which"
            f" {self.path}:{self.line} ({self.function}) reads; called from line"
            f" {self.call_line}"
        )


class Interpreter(Calls):
    """Follows one test at a time; findings add up over tests."""

    def __init__(self, project: Project, test_module: Module, patched: set[str]):
        self.project, self.test_module, self.patched = project, test_module, patched
        self.findings: dict[tuple, Finding] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets the last test's state."""
        self.doubt = self.guard = self.steps = 0
        self.frames: list[Frame] = []
        self.settings: dict[str, object] = {}  # environment fields set by the test

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    def is_test(self, module: Module) -> bool:
        """True for test code, whose own reads are never reported."""
        return module is self.test_module or ".test." in f".{module.name}."

    def lacks(self, stub: Stub, attribute: str, node: ast.AST) -> None:
        """Reports a read of an absent attribute, unless anything is in doubt."""
        module = self.frame.scope.module
        if self.doubt or self.guard or self.is_test(module):
            return
        function = getattr(self.frame.function.node, "name", "<lambda>")
        if self.frame.function.owner:
            function = f"{self.frame.function.owner.node.name}.{function}"
        calls = [each.line for each in self.frames if self.is_test(each.scope.module)]
        key = (stub.path, stub.line, attribute)
        found = Finding(
            test=stub.path,
            stub_line=stub.line,
            call_line=calls[-1],
            attribute=attribute,
            path=self.project.relative(module.path),
            line=node.lineno,
            function=function,
        )
        self.findings.setdefault(key, found)

    # Statements. Each returns the set of ways in which it may end.

    def block(self, body: list[ast.stmt], frame: Frame) -> set[str]:
        ends, added = set(), 0
        try:
            for statement in body:
                self.steps += 1
                out = self.statement(statement, frame)
                # A raise that may happen ends the test elsewhere, so what
                # follows is still read in every run that goes well.
                ends |= out - {FALL}
                if FALL not in out:
                    return ends
                if out - {FALL, RAISE}:
                    self.doubt += 1
                    added += 1
            return ends | {FALL}
        finally:
            self.doubt -= added

    def statement(self, node: ast.stmt, frame: Frame) -> set[str]:
        if self.steps > STEPS:
            return {FALL}
        handler = getattr(self, f"do_{type(node).__name__}", None)
        if handler is None:
            return {FALL}
        frame.line = node.lineno
        return handler(node, frame) or {FALL}

    def doubtful(self, bodies: list[list[ast.stmt]], frame: Frame) -> set[str]:
        """Any one of the bodies may run; names they bind differently are unknown."""
        before = dict(frame.scope.names)
        ends, after = set(), []
        self.doubt += 1
        for body in bodies:
            frame.scope.names = dict(before)
            out = self.block(body, frame)
            ends |= out
            if FALL in out or BREAK in out or CONTINUE in out:
                after.append(frame.scope.names)
        self.doubt -= 1
        merged = {}
        for name in {name for names in after for name in names}:
            values = [names.get(name, UNKNOWN) for names in after]
            same = all(self.same(value, values[0]) for value in values)
            merged[name] = values[0] if same else UNKNOWN
        frame.scope.names = merged if after else before
        return ends

    @staticmethod
    def same(one, other) -> bool:
        return one is other or (isinstance(one, Const) and one == other)

    def do_If(self, node, frame):
        known = truth(self.expression(node.test))
        if known is None:
            return self.doubtful([node.body, node.orelse], frame)
        return self.block(node.body if known else node.orelse, frame)

    def do_Match(self, node, frame):
        self.expression(node.subject)
        return self.doubtful([case.body for case in node.cases] + [[]], frame)

    def do_For(self, node, frame):
        items = self.iterate(self.expression(node.iter))
        if items is not None and len(items) <= UNROLL:
            return self._unroll(node, items, frame)
        self.bind(node.target, UNKNOWN)
        # A test that loops over nothing tests nothing: its loops are taken to run.
        if self.is_test(frame.scope.module):
            ends = self.block(node.body, frame)
            ends |= {FALL}
        else:
            ends = self.doubtful([node.body, []], frame)
        ends -= {BREAK, CONTINUE}
        return ends | (self.block(node.orelse, frame) if node.orelse else set())

    do_AsyncFor = do_For

    def _unroll(self, node, items, frame):
        ends, added = set(), 0
        try:
            for item in items:
                self.bind(node.target, item)
                out = self.block(node.body, frame)
                ends |= out - {BREAK, CONTINUE, FALL}
                goes_on = out & {FALL, CONTINUE}
                if not goes_on:
                    return ends | ({FALL} if BREAK in out else set())
                if out & {BREAK, RETURN}:
                    self.doubt += 1
                    added += 1
            return ends | self.block(node.orelse, frame)
        finally:
            self.doubt -= added

    def do_While(self, node, frame):
        known = truth(self.expression(node.test))
        if known is False:
            return self.block(node.orelse, frame)
        if known:
            ends = self.block(node.body, frame)
            if ends <= {RETURN, RAISE}:
                return ends
            return (ends - {BREAK, CONTINUE}) | {FALL}
        return (self.doubtful([node.body, []], frame) - {BREAK, CONTINUE}) | {FALL}

    def do_With(self, node, frame):
        guards, settings = 0, dict(self.settings)
        for item in node.items:
            guards += self.enter(item.context_expr, item.optional_vars)
        self.guard += guards
        try:
            return self.block(node.body, frame)
        finally:
            self.guard -= guards
            self.settings = settings

    do_AsyncWith = do_With

    def do_Try(self, node, frame):
        guarded = any(self._catches(handler.type) for handler in node.handlers)
        self.guard += guarded
        ends = self.block(node.body, frame)
        self.guard -= guarded
        if FALL in ends and node.orelse:
            ends = (ends - {FALL}) | self.block(node.orelse, frame)
        if node.handlers:
            bodies = [handler.body for handler in node.handlers]
            for handler in node.handlers:
                if handler.name:
                    frame.scope.names[handler.name] = UNKNOWN
            ends |= self.doubtful([[], *bodies], frame) - {FALL}
        if node.finalbody:
            out = self.block(node.finalbody, frame)
            ends = ends if FALL in out else out
        return ends

    @staticmethod
    def _catches(kind: ast.expr | None) -> bool:
        """True for a handler that an AttributeError would reach."""
        if kind is None:
            return True
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        names = {getattr(each, "id", getattr(each, "attr", "")) for each in kinds}
        return bool(names & CATCHES)

    def do_Return(self, node, frame):
        value = self.expression(node.value) if node.value else Const(None)
        frame.returned.append((value, self.doubt - frame.yielded > frame.doubt))
        return {RETURN}

    def do_Raise(self, node, frame):
        for part in (node.exc, node.cause):
            if part is not None:
                self.expression(part)
        return {RAISE}

    def do_Assert(self, node, frame):
        self.expression(node.test)

    def do_Break(self, node, frame):
        return {BREAK}

    def do_Continue(self, node, frame):
        return {CONTINUE}

    def do_Expr(self, node, frame):
        self.expression(node.value)

    def do_Assign(self, node, frame):
        value = self.expression(node.value)
        for target in node.targets:
            self.bind(target, value)

    def do_AnnAssign(self, node, frame):
        if node.value is not None:
            self.bind(node.target, self.expression(node.value))

    def do_AugAssign(self, node, frame):
        reading = ast.copy_location(
            ast.parse(ast.unparse(node.target), mode="eval").body, node.target
        )
        for part in ast.walk(reading):
            if hasattr(part, "lineno"):
                part.lineno = node.lineno
        self.expression(reading)
        self.expression(node.value)
        self.bind(node.target, UNKNOWN)

    def do_Delete(self, node, frame):
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                owner = self.expression(target.value)
                if isinstance(owner, Stub | Instance) and not self.doubt:
                    owner.attributes.pop(target.attr, None)
            elif isinstance(target, ast.Name):
                frame.scope.names.pop(target.id, None)
            elif isinstance(target, ast.Subscript):
                escape([self.expression(target.value)])

    def do_Import(self, node, frame):
        for alias in node.names:
            value = self.project.imported(frame.scope.module, node, alias)
            frame.scope.names[alias.asname or alias.name.split(".")[0]] = value

    def do_ImportFrom(self, node, frame):
        for alias in node.names:
            value = self.project.imported(frame.scope.module, node, alias)
            frame.scope.names[alias.asname or alias.name] = value

    def do_FunctionDef(self, node, frame):
        function = Function(node, frame.scope.module, frame.scope)
        if node.decorator_list:
            escape([function])  # the decorator may run it, now or later
        frame.scope.names[node.name] = UNKNOWN if node.decorator_list else function

    do_AsyncFunctionDef = do_FunctionDef

    def do_ClassDef(self, node, frame):
        frame.scope.names[node.name] = Class(node, frame.scope.module, frame.scope)

    def do_Global(self, node, frame):
        for name in node.names:
            frame.scope.names[name] = UNKNOWN

    do_Nonlocal = do_Global

    def bind(self, target: ast.expr, value) -> None:
        """Assigns to a target."""
        if isinstance(target, ast.Name):
            self.frame.scope.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.store(self.expression(target.value), target.attr, value)
        elif isinstance(target, ast.Tuple | ast.List):
            items = self.iterate(value)
            plain = not any(isinstance(each, ast.Starred) for each in target.elts)
            fits = items is not None and plain and len(items) == len(target.elts)
            for index, each in enumerate(target.elts):
                inner = each.value if isinstance(each, ast.Starred) else each
                self.bind(inner, items[index] if fits else UNKNOWN)
        elif isinstance(target, ast.Subscript):
            owner = self.expression(target.value)
            key = self.expression(target.slice)
            if isinstance(owner, Mapping) and isinstance(key, Const):
                owner.items[key.value] = UNKNOWN if self.doubt else value
            elif isinstance(owner, Mapping | Sequence):
                owner.open = True

    def store(self, owner, attribute: str, value) -> None:
        """Sets an attribute. In doubt it is there all the same, with any value."""
        if isinstance(owner, Stub | Instance):
            old = owner.attributes.get(attribute)
            keep = not self.doubt or self.same(old, value)
            owner.attributes[attribute] = value if keep else UNKNOWN
        elif isinstance(value, Function):
            escape([value])  # whoever has the owner may run it

    # Attributes.

    def read(self, owner, attribute: str, node: ast.AST):
        """The value of `owner.attribute`; a stub without it is reported."""
        if isinstance(owner, Stub):
            if attribute in owner.attributes:
                return owner.attributes[attribute]
            if not owner.open and not attribute.startswith("__"):
                self.lacks(owner, attribute, node)
            if attribute in SETTERS:
                owner.open = True
            return UNKNOWN
        if isinstance(owner, Instance):
            if attribute in owner.attributes:
                return owner.attributes[attribute]
            return self.member(owner.cls, attribute, owner, node)
        if isinstance(owner, Class):
            return self.member(owner, attribute, None, node)
        if isinstance(owner, ModuleValue):
            value = owner.module.lookup(attribute)
            if value is UNKNOWN:
                child = self.project.module(f"{owner.module.name}.{attribute}")
                return ModuleValue(child) if child else UNKNOWN
            return value
        if isinstance(owner, External):
            return External(f"{owner.name}.{attribute}")
        return UNKNOWN
