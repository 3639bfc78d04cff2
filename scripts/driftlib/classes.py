"""Classes: their bases, members and new objects."""

import ast

from .names import decorators, last_name
from .values import (
    UNKNOWN,
    Class,
    Const,
    External,
    Function,
    Instance,
    ModuleValue,
    escape,
    has_stub,
)

RECORDS = {"Struct", "NamedTuple", "TypedDict"}


class Classes:
    """Mixin of the interpreter: what is known of classes in the checkout."""

    def bases(self, cls: Class) -> tuple[list[Class], bool]:
        """The class and its bases in order, and whether all of them are known."""
        found, whole, todo = [], True, [cls]
        while todo:
            current = todo.pop(0)
            if current in found:
                continue
            found.append(current)
            above = []
            for base in current.node.bases:
                value = self._base(current, base)
                if isinstance(value, Class):
                    known = [each for each in found if each.node is value.node]
                    above += [] if known else [value]
                elif value != External("builtins.object"):
                    whole = False
            todo = above + todo
        return found, whole

    def _base(self, cls: Class, base: ast.expr):
        if isinstance(base, ast.Name):
            scope = cls.scope
            return scope.lookup(base.id) if scope else cls.module.lookup(base.id)
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            owner = cls.module.lookup(base.value.id)
            if isinstance(owner, ModuleValue):
                return owner.module.lookup(base.attr)
        return UNKNOWN

    def member(self, cls: Class, name: str, instance, node):
        """A class's method, property or constant, looked up through its bases."""
        found, whole = self.bases(cls)
        for each in found:
            for part in each.node.body:
                value = self._member_of(each, part, name, instance, node)
                if value is not None:
                    return value
        return UNKNOWN

    def _member_of(self, cls, part, name, instance, node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            if part.name != name:
                return None
            function = Function(part, cls.module, cls.scope, cls)
            named = decorators(part)
            if {"property", "cached_property"} & named:
                if instance is None:
                    return UNKNOWN
                return self.enter_function(function, [instance], {}, True)
            if "setter" in named or "staticmethod" in named:
                return function
            if "classmethod" in named:
                function.arguments = (cls,)
            elif instance is not None:
                function.arguments = (instance,)
            return function
        if isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                constant = isinstance(part.value, ast.Constant)
                return Const(part.value.value) if constant else UNKNOWN
        elif isinstance(part, ast.If | ast.Try | ast.ClassDef):
            if any(getattr(each, "name", None) == name for each in ast.walk(part)):
                return UNKNOWN
        return None

    def _super(self, node: ast.Attribute):
        """The method that super().name means, UNKNOWN when it is elsewhere."""
        inner = node.value
        if not (isinstance(inner, ast.Call) and last_name(inner.func) == "super"):
            return None
        function = self.frame.function
        instance = self.frame.scope.lookup("self")
        if function is None or function.owner is None:
            return UNKNOWN
        if not isinstance(instance, Instance):
            return UNKNOWN
        found, _ = self.bases(instance.cls)
        nodes = [each.node for each in found]
        if function.owner.node not in nodes:
            return UNKNOWN
        for each in found[nodes.index(function.owner.node) + 1 :]:
            for part in each.node.body:
                value = self._member_of(each, part, node.attr, instance, node)
                if value is not None:
                    return value
        return UNKNOWN

    def construct(self, cls: Class, positional, keywords, whole):
        """A new object: its __init__ is followed, a record's fields are set."""
        given = [*positional, *keywords.values()]
        own_test = cls.module is self.test_module
        if cls.node.name in self.patched and not own_test:
            return UNKNOWN
        found, all_known = self.bases(cls)
        methods = {
            getattr(part, "name", "") for each in found for part in each.node.body
        }
        special = "__new__" in methods or any(each.node.keywords for each in found)
        if not whole or special or not (own_test or has_stub(given)):
            escape(given)
            return UNKNOWN
        instance = Instance(cls, {})
        initial = self.member(cls, "__init__", instance, cls.node)
        if isinstance(initial, Function):
            self.enter_function(initial, positional, keywords, whole)
            return instance
        records = {last_name(base) for each in found for base in each.node.bases}
        if "dataclass" in decorators(cls.node) or records & RECORDS:
            fields = [
                part.target.id
                for each in reversed(found)
                for part in each.node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            ]
            instance.attributes.update(zip(fields, positional, strict=False))
            instance.attributes.update(keywords)
            return instance
        if not all_known:
            escape(given)
        return instance
