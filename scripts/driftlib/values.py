"""What an expression may be worth, as far as reading the source can tell."""

import ast
import dataclasses
from collections.abc import Iterator

# Members through which an attribute of any name may be set.
SETTERS = {"__dict__", "__init__", "__setattr__", "__setstate__"}


class Unknown:
    """Anything. Nothing is ever reported about it."""

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()


@dataclasses.dataclass(frozen=True)
class Const:
    """A literal: None, bool, number, text."""

    value: object


@dataclasses.dataclass(eq=False)
class Sequence:
    """A list or tuple. `open`: it may hold more than `items`."""

    items: list
    open: bool = False


@dataclasses.dataclass(eq=False)
class Mapping:
    """A dict with text keys. `open`: it may hold more than `items`."""

    items: dict
    open: bool = False


@dataclasses.dataclass(eq=False)
class Stub:
    """A SimpleNamespace made in a test. `open`: it may have other attributes."""

    attributes: dict
    path: str
    line: int
    open: bool = False


@dataclasses.dataclass(eq=False)
class Class:
    """A class whose source is known."""

    node: ast.ClassDef
    module: object  # modules.Module
    scope: object = None  # interpreter.Scope of a class made in a function


@dataclasses.dataclass(eq=False)
class Instance:
    """An object of a known class; attributes set elsewhere are not known."""

    cls: Class
    attributes: dict


@dataclasses.dataclass(eq=False)
class Function:
    """A function or lambda whose source is known, with arguments bound so far."""

    node: ast.AST
    module: object
    scope: object = None
    owner: Class | None = None
    arguments: tuple = ()
    keywords: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class External:
    """A thing outside the checkout, by its dotted name."""

    name: str


@dataclasses.dataclass(eq=False)
class ModuleValue:
    """A module of the checkout."""

    module: object


def truth(value) -> bool | None:
    """The value in a condition; None when it cannot be told."""
    if isinstance(value, Const):
        return bool(value.value)
    if isinstance(value, Sequence | Mapping):
        return True if value.items else (None if value.open else False)
    if isinstance(value, Stub | Function | Class | ModuleValue):
        return True
    return None


def parts(value) -> Iterator:
    """The values that a value leads to directly."""
    if isinstance(value, Sequence):
        yield from value.items
    elif isinstance(value, Mapping):
        yield from value.items.values()
    elif isinstance(value, Stub | Instance):
        yield from value.attributes.values()
    elif isinstance(value, Function):
        yield from value.arguments
        yield from value.keywords.values()


def captured(value) -> Iterator:
    """What code that may set attributes can get at by the names around it."""
    code = value.cls if isinstance(value, Instance) else value
    if not isinstance(code, Function | Class) or not may_set(code.node):
        return
    named = {part.id for part in ast.walk(code.node) if isinstance(part, ast.Name)}
    scope = code.scope
    while scope is not None:
        yield from (scope.names[name] for name in named & scope.names.keys())
        scope = scope.parent


def may_set(node: ast.AST) -> bool:
    """True when the code stores an attribute, or calls what might."""
    return any(
        isinstance(part, ast.Call)
        or (isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
        for part in ast.walk(node)
    )


def reachable(roots, more=parts) -> Iterator:
    """Every value that can be got at from the roots, each once."""
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        todo += more(value)


def has_stub(roots) -> bool:
    """True when a stub can be got at from the roots."""
    return any(isinstance(value, Stub) for value in reachable(roots))


def escape(roots) -> None:
    """Code that was not read had these: it may have set further attributes.

    It may also have run the functions among them.
    """
    for value in reachable(roots, lambda value: [*parts(value), *captured(value)]):
        if isinstance(value, Stub | Sequence | Mapping):
            value.open = True


def bound(function: Function, positional, keywords) -> Function:
    """The function with these arguments given already."""
    return Function(
        function.node,
        function.module,
        function.scope,
        function.owner,
        (*function.arguments, *positional),
        {**function.keywords, **keywords},
    )
