"""Calls outside the checkout whose effect on a stub is known."""

from .values import (
    SETTERS,
    UNKNOWN,
    Class,
    Const,
    External,
    Function,
    Instance,
    Mapping,
    Sequence,
    Stub,
    bound,
    escape,
    truth,
)

# Libraries that set no attribute on an object they are handed.
_HARMLESS = {
    "builtins",
    "collections",
    "contextlib",
    "datetime",
    "functools",
    "gc",
    "inspect",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "msgspec",
    "numpy",
    "operator",
    "os",
    "pathlib",
    "random",
    "re",
    "sys",
    "tempfile",
    "time",
    "torch",
    "triton",
    "types",
    "typing",
    "unittest",
    "uuid",
    "warnings",
}


def harmless(name: str) -> bool:
    """True when a call leaves the attributes of its arguments as they are."""
    first, *_, last = name.split(".")
    return first in _HARMLESS and last not in SETTERS


def _namespace(interpreter, positional, keywords, whole, node):
    frame = interpreter.frame
    if not interpreter.is_test(frame.scope.module):
        return UNKNOWN  # made by production code, so not a test's stub
    return Stub(
        attributes=dict(keywords),
        path=interpreter.project.relative(frame.scope.module.path),
        line=node.lineno if node is not None else 0,
        open=not whole or bool(positional),
    )


def _name_of(positional):
    second = positional[1] if len(positional) > 1 else UNKNOWN
    if isinstance(second, Const) and isinstance(second.value, str):
        return second.value
    return None


def _getattr(interpreter, positional, keywords, whole, node):
    name = _name_of(positional)
    if name is None or not isinstance(positional[0], Stub | Instance):
        return UNKNOWN
    owner = positional[0]
    if len(positional) == 2:
        return interpreter.read(owner, name, node)
    if name in owner.attributes:
        return owner.attributes[name]
    if isinstance(owner, Stub):
        return UNKNOWN if owner.open else positional[2]
    return interpreter.member(owner.cls, name, owner, node)


def _hasattr(interpreter, positional, keywords, whole, node):
    name = _name_of(positional)
    if name is None or not isinstance(positional[0], Stub):
        return UNKNOWN
    owner = positional[0]
    if name in owner.attributes:
        # Set in doubt is there for reads, but may be absent for a question.
        return Const(True) if owner.attributes[name] is not UNKNOWN else UNKNOWN
    return UNKNOWN if owner.open else Const(False)


def _setattr(interpreter, positional, keywords, whole, node):
    name = _name_of(positional)
    if name is None or len(positional) != 3:
        escape(positional)
    else:
        interpreter.store(positional[0], name, positional[2])
    return Const(None)


def _delattr(interpreter, positional, keywords, whole, node):
    name = _name_of(positional)
    owner = positional[0] if positional else UNKNOWN
    if isinstance(owner, Stub | Instance) and name and not interpreter.doubt:
        owner.attributes.pop(name, None)
    return Const(None)


def _vars(interpreter, positional, keywords, whole, node):
    escape(positional)
    return UNKNOWN


def _isinstance(interpreter, positional, keywords, whole, node):
    if len(positional) != 2:
        return UNKNOWN
    value, kind = positional
    kinds = kind.items if isinstance(kind, Sequence) else [kind]
    if isinstance(value, Stub):
        if any(each == External("types.SimpleNamespace") for each in kinds):
            return Const(True)
        plain = all(isinstance(k, Class) and not _checks(k) for k in kinds)
        return Const(False) if plain else UNKNOWN
    if isinstance(value, Instance):
        nodes = [each.node for each in interpreter.bases(value.cls)[0]]
        if any(isinstance(k, Class) and k.node in nodes for k in kinds):
            return Const(True)
    return UNKNOWN


def _checks(cls: Class) -> bool:
    """True when isinstance() may say yes to an object of another class."""
    bases = {getattr(base, "id", getattr(base, "attr", "")) for base in cls.node.bases}
    return bool(bases & {"Protocol", "ABC"}) or bool(cls.node.keywords)


def _length(interpreter, positional, keywords, whole, node):
    value = positional[0] if positional else UNKNOWN
    if isinstance(value, Sequence | Mapping) and not value.open:
        return Const(len(value.items))
    return UNKNOWN


def _bool(interpreter, positional, keywords, whole, node):
    known = truth(positional[0]) if positional else False
    return UNKNOWN if known is None else Const(known)


def _copy(interpreter, positional, keywords, whole, node):
    value = positional[0] if positional else UNKNOWN
    if isinstance(value, Stub):
        return Stub(dict(value.attributes), value.path, value.line, value.open)
    if isinstance(value, Instance):
        return Instance(value.cls, dict(value.attributes))
    return UNKNOWN


def _deepcopy(interpreter, positional, keywords, whole, node):
    # The nested stubs of the copy are the original's: close enough for reading,
    # but a later assignment to one would be seen in both.
    return _copy(interpreter, positional, keywords, whole, node)


def _dict(interpreter, positional, keywords, whole, node):
    result = Mapping(dict(keywords), not whole)
    for value in positional:
        if isinstance(value, Mapping):
            result.items = {**value.items, **result.items}
            result.open = result.open or value.open
        else:
            result.open = True
    return result


def _sequence(interpreter, positional, keywords, whole, node):
    if not positional:
        return Sequence([])
    items = interpreter.iterate(positional[0])
    return UNKNOWN if items is None else Sequence(items)


def _enumerate(interpreter, positional, keywords, whole, node):
    items = interpreter.iterate(positional[0]) if len(positional) == 1 else None
    if items is None or keywords:
        return UNKNOWN
    return Sequence([Sequence([Const(i), item]) for i, item in enumerate(items)])


def _zip(interpreter, positional, keywords, whole, node):
    lists = [interpreter.iterate(each) for each in positional]
    if not lists or not whole or any(items is None for items in lists):
        return UNKNOWN
    return Sequence([Sequence(list(row)) for row in zip(*lists, strict=False)])


def _range(interpreter, positional, keywords, whole, node):
    values = [each.value for each in positional if isinstance(each, Const)]
    if len(values) != len(positional) or not all(type(v) is int for v in values):
        return UNKNOWN
    numbers = range(*values)
    return Sequence([Const(i) for i in numbers]) if len(numbers) <= 32 else UNKNOWN


def _new(interpreter, positional, keywords, whole, node):
    if positional and isinstance(positional[0], Class):
        return Instance(positional[0], {})
    return UNKNOWN


def _partial(interpreter, positional, keywords, whole, node):
    if positional and isinstance(positional[0], Function) and whole:
        return bound(positional[0], positional[1:], keywords)
    escape([*positional, *keywords.values()])
    return UNKNOWN


def _method(interpreter, positional, keywords, whole, node):
    if len(positional) == 2 and isinstance(positional[0], Function):
        return bound(positional[0], positional[1:], {})
    return UNKNOWN


KNOWN = {
    "types.SimpleNamespace": _namespace,
    "types.MethodType": _method,
    "builtins.getattr": _getattr,
    "builtins.hasattr": _hasattr,
    "builtins.setattr": _setattr,
    "builtins.delattr": _delattr,
    "builtins.vars": _vars,
    "builtins.isinstance": _isinstance,
    "builtins.len": _length,
    "builtins.bool": _bool,
    "builtins.dict": _dict,
    "builtins.list": _sequence,
    "builtins.tuple": _sequence,
    "builtins.enumerate": _enumerate,
    "builtins.zip": _zip,
    "builtins.range": _range,
    "builtins.object.__new__": _new,
    "builtins.object.__setattr__": _setattr,
    "copy.copy": _copy,
    "copy.deepcopy": _deepcopy,
    "functools.partial": _partial,
}
